#include "declare.cuh"
#include "polar.cuh"
#include "mma_f16.cuh"
KVD_MIXED_ROWS(tensor_polar_bf16, kvd::Tensor<kvd::Polar>, kvd::Halves<kvd::Float<kvd::Bf16>>)
