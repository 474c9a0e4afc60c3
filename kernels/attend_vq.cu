// Vector quantization: VecInfer, VQ-LLM's sides.

#include <kvd/declare.cuh>
#include <kvd/vq.cuh>

KVD_ATTEND_ROWS(vq_vq, kvd::Vq, kvd::Vq)
