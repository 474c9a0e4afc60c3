// Fixed-width codes as kvd-codec lays them out (docs/format.md "Codes", kvd-codec/src/bits.rs):
// tiles of 32 tokens, four neighbours along the summed axis, bit planes of 8, 4, 2 and 1 bits. Reads
// staged tiles of codes of up to 16 bits; four codes come out of a plane with one load and one mask.
// Tiles that huffman.cuh has decoded are whole, of bytes, in the same order; codes of more than 8 bits
// have a second plane of bytes.
#pragma once

#include "page.cuh"

namespace kvd {

constexpr unsigned CODE_GROUP = 4;

// Width of the first plane of codes of `left` bits.
KVD_DEVICE unsigned plane_width(unsigned left) {
    return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// Bytes of the planes of a tile of `codes` codes: each plane is rounded up to a byte.
KVD_DEVICE unsigned plane_bytes(unsigned codes, unsigned bits) {
    unsigned bytes = 0;
    for (unsigned left = bits; left > 0; left -= plane_width(left)) {
        bytes += (codes * plane_width(left) + 7) / 8;
    }
    return bytes;
}

// Four codes: their low bytes, and their high bits.
struct Four {
    uint32_t low;
    uint32_t high;

    KVD_DEVICE unsigned code(unsigned at) const {
        return bytes_of(low, 0, 0x4440 + at) | bytes_of(high, 0, 0x4404 + (at << 4));
    }
};

// Where the codes of one tile lie, and how to read them.
struct Codes {
    const uint8_t* bytes;
    unsigned bits;
    unsigned tokens;
    unsigned per_row;
    // Codes of a row of a decoded tile, padded; 0 for a tile of fixed width.
    unsigned stride;

    KVD_DEVICE unsigned count() const { return tokens * per_row; }

    // Four neighbours lie in one aligned word of each plane.
    KVD_DEVICE bool words() const {
        if (stride != 0) {
            return true;
        }
        return tokens == TILE_TOKENS && per_row % CODE_GROUP == 0 &&
               shared_misaligned(bytes) % 4 == 0;
    }

    // Code number `element` of the tile's order.
    KVD_DEVICE unsigned one(unsigned element) const {
        const uint8_t* plane = bytes;
        unsigned code = 0;
        for (unsigned left = bits; left > 0;) {
            const unsigned width = plane_width(left);
            const unsigned size = (count() * width + 7) / 8;
            const unsigned byte = plane[element % size];
            code |= (byte >> (width * (element / size)) & ((1u << width) - 1)) << (bits - left);
            plane += size;
            left -= width;
        }
        return code;
    }

    // Codes `element..element + 4`; `element` is a multiple of four.
    KVD_DEVICE Four four(unsigned element) const {
        const uint8_t* plane = bytes;
        if (stride != 0) {
            const uint32_t high = bits > 8 ? load32(plane + TILE_TOKENS * stride + element) : 0;
            return {load32(plane + element), high};
        }
        Four codes = {0, 0};
        unsigned done = 0;
        if (bits >= 8) {
            codes.low = load32(plane + element);
            plane += count();
            done = 8;
            if (bits == 16) {
                codes.high = load32(plane + element);
                return codes;
            }
        }
#pragma unroll
        for (unsigned width = 4; width > 0; width /= 2) {
            if ((bits & width) == 0) {
                continue;
            }
            const unsigned size = count() / 8 * width;
            // Which of a byte's parts: less than a division takes.
            unsigned place = element;
            unsigned shift = 0;
#pragma unroll
            for (unsigned parts = 4 / width; parts > 0; parts /= 2) {
                if (place >= parts * size) {
                    place -= parts * size;
                    shift += parts * width;
                }
            }
            const uint32_t mask = 0x01010101u * ((1u << width) - 1);
            const uint32_t word = load32(plane + place) >> shift & mask;
            if (bits < 8) {
                codes.low |= word << done;
            } else {
                codes.high |= word << (done - 8);
            }
            plane += size;
            done += width;
        }
        return codes;
    }

    // Place of a code of keys: positions / 4, tokens, positions % 4.
    KVD_DEVICE unsigned key_element(unsigned token, unsigned position) const {
        if (stride != 0) {
            return (position / CODE_GROUP * TILE_TOKENS + token) * CODE_GROUP + position % CODE_GROUP;
        }
        return place(position, token, per_row, tokens);
    }

    // Place of a code of values: tokens / 4, positions, tokens % 4.
    KVD_DEVICE unsigned value_element(unsigned token, unsigned position) const {
        if (stride != 0) {
            return (token / CODE_GROUP * stride + position) * CODE_GROUP + token % CODE_GROUP;
        }
        return place(token, position, tokens, per_row);
    }

    KVD_DEVICE static unsigned place(unsigned summed, unsigned lane, unsigned len, unsigned lanes) {
        const unsigned first = summed / CODE_GROUP * CODE_GROUP;
        return first * lanes + lane * least(CODE_GROUP, len - first) + (summed - first);
    }
};

// A side whose codes are never Huffman codes: nothing asks where they begin.
struct NeverCoded {
    KVD_DEVICE static uint64_t codes_at(const SideShape&, const Tile&) { return 0; }
};

// Codes of a tile within a payload, from `start` on; tiles before it are full. Huffman codes are not
// staged but decoded.
KVD_DEVICE Span code_span(const Tile& tile, uint64_t start, unsigned per_row, unsigned bits) {
    if (tile.coded) {
        return {start, 0};
    }
    const unsigned full = TILE_TOKENS / 8 * per_row * bits;
    const bool whole = tile.tokens == TILE_TOKENS;
    return {start + uint64_t(tile.index) * full,
            whole ? full : plane_bytes(tile.tokens * per_row, bits)};
}

// The codes of a tile, `per_row` of `bits` in a row, which are span `part` of the side.
template <class Side>
KVD_DEVICE Codes tile_codes(const SideShape& side, const Tile& tile, unsigned part,
                            unsigned per_row, unsigned bits) {
    if (tile.coded) {
        return {tile.decoded, bits, tile.tokens, per_row, side.stride};
    }
    return {staged_span<Side>(side, tile, part), bits, tile.tokens, per_row, 0};
}

// Calls `use(position, code)` for the codes of a token; positions are dealt to the warps in fours.
template <class Use>
KVD_DEVICE void each_code_of(const Codes& codes, unsigned token, unsigned warps, Use use) {
    const bool words = codes.words();
    const unsigned end = codes.per_row;
    for (unsigned first = warp_index() * CODE_GROUP; first < end; first += warps * CODE_GROUP) {
        const Four four = words ? codes.four(codes.key_element(token, first)) : Four{0, 0};
        for (unsigned at = first; at < least(end, first + CODE_GROUP); at++) {
            use(at, words ? four.code(at - first) : codes.one(codes.key_element(token, at)));
        }
    }
}

// For this lane's token, by the lanes that have one.
template <class Use>
KVD_DEVICE void each_key_code(const Codes& codes, unsigned warps, Use use) {
    if (lane_index() < codes.tokens) {
        each_code_of(codes, lane_index(), warps, use);
    }
}

// Calls `use(token, code)` for the codes of one position; tokens are dealt to the slices in fours.
template <class Use>
KVD_DEVICE void each_value_code(const Codes& codes, unsigned position, unsigned slice,
                                unsigned slices, Use use) {
    const bool words = codes.words();
    const unsigned end = codes.tokens;
    for (unsigned first = slice * CODE_GROUP; first < end; first += slices * CODE_GROUP) {
        const Four four = words ? codes.four(codes.value_element(first, position)) : Four{0, 0};
        for (unsigned at = first; at < least(end, first + CODE_GROUP); at++) {
            use(at, words ? four.code(at - first) : codes.one(codes.value_element(at, position)));
        }
    }
}

// Adds a coefficient of this lane's token to its scores. `query` is `[ROWS, dim]`.
template <int ROWS>
KVD_DEVICE void add_score(const float* query, unsigned dim, unsigned channel, float key,
                          float (&scores)[ROWS]) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        scores[row] += query[row * dim + channel] * key;
    }
}

// Adds a token's coefficient to the sums of its channel.
template <int ROWS>
KVD_DEVICE void add_value(const float* weights, unsigned token, float value, float (&out)[ROWS]) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        out[row] += weights[row * TILE_TOKENS + token] * value;
    }
}

// Scores of codes that stand for one coefficient each, `decode(channel, code)`.
template <int ROWS, class Decode>
KVD_DEVICE void score_codes(const Codes& codes, unsigned warps, const float* query,
                            float (&scores)[ROWS], Decode decode) {
    each_key_code(codes, warps, [&](unsigned channel, unsigned code) {
        add_score(query, codes.per_row, channel, decode(channel, code), scores);
    });
}

// Weighted sums of codes that stand for one coefficient each, `decode(token, code)`.
template <int ROWS, class Decode>
KVD_DEVICE void accumulate_codes(const Codes& codes, unsigned position, unsigned slice,
                                 unsigned slices, const float* weights, float (&out)[ROWS],
                                 Decode decode) {
    each_value_code(codes, position, slice, slices, [&](unsigned token, unsigned code) {
        add_value(weights, token, decode(token, code), out);
    });
}

}  // namespace kvd
