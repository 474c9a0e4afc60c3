// Equidistant levels, codes of 1 to 12 bits, a group along tokens of a channel, channels of a token,
// or the page (docs/format.md "Sides"): between minimum and maximum, `minimum + code * step` (KIVI,
// 2402.02750 section 3; KVComp, 2509.00579 section 3.1.1), or around zero, `(code - top) * step`
// (InnerQ eq. 13). Scales are f16 in scale rows: all minima, where there are any, then all steps. CPU
// reference: kvd-codec/src/quantizer/uniform.rs, symmetric.rs. hybrid.cuh mixes both.
#pragma once

#include "tensor.cuh"

namespace kvd {

// Pairs of a scale row.
KVD_DEVICE unsigned scale_pairs(const SideShape& side) {
    return quotient(side.dim + side.scale_channels - 1, side.scale_channels);
}

// Scale rows `from..to` that a tile needs.
KVD_DEVICE Range scale_rows(const SideShape& side, const Tile& tile) {
    const unsigned last = tile.first_row + tile.tokens - 1;
    return {quotient(tile.first_row, side.scale_tokens), quotient(last, side.scale_tokens) + 1};
}

// Scale rows of a page.
KVD_DEVICE unsigned all_scale_rows(const SideShape& side, const Tile& tile) {
    return quotient(tile.page_tokens - 1, side.scale_tokens) + 1;
}

// Minimum and step: four bytes of a pair.
struct Asymmetric {
    static constexpr unsigned PAIR_BYTES = 4;

    KVD_DEVICE static float step(const uint8_t* row, unsigned pairs, unsigned pair) {
        return f16_value(load16(row + 2 * (pairs + pair)));
    }

    KVD_DEVICE static Scale scale(const SideShape&, const uint8_t* row, unsigned pairs,
                                  unsigned pair) {
        return {f16_value(load16(row + 2 * pair)), step(row, pairs, pair)};
    }

    // Four pairs of a row, from the one whose minimum is at `row` on; eight bytes are loaded at once.
    KVD_DEVICE static void scales(const uint8_t* row, unsigned pairs, Scale (&scales)[CODE_GROUP]) {
        const uint64_t minima = *reinterpret_cast<const uint64_t*>(row);
        const uint64_t steps = *reinterpret_cast<const uint64_t*>(row + 2 * pairs);
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            scales[at] = {f16_value(uint16_t(minima >> 16 * at)),
                          f16_value(uint16_t(steps >> 16 * at))};
        }
    }

    KVD_DEVICE static float value(const SideShape& side, const uint8_t* row, unsigned pairs,
                                  unsigned pair, unsigned code) {
        const Scale scale = Asymmetric::scale(side, row, pairs, pair);
        return scale.minimum + float(code) * scale.step;
    }
};

// A step alone.
struct Symmetric {
    static constexpr unsigned PAIR_BYTES = 2;

    KVD_DEVICE static float value(const SideShape& side, const uint8_t* row, unsigned,
                                  unsigned pair, unsigned code) {
        return (float(code) - float(side.top)) * f16_value(load16(row + 2 * pair));
    }
};

template <class Levels>
struct Uniform {
    static constexpr unsigned SPANS = 2;
    static constexpr bool ODD_WORDS = false;

    KVD_DEVICE static unsigned row_bytes(const SideShape& side) {
        return scale_pairs(side) * Levels::PAIR_BYTES;
    }

    // Where a page's codes begin.
    KVD_DEVICE static uint64_t codes_at(const SideShape& side, const Tile& tile) {
        return uint64_t(all_scale_rows(side, tile)) * row_bytes(side);
    }

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        const unsigned bytes = row_bytes(side);
        if (part == 0) {
            const Range rows = scale_rows(side, tile);
            return {uint64_t(rows.from) * bytes, (rows.to - rows.from) * bytes};
        }
        return code_span(tile, codes_at(side, tile), side.dim, side.bits);
    }

    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint8_t*, unsigned) {}

    // The staged scale row of a token of the tile; `scales` is the first.
    KVD_DEVICE static const uint8_t* row(const SideShape& side, const Tile& tile,
                                         const uint8_t* scales, unsigned token) {
        const unsigned first = quotient(tile.first_row, side.scale_tokens);
        return scales + (quotient(tile.first_row + token, side.scale_tokens) - first) * row_bytes(side);
    }

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return tile_codes<Uniform>(side, tile, 1, side.dim, side.bits);
    }

    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const unsigned pairs = scale_pairs(side);
        const unsigned token = least(lane_index(), tile.tokens - 1);
        const uint8_t* scales = row(side, tile, staged_span<Uniform>(side, tile, 0), token);
        score_codes(codes(side, tile), warps, query, scores, [&](unsigned channel, unsigned code) {
            return Levels::value(side, scales, pairs, quotient(channel, side.scale_channels), code);
        });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const unsigned pairs = scale_pairs(side);
        const unsigned at = quotient(position, side.scale_channels);
        const uint8_t* scales = staged_span<Uniform>(side, tile, 0);
        accumulate_codes(codes(side, tile), position, slice, slices, weights, out,
                         [&](unsigned token, unsigned code) {
                             return Levels::value(side, row(side, tile, scales, token), pairs, at,
                                                  code);
                         });
    }
};

// Rows of queries begin on sixteens where they are cut.
struct alignas(16) QueryQuad {
    float of[CODE_GROUP];
};

// With products of codes: steps go into the other factor, minima into a separate sum. For keys either every
// channel has a scale, one for all tokens of a tile, or all channels of a token share one; for values all
// channels of a warp share one (kvd-cuda/src/tensor_core.rs ensures it).
template <class Levels>
struct Tensor<Uniform<Levels>> : Uniform<Levels> {
    using Side = Uniform<Levels>;
    static constexpr bool SIGNED = false;
    static constexpr bool BIASED = false;
    static constexpr bool LOOKS_UP = false;
    static constexpr unsigned WEIGHT_SETS = WEIGHT_SETS_MAX;
    static constexpr bool WANTS_WEIGHTS = false;
    static constexpr bool MAY_SCALE_CHANNELS = true;

    KVD_DEVICE static bool scales_channels(const SideShape& side) {
        return side.scale_channels == 1;
    }

    // The scale row of a token, `scales` being the first of the tile.
    KVD_DEVICE static const uint8_t* row_of(const SideShape& side, const uint8_t* scales,
                                            unsigned token) {
        return scales + (side.scale_tokens == 1 ? token * Side::row_bytes(side) : 0);
    }

    KVD_DEVICE static KeyOrder order(const SideShape& side, const Tile& tile) {
        return KeyOrder(side.dim, side.bits, tile.coded);
    }

    // Four channels of a query; their sum is the score of a minimum of 1.
    KVD_DEVICE static void fold(const SideShape&, const Tile&, const float* query,
                                unsigned quad, float (&values)[CODE_GROUP], float& base) {
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            values[at] = query[quad * CODE_GROUP + at];
            base += values[at];
        }
    }

    // Fours of channels that have scales of their own.
    KVD_DEVICE static unsigned scaled_quads(const SideShape& side) {
        return (side.dim + CODE_GROUP - 1) / CODE_GROUP;
    }

    KVD_DEVICE static unsigned scaled_slot(const SideShape& side, unsigned quad) {
        return KeyOrder(side.dim, side.bits, side.stride != 0).slot(quad);
    }

    // Those times their steps; and what the minima add.
    KVD_DEVICE static void scale(const SideShape& side, const Tile& tile, const float* query,
                                 unsigned quad, float (&values)[CODE_GROUP], float& base) {
        const uint8_t* scales = staged_span<Side>(side, tile, 0);
        Scale of[CODE_GROUP];
        Levels::scales(scales + 2 * CODE_GROUP * quad, side.dim, of);
        const QueryQuad four = reinterpret_cast<const QueryQuad*>(query)[quad];
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            const float value = four.of[at];
            values[at] = value * of[at].step;
            base += value * of[at].minimum;
        }
    }

    KVD_DEVICE static int32_t bias(const Tile&, unsigned) { return 0; }

    KVD_DEVICE static float score(const SideShape& side, const Tile& tile, unsigned token,
                                  float sum, float base) {
        if (scales_channels(side)) {
            return sum + base;
        }
        const uint8_t* scales = row_of(side, staged_span<Side>(side, tile, 0), token);
        const Scale scale = Levels::scale(side, scales, 1, 0);
        return scale.step * sum + scale.minimum * base;
    }

    KVD_DEVICE static void add_rests(const SideShape&, const Tile&, const float*, unsigned,
                                     unsigned, float (&)[2]) {}

    KVD_DEVICE static unsigned weight_sets(const SideShape& side) { return scale_pairs(side); }
    // The set of weights that a channel's codes are multiplied with.
    KVD_DEVICE static unsigned weight_set(const SideShape& side, unsigned channel) {
        return quotient(channel, side.scale_channels);
    }

    // Scales of a token's codes, by set.
    KVD_DEVICE static void weight_scales(const SideShape& side, const Tile& tile, unsigned token,
                                         Scale (&scales)[WEIGHT_SETS_MAX]) {
        const unsigned pairs = scale_pairs(side);
        const uint8_t* first = staged_span<Side>(side, tile, 0);
        const uint8_t* row = row_of(side, first, least(token, tile.tokens - 1));
        // Rows of four are sixteen bytes, and begin on sixteens as pages do.
        if (pairs == CODE_GROUP) {
            return Levels::scales(row, pairs, scales);
        }
#pragma unroll
        for (unsigned pair = 0; pair < WEIGHT_SETS_MAX; pair++) {
            scales[pair] = Levels::scale(side, row, pairs, least(pair, pairs - 1));
        }
    }

    KVD_DEVICE static unsigned place_bytes(const SideShape&) { return 0; }
    KVD_DEVICE static void prepare_places(const SideShape&, const uint8_t*, uint32_t*) {}
    KVD_DEVICE static unsigned places_of(const SideShape& side, const uint32_t*) {
        return side.dim;
    }
    KVD_DEVICE static uint32_t channel(const SideShape&, const uint32_t*, unsigned place) {
        return place;
    }
    KVD_DEVICE static float step(const SideShape&, const Tile&) { return 1; }
    KVD_DEVICE static float step_of(const SideShape&, const uint8_t*) { return 1; }
    KVD_DEVICE static float channel_step(const SideShape&, const uint32_t*, unsigned) { return 1; }
    template <class Add>
    KVD_DEVICE static void add_rests(const SideShape&, const Tile&, const uint32_t*, const float*,
                                     Add) {}
};

}  // namespace kvd
