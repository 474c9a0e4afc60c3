// Uniform levels: KIVI, InnerQ.

#include <kvd/declare.cuh>
#include <kvd/hybrid.cuh>
#include <kvd/uniform.cuh>

KVD_TENSOR_ROWS(uniform_uniform, kvd::Uniform<kvd::Asymmetric>, kvd::Uniform<kvd::Asymmetric>)
KVD_TENSOR_ROWS(hybrid_hybrid, kvd::Hybrid, kvd::Hybrid)
