// Sides with a table of levels or directions: polar, lloyd, bit allocation.

#include <kvd/declare.cuh>
#include <kvd/bitalloc.cuh>
#include <kvd/lloyd.cuh>
#include <kvd/polar.cuh>
#include <kvd/uniform.cuh>

KVD_ATTEND_ROWS(polar_uniform, kvd::Tensor<kvd::Polar>,
                kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
KVD_ATTEND_ROWS(lloyd_uniform, kvd::Tensor<kvd::Lloyd>,
                kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
KVD_ATTEND_ROWS(bitalloc_bitalloc, kvd::Tensor<kvd::BitAlloc>, kvd::Tensor<kvd::BitAlloc>)
