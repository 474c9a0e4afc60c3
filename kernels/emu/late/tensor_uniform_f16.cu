#include "declare.cuh"
#include "uniform.cuh"
#include "mma_f16.cuh"
KVD_MIXED_ROWS(tensor_uniform_f16, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>, kvd::Halves<kvd::Float<kvd::F16>>)
