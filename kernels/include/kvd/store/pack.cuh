// Codes into the planes of a page (docs/format.md "Codes"); the inverse of codes.cuh, and of the host's
// kvd-codec/src/bits.rs. A thread makes whole bytes, four at a time where tiles are full.
#pragma once

#include "work.cuh"

namespace kvd {

// Which code lies at place `element` of a tile of `tokens` tokens, `per_row` codes each.
struct Place {
    unsigned token;
    unsigned position;

    KVD_DEVICE Place(bool is_value, unsigned tokens, unsigned per_row, unsigned element) {
        const unsigned lanes = is_value ? per_row : tokens;
        const unsigned summed = is_value ? tokens : per_row;
        const unsigned first = element / (CODE_GROUP * lanes) * CODE_GROUP;
        const unsigned width = least(CODE_GROUP, summed - first);
        const unsigned rest = element - first * lanes;
        const unsigned along = first + rest % width;
        token = is_value ? along : rest / width;
        position = is_value ? rest / width : along;
    }
};

// Codes that stand where their coefficients stood.
struct InPlace {
    const uint32_t* words;
    unsigned stride;

    KVD_DEVICE unsigned operator()(unsigned token, unsigned channel) const {
        return words[token * stride + channel];
    }
};

// The codes of a token at a position and the next three.
template <class Code>
KVD_DEVICE FourWords four_codes(const Code& code, unsigned token, unsigned position) {
    return {code(token, position), code(token, position + 1), code(token, position + 2),
            code(token, position + 3)};
}
KVD_DEVICE FourWords four_codes(const InPlace& code, unsigned token, unsigned position) {
    return *reinterpret_cast<const FourWords*>(code.words + (token * code.stride + position));
}

// One plane of a tile: `width` bits from bit `low` of the codes on.
struct Plane {
    uint8_t* bytes;
    Range tokens;
    unsigned per_row;
    unsigned low;
    unsigned width;
    unsigned count;
    unsigned size;
    uint32_t mask;

    KVD_DEVICE Plane(uint8_t* bytes, Range tokens, unsigned per_row, unsigned low, unsigned width)
        : bytes(bytes), tokens(tokens), per_row(per_row), low(low), width(width) {
        count = (tokens.to - tokens.from) * per_row;
        size = (count * width + 7) / 8;
        mask = 0x01010101u * ((1u << width) - 1);
    }

    // Whether its words are four neighbours along the summed axis, one a byte; of keys, all of one token.
    KVD_DEVICE bool has_words(bool is_value) const {
        return tokens.to - tokens.from == TILE_TOKENS && per_row % CODE_GROUP == 0 &&
               misaligned(bytes) % 4 == 0 &&
               (is_value || size % (CODE_GROUP * TILE_TOKENS) == 0);
    }
    // A byte for each of four codes. What a plane takes of a code is in one of its bytes.
    KVD_DEVICE uint32_t word(const FourWords& codes) const {
        const unsigned which = low < 8 ? 0x40 : 0x51;
        const uint32_t all = bytes_of(bytes_of(codes.word[0], codes.word[1], which),
                                      bytes_of(codes.word[2], codes.word[3], which), 0x5410);
        return all >> low % 8 & mask;
    }
};

template <class Code>
KVD_DEVICE void pack_bytes(const Plane& plane, bool is_value, const Code& code) {
    for (unsigned at = thread_index(); at < plane.size; at += STORE_THREADS) {
        unsigned byte = 0;
        for (unsigned shift = 0, element = at; element < plane.count;
             element += plane.size, shift += plane.width) {
            const Place place(is_value, plane.tokens.to - plane.tokens.from, plane.per_row, element);
            const unsigned one = code(plane.tokens.from + place.token, place.position);
            byte |= (one >> plane.low & plane.mask & 255) << shift;
        }
        plane.bytes[at] = uint8_t(byte);
    }
}

// Four neighbours, a group, are four bytes. The next codes of those bytes are as many groups further on as
// the plane has words: that many positions of keys, or as many groups of values as the plane has bits,
// `WIDTH`.

// A lane per token of keys: rows are as long that eight lanes that read a group of each read all banks.
template <unsigned WIDTH, class Code>
KVD_DEVICE void pack_keys(const Plane& plane, const Code& code) {
    const unsigned groups = plane.size / CODE_GROUP;
    const unsigned apart = groups / TILE_TOKENS * CODE_GROUP;
    const unsigned token = plane.tokens.from + lane_index();
#pragma unroll 1
    for (unsigned at = thread_index(); at < groups; at += STORE_THREADS) {
        const unsigned first = at / TILE_TOKENS * CODE_GROUP;
        uint32_t word = 0;
#pragma unroll
        for (unsigned part = 0; part < 8 / WIDTH; part++) {
            word |= plane.word(four_codes(code, token, first + part * apart)) << part * WIDTH;
        }
        store32(plane.bytes + CODE_GROUP * at, word);
    }
}

// Positions of values that a thread takes together.
template <class Code>
constexpr unsigned POSITIONS = 1;
template <>
constexpr unsigned POSITIONS<InPlace> = 4;

// A lane per position of values. `walk` is through groups of tokens and positions, from the thread's
// first on.
template <unsigned WIDTH, class Code>
KVD_DEVICE void pack_values(const Plane& plane, Walk walk, const Code& code) {
#pragma unroll 1
    for (unsigned at = thread_index(); at < plane.size / CODE_GROUP; at += STORE_THREADS) {
        uint32_t word = 0;
#pragma unroll
        for (unsigned part = 0; part < 8 / WIDTH; part++) {
            const unsigned token = plane.tokens.from + (walk.row + part * WIDTH) * CODE_GROUP;
            const FourWords codes = {code(token, walk.column), code(token + 1, walk.column),
                                     code(token + 2, walk.column), code(token + 3, walk.column)};
            word |= plane.word(codes) << part * WIDTH;
        }
        store32(plane.bytes + CODE_GROUP * at, word);
        walk.next();
    }
}

template <unsigned WIDTH>
KVD_DEVICE void pack_values(const Plane& plane, Walk walk, const InPlace& code) {
    constexpr unsigned BYTES = CODE_GROUP * POSITIONS<InPlace>;
#pragma unroll 1
    for (unsigned at = BYTES * thread_index(); at < plane.size; at += BYTES * STORE_THREADS) {
        FourWords words = {};
#pragma unroll
        for (unsigned part = 0; part < 8 / WIDTH; part++) {
            const unsigned token = plane.tokens.from + (walk.row + part * WIDTH) * CODE_GROUP;
            const FourWords codes[CODE_GROUP] = {
                four_codes(code, token, walk.column), four_codes(code, token + 1, walk.column),
                four_codes(code, token + 2, walk.column), four_codes(code, token + 3, walk.column)};
#pragma unroll
            for (unsigned next = 0; next < 4; next++) {
                const FourWords neighbours = {codes[0].word[next], codes[1].word[next],
                                              codes[2].word[next], codes[3].word[next]};
                words.word[next] |= plane.word(neighbours) << part * WIDTH;
            }
        }
        store_words(plane.bytes + at, words);
        walk.next();
    }
}

template <bool IS_VALUE, unsigned WIDTH, class Code>
KVD_DEVICE void pack_words(const Plane& plane, const Walk& walk, const Code& code) {
    if constexpr (IS_VALUE) {
        pack_values<WIDTH>(plane, walk, code);
    } else {
        pack_keys<WIDTH>(plane, code);
    }
}

template <bool IS_VALUE, class Code>
KVD_DEVICE void pack_plane(const Plane& plane, const Walk& walk, const Code& code) {
    if (!plane.has_words(IS_VALUE)) {
        return pack_bytes(plane, IS_VALUE, code);
    }
    switch (plane.width) {
        case 1: return pack_words<IS_VALUE, 1>(plane, walk, code);
        case 2: return pack_words<IS_VALUE, 2>(plane, walk, code);
        case 4: return pack_words<IS_VALUE, 4>(plane, walk, code);
        default: return pack_words<IS_VALUE, 8>(plane, walk, code);
    }
}

template <bool IS_VALUE, class Code>
KVD_DEVICE unsigned pack_side(const Work& work, uint8_t* codes, unsigned per_row, unsigned bits,
                              const Code& code) {
    constexpr unsigned TAKEN = POSITIONS<Code>;
    const Walk walk(per_row, TAKEN * thread_index(), TAKEN * STORE_THREADS);
    uint8_t* at = codes;
    for (unsigned first = 0; first < work.tokens; first += TILE_TOKENS) {
        const Range tokens = {first, least(first + TILE_TOKENS, work.tokens)};
        for (unsigned left = bits; left > 0; left -= plane_width(left)) {
            const Plane plane(at, tokens, per_row, bits - left, plane_width(left));
            pack_plane<IS_VALUE>(plane, walk, code);
            at += plane.size;
        }
    }
    return unsigned(at - codes);
}

// Writes all codes of a page, `per_row` of `bits` in a row, from `codes` on: `code(token, position)`.
// Gives their bytes.
template <class Code>
KVD_DEVICE unsigned pack_codes(const Work& work, uint8_t* codes, unsigned per_row, unsigned bits,
                               const Code& code) {
    if (work.unit.is_value != 0) {
        return pack_side<true>(work, codes, per_row, bits, code);
    }
    return pack_side<false>(work, codes, per_row, bits, code);
}

// How codes become bytes: of fixed width. HuffmanCodes of huffman.cuh is the other way.
struct FixedCodes {
    template <class Code>
    KVD_DEVICE static unsigned write(const Work& work, uint8_t* codes, unsigned per_row,
                                     unsigned bits, Code code) {
        return pack_codes(work, codes, per_row, bits, code);
    }
};

// Bytes of scales and of the codes behind them, for which there may be no room.
KVD_DEVICE unsigned behind(unsigned scales, unsigned codes) {
    return codes == NO_CODES ? NO_CODES : scales + codes;
}

template <class Stage>
KVD_DEVICE unsigned write_in_place(const Work& work, uint8_t* codes, unsigned bits) {
    return Stage::write(work, codes, work.dim, bits, InPlace{work.words, work.stride});
}

}  // namespace kvd
