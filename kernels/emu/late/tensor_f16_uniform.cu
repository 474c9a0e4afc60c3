#include "declare.cuh"
#include "mma_f16.cuh"
#include "uniform.cuh"
KVD_MIXED_ROWS(tensor_f16_uniform, kvd::Halves<kvd::Float<kvd::F16>>, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
