// Scores to weights: the online softmax (Milakov and Gimelshein, 1805.02867), a warp per row and a lane
// per token. Weights are relative to a score that no later one is much above: only then they, and what was
// summed up, are made smaller, which is rare, so that a tile takes no maximum and no sum over lanes.
#pragma once

#include "weights.cuh"

namespace kvd {

// Scores are kept finite, as on the CPU: huge keys saturate instead of turning into NaN.
constexpr float SCORE_MAX = 1.0e38f;
// What weights are relative to where no score was seen, below all.
constexpr float SCORE_NONE = -3.0e38f;
// How much larger than that score another may be: its weight is below 2.
constexpr float SCORE_ABOVE = 0.693f;

// What query row `row` of a unit sees: the causal rule and the sliding window.
KVD_DEVICE Range visible(const Unit& unit, unsigned row) {
    const unsigned token = (unit.first_row + row) / unit.heads;
    const unsigned position = unit.position > ~0u - 1 - token ? ~0u - 1 : unit.position + token;
    const unsigned to = position + 1;
    return {unit.window && to > unit.window ? to - unit.window : 0, to};
}

// The softmax of the rows that a warp owns: every `ATTEND_WARPS`th.
template <class Value, int ROWS, unsigned PARTS>
struct Softmax {
    static constexpr unsigned OWNED = (ROWS + ATTEND_WARPS - 1) / ATTEND_WARPS;
    // What weights are relative to, and the sum of those of this lane's tokens.
    float reference[OWNED];
    float sum[OWNED];
    // What a row sees, nothing where the unit has none, and what is added to its scores.
    Range seen[OWNED];
    float offset[OWNED];
    Weights<Value, ROWS> weights;

    KVD_DEVICE static unsigned row_of(unsigned own) { return own * ATTEND_WARPS + warp_index(); }

    KVD_DEVICE Softmax(const AttendParameters& parameters, const Unit& unit) {
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            const unsigned row = row_of(own);
            const bool is_row = row < unit.rows;
            reference[own] = SCORE_NONE;
            sum[own] = 0;
            seen[own] = is_row ? visible(unit, row) : Range{0, 0};
            offset[own] = is_row ? parameters.offsets[unit.query + row] : 0;
        }
    }

    // Turns a tile's scores into weights, and says by which factor what was summed so far shrinks.
    // Gains scale the weight of a value, not its part of the sum.
    KVD_DEVICE void absorb(const AttendParameters& parameters, const Place& place, unsigned token,
                           const AttendShared<ROWS>& shared, const SideShape& side,
                           const Tile& values, float gain) {
        const bool is_there = lane_index() >= place.from && lane_index() < place.to;
        weights.begin(side, values);
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            const unsigned row = row_of(own);
            if (row >= ROWS) {
                break;
            }
            const unsigned at = token + lane_index();
            const bool is_seen = is_there && at >= seen[own].from && at < seen[own].to;
            const float score = is_seen ? this->score(parameters, shared, own) : -INFINITY;
            float factor = 1;
            const bool moves = KVD_BALLOT(score > reference[own] + SCORE_ABOVE) != 0;
            if (KVD_RARELY(moves)) {
                const float high = warp_max(score);
                factor = exp_near(reference[own] - high);
                reference[own] = high;
                sum[own] *= factor;
                weights.shrink(own, factor);
            }
            const float weight = exp_near(score - reference[own]);
            sum[own] += weight;
            weights.put(shared, own, row, weight * gain, moves);
            if (lane_index() == 0) {
                shared.factors[row] = factor;
            }
        }
    }

    // The score of this lane's token.
    KVD_DEVICE float score(const AttendParameters& parameters, const AttendShared<ROWS>& shared,
                           unsigned own) const {
        float score = offset[own];
#pragma unroll
        for (unsigned part = 0; part < PARTS; part++) {
            score += shared.sums[(part * ROWS + row_of(own)) * TILE_TOKENS + lane_index()];
        }
        if (KVD_RARELY(parameters.soft_cap > 0)) {
            score = parameters.soft_cap * tanhf(score / parameters.soft_cap);
        }
        return fminf(fmaxf(score, -SCORE_MAX), SCORE_MAX);
    }

    // Behind the last tile: what weights brought beside products, and the unit's statistics.
    KVD_DEVICE void write(const AttendParameters& parameters, const Unit& unit,
                          const AttendShared<ROWS>& shared) {
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            const unsigned row = row_of(own);
            if (row >= ROWS) {
                break;
            }
            weights.write(shared, own, row);
            const float all = warp_sum(sum[own]);
            // Thread blocks that share the channels of the values have the same.
            if (row < unit.rows && lane_index() == 0 && unit.value.part == 0) {
                float* to = parameters.stats + 2 * (unit.partial + row);
                to[0] = all > 0 ? reference[own] : -INFINITY;
                to[1] = all;
            }
        }
    }
};

}  // namespace kvd
