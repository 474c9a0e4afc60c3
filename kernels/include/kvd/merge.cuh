// Adds the partial results `{m, l, o}` of a row's units up: windows, pages and split ranges are one
// mechanism (design section 4; CPU: kvd-compute/src/state.rs). Raw rows and coefficients stay apart,
// because the value side's transform is undone once, on the sum. One thread block per query row.
#pragma once

#include "abi.cuh"
#include "device.cuh"

namespace kvd {

constexpr unsigned MERGE_WARPS = MERGE_THREADS / WARP_LANES;
// Channels of a lane, and partial results of a warp, whose loads are under way together.
constexpr unsigned MERGE_CHANNELS = 4;
constexpr unsigned MERGE_TOGETHER = 4;

// Shared memory; `merge_shared_bytes` of kvd-cuda/src/finish.rs is its size.
struct MergeShared {
    // Factor and number of each of the partial results that are added next, as many as threads.
    float* factors;
    uint32_t* numbers;
    // By warp: maxima, weights by space, and sums `[2, dim]`.
    float* maxima;
    float* weights;
    float* sums;

    KVD_DEVICE explicit MergeShared(uint8_t* shared)
        : factors(reinterpret_cast<float*>(shared)),
          numbers(reinterpret_cast<uint32_t*>(factors + MERGE_THREADS)),
          maxima(reinterpret_cast<float*>(numbers + MERGE_THREADS)),
          weights(maxima + MERGE_WARPS),
          sums(weights + 2 * MERGE_WARPS) {}
};

// The largest score of `count` partial results, each thread looking at some.
KVD_DEVICE float largest_score(const MergeParameters& parameters, const uint32_t* first,
                               unsigned count, const MergeShared& shared) {
    float max = -INFINITY;
    for (unsigned at = thread_index(); at < count; at += MERGE_THREADS) {
        max = fmaxf(max, parameters.stats[2 * uint64_t(first[at] & ~COEFFICIENTS)]);
    }
    max = warp_max(max);
    if (lane_index() == 0) {
        shared.maxima[warp_index()] = max;
    }
    KVD_BARRIER();
#pragma unroll
    for (unsigned warp = 0; warp < MERGE_WARPS; warp++) {
        max = fmaxf(max, shared.maxima[warp]);
    }
    return max;
}

// Adds this warp's share of `count` partial results, some channels of each lane.
KVD_DEVICE void add_partials(const MergeParameters& parameters, const MergeShared& shared,
                             unsigned count, unsigned channel, float (&sums)[2][MERGE_CHANNELS]) {
    constexpr unsigned STEP = MERGE_WARPS * MERGE_TOGETHER;
    for (unsigned from = warp_index(); from < count; from += STEP) {
        float values[MERGE_TOGETHER][MERGE_CHANNELS];
        float factors[MERGE_TOGETHER];
        uint32_t numbers[MERGE_TOGETHER];
#pragma unroll
        for (unsigned of = 0; of < MERGE_TOGETHER; of++) {
            const unsigned at = from + of * MERGE_WARPS;
            factors[of] = at < count ? shared.factors[at] : 0;
            numbers[of] = at < count ? shared.numbers[at] : 0;
            const uint64_t row = uint64_t(numbers[of] & ~COEFFICIENTS) * parameters.dim;
#pragma unroll
            for (unsigned i = 0; i < MERGE_CHANNELS; i++) {
                const unsigned mine = channel + i * WARP_LANES;
                // What a unit without weight has is not read.
                const bool is_read = factors[of] != 0 && mine < parameters.dim;
                values[of][i] = is_read ? parameters.out[row + mine] : 0;
            }
        }
#pragma unroll
        for (unsigned of = 0; of < MERGE_TOGETHER; of++) {
            const bool folded = numbers[of] / COEFFICIENTS != 0;
            const float raw = folded ? 0 : factors[of];
            const float coefficient = folded ? factors[of] : 0;
#pragma unroll
            for (unsigned i = 0; i < MERGE_CHANNELS; i++) {
                sums[0][i] += values[of][i] * raw;
                sums[1][i] += values[of][i] * coefficient;
            }
        }
    }
}

// Threads take the partial results side by side: first their scores, then, as many as there are threads at
// a time, their factors, and warps every fourth one's row, several loads at once.
KVD_DEVICE void merge(const MergeParameters& parameters, uint8_t* memory) {
    const MergeShared shared(memory);
    const unsigned row = block_index();
    const unsigned start = row == 0 ? 0 : parameters.ends[row - 1];
    const uint32_t* first = parameters.partials + start;
    const unsigned count = parameters.ends[row] - start;
    const unsigned dim = parameters.dim;
    const float max = largest_score(parameters, first, count, shared);
    float weights[2] = {0, 0};
    for (unsigned channels = 0; channels < dim; channels += MERGE_CHANNELS * WARP_LANES) {
        float sums[2][MERGE_CHANNELS] = {};
        for (unsigned from = 0; from < count; from += MERGE_THREADS) {
            const unsigned at = from + thread_index();
            if (at < count) {
                const uint32_t number = first[at];
                const float* stats = parameters.stats + 2 * uint64_t(number & ~COEFFICIENTS);
                // Nothing was seen by a unit without weight; without the test two infinities would meet.
                const float factor = stats[1] > 0 ? expf(stats[0] - max) : 0;
                if (channels == 0 && stats[1] > 0) {
                    const bool folded = number / COEFFICIENTS != 0;
                    weights[0] += folded ? 0 : stats[1] * factor;
                    weights[1] += folded ? stats[1] * factor : 0;
                }
                shared.factors[thread_index()] = factor;
                shared.numbers[thread_index()] = number;
            }
            KVD_BARRIER();
            const unsigned here = least(count - from, MERGE_THREADS);
            add_partials(parameters, shared, here, channels + lane_index(), sums);
            KVD_BARRIER();
        }
#pragma unroll
        for (unsigned at = 0; at < 2 * MERGE_CHANNELS; at++) {
            const unsigned mine = channels + at % MERGE_CHANNELS * WARP_LANES + lane_index();
            if (mine < dim) {
                const unsigned of = 2 * warp_index() + at / MERGE_CHANNELS;
                shared.sums[of * dim + mine] = sums[at / MERGE_CHANNELS][at % MERGE_CHANNELS];
            }
        }
    }
#pragma unroll
    for (unsigned space = 0; space < 2; space++) {
        const float all = warp_sum(weights[space]);
        if (lane_index() == 0) {
            shared.weights[2 * warp_index() + space] = all;
        }
    }
    KVD_BARRIER();
    for (unsigned at = thread_index(); at < 2 * dim; at += MERGE_THREADS) {
        float sum = 0;
#pragma unroll
        for (unsigned warp = 0; warp < MERGE_WARPS; warp++) {
            sum += shared.sums[2 * warp * dim + at];
        }
        parameters.sums[2 * uint64_t(row) * dim + at] = sum;
    }
    if (thread_index() == 0) {
        float of_space[2] = {0, 0};
#pragma unroll
        for (unsigned at = 0; at < 2 * MERGE_WARPS; at++) {
            of_space[at % 2] += shared.weights[at];
        }
        const float sum = of_space[0] + of_space[1];
        float* result = parameters.results + 3 * uint64_t(row);
        result[0] = sum > 0 ? max + logf(sum) : -INFINITY;
        result[1] = sum;
        result[2] = of_space[1];
    }
}

}  // namespace kvd
