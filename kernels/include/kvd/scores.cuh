// The scores of a tile's keys: on CUDA cores, a lane per token and channels dealt to the warps, or, of
// sides with integer products, on tensor cores, eight tokens per warp and all channels.
#pragma once

#include "shared.cuh"
#include "unpack.cuh"

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

// Shared memory of it, as the host counts it (`work_bytes` of kvd-cuda/src/tensor_core.rs): units, bases and
// starts of the rows, in whole sixteens, then the digits of the queries by step, both for each tile that is
// worked on together where they are cut for every one; and where the sums of a step are scaled, the sums
// of its channels `[ROWS, steps]`.
template <class Side, int ROWS>
struct Scores<Tensor<Side>, ROWS> {
    static constexpr unsigned PARTS = 1;
    static constexpr bool COPIES_QUERY = false;
    static constexpr unsigned OWNED = (ROWS + ATTEND_WARPS - 1) / ATTEND_WARPS;
    using Key = Tensor<Side>;
    using Digits = Factor<ROWS>;
    static constexpr bool FEW = Digits::FEW;
    static constexpr bool SCALES_STEPS = ScalesSums<Key>::value;
    // Rows whose zero points' part a lane has, of one token.
    static constexpr unsigned ZERO_ROWS = (ROWS + CODE_GROUP - 1) / CODE_GROUP;
    // Quads of a row that a lane cuts where that is done for every tile: up to 256 terms.
    static constexpr unsigned KEPT = 2;

    // Units, bases and starts of the rows, in whole sixteens.
    static constexpr unsigned HEAD_WORDS = (5 * ROWS + 3) / 4 * 4;

    struct alignas(8) Two {
        float of[2];
    };

    // Value of one whole number, offset of every score, and initial sums.
    float* units;
    float* bases;
    int32_t* starts;
    uint32_t* digits;
    // Words from one tile's data to the next tile's.
    unsigned copy;
    // Where the digits of this lane's quads go, if channels have other scales in every tile: of few rows
    // those of the first, else the slot.
    unsigned slots[KEPT];
    bool folded;

    KVD_DEVICE Scores(const AttendShared<ROWS>& shared, const AttendParameters&,
                      const SideShape& side)
        : units(reinterpret_cast<float*>(shared.key_work)),
          bases(units + ROWS),
          starts(reinterpret_cast<int32_t*>(bases + ROWS)),
          digits(reinterpret_cast<uint32_t*>(shared.key_work) + HEAD_WORDS),
          copy(0),
          folded(false) {
        if constexpr (Key::MAY_SCALE_CHANNELS) {
            const unsigned steps = padded_quads(side) / STEP_QUADS;
            copy = scales_channels(side) ? HEAD_WORDS + steps * Digits::STEP_WORDS : 0;
#pragma unroll
            for (unsigned index = 0; index < KEPT; index++) {
                const unsigned slot = Key::scaled_slot(side, lane_index() + index * WARP_LANES);
                slots[index] = FEW ? slot / STEP_QUADS * Digits::STEP_WORDS +
                                         Digits::word(0, 0, slot % STEP_QUADS)
                                   : slot;
                KVD_KEEP(slots[index]);
            }
        }
    }

    // Fours of terms that are cut for every tile, with those behind the last that are nothing.
    KVD_DEVICE static unsigned padded_quads(const SideShape& side) {
        const unsigned quads = Key::scaled_quads(side);
        return (quads + STEP_QUADS - 1) / STEP_QUADS * STEP_QUADS;
    }

    // Whether the queries' digits are not yet those for a tile; the same for all threads.
    KVD_DEVICE bool folds(const SideShape& side) const {
        return !folded || scales_channels(side);
    }

    KVD_DEVICE static bool scales_channels(const SideShape& side) {
        if constexpr (Key::MAY_SCALE_CHANNELS) {
            return Key::scales_channels(side);
        }
        return false;
    }

    // Cuts the queries, times what their channels are scaled by, into digits: a row per warp, four
    // positions per lane.
    KVD_DEVICE void fold(const AttendShared<ROWS>& shared, const SideShape& side,
                         const Tile& tile) {
        if (!scales_channels(side)) {
            fold_first(shared, side, tile);
            folded = true;
            return;
        }
        if constexpr (Key::MAY_SCALE_CHANNELS) {
#pragma unroll
            for (unsigned own = 0; own < OWNED; own++) {
                const unsigned row = own * ATTEND_WARPS + warp_index();
                if (row < ROWS) {
                    fold_tile(shared, side, tile, row, tile.half * copy);
                }
            }
        }
    }

    KVD_DEVICE void fold_first(const AttendShared<ROWS>& shared, const SideShape& side,
                               const Tile& tile) {
        const auto order = Key::order(side, tile);
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            const unsigned row = own * ATTEND_WARPS + warp_index();
            if (row >= ROWS) {
                break;
            }
            const float* query = shared.query_of(row, side.dim);
            const float largest = largest_of(order, side, tile, query);
            fold_row(order, side, tile, query, row, unit_of(largest, QUERY_BITS));
        }
    }

    template <class Order>
    KVD_DEVICE static float largest_of(const Order& order, const SideShape& side, const Tile& tile,
                                       const float* query) {
        float largest = 0;
        for (unsigned quad = lane_index(); quad < order.quads; quad += WARP_LANES) {
            float values[CODE_GROUP] = {};
            float unused = 0;
            Key::fold(side, tile, query, quad, values, unused);
#pragma unroll
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                largest = fmaxf(largest, fabsf(values[at]));
            }
        }
        return warp_max(largest);
    }

    // A row whose channels have other scales in every tile.
    KVD_DEVICE void fold_tile(const AttendShared<ROWS>& shared, const SideShape& side,
                              const Tile& tile, unsigned row, unsigned at) const {
        const float* query = shared.query_of(row, side.dim);
        const unsigned quads = Key::scaled_quads(side);
        const unsigned padded = padded_quads(side);
        KVD_EXPECT(padded <= KEPT * WARP_LANES);
        float values[KEPT][CODE_GROUP] = {};
        float base = 0;
        float largest = 0;
#pragma unroll
        for (unsigned index = 0; index < KEPT; index++) {
            const unsigned quad = lane_index() + index * WARP_LANES;
            if (index * WARP_LANES >= quads) {
                break;
            }
            if (quad < quads) {
                Key::scale(side, tile, query, quad, values[index], base);
#pragma unroll
                for (unsigned at = 0; at < CODE_GROUP; at++) {
                    largest = fmaxf(largest, fabsf(values[index][at]));
                }
            }
        }
        const float unit = unit_of(warp_max_magnitude(largest), QUERY_BITS);
        const float inverse = per_unit(unit);
#pragma unroll
        for (unsigned index = 0; index < KEPT; index++) {
            if (index * WARP_LANES >= padded) {
                break;
            }
            if (lane_index() + index * WARP_LANES < padded) {
                uint32_t cut[DIGITS];
                signed_digits(values[index], inverse, cut);
                if (FEW) {
                    Digits::put_few(digits + at + slots[index], row, cut);
                } else {
                    put(slots[index], row, cut, at);
                }
            }
        }
        base = warp_sum(base);
        if (lane_index() == 0) {
            units[at + row] = unit;
            bases[at + row] = base;
        }
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
            put(order.slot(quad), row, cut, 0);
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

    // Writes the digits of a row's four terms.
    KVD_DEVICE void put(unsigned slot, unsigned row, const uint32_t (&cut)[DIGITS],
                        unsigned at) const {
        uint32_t* step = digits + at + slot / STEP_QUADS * Digits::STEP_WORDS;
        Digits::put(step, row, slot % STEP_QUADS, cut);
    }

    // The sums of a row's channels of each step.
    KVD_DEVICE float* step_sums(unsigned steps, unsigned row) const {
        return reinterpret_cast<float*>(digits + steps * Digits::STEP_WORDS) + row * steps;
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

    KVD_DEVICE void multiply_step(Products<FEW>& sums, unsigned step,
                                  const uint32_t (&words)[2], unsigned at) const {
        uint32_t of_query[Digits::WORDS];
        Digits::load(digits + at + step * Digits::STEP_WORDS, of_query);
        multiply<true, Key::SIGNED>(sums, of_query, words);
    }

    // Initial sums: the bias that is subtracted from the codes.
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
        const unsigned at_tile = tile.half * copy;
        Products<FEW> sums = first_sums();
        order.each(codes, first + row, [&](unsigned step, const uint32_t(&words)[2]) {
            multiply_step(sums, step, words, at_tile);
        });
        finish(shared, side, tile, sums);
    }

    // For several tiles at once, of groups (bit_groups.cuh): the queries' digits of a step are
    // loaded once.
    template <unsigned TILES>
    KVD_DEVICE void groups(const AttendShared<ROWS>& shared, const SideShape& side,
                           const Tile (&tile)[TILES]) const {
        Products<FEW> sums[TILES] = {};
        const unsigned token = warp_index() * STEP_COLUMNS + lane_row();
        Key::each_step(side, tile, token, [&](unsigned step, const uint32_t(&words)[TILES][2]) {
            uint32_t of_query[Digits::WORDS];
            Digits::load(digits + step * Digits::STEP_WORDS, of_query);
#pragma unroll
            for (unsigned of = 0; of < TILES; of++) {
                multiply<true, Key::SIGNED>(sums[of], of_query, words[of]);
            }
        });
#pragma unroll
        for (unsigned of = 0; of < TILES; of++) {
            finish(shared, side, tile[of], sums[of]);
        }
        const unsigned row = lane_row();
        const unsigned mine = warp_index() * STEP_COLUMNS + 2 * lane_word();
        const float* query = shared.query_of(row, side.dim);
        Key::each_rest(side, tile[0], [&](unsigned token, unsigned channel, float rest) {
            // The lane that has the score.
            const unsigned of_tile = token % TILE_TOKENS;
            if (row < ROWS && of_tile / 2 == mine / 2 && token < TILES * TILE_TOKENS) {
                const unsigned at = (token / TILE_TOKENS * ROWS + row) * TILE_TOKENS + of_tile;
                shared.sums[at] += rest * query[channel];
            }
        });
    }

    // Leaves the scores that a warp's sums are.
    KVD_DEVICE void finish(const AttendShared<ROWS>& shared, const SideShape& side, const Tile& tile,
                           const Products<FEW>& sums) const {
        const unsigned first = warp_index() * STEP_COLUMNS;
        const unsigned row = lane_row();
        const unsigned at_tile = tile.half * copy;
        int32_t three[2][DIGITS];
        sums.digits(0, three[0]);
        sums.digits(1, three[1]);
        if (row >= ROWS) {
            return;
        }
        const unsigned mine = first + 2 * lane_word();
        const float unit = units[at_tile + row];
        const float base = bases[at_tile + row];
        float scores[2];
#pragma unroll
        for (unsigned at = 0; at < 2; at++) {
            const float sum = whole(float(three[at][0]), three[at][1], three[at][2]);
            scores[at] = Key::score(side, tile, least(mine + at, tile.tokens - 1), sum * unit, base);
        }
        if constexpr (!InGroups<Key>::value) {
            const float* query = shared.query_of(row, side.dim);
            Key::add_rests(side, tile, query, first, mine, scores);
        }
        put_scores(shared, tile.half * ROWS + row, mine, scores);
    }

    KVD_DEVICE static void put_scores(const AttendShared<ROWS>& shared, unsigned row, unsigned token,
                                      const float (&scores)[2]) {
        *reinterpret_cast<Two*>(shared.sums + row * TILE_TOKENS + token) = {{scores[0], scores[1]}};
    }

    // For several tiles at once, where the sums of every step are scaled.
    template <unsigned TILES>
    KVD_DEVICE void chosen(const AttendShared<ROWS>& shared, const SideShape& side,
                           const Tile (&tile)[TILES]) const {
        if (KVD_RARELY(!Key::is_plain(side, tile[0], side.scale_channels))) {
            scale_steps<typename Key::AnyKeys>(shared, side, tile);
        } else {
            scale_steps<typename Key::PlainKeys>(shared, side, tile);
        }
    }

    template <class Keys, unsigned TILES>
    KVD_DEVICE void scale_steps(const AttendShared<ROWS>& shared, const SideShape& side,
                                const Tile (&tile)[TILES]) const {
        const unsigned first = warp_index() * STEP_COLUMNS;
        const unsigned steps = Keys::count(side);
#pragma unroll
        for (unsigned of = 0; of < TILES; of++) {
            const Keys keys(side, tile[of], first + lane_row(), first + 2 * lane_word());
            Products<FEW, float> sums = {};
            float zeros[ZERO_ROWS] = {};
#pragma unroll 4
            for (unsigned step = 0; step < steps; step++) {
                uint32_t words[2];
                float scale[2];
                const float zero = keys.step(step, words, scale);
                Products<FEW> of_step = {};
                multiply_step(of_step, step, words, 0);
                sums.add(of_step, scale);
#pragma unroll
                for (unsigned at = 0; at < ZERO_ROWS; at++) {
                    zeros[at] += zero * step_sums(steps, zero_row(at))[step];
                }
            }
            put_scaled(shared, tile[of], sums, zeros);
        }
    }

    KVD_DEVICE static unsigned zero_row(unsigned at) {
        return least(lane_word() + at * CODE_GROUP, ROWS - 1);
    }

    // Leaves scores of a row; lanes of their tokens have the part of the zero points.
    KVD_DEVICE void put_scaled(const AttendShared<ROWS>& shared, const Tile& tile,
                               const Products<FEW, float>& sums,
                               const float (&zeros)[ZERO_ROWS]) const {
        const unsigned row = lane_row();
        float scores[2];
#pragma unroll
        for (unsigned at = 0; at < 2; at++) {
            float three[DIGITS];
            sums.digits(at, three);
            const unsigned lane = (2 * lane_word() + at) * CODE_GROUP + row % CODE_GROUP;
            float zero = of_lane(zeros[0], lane);
            if (ZERO_ROWS > 1) {
                const float other = of_lane(zeros[ZERO_ROWS - 1], lane);
                zero = row < CODE_GROUP ? zero : other;
            }
            const float sum = three[0] * 65536.0f + (three[1] * 256.0f + three[2]);
            scores[at] = sum * (row < ROWS ? units[row] : 0) + zero;
        }
        if (row < ROWS) {
            const unsigned mine = warp_index() * STEP_COLUMNS + 2 * lane_word();
            put_scores(shared, tile.half * ROWS + row, mine, scores);
        }
    }
};

}  // namespace kvd
