// The kernels that exist: which sides meet which, for one, four and eight query rows at a time. The
// host names them `kvd_attend_<keys>_<values>_<rows>` (crates/kvd-cuda/src/launch.rs).

#include <kvd/attend.cuh>
#include <kvd/float.cuh>
#include <kvd/merge.cuh>
#include <kvd/uniform.cuh>
#include <kvd/vq.cuh>

#define KVD_ATTEND(name, Key, Value, rows)                                                       \
    KVD_KERNEL(kvd_attend_##name##_##rows, kvd::ATTEND_THREADS, kvd::AttendParameters,           \
               (kvd::attend<Key, Value, rows>))
#define KVD_ATTEND_ROWS(name, Key, Value)                                                        \
    KVD_ATTEND(name, Key, Value, 1)                                                              \
    KVD_ATTEND(name, Key, Value, 4)                                                              \
    KVD_ATTEND(name, Key, Value, 8)

KVD_ATTEND_ROWS(f32_f32, kvd::Float<kvd::F32>, kvd::Float<kvd::F32>)
KVD_ATTEND_ROWS(f16_f16, kvd::Float<kvd::F16>, kvd::Float<kvd::F16>)
KVD_ATTEND_ROWS(bf16_bf16, kvd::Float<kvd::Bf16>, kvd::Float<kvd::Bf16>)
KVD_ATTEND_ROWS(fp8_fp8, kvd::Fp8, kvd::Fp8)
KVD_ATTEND_ROWS(uniform_uniform, kvd::Uniform, kvd::Uniform)
KVD_ATTEND_ROWS(vq_vq, kvd::Vq, kvd::Vq)
KVD_ATTEND_ROWS(fp8_uniform, kvd::Fp8, kvd::Uniform)

KVD_KERNEL(kvd_merge, kvd::MERGE_THREADS, kvd::MergeParameters, kvd::merge)
