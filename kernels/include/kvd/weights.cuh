// Where the softmax leaves a tile's weights: as floats, and where products of values are on tensor cores
// as digits, times what a token's codes are scaled by. The lane of a token has both, so that those who
// multiply only load words. What the minima of groups add is summed here too.
#pragma once

#include "shared.cuh"

namespace kvd {

template <class Value, int ROWS>
struct Weights {
    // Sets of weights, where the channels of a token have several scales.
    static constexpr unsigned SETS = 0;

    KVD_DEVICE void begin(const SideShape&, const Tile&) {}
    KVD_DEVICE void shrink(unsigned, float) {}
    KVD_DEVICE void put(const AttendShared<ROWS>& shared, unsigned, unsigned row, float weight, bool) {
        shared.weights[row * TILE_TOKENS + lane_index()] = weight;
    }
    KVD_DEVICE void write(const AttendShared<ROWS>&, unsigned, unsigned) {}
};

// Of codes without a scale of their token: whole numbers of one unit.
template <class Side, int ROWS, unsigned SETS_OF_SIDE>
struct DigitWeights {
    static constexpr unsigned SETS = 1;

    KVD_DEVICE void begin(const SideShape&, const Tile&) {}
    KVD_DEVICE void shrink(unsigned, float) {}
    KVD_DEVICE void put(const AttendShared<ROWS>& shared, unsigned, unsigned row, float weight, bool) {
        if constexpr (Tensor<Side>::WANTS_WEIGHTS) {
            shared.weights[row * TILE_TOKENS + lane_index()] = weight;
        }
        const uint32_t whole = f32_bits(fmaf(weight, per_unit(WEIGHT_UNIT), WHOLE_BASE));
        Factor<ROWS>::put(shared.digits, row, lane_index(), whole);
    }
    KVD_DEVICE void write(const AttendShared<ROWS>&, unsigned, unsigned) {}
};

// Of codes with one: a set for each group of channels. Units are found for the largest of a tile, with room
// for larger ones, and stay until one is beyond.
template <class Side, int ROWS>
struct DigitWeights<Side, ROWS, WEIGHT_SETS_MAX> {
    static constexpr unsigned SETS = WEIGHT_SETS_MAX;
    static constexpr unsigned OWNED = (ROWS + ATTEND_WARPS - 1) / ATTEND_WARPS;

    // Of this lane's token, by set; and those there are.
    Scale scale[SETS];
    unsigned sets;
    float bases[OWNED][SETS];

    KVD_DEVICE DigitWeights() : sets(0) {
#pragma unroll
        for (unsigned at = 0; at < OWNED * SETS; at++) {
            bases[at / SETS][at % SETS] = 0;
        }
    }

    KVD_DEVICE void begin(const SideShape& side, const Tile& tile) {
        sets = Tensor<Side>::weight_sets(side);
        Tensor<Side>::weight_scales(side, tile, lane_index(), scale);
    }

    KVD_DEVICE void shrink(unsigned own, float factor) {
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            bases[own][set] *= factor;
        }
    }

    KVD_DEVICE void put(const AttendShared<ROWS>& shared, unsigned own, unsigned row, float weight,
                        bool moves) {
        float* per_units = shared.per_units + row * SETS;
        uint32_t wholes[SETS];
        uint32_t largest = 0;
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            if (set >= sets) {
                break;
            }
            bases[own][set] += weight * scale[set].minimum;
            wholes[set] = whole(weight * scale[set].step, per_units[set]);
            largest = most(largest, wholes[set]);
        }
        if (KVD_RARELY(KVD_BALLOT(moves || largest > WHOLE_MAX) != 0)) {
#pragma unroll
            for (unsigned set = 0; set < SETS; set++) {
                if (set >= sets) {
                    break;
                }
                const float product = weight * scale[set].step;
                const float needed = per_unit(unit_of(warp_max(product), WEIGHT_BITS));
                const float now = moves ? needed : fminf(needed, per_units[set]);
                wholes[set] = whole(product, now);
                KVD_WARP_BARRIER();
                if (lane_index() == 0) {
                    per_units[set] = now;
                }
            }
        }
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            if (set >= sets) {
                break;
            }
            uint32_t* digits = shared.digits + set * Factor<ROWS>::STEP_WORDS;
            Factor<ROWS>::put(digits, row, lane_index(), wholes[set]);
        }
    }

    KVD_DEVICE static uint32_t whole(float product, float per_unit) {
        return f32_bits(fmaf(product, per_unit, WHOLE_BASE));
    }

    // What the minima add to the sums of a row, where scores stood.
    KVD_DEVICE void write(const AttendShared<ROWS>& shared, unsigned own, unsigned row) {
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            const float base = warp_sum(bases[own][set]);
            if (lane_index() == 0) {
                shared.sums[row * SETS + set] = base;
            }
        }
    }
};

template <class Side, int ROWS>
struct Weights<Tensor<Side>, ROWS> : DigitWeights<Side, ROWS, Tensor<Side>::WEIGHT_SETS> {};

}  // namespace kvd
