#include "declare.cuh"
#include "uniform.cuh"
#include "uniform.cuh"
KVD_ATTEND_ROWS(symmetric_symmetric, kvd::Uniform<kvd::Symmetric>, kvd::Uniform<kvd::Symmetric>)
