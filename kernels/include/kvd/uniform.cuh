// Equidistant levels, codes of 1 to 12 bits, a group along tokens of a channel, channels of a token,
// or the page (docs/format.md "Sides"): between minimum and maximum, `minimum + code * step` (KIVI,
// 2402.02750 section 3; KVComp, 2509.00579 section 3.1.1), or around zero, `(code - top) * step`
// (InnerQ eq. 13). Scales are f16 in scale rows: all minima, where there are any, then all steps. CPU
// reference: kvd-codec/src/side/uniform.rs, symmetric.rs. hybrid.cuh mixes both.
#pragma once

#include "codes.cuh"

namespace kvd {

// Pairs of a scale row.
KVD_DEVICE unsigned scale_pairs(const SideShape& side) {
    return (side.dim + side.scale_channels - 1) / side.scale_channels;
}

// Scale rows `from..to` that a tile needs.
KVD_DEVICE Range scale_rows(const SideShape& side, const Tile& tile) {
    const unsigned last = tile.first_row + tile.tokens - 1;
    return {tile.first_row / side.scale_tokens, last / side.scale_tokens + 1};
}

// Scale rows of a page.
KVD_DEVICE unsigned all_scale_rows(const SideShape& side, const Tile& tile) {
    return (tile.page_tokens - 1) / side.scale_tokens + 1;
}

// Minimum and step: four bytes of a pair.
struct Asymmetric {
    static constexpr unsigned PAIR_BYTES = 4;

    KVD_DEVICE static float value(const SideShape&, const uint8_t* row, unsigned pairs,
                                  unsigned pair, unsigned code) {
        const float minimum = f16_value(load16(row + 2 * pair));
        const float step = f16_value(load16(row + 2 * (pairs + pair)));
        return minimum + float(code) * step;
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
        const unsigned first = tile.first_row / side.scale_tokens;
        return scales + ((tile.first_row + token) / side.scale_tokens - first) * row_bytes(side);
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
            return Levels::value(side, scales, pairs, channel / side.scale_channels, code);
        });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const unsigned pairs = scale_pairs(side);
        const unsigned at = position / side.scale_channels;
        const uint8_t* scales = staged_span<Uniform>(side, tile, 0);
        accumulate_codes(codes(side, tile), position, slice, slices, weights, out,
                         [&](unsigned token, unsigned code) {
                             return Levels::value(side, row(side, tile, scales, token), pairs, at,
                                                  code);
                         });
    }
};

}  // namespace kvd
