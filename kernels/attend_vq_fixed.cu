// Vector quantization of the presets: `vecinfer-4`, `vecinfer-2`, `vecinfer-2-reg`.

#include <kvd/declare.cuh>
#include <kvd/vq.cuh>

namespace kvd {

using Vecinfer4 = FixedVq<8, 2>;
using Vecinfer2 = FixedVq<8, 4>;
using Vecinfer2Reg = FixedVq<4, 2>;

}  // namespace kvd

KVD_FIXED(vecinfer4, kvd::Vq, kvd::Vq, kvd::Vecinfer4, kvd::Vecinfer4)
KVD_FIXED(vecinfer2, kvd::Vq, kvd::Vq, kvd::Vecinfer2, kvd::Vecinfer2)
KVD_FIXED(vecinfer2reg, kvd::Vq, kvd::Vq, kvd::Vecinfer2Reg, kvd::Vecinfer2Reg)
