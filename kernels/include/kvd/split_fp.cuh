// Rows in f16 and bf16, and fp8 codes made f16, as factors of products on tensor cores (`mma.m16n8k16`):
// they go there as they are, and products of them are exact. What they are multiplied with, queries and
// softmax weights, is the sum of two f16 or three bf16, 22 and 24 bits, so that the result errs as f32
// does (ADR 8). A row of the first factor has first parts, the row eight further on second parts, and
// third parts take a second product into the same sums. Sums of tensor cores are f32 but cut off and not
// rounded, so those of values are of one tile.
//
// Tiles stand in shared memory with their pieces of sixteen bytes in another order: rows are as long
// as all banks together, or twice, and lanes that read the same place of several rows would meet.
#pragma once

#include "float.cuh"
#include "tensor.cuh"

namespace kvd {

// Terms of one product.
constexpr unsigned HALF_TERMS = 16;
// Largest head size: sums of values for which a thread has registers.
constexpr unsigned HALF_DIM_MAX = 256;

// A number as parts that a format of half a word holds. Queries are parts of a unit of which the
// largest is at most `2^QUERY_LOG2`, weights of `1 / WEIGHT_UNITS`: f16 has few exponents.
struct PartsF16 {
    static constexpr bool IS_BF16 = false;
    static constexpr unsigned COUNT = 2;
    static constexpr unsigned QUERY_LOG2 = 14;
    static constexpr float WEIGHT_UNITS = 16384;
    KVD_DEVICE static uint32_t word(float low, float high) { return f16_word(low, high); }
    KVD_DEVICE static float value(uint32_t half) { return f16_value(uint16_t(half)); }
};
struct PartsBf16 {
    static constexpr bool IS_BF16 = true;
    static constexpr unsigned COUNT = 3;
    static constexpr unsigned QUERY_LOG2 = 2;
    static constexpr float WEIGHT_UNITS = 1;
    KVD_DEVICE static uint32_t word(float low, float high) { return bf16_word(low, high); }
    KVD_DEVICE static float value(uint32_t half) { return bf16_value(uint16_t(half)); }
};

// Words of the first factor that a lane has of a step, of four terms: first and second parts of two, of
// the other two, then third parts of both.
template <class Parts>
using PartWords = uint32_t[2 * Parts::COUNT];

template <class Parts>
KVD_DEVICE void cut_parts(const float (&values)[CODE_GROUP], PartWords<Parts>& words) {
#pragma unroll
    for (unsigned pair = 0; pair < 2; pair++) {
        float left[2] = {values[2 * pair], values[2 * pair + 1]};
#pragma unroll
        for (unsigned part = 0; part < Parts::COUNT; part++) {
            const uint32_t word = Parts::word(left[0], left[1]);
            words[part < 2 ? 2 * pair + part : 4 + pair] = word;
            left[0] -= Parts::value(word);
            left[1] -= Parts::value(word >> 16);
        }
    }
}

template <class Parts>
KVD_DEVICE void multiply_parts(float (&sums)[4], const PartWords<Parts>& words,
                               const uint32_t (&values)[2]) {
    const uint32_t upper[4] = {words[0], words[1], words[2], words[3]};
    KVD_MULTIPLY_HALVES(Parts::IS_BF16, sums, upper, values);
    if constexpr (Parts::COUNT == 3) {
        const uint32_t third[4] = {words[4], 0, words[5], 0};
        KVD_MULTIPLY_HALVES(Parts::IS_BF16, sums, third, values);
    }
}

struct alignas(16) FourFloats {
    float value[4];
};
struct alignas(8) TwoFloats {
    float value[2];
};

// How the tiles of a side stand in shared memory: bits of a byte's place are changed by those from
// `shift` above them on, which tell its row.
struct Banks {
    unsigned dim;
    unsigned shift;
};

// The bits that tell one row from the next, from this one on, where that is more than a line and less than
// what all threads copy at once: rows of other lengths meet in some banks.
KVD_DEVICE unsigned row_bit(unsigned bytes) { return least(most(ones(bytes - 1), 7), 8); }

template <unsigned MASK>
KVD_DEVICE unsigned in_banks(unsigned at, unsigned shift) {
    return at ^ (at >> shift & MASK);
}

// Starts copying aligned sixteens to a tile, `TURNS` of a thread at once where there are so many. What all
// threads copy at once is so long that a thread's pieces change place alike.
template <unsigned MASK, unsigned TURNS>
KVD_DEVICE void stage_in_banks(uint8_t* to, const uint8_t* from, unsigned bytes, unsigned shift) {
    constexpr unsigned TURN = ATTEND_THREADS * COPY_BYTES;
    const unsigned first = thread_index() * COPY_BYTES;
    to += in_banks<MASK>(first, shift);
    from += first;
    unsigned at = first;
    for (; at + (TURNS - 1) * TURN < bytes; at += TURNS * TURN) {
#pragma unroll
        for (unsigned turn = 0; turn < TURNS; turn++) {
            copy_async16(to + turn * TURN, from + turn * TURN);
        }
        to += TURNS * TURN;
        from += TURNS * TURN;
    }
#pragma unroll 1
    for (; at < bytes; at += TURN) {
        copy_async16(to, from);
        to += TURN;
        from += TURN;
    }
}

// A side with such products: the order in which the terms of a query are summed, and the second factor.
// Only codes ask whether they are of keys.
template <class Side, bool IS_KEY = true>
struct Halves;

template <class Side, bool IS_KEY>
struct Stages<Halves<Side, IS_KEY>> {
    static constexpr bool value = true;
};

template <class Format>
struct PartsOf;
template <>
struct PartsOf<F16> : PartsF16 {};
template <>
struct PartsOf<Bf16> : PartsBf16 {};

// Rows: a lane loads sixteen bytes of a token at once, so four steps are of groups of 64 channels. Of these
// a lane has two neighbouring pieces of eight: two tokens, whose pieces stand in another order, then
// never meet in a bank.
template <class Format>
struct Halves<Float<Format>> : Float<Format> {
    using Parts = PartsOf<Format>;
    static constexpr bool HAS_SCALE = false;
    // Unit of a product's value before it is scaled.
    static constexpr float CODE_UNIT = 1;
    // Channels of two pieces, lanes of a token, steps of a group.
    static constexpr unsigned PAIR = 2 * COPY_BYTES / Format::BYTES;
    static constexpr unsigned STEPS = 4;
    // Which piece of a line.
    static constexpr unsigned MASK = LINE_BYTES - COPY_BYTES;

    KVD_DEVICE static Banks banks(const SideShape& side) {
        return {side.dim, row_bit(side.dim * Format::BYTES) - 4};
    }

    KVD_DEVICE static void stage(const SideShape& side, const Piece* pieces, unsigned, uint8_t* to) {
        KVD_EXPECT(pieces->at % LINE_BYTES == 0);
        const unsigned bytes = pieces->copies * COPY_BYTES;
        stage_in_banks<MASK, 4>(to + pieces->at, pieces->from, bytes, banks(side).shift);
    }

    KVD_DEVICE static float scale(const SideShape&, const Tile&) { return 1; }

    KVD_DEVICE static unsigned groups(unsigned dim) {
        return (dim + PAIR * CODE_GROUP - 1) / (PAIR * CODE_GROUP);
    }
    KVD_DEVICE static unsigned steps(unsigned dim) { return STEPS * groups(dim); }
    // The step of four channels, and its lane.
    KVD_DEVICE static unsigned slot(unsigned quad) {
        const unsigned pair = quad / STEPS;
        return (pair / CODE_GROUP * STEPS + quad % STEPS) * CODE_GROUP + pair % CODE_GROUP;
    }

    // Calls `use(step, chain, words)` with a token's channels; steps of two chains take turns. Where there
    // are no more channels others, which then meet zeros.
    template <class Use>
    KVD_DEVICE static void each_key(const Banks& banks, const SideShape&, const Tile& tile,
                                    unsigned token, Use use) {
        const uint8_t* rows = tile.staged + tile.pieces[0].at;
        const unsigned row = least(token, tile.tokens - 1) * banks.dim * Format::BYTES;
        const unsigned last = banks.dim / PAIR - 1;
        const unsigned count = groups(banks.dim);
#pragma unroll 2
        for (unsigned group = 0; group < count; group++) {
            const unsigned pair = least(group * CODE_GROUP + lane_word(), last);
            const unsigned at = in_banks<MASK>(row + pair * 2 * COPY_BYTES, banks.shift);
#pragma unroll
            for (unsigned of_pair = 0; of_pair < 2; of_pair++) {
                const uint8_t* piece = rows + (at ^ of_pair * COPY_BYTES);
                const FourWords four = *reinterpret_cast<const FourWords*>(piece);
                const uint32_t first[2] = {four.word[0], four.word[1]};
                use(STEPS * group + 2 * of_pair, 0, first);
                const uint32_t second[2] = {four.word[2], four.word[3]};
                use(STEPS * group + 2 * of_pair + 1, 1, second);
            }
        }
    }

    // Whether value_words reads a tile; all lanes of a warp know it of all units.
    KVD_DEVICE static bool has_words(const Tile&) { return true; }

    // The words of this lane's tokens of both steps, of its channels of two times eight from `channel` on.
    // Rows outside `from..to` may never have been written: zeros take their place.
    KVD_DEVICE static void value_words(const Banks& banks, const SideShape&, const Tile& tile,
                                       const uint8_t* zeros, unsigned channel,
                                       uint32_t (&words)[2][4]) {
        // A lane has two of four neighbouring tokens in its first word and two in its second.
        const unsigned lane = lane_index();
        const unsigned token = lane / 16 * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
        const bool has_row = token >= tile.from && token < tile.to;
        const unsigned at = (token * banks.dim + channel) * Format::BYTES;
        const unsigned first = in_banks<MASK>(at, banks.shift);
        const uint8_t* rows = tile.staged + tile.pieces[0].at;
#pragma unroll
        for (unsigned block = 0; block < 2; block++) {
            const uint8_t* row = rows + (first ^ block * COPY_BYTES);
            KVD_LOAD_MATRICES(words[block], has_row ? row : zeros);
        }
    }
    KVD_DEVICE static void any_words(const SideShape&, const Tile&, unsigned, uint32_t (&)[2][4]) {}
};

#ifdef KVD_E4M3_WORD
// Unit of a code as f16.
constexpr float E4M3_UNIT = 1;
// Four codes as f16, two a word.
KVD_DEVICE void e4m3_words(uint32_t codes, uint32_t (&words)[2]) {
    words[0] = KVD_E4M3_WORD(uint16_t(codes));
    words[1] = KVD_E4M3_WORD(uint16_t(codes >> 16));
}
#else
// Exponent and mantissa stand where an f16 has them, 8 too low, for which sums of products make up;
// subnormal codes too.
constexpr float E4M3_UNIT = 256;
KVD_DEVICE void e4m3_words(uint32_t codes, uint32_t (&words)[2]) {
#pragma unroll
    for (unsigned pair = 0; pair < 2; pair++) {
        const uint32_t high = bytes_of(codes, 0, pair == 0 ? 0x1404 : 0x3424);
        words[pair] = (high & 0x80008000u) | (high >> 1 & 0x3F803F80u);
    }
    // The only codes that are no numbers are all ones.
    if ((((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0) {
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            const bool is_number = (codes >> 8 * at & 0x7F) != 0x7F;
            words[at / 2] |= is_number ? 0 : 0x7FFFu << 16 * (at % 2);
        }
    }
}
#endif

// Codes: four neighbours are a word in pages, which becomes the two words of a step. Of a full tile's
// rows of words, 32 tokens of keys or all channels of values, four are read at once: their pieces are
// turned by two, which is the eight words that lanes read of each.
template <bool IS_KEY>
struct Halves<Fp8, IS_KEY> : Fp8 {
    using Parts = PartsF16;
    static constexpr bool HAS_SCALE = true;
    static constexpr float CODE_UNIT = E4M3_UNIT;
    static constexpr unsigned MASK = LINE_BYTES - 2 * COPY_BYTES;
    static constexpr unsigned STEPS_OF_TILE = TILE_TOKENS / HALF_TERMS;
    // Nothing is so high a bit: rows of values of other lengths stand as they are.
    static constexpr unsigned NO_SHIFT = 31;

    KVD_DEVICE static Banks banks(const SideShape& side) {
        const unsigned row = CODE_GROUP * (IS_KEY ? TILE_TOKENS : side.dim);
        const bool turns = IS_KEY || ((row & (row - 1)) == 0 && row >= LINE_BYTES);
        return {side.dim, turns ? least(ones(row - 1), 9) - 5 : NO_SHIFT};
    }

    // The scale, then codes: in banks where the tile is full.
    KVD_DEVICE static void stage(const SideShape& side, const Piece* pieces, unsigned tokens,
                                 uint8_t* to) {
        KVD_EXPECT(pieces[0].at % COPY_BYTES == 0 && pieces[1].at == pieces[0].at + COPY_BYTES + SCALE_BYTES);
        if (thread_index() == 0) {
            copy_async16(to + pieces[0].at, pieces[0].from);
        }
        const unsigned bytes = pieces[1].copies * COPY_BYTES;
        const unsigned shift = tokens == TILE_TOKENS ? banks(side).shift : NO_SHIFT;
        stage_in_banks<MASK, 2>(to + pieces[0].at + COPY_BYTES, pieces[1].from, bytes, shift);
    }

    KVD_DEVICE static unsigned steps(unsigned dim) { return dim / HALF_TERMS; }
    KVD_DEVICE static unsigned slot(unsigned quad) { return quad; }

    // Word `at` of a full tile's codes, which begin behind the scale.
    KVD_DEVICE static const uint8_t* code(const Banks& banks, const Tile& tile, unsigned at) {
        const unsigned byte = SCALE_BYTES + at * CODE_GROUP;
        return tile.staged + tile.pieces[0].at + COPY_BYTES + in_banks<MASK>(byte, banks.shift);
    }

    // As of rows.
    template <class Use>
    KVD_DEVICE static void each_key(const Banks& banks, const SideShape& side, const Tile& tile,
                                    unsigned token, Use use) {
        const unsigned count = steps(banks.dim);
        if (KVD_RARELY(!has_words(tile))) {
#pragma unroll 1
            for (unsigned step = 0; step < count; step++) {
                use_step(any_word(side, tile, token, step), step, 0, use);
            }
            return;
        }
        // Those of a step are as many lines as lanes are turned by.
        const uint8_t* mine = code(banks, tile, lane_word() * TILE_TOKENS + token);
#pragma unroll 4
        for (unsigned step = 0; step + 1 < count; step += 2) {
            use_step(load32(mine + step * CODE_GROUP * LINE_BYTES), step, 0, use);
            use_step(load32(mine + (step + 1) * CODE_GROUP * LINE_BYTES), step + 1, 1, use);
        }
        if (KVD_RARELY(count % 2 != 0)) {
            const unsigned last = count - 1;
            use_step(load32(mine + last * CODE_GROUP * LINE_BYTES), last, 0, use);
        }
    }

    template <class Use>
    KVD_DEVICE static void use_step(uint32_t codes, unsigned step, unsigned chain, Use use) {
        uint32_t words[2];
        e4m3_words(codes, words);
        use(step, chain, words);
    }

    // This lane's codes of a step, of a tile that is not full.
    KVD_DEVICE static uint32_t any_word(const SideShape& side, const Tile& tile, unsigned token,
                                        unsigned step) {
        const Codes codes = Fp8::codes(side, tile);
        const unsigned channel = (step * CODE_GROUP + lane_word()) * CODE_GROUP;
        uint32_t four = 0;
        for (unsigned at = 0; token < codes.tokens && at < CODE_GROUP; at++) {
            four |= codes.one(codes.key_element(token, channel + at)) << 8 * at;
        }
        return four;
    }

    // Whether the tile is full, and its words stand in banks.
    KVD_DEVICE static bool has_words(const Tile& tile) { return tile.tokens == TILE_TOKENS; }

    // The words of this lane's four tokens of each step, of its channels of two times eight from
    // `channel` on.
    KVD_DEVICE static void value_words(const Banks& banks, const SideShape&, const Tile& tile,
                                       const uint8_t*, unsigned channel, uint32_t (&words)[2][4]) {
#pragma unroll
        for (unsigned block = 0; block < 2; block++) {
            const unsigned mine = channel + block * STEP_COLUMNS + lane_row();
            const uint8_t* at = code(banks, tile, lane_word() * banks.dim + mine);
            const uint32_t fours[] = {load32(at), load32(at + HALF_TERMS * banks.dim)};
            tile_words(fours, words[block]);
        }
    }

    // Words of other tiles.
    KVD_DEVICE static void any_words(const SideShape& side, const Tile& tile, unsigned channel,
                                     uint32_t (&words)[2][4]) {
        for (unsigned block = 0; block < 2; block++) {
            uint32_t fours[STEPS_OF_TILE];
            const unsigned mine = channel + block * STEP_COLUMNS + lane_row();
            any_value_words(Fp8::codes(side, tile), mine, fours);
            tile_words(fours, words[block]);
        }
    }

    KVD_DEVICE static void tile_words(const uint32_t (&fours)[STEPS_OF_TILE], uint32_t (&words)[4]) {
#pragma unroll
        for (unsigned step = 0; step < STEPS_OF_TILE; step++) {
            uint32_t two[2];
            e4m3_words(fours[step], two);
            words[2 * step] = two[0];
            words[2 * step + 1] = two[1];
        }
    }
};

// Values, whose codes lie otherwise than those of keys.
using Fp8Values = Halves<Fp8, false>;

}  // namespace kvd
