#include "declare.cuh"
#include "bitalloc.cuh"
#include "uniform.cuh"
KVD_MIXED_ROWS(tensor_bitalloc_uniform, kvd::Tensor<kvd::BitAlloc>, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
