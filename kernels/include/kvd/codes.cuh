// Fixed-width codes as kvd-codec lays them out (docs/format.md "Codes", kvd-codec/src/bits.rs):
// tiles of 32 tokens, four neighbours along the summed axis, bit planes of 8, 4, 2 and 1 bits. Reads
// staged tiles of codes of up to 8 bits; four codes come out of a plane with one load and one mask.
#pragma once

#include "page.cuh"

namespace kvd {

constexpr unsigned CODE_GROUP = 4;

// Bytes of the planes of a tile of `codes` codes: each plane is rounded up to a byte.
KVD_DEVICE unsigned plane_bytes(unsigned codes, unsigned bits) {
    unsigned bytes = 0;
    for (unsigned width = 8; width > 0; width /= 2) {
        if (bits & width) {
            bytes += (codes * width + 7) / 8;
        }
    }
    return bytes;
}

// Where the codes of one tile lie, and how to read them.
struct Codes {
    const uint8_t* bytes;
    unsigned bits;
    unsigned tokens;
    unsigned per_row;

    KVD_DEVICE unsigned count() const { return tokens * per_row; }

    // Four neighbours lie in one aligned word of each plane.
    KVD_DEVICE bool words() const { return tokens == TILE_TOKENS && per_row % CODE_GROUP == 0; }

    // Code number `element` of the tile's order.
    KVD_DEVICE unsigned one(unsigned element) const {
        const uint8_t* plane = bytes;
        unsigned code = 0;
        unsigned low = 0;
        for (unsigned width = 8; width > 0; width /= 2) {
            if (bits & width) {
                const unsigned size = (count() * width + 7) / 8;
                const unsigned byte = plane[element % size];
                code |= (byte >> (width * (element / size)) & ((1u << width) - 1)) << low;
                plane += size;
                low += width;
            }
        }
        return code;
    }

    // Codes `element..element + 4` as the bytes of a word; `element` is a multiple of four.
    KVD_DEVICE uint32_t four(unsigned element) const {
        const uint8_t* plane = bytes;
        uint32_t codes = 0;
        unsigned low = 0;
        for (unsigned width = 8; width > 0; width /= 2) {
            if (bits & width) {
                const unsigned size = count() / 8 * width;
                const unsigned shift = width * (element / size);
                const uint32_t mask = 0x01010101u * ((1u << width) - 1);
                codes |= (load32(plane + element % size) >> shift & mask) << low;
                plane += size;
                low += width;
            }
        }
        return codes;
    }

    // Place of a code of keys: positions / 4, tokens, positions % 4.
    KVD_DEVICE unsigned key_element(unsigned token, unsigned position) const {
        return place(position, token, per_row, tokens);
    }

    // Place of a code of values: tokens / 4, positions, tokens % 4.
    KVD_DEVICE unsigned value_element(unsigned token, unsigned position) const {
        return place(token, position, tokens, per_row);
    }

    KVD_DEVICE static unsigned place(unsigned summed, unsigned lane, unsigned len, unsigned lanes) {
        const unsigned first = summed / CODE_GROUP * CODE_GROUP;
        return first * lanes + lane * least(CODE_GROUP, len - first) + (summed - first);
    }
};

// Bytes of the codes of tile `tile` of a page; tiles before it are full.
KVD_DEVICE void code_span(TileSpans& spans, uint64_t start, unsigned tokens, unsigned tile,
                          unsigned per_row, unsigned bits) {
    const unsigned full = TILE_TOKENS / 8 * per_row * bits;
    const unsigned left = least(TILE_TOKENS, tokens - tile * TILE_TOKENS);
    spans.codes = start + uint64_t(tile) * full;
    spans.codes_len = plane_bytes(left * per_row, bits);
}

// Adds the scores of codes that stand for one coefficient each. `decode(position, code)` gives the
// coefficient of this lane's token. Positions are dealt to the warps in fours.
template <int ROWS, class Decode>
KVD_DEVICE void score_codes(const Codes& codes, unsigned warps, const float* query,
                            float (&scores)[ROWS], Decode decode) {
    const unsigned token = lane_index();
    if (token >= codes.tokens) {
        return;
    }
    const unsigned dim = codes.per_row;
    for (unsigned first = warp_index() * CODE_GROUP; first < dim; first += warps * CODE_GROUP) {
        const bool words = codes.words();
        const uint32_t four = words ? codes.four(codes.key_element(token, first)) : 0;
        const unsigned end = least(dim, first + CODE_GROUP);
        for (unsigned at = first; at < end; at++) {
            const unsigned code =
                words ? four >> 8 * (at - first) & 255 : codes.one(codes.key_element(token, at));
            const float key = decode(at, code);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                scores[row] += query[row * dim + at] * key;
            }
        }
    }
}

// Adds the weighted coefficients of one position. `decode(token, code)` gives the coefficient.
// Tokens are dealt to the slices in fours.
template <int ROWS, class Decode>
KVD_DEVICE void accumulate_codes(const Codes& codes, unsigned position, unsigned slice,
                                 unsigned slices, const float* weights, float (&out)[ROWS],
                                 Decode decode) {
    for (unsigned first = slice * CODE_GROUP; first < codes.tokens; first += slices * CODE_GROUP) {
        const bool words = codes.words();
        const uint32_t four = words ? codes.four(codes.value_element(first, position)) : 0;
        const unsigned end = least(codes.tokens, first + CODE_GROUP);
        for (unsigned token = first; token < end; token++) {
            const unsigned code = words ? four >> 8 * (token - first) & 255
                                        : codes.one(codes.value_element(token, position));
            const float value = decode(token, code);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                out[row] += weights[row * TILE_TOKENS + token] * value;
            }
        }
    }
}

}  // namespace kvd
