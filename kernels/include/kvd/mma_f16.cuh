// Scores and sums of what split_fp.cuh makes factors of products of halves.
#pragma once

#include "split_fp.cuh"
#include "scores.cuh"
#include "sums.cuh"

namespace kvd {

// Shared memory of it, as the host counts it (`work_bytes` of kvd-cuda/src/tensor_core.rs): units of
// the rows, in whole sixteens, then parts of the queries `[steps, ROWS, 4 lanes]` of four words, and of
// bf16 third parts `[steps, ROWS, 4 lanes]` of two.
template <class Side, bool IS_KEY, int ROWS>
struct Scores<Halves<Side, IS_KEY>, ROWS> {
    using Key = Halves<Side, IS_KEY>;
    using Parts = typename Key::Parts;
    static constexpr unsigned PARTS = 1;
    static constexpr bool COPIES_QUERY = false;

    Banks banks;
    float* units;
    uint32_t* words;

    // The queries are cut once; a barrier comes before the first tile.
    KVD_DEVICE Scores(const AttendShared<ROWS>& shared, const AttendParameters&,
                      const SideShape& side)
        : banks(Key::banks(side)),
          units(reinterpret_cast<float*>(shared.key_work)),
          words(reinterpret_cast<uint32_t*>(shared.key_work) + (ROWS + 3) / 4 * 4) {
        for (unsigned row = warp_index(); row < ROWS; row += ATTEND_WARPS) {
            cut_row(side, shared.query_of(row, side.dim), row);
        }
    }

    KVD_DEVICE bool folds(const SideShape&) const { return false; }
    KVD_DEVICE void fold(const AttendShared<ROWS>&, const SideShape&, const Tile&) {}

    KVD_DEVICE void cut_row(const SideShape& side, const float* query, unsigned row) const {
        float largest = 0;
        for (unsigned channel = lane_index(); channel < side.dim; channel += WARP_LANES) {
            largest = fmaxf(largest, fabsf(query[channel]));
        }
        const float unit = unit_of(warp_max(largest), Parts::QUERY_LOG2);
        const float inverse = per_unit(unit);
        const unsigned steps = Key::steps(side.dim);
        for (unsigned quad = lane_index(); quad < steps * CODE_GROUP; quad += WARP_LANES) {
            float values[CODE_GROUP] = {};
            for (unsigned at = 0; quad < side.dim / CODE_GROUP && at < CODE_GROUP; at++) {
                values[at] = query[quad * CODE_GROUP + at] * inverse;
            }
            PartWords<Parts> cut;
            cut_parts<Parts>(values, cut);
            const unsigned slot = Key::slot(quad);
            const unsigned lane = (slot / CODE_GROUP * ROWS + row) * CODE_GROUP + slot % CODE_GROUP;
            for (unsigned word = 0; word < 4; word++) {
                words[4 * lane + word] = cut[word];
            }
            if constexpr (Parts::COUNT == 3) {
                uint32_t* thirds = words + steps * ROWS * CODE_GROUP * 4;
                thirds[2 * lane] = cut[4];
                thirds[2 * lane + 1] = cut[5];
            }
        }
        if (lane_index() == 0) {
            units[row] = unit;
        }
    }

    // Eight tokens of each warp; a lane has sums of two of one row, and values of one token. Lanes without
    // a row in the unit have another's words; their sums are not used.
    KVD_DEVICE void tile(const AttendShared<ROWS>& shared, const SideShape& side,
                         const Tile& tile) const {
        const unsigned first = warp_index() * STEP_COLUMNS;
        const unsigned mine = lane_row() % ROWS * CODE_GROUP + lane_word();
        const uint32_t* of_query = words + 4 * mine;
        const unsigned lanes_of_all = Key::steps(banks.dim) * ROWS * CODE_GROUP;
        const uint32_t* thirds = words + 4 * lanes_of_all + 2 * mine;
        // Two chains, because a product waits for the one before it.
        float sums[2][4] = {};
        const auto add = [&](unsigned step, unsigned chain, const uint32_t(&values)[2]) {
            const unsigned lanes = step * ROWS * CODE_GROUP;
            const FourWords four = *reinterpret_cast<const FourWords*>(of_query + 4 * lanes);
            PartWords<Parts> parts = {four.word[0], four.word[1], four.word[2], four.word[3]};
            if constexpr (Parts::COUNT == 3) {
                const TwoWords two = *reinterpret_cast<const TwoWords*>(thirds + 2 * lanes);
                parts[4] = two.word[0];
                parts[5] = two.word[1];
            }
            multiply_parts<Parts>(sums[chain], parts, values);
        };
        Key::each_key(banks, side, tile, first + lane_row(), add);
        if (lane_row() >= ROWS) {
            return;
        }
        const float unit = units[lane_row()] * Key::scale(side, tile);
        TwoFloats scores;
#pragma unroll
        for (unsigned at = 0; at < 2; at++) {
            const float first_parts = sums[0][at] + sums[1][at];
            const float others = sums[0][2 + at] + sums[1][2 + at];
            // The unit of codes on its own: with a large scale its product would be infinite.
            scores.value[at] = (first_parts + others) * Key::CODE_UNIT * unit;
        }
        float* to = shared.sums + lane_row() * TILE_TOKENS + first + 2 * lane_word();
        *reinterpret_cast<TwoFloats*>(to) = scores;
    }
};

// Shared memory of it, as the host counts it: a row of zeros.
template <class Side, bool IS_KEY, int ROWS>
struct Sums<Halves<Side, IS_KEY>, ROWS> {
    using Value = Halves<Side, IS_KEY>;
    using Parts = typename Value::Parts;
    static constexpr unsigned SUMS_OF_ROW = 0;
    // Sixteen channels of a warp: two blocks of eight.
    static constexpr unsigned UNIT = 2 * STEP_COLUMNS;
    static constexpr unsigned UNITS = HALF_DIM_MAX / UNIT / ATTEND_WARPS;

    Banks banks;
    // Two neighbouring channels of each block.
    float out[UNITS][2][2];
    // The first channel of this warp, and its units.
    unsigned first;
    unsigned units;
    const uint8_t* zeros;

    KVD_DEVICE static unsigned work_bytes(const SideShape&) { return COPY_BYTES; }

    KVD_DEVICE Sums(const AttendShared<ROWS>& shared, const AttendParameters&,
                    const SideShape& side)
        : banks(Value::banks(side)), out(), zeros(shared.value_work) {
        if (thread_index() < COPY_BYTES / 4) {
            reinterpret_cast<uint32_t*>(shared.value_work)[thread_index()] = 0;
        }
        const unsigned all = banks.dim / UNIT;
        const unsigned each = (all + ATTEND_WARPS - 1) / ATTEND_WARPS;
        const unsigned before = least(warp_index() * each, all);
        first = before * UNIT;
        units = least(each, all - before);
    }

    KVD_DEVICE void settle(const AttendParameters&, const SideShape&) {}

    KVD_DEVICE void absorb(const SideShape& side, const Tile& tile,
                           const AttendShared<ROWS>& shared) {
        const unsigned row = lane_row() % ROWS;
        PartWords<Parts> parts[2];
#pragma unroll
        for (unsigned step = 0; step < 2; step++) {
            const unsigned token = step * HALF_TERMS + lane_word() * CODE_GROUP;
            FourFloats four =
                *reinterpret_cast<const FourFloats*>(shared.weights + row * TILE_TOKENS + token);
#pragma unroll
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                four.value[at] *= Parts::WEIGHT_UNITS;
            }
            cut_parts<Parts>(four.value, parts[step]);
        }
        const float factor = shared.factors[row];
        const float scale = Value::scale(side, tile);
        uint32_t words[2][4];
        if (KVD_RARELY(!Value::has_words(tile))) {
#pragma unroll 1
            for (unsigned mine = 0; mine < units; mine++) {
                Value::any_words(side, tile, first + mine * UNIT, words);
#pragma unroll
                for (unsigned unit = 0; unit < UNITS; unit++) {
                    if (unit == mine) {
                        add(out[unit], parts, words, factor, scale);
                    }
                }
            }
            return;
        }
#pragma unroll
        for (unsigned unit = 0; unit < UNITS; unit++) {
            if (unit >= units) {
                break;
            }
            Value::value_words(banks, side, tile, zeros, first + unit * UNIT, words);
            add(out[unit], parts, words, factor, scale);
        }
    }

    // Adds a tile's products to the sums so far, after these shrink by their factor.
    KVD_DEVICE static void add(float (&to)[2][2], const PartWords<Parts> (&parts)[2],
                               const uint32_t (&words)[2][4], float factor, float scale) {
        float sums[2][4] = {};
#pragma unroll
        for (unsigned step = 0; step < 2; step++) {
#pragma unroll
            for (unsigned block = 0; block < 2; block++) {
                const uint32_t values[2] = {words[block][2 * step], words[block][2 * step + 1]};
                multiply_parts<Parts>(sums[block], parts[step], values);
            }
        }
#pragma unroll
        for (unsigned block = 0; block < 2; block++) {
#pragma unroll
            for (unsigned at = 0; at < 2; at++) {
                const float sum = (sums[block][at] + sums[block][2 + at]) * Value::CODE_UNIT;
                to[block][at] = to[block][at] * factor + (Value::HAS_SCALE ? sum * scale : sum);
            }
        }
    }

    // Writes the unit's rows.
    KVD_DEVICE void write(const AttendShared<ROWS>&, const AttendParameters& parameters,
                          const AttendUnit& unit, const SideShape&) const {
        if (lane_row() >= unit.rows) {
            return;
        }
        float* row = parameters.out + uint64_t(unit.partial + lane_row()) * banks.dim;
#pragma unroll
        for (unsigned at = 0; at < 4 * UNITS; at++) {
            const unsigned channel = first + at / 2 * STEP_COLUMNS + 2 * lane_word() + at % 2;
            if (at / 4 < units) {
                row[channel] = out[at / 4][at / 2 % 2][at % 2] / Parts::WEIGHT_UNITS;
            }
        }
    }
};

}  // namespace kvd
