// Places where the softmax leaves a tile's weights: as floats, and for products of values on tensor cores
// as digits, times the scales of a token's codes. The lane of a token has both, so the multiplying lanes
// only load words. The sums of the groups' minima are made here too.
#pragma once

#include "shared.cuh"

namespace kvd {

// Weights of this lane's tokens, by row that the warp owns and by tile.
template <int ROWS, unsigned TILES>
struct OfLane {
    static constexpr unsigned OWNED = (ROWS + ATTEND_WARPS - 1) / ATTEND_WARPS;
    using Array = const float (&)[OWNED][TILES];

    KVD_DEVICE static unsigned row_of(unsigned own) { return own * ATTEND_WARPS + warp_index(); }

    // Leaves them as floats.
    KVD_DEVICE static void put(const AttendShared<ROWS>& shared, Array weight) {
#pragma unroll
        for (unsigned at = 0; at < OWNED * TILES; at++) {
            const unsigned row = row_of(at / TILES);
            if (row < ROWS) {
                float* to = shared.weights + (at % TILES * ROWS + row) * TILE_TOKENS;
                to[lane_index()] = weight[at / TILES][at % TILES];
            }
        }
    }
};

template <class Value, int ROWS, unsigned TILES>
struct Weights {
    // Sets of weights, where the channels of a token have several scales.
    static constexpr unsigned SETS = 0;
    using Mine = OfLane<ROWS, TILES>;

    KVD_DEVICE void shrink(unsigned, float) {}
    KVD_DEVICE void put(const AttendShared<ROWS>& shared, const SideShape&, const Tile (&)[TILES],
                        typename Mine::Array weight, const bool (&)[Mine::OWNED]) {
        Mine::put(shared, weight);
    }
    KVD_DEVICE void write(const AttendShared<ROWS>&, unsigned, unsigned) {}
};

// Weights of codes without a scale of their token: whole numbers of one unit.
template <class Side, int ROWS, unsigned TILES, unsigned SETS_OF_SIDE>
struct DigitWeights {
    static constexpr unsigned SETS = 1;
    using Mine = OfLane<ROWS, TILES>;

    KVD_DEVICE void shrink(unsigned, float) {}
    KVD_DEVICE void put(const AttendShared<ROWS>& shared, const SideShape&, const Tile (&)[TILES],
                        typename Mine::Array weight, const bool (&)[Mine::OWNED]) {
        if constexpr (Tensor<Side>::WANTS_WEIGHTS) {
            Mine::put(shared, weight);
        }
#pragma unroll
        for (unsigned at = 0; at < Mine::OWNED * TILES; at++) {
            const unsigned row = Mine::row_of(at / TILES);
            const float of_token = weight[at / TILES][at % TILES];
            const uint32_t whole = f32_bits(fmaf(of_token, per_unit(WEIGHT_UNIT), WHOLE_BASE));
            if (row < ROWS) {
                uint32_t* digits = shared.digits + at % TILES * Factor<ROWS>::STEP_WORDS;
                const unsigned term = TokenOrder<Tensor<Side>>::term(lane_index());
                Factor<ROWS>::put(digits, row, term, whole);
            }
            if constexpr (ScalesSums<Tensor<Side>>::value) {
                put_sum(shared, row, at % TILES, whole);
            }
        }
    }
    // Factor of a tile's zero points: the sum of a row's weights, at the place of its first score.
    KVD_DEVICE static void put_sum(const AttendShared<ROWS>& shared, unsigned row, unsigned tile,
                                   uint32_t whole) {
        const uint32_t sum = warp_total(whole - f32_bits(WHOLE_BASE));
        if (row < ROWS && lane_index() == 0) {
            shared.weights[(tile * ROWS + row) * TILE_TOKENS] = float(sum) * WEIGHT_UNIT;
        }
    }
    KVD_DEVICE void write(const AttendShared<ROWS>&, unsigned, unsigned) {}
};

// Weights of codes with a scale of their token: a set for each group of channels. Units are chosen
// for the largest of a tile, with room for larger ones, and stay until one is beyond or the
// reference moves.
template <class Side, int ROWS, unsigned TILES>
struct DigitWeights<Side, ROWS, TILES, WEIGHT_SETS_MAX> {
    static constexpr unsigned SETS = WEIGHT_SETS_MAX;
    using Value = Tensor<Side>;
    using Mine = OfLane<ROWS, TILES>;
    static constexpr unsigned OWNED = Mine::OWNED;

    float bases[OWNED][SETS];

    KVD_DEVICE DigitWeights() {
#pragma unroll
        for (unsigned at = 0; at < OWNED * SETS; at++) {
            bases[at / SETS][at % SETS] = 0;
        }
    }

    KVD_DEVICE void shrink(unsigned own, float factor) {
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            bases[own][set] *= factor;
        }
    }

    KVD_DEVICE void put(const AttendShared<ROWS>& shared, const SideShape& side,
                        const Tile (&values)[TILES], typename Mine::Array weight,
                        const bool (&moves)[OWNED]) {
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            if (Mine::row_of(own) < ROWS) {
                put_row(shared, side, values, weight[own], moves[own], own);
            }
        }
    }

    KVD_DEVICE void put_row(const AttendShared<ROWS>& shared, const SideShape& side,
                            const Tile (&values)[TILES], const float (&weight)[TILES], bool moves,
                            unsigned own) {
        const unsigned sets = Value::weight_sets(side);
        const unsigned row = Mine::row_of(own);
        uint32_t wholes[TILES][SETS] = {};
        uint32_t largest = 0;
#pragma unroll
        for (unsigned tile = 0; tile < TILES; tile++) {
            Scale scale[SETS];
            Value::weight_scales(side, values[tile], lane_index(), scale);
#pragma unroll
            for (unsigned set = 0; set < SETS; set++) {
                if (set >= sets) {
                    break;
                }
                bases[own][set] += weight[tile] * scale[set].minimum;
                wholes[tile][set] =
                    whole(weight[tile] * scale[set].step, shared.per_units[row * SETS + set]);
                largest = most(largest, wholes[tile][set]);
            }
        }
        if (KVD_RARELY(KVD_BALLOT(moves || largest > WHOLE_MAX) != 0)) {
            find_units(shared, side, values, weight, moves, row, wholes);
        }
#pragma unroll
        for (unsigned at = 0; at < TILES * SETS; at++) {
            if (at % SETS < sets) {
                uint32_t* digits = shared.digits + at * Factor<ROWS>::STEP_WORDS;
                Factor<ROWS>::put(digits, row, lane_index(), wholes[at / SETS][at % SETS]);
            }
        }
    }

    // Units for a row, those of all sets, and its whole numbers of them.
    KVD_DEVICE void find_units(const AttendShared<ROWS>& shared, const SideShape& side,
                               const Tile (&values)[TILES], const float (&weight)[TILES], bool moves,
                               unsigned row, uint32_t (&wholes)[TILES][SETS]) const {
        const unsigned sets = Value::weight_sets(side);
        float* per_units = shared.per_units + row * SETS;
        float largest[SETS] = {};
        for (unsigned pass = 0; pass < 2; pass++) {
#pragma unroll
            for (unsigned tile = 0; tile < TILES; tile++) {
                Scale scale[SETS];
                Value::weight_scales(side, values[tile], lane_index(), scale);
#pragma unroll
                for (unsigned set = 0; set < SETS; set++) {
                    if (set >= sets) {
                        break;
                    }
                    const float product = weight[tile] * scale[set].step;
                    largest[set] = fmaxf(largest[set], product);
                    wholes[tile][set] = whole(product, per_units[set]);
                }
            }
#pragma unroll
            for (unsigned set = 0; set < SETS && pass == 0; set++) {
                if (set >= sets) {
                    break;
                }
                const float needed = per_unit(unit_of(warp_max(largest[set]), WEIGHT_BITS));
                const float now = moves ? needed : fminf(needed, per_units[set]);
                KVD_WARP_BARRIER();
                if (lane_index() == 0) {
                    per_units[set] = now;
                }
            }
            KVD_WARP_BARRIER();
        }
    }

    KVD_DEVICE static uint32_t whole(float product, float per_unit) {
        return f32_bits(fmaf(product, per_unit, WHOLE_BASE));
    }

    // Writes the sums that minima add to a row, at the places of scores.
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

template <class Side, int ROWS, unsigned TILES>
struct Weights<Tensor<Side>, ROWS, TILES>
    : DigitWeights<Side, ROWS, TILES, Tensor<Side>::WEIGHT_SETS> {};

}  // namespace kvd
