// Uniform levels of the presets: `kivi-4`, `kivi-2`, `innerq-2`.

#include <kvd/declare.cuh>
#include <kvd/hybrid.cuh>
#include <kvd/uniform.cuh>

namespace kvd {

using Kivi4Key = FixedUniform<4, 32, 1>;
using Kivi4Value = FixedUniform<4, 1, 32>;
using Kivi2Key = FixedUniform<2, 32, 1>;
using Kivi2Value = FixedUniform<2, 1, 32>;
using InnerqKey = FixedUniform<2, 1, 32>;
using InnerqValue = FixedUniform<2, 32, 1>;

}  // namespace kvd

KVD_FIXED(kivi4, kvd::Uniform<kvd::Asymmetric>, kvd::Uniform<kvd::Asymmetric>, kvd::Kivi4Key,
          kvd::Kivi4Value)
KVD_FIXED(kivi2, kvd::Uniform<kvd::Asymmetric>, kvd::Uniform<kvd::Asymmetric>, kvd::Kivi2Key,
          kvd::Kivi2Value)
KVD_FIXED(innerq2, kvd::Hybrid, kvd::Hybrid, kvd::InnerqKey, kvd::InnerqValue)
