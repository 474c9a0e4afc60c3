// Codes under one step per head, entropy coded by class of coefficient (docs/adr/0005-grid-codec.md,
// docs/format.md "Sides"): `(code - bias) * step`, and what the codes do not hold as outliers. Always
// Huffman codes: huffman.cuh has decoded the tile. CPU reference: kvd-codec/src/side/grid.rs.
#pragma once

#include "outlier.cuh"

namespace kvd {

struct Grid {
    static constexpr unsigned SPANS = 1;
    static constexpr bool ODD_WORDS = false;
    // A channel of the zero class.
    static constexpr unsigned NOWHERE = 0xFFFF;

    KVD_DEVICE static uint64_t codes_at(const SideShape&, const Tile&) { return 0; }
    KVD_DEVICE static Span span(const SideShape&, const Tile&, unsigned) { return {0, 0}; }
    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint8_t*, unsigned) {}

    // The tile's tokens in its chunk.
    KVD_DEVICE static Range tokens(const Tile& tile) {
        const unsigned first = tile.index % CHUNK_TILES * TILE_TOKENS;
        return {first, first + tile.tokens};
    }

    KVD_DEVICE static unsigned end_of(const LaneRun& run) { return run.place + run.len; }

    // A lane per token, quads dealt to the warps; outliers of a token as well.
    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const unsigned token = lane_index();
        if (token >= tile.tokens) {
            return;
        }
        float sums[ROWS] = {};
        const unsigned runs = lane_head(tile.lanes).runs;
        unsigned index = 0;
        for (unsigned place = warp_index() * CODE_GROUP; place < side.stride;
             place += warps * CODE_GROUP) {
            while (index < runs && place >= end_of(lane_run(tile.lanes, index))) {
                index++;
            }
            if (index == runs) {
                break;
            }
            const LaneRun& run = lane_run(tile.lanes, index);
            const unsigned first = place - run.place;
            const unsigned len = least(CODE_GROUP, run.len - first);
            const uint32_t word = load32(tile.decoded + place * TILE_TOKENS + token * CODE_GROUP);
#pragma unroll
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                if (at < len) {
                    const float code = float(int(word >> 8 * at & 255) - run.bias);
                    add_score(query, side.dim, run.first + first + at, code, sums);
                }
            }
        }
        const unsigned row = tokens(tile).from + token;
        each_outlier(*tile.outliers, side.dim, {row, row + 1}, warp_index(), warps,
                     [&](unsigned, unsigned channel, float rest) {
                         add_score(query, side.dim, channel, rest, sums);
                     });
        const float step = lane_head(tile.lanes).step;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            scores[row] += step * sums[row];
        }
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const LaneHead& head = lane_head(tile.lanes);
        const uint32_t channel = load32(tile.lanes + head.channels + 4 * position);
        const unsigned place = channel & 0xFFFF;
        float sums[ROWS] = {};
        if (place != NOWHERE) {
            const int bias = int(channel >> 16);
            const Codes codes = {tile.decoded, 8, tile.tokens, side.stride, side.stride};
            accumulate_codes(codes, place, slice, slices, weights, sums,
                             [&](unsigned, unsigned code) { return float(int(code) - bias); });
        }
        const Range rows = tokens(tile);
        each_outlier(*tile.outliers, side.dim, rows, slice, slices,
                     [&](unsigned token, unsigned at, float rest) {
                         if (at == position) {
                             add_value(weights, token - rows.from, rest, sums);
                         }
                     });
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            out[row] += head.step * sums[row];
        }
    }
};

}  // namespace kvd
