// Sides with a table of levels or directions: polar, lloyd, bit allocation.

#include <kvd/declare.cuh>
#include <kvd/bit_groups.cuh>
#include <kvd/lloyd.cuh>
#include <kvd/polar.cuh>
#include <kvd/uniform.cuh>

KVD_TENSOR_ROWS(polar_uniform, kvd::Polar, kvd::Uniform<kvd::Asymmetric>)
KVD_TENSOR_ROWS(lloyd_uniform, kvd::Lloyd, kvd::Uniform<kvd::Asymmetric>)
KVD_TENSOR_ROWS(bitalloc_bitalloc, kvd::BitAlloc, kvd::BitAlloc)
KVD_TENSOR_ROWS(groups_groups, kvd::Groups, kvd::Groups)
