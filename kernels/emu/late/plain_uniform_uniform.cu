#include "declare.cuh"
#include "uniform.cuh"
#include "uniform.cuh"
KVD_ATTEND_ROWS(plain_uniform_uniform, kvd::Uniform<kvd::Asymmetric>, kvd::Uniform<kvd::Asymmetric>)
