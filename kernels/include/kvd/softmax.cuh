// Scores to weights: the online softmax (Milakov and Gimelshein, 1805.02867), a warp per row and a lane per
// token. Weights are relative to a reference score. Only when a later score is much above it, which is
// rare, are weights and sums scaled down; so a tile takes no maximum and no sum over lanes.
#pragma once

#include "weights.cuh"

namespace kvd {

// Scores are kept finite, as on the CPU: huge keys saturate instead of turning into NaN.
constexpr float SCORE_MAX = 1.0e38f;
// Reference of weights before any score was seen, below all scores.
constexpr float SCORE_NONE = -3.0e38f;
// How much larger than that score another may be: its weight is below 2.
constexpr float SCORE_ABOVE = 0.693f;

// The softmax of the rows that a warp owns: every `ATTEND_WARPS`th.
template <class Value, int ROWS, unsigned PARTS, unsigned TILES>
struct Softmax {
    static constexpr unsigned OWNED = (ROWS + ATTEND_WARPS - 1) / ATTEND_WARPS;
    // Reference of the weights, and the sum of the weights of this lane's tokens.
    float reference[OWNED];
    float sum[OWNED];
    // Tokens that a row sees, none where the unit has no such row, and the offset of its scores.
    Range seen[OWNED];
    float offset[OWNED];
    Weights<Value, ROWS, TILES> weights;

    KVD_DEVICE static unsigned row_of(unsigned own) { return own * ATTEND_WARPS + warp_index(); }

    KVD_DEVICE Softmax(const AttendParameters& parameters, const AttendUnit& unit) {
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

    // Turns scores of tiles that are worked on together into weights, and gives the factor by which earlier
    // sums shrink. Gains scale the weight of a value, not its part of the sum.
    KVD_DEVICE void absorb(const AttendParameters& parameters, const Place& place, unsigned token,
                           const AttendShared<ROWS>& shared, const SideShape& side,
                           const Tile (&values)[TILES], const float (&gains)[TILES]) {
        float weight[OWNED][TILES] = {};
        bool moves[OWNED];
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            moves[own] = false;
            if (row_of(own) >= ROWS) {
                break;
            }
            float largest = -INFINITY;
#pragma unroll
            for (unsigned tile = 0; tile < TILES; tile++) {
                const unsigned row = tile * TILE_TOKENS + lane_index();
                const unsigned at = token + row;
                const bool is_seen = row >= place.from && row < place.to && at >= seen[own].from &&
                                     at < seen[own].to;
                weight[own][tile] = is_seen ? score(parameters, shared, own, tile) : -INFINITY;
                largest = fmaxf(largest, weight[own][tile]);
            }
            float factor = 1;
            // By the difference, which is exact for near scores: a sum is rounded to an ulp of the
            // reference, and large scores would be more above.
            moves[own] = KVD_BALLOT(largest - reference[own] > SCORE_ABOVE) != 0;
            if (KVD_RARELY(moves[own])) {
                const float high = warp_max(largest);
                factor = exp_near(reference[own] - high);
                reference[own] = high;
                sum[own] *= factor;
                weights.shrink(own, factor);
            }
#pragma unroll
            for (unsigned tile = 0; tile < TILES; tile++) {
                const float of_token = exp_near(weight[own][tile] - reference[own]);
                sum[own] += of_token;
                weight[own][tile] = of_token * gains[tile];
            }
            if (lane_index() == 0) {
                shared.factors[row_of(own)] = factor;
            }
        }
        weights.put(shared, side, values, weight, moves);
    }

    // The score of this lane's token.
    KVD_DEVICE float score(const AttendParameters& parameters, const AttendShared<ROWS>& shared,
                           unsigned own, unsigned tile) const {
        float score = offset[own];
#pragma unroll
        for (unsigned part = 0; part < PARTS; part++) {
            const unsigned row = (tile * PARTS + part) * ROWS + row_of(own);
            score += shared.sums[row * TILE_TOKENS + lane_index()];
        }
        if (KVD_RARELY(parameters.soft_cap > 0)) {
            score = parameters.soft_cap * tanhf(score / parameters.soft_cap);
        }
        return fminf(fmaxf(score, -SCORE_MAX), SCORE_MAX);
    }

    // Behind the last tile: what weights brought beside products, and the unit's statistics.
    KVD_DEVICE void write(const AttendParameters& parameters, const AttendUnit& unit,
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
