// The scores of a tile's keys: on CUDA cores, a lane per token and channels dealt to the warps, or, of
// sides with integer products, on tensor cores, eight tokens per warp and all channels.
#pragma once

#include "shared.cuh"
#include "spread.cuh"

namespace kvd {

template <class Key, int ROWS>
struct Scores {
    // Parts of a score, which the softmax adds up.
    static constexpr unsigned PARTS = ATTEND_WARPS;
    static constexpr bool COPIES_QUERY = true;

    KVD_DEVICE Scores(const AttendShared<ROWS>&, const AttendParameters&, const SideShape&) {}

    KVD_DEVICE bool folds(const SideShape&) const { return false; }
    KVD_DEVICE void fold(const AttendShared<ROWS>&, const SideShape&, const Tile&) {}

    KVD_DEVICE void tile(const AttendShared<ROWS>& shared, const SideShape& side,
                         const Tile& tile) const {
        float scores[ROWS] = {};
        Key::template scores<ROWS>(side, tile, ATTEND_WARPS, shared.query, scores);
        for (int row = 0; row < ROWS; row++) {
            shared.sums[(warp_index() * ROWS + row) * TILE_TOKENS + lane_index()] = scores[row];
        }
    }
};

// Shared memory of it, as the host counts it (`work_bytes` of kvd-cuda/src/products.rs): units, bases and
// starts of the rows, in whole sixteens, then the digits of the queries `[steps, LANES, 4 lanes,
// DIGIT_WORDS]`, and where the sums of a step are scaled, the sums of its channels `[ROWS, steps]`.
template <class Side, int ROWS>
struct Scores<Tensor<Side>, ROWS> {
    static constexpr unsigned PARTS = 1;
    static constexpr bool COPIES_QUERY = false;
    static constexpr unsigned OWNED = (ROWS + ATTEND_WARPS - 1) / ATTEND_WARPS;
    using Key = Tensor<Side>;
    static constexpr bool FEW = ROWS <= FEW_ROWS;
    static constexpr unsigned MIDDLES = ROWS < int(MIDDLE_ROWS) ? ROWS : MIDDLE_ROWS;
    // Lanes with words of their own, of those that have the same terms: of few rows, first those with
    // high and low digits, then those with middle ones.
    static constexpr unsigned LANES = FEW ? ROWS + MIDDLES : ROWS;
    static constexpr unsigned WORDS = DIGIT_WORDS<FEW>;
    static constexpr bool SCALES_STEPS = Spreads<Key>::value && !Spreads<Key>::of_runs;

    struct alignas(8) Pair {
        uint32_t word[2];
    };
    struct alignas(16) Four {
        uint32_t word[4];
    };

    // What one of its whole numbers is worth, what goes into every score, and what sums begin with.
    float* units;
    float* bases;
    int32_t* starts;
    uint32_t* digits;
    // Of the rows that this warp folds.
    float largest[OWNED];
    bool folded;

    KVD_DEVICE Scores(const AttendShared<ROWS>& shared, const AttendParameters&, const SideShape&)
        : units(reinterpret_cast<float*>(shared.key_work)),
          bases(units + ROWS),
          starts(reinterpret_cast<int32_t*>(bases + ROWS)),
          digits(reinterpret_cast<uint32_t*>(shared.key_work) + (5 * ROWS + 3) / 4 * 4),
          folded(false) {}

    // Whether the queries' digits are not yet those for a tile; the same for all threads.
    KVD_DEVICE bool folds(const SideShape& side) const {
        return !folded || Key::scales_channels(side);
    }

    // Cuts the queries, times what their channels are scaled by, into digits: a row per warp, four
    // positions per lane.
    KVD_DEVICE void fold(const AttendShared<ROWS>& shared, const SideShape& side,
                         const Tile& tile) {
        const auto order = Key::order(side, tile);
        const float step = Key::largest_step(side, tile);
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            const unsigned row = own * ATTEND_WARPS + warp_index();
            if (row >= ROWS) {
                break;
            }
            const float* query = shared.query_of(row, side.dim);
            if (!folded) {
                if constexpr (Spreads<Key>::value) {
                    largest[own] = Key::largest(side, tile, query);
                } else {
                    largest[own] = largest_of(query, side.dim);
                }
            }
            fold_row(order, side, tile, query, row, unit_of(largest[own] * step, QUERY_BITS));
        }
        folded = true;
    }

    KVD_DEVICE static float largest_of(const float* query, unsigned dim) {
        float largest = 0;
        for (unsigned channel = lane_index(); channel < dim; channel += WARP_LANES) {
            largest = fmaxf(largest, fabsf(query[channel]));
        }
        return warp_max(largest);
    }

    template <class Order>
    KVD_DEVICE void fold_row(const Order& order, const SideShape& side, const Tile& tile,
                             const float* query, unsigned row, float unit) const {
        if constexpr (SCALES_STEPS) {
            sum_steps(order, query, row);
        }
        const float inverse = per_unit(unit);
        float base = 0;
        int32_t start[DIGITS] = {};
        for (unsigned quad = lane_index(); quad < order.steps() * STEP_QUADS; quad += WARP_LANES) {
            float values[CODE_GROUP] = {};
            if (quad < order.quads) {
                Key::fold(side, tile, query, quad, values, base);
            }
            uint32_t cut[DIGITS];
            signed_digits(values, inverse, cut);
            write(order.slot(quad), row, cut);
            if (Key::BIASED && quad < order.quads) {
                const int32_t bias = Key::bias(tile, quad);
#pragma unroll
                for (unsigned digit = 0; digit < DIGITS; digit++) {
                    start[digit] -= bias * signed_byte_sum(cut[digit]);
                }
            }
        }
        base = warp_sum(base);
        if (Key::BIASED) {
            for (unsigned digit = 0; digit < DIGITS; digit++) {
                for (unsigned step = 16; step > 0; step /= 2) {
                    const unsigned other = lane_index() ^ step;
                    start[digit] += int32_t(KVD_SHUFFLE(uint32_t(start[digit]), other));
                }
            }
        }
        if (lane_index() == 0) {
            units[row] = unit;
            bases[row] = base;
            for (unsigned digit = 0; digit < DIGITS; digit++) {
                starts[DIGITS * row + digit] = start[digit];
            }
        }
    }

    // The sums of a row's channels of each step.
    KVD_DEVICE float* step_sums(unsigned steps, unsigned row) const {
        uint32_t* end = digits + steps * LANES * CODE_GROUP * WORDS;
        return reinterpret_cast<float*>(end) + row * steps;
    }
    template <class Order>
    KVD_DEVICE void sum_steps(const Order& order, const float* query, unsigned row) const {
        for (unsigned first = 0; first < order.quads; first += WARP_LANES) {
            const unsigned quad = first + lane_index();
            float sum = 0;
            for (unsigned at = 0; quad < order.quads && at < CODE_GROUP; at++) {
                sum += query[quad * CODE_GROUP + at];
            }
            for (unsigned other = 1; other < STEP_QUADS; other *= 2) {
                sum += KVD_SHUFFLE_XOR(sum, other);
            }
            if (quad < order.quads && quad % STEP_QUADS == 0) {
                step_sums(order.steps(), row)[quad / STEP_QUADS] = sum;
            }
        }
    }

    // Writes the digits of a row's four terms.
    KVD_DEVICE void write(unsigned slot, unsigned row, const uint32_t (&cut)[DIGITS]) const {
        const unsigned word = slot / CODE_GROUP % 2;
        uint32_t* step = digits + slot / STEP_QUADS * LANES * CODE_GROUP * WORDS;
        uint32_t* to = step + (row * CODE_GROUP + slot % CODE_GROUP) * WORDS;
        to[2 * word] = cut[0];
        if (FEW) {
            const unsigned lane = ROWS + row % MIDDLE_ROWS;
            uint32_t* middle = step + (lane * CODE_GROUP + slot % CODE_GROUP) * WORDS;
            middle[2 * word + row / MIDDLE_ROWS] = cut[1];
            to[2 * word + 1] = cut[2];
        } else {
            to[2 * word + 1] = cut[1];
            to[4 + word] = cut[2];
        }
    }

    // Which lane's words this one has. Those whose row is none of the unit's have another's: what they
    // sum is not used.
    KVD_DEVICE static unsigned lane_of_words() {
        if (FEW && lane_row() >= FEW_ROWS) {
            return ROWS + lane_row() % MIDDLES;
        }
        return lane_row() % ROWS;
    }

    KVD_DEVICE void multiply_step(Products<FEW>& sums, unsigned step,
                                  const uint32_t (&words)[2]) const {
        const unsigned lane = (step * LANES + lane_of_words()) * CODE_GROUP + lane_word();
        const uint32_t* at = digits + lane * WORDS;
        uint32_t of_query[WORDS];
        if constexpr (FEW) {
            const Four four = *reinterpret_cast<const Four*>(at);
#pragma unroll
            for (unsigned word = 0; word < WORDS; word++) {
                of_query[word] = four.word[word];
            }
        } else {
            const Pair* pairs = reinterpret_cast<const Pair*>(at);
#pragma unroll
            for (unsigned word = 0; word < WORDS; word++) {
                of_query[word] = pairs[word / 2].word[word % 2];
            }
        }
        multiply<true, Key::SIGNED>(sums, of_query, words);
    }

    // What the sums begin with: what is taken from the codes.
    KVD_DEVICE Products<FEW> first_sums() const {
        Products<FEW> sums = {};
        if (!Key::BIASED) {
            return sums;
        }
        const unsigned row = lane_row();
        const auto start = [&](unsigned of, unsigned digit) {
            return of < ROWS ? starts[DIGITS * of + digit] : 0;
        };
        if constexpr (FEW) {
            const unsigned first = row % MIDDLE_ROWS;
            const bool middle = row >= FEW_ROWS;
            const int32_t upper = middle ? start(first, 1) : start(row, 0);
            const int32_t lower = middle ? start(MIDDLE_ROWS + first, 1) : start(row, 2);
            return {{upper, upper, lower, lower}};
        } else {
            return {{start(row, 0), start(row, 0), start(row, 1), start(row, 1)},
                    {start(row, 2), start(row, 2)}};
        }
    }

    // Eight tokens of each warp; a lane has two of one row, and the codes of one token.
    KVD_DEVICE void tile(const AttendShared<ROWS>& shared, const SideShape& side,
                         const Tile& tile) const {
        const auto order = Key::order(side, tile);
        const Codes codes = Key::codes(side, tile);
        const unsigned first = warp_index() * STEP_COLUMNS;
        const unsigned row = lane_row();
        const bool has_row = row < ROWS;
        if constexpr (SCALES_STEPS) {
            return scale_steps(shared, side, tile, order, codes);
        }
        Products<FEW> sums = first_sums();
        order.each(codes, first + row, [&](unsigned step, const uint32_t(&words)[2]) {
            multiply_step(sums, step, words);
        });
        int32_t three[2][DIGITS];
        sums.digits(0, three[0]);
        sums.digits(1, three[1]);
        if (!has_row) {
            return;
        }
        float scores[2];
#pragma unroll
        for (unsigned at = 0; at < 2; at++) {
            const unsigned token = least(first + 2 * lane_word() + at, tile.tokens - 1);
            const float sum = whole(float(three[at][0]), three[at][1], three[at][2]);
            scores[at] = Key::score(side, tile, token, sum * units[row], bases[row]);
        }
        const float* query = shared.query_of(row, side.dim);
        Key::add_rests(side, tile, query, first, first + 2 * lane_word(), scores);
        for (unsigned at = 0; at < 2; at++) {
            shared.sums[row * TILE_TOKENS + first + 2 * lane_word() + at] = scores[at];
        }
    }

    // The same where the sums of every step are scaled.
    template <class Order>
    KVD_DEVICE void scale_steps(const AttendShared<ROWS>& shared, const SideShape& side,
                                const Tile& tile, const Order& order, const Codes& codes) const {
        const unsigned first = warp_index() * STEP_COLUMNS;
        const unsigned row = lane_row();
        const bool has_row = row < ROWS;
        const float unit = has_row ? units[row] : 0;
        const float* bases = step_sums(order.steps(), has_row ? row : 0);
        float scores[2] = {};
        order.each(codes, first + row, [&](unsigned step, const uint32_t(&words)[2]) {
            Products<FEW> sums = {};
            multiply_step(sums, step, words);
            float of_step[2];
#pragma unroll
            for (unsigned at = 0; at < 2; at++) {
                int32_t three[DIGITS];
                sums.digits(at, three);
                of_step[at] = unit * whole(float(three[0]), three[1], three[2]);
            }
            Key::add_step(side, tile, step, first + 2 * lane_word(), of_step, bases[step], scores);
        });
        for (unsigned at = 0; has_row && at < 2; at++) {
            shared.sums[row * TILE_TOKENS + first + 2 * lane_word() + at] = scores[at];
        }
    }
};

}  // namespace kvd
