// What an attention kernel has in shared memory.
#pragma once

#include "coded.cuh"

namespace kvd {

// Bytes of one tile's gains, 4 bits per row wherever they begin.
constexpr unsigned GAIN_STAGE = 2 * COPY_BYTES;

// How a unit uses its shared memory; `shared_bytes` of kvd-cuda/src/tables.rs is its size.
template <int ROWS>
struct AttendShared {
    float* query;
    // Scores by part, row and token; at the end, on CUDA cores, sums by row and thread.
    float* sums;
    float* weights;
    float* factors;
    uint8_t* key_table;
    uint8_t* value_table;
    uint8_t* gains;
    uint8_t* stages;
    uint8_t* coded;
    // What products on tensor cores need: of values, of keys, which end the shared memory.
    uint8_t* value_work;
    uint8_t* key_work;

    KVD_DEVICE AttendShared(uint8_t* shared, const AttendParameters& parameters, const Unit& unit,
                            unsigned sums_of_row, unsigned value_work_bytes, bool is_coded) {
        query = reinterpret_cast<float*>(shared);
        sums = query + (ROWS * unit.key.dim + 3) / 4 * 4;
        weights = sums + ROWS * sums_of_row;
        factors = weights + ROWS * TILE_TOKENS;
        key_table = reinterpret_cast<uint8_t*>(factors + (ROWS + 3) / 4 * 4);
        value_table = key_table + parameters.key_table;
        gains = value_table + parameters.value_table;
        stages = gains + 2 * GAIN_STAGE;
        coded = stages + 2 * (parameters.key_stage + parameters.value_stage);
        value_work = coded + (is_coded ? decoder_bytes(parameters) : 0);
        key_work = value_work + value_work_bytes;
    }
};

}  // namespace kvd
