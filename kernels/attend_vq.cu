// Vector quantization: VecInfer, VQ-LLM's sides.

#include <kvd/declare.cuh>
#include <kvd/codebook_cache.cuh>

KVD_TENSOR_ROWS(vq_vq, kvd::Vq, kvd::Vq)
// Codebooks for every sub-vector, stages, and values that are not whole numbers of a unit.
KVD_ATTEND_ROWS(vqfloat_vqfloat, kvd::HeldVq, kvd::HeldVq)
