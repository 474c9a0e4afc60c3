// Equidistant levels, `value = minimum + code * step`, codes of 1 to 8 bits, a group along tokens of
// a channel, channels of a token, or the page: KIVI (2402.02750 §3) and KVComp (2509.00579 §3.1.1).
// Scales are f16 in scale rows, all minima, then all steps (docs/format.md "Sides"). CPU
// reference: kvd-codec/src/side/uniform.rs.
#pragma once

#include "codes.cuh"

namespace kvd {

struct Uniform {
    // Pairs of minimum and step in a scale row.
    KVD_DEVICE static unsigned pairs(const SideShape& side) {
        return (side.dim + side.scale_channels - 1) / side.scale_channels;
    }

    // The scale row of a row of the page.
    KVD_DEVICE static unsigned scale_row(const SideShape& side, unsigned row) {
        return row / side.scale_tokens;
    }

    KVD_DEVICE static TileSpans spans(const SideShape& side, unsigned tokens, unsigned tile) {
        const unsigned row_bytes = pairs(side) * 4;
        const unsigned first = tile * TILE_TOKENS;
        const unsigned last = least(tokens, first + TILE_TOKENS) - 1;
        const unsigned from = scale_row(side, first);
        const unsigned rows = scale_row(side, last) + 1 - from;
        TileSpans spans = {uint64_t(from) * row_bytes, rows * row_bytes, 0, 0};
        const unsigned all = scale_row(side, tokens - 1) + 1;
        code_span(spans, uint64_t(all) * row_bytes, tokens, tile, side.dim, side.bits);
        return spans;
    }

    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint16_t*, unsigned) {}

    // The staged scale row of a token of the tile.
    KVD_DEVICE static const uint8_t* row(const SideShape& side, const Tile& tile, unsigned token) {
        const unsigned staged = scale_row(side, tile.first_row);
        return tile.scales + (scale_row(side, tile.first_row + token) - staged) * pairs(side) * 4;
    }

    KVD_DEVICE static float value(const uint8_t* row, unsigned pairs, unsigned pair, unsigned code) {
        const float minimum = f16_value(load16(row + 2 * pair));
        const float step = f16_value(load16(row + 2 * (pairs + pair)));
        return minimum + float(code) * step;
    }

    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const unsigned count = pairs(side);
        const uint8_t* scales = row(side, tile, least(lane_index(), tile.tokens - 1));
        score_codes(Codes{tile.codes, side.bits, tile.tokens, side.dim}, warps, query, scores,
                    [&](unsigned channel, unsigned code) {
                        return value(scales, count, channel / side.scale_channels, code);
                    });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const unsigned count = pairs(side);
        const unsigned at = position / side.scale_channels;
        accumulate_codes(Codes{tile.codes, side.bits, tile.tokens, side.dim}, position, slice,
                         slices, weights, out, [&](unsigned token, unsigned code) {
                             return value(row(side, tile, token), count, at, code);
                         });
    }
};

}  // namespace kvd
