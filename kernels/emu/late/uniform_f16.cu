#include "declare.cuh"
#include "uniform.cuh"
#include "float.cuh"
KVD_ATTEND_ROWS(uniform_f16, kvd::Uniform<kvd::Asymmetric>, kvd::Float<kvd::F16>)
