// Uniform levels that are asymmetric or symmetric group by group, whichever errs less (InnerQ,
// section 4.1.2). Scales of a page are a mask, a bit per group, set for symmetric ones; then scale
// rows of all words and all f16 steps. A word holds the zero point of an asymmetric group, an f32, or
// the signs of a symmetric one, a bit per value (docs/format.md "Sides"). CPU reference:
// kvd-codec/src/side/hybrid.rs.
#pragma once

#include "spread.cuh"
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

        // A group, of a token of the tile: its word, and whether that holds signs; its step.
        struct Group {
            const uint8_t* word;
            bool is_signed;
            float step;

            KVD_DEVICE float zero() const { return is_signed ? 0 : f32_value(load32_any(word)); }
        };

        KVD_DEVICE Group group(const SideShape& side, const Tile& tile, unsigned token,
                               unsigned pair) const {
            const unsigned row = quotient(tile.first_row + token, side.scale_tokens);
            const uint8_t* at = rows + (row - first_row) * row_bytes;
            const unsigned number = row * pairs + pair - first_group;
            return {at + pair * word_bytes, (mask[number / 8] >> number % 8 & 1) != 0,
                    f16_value(load16_any(at + pairs * word_bytes + STEP_BYTES * pair))};
        }

        // Which bit of a group's word is of a channel of a token.
        KVD_DEVICE static unsigned bit(const SideShape& side, const Tile& tile, unsigned token,
                                       unsigned channel) {
            const unsigned row = quotient(tile.first_row + token, side.scale_tokens);
            const unsigned within = tile.first_row + token - row * side.scale_tokens;
            const unsigned of_group = channel - quotient(channel, side.scale_channels) * side.scale_channels;
            return within * side.scale_channels + of_group;
        }

        // The coefficient of a channel of a token of the tile.
        KVD_DEVICE float value(const SideShape& side, const Tile& tile, unsigned token,
                               unsigned channel, unsigned code) const {
            const Group of = group(side, tile, token, quotient(channel, side.scale_channels));
            const float level = float(code) * of.step;
            if (!of.is_signed) {
                return level + of.zero();
            }
            const unsigned at = bit(side, tile, token, channel);
            return of.word[at / 8] >> at % 8 & 1 ? -level : level;
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

template <>
struct Spreads<Tensor<Hybrid>> {
    static constexpr bool value = true;
    static constexpr bool of_runs = false;
    static constexpr bool stages = false;
};

// With products of bytes, of codes with their signs. Of keys a step of the products is of one group of
// each token, whose step and zero point its sum meets at once; of values a tile is of one group of each
// channel (kvd-cuda/src/spread.rs sees to it). Both stand as floats behind the bytes of a tile: of keys
// `[steps of the products, tokens]`, of values by channel, all steps before all zero points.
template <>
struct Tensor<Hybrid> : Hybrid {
    static constexpr bool SIGNED = true;
    static constexpr bool BIASED = false;
    static constexpr bool LOOKS_UP = false;

    // Four codes below 128 with their signs, the low bits of a word.
    KVD_DEVICE static uint32_t with_signs(uint32_t codes, uint32_t signs) {
        const uint32_t negative = ((signs & 15) * 0x00204081u & 0x01010101u) * 255;
        const uint32_t turned = (0x80808080u - codes) ^ 0x80808080u;
        return (codes & ~negative) | (turned & negative);
    }

    // Floats of a tile, of either kind.
    KVD_DEVICE static unsigned scales_of(const SideShape& side, bool is_key) {
        return is_key ? side.dim / STEP_TERMS * TILE_TOKENS : side.dim;
    }
    KVD_DEVICE static const float* scales(const SideShape& side, const Tile& tile, bool is_key) {
        const unsigned bytes = side.spread_bytes - 2 * sizeof(float) * scales_of(side, is_key);
        return reinterpret_cast<const float*>(tile.decoded + bytes);
    }

    // What one thread spreads: of keys the channels of a step of a token, of values the tokens of a
    // channel; and the signs of its codes, none where they have no signs.
    struct Part {
        unsigned token;
        unsigned channel;
        uint32_t signs;
    };

    template <unsigned WIDTH, bool IS_KEY>
    KVD_DEVICE static void spread_words(const SideShape& side, const Codes& codes, const Part& part,
                                        uint8_t* to) {
        const unsigned row = CODE_GROUP * side.dim;
        const unsigned quad = part.channel / CODE_GROUP;
        // Of keys a chunk is of so many fours of channels.
        const unsigned of_chunk = side.dim / STEP_TERMS;
        unsigned chunk = IS_KEY ? quotient(quad, of_chunk) : 0;
        unsigned of = quad - chunk * of_chunk;
        uint32_t bytes[STEP_QUADS];
#pragma unroll
        for (unsigned index = 0; index < STEP_QUADS; index++) {
            const unsigned at = IS_KEY ? of * TILE_TOKENS + part.token : part.channel;
            const SpreadWords<WIDTH> words = {codes.bytes + CODE_GROUP * at, chunk % 2, row};
            bytes[index] = with_signs(words.codes(chunk), part.signs >> CODE_GROUP * index);
            of++;
            if (!IS_KEY || of == of_chunk) {
                chunk++;
                of = 0;
            }
        }
#pragma unroll
        for (unsigned index = 0; index < STEP_QUADS; index++) {
            *reinterpret_cast<uint32_t*>(
                IS_KEY ? spread_key_word(to, (quad + index) * TILE_TOKENS + part.token)
                       : to + (index * side.spread_row + part.channel) * CODE_GROUP) = bytes[index];
        }
    }

    template <bool IS_KEY>
    KVD_DEVICE static void spread_part(const SideShape& side, const Codes& codes, const Part& part,
                                       uint8_t* to) {
        switch (side.bits) {
            case 1: return spread_words<1, IS_KEY>(side, codes, part, to);
            case 2: return spread_words<2, IS_KEY>(side, codes, part, to);
            case 3: return spread_words<3, IS_KEY>(side, codes, part, to);
            case 4: return spread_words<4, IS_KEY>(side, codes, part, to);
            case 5: return spread_words<5, IS_KEY>(side, codes, part, to);
            case 6: return spread_words<6, IS_KEY>(side, codes, part, to);
            default: return spread_words<7, IS_KEY>(side, codes, part, to);
        }
    }

    // The same of codes that are no whole words, one by one.
    template <bool IS_KEY>
    KVD_DEVICE static void spread_any(const SideShape& side, const Codes& codes, const Part& part,
                                      uint8_t* to) {
        for (unsigned index = 0; index < TILE_TOKENS; index++) {
            const unsigned token = part.token + (IS_KEY ? 0 : index);
            const unsigned channel = part.channel + (IS_KEY ? index : 0);
            if (token >= codes.tokens) {
                break;
            }
            const unsigned code = codes.one(IS_KEY ? codes.key_element(token, channel)
                                                   : codes.value_element(token, channel));
            const unsigned row = token / CODE_GROUP * side.spread_row + channel;
            uint8_t* at = IS_KEY ? spread_key_word(to, channel / CODE_GROUP * TILE_TOKENS + token) +
                                       channel % CODE_GROUP
                                 : to + row * CODE_GROUP + token % CODE_GROUP;
            *at = uint8_t((part.signs >> index & 1) != 0 ? 0 - code : code);
        }
    }

    template <bool IS_KEY>
    KVD_DEVICE static void spread(const SideShape& side, const Tile& tile, uint8_t* to) {
        const Scales scales(side, tile);
        const Codes codes = Hybrid::codes(side, tile);
        const bool words = codes.words();
        const unsigned count = scales_of(side, IS_KEY);
        float* floats = reinterpret_cast<float*>(to + side.spread_bytes) - 2 * count;
        const unsigned group = IS_KEY ? side.scale_channels : side.scale_tokens;
        for (unsigned at = thread_index(); at < count; at += ATTEND_THREADS) {
            Part part = {IS_KEY ? at % TILE_TOKENS : 0, IS_KEY ? at / TILE_TOKENS * STEP_TERMS : at, 0};
            const bool is_there = part.token < tile.tokens;
            const unsigned pair = IS_KEY ? quotient(part.channel, group) : at;
            const Scales::Group of = scales.group(side, tile, is_there ? part.token : 0, pair);
            floats[at] = is_there ? of.step : 0;
            floats[count + at] = is_there ? of.zero() : 0;
            if (of.is_signed) {
                const unsigned first = IS_KEY ? part.channel - pair * group
                                              : tile.first_row - quotient(tile.first_row, group) * group;
                part.signs = load_signs(of.word + first / 8, IS_KEY ? TILE_TOKENS : tile.tokens);
            }
            if (words) {
                spread_part<IS_KEY>(side, codes, part, to);
            } else {
                spread_any<IS_KEY>(side, codes, part, to);
            }
        }
    }

    // Signs of the first `count` of 32 codes: words end with their group.
    KVD_DEVICE static uint32_t load_signs(const uint8_t* at, unsigned count) {
        uint32_t signs = 0;
#pragma unroll
        for (unsigned byte = 0; byte < TILE_TOKENS / 8; byte++) {
            signs |= 8 * byte < count ? uint32_t(at[byte]) << 8 * byte : 0;
        }
        return signs;
    }

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return {tile.decoded, 8, tile.tokens, side.spread_row, side.spread_row};
    }
    KVD_DEVICE static SpreadOrder order(const SideShape& side, const Tile&) {
        return {side.spread_row / CODE_GROUP};
    }
    KVD_DEVICE static bool scales_channels(const SideShape&) { return false; }
    KVD_DEVICE static float largest_step(const SideShape&, const Tile&) { return 1; }
    KVD_DEVICE static float largest(const SideShape& side, const Tile&, const float* query) {
        float largest = 0;
        for (unsigned channel = lane_index(); channel < side.dim; channel += WARP_LANES) {
            largest = fmaxf(largest, fabsf(query[channel]));
        }
        return warp_max(largest);
    }
    KVD_DEVICE static void fold(const SideShape&, const Tile&, const float* query, unsigned quad,
                                float (&values)[CODE_GROUP], float&) {
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            values[at] = query[quad * CODE_GROUP + at];
        }
    }

    KVD_DEVICE static int32_t bias(const Tile&, unsigned) { return 0; }

    // Adds what a step of the products is in the scores of tokens `first` and the next. `base`: the sum
    // of the query's channels.
    KVD_DEVICE static void add_step(const SideShape& side, const Tile& tile, unsigned step,
                                    unsigned first, const float (&sums)[2], float base,
                                    float (&scores)[2]) {
        const float* all = scales(side, tile, true);
        const unsigned at = step * TILE_TOKENS + first;
#pragma unroll
        for (unsigned token = 0; token < 2; token++) {
            scores[token] += sums[token] * all[at + token] +
                             base * all[scales_of(side, true) + at + token];
        }
    }
    KVD_DEVICE static float score(const SideShape&, const Tile&, unsigned, float sum, float) {
        return sum;
    }
    KVD_DEVICE static void add_rests(const SideShape&, const Tile&, const float*, unsigned,
                                     unsigned, float (&)[2]) {}

    KVD_DEVICE static void fold(const SideShape&, const Tile&, unsigned,
                                float (&)[2][CODE_GROUP], float&) {}
    KVD_DEVICE static unsigned place_bytes(const SideShape&) { return 0; }
    KVD_DEVICE static void prepare_places(const SideShape&, const uint8_t*, uint32_t*) {}
    KVD_DEVICE static unsigned places_of(const SideShape& side, const uint32_t*) {
        return side.dim;
    }
    // What a tile's products with a channel add, of weights whose sum is `base`.
    KVD_DEVICE static float of_tile(const SideShape& side, const Tile& tile, unsigned channel,
                                    float sum, float base) {
        const float* all = scales(side, tile, false);
        return sum * all[channel] + base * all[side.dim + channel];
    }
};

}  // namespace kvd
