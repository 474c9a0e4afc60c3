// Shapes that a kernel has as constants: those of seven presets, for heads of 128 channels. Where it need not
// ask how wide codes are, which channels share a scale, or how many steps a product takes, a tile takes
// about half of the instructions (ADR 13). crates/kvd-cuda/src/specialized.rs has the same constants and chooses.
#pragma once

#include "page.cuh"

namespace kvd {

constexpr unsigned FIXED_DIM = 128;

struct FixedSide {
    KVD_DEVICE static SideShape of(const SideShape& given) {
        SideShape side = given;
        side.dim = FIXED_DIM;
        side.stride = 0;
        return side;
    }
};

// Groups of coefficients of one width, of values each in one place.
struct FixedGroups {
    KVD_DEVICE static SideShape of(const SideShape& given) {
        SideShape side = FixedSide::of(given);
        side.spread_places = FIXED_DIM;
        return side;
    }
};

// Uniform and hybrid: bits, tokens and channels that share a scale.
template <unsigned BITS, unsigned TOKENS, unsigned CHANNELS>
struct FixedUniform {
    KVD_DEVICE static SideShape of(const SideShape& given) {
        SideShape side = FixedSide::of(given);
        side.bits = BITS;
        side.scale_tokens = TOKENS;
        side.scale_channels = CHANNELS;
        return side;
    }
};

// One codebook of one stage, of entries of so many channels, which all stand in shared memory, each the same
// number of times, or in registers.
template <unsigned BITS, unsigned CHANNELS>
struct FixedVq {
    KVD_DEVICE static SideShape of(const SideShape& given) {
        SideShape side = FixedSide::of(given);
        side.bits = BITS;
        side.book_dim = CHANNELS;
        side.entry_bytes = CHANNELS;
        side.stages = 1;
        side.sets = 1;
        side.entry_count = 1u << BITS;
        return side;
    }
};

// Levels by code alone.
template <unsigned BITS>
struct FixedLloyd {
    KVD_DEVICE static SideShape of(const SideShape& given) {
        SideShape side = FixedSide::of(given);
        side.bits = BITS;
        side.entry_bytes = 2;
        side.entry_count = 1u << BITS;
        side.sets = 1;
        return side;
    }
};

// Polar, where the steps of the radii are the calibration's: behind the directions.
template <unsigned ANGLE_BITS, unsigned RADIUS_BITS>
struct FixedPolar {
    KVD_DEVICE static SideShape of(const SideShape& given) {
        SideShape side = FixedSide::of(given);
        side.bits = ANGLE_BITS + RADIUS_BITS;
        side.angle_bits = ANGLE_BITS;
        side.table_bytes = (8u << ANGLE_BITS) + 4 * FIXED_DIM / 2;
        side.entry_bytes = 4;
        side.entry_count = 1u << side.bits;
        side.sets = 1;
        return side;
    }
};

// Constants of a pair of sides.
template <class Key, class Value>
struct Fixed {
    KVD_DEVICE static SideShape key(const SideShape& side) { return Key::of(side); }
    KVD_DEVICE static SideShape value(const SideShape& side) { return Value::of(side); }
};

}  // namespace kvd
