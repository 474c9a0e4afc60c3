// The weighted sum of a tile's values of sides with integer products, on tensor cores: all tokens of the tile
// at once, and channels dealt to the warps.
#pragma once

#include "channels.cuh"
#include "unpack.cuh"
#include "weights.cuh"

namespace kvd {

// Sums of integers go on from tile to tile. They are added to the sums in shared memory, and begin
// anew, when the softmax has found a larger score, when a weight is larger than their unit can tell, or
// before they could overflow. Shared memory, as the host counts it (`work_bytes` of
// kvd-cuda/src/tensor_core.rs): sums `[ROWS, dim]`, then the side's own.
template <class Side, int ROWS>
struct Sums<Tensor<Side>, ROWS> {
    using Value = Tensor<Side>;
    using Digits = Factor<ROWS>;
    static constexpr unsigned SUMS_OF_ROW = 0;
    static constexpr bool FEW = Digits::FEW;
    // Blocks of eight channels of a warp: head sizes up to 192, because each takes six registers,
    // or 128, where codes are looked up and that gives four blocks at once.
    static constexpr unsigned BLOCKS =
        (Value::LOOKS_UP ? 128 : 192) / STEP_COLUMNS / ATTEND_WARPS;
    // 32 products of two bytes a tile, in 31 bits.
    static constexpr unsigned TILES_MAX = 1024;
    // Blocks whose columns are dealt to the lanes, so that a lane has that many neighbours. Not where neighbours
    // are bytes of one level, which the columns of a lane are.
    static constexpr unsigned DEALT = 4;
    static constexpr bool DEALS = !Spreads<Value>::of_runs;
    // Sums of a tile are scaled. Zero points are multiplied by threads that have a channel, or two.
    static constexpr bool SCALES_TILES = ScalesSums<Value>::value;
    static constexpr unsigned ZEROS = SCALES_TILES ? CHANNELS_PER_THREAD : 1;
    static constexpr unsigned SETS = Value::WEIGHT_SETS;

    Products<FEW, typename ScalesSums<Value>::Sum> sums[BLOCKS];
    // Sums that zero points add, by channel.
    float zeros[ZEROS][ROWS];
    // Sums of the digits in each word of a product.
    uint32_t digit_sums[DIGITS];
    float per_unit;
    unsigned tiles;
    unsigned blocks;
    // The set of weights that the channels of this warp have.
    unsigned set;
    float* out;
    const uint32_t* places;

    // Blocks of eight channels that a warp has.
    KVD_DEVICE static unsigned blocks_of(const SideShape& side) {
        if (Value::LOOKS_UP) {
            return BLOCKS;
        }
        const unsigned places = Spreads<Value>::of_runs ? side.spread_places : side.dim;
        return (places + STEP_COLUMNS * ATTEND_WARPS - 1) / (STEP_COLUMNS * ATTEND_WARPS);
    }
    KVD_DEVICE static unsigned work_bytes(const SideShape& side) {
        return (ROWS * side.dim * 4 + Value::place_bytes(side) + COPY_BYTES - 1) / COPY_BYTES *
               COPY_BYTES;
    }

    KVD_DEVICE Sums(const AttendShared<ROWS>& shared, const AttendParameters& parameters,
                    const SideShape& side)
        : per_unit(kvd::per_unit(WEIGHT_UNIT)),
          tiles(0),
          blocks(blocks_of(side)),
          set(0),
          out(reinterpret_cast<float*>(shared.value_work)) {
        uint32_t* to = reinterpret_cast<uint32_t*>(out + ROWS * side.dim);
        Value::prepare_places(side, parameters.tables, to);
        places = to;
        for (unsigned at = thread_index(); at < ROWS * side.dim; at += ATTEND_THREADS) {
            out[at] = 0;
        }
        if constexpr (SETS > 0) {
            set = Value::weight_set(side, least(place(0, 0), side.dim - 1));
            for (unsigned at = thread_index(); at < ROWS * SETS; at += ATTEND_THREADS) {
                shared.per_units[at] = kvd::per_unit(WEIGHT_UNIT);
            }
        }
#pragma unroll
        for (unsigned at = 0; at < ZEROS * ROWS; at++) {
            zeros[at / ROWS][at % ROWS] = 0;
        }
        clear();
    }

    KVD_DEVICE void clear() {
        tiles = 0;
#pragma unroll
        for (unsigned digit = 0; digit < DIGITS; digit++) {
            digit_sums[digit] = 0;
        }
#pragma unroll
        for (unsigned block = 0; block < BLOCKS; block++) {
            sums[block] = {};
        }
    }

    // The place, as the tile's codes are ordered, of a column of a block of this warp; and the other way
    // round, the column of a place that is the warp's.
    KVD_DEVICE bool deals() const { return DEALS && blocks == DEALT; }
    KVD_DEVICE unsigned place(unsigned block, unsigned column) const {
        const unsigned first = warp_index() * blocks * STEP_COLUMNS;
        return first + (deals() ? column * DEALT + block : block * STEP_COLUMNS + column);
    }
    KVD_DEVICE unsigned column(unsigned place) const {
        return deals() ? place / DEALT % STEP_COLUMNS : place % STEP_COLUMNS;
    }

    // A tile, or the first `count` of those that are worked on together.
    KVD_DEVICE void absorb(const SideShape& side, const Tile& tile,
                           const AttendShared<ROWS>& shared) {
        const Tile one[1] = {tile};
        absorb(side, one, 1, shared);
    }

    template <unsigned TILES>
    KVD_DEVICE void absorb(const SideShape& side, const Tile (&tile)[TILES], unsigned count,
                           const AttendShared<ROWS>& shared) {
        const unsigned row = lane_row();
        const bool has_row = row < ROWS;
        const float factor = has_row ? shared.factors[row] : 1;
        const float next = SETS > 0 && has_row ? shared.per_units[row * SETS + set] : per_unit;
        const bool anew = factor != 1 || next != per_unit || tiles + TILES > TILES_MAX;
        if (KVD_RARELY(KVD_BALLOT(anew) != 0)) {
            flush(side, Value::step(side, tile[0]), factor);
            if constexpr (SCALES_TILES) {
                shrink_zeros(side, shared);
            }
            per_unit = next;
        }
        tiles += TILES;
        if constexpr (InGroups<Value>::value) {
            absorb_groups(side, tile, shared);
        } else if constexpr (SCALES_TILES) {
            absorb_chosen(side, tile, shared);
        } else {
            absorb_tiles(side, tile, count, shared);
        }
    }

    template <unsigned TILES>
    KVD_DEVICE void absorb_tiles(const SideShape& side, const Tile (&tile)[TILES], unsigned count,
                                 const AttendShared<ROWS>& shared) {
#pragma unroll
        for (unsigned at = 0; at < TILES; at++) {
            if (at >= count) {
                break;
            }
            const unsigned step = at * (SETS > 0 ? SETS : 1) + set;
            uint32_t digits[Digits::WORDS];
            Digits::load(shared.digits + step * Digits::STEP_WORDS, digits);
            if (Value::BIASED) {
                sum_digits(digits);
            }
            multiply_tile(side, tile[at], digits);
            add_rests(side, tile[at], shared.weights + at * ROWS * TILE_TOKENS);
        }
    }

    // For groups (bit_groups.cuh); where there is no second tile, its weights are zero.
    template <unsigned TILES>
    KVD_DEVICE void absorb_groups(const SideShape& side, const Tile (&tile)[TILES],
                                  const AttendShared<ROWS>& shared) {
        uint32_t digits[TILES][Digits::WORDS];
#pragma unroll
        for (unsigned at = 0; at < TILES; at++) {
            Digits::load(shared.digits + at * Digits::STEP_WORDS, digits[at]);
        }
#pragma unroll
        for (unsigned block = 0; block < BLOCKS; block += 2) {
            if (block >= blocks) {
                break;
            }
            const unsigned group = (warp_index() * blocks + block) / 2;
            Value::value_group(tile, group, [&](unsigned of, const uint32_t(&words)[2][2]) {
                multiply<false, Value::SIGNED>(sums[block], digits[of], words[0]);
                multiply<false, Value::SIGNED>(sums[block + 1], digits[of], words[1]);
            });
        }
        Value::each_rest(side, tile[0], [&](unsigned token, unsigned channel, float rest) {
            if (token < TILES * TILE_TOKENS) {
                const unsigned of = token / TILE_TOKENS * ROWS * TILE_TOKENS + token % TILE_TOKENS;
                const unsigned at = Value::place_of(side, places, channel);
                add_rest(side, at, channel, shared.weights + of, rest);
            }
        });
    }

    // Where the sums of every tile are scaled; the weights of one that is missing are nothing.
    template <unsigned TILES>
    KVD_DEVICE void absorb_chosen(const SideShape& side, const Tile (&tile)[TILES],
                                  const AttendShared<ROWS>& shared) {
        const bool is_plain = deals() && Value::is_plain(side, tile[0], side.scale_tokens);
#pragma unroll
        for (unsigned of = 0; of < TILES; of++) {
            uint32_t digits[Digits::WORDS];
            Digits::load(shared.digits + of * Digits::STEP_WORDS, digits);
            const float* weights = shared.weights + of * ROWS * TILE_TOKENS;
            if (KVD_RARELY(!is_plain)) {
                multiply_chosen(side, tile[of], digits);
                add_zeros(side, weights, [&](unsigned channel) {
                    return Value::any_zero(side, tile[of], channel);
                });
            } else {
                const typename Value::PlainValues values(side, tile[of], place(0, lane_row()),
                                                         place(0, 2 * lane_word()));
#pragma unroll
                for (unsigned block = 0; block < DEALT; block++) {
                    uint32_t words[2];
                    float scale[2];
                    values.block(block, words, scale);
                    multiply_scaled(sums[block], digits, words, scale);
                }
                add_zeros(side, weights, [&](unsigned channel) { return values.zero(channel); });
            }
        }
    }

    // For any codes.
    KVD_DEVICE void multiply_chosen(const SideShape& side, const Tile& tile,
                                    const uint32_t (&digits)[Digits::WORDS]) {
#pragma unroll 1
        for (unsigned mine = 0; mine < blocks; mine++) {
            const auto channel = [&](unsigned column) {
                return least(place(mine, column), side.dim - 1);
            };
            const unsigned columns[2] = {channel(2 * lane_word()), channel(2 * lane_word() + 1)};
            uint32_t words[2];
            float scale[2];
            Value::any_block(side, tile, channel(lane_row()), columns, words, scale);
#pragma unroll
            for (unsigned block = 0; block < BLOCKS; block++) {
                if (block == mine) {
                    multiply_scaled(sums[block], digits, words, scale);
                }
            }
        }
    }
    KVD_DEVICE static void multiply_scaled(Products<FEW, float>& to,
                                           const uint32_t (&digits)[Digits::WORDS],
                                           const uint32_t (&words)[2], const float (&scale)[2]) {
        Products<FEW> of_tile = {};
        multiply<false, Value::SIGNED>(of_tile, digits, words);
        to.add(of_tile, scale);
    }

    // Zero points of this thread's channels times the weights' sums, which stand where each row's first was.
    template <class Zero>
    KVD_DEVICE void add_zeros(const SideShape& side, const float* weights, Zero find) {
#pragma unroll
        for (unsigned at = 0; at < ZEROS; at++) {
            const unsigned channel = thread_index() + at * ATTEND_THREADS;
            if (channel >= side.dim) {
                break;
            }
            const float zero = find(channel);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                zeros[at][row] += zero * weights[row * TILE_TOKENS];
            }
        }
    }
    KVD_DEVICE void shrink_zeros(const SideShape& side, const AttendShared<ROWS>& shared) {
#pragma unroll
        for (unsigned at = 0; at < ZEROS * ROWS; at++) {
            if (at / ROWS * ATTEND_THREADS >= side.dim) {
                break;
            }
            zeros[at / ROWS][at % ROWS] *= shared.factors[at % ROWS];
        }
    }

    KVD_DEVICE void sum_digits(const uint32_t (&digits)[Digits::WORDS]) {
#pragma unroll
        for (unsigned word = 0; word < Digits::WORDS; word++) {
            uint32_t& sum = digit_sums[FEW || word < 4 ? word % 2 : 2];
            sum = byte_sum(digits[word], sum);
        }
    }

    // Those of this lane's row, by all lanes of a warp.
    KVD_DEVICE void sums_of_digits(int32_t (&to)[DIGITS]) const {
        Products<FEW> all = {};
        uint32_t of[DIGITS];
#pragma unroll
        for (unsigned at = 0; at < DIGITS; at++) {
            of[at] = digit_sums[at] + KVD_SHUFFLE(digit_sums[at], lane_index() ^ 1);
            of[at] += KVD_SHUFFLE(of[at], lane_index() ^ 2);
        }
        if constexpr (FEW) {
            all = {{int32_t(of[0]), 0, int32_t(of[1]), 0}};
        } else {
            all = {{int32_t(of[0]), 0, int32_t(of[1]), 0}, {int32_t(of[2]), 0}};
        }
        all.digits(0, to);
    }

    KVD_DEVICE void add_rests(const SideShape& side, const Tile& tile, const float* weights) {
        Value::add_rests(side, tile, places, weights, [&](unsigned at, unsigned channel,
                                                                const float* weight, float rest) {
            add_rest(side, at, channel, weight, rest);
        });
    }

    // The thread that has the channel adds to its sum.
    KVD_DEVICE void add_rest(const SideShape& side, unsigned at, unsigned channel,
                             const float* weight, float rest) {
        const unsigned row = lane_row();
        const bool here = at - place(0, 0) < blocks * STEP_COLUMNS;
        if (here && column(at) / 2 == lane_word() && row < ROWS) {
            out[row * side.dim + channel] += weight[row * TILE_TOKENS] * rest;
        }
    }

    KVD_DEVICE void multiply_tile(const SideShape& side, const Tile& tile,
                                  const uint32_t (&digits)[Digits::WORDS]) {
        const Codes codes = Value::codes(side, tile);
        if constexpr (Value::LOOKS_UP) {
            // Four channels of each of eight quads.
            const unsigned quad = place(0, lane_row()) / CODE_GROUP;
            uint32_t words[BLOCKS][2];
            Value::value_words(side, tile, codes, least(quad, side.dim / CODE_GROUP - 1), words);
#pragma unroll
            for (unsigned block = 0; block < BLOCKS; block++) {
                multiply<false, Value::SIGNED>(sums[block], digits, words[block]);
            }
            return;
        }
        const unsigned count = Value::places_of(side, places);
        if (count == 0) {
            return;
        }
        // Behind the last channel of a decoded row is something that may be read, and is not used.
        const bool whole = codes.stride != 0 || count % (STEP_COLUMNS * ATTEND_WARPS) == 0;
        const unsigned bits = whole ? plain_bits(codes) : 0;
        if (KVD_RARELY(bits == 0)) {
            multiply_any(codes, count, digits);
        } else if (bits == 8) {
            multiply_plain<true>(codes, bits, digits);
        } else {
            multiply_plain<false>(codes, bits, digits);
        }
    }

    template <bool BYTES>
    KVD_DEVICE void multiply_plain(const Codes& codes, unsigned bits,
                                   const uint32_t (&digits)[Digits::WORDS]) {
        const PlainValues<BYTES> values(codes, bits);
        // More rows leave no registers for four words at once.
        if (FEW && deals() &&
            (shared_misaligned(codes.bytes) | values.row % COPY_BYTES) == 0) {
            uint32_t words[DEALT][2];
            values.four_words(place(0, lane_row()), words);
#pragma unroll
            for (unsigned block = 0; block < DEALT; block++) {
                multiply<false, Value::SIGNED>(sums[block], digits, words[block]);
            }
            return;
        }
#pragma unroll
        for (unsigned block = 0; block < BLOCKS; block++) {
            if (block >= blocks) {
                break;
            }
            uint32_t words[2];
            values.words(place(block, lane_row()), words);
            multiply<false, Value::SIGNED>(sums[block], digits, words);
        }
    }

    KVD_DEVICE void multiply_any(const Codes& codes, unsigned count,
                                 const uint32_t (&digits)[Digits::WORDS]) {
#pragma unroll 1
        for (unsigned mine = 0; mine < blocks; mine++) {
            uint32_t words[2];
            any_value_words(codes, least(place(mine, lane_row()), count - 1), words);
#pragma unroll
            for (unsigned block = 0; block < BLOCKS; block++) {
                if (block == mine) {
                    multiply<false, Value::SIGNED>(sums[block], digits, words);
                }
            }
        }
    }

    // Adds the integer sums to the sums of the rows, which then shrink by their factor. `step`: the value
    // of a code of 1.
    KVD_DEVICE void flush(const SideShape& side, float step, float factor) {
        int32_t of_digits[DIGITS] = {};
        if (Value::BIASED) {
            sums_of_digits(of_digits);
        }
        const unsigned count = Value::places_of(side, places);
        const float unit = kvd::per_unit(per_unit);
        float held = 0;
#pragma unroll
        for (unsigned at = 0; at < 2 * BLOCKS; at++) {
            // Neighbours one after another, where the next place may have the low bytes of one.
            const unsigned mine = place(at / 2, 2 * lane_word() + at % 2);
            if (at / 2 >= blocks) {
                break;
            }
            typename ScalesSums<Value>::Sum three[DIGITS];
            sums[at / 2].digits(at % 2, three);
            const uint32_t channel = Value::channel(side, places, mine);
            if (lane_row() >= ROWS || (channel & 0xFFFF) >= side.dim) {
                continue;
            }
            float sum = 0;
#pragma unroll
            for (unsigned digit = 0; digit < DIGITS; digit++) {
                const int32_t bias = Value::BIASED ? int32_t(channel >> 16) * of_digits[digit] : 0;
                sum = sum * 256.0f + float(three[digit] - bias);
            }
            float& to = out[lane_row() * side.dim + (channel & 0xFFFF)];
            if constexpr (InGroups<Value>::value) {
                // A low byte comes after the high one, whose product has already scaled the sums.
                const float value = sum * unit * Value::step_at(side, places, mine);
                to = Value::is_low(places, mine) ? to + value * factor : (to + value) * factor;
            } else if constexpr (Spreads<Value>::of_runs) {
                // High bytes wait for the low ones.
                held += sum * unit * Value::step_at(side, places, mine);
                if (at % 2 == 1 || channel >> 16 == 0) {
                    to = (to + held) * factor;
                    held = 0;
                }
            } else {
                const float of_code = step * Value::channel_step(side, places, channel & 0xFFFF);
                to = (to + (mine < count ? sum * unit * of_code : 0)) * factor;
            }
        }
        clear();
    }

    // Leaves nothing in registers, because decoding needs many.
    KVD_DEVICE void settle(const AttendParameters& parameters, const SideShape& side) {
        flush(side, Value::step_of(side, parameters.tables), 1);
    }

    KVD_DEVICE void put_zeros(unsigned dim) const {
#pragma unroll
        for (unsigned at = 0; at < ZEROS * ROWS; at++) {
            const unsigned channel = thread_index() + at / ROWS * ATTEND_THREADS;
            if (channel < dim) {
                out[at % ROWS * dim + channel] += zeros[at / ROWS][at % ROWS];
            }
        }
    }

    // Writes the unit's rows, with the part of the minima.
    KVD_DEVICE void write(const AttendShared<ROWS>& shared, const AttendParameters& parameters,
                          const AttendUnit& unit, const SideShape& side) {
        // Where there was no tile, nothing else came between the places and who reads them.
        KVD_BARRIER();
        settle(parameters, side);
        KVD_BARRIER();
        const unsigned dim = side.dim;
        if constexpr (SCALES_TILES) {
            put_zeros(dim);
            KVD_BARRIER();
        }
        for (unsigned at = thread_index(); at < unit.rows * dim; at += ATTEND_THREADS) {
            float base = 0;
            if constexpr (SETS > 0) {
                const unsigned row = quotient(at, dim);
                base = shared.sums[row * SETS + Value::weight_set(side, at - row * dim)];
            }
            parameters.out[uint64_t(unit.partial) * dim + at] = out[at] + base;
        }
    }
};

}  // namespace kvd
