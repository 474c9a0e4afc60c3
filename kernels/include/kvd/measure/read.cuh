// Reads memory and adds it up: the read bandwidth of a run, which kernels are measured against
// (kernels/gpu/bench.py). Serves nothing.
#pragma once

#include "../device.cuh"

namespace kvd {

constexpr unsigned READ_THREADS = 128;
// Loads that a thread has under way.
constexpr unsigned READ_DEPTH = 8;

// Bytes of one load.
struct alignas(16) Quad {
    uint32_t words[4];
};

struct ReadParameters {
    const Quad* quads;
    // The sum of each thread's words, without what is over 32 bits; written.
    uint32_t* sums;
    // Quads of a thread block, a multiple of `READ_THREADS * READ_DEPTH`.
    uint64_t per_block;
};

KVD_DEVICE void read(const ReadParameters& parameters, uint8_t*) {
    const Quad* quads = parameters.quads + block_index() * parameters.per_block + thread_index();
    uint32_t sum = 0;
    for (uint64_t at = 0; at < parameters.per_block; at += READ_THREADS * READ_DEPTH) {
        Quad loaded[READ_DEPTH];
#pragma unroll
        for (unsigned i = 0; i < READ_DEPTH; i++) {
            loaded[i] = quads[at + i * READ_THREADS];
        }
#pragma unroll
        for (unsigned i = 0; i < READ_DEPTH; i++) {
            for (unsigned word = 0; word < 4; word++) {
                sum += loaded[i].words[word];
            }
        }
    }
    parameters.sums[block_index() * READ_THREADS + thread_index()] = sum;
}

}  // namespace kvd
