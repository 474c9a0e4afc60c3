// Uniform levels that are asymmetric or symmetric group by group, whichever errs less (InnerQ,
// section 4.1.2). Scales of a page are a mask, a bit per group, set for symmetric ones; then scale
// rows of all words and all f16 steps. A word holds the zero point of an asymmetric group, an f32, or
// the signs of a symmetric one, a bit per value (docs/format.md "Sides"). CPU reference:
// kvd-codec/src/quantizer/hybrid.rs.
#pragma once

#include "unpack.cuh"
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
struct ScalesSums<Tensor<Hybrid>> {
    static constexpr bool value = true;
    using Sum = float;
};

// A lane's words of a step are of its two quads, neighbours in turn: a term of tokens of values, and of
// channels of keys.
template <>
struct TokenOrder<Tensor<Hybrid>> {
    KVD_DEVICE static unsigned term(unsigned at) {
        const unsigned lane = at / (2 * CODE_GROUP);
        const unsigned quad = at / CODE_GROUP % 2;
        const unsigned of_quad = at % CODE_GROUP;
        return (of_quad / 2 * CODE_GROUP + lane) * CODE_GROUP + of_quad % 2 * 2 + quad;
    }
    // The other way round.
    KVD_DEVICE static unsigned of_term(unsigned term) {
        const unsigned lane = term / CODE_GROUP % CODE_GROUP;
        const unsigned of_quad = term / STEP_QUADS / 2 * 2 + term % CODE_GROUP / 2;
        return lane * 2 * CODE_GROUP + term % 2 * CODE_GROUP + of_quad;
    }
};

// With products of bytes, of codes with their signs. Of keys a step of the products is of one group of
// each token, of values a tile is of one group of each channel (kvd-cuda/src/tensor_core.rs sees to it), so
// sums of integers meet steps at once, as floats. Zero points are multiplied with the sums of what their
// groups' codes are multiplied with, by one lane for each.
template <>
struct Tensor<Hybrid> : Hybrid {
    static constexpr bool SIGNED = true;
    static constexpr bool BIASED = false;
    static constexpr bool LOOKS_UP = false;
    static constexpr unsigned WEIGHT_SETS = 0;
    static constexpr bool WANTS_WEIGHTS = false;
    static constexpr bool MAY_SCALE_CHANNELS = false;

    // Whether codes and scales of all tiles begin on sixteens, as two bits of 128 channels in groups of
    // 32 do in pages of whole tiles: they are then read as they lie.
    KVD_DEVICE static bool is_plain(const SideShape& side, const Tile& tile, unsigned group) {
        return side.bits == 2 && side.dim == 4 * STEP_TERMS && group == STEP_TERMS &&
               tile.page_tokens % TILE_TOKENS == 0;
    }

    // Both words of codes of two bits: nibbles of a first and a second quad in turn, and their signs, a
    // nibble of each. A code and its sign select the byte that they stand for.
    KVD_DEVICE static void signed_words(uint32_t nibbles, uint32_t signs, uint32_t (&words)[2]) {
        const uint32_t some = signs * 0x10004u;
        const uint32_t apart = (some | some << 7) & 0x44444444u;
        const uint32_t bytes = (nibbles & 0x33333333u) | apart;
        words[0] = bytes_at(0x03020100, 0xFDFEFF00, bytes);
        words[1] = bytes_at(0x03020100, 0xFDFEFF00, bytes >> 16);
    }
    // Nibbles of two words, the low ones of each byte of the first and the high ones of the second.
    KVD_DEVICE static uint32_t nibbles_of(uint32_t low, uint32_t high) {
        return (low & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
    }

    // Four codes below 128 with their signs, the low bits of a word.
    KVD_DEVICE static uint32_t with_signs(uint32_t codes, uint32_t signs) {
        const uint32_t negative = ((signs & 15) * 0x00204081u & 0x01010101u) * 255;
        const uint32_t turned = (0x80808080u - codes) ^ 0x80808080u;
        return (codes & ~negative) | (turned & negative);
    }
    // Both words of any codes: those of a token of keys, or of a channel of values, from a channel or a
    // token on.
    template <bool IS_KEY>
    KVD_DEVICE static void any_words(const Codes& codes, unsigned column, unsigned first,
                                     uint32_t signs, uint32_t (&words)[2]) {
        const auto element = [&](unsigned at) {
            return IS_KEY ? codes.key_element(column, at) : codes.value_element(at, column);
        };
        uint32_t quads[2] = {};
#pragma unroll
        for (unsigned quad = 0; quad < 2; quad++) {
            const unsigned start = first + quad * CODE_GROUP;
            if (codes.words()) {
                quads[quad] = codes.four(element(start)).low;
            } else {
#pragma unroll 1
                for (unsigned at = 0; at < CODE_GROUP; at++) {
                    const bool is_there = (IS_KEY ? column : start + at) < codes.tokens;
                    quads[quad] |= (is_there ? codes.one(element(start + at)) : 0) << 8 * at;
                }
            }
            quads[quad] = with_signs(quads[quad], signs >> CODE_GROUP * quad);
        }
        words[0] = bytes_of(quads[0], quads[1], 0x5140);
        words[1] = bytes_of(quads[0], quads[1], 0x7362);
    }
    // Signs of the eight codes from number `first` of a group on, of which none is behind the last; none
    // where they have none.
    KVD_DEVICE static uint32_t signs_of(const Scales::Group& group, unsigned first, bool is_there) {
        return group.is_signed && is_there ? group.word[first / 8] : 0;
    }

    // A lane's part of a tile of keys: codes of token `token`, steps of tokens `first` and the next.
    struct PlainKeys {
        // Nibbles of both quads of groups 0 and 1, and of 2 and 3.
        uint32_t nibbles[2];
        TwoWords words[2];
        TwoWords steps[2];
        unsigned mask;

        KVD_DEVICE PlainKeys(const SideShape& side, const Tile& tile, unsigned token,
                             unsigned first) {
            const uint8_t* codes = staged_span<Hybrid>(side, tile, 2);
            const uint8_t* mine = codes + (2 * lane_word() * TILE_TOKENS + token) * CODE_GROUP;
            const uint32_t one = load32(mine);
            const uint32_t other = load32(mine + TILE_TOKENS * CODE_GROUP);
            nibbles[0] = nibbles_of(one, other << 4);
            nibbles[1] = nibbles_of(one >> 4, other);
            const uint8_t* rows = staged_span<Hybrid>(side, tile, 1);
            words[0] = pair(rows + token * ROW_BYTES);
            words[1] = pair(rows + token * ROW_BYTES + sizeof(TwoWords));
            steps[0] = pair(rows + first * ROW_BYTES + STEPS_AT);
            steps[1] = pair(rows + (first + 1) * ROW_BYTES + STEPS_AT);
            mask = staged_span<Hybrid>(side, tile, 0)[token / 2] >> token % 2 * 4;
        }

        // Steps: a constant, so that arrays of groups stay in registers.
        KVD_DEVICE static unsigned count(const SideShape&) { return 4; }
        // Words of four groups, then their steps.
        static constexpr unsigned STEPS_AT = 4 * WORD_BYTES_MIN;
        static constexpr unsigned ROW_BYTES = STEPS_AT + 4 * STEP_BYTES;
        KVD_DEVICE static TwoWords pair(const uint8_t* at) {
            return *reinterpret_cast<const TwoWords*>(at);
        }

        // Words of a step, what scales their sums, and the zero point.
        KVD_DEVICE float step(unsigned step, uint32_t (&codes)[2], float (&scale)[2]) const {
            const uint32_t word = words[step / 2].word[step % 2];
            const bool is_signed = (mask & 1u << step) != 0;
            const uint32_t signs = bytes_of(word, 0, 0x4440 + lane_word());
            signed_words(nibbles[step / 2] >> 2 * (step % 2), is_signed ? signs : 0, codes);
#pragma unroll
            for (unsigned at = 0; at < 2; at++) {
                scale[at] = f16_value(uint16_t(steps[at].word[step / 2] >> 16 * (step % 2)));
            }
            return is_signed ? 0 : f32_value(word);
        }
    };

    // For any shape.
    struct AnyKeys {
        const SideShape& side;
        const Tile& tile;
        unsigned token;
        unsigned first;
        Scales scales;
        Codes codes;

        KVD_DEVICE AnyKeys(const SideShape& side, const Tile& tile, unsigned token, unsigned first)
            : side(side),
              tile(tile),
              token(token),
              first(first),
              scales(side, tile),
              codes(Hybrid::codes(side, tile)) {}
        KVD_DEVICE static unsigned count(const SideShape& side) { return side.dim / STEP_TERMS; }

        KVD_DEVICE Scales::Group group(unsigned token, unsigned pair) const {
            return scales.group(side, tile, least(token, tile.tokens - 1), pair);
        }
        KVD_DEVICE float step(unsigned step, uint32_t (&words)[2], float (&scale)[2]) const {
            const unsigned pair = quotient(step * STEP_TERMS, side.scale_channels);
            const unsigned channel = step * STEP_TERMS + 2 * CODE_GROUP * lane_word();
            const Scales::Group mine = group(token, pair);
            const uint32_t signs = signs_of(mine, channel - pair * side.scale_channels, true);
            any_words<true>(codes, token, channel, signs, words);
            scale[0] = group(first, pair).step;
            scale[1] = group(first + 1, pair).step;
            return mine.zero();
        }
    };

    // A lane's part of a tile of values: codes of channels from `own` on, one a block, steps of two
    // columns of each block, which are eight channels from `first` on.
    struct PlainValues {
        static constexpr unsigned BLOCKS = 4;
        const uint8_t* masks;
        const uint8_t* scales;
        FourWords rows[2];
        FourWords words;
        FourWords steps;
        unsigned mask;

        KVD_DEVICE PlainValues(const SideShape& side, const Tile& tile, unsigned own,
                               unsigned first)
            : masks(staged_span<Hybrid>(side, tile, 0)), scales(staged_span<Hybrid>(side, tile, 1)) {
            const uint8_t* codes = staged_span<Hybrid>(side, tile, 2) + own * CODE_GROUP;
            rows[0] = four(codes);
            rows[1] = four(codes + side.dim * CODE_GROUP);
            words = four(scales + own * WORD_BYTES_MIN);
            steps = four(scales + side.dim * WORD_BYTES_MIN + first * STEP_BYTES);
            mask = masks[own / 8] >> own % 8;
        }
        KVD_DEVICE static FourWords four(const uint8_t* at) {
            return *reinterpret_cast<const FourWords*>(at);
        }

        // Words of a block, and what scales the sums of its two columns.
        KVD_DEVICE void block(unsigned block, uint32_t (&codes)[2], float (&scale)[2]) const {
            const unsigned shift = 2 * lane_word();
            const uint32_t high = rows[1].word[block];
            const uint32_t turned = high << (CODE_GROUP - shift) % 32 | high >> (shift - CODE_GROUP) % 32;
            const uint32_t nibbles = nibbles_of(rows[0].word[block] >> shift, turned);
            const bool is_signed = (mask & 1u << block) != 0;
            const uint32_t signs = bytes_of(words.word[block], 0, 0x4440 + lane_word());
            signed_words(nibbles, is_signed ? signs : 0, codes);
#pragma unroll
            for (unsigned at = 0; at < 2; at++) {
                const unsigned half = at * BLOCKS + block;
                scale[at] = f16_value(uint16_t(steps.word[half / 2] >> 16 * (half % 2)));
            }
        }
        // The zero point of a channel.
        KVD_DEVICE float zero(unsigned channel) const {
            const bool is_signed = (masks[channel / 8] & 1u << channel % 8) != 0;
            const float word = load_float(scales + channel * WORD_BYTES_MIN);
            return is_signed ? 0 : word;
        }
    };

    // Words of a block of any values, of channel `own`; steps of two channels; and a zero point.
    KVD_DEVICE static void any_block(const SideShape& side, const Tile& tile, unsigned own,
                                     const unsigned (&channel)[2], uint32_t (&words)[2],
                                     float (&scale)[2]) {
        const Scales scales(side, tile);
        const unsigned token = 2 * CODE_GROUP * lane_word();
        const unsigned within = tile.first_row - quotient(tile.first_row, side.scale_tokens) * side.scale_tokens;
        const Scales::Group mine = scales.group(side, tile, 0, own);
        const uint32_t signs = signs_of(mine, within + token, token < tile.tokens);
        any_words<false>(Hybrid::codes(side, tile), own, token, signs, words);
#pragma unroll
        for (unsigned at = 0; at < 2; at++) {
            scale[at] = scales.group(side, tile, 0, channel[at]).step;
        }
    }

    KVD_DEVICE static float any_zero(const SideShape& side, const Tile& tile, unsigned channel) {
        return Scales(side, tile).group(side, tile, 0, channel).zero();
    }

    // Queries in the order of a lane's codes.
    KVD_DEVICE static SpreadOrder order(const SideShape& side, const Tile&) {
        return {side.dim / CODE_GROUP};
    }
    KVD_DEVICE static void fold(const SideShape&, const Tile&, const float* query, unsigned quad,
                                float (&values)[CODE_GROUP], float&) {
        const float* of_step = query + quad / STEP_QUADS * STEP_TERMS;
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            const unsigned term = quad % STEP_QUADS * CODE_GROUP + at;
            values[at] = of_step[TokenOrder<Tensor>::of_term(term)];
        }
    }
    KVD_DEVICE static int32_t bias(const Tile&, unsigned) { return 0; }

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
};

}  // namespace kvd
