// Uniform levels of the presets: `kivi-4`, `kivi-2`, `innerq-2`.

#include <kvd/declare.cuh>
#include <kvd/hybrid.cuh>
#include <kvd/tokens.cuh>

// A warp owns tokens: kvd_attend_<codec>_<rows>, which takes fewer rows too, and the same in heads of 64
// channels, kvd_attend_<codec>_64_<rows>. Eight rows leave room for two thread blocks on a multiprocessor.
#define KVD_TOKENS_OF(codec, bits, channels)                                                     \
    KVD_KERNEL_OF(kvd_attend_##codec##_4, kvd::ATTEND_THREADS, 3, kvd::AttendParameters,         \
                  (kvd::attend_tokens<kvd::TokenPages<bits, channels, 1>>))                      \
    KVD_KERNEL_OF(kvd_attend_##codec##_8, kvd::ATTEND_THREADS, 2, kvd::AttendParameters,         \
                  (kvd::attend_tokens<kvd::TokenPages<bits, channels, 2>>))
#define KVD_TOKENS(codec, bits)                                                                  \
    KVD_TOKENS_OF(codec, bits, 128)                                                              \
    KVD_TOKENS_OF(codec##_64, bits, 64)

namespace kvd {

using InnerqKey = FixedUniform<2, 1, 32>;
using InnerqValue = FixedUniform<2, 32, 1>;

}  // namespace kvd

KVD_TOKENS(kivi4, 4)
KVD_TOKENS(kivi2, 2)
KVD_FIXED(innerq2, kvd::Hybrid, kvd::Hybrid, kvd::InnerqKey, kvd::InnerqValue)
