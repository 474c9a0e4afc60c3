// Staged rows, `[tokens, kv heads, dim]`, to raw slots, where the rows of one head lie one behind
// the other. One thread block takes a run of them.
#pragma once

#include "block.cuh"

namespace kvd {

struct alignas(16) Sixteen {
    uint32_t words[4];
};

template <class Part>
KVD_DEVICE void copy_rows(const RowsUnit& unit) {
    const unsigned parts = unit.row_bytes / sizeof(Part);
    const unsigned end = unit.rows * parts;
    Part* to = reinterpret_cast<Part*>(unit.to);
    for (unsigned from = thread_index(); from < end; from += AHEAD * REGION_THREADS) {
        Part loaded[AHEAD];
#pragma unroll
        for (unsigned i = 0; i < AHEAD; i++) {
            const unsigned at = from + i * REGION_THREADS;
            const uint8_t* row = unit.from + uint64_t(at / parts) * unit.stride;
            if (at < end) {
                loaded[i] = reinterpret_cast<const Part*>(row)[at % parts];
            }
        }
#pragma unroll
        for (unsigned i = 0; i < AHEAD; i++) {
            const unsigned at = from + i * REGION_THREADS;
            if (at < end) {
                to[at] = loaded[i];
            }
        }
    }
}

KVD_DEVICE void rows(const RowsParameters& parameters, uint8_t*) {
    const RowsUnit unit = parameters.units[block_index()];
    if (parameters.align == 16) {
        copy_rows<Sixteen>(unit);
    } else {
        copy_rows<uint32_t>(unit);
    }
}

}  // namespace kvd
