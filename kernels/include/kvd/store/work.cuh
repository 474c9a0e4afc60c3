// One page that is being written by one thread block: the host's description, its coefficients as words
// that become codes in place, and reductions over the block. kvd-codec/src/encode.rs does the same on the
// host, with the same bytes of pages.
#pragma once

#include "../codes.cuh"

namespace kvd {

constexpr unsigned STORE_WARPS = STORE_THREADS / WARP_LANES;

// Rows that a warp takes at a time.
constexpr unsigned WARP_ROWS = 4;

// Defined in huffman.cuh.
struct CodeHead;

// Bytes of a value of the rows as they came.
KVD_DEVICE unsigned row_value_bytes(const StoreUnit& unit) { return unit.dtype == 0 ? 4 : 2; }

// Words of a row: lanes that read one channel of neighbouring tokens should not meet in a bank.
KVD_DEVICE constexpr unsigned word_stride(unsigned dim) { return (dim + 3) / 4 * 4 + 4; }

struct Work {
    const SideShape& side;
    const StoreUnit& unit;
    // The unit's `header`, where it lies: a copy that is indexed would be one in memory.
    const uint32_t* header;
    unsigned tokens;
    unsigned dim;
    // Coefficient or code `(token, channel)` is word `token * stride + channel`.
    uint32_t* words;
    unsigned stride;
    // Behind the header.
    uint8_t* payload;
    const uint8_t* tables;
    // The side's first step; what its quantizer reads beside its table; how its
    // Huffman codes are made.
    const uint8_t* steps;
    const float* norms;
    const CodeHead* codes;
    // Base of the offsets of tables of Huffman codes.
    const uint8_t* constants;
    // Shared: a number for each thread; a word for each warp; `WARP_ROWS` rows for each; a shift per row.
    uint64_t* sums;
    uint32_t* slots;
    uint32_t* rows;
    uint8_t* shifts;

    KVD_DEVICE float value(unsigned token, unsigned channel) const {
        return f32_value(words[token * stride + channel]);
    }

    // A tile that stands for the page, to ask for the places of its parts.
    KVD_DEVICE Tile page() const {
        Tile tile = {};
        tile.page_tokens = tokens;
        tile.tokens = tokens;
        return tile;
    }
};

// A quantizer's answer for a page that it has no codes for; a payload may well be empty.
constexpr unsigned NO_CODES = ~0u;

// The largest word of all threads. Every thread of the block calls it.
KVD_DEVICE uint32_t block_most(uint32_t word, uint32_t* slots) {
    word = warp_most(word);
    if (lane_index() == 0) {
        slots[warp_index()] = word;
    }
    KVD_BARRIER();
    for (unsigned warp = 0; warp < STORE_WARPS; warp++) {
        word = most(word, slots[warp]);
    }
    KVD_BARRIER();
    return word;
}

// Sums over the lanes of each warp: of all warps, and of those before this one. Every thread of the block
// makes one.
struct WarpSums {
    uint32_t all;
    uint32_t before;

    KVD_DEVICE WarpSums(uint32_t mine, uint32_t* slots) : all(0), before(0) {
        for (unsigned step = WARP_LANES / 2; step > 0; step /= 2) {
            mine += KVD_SHUFFLE(mine, lane_index() ^ step);
        }
        if (lane_index() == 0) {
            slots[warp_index()] = mine;
        }
        KVD_BARRIER();
        for (unsigned warp = 0; warp < STORE_WARPS; warp++) {
            before += warp < warp_index() ? slots[warp] : 0;
            all += slots[warp];
        }
        KVD_BARRIER();
    }
};

// Neighbours of `count` that this warp has to itself.
KVD_DEVICE Range part_of_warp(unsigned count) {
    const unsigned part = (count + STORE_WARPS - 1) / STORE_WARPS;
    const unsigned from = least(count, warp_index() * part);
    return {from, least(count, from + part)};
}

// From one number to every `step`th after it, as places in rows of `width`, without a division for each.
struct Walk {
    unsigned width;
    unsigned rows;
    unsigned columns;
    unsigned row;
    unsigned column;

    KVD_DEVICE Walk(unsigned width, unsigned from, unsigned step) : width(width) {
        rows = quotient(step, width);
        columns = step - rows * width;
        row = quotient(from, width);
        column = from - row * width;
    }

    KVD_DEVICE void next() {
        row += rows;
        column += columns;
        row += column >= width ? 1 : 0;
        column -= column >= width ? width : 0;
    }
};

// Calls `use(token, channel)` for all values, a warp per row.
template <class Use>
KVD_DEVICE void each_value(unsigned tokens, unsigned dim, Use use) {
    for (unsigned token = warp_index(); token < tokens; token += STORE_WARPS) {
        for (unsigned channel = lane_index(); channel < dim; channel += WARP_LANES) {
            use(token, channel);
        }
    }
}

KVD_DEVICE uint32_t magnitude_bits(float value) { return f32_bits(value) & 0x7FFFFFFF; }
KVD_DEVICE bool is_finite(float value) { return magnitude_bits(value) < 0x7F800000; }

// The bits of the page's largest magnitude; above those of infinity where a value is NaN.
KVD_DEVICE uint32_t largest_magnitude(const Work& work) {
    uint32_t largest = 0;
    each_value(work.tokens, work.dim, [&](unsigned token, unsigned channel) {
        largest = most(largest, magnitude_bits(work.value(token, channel)));
    });
    return block_most(largest, work.slots);
}

KVD_DEVICE void store16(uint8_t* at, uint16_t word) { *reinterpret_cast<uint16_t*>(at) = word; }
KVD_DEVICE void store32(uint8_t* at, uint32_t word) { *reinterpret_cast<uint32_t*>(at) = word; }
// Aligned to four bytes, or to all.
KVD_DEVICE void store_words(uint8_t* at, const FourWords& words) {
    if (misaligned(at) == 0) {
        *reinterpret_cast<FourWords*>(at) = words;
        return;
    }
    for (unsigned word = 0; word < 4; word++) {
        store32(at + 4 * word, words.word[word]);
    }
}
// At any address.
KVD_DEVICE void store16_any(uint8_t* at, uint16_t word) {
    at[0] = uint8_t(word);
    at[1] = uint8_t(word >> 8);
}
KVD_DEVICE void store32_any(uint8_t* at, uint32_t word) {
    store16_any(at, uint16_t(word));
    store16_any(at + 2, uint16_t(word >> 16));
}

}  // namespace kvd
