// Uniform levels: KIVI, InnerQ.

#include <kvd/declare.cuh>
#include <kvd/hybrid.cuh>
#include <kvd/uniform.cuh>

KVD_ATTEND_ROWS(uniform_uniform, kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>,
                kvd::Tensor<kvd::Uniform<kvd::Asymmetric>>)
KVD_ATTEND_ROWS(hybrid_hybrid, kvd::Tensor<kvd::Hybrid>, kvd::Tensor<kvd::Hybrid>)
