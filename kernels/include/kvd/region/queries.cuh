// Queries of a worker's memory to the table that attention reads: scaled, as given and folded into
// coefficient space. One thread block takes a unit's rows.
#pragma once

#include "block.cuh"
#include "query_transform.cuh"

namespace kvd {

KVD_DEVICE float value_of(const uint8_t* values, uint32_t dtype, uint64_t at) {
    if (dtype == 0) {
        return reinterpret_cast<const float*>(values)[at];
    }
    const uint16_t bits = reinterpret_cast<const uint16_t*>(values)[at];
    return dtype == 1 ? f16_value(bits) : bf16_value(bits);
}

KVD_DEVICE void queries(const QueryParameters& parameters, uint8_t* shared) {
    const TransformUnit unit = parameters.units[block_index()];
    const unsigned dim = parameters.dim;
    const Turned of(shared, unit.count, dim);
    uint32_t bad = ALL_FINITE;
    of.each([&](unsigned row, unsigned channel, unsigned at) {
        const uint64_t from =
            batch_row(unit, row, parameters.heads, parameters.group) * dim + channel;
        float value = value_of(parameters.queries, parameters.dtype, from) * parameters.scale;
        // Nothing after this meets a number that is none, or is none times the scale.
        if ((f32_bits(value) & 0x7F800000) == 0x7F800000) {
            bad = least(bad, uint32_t(from));
            value = 0;
        }
        of.rows[at] = value;
        parameters.rows[uint64_t(unit.raw) * dim + at] = value;
    });
    bad = block_least(bad, of.words);
    if (thread_index() == 0) {
        parameters.first_bad[block_index()] = bad;
    }
    if (thread_index() < unit.count) {
        of.marks[thread_index()] = 0;
        parameters.offsets[unit.raw + thread_index()] = 0;
    }
    KVD_BARRIER();
    turn<MeetMean>(of, parameters.steps + unit.fold);
    of.each([&](unsigned, unsigned, unsigned at) {
        parameters.rows[uint64_t(unit.folded) * dim + at] = of.rows[at];
    });
    if (thread_index() < unit.count) {
        parameters.offsets[unit.folded + thread_index()] = of.marks[thread_index()];
    }
}

}  // namespace kvd
