// The best levels for a coordinate of a randomly turned row, and one f16 per row that gives the row
// its length back: `scale * level[code]` (Lloyd 1982, Max 1960; the scalar stage of TurboQuant). The
// table holds the levels, f32 (docs/format.md "Sides"). CPU reference: kvd-codec/src/quantizer/lloyd.rs.
#pragma once

#include "lookup.cuh"

namespace kvd {

struct Lloyd {
    static constexpr unsigned SPANS = 2;
    static constexpr bool ODD_WORDS = false;
    static constexpr unsigned SCALE_BYTES = 2;

    KVD_DEVICE static uint64_t codes_at(const SideShape&, const Tile& tile) {
        return uint64_t(tile.page_tokens) * SCALE_BYTES;
    }

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        if (part == 0) {
            return {uint64_t(tile.first_row) * SCALE_BYTES, tile.tokens * SCALE_BYTES};
        }
        return code_span(tile, codes_at(side, tile), side.dim, side.bits);
    }

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        copy_table(table, tables + side.table, side.table_bytes, threads);
    }

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return tile_codes<Lloyd>(side, tile, 1, side.dim, side.bits);
    }

    // The row's scale is a factor of its whole score.
    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        float sums[ROWS] = {};
        score_codes(codes(side, tile), warps, query, sums, [&](unsigned, unsigned code) {
            return load_float(tile.table + 4 * code);
        });
        const unsigned token = least(lane_index(), tile.tokens - 1);
        const uint8_t* scales = staged_span<Lloyd>(side, tile, 0);
        const float scale = f16_value(load16(scales + SCALE_BYTES * token));
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            scores[row] += scale * sums[row];
        }
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const uint8_t* scales = staged_span<Lloyd>(side, tile, 0);
        accumulate_codes(codes(side, tile), position, slice, slices, weights, out,
                         [&](unsigned token, unsigned code) {
                             const float scale = f16_value(load16(scales + SCALE_BYTES * token));
                             return scale * load_float(tile.table + 4 * code);
                         });
    }
};

// Keys with products of bytes: levels are two each, on steps of 2^-16 of the largest.
template <>
struct Tensor<Lloyd> : LookedUp<Lloyd> {
    using Order = LookupOrder<2>;

    KVD_DEVICE static Order order(const SideShape& side, const Tile& tile) {
        return Order(side, tile, side.dim);
    }

    KVD_DEVICE static void fold(const SideShape& side, const Tile& tile, const float* query,
                                unsigned slot, float (&values)[CODE_GROUP], float&) {
        order(side, tile).fold(slot, values, [&](const Order::Term& term) {
            return query[term.code] * byte_worth(term.byte);
        });
    }

    KVD_DEVICE static float score(const SideShape& side, const Tile& tile, unsigned token,
                                  float sum, float) {
        const uint8_t* scales = staged_span<Lloyd>(side, tile, 0);
        return f16_value(load16(scales + SCALE_BYTES * token)) * (side.entry_unit * sum);
    }
};

}  // namespace kvd
