#include "declare.cuh"
#include "polar.cuh"
#include "hybrid.cuh"
KVD_MIXED_ROWS(tensor_polar_hybrid, kvd::Tensor<kvd::Polar>, kvd::Tensor<kvd::Hybrid>)
