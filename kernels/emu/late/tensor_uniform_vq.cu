#include "declare.cuh"
#include "uniform.cuh"
#include "vq.cuh"
KVD_MIXED_ROWS(tensor_uniform_vq, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>, kvd::Tensor<kvd::Vq>)
