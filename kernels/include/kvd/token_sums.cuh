// Sums of a warp that owns tokens (tokens.cuh): scores of its stops' keys, their softmax, and values.
#pragma once

#include "codes.cuh"
#include "mask.cuh"
#include "softmax.cuh"
#include "token_pages.cuh"

namespace kvd {

// Where the largest factor of the first page is put: as far from 2^16, beyond which f16 is infinite,
// as from where its steps would show.
constexpr int FACTOR_LOG2 = 8;
constexpr int HALF_LOG2 = 15;
// Stops whose sums tensor cores add up before they are kept elsewhere.
constexpr unsigned KEPT_TOGETHER = 8;

struct alignas(16) FourSums {
    float value[4];
};
// Codes are multiples of this, f16's smallest number.
constexpr int CODE_LOG2 = -24;

// A number in two halves: its first eleven bits, and what these leave.
KVD_DEVICE uint32_t split_word(float number) {
    const float held = f32_value(f32_bits(number) & 0xFFFFE000);
    return f16_word(held, number - held);
}

// Two factors, of columns of B that hold halves (even) and what they leave (odd).
struct Factors {
    // What the column multiplies; and what its even neighbour does, in odd columns alone.
    uint32_t own;
    uint32_t neighbour;

    // Times two scales: of their product what f16 holds, and what that leaves, exactly but for
    // the product with the rest.
    KVD_DEVICE uint32_t times(uint32_t scales) const {
        const uint32_t held = half_products(neighbour, scales);
        const uint32_t left = half_sums<true>(neighbour, scales, held);
        return half_sums<false>(own, scales, left);
    }
};

// Sums of a warp's tokens for a band of rows: for this lane's, `lane % 4` of it.
template <class Pages>
struct TokenBand {
    static constexpr unsigned BITS = Pages::CODE_BITS;
    static constexpr unsigned SETS = Pages::SETS;
    static constexpr unsigned BLOCKS = Pages::DIM / 16;
    static constexpr unsigned KEY_STEPS = Pages::DIM / HALF_TERMS_OF_STEP;
    // Steps of keys whose codes stand in one field.
    static constexpr unsigned OF_FIELD = KEY_STEPS / Pages::FIELDS;

    // Of keys: queries, times what takes the field of their channel back.
    Factors query[KEY_STEPS][2];
    // Values by block of channels; minima of the first and the second half of tiles by set, of each half the
    // sums with one half of the rows count.
    float sums[BLOCKS][4];
    float minima[2][4];
    // Earlier sums, in shared memory: tensor cores cut sums off, which would show in long ones.
    uint8_t* kept;
    float reference;
    float sum;

    KVD_DEVICE void clear() {
#pragma unroll
        for (unsigned at = 0; at < 4 * BLOCKS; at++) {
            sums[at / 4][at % 4] = 0;
        }
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            minima[at / 4][at % 4] = 0;
        }
    }

    KVD_DEVICE void begin() {
        clear();
        reference = SCORE_NONE;
        sum = 0;
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            kept_of(set) = {{0, 0, 0, 0}};
        }
        kept_minimum() = 0;
    }

    // Earlier sums of this lane's four channels of a set, and of the minima of one.
    KVD_DEVICE FourSums& kept_of(unsigned set) const {
        return reinterpret_cast<FourSums*>(kept)[set * WARP_LANES + lane_index()];
    }
    KVD_DEVICE float& kept_minimum() const {
        return reinterpret_cast<float*>(kept)[(4 * SETS + 4) * WARP_LANES + lane_index()];
    }

    // What weights of this lane's tokens of the first and second half of a tile are multiplied by, times
    // what takes back the field of their codes; what its row's scores are multiples of, and their offset.
    struct alignas(16) Constants {
        float by[2];
        float unit;
        float offset;
    };
    KVD_DEVICE Constants& constants() const {
        return reinterpret_cast<Constants*>(kept)[SETS * WARP_LANES + lane_index()];
    }

    // Adds both columns' sums to the earlier ones, which then shrink.
    KVD_DEVICE void keep(float factor) {
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            FourSums four = kept_of(set);
#pragma unroll
            for (unsigned at = 0; at < 4; at++) {
                const float (&block)[4] = sums[2 * set + at / 2];
                const float both = block[at % 2 * 2] + block[at % 2 * 2 + 1];
                four.value[at] = (four.value[at] + both) * factor;
            }
            kept_of(set) = four;
        }
        // Of each half the rows that count; fields of the second one are taken back here.
        const float second = minima[1][2] + minima[1][3];
        const float both = fmaf(second, Pages::SECOND_HALF, minima[0][0] + minima[0][1]);
        kept_minimum() = (kept_minimum() + both) * factor;
        clear();
    }

    // Cuts the row of this lane's column, times `2^log2`.
    KVD_DEVICE void cut_query(const float* row, bool is_row, int log2) {
        const bool odd = lane_index() / 4 % 2 != 0;
        const float by = power_of_two(log2);
#pragma unroll
        for (unsigned at = 0; at < 2 * KEY_STEPS; at++) {
            const unsigned step = at / 2;
            const unsigned first = Pages::key_channel(step, lane_index() % 4) + at % 2;
            const float back = by * power_of_two(-int(step / OF_FIELD * BITS));
            const float low = is_row ? row[first] * back : 0;
            const float high = is_row ? row[first + 2] * back : 0;
            const uint32_t of_low = split_word(low);
            const uint32_t of_high = split_word(high);
            const uint32_t held = bytes_of(of_low, of_high, 0x5410);
            query[step][at % 2] = {odd ? bytes_of(of_low, of_high, 0x7632) : held, odd ? held : 0};
        }
        constants().unit = power_of_two(-CODE_LOG2) * power_of_two(-log2);
    }

    // Scores to weights: of a stop's eight tokens of this lane's row.
    KVD_DEVICE void weigh(const float (&base)[2], float (&weight)[8]) {
        float score[8];
        const float from[2] = {base[0] - reference, base[1] - reference};
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            score[at] = fmaf(weight[at], constants().unit, from[at / 4]);
        }
        if (KVD_RARELY(KVD_BALLOT(most_of(score) > SCORE_ABOVE) != 0)) {
#pragma unroll
            for (unsigned at = 0; at < 8; at++) {
                weight[at] = fmaf(weight[at], constants().unit, base[at / 4]);
            }
            move(weight, score);
        }
        add_weights(score, weight);
    }

    KVD_DEVICE void add_weights(const float (&score)[8], float (&weight)[8]) {
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            weight[at] = exp_near(score[at]);
            sum += weight[at];
        }
    }

    // The same where scores are capped, not all tokens are seen, or values have gains.
    KVD_DEVICE void weigh_rarely(const AttendParameters& parameters, const TokenStop& stop,
                                 unsigned first, const float (&base)[2], float (&weight)[8]) {
        const AttendUnit& unit_of = unit_anew(parameters);
        const PageEntry& page = parameters.pages[stop.page];
        const uint8_t* gains = parameters.arena + page.value + page.value_bytes;
        const unsigned row_of_lane = first + lane_index() % BAND_ROWS;
        const bool has_row = row_of_lane < unit_of.rows;
        const Range seen = has_row ? visible(unit_of, row_of_lane) : Range{0, 0};
        const Range rows = stop.rows(page, seen);
        float score[8];
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            const unsigned row = at / 4 * TILE_TOKENS + Pages::key_token(at % 4);
            float whole = fmaf(weight[at], constants().unit, base[at / 4]);
            if (parameters.soft_cap > 0) {
                whole = parameters.soft_cap * tanhf(whole / parameters.soft_cap);
            }
            weight[at] = row >= rows.from && row < rows.to ? whole : -INFINITY;
            score[at] = weight[at] - reference;
        }
        if (KVD_BALLOT(most_of(score) > SCORE_ABOVE) != 0) {
            move(weight, score);
        }
        add_weights(score, weight);
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            const unsigned row = stop.first_row + at / 4 * TILE_TOKENS + Pages::key_token(at % 4);
            const bool has_gain = row < page.tokens && row / 2 < page.gain_bytes;
            const unsigned shift = has_gain ? gains[row / 2] >> 4 * (row % 2) & 15 : 0;
            weight[at] *= f32_value((127 - shift) << 23);
        }
    }

    KVD_DEVICE static float most_of(const float (&score)[8]) {
        float most = score[0];
#pragma unroll
        for (unsigned at = 1; at < 8; at++) {
            most = fmaxf(most, score[at]);
        }
        return most;
    }

    // Makes the largest score the reference of a row whose scores are much above it: gives scores
    // relative to that.
    KVD_DEVICE void move(const float (&whole)[8], float (&score)[8]) {
        float kept[8];
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            const float of = whole[at];
            const float within = of > SCORE_MAX ? SCORE_MAX : of < -SCORE_MAX ? -SCORE_MAX : of;
            // Of a token that is not seen; and none, of a factor beyond f16, stays none.
            kept[at] = of == -INFINITY ? of : within;
        }
        float high = most_of(kept);
#pragma unroll
        for (unsigned step = 4; step < WARP_LANES; step *= 2) {
            high = fmaxf(high, KVD_SHUFFLE_XOR(high, step));
        }
        const bool moves = high - reference > SCORE_ABOVE;
        const float factor = moves ? exp_near(reference - high) : 1;
        reference = moves ? high : reference;
        keep(factor);
        sum *= factor;
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            score[at] = kept[at] - reference;
        }
    }

    // Not 0 where a factor was beyond f16, which makes a sum infinite or none: asked when all are kept.
    KVD_DEVICE float beyond() const {
        // Other lanes have none of the minima.
        float none = sum * 0 + (lane_index() < Pages::ROW_BYTES ? kept_minimum() * 0 : 0);
#pragma unroll
        for (unsigned at = 0; at < 4 * SETS; at++) {
            none += kept_of(at / 4).value[at % 4] * 0;
        }
        return none;
    }

    // Leaves the warp's partial result: `[row, channel]` to `to`, `{m, l}` of each row to `stats`.
    KVD_DEVICE void put(float* to, float* stats) {
        const float of_minima = Pages::token_back(0, lane_index() / 16) / constants().by[0];
        const float of_codes = of_minima * power_of_two(-CODE_LOG2);
        const unsigned row = lane_index() % 4;
        const uint32_t minimum = f32_bits(kept_minimum());
#pragma unroll
        for (unsigned set = 0; set < SETS; set++) {
            const float base = f32_value(KVD_SHUFFLE(minimum, 4 * set + row)) * of_minima;
            const FourSums four = kept_of(set);
#pragma unroll
            for (unsigned at = 0; at < 4; at++) {
                const unsigned channel = set * 32 + lane_index() / 4 * 4 + at;
                to[row * Pages::DIM + channel] = fmaf(four.value[at], of_codes, base);
            }
        }
        float all = sum;
#pragma unroll
        for (unsigned step = 4; step < WARP_LANES; step *= 2) {
            all += KVD_SHUFFLE_XOR(all, step);
        }
        if (lane_index() < BAND_ROWS) {
            stats[2 * row] = all > 0 ? reference : -INFINITY;
            stats[2 * row + 1] = all;
        }
    }
};

// All bands' sums: codes are brought into factors once.
template <class Pages>
struct TokenSums {
    using Band = TokenBand<Pages>;
    static constexpr unsigned BANDS = Pages::BANDS;
    static constexpr unsigned BITS = Pages::CODE_BITS;
    static constexpr unsigned FIELDS = Pages::FIELDS;
    static constexpr unsigned KEY_STEPS = Band::KEY_STEPS;
    static constexpr unsigned OF_FIELD = Band::OF_FIELD;

    Band bands[BANDS];

    // What minima add to scores of both tiles: their products with the queries, by field, whose powers of
    // two are taken back.
    KVD_DEVICE void bases(const Pages& pages, float (&base)[BANDS][2]) const {
#pragma unroll
        for (unsigned back = 0; back < FIELDS; back++) {
            const unsigned field = FIELDS - 1 - back;
            float products[BANDS][4] = {};
#pragma unroll
            for (unsigned of = 0; of < OF_FIELD; of++) {
                const unsigned step = field * OF_FIELD + of;
                const FourWords four = pages.key_minima(step);
#pragma unroll
                for (unsigned band = 0; band < BANDS; band++) {
                    const Factors (&query)[2] = bands[band].query[step];
                    const uint32_t b[2] = {query[0].own, query[1].own};
                    KVD_MULTIPLY_HALVES(false, products[band], four.word, b);
                }
            }
#pragma unroll
            for (unsigned at = 0; at < 2 * BANDS; at++) {
                const float* of_tile = products[at / 2] + at % 2 * 2;
                float& sum = base[at / 2][at % 2];
                sum = fmaf(back == 0 ? 0 : sum, float(1u << BITS), of_tile[0] + of_tile[1]);
            }
        }
#pragma unroll
        for (unsigned at = 0; at < 2 * BANDS; at++) {
            const auto& constants = bands[at / 2].constants();
            float& sum = base[at / 2][at % 2];
            sum = fmaf(sum, constants.unit * power_of_two(CODE_LOG2), constants.offset);
        }
    }

    // Products of codes of a tile with this lane's rows: of four tokens, `Pages::key_token`, scores
    // `4 * tile` and on.
    KVD_DEVICE void multiply_keys(const Pages& pages, unsigned tile, float (&scores)[BANDS][8]) const {
        float products[BANDS][2][4] = {};
        uint32_t factors[BANDS][KEY_STEPS][2];
#pragma unroll
        for (unsigned step = 0; step < KEY_STEPS; step += 2) {
            const FourWords four = pages.key_steps(tile, step);
#pragma unroll
            for (unsigned at = 0; at < 4 * BANDS; at++) {
                const unsigned of = step + at % 4 / 2;
                factors[at / 4][of][at % 2] =
                    bands[at / 4].query[of][at % 2].times(four.word[at % 4]);
            }
        }
#pragma unroll
        for (unsigned line = 0; line < OF_FIELD; line++) {
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                const TwoWords two = pages.key_codes(tile, line, half);
                const uint32_t next[2] = {two.word[0] >> 8, two.word[1] >> 8};
#pragma unroll
                for (unsigned field = 0; field < FIELDS; field++) {
                    const uint32_t mask = Pages::MASK << BITS * field;
                    const uint32_t a[4] = {two.word[0] & mask, two.word[1] & mask, next[0] & mask,
                                           next[1] & mask};
                    const unsigned step = field * OF_FIELD + line;
#pragma unroll
                    for (unsigned band = 0; band < BANDS; band++) {
                        KVD_MULTIPLY_HALVES(false, products[band][half], a, factors[band][step]);
                    }
                }
            }
        }
#pragma unroll
        for (unsigned at = 0; at < 4 * BANDS; at++) {
            const float* both = products[at / 4][at % 4 / 2] + at % 2 * 2;
            scores[at / 4][4 * tile + at % 4] = both[0] + both[1];
        }
    }

    // Adds the values of a tile, whose tokens of this lane's rows have weights `4 * tile` and on.
    KVD_DEVICE void add_values(const Pages& pages, unsigned tile, const float (&weight)[BANDS][8]) {
        Factors factors[BANDS][2][2];
        uint32_t rows[4];
        pages.value_minima(tile, rows);
#pragma unroll
        for (unsigned at = 0; at < 2 * BANDS; at++) {
            const unsigned half = at % 2;
            Band& band = bands[at / 2];
            uint32_t plain[2];
#pragma unroll
            for (unsigned of = 0; of < 2; of++) {
                const float of_token = weight[at / 2][4 * tile + 2 * half + of];
                const uint32_t word = split_word(of_token * band.constants().by[half]);
                factors[at / 2][half][of] = {KVD_TRANSPOSE(word), KVD_TRANSPOSE(word << 16)};
                plain[of] = Pages::without_field(factors[at / 2][half][of].own);
            }
            KVD_MULTIPLY_HALVES(false, band.minima[half], rows, plain);
        }
#pragma unroll
        for (unsigned set = 0; set < Pages::SETS; set++) {
            const FourWords of_set = pages.value_steps(tile, set);
            const FourWords codes = pages.value_codes(tile, set);
            uint32_t next[4];
#pragma unroll
            for (unsigned at = 0; at < 4; at++) {
                next[at] = codes.word[at] >> 8;
            }
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                const uint32_t mask = Pages::value_mask(half);
                uint32_t b[BANDS][2];
#pragma unroll
                for (unsigned at = 0; at < 2 * BANDS; at++) {
                    const Factors& factor = factors[at / 2][half][at % 2];
                    b[at / 2][at % 2] = factor.times(of_set.word[at % 2 * 2 + half]);
                }
#pragma unroll
                for (unsigned pair = 0; pair < 2; pair++) {
                    const uint32_t a[4] = {codes.word[2 * pair] & mask, codes.word[2 * pair + 1] & mask,
                                           next[2 * pair] & mask, next[2 * pair + 1] & mask};
#pragma unroll
                    for (unsigned band = 0; band < BANDS; band++) {
                        KVD_MULTIPLY_HALVES(false, bands[band].sums[2 * set + pair], a, b[band]);
                    }
                }
            }
        }
    }

    KVD_DEVICE bool is_beyond() const {
        float none = 0;
#pragma unroll
        for (const Band& band : bands) {
            none += band.beyond();
        }
        return KVD_BALLOT(!(none == 0)) != 0;
    }
};

}  // namespace kvd
