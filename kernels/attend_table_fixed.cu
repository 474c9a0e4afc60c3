// Those of the presets: `polar-4+4`, `turbo-4`, `kvd-2-fast`.

#include <kvd/declare.cuh>
#include <kvd/bit_groups.cuh>
#include <kvd/lloyd.cuh>
#include <kvd/polar.cuh>
#include <kvd/uniform.cuh>

namespace kvd {

using Polar44Key = FixedPolar<4, 4>;
using Polar44Value = FixedUniform<4, 1, 32>;
using Turbo4Key = FixedLloyd<4>;
using Turbo4Value = FixedUniform<4, 1, FIXED_DIM>;

}  // namespace kvd

KVD_FIXED(polar44, kvd::Polar, kvd::Uniform<kvd::Asymmetric>, kvd::Polar44Key, kvd::Polar44Value)
KVD_FIXED(turbo4, kvd::Lloyd, kvd::Uniform<kvd::Asymmetric>, kvd::Turbo4Key, kvd::Turbo4Value)
KVD_FIXED(kvd2fast, kvd::Groups, kvd::Groups, kvd::FixedSide, kvd::FixedGroups)
