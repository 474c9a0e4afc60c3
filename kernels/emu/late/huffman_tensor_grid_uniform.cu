#include "declare.cuh"
#include "grid.cuh"
#include "uniform.cuh"
KVD_HUFFMAN_ROWS(tensor_grid_uniform, kvd::Tensor<kvd::Grid>, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
