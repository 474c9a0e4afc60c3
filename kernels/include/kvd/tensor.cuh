// Products of codes on tensor cores, of bytes and exact. What codes are multiplied with, queries and
// softmax weights, are whole numbers of 24 bits of a power of two: three digits of a byte each, which
// are rows of the first factor (ADR 8, with one digit more than the CPU, so that small integers stay
// exact and the rest errs as f32 does). Codes are the second factor, four neighbours in a word as pages
// hold them. A side that has such products is `Tensor<Side>`; its header says how.
#pragma once

#include "codes.cuh"

namespace kvd {

template <class Side>
struct Tensor;

// Which term of a step a token's weight is.
template <class Side>
struct TokenOrder {
    KVD_DEVICE static unsigned term(unsigned token) { return token; }
};

// Whether the products of a step of keys, or of a tile of values, meet scales before others are added to them;
// and what sums are then.
template <class Side>
struct ScalesSums {
    static constexpr bool value = false;
    using Sum = int32_t;
};

// Rows, columns of the first factor (rows of the second), and columns of one product.
constexpr unsigned STEP_TERMS = 32;
constexpr unsigned STEP_COLUMNS = 8;
// Neighbours that are one word.
constexpr unsigned STEP_QUADS = STEP_TERMS / CODE_GROUP;
constexpr unsigned DIGITS = 3;
// Up to `FEW_ROWS` query rows have three digits each in the sixteen rows of one product: high ones in the
// first four, low ones in rows 8 to 11, and the middle ones of rows `i` and `2 + i` in rows `4 + i` and
// `12 + i`. More rows take two products: high digits and middle ones, low digits.

// Rows whose middle digits a lane beyond the first four rows has.
constexpr unsigned MIDDLE_ROWS = 2;
// Words of a lane of the first factor, for one step. Of few rows those of one product. Of more: high and
// middle digits of the first four terms, of the other four, then the low digits of both.
template <bool FEW>
constexpr unsigned DIGIT_WORDS = FEW ? 4 : 2 * DIGITS;
// Bits of a whole number without its sign.
constexpr unsigned QUERY_BITS = 22;
// Bits of weights at first: one more has room for later ones.
constexpr unsigned WEIGHT_BITS = 22;
// Weights are whole numbers in the low bits of a float that this was added to, and at most so large.
constexpr float WHOLE_BASE = 8388608.0f;
constexpr uint32_t WHOLE_MAX = 0x4B800000;
// The unit of weights that are below 2.
constexpr float WEIGHT_UNIT = 1.0f / (1u << WEIGHT_BITS);

// Value of code 0, and the distance from one code to the next.
struct Scale {
    float minimum;
    float step;
};

// The row, or the column of codes, that a lane holds; and which words of it.
KVD_DEVICE unsigned lane_row() { return lane_index() / CODE_GROUP; }
KVD_DEVICE unsigned lane_word() { return lane_index() % CODE_GROUP; }

// A power of two as unit: no value up to `largest` is more than `2^bits` units.
KVD_DEVICE float unit_of(float largest, unsigned bits) {
    const unsigned exponent = f32_bits(fminf(largest, 3.0e38f)) >> 23;
    return f32_value((most(exponent, bits + 1) + 1 - bits) << 23);
}
// Its reciprocal.
KVD_DEVICE float per_unit(float unit) { return f32_value((254u << 23) - f32_bits(unit)); }

// Sums of three digits as the number that they are.
KVD_DEVICE float whole(float high, int32_t middle, int32_t low) {
    return high * 65536.0f + float(middle * 256 + low);
}

// The sum of a word's bytes, which have a sign.
KVD_DEVICE int32_t signed_byte_sum(uint32_t word) {
    return int32_t(byte_sum(word ^ 0x80808080u, 0)) - 4 * 128;
}

// Bytes of four whole numbers as words: their high, middle and low digits.
KVD_DEVICE void digits_of(const uint32_t (&wholes)[CODE_GROUP], uint32_t (&digits)[DIGITS]) {
    const uint32_t first = bytes_of(wholes[0], wholes[1], 0x5140);
    const uint32_t second = bytes_of(wholes[2], wholes[3], 0x5140);
    digits[0] = bytes_of(bytes_of(wholes[0], wholes[1], 0x0062),
                         bytes_of(wholes[2], wholes[3], 0x0062), 0x5410);
    digits[1] = bytes_of(first, second, 0x7632);
    digits[2] = bytes_of(first, second, 0x5410);
}

// Digits of values of at most `2^22`, from -128 to 127 each: rounding leaves the number in the low bits
// of a float, to which what makes every digit positive is added.
KVD_DEVICE void signed_digits(const float (&values)[CODE_GROUP], float inverse,
                              uint32_t (&digits)[DIGITS]) {
    uint32_t wholes[CODE_GROUP];
#pragma unroll
    for (unsigned at = 0; at < CODE_GROUP; at++) {
        wholes[at] = f32_bits(fmaf(values[at], inverse, 12582912.0f)) + 0x408080;
    }
    digits_of(wholes, digits);
#pragma unroll
    for (unsigned digit = 0; digit < DIGITS; digit++) {
        digits[digit] ^= 0x80808080u;
    }
}

// Digits of rows as the first factor of products, `[lanes, 4 lanes, words]` of a step. Of few rows lanes
// come first that have high and low digits, then those with middle ones.
template <int ROWS>
struct Factor {
    static constexpr bool FEW = ROWS <= FEW_ROWS;
    static constexpr unsigned MIDDLES = ROWS < int(MIDDLE_ROWS) ? ROWS : MIDDLE_ROWS;
    // Lanes with words of their own, of those that have the same terms.
    static constexpr unsigned LANES = FEW ? ROWS + MIDDLES : ROWS;
    static constexpr unsigned WORDS = DIGIT_WORDS<FEW>;
    static constexpr unsigned STEP_WORDS = LANES * CODE_GROUP * WORDS;

    struct alignas(8) Pair {
        uint32_t word[2];
    };
    struct alignas(16) Four {
        uint32_t word[4];
    };

    // Where a row's digit of a step's four terms is.
    KVD_DEVICE static unsigned word(unsigned row, unsigned digit, unsigned quad) {
        const unsigned half = quad / CODE_GROUP;
        const unsigned lane = quad % CODE_GROUP;
        if (FEW && digit == 1) {
            return ((ROWS + row % MIDDLE_ROWS) * CODE_GROUP + lane) * WORDS + 2 * half +
                   row / MIDDLE_ROWS;
        }
        const unsigned of_digit = FEW ? 2 * half + digit / 2 : digit < 2 ? 2 * half + digit : 4 + half;
        return (row * CODE_GROUP + lane) * WORDS + of_digit;
    }

    // Writes the digits of a row's four terms.
    KVD_DEVICE static void put(uint32_t* step, unsigned row, unsigned quad,
                               const uint32_t (&cut)[DIGITS]) {
#pragma unroll
        for (unsigned digit = 0; digit < DIGITS; digit++) {
            step[word(row, digit, quad)] = cut[digit];
        }
    }
    // With row 0's digits at `first`: less arithmetic, with few rows.
    KVD_DEVICE static void put_few(uint32_t* first, unsigned row, const uint32_t (&cut)[DIGITS]) {
        uint32_t* mine = first + row * CODE_GROUP * WORDS;
        mine[0] = cut[0];
        mine[1] = cut[2];
        first[(ROWS + row % MIDDLE_ROWS) * CODE_GROUP * WORDS + row / MIDDLE_ROWS] = cut[1];
    }

    // Writes those of one term, a whole number in the low bits of a word.
    KVD_DEVICE static void put(uint32_t* step, unsigned row, unsigned term, uint32_t whole) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(step) + term % CODE_GROUP;
#pragma unroll
        for (unsigned digit = 0; digit < DIGITS; digit++) {
            const unsigned at = word(row, digit, term / CODE_GROUP) * CODE_GROUP;
            bytes[at] = uint8_t(whole >> 8 * (DIGITS - 1 - digit));
        }
    }

    // Place of this lane's words. Lanes without a row have another's; their sums are not used.
    KVD_DEVICE static const uint32_t* lane(const uint32_t* step) {
        unsigned row = lane_row() % ROWS;
        if (FEW && lane_row() >= FEW_ROWS) {
            row = ROWS + lane_row() % MIDDLES;
        }
        return step + (row * CODE_GROUP + lane_word()) * WORDS;
    }

    // The words of this lane.
    KVD_DEVICE static void load(const uint32_t* step, uint32_t (&words)[WORDS]) {
        const uint32_t* at = lane(step);
        if constexpr (FEW) {
            const Four four = *reinterpret_cast<const Four*>(at);
#pragma unroll
            for (unsigned word = 0; word < WORDS; word++) {
                words[word] = four.word[word];
            }
        } else {
            const Pair* pairs = reinterpret_cast<const Pair*>(at);
#pragma unroll
            for (unsigned word = 0; word < WORDS; word++) {
                words[word] = pairs[word / 2].word[word % 2];
            }
        }
    }
};

// Value of another lane.
KVD_DEVICE int32_t of_lane(int32_t sum, unsigned lane) {
    return int32_t(KVD_SHUFFLE(uint32_t(sum), lane));
}
KVD_DEVICE float of_lane(float sum, unsigned lane) {
    return f32_value(KVD_SHUFFLE(f32_bits(sum), lane));
}

// Sums of a lane, of its row and two columns: of high digits, then middle ones; of low digits. Integers, or
// floats where they are scaled.
template <bool FEW, class Sum = int32_t>
struct Products {
    Sum upper[4];
    Sum low[2];

    // The high, middle and low one of a column, for this lane's row.
    KVD_DEVICE void digits(unsigned column, Sum (&to)[DIGITS]) const {
        to[0] = upper[column];
        to[1] = upper[2 + column];
        to[2] = low[column];
    }
    // Adds other sums, times the scales of their columns.
    KVD_DEVICE void add(const Products<FEW>& sums, const float (&scale)[2]) {
#pragma unroll
        for (unsigned column = 0; column < 2; column++) {
            upper[column] += float(sums.upper[column]) * scale[column];
            upper[2 + column] += float(sums.upper[2 + column]) * scale[column];
            low[column] += float(sums.low[column]) * scale[column];
        }
    }
};

// Sums of a product's rows.
template <class Sum>
struct Products<true, Sum> {
    Sum all[4];

    // By all lanes of a warp: the middle ones are others'. Of the first four rows.
    KVD_DEVICE void digits(unsigned column, Sum (&to)[DIGITS]) const {
        const unsigned lane = (FEW_ROWS + lane_row() % MIDDLE_ROWS) * CODE_GROUP + lane_word();
        const Sum first = of_lane(all[column], lane);
        const Sum second = of_lane(all[2 + column], lane);
        to[0] = all[column];
        to[1] = lane_row() % FEW_ROWS < MIDDLE_ROWS ? first : second;
        to[2] = all[2 + column];
    }
    KVD_DEVICE void add(const Products<true>& sums, const float (&scale)[2]) {
#pragma unroll
        for (unsigned at = 0; at < 4; at++) {
            all[at] += float(sums.all[at]) * scale[at % 2];
        }
    }
};

// Adds the products of a step.
template <bool SIGNED_A, bool SIGNED_B>
KVD_DEVICE void multiply(Products<true>& sums, const uint32_t (&digits)[DIGIT_WORDS<true>],
                         const uint32_t (&codes)[2]) {
    KVD_MULTIPLY_BYTES(SIGNED_A, SIGNED_B, sums.all, digits, codes);
}
template <bool SIGNED_A, bool SIGNED_B>
KVD_DEVICE void multiply(Products<false>& sums, const uint32_t (&digits)[DIGIT_WORDS<false>],
                         const uint32_t (&codes)[2]) {
    const uint32_t upper[4] = {digits[0], digits[1], digits[2], digits[3]};
    const uint32_t low[4] = {digits[4], 0, digits[5], 0};
    int32_t of_low[4] = {sums.low[0], sums.low[1], 0, 0};
    KVD_MULTIPLY_BYTES(SIGNED_A, SIGNED_B, sums.upper, upper, codes);
    KVD_MULTIPLY_BYTES(SIGNED_A, SIGNED_B, of_low, low, codes);
    sums.low[0] = of_low[0];
    sums.low[1] = of_low[1];
}

// Whether the codes of a tile are of one plane whose words hold four neighbours each: what is quick to
// read. Its bits, 8 for decoded codes.
KVD_DEVICE unsigned plain_bits(const Codes& codes) {
    if (codes.stride != 0) {
        return 8;
    }
    return codes.words() && plane_width(codes.bits) == codes.bits ? codes.bits : 0;
}

// In which order the positions of a key are summed: in fours, of which a step takes eight, in the
// order in which one word of a plane of few bits holds several.
struct KeyOrder {
    unsigned quads;
    // A word holds the first quads of so many parts (a power of two), of so many quads.
    unsigned parts_log2;
    unsigned part;

    KVD_DEVICE KeyOrder(unsigned positions, unsigned bits, bool decoded)
        : quads((positions + CODE_GROUP - 1) / CODE_GROUP), parts_log2(0), part(quads) {
        const bool one_plane = !decoded && (bits == 1 || bits == 2 || bits == 4);
        if (one_plane && quads * bits % (8 * CODE_GROUP) == 0) {
            parts_log2 = bits == 4 ? 1 : bits == 2 ? 2 : 3;
            part = quads * bits / 8;
        }
    }

    KVD_DEVICE unsigned steps() const { return (quads + STEP_QUADS - 1) / STEP_QUADS; }

    // Where a quad is: its step, which of two words, and whose lane's.
    KVD_DEVICE unsigned slot(unsigned quad) const {
        unsigned of_part = 0;
#pragma unroll
        for (unsigned half = 4; half > 0; half /= 2) {
            if (half >> parts_log2 == 0 && quad >= half * part) {
                quad -= half * part;
                of_part += half;
            }
        }
        return (((quad / CODE_GROUP) << parts_log2) + of_part) * CODE_GROUP + quad % CODE_GROUP;
    }

    // The part of this lane's quad `pair` (two a step), and its place there.
    KVD_DEVICE unsigned part_of(unsigned pair) const { return pair & ((1u << parts_log2) - 1); }
    KVD_DEVICE unsigned quad_of(unsigned pair) const {
        return (pair >> parts_log2) * CODE_GROUP + lane_word();
    }

    // Whether codes can be read with each_plain.
    KVD_DEVICE bool is_plain(const Codes& codes) const {
        return plain_bits(codes) != 0 && quads % STEP_QUADS == 0 &&
               (parts_log2 > 0 || plain_bits(codes) == 8);
    }

    // Calls `use(step, words)` with the codes of this lane's two quads of each step, of one token, where
    // codes are plain.
    template <class Use>
    KVD_DEVICE void each_plain(const Codes& codes, unsigned token, Use use) const {
        const uint8_t* mine = codes.bytes + (lane_word() * TILE_TOKENS + token) * CODE_GROUP;
        switch (parts_log2) {
            case 0: return each_plain_of<0>(mine, use);
            case 1: return each_plain_of<1>(mine, use);
            case 2: return each_plain_of<2>(mine, use);
            default: return each_plain_of<3>(mine, use);
        }
    }

    // Codes of fewer than eight bits: a word is of all parts. Rows of 128 positions, most of all, take
    // four steps.
    template <unsigned PARTS_LOG2, class Use>
    KVD_DEVICE void each_plain_of(const uint8_t* at, Use use) const {
        constexpr unsigned STEPS = PARTS_LOG2 == 0 ? 1 : (1 << PARTS_LOG2) / 2;
        constexpr unsigned QUADS_BYTES = CODE_GROUP * TILE_TOKENS * CODE_GROUP;
        constexpr unsigned BYTES = PARTS_LOG2 == 0 ? 2 * QUADS_BYTES : QUADS_BYTES;
        const unsigned count = steps();
        if (count == 4) {
#pragma unroll
            for (unsigned step = 0; step < 4; step += STEPS) {
                plain_steps<PARTS_LOG2>(at + step / STEPS * BYTES, step, use);
            }
            return;
        }
#pragma unroll 1
        for (unsigned step = 0; step < count; step += STEPS) {
            plain_steps<PARTS_LOG2>(at, step, use);
            at += BYTES;
        }
    }

    // Those that are loaded together.
    template <unsigned PARTS_LOG2, class Use>
    KVD_DEVICE static void plain_steps(const uint8_t* at, unsigned step, Use use) {
        constexpr unsigned QUADS_BYTES = CODE_GROUP * TILE_TOKENS * CODE_GROUP;
        constexpr unsigned BITS = 8 >> PARTS_LOG2;
        constexpr uint32_t MASK = 0x01010101u * ((1u << BITS) - 1);
        const uint32_t all = load32(at);
        if constexpr (PARTS_LOG2 == 0) {
            const uint32_t words[2] = {all, load32(at + QUADS_BYTES)};
            use(step, words);
        } else {
#pragma unroll
            for (unsigned of_word = 0; of_word < (1 << PARTS_LOG2) / 2; of_word++) {
                const uint32_t words[2] = {all >> 2 * of_word * BITS & MASK,
                                           all >> (2 * of_word + 1) * BITS & MASK};
                use(step + of_word, words);
            }
        }
    }

    // For any codes.
    template <class Use>
    KVD_DEVICE void each(const Codes& codes, unsigned token, Use use) const {
        if (is_plain(codes)) {
            return each_plain(codes, token, use);
        }
#pragma unroll 1
        for (unsigned step = 0; step < steps(); step++) {
            uint32_t words[2];
            any_words(codes, step, token, words);
            use(step, words);
        }
    }

    KVD_DEVICE void any_words(const Codes& codes, unsigned step, unsigned token,
                              uint32_t (&words)[2]) const {
        for (unsigned word = 0; word < 2; word++) {
            const unsigned quad = part_of(2 * step + word) * part + quad_of(2 * step + word);
            words[word] = 0;
            if (codes.words() && quad < quads) {
                words[word] = codes.four(codes.key_element(token, quad * CODE_GROUP)).low;
                continue;
            }
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                const unsigned position = quad * CODE_GROUP + at;
                if (token < codes.tokens && position < codes.per_row) {
                    words[word] |= codes.one(codes.key_element(token, position)) << 8 * at;
                }
            }
        }
    }
};

// Values where codes are plain: a plane of `w` bits has the first `w` quads of tokens in its low bits, the
// next ones above them, so that of fewer than eight bits both words of a lane are in one.
template <bool BYTES>
struct PlainValues {
    const uint8_t* at;
    unsigned row;
    unsigned shift;
    uint32_t mask;

    struct alignas(16) Four {
        uint32_t word[4];
    };

    KVD_DEVICE PlainValues(const Codes& codes, unsigned bits)
        : row((codes.stride != 0 ? codes.stride : codes.per_row) * CODE_GROUP),
          shift(lane_word() & ~(bits - 1)),
          mask(0x01010101u * ((1u << bits) - 1)) {
        at = codes.bytes + (lane_word() & (bits - 1)) * row;
    }

    // Both words of a plane's.
    KVD_DEVICE void split(uint32_t all, uint32_t next, uint32_t (&words)[2]) const {
        words[0] = BYTES ? all : all >> shift & mask;
        words[1] = BYTES ? next : all >> (shift + 4) & mask;
    }

    KVD_DEVICE void words(unsigned position, uint32_t (&words)[2]) const {
        const uint8_t* mine = at + position * CODE_GROUP;
        split(load32(mine), BYTES ? load32(mine + CODE_GROUP * row) : 0, words);
    }

    // For four neighbours, the first a multiple of four; rows and codes begin on sixteens.
    KVD_DEVICE void four_words(unsigned position, uint32_t (&words)[4][2]) const {
        const uint8_t* mine = at + position * CODE_GROUP;
        const Four all = *reinterpret_cast<const Four*>(mine);
        Four next = {};
        if (BYTES) {
            next = *reinterpret_cast<const Four*>(mine + CODE_GROUP * row);
        }
#pragma unroll
        for (unsigned word = 0; word < 4; word++) {
            split(all.word[word], next.word[word], words[word]);
        }
    }
};

// The codes of this lane's tokens (four, and four sixteen further on) of one position, of any codes.
KVD_DEVICE void any_value_words(const Codes& codes, unsigned position, uint32_t (&words)[2]) {
    for (unsigned word = 0; word < 2; word++) {
        const unsigned first = (word * CODE_GROUP + lane_word()) * CODE_GROUP;
        words[word] = 0;
        if (codes.words()) {
            words[word] = codes.four(codes.value_element(first, position)).low;
            continue;
        }
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            if (first + at < codes.tokens) {
                words[word] |= codes.one(codes.value_element(first + at, position)) << 8 * at;
            }
        }
    }
}

}  // namespace kvd
