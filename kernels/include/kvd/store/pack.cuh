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

// Writes one plane of `width` bits from bit `low` of the codes on. `code(token, position)`, tokens
// counted from the tile's first.
template <class Code>
KVD_DEVICE void pack_plane(uint8_t* plane, bool is_value, unsigned tokens, unsigned per_row,
                           unsigned low, unsigned width, Code code) {
    const unsigned count = tokens * per_row;
    const unsigned size = (count * width + 7) / 8;
    const unsigned mask = (1u << width) - 1;
    const bool whole = tokens == TILE_TOKENS && per_row % CODE_GROUP == 0 && misaligned(plane) % 4 == 0;
    if (!whole) {
        for (unsigned at = thread_index(); at < size; at += STORE_THREADS) {
            unsigned byte = 0;
            for (unsigned shift = 0, element = at; element < count; element += size, shift += width) {
                const Place place(is_value, tokens, per_row, element);
                byte |= (code(place.token, place.position) >> low & mask) << shift;
            }
            plane[at] = uint8_t(byte);
        }
        return;
    }
    // Four neighbours along the summed axis are four bytes. The next codes of those bytes are `size`
    // places on: that many groups of keys, or as many groups of values as the plane has bits.
    for (unsigned at = CODE_GROUP * thread_index(); at < size; at += CODE_GROUP * STORE_THREADS) {
        uint32_t word = 0;
        for (unsigned shift = 0, element = at; shift < 8; element += size, shift += width) {
            const unsigned group = element / CODE_GROUP;
            const unsigned lanes = is_value ? per_row : TILE_TOKENS;
            const unsigned first = group / lanes * CODE_GROUP;
            const unsigned lane = group % lanes;
            for (unsigned next = 0; next < CODE_GROUP; next++) {
                const unsigned one =
                    is_value ? code(first + next, lane) : code(lane, first + next);
                word |= (one >> low & mask) << (shift + 8 * next);
            }
        }
        store32(plane + at, word);
    }
}

// Writes all codes of a page, `per_row` of `bits` in a row, from `codes` on. Gives their bytes.
template <class Code>
KVD_DEVICE unsigned pack_codes(const Work& work, uint8_t* codes, unsigned per_row, unsigned bits,
                               Code code) {
    uint8_t* at = codes;
    for (unsigned first = 0; first < work.tokens; first += TILE_TOKENS) {
        const unsigned tokens = least(TILE_TOKENS, work.tokens - first);
        for (unsigned left = bits; left > 0; left -= plane_width(left)) {
            const unsigned width = plane_width(left);
            pack_plane(at, work.unit.is_value != 0, tokens, per_row, bits - left, width,
                       [&](unsigned token, unsigned position) {
                           return code(first + token, position);
                       });
            at += (tokens * per_row * width + 7) / 8;
        }
    }
    return unsigned(at - codes);
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

// Writes codes that stand where their coefficients stood.
template <class Stage>
KVD_DEVICE unsigned write_in_place(const Work& work, uint8_t* codes, unsigned bits) {
    return Stage::write(work, codes, work.dim, bits, [&](unsigned token, unsigned channel) {
        return unsigned(work.words[token * work.stride + channel]);
    });
}

}  // namespace kvd
