#include "declare.cuh"
#include "float.cuh"
#include "uniform.cuh"
KVD_ATTEND_ROWS(f16_uniform, kvd::Float<kvd::F16>, kvd::Uniform<kvd::Asymmetric>)
