#include "declare.cuh"
#include "vq.cuh"
#include "uniform.cuh"
KVD_MIXED_ROWS(tensor_vq_uniform, kvd::Tensor<kvd::Vq>, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
