#include "declare.cuh"
#include "vq.cuh"
#include "uniform.cuh"
KVD_ATTEND_ROWS(vq_uniform, kvd::Vq, kvd::Uniform<kvd::Asymmetric>)
