#include "declare.cuh"
#include "lloyd.cuh"
#include "bitalloc.cuh"
KVD_MIXED_ROWS(tensor_lloyd_bitalloc, kvd::Tensor<kvd::Lloyd>, kvd::Tensor<kvd::BitAlloc>)
