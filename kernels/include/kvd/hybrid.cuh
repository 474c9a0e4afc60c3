// Uniform levels that are asymmetric or symmetric group by group, whichever errs less (InnerQ,
// section 4.1.2). Scales of a page are a mask, a bit per group, set for symmetric ones; then scale
// rows of all words and all f16 steps. A word holds the zero point of an asymmetric group, an f32, or
// the signs of a symmetric one, a bit per value (docs/format.md "Sides"). CPU reference:
// kvd-codec/src/side/hybrid.rs.
#pragma once

#include "uniform.cuh"

namespace kvd {

struct Hybrid {
    static constexpr unsigned SPANS = 3;
    static constexpr bool ODD_WORDS = true;
    // A word holds at least a zero point.
    static constexpr unsigned WORD_BYTES_MIN = 4;
    static constexpr unsigned STEP_BYTES = 2;

    KVD_DEVICE static unsigned word_bytes(const SideShape& side, const Tile& tile) {
        const unsigned values = least(side.scale_tokens, tile.page_tokens) * side.scale_channels;
        return most((values + 7) / 8, WORD_BYTES_MIN);
    }

    KVD_DEVICE static unsigned row_bytes(const SideShape& side, const Tile& tile) {
        return scale_pairs(side) * (word_bytes(side, tile) + STEP_BYTES);
    }

    KVD_DEVICE static unsigned mask_bytes(const SideShape& side, const Tile& tile) {
        return (all_scale_rows(side, tile) * scale_pairs(side) + 7) / 8;
    }

    KVD_DEVICE static uint64_t codes_at(const SideShape& side, const Tile& tile) {
        const uint64_t rows = uint64_t(all_scale_rows(side, tile)) * row_bytes(side, tile);
        return mask_bytes(side, tile) + rows;
    }

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        const unsigned pairs = scale_pairs(side);
        const Range rows = scale_rows(side, tile);
        const unsigned bytes = row_bytes(side, tile);
        if (part == 0) {
            const unsigned first = rows.from * pairs / 8;
            return {first, (rows.to * pairs + 7) / 8 - first};
        }
        if (part == 1) {
            return {mask_bytes(side, tile) + uint64_t(rows.from) * bytes, (rows.to - rows.from) * bytes};
        }
        return code_span(tile, codes_at(side, tile), side.dim, side.bits);
    }

    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint8_t*, unsigned) {}

    // Where the scales of a tile stand.
    struct Scales {
        const uint8_t* mask;
        const uint8_t* rows;
        unsigned pairs;
        unsigned word_bytes;
        unsigned row_bytes;
        // The page's group whose bit is the staged mask's first, and the first staged scale row.
        unsigned first_group;
        unsigned first_row;

        KVD_DEVICE Scales(const SideShape& side, const Tile& tile)
            : mask(staged_span<Hybrid>(side, tile, 0)),
              rows(staged_span<Hybrid>(side, tile, 1)),
              pairs(scale_pairs(side)),
              word_bytes(Hybrid::word_bytes(side, tile)),
              row_bytes(Hybrid::row_bytes(side, tile)),
              first_row(quotient(tile.first_row, side.scale_tokens)) {
            first_group = first_row * pairs / 8 * 8;
        }

        // The coefficient of a channel of a token of the tile.
        KVD_DEVICE float value(const SideShape& side, const Tile& tile, unsigned token,
                               unsigned channel, unsigned code) const {
            const unsigned row = quotient(tile.first_row + token, side.scale_tokens);
            const unsigned pair = quotient(channel, side.scale_channels);
            const uint8_t* at = rows + (row - first_row) * row_bytes;
            const uint8_t* word = at + pair * word_bytes;
            const float step = f16_value(load16_any(at + pairs * word_bytes + STEP_BYTES * pair));
            const float level = float(code) * step;
            const unsigned group = row * pairs + pair - first_group;
            if ((mask[group / 8] >> group % 8 & 1) == 0) {
                return level + f32_value(load32_any(word));
            }
            const unsigned within = tile.first_row + token - row * side.scale_tokens;
            const unsigned bit = within * side.scale_channels + channel % side.scale_channels;
            return word[bit / 8] >> bit % 8 & 1 ? -level : level;
        }
    };

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return tile_codes<Hybrid>(side, tile, 2, side.dim, side.bits);
    }

    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const Scales scales(side, tile);
        const unsigned token = least(lane_index(), tile.tokens - 1);
        score_codes(codes(side, tile), warps, query, scores, [&](unsigned channel, unsigned code) {
            return scales.value(side, tile, token, channel, code);
        });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const Scales scales(side, tile);
        accumulate_codes(codes(side, tile), position, slice, slices, weights, out,
                         [&](unsigned token, unsigned code) {
                             return scales.value(side, tile, token, position, code);
                         });
    }
};

}  // namespace kvd
