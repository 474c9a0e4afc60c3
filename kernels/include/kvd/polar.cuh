// The two channels that RoPE turns together, as angle and radius: code `radius << a | angle`
// (PolarQuant, section 3.2). The table holds the directions of the angles, `{cos, sin}`, and, where
// pages hold no steps, the calibration's step of each pair; pages of `g=` hold f16 steps in scale
// rows of one per pair (docs/format.md "Sides"). CPU reference: kvd-codec/src/quantizer/polar.rs.
#pragma once

#include "lookup.cuh"

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

    // The channel of a pair's cosines (`axis` 0) or sines (1).
    KVD_DEVICE static unsigned channel(const SideShape& side, unsigned pair, unsigned axis) {
        return side.interleaved ? 2 * pair + axis : pair + axis * pairs(side);
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
            for (unsigned axis = 0; axis < 2; axis++) {
                add_score(query, side.dim, channel(side, pair, axis),
                          radius * direction(side, tile, code, axis), scores);
            }
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

// Keys with products of bytes: radius times cosine and sine are two each, on steps of 2^-16 of the
// largest; the steps of the pairs, one row for all tokens of a tile, go into the queries.
template <>
struct Tensor<Polar> : LookedUp<Polar> {
    using Order = LookupOrder<4>;
    static constexpr bool MAY_SCALE_CHANNELS = true;

    KVD_DEVICE static Order order(const SideShape& side, const Tile& tile) {
        return Order(side, tile, pairs(side));
    }
    KVD_DEVICE static bool scales_channels(const SideShape& side) { return steps_in_page(side); }

    KVD_DEVICE static float step_of_pair(const SideShape& side, const Tile& tile,
                                         const uint8_t* scales, unsigned pair) {
        if (steps_in_page(side)) {
            return f16_value(load16(scales + 2 * pair));
        }
        return load_float(tile.tables + side.table + direction_bytes(side) + 4 * pair);
    }

    KVD_DEVICE static void fold(const SideShape& side, const Tile& tile, const float* query,
                                unsigned slot, float (&values)[CODE_GROUP], float& base) {
        scale(side, tile, query, slot, values, base);
    }

    // Words of both bytes of cosine and sine, of one pair each.
    KVD_DEVICE static unsigned scaled_quads(const SideShape& side) {
        constexpr unsigned OF_CHUNK = 2 * STEP_QUADS;
        return (pairs(side) + OF_CHUNK - 1) / OF_CHUNK * OF_CHUNK;
    }

    KVD_DEVICE static unsigned scaled_slot(const SideShape&, unsigned quad) { return quad; }

    // Queries times the step of a pair, and the unit of a byte: the four of a slot are its cosine's and its
    // sine's.
    KVD_DEVICE static void scale(const SideShape& side, const Tile& tile, const float* query,
                                 unsigned slot, float (&values)[CODE_GROUP], float&) {
        const unsigned pair = order(side, tile).term(slot, 0).code;
        if (pair >= pairs(side)) {
            return;
        }
        const float step = step_of_pair(side, tile, staged_span<Polar>(side, tile, 0), pair);
#pragma unroll
        for (unsigned axis = 0; axis < 2; axis++) {
            const float value = query[Polar::channel(side, pair, axis)] * step;
            values[2 * axis] = value;
            values[2 * axis + 1] = value * byte_worth(1);
        }
    }

    KVD_DEVICE static float score(const SideShape& side, const Tile&, unsigned, float sum, float) {
        return side.entry_unit * sum;
    }
};

}  // namespace kvd
