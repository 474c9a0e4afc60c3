// Code that copies share: loads under way, and a thread block's word about the values that it has
// read.
#pragma once

#include "query_transform.cuh"

namespace kvd {

// Loads that a thread has under way, where it copies.
constexpr unsigned AHEAD = 4;

// One word of all threads, there for all of them: `pick` of two again and again. `words` has one of
// each thread.
template <class Word, class Pick>
KVD_DEVICE Word block_one(Word word, Word* words, Pick pick) {
    words[thread_index()] = word;
    KVD_BARRIER();
    for (unsigned half = REGION_THREADS / 2; half > 0; half /= 2) {
        if (thread_index() < half) {
            words[thread_index()] = pick(words[thread_index()], words[thread_index() + half]);
        }
        KVD_BARRIER();
    }
    return words[0];
}

KVD_DEVICE uint32_t block_least(uint32_t word, uint32_t* words) {
    return block_one(word, words, [](uint32_t a, uint32_t b) { return least(a, b); });
}

KVD_DEVICE uint64_t block_sum(uint64_t word, uint64_t* words) {
    return block_one(word, words, [](uint64_t a, uint64_t b) { return a + b; });
}

}  // namespace kvd
