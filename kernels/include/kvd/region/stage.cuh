// K and V of a worker's memory to a copy of the daemon's own. A word is read once: what is tested
// for numbers and hashed (crates/kvd-compute/src/cpu/content.rs) is what is kept, whatever the
// worker writes meanwhile. A thread block takes a run of words. Shared memory: a sum and a place of
// each thread.
#pragma once

#include "block.cuh"

namespace kvd {

struct StageSide {
    // The worker's, aligned to a value; it may change at any time.
    const uint8_t* from;
    // Written: words of eight bytes, the last filled up with zeros.
    uint64_t* to;
    // A whole number of values.
    uint64_t bytes;
    uint32_t blocks;
    // What `from` is aligned to: 8, 4 or 2.
    uint32_t align;
};

// Of a thread block's words.
struct StageCheck {
    uint64_t sum;
    // Index of the first value of the side that is not finite.
    uint32_t first_bad;
    uint32_t unused;
};

struct StageParameters {
    // K's blocks come first.
    StageSide key;
    StageSide value;
    // Written, one of each thread block.
    StageCheck* checks;
    // Words of a thread block.
    uint64_t words;
    // 0 f32, 1 f16, 2 bf16.
    uint32_t dtype;
    uint32_t unused;
};

// Read exactly once, which a compiler need not do with memory that it thinks is at rest.
template <class Part>
KVD_DEVICE uint64_t read_once(const uint8_t* from) {
    return *reinterpret_cast<const volatile Part*>(from);
}

// The word at an offset, in parts; of the last word zeros for what is not there.
template <class Part>
KVD_DEVICE uint64_t stage_word(const StageSide& side, uint64_t offset) {
    uint64_t word = 0;
    if (offset + 8 <= side.bytes) {
#pragma unroll
        for (unsigned at = 0; at < 8; at += sizeof(Part)) {
            word |= read_once<Part>(side.from + offset + at) << 8 * at;
        }
        return word;
    }
    for (unsigned at = 0; offset + at < side.bytes; at += 2) {
        word |= read_once<uint16_t>(side.from + offset + at) << 8 * at;
    }
    return word;
}

// Values of a word.
KVD_DEVICE unsigned word_values(uint32_t dtype) { return dtype == 0 ? 2 : 4; }

// Which of a word's values is the first that is not finite; behind the last where all are.
KVD_DEVICE unsigned bad_value(uint64_t word, uint32_t dtype) {
    const unsigned count = word_values(dtype);
    // Of the highest value first; f32 and bf16 have the same.
    uint64_t exponent = dtype == 1 ? 0x7C00000000000000 : 0x7F80000000000000;
    unsigned first = count;
    for (unsigned at = count; at > 0; at--) {
        first = (word & exponent) == exponent ? at - 1 : first;
        exponent >>= 64 / count;
    }
    return first;
}

KVD_DEVICE uint64_t mixed_word(uint64_t word, uint64_t place) {
    uint64_t mixed = word ^ place;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
    return mixed ^ mixed >> 31;
}

struct StageSeen {
    uint64_t sum;
    uint32_t bad;
};

template <class Part>
KVD_DEVICE StageSeen stage_words(const StageSide& side, uint64_t first, uint64_t end, unsigned odd,
                                 uint32_t dtype) {
    StageSeen seen = {0, ALL_FINITE};
    for (uint64_t from = first + thread_index(); from < end; from += AHEAD * TURN_THREADS) {
        // All are asked for before the first is needed.
        uint64_t words[AHEAD];
#pragma unroll
        for (unsigned i = 0; i < AHEAD; i++) {
            const uint64_t at = from + i * TURN_THREADS;
            words[i] = at < end ? stage_word<Part>(side, 8 * at) : 0;
        }
#pragma unroll
        for (unsigned i = 0; i < AHEAD; i++) {
            const uint64_t at = from + i * TURN_THREADS;
            if (at >= end) {
                break;
            }
            side.to[at] = words[i];
            seen.sum += mixed_word(words[i], (2 * at + odd) * 0x9E3779B97F4A7C15);
            const unsigned bad = bad_value(words[i], dtype);
            if (bad < word_values(dtype)) {
                seen.bad = least(seen.bad, uint32_t(at) * word_values(dtype) + bad);
            }
        }
    }
    return seen;
}

KVD_DEVICE void stage(const StageParameters& parameters, uint8_t* shared) {
    const bool is_key = block_index() < parameters.key.blocks;
    const StageSide side = is_key ? parameters.key : parameters.value;
    const uint64_t block = block_index() - (is_key ? 0 : parameters.key.blocks);
    const uint64_t first = block * parameters.words;
    const uint64_t all = (side.bytes + 7) / 8;
    const uint64_t end = first + parameters.words < all ? first + parameters.words : all;
    const unsigned odd = is_key ? 1 : 2;
    StageSeen seen;
    if (side.align == 8) {
        seen = stage_words<uint64_t>(side, first, end, odd, parameters.dtype);
    } else if (side.align == 4) {
        seen = stage_words<uint32_t>(side, first, end, odd, parameters.dtype);
    } else {
        seen = stage_words<uint16_t>(side, first, end, odd, parameters.dtype);
    }
    uint64_t* sums = reinterpret_cast<uint64_t*>(shared);
    const uint64_t sum = block_sum(seen.sum, sums);
    const uint32_t bad = block_least(seen.bad, reinterpret_cast<uint32_t*>(sums + TURN_THREADS));
    if (thread_index() == 0) {
        parameters.checks[block_index()] = {sum, bad, 0};
    }
}

}  // namespace kvd
