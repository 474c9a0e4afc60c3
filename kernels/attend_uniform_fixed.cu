// Uniform levels of the presets: `kivi-4`, `kivi-2`, `innerq-2`.

#include <kvd/declare.cuh>
#include <kvd/hybrid.cuh>
#include <kvd/tokens.cuh>

// A warp owns tokens: kvd_attend_<codec>_4, which takes fewer rows too.
#define KVD_TOKENS(codec, bits)                                                                  \
    KVD_KERNEL_OF(kvd_attend_##codec##_4, kvd::ATTEND_THREADS, 3, kvd::AttendParameters,         \
                  kvd::attend_tokens<kvd::TokenPages<bits>>)

namespace kvd {

using InnerqKey = FixedUniform<2, 1, 32>;
using InnerqValue = FixedUniform<2, 32, 1>;

}  // namespace kvd

KVD_TOKENS(kivi4, 4)
KVD_TOKENS(kivi2, 2)
KVD_FIXED(innerq2, kvd::Hybrid, kvd::Hybrid, kvd::InnerqKey, kvd::InnerqValue)
