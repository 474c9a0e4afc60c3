// Rows as they came, and FP8.

#include <kvd/declare.cuh>
#include <kvd/mma_f16.cuh>
#include <kvd/merge.cuh>

KVD_ATTEND_ROWS(f32_f32, kvd::Float<kvd::F32>, kvd::Float<kvd::F32>)
KVD_ATTEND_ROWS(f16_f16, kvd::Halves<kvd::Float<kvd::F16>>,
                kvd::Halves<kvd::Float<kvd::F16>>)
KVD_ATTEND_ROWS(bf16_bf16, kvd::Halves<kvd::Float<kvd::Bf16>>,
                kvd::Halves<kvd::Float<kvd::Bf16>>)
KVD_ATTEND_ROWS(fp8_fp8, kvd::Halves<kvd::Fp8>, kvd::Fp8Values)

KVD_KERNEL(kvd_merge, kvd::MERGE_THREADS, kvd::MergeParameters, kvd::merge)
