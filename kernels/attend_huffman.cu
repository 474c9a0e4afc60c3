// Huffman codes: KVComp, and kvd's own grids.

#include <kvd/declare.cuh>
#include <kvd/grid.cuh>
#include <kvd/uniform.cuh>

KVD_HUFFMAN_ROWS(uniform_uniform, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>,
                 kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
KVD_HUFFMAN_ROWS(grid_grid, kvd::Tensor<kvd::Grid>, kvd::Tensor<kvd::Grid>)
