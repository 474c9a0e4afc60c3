// What an attention kernel has in shared memory.
#pragma once

#include "coded.cuh"

namespace kvd {

// Bytes of one tile's gains, 4 bits per row wherever they begin.
constexpr unsigned GAIN_STAGE = 2 * COPY_BYTES;
// Tiles in shared memory at most, and where each is of the unit's pages.
constexpr unsigned BUFFERS_MAX = 4;
constexpr unsigned PLACES_BYTES = BUFFERS_MAX * sizeof(Place);
static_assert(PLACES_BYTES % COPY_BYTES == 0, "what follows is copied to");

// How a unit uses its shared memory; `shared_bytes` of kvd-cuda/src/tables.rs is its size.
template <int ROWS>
struct AttendShared {
    // The unit's queries: where products are on tensor cores, which take their digits, those of the launch,
    // else a copy with zeros for rows that the unit has not.
    const float* query;
    unsigned query_rows;
    // Scores by part, row and token; at the end, on CUDA cores, sums by row and thread.
    float* sums;
    float* weights;
    float* factors;
    uint8_t* key_table;
    uint8_t* value_table;
    uint8_t* gains;
    Place* places;
    uint8_t* stages;
    uint8_t* coded;
    // What products on tensor cores need, tiles that are spread before it: of values, of keys, which end
    // the shared memory.
    uint8_t* value_spread;
    uint8_t* value_work;
    uint8_t* key_spread;
    uint8_t* key_work;

    KVD_DEVICE AttendShared(uint8_t* shared, const AttendParameters& parameters, const Unit& unit,
                            bool has_copy, unsigned sums_of_row, unsigned value_work_bytes,
                            bool is_coded, unsigned buffers) {
        float* copy = reinterpret_cast<float*>(shared);
        query = has_copy ? copy : parameters.queries + uint64_t(unit.query) * unit.key.dim;
        query_rows = unit.rows;
        sums = copy + (has_copy ? (ROWS * unit.key.dim + 3) / 4 * 4 : 0);
        weights = sums + ROWS * sums_of_row;
        factors = weights + ROWS * TILE_TOKENS;
        key_table = reinterpret_cast<uint8_t*>(factors + (ROWS + 3) / 4 * 4);
        value_table = key_table + parameters.key_table;
        gains = value_table + parameters.value_table;
        places = reinterpret_cast<Place*>(gains + buffers * GAIN_STAGE);
        stages = reinterpret_cast<uint8_t*>(places) + PLACES_BYTES;
        coded = stages + buffers * (parameters.key_stage + parameters.value_stage);
        value_spread = coded + (is_coded ? decoder_bytes(parameters) : 0);
        value_work = value_spread + unit.value.spread_bytes;
        key_spread = value_work + value_work_bytes;
        key_work = key_spread + unit.key.spread_bytes;
    }

    // A row's query, of the launch's: rows that the unit has not have the last one's.
    KVD_DEVICE const float* query_of(unsigned row, unsigned dim) const {
        return query + least(row, query_rows - 1) * dim;
    }
};

}  // namespace kvd
