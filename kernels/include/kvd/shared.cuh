// Shared memory of an attention kernel.
#pragma once

#include "tile_scheduler.cuh"
#include "tensor.cuh"

namespace kvd {

// How a unit uses its shared memory; `shared_bytes` of kvd-cuda/src/block_table.rs is its size.
template <int ROWS>
struct AttendShared {
    // The unit's queries: on tensor cores, which take their digits, those of the launch, else a copy with
    // zeros for rows that the unit does not have.
    const float* query;
    unsigned query_rows;
    // Scores by part, row and token; those of the first part become the weights, written by their reader.
    // At the end, on CUDA cores, sums by row and thread.
    float* sums;
    float* weights;
    // Factor by which sums before a tile shrink, by row; on tensor cores how many whole numbers of the
    // weights are one, by row and set, and their digits, by set.
    float* factors;
    float* per_units;
    uint32_t* digits;
    uint8_t* key_table;
    uint8_t* value_table;
    uint8_t* stops;
    uint8_t* stages;
    uint8_t* coded;
    // Tiles unpacked for products on tensor cores, and their other needs: of values, of keys, which
    // end the shared memory.
    uint8_t* value_spread;
    uint8_t* value_work;
    uint8_t* key_spread;
    uint8_t* key_work;

    // Bytes of the stops, of what else sums need; floats of sums of a row; sets of weights.
    struct Sizes {
        unsigned stops;
        unsigned value_work;
        unsigned sums_of_row;
        // Tiles that are worked on together, and sets of weights of each.
        unsigned tiles;
        unsigned sets;
        unsigned buffers;
        bool has_copy;
        bool is_coded;
    };

    KVD_DEVICE AttendShared(uint8_t* shared, const AttendParameters& parameters, const AttendUnit& unit,
                            const SideShape& key, const SideShape& value, const Sizes& sizes) {
        float* copy = reinterpret_cast<float*>(shared);
        query = sizes.has_copy ? copy : parameters.queries + uint64_t(unit.query) * key.dim;
        query_rows = unit.rows;
        sums = copy + (sizes.has_copy ? (ROWS * key.dim + 3) / 4 * 4 : 0);
        weights = sums;
        factors = sums + ROWS * sizes.sums_of_row;
        per_units = factors + (ROWS + 3) / 4 * 4;
        digits = reinterpret_cast<uint32_t*>(per_units + (ROWS * sizes.sets + 3) / 4 * 4);
        key_table = reinterpret_cast<uint8_t*>(digits + sizes.tiles * sizes.sets * Factor<ROWS>::STEP_WORDS);
        value_table = key_table + parameters.key_table;
        stops = value_table + parameters.value_table;
        stages = stops + sizes.stops;
        coded = stages + sizes.buffers * stage_bytes(parameters);
        value_spread = coded + (sizes.is_coded ? decoder_bytes(parameters) : 0);
        value_work = value_spread + value.spread_bytes;
        key_spread = value_work + sizes.value_work;
        key_work = key_spread + key.spread_bytes;
    }

    // A staged tile: keys, values, gains.
    KVD_DEVICE static unsigned stage_bytes(const AttendParameters& parameters) {
        return parameters.key_stage + parameters.value_stage + GAIN_STAGE;
    }

    // A row's query, of the launch's: rows that the unit has not have the last one's.
    KVD_DEVICE const float* query_of(unsigned row, unsigned dim) const {
        return query + least(row, query_rows - 1) * dim;
    }
};

}  // namespace kvd
