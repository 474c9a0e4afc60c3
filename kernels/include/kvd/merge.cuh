// Adds the partial results `{m, l, o}` of a row's units up: windows, pages and split ranges are one
// mechanism (design section 4; CPU: kvd-compute/src/state.rs). Raw rows and coefficients stay apart,
// because the value side's transform is undone once, on the sum. One thread block per query row.
#pragma once

#include "device.cuh"

namespace kvd {

constexpr unsigned MERGE_THREADS = 128;
// Marks a partial result that is in coefficients.
constexpr uint32_t COEFFICIENTS = 1u << 31;

struct MergeParameters {
    // Results of `attend`: `[partials, dim]` and `{m, l}` of each.
    const float* out;
    const float* stats;
    // Row `r` has the partial results `partials[ends[r - 1]..ends[r]]`.
    const uint32_t* ends;
    const uint32_t* partials;
    // Weighted sums by row, `[2, dim]` each, raw rows first; and `{lse, weights, of them those of
    // coefficients}`.
    float* sums;
    float* results;
    uint32_t dim;
    uint32_t unused;
};

KVD_DEVICE void merge(const MergeParameters& parameters, uint8_t*) {
    const unsigned row = block_index();
    const uint32_t* first = parameters.partials + (row == 0 ? 0 : parameters.ends[row - 1]);
    const uint32_t* end = parameters.partials + parameters.ends[row];
    float max = -INFINITY;
    for (const uint32_t* at = first; at < end; at++) {
        max = fmaxf(max, parameters.stats[2 * uint64_t(*at & ~COEFFICIENTS)]);
    }
    float weights[2] = {0, 0};
    for (const uint32_t* at = first; at < end; at++) {
        const float* stats = parameters.stats + 2 * uint64_t(*at & ~COEFFICIENTS);
        // Nothing was seen by a unit without weight; without the test two infinities would meet.
        weights[*at / COEFFICIENTS] += stats[1] > 0 ? stats[1] * expf(stats[0] - max) : 0;
    }
    for (unsigned channel = thread_index(); channel < parameters.dim; channel += MERGE_THREADS) {
        float sums[2] = {0, 0};
        for (const uint32_t* at = first; at < end; at++) {
            const uint64_t index = *at & ~COEFFICIENTS;
            const float* stats = parameters.stats + 2 * index;
            if (stats[1] > 0) {
                const float out = parameters.out[index * parameters.dim + channel];
                sums[*at / COEFFICIENTS] += out * expf(stats[0] - max);
            }
        }
        for (unsigned space = 0; space < 2; space++) {
            parameters.sums[(2 * uint64_t(row) + space) * parameters.dim + channel] = sums[space];
        }
    }
    if (thread_index() == 0) {
        const float sum = weights[0] + weights[1];
        float* result = parameters.results + 3 * uint64_t(row);
        result[0] = sum > 0 ? max + logf(sum) : -INFINITY;
        result[1] = sum;
        result[2] = weights[1];
    }
}

}  // namespace kvd
