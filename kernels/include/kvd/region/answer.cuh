// Merged sums to the answer in a worker's memory: the value side's transform is undone once per row
// (CPU: crates/kvd-cuda/src/finish.rs). One thread block takes a unit's rows.
#pragma once

#include "query_transform.cuh"

namespace kvd {

// The bits of a value in f16 (1) or bf16 (2): beyond the format's largest it becomes that, as every
// narrowing does (CPU: DType::narrow). Rows are finite, so that an infinite sum is one that overflowed.
KVD_DEVICE uint16_t saturated_bits(float value, uint32_t dtype) {
    const float largest = dtype == 1 ? 65504.0f : 3.3895314e38f;
    // NaN compares with nothing.
    const float within = value > largest ? largest : value < -largest ? -largest : value;
    return dtype == 1 ? f16_bits(within) : bf16_bits(within);
}

KVD_DEVICE void answer(const AnswerParameters& parameters, uint8_t* shared) {
    const TransformUnit unit = parameters.units[block_index()];
    const unsigned dim = parameters.dim;
    const Turned of(shared, unit.count, dim);
    const auto row_of = [&](unsigned row) {
        return batch_row(unit, row, parameters.heads, parameters.group);
    };
    of.each([&](unsigned row, unsigned channel, unsigned at) {
        of.rows[at] = parameters.sums[(2 * row_of(row) + 1) * dim + channel];
    });
    if (thread_index() < unit.count) {
        const uint64_t row = row_of(thread_index());
        of.marks[thread_index()] = parameters.results[3 * row + 2];
        parameters.lse[row] = parameters.results[3 * row];
    }
    KVD_BARRIER();
    turn<AddMean>(of, parameters.steps + unit.unfold);
    of.each([&](unsigned row, unsigned channel, unsigned at) {
        const uint64_t to = row_of(row);
        const float* result = parameters.results + 3 * to;
        float value = parameters.sums[2 * to * dim + channel];
        value += result[2] > 0 ? of.rows[at] : 0;
        value = result[1] == 0 ? 0 : value / result[1];
        const uint64_t index = to * dim + channel;
        if (parameters.dtype == 0) {
            reinterpret_cast<float*>(parameters.out)[index] = value;
        } else {
            const uint16_t bits = saturated_bits(value, parameters.dtype);
            reinterpret_cast<uint16_t*>(parameters.out)[index] = bits;
        }
    });
}

}  // namespace kvd
