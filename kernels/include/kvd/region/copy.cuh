// K and V of a worker's memory to a copy of the daemon's own. A word is read once, so the word that is
// checked and hashed (crates/kvd-compute/src/cpu/content.rs) is the word that is kept, whatever the worker
// writes meanwhile. A thread block takes a run of words. Shared memory: a sum and a place of each thread.
#pragma once

#include "block.cuh"

namespace kvd {

// Read exactly once, which a compiler need not do with memory that it thinks is at rest.
template <class Part>
KVD_DEVICE uint64_t read_once(const uint8_t* from) {
    return *reinterpret_cast<const volatile Part*>(from);
}

// A whole word, in parts.
template <class Part>
KVD_DEVICE uint64_t whole_word(const uint8_t* from) {
    uint64_t word = 0;
#pragma unroll
    for (unsigned at = 0; at < 8; at += sizeof(Part)) {
        word |= read_once<Part>(from + at) << 8 * at;
    }
    return word;
}

// The last `bytes` of a side, less than a word, and zeros.
KVD_DEVICE uint64_t last_word(const uint8_t* from, unsigned bytes) {
    uint64_t word = 0;
    for (unsigned at = 0; at < bytes; at += 2) {
        word |= read_once<uint16_t>(from + at) << 8 * at;
    }
    return word;
}

// Values of a word.
KVD_DEVICE unsigned word_values(uint32_t dtype) { return dtype == 0 ? 2 : 4; }

// Which of a word's values is the first that is not finite; behind the last where all are.
KVD_DEVICE unsigned bad_value(uint64_t word, uint32_t dtype) {
    const unsigned count = word_values(dtype);
    // Exponent of the highest value; f32 and bf16 have the same.
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

// A thread's findings about a side.
struct Stager {
    StageSide side;
    // Where its words begin: K has the odd places, V the even ones.
    unsigned odd;
    uint32_t dtype;
    uint64_t sum;
    uint32_t bad;

    KVD_DEVICE void take(uint64_t at, uint64_t word) {
        side.to[at] = word;
        sum += mixed_word(word, (2 * at + odd) * 0x9E3779B97F4A7C15);
        const unsigned in_word = bad_value(word, dtype);
        if (in_word < word_values(dtype)) {
            bad = least(bad, uint32_t(at) * word_values(dtype) + in_word);
        }
    }

    // The whole words of a run.
    template <class Part>
    KVD_DEVICE void take_run(uint64_t first, uint64_t end) {
        for (uint64_t from = first + thread_index(); from < end; from += AHEAD * REGION_THREADS) {
            // All are asked for before the first is needed.
            uint64_t words[AHEAD];
#pragma unroll
            for (unsigned i = 0; i < AHEAD; i++) {
                const uint64_t at = from + i * REGION_THREADS;
                words[i] = at < end ? whole_word<Part>(side.from + 8 * at) : 0;
            }
#pragma unroll
            for (unsigned i = 0; i < AHEAD; i++) {
                const uint64_t at = from + i * REGION_THREADS;
                if (at < end) {
                    take(at, words[i]);
                }
            }
        }
    }
};

KVD_DEVICE void stage(const StageParameters& parameters, uint8_t* shared) {
    const bool is_key = block_index() < parameters.sides[0].blocks;
    const StageSide side = is_key ? parameters.sides[0] : parameters.sides[1];
    const uint64_t block = block_index() - (is_key ? 0 : parameters.sides[0].blocks);
    const uint64_t first = block * parameters.words;
    const uint64_t whole = side.bytes / 8;
    const uint64_t end = first + parameters.words < whole ? first + parameters.words : whole;
    Stager of = {side, is_key ? 1u : 2u, parameters.dtype, 0, ALL_FINITE};
    if (side.align == 8) {
        of.take_run<uint64_t>(first, end);
    } else if (side.align == 4) {
        of.take_run<uint32_t>(first, end);
    } else {
        of.take_run<uint16_t>(first, end);
    }
    // It is the next word of the side's last thread block.
    const bool is_last = block + 1 == side.blocks && thread_index() == 0;
    if (is_last && side.bytes % 8 > 0) {
        of.take(whole, last_word(side.from + 8 * whole, unsigned(side.bytes % 8)));
    }
    uint64_t* sums = reinterpret_cast<uint64_t*>(shared);
    const uint64_t sum = block_sum(of.sum, sums);
    const uint32_t bad = block_least(of.bad, reinterpret_cast<uint32_t*>(sums + REGION_THREADS));
    if (thread_index() == 0) {
        parameters.checks[block_index()] = {sum, bad, 0};
    }
}

}  // namespace kvd
