#include "declare.cuh"
#include "hybrid.cuh"
#include "vq.cuh"
KVD_MIXED_ROWS(tensor_hybrid_vq, kvd::Tensor<kvd::Hybrid>, kvd::Tensor<kvd::Vq>)
