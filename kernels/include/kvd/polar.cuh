// The two channels that RoPE turns together, as angle and radius: code `radius << a | angle`
// (PolarQuant, section 3.2). The table holds the directions of the angles, `{cos, sin}`, and, where
// pages hold no steps, the calibration's step of each pair; pages of `g=` hold f16 steps in scale
// rows of one per pair (docs/format.md "Sides"). CPU reference: kvd-codec/src/side/polar.rs.
#pragma once

#include "codes.cuh"

namespace kvd {

struct Polar {
    static constexpr unsigned SPANS = 2;
    static constexpr bool ODD_WORDS = false;

    KVD_DEVICE static unsigned pairs(const SideShape& side) { return side.dim / 2; }
    KVD_DEVICE static unsigned direction_bytes(const SideShape& side) {
        return 8u << side.angle_bits;
    }
    // Whether the page holds the steps: the table ends with the directions.
    KVD_DEVICE static bool steps_in_page(const SideShape& side) {
        return side.table_bytes == direction_bytes(side);
    }
    KVD_DEVICE static unsigned row_bytes(const SideShape& side) {
        return steps_in_page(side) ? 2 * pairs(side) : 0;
    }

    KVD_DEVICE static uint64_t codes_at(const SideShape& side, const Tile& tile) {
        const unsigned rows = quotient(tile.page_tokens - 1, side.scale_tokens) + 1;
        return uint64_t(rows) * row_bytes(side);
    }

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        const unsigned bytes = row_bytes(side);
        if (part == 0) {
            const unsigned from = quotient(tile.first_row, side.scale_tokens);
            const unsigned to = quotient(tile.first_row + tile.tokens - 1, side.scale_tokens) + 1;
            return {uint64_t(from) * bytes, (to - from) * bytes};
        }
        return code_span(tile, codes_at(side, tile), pairs(side), side.bits);
    }

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        copy_table(table, tables + side.table, side.table_bytes, threads);
    }

    // The radius of a code; `scales` is the first staged scale row.
    KVD_DEVICE static float radius(const SideShape& side, const Tile& tile, const uint8_t* scales,
                                   unsigned token, unsigned pair, unsigned code) {
        const float level = float(code >> side.angle_bits);
        if (!steps_in_page(side)) {
            return level * load_float(tile.table + direction_bytes(side) + 4 * pair);
        }
        const unsigned first = quotient(tile.first_row, side.scale_tokens);
        const unsigned row = quotient(tile.first_row + token, side.scale_tokens) - first;
        return level * f16_value(load16(scales + row * row_bytes(side) + 2 * pair));
    }

    // Cosine (`axis` 0) or sine (1) of a code's angle.
    KVD_DEVICE static float direction(const SideShape& side, const Tile& tile, unsigned code,
                                      unsigned axis) {
        const unsigned angle = code & ((1u << side.angle_bits) - 1);
        return load_float(tile.table + 8 * angle + 4 * axis);
    }

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return tile_codes<Polar>(side, tile, 1, pairs(side), side.bits);
    }

    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const uint8_t* scales = staged_span<Polar>(side, tile, 0);
        const unsigned token = least(lane_index(), tile.tokens - 1);
        each_key_code(codes(side, tile), warps, [&](unsigned pair, unsigned code) {
            const float radius = Polar::radius(side, tile, scales, token, pair, code);
            const unsigned first = side.interleaved ? 2 * pair : pair;
            const unsigned second = side.interleaved ? first + 1 : pair + pairs(side);
            add_score(query, side.dim, first, radius * direction(side, tile, code, 0), scores);
            add_score(query, side.dim, second, radius * direction(side, tile, code, 1), scores);
        });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const uint8_t* scales = staged_span<Polar>(side, tile, 0);
        const unsigned pair = side.interleaved ? position / 2 : position % pairs(side);
        const unsigned axis = side.interleaved ? position % 2 : position / pairs(side);
        accumulate_codes(codes(side, tile), pair, slice, slices, weights, out,
                         [&](unsigned token, unsigned code) {
                             return radius(side, tile, scales, token, pair, code) *
                                    direction(side, tile, code, axis);
                         });
    }
};

}  // namespace kvd
