// The weighted sum of a tile's values: on CUDA cores, a thread per channel, or, of sides with integer
// products, on tensor cores, all tokens of the tile at once and channels dealt to the warps.
#pragma once

#include "shared.cuh"
#include "spread.cuh"

namespace kvd {

// Value channels that a thread sums: head sizes up to 256.
constexpr unsigned CHANNELS_PER_THREAD = 2;

// The weighted values that a thread sums: a channel or two, over its slice of the tokens. Where thread
// blocks share the channels, of those of this one.
template <class Value, int ROWS>
struct Sums {
    // Floats of a row that are added up at the end.
    static constexpr unsigned SUMS_OF_ROW = ATTEND_THREADS;

    float out[CHANNELS_PER_THREAD][ROWS];
    // Channels of the thread block, and the first of them; whether a thread's are neighbours.
    unsigned channels;
    unsigned first;
    bool neighbours;
    unsigned width;
    unsigned slices;

    // Shared memory of it.
    KVD_DEVICE static unsigned work_bytes(const SideShape&) { return 0; }

    KVD_DEVICE Sums(const AttendShared<ROWS>&, const AttendParameters&, const Unit& unit,
                    bool of_neighbours = false)
        : channels(quotient(unit.value.dim, unit.value.parts)),
          first(unit.value.part * channels),
          neighbours(of_neighbours) {
        const unsigned threads = neighbours ? channels / CHANNELS_PER_THREAD : channels;
        for (width = 1; width < threads && width < ATTEND_THREADS;) {
            width *= 2;
        }
        slices = ATTEND_THREADS / width;
        for (unsigned at = 0; at < CHANNELS_PER_THREAD; at++) {
            for (int row = 0; row < ROWS; row++) {
                out[at][row] = 0;
            }
        }
    }

    // A channel of this thread, of those of the thread block.
    KVD_DEVICE unsigned channel(unsigned at) const {
        const unsigned place = thread_index() % width;
        return neighbours ? CHANNELS_PER_THREAD * place + at : place + at * ATTEND_THREADS;
    }

    KVD_DEVICE void settle(const AttendParameters&, const Unit&) {}

    KVD_DEVICE void absorb(const SideShape& side, const Tile& tile,
                           const AttendShared<ROWS>& shared) {
#pragma unroll
        for (unsigned at = 0; at < CHANNELS_PER_THREAD; at++) {
            if (channel(at) >= channels) {
                break;
            }
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                out[at][row] *= shared.factors[row];
            }
            const unsigned slice = thread_index() / width;
            Value::template accumulate<ROWS>(side, tile, first + channel(at), slice, slices,
                                             shared.weights, out[at]);
        }
    }

    // Adds the slices up and writes the unit's rows.
    KVD_DEVICE void write(const AttendShared<ROWS>& shared, const AttendParameters& parameters,
                          const Unit& unit) const {
        const unsigned dim = unit.value.dim;
        float* sums = shared.sums;
        for (unsigned at = 0; at < CHANNELS_PER_THREAD; at++) {
            KVD_BARRIER();
            for (int row = 0; row < ROWS; row++) {
                sums[row * ATTEND_THREADS + thread_index()] = out[at][row];
            }
            KVD_BARRIER();
            if (thread_index() >= width || channel(at) >= channels) {
                continue;
            }
            for (unsigned row = 0; row < unit.rows; row++) {
                float sum = 0;
                for (unsigned slice = 0; slice < slices; slice++) {
                    sum += sums[row * ATTEND_THREADS + slice * width + thread_index()];
                }
                parameters.out[uint64_t(unit.partial + row) * dim + first + channel(at)] = sum;
            }
        }
    }
};

// Sums of integers go on from tile to tile. They are added to the sums in shared memory, and begin
// anew, when the softmax has found a larger score, when a weight is larger than their unit can tell, or
// before they could overflow. Shared memory, as the host counts it (`work_bytes` of
// kvd-cuda/src/products.rs): sums `[ROWS, dim]`, then the side's own.
template <class Side, int ROWS>
struct Sums<Tensor<Side>, ROWS> {
    using Value = Tensor<Side>;
    static constexpr unsigned SUMS_OF_ROW = 0;
    // Of eight channels, of a warp: head sizes up to 192, because each takes six registers, or 128, where
    // codes are looked up and that gives four blocks at once.
    static constexpr unsigned BLOCKS =
        (Value::LOOKS_UP ? 128 : 192) / STEP_COLUMNS / ATTEND_WARPS;
    // 32 products of two bytes a tile, in 31 bits.
    static constexpr unsigned TILES_MAX = 1024;

    static constexpr bool FEW = ROWS <= FEW_ROWS;
    // Sums are scaled, and added, tile by tile.
    static constexpr bool SCALES_TILES = Spreads<Value>::value && !Spreads<Value>::of_runs;

    Products<FEW> sums[BLOCKS];
    uint32_t digit_sums[DIGITS];
    float unit;
    float base;
    unsigned tiles;
    unsigned blocks;
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
                    const Unit& unit)
        : unit(unit_of(0, WEIGHT_BITS)),
          base(0),
          tiles(0),
          blocks(blocks_of(unit.value)),
          out(reinterpret_cast<float*>(shared.value_work)) {
        uint32_t* to = reinterpret_cast<uint32_t*>(out + ROWS * unit.value.dim);
        Value::prepare_places(unit.value, parameters.tables, to);
        places = to;
        for (unsigned at = thread_index(); at < ROWS * unit.value.dim; at += ATTEND_THREADS) {
            out[at] = 0;
        }
        clear();
    }

    KVD_DEVICE void clear() {
        tiles = 0;
        base = 0;
#pragma unroll
        for (unsigned digit = 0; digit < DIGITS; digit++) {
            digit_sums[digit] = 0;
        }
#pragma unroll
        for (unsigned block = 0; block < BLOCKS; block++) {
            sums[block] = {};
        }
    }

    // The first channel, as the tile's codes are ordered, of a block of this warp.
    KVD_DEVICE unsigned first(unsigned block) const {
        return (warp_index() * blocks + block) * STEP_COLUMNS;
    }

    KVD_DEVICE void absorb(const SideShape& side, const Tile& tile,
                           const AttendShared<ROWS>& shared) {
        const unsigned row = lane_row();
        const bool has_row = row < ROWS;
        float weights[2][CODE_GROUP];
#pragma unroll
        for (unsigned word = 0; word < 2; word++) {
            const unsigned token = (word * CODE_GROUP + lane_word()) * CODE_GROUP;
#pragma unroll
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                weights[word][at] = has_row ? shared.weights[row * TILE_TOKENS + token + at] : 0;
            }
        }
        float of_tile = 0;
        Value::fold(side, tile, least(first(0), side.dim - 1), weights, of_tile);
        float largest = 0;
#pragma unroll
        for (unsigned at = 0; at < 2 * CODE_GROUP; at++) {
            largest = fmaxf(largest, weights[at / CODE_GROUP][at % CODE_GROUP]);
        }
        largest = fmaxf(largest, KVD_SHUFFLE_XOR(largest, 1));
        largest = fmaxf(largest, KVD_SHUFFLE_XOR(largest, 2));
        const float factor = has_row ? shared.factors[row] : 1;
        if constexpr (SCALES_TILES) {
            unit = unit_of(largest, WEIGHT_BITS);
            multiply_tile(side, tile, weights);
            add_tile(side, tile, weights, factor);
        } else {
            carry(side, tile, largest, factor);
            base += of_tile;
            multiply_tile(side, tile, weights);
            add_rests(side, tile, shared);
        }
    }

    // Adds what was summed up before, where the next tile's cannot be added to it.
    KVD_DEVICE void carry(const SideShape& side, const Tile& tile, float largest, float factor) {
        const bool beyond = largest > unit * float(1u << WEIGHT_BITS);
        if (KVD_BALLOT(factor != 1 || beyond || tiles == TILES_MAX) != 0) {
            flush(side, Value::step(side, tile), factor);
            const float needed = unit_of(largest, WEIGHT_BITS);
            unit = factor != 1 ? needed : fmaxf(unit, needed);
        }
        tiles++;
    }

    KVD_DEVICE void add_rests(const SideShape& side, const Tile& tile,
                              const AttendShared<ROWS>& shared) {
        const unsigned row = lane_row();
        Value::add_rests(side, tile, places, shared.weights, [&](unsigned place, unsigned channel,
                                                                const float* weight, float rest) {
            // The thread that has the channel adds to its sum.
            const bool here = place - first(0) < blocks * STEP_COLUMNS;
            if (here && place % STEP_COLUMNS / 2 == lane_word() && row < ROWS) {
                out[row * side.dim + channel] += weight[row * TILE_TOKENS] * rest;
            }
        });
    }

    // Digits of this lane's row, four tokens, to the words that it has of the first factor.
    KVD_DEVICE static void to_lanes(const uint32_t (&cut)[DIGITS], unsigned word,
                                    uint32_t (&digits)[DIGIT_WORDS<FEW>]) {
        if constexpr (FEW) {
            const unsigned lane = lane_row() % MIDDLE_ROWS * CODE_GROUP + lane_word();
            const uint32_t first = KVD_SHUFFLE(cut[1], lane);
            const uint32_t second = KVD_SHUFFLE(cut[1], lane + MIDDLE_ROWS * CODE_GROUP);
            digits[2 * word] = lane_row() < FEW_ROWS ? cut[0] : first;
            digits[2 * word + 1] = lane_row() < FEW_ROWS ? cut[2] : second;
        } else {
            digits[2 * word] = cut[0];
            digits[2 * word + 1] = cut[1];
            digits[4 + word] = cut[2];
        }
    }

    KVD_DEVICE void multiply_tile(const SideShape& side, const Tile& tile,
                                  const float (&weights)[2][CODE_GROUP]) {
        const float inverse = per_unit(unit);
        uint32_t digits[DIGIT_WORDS<FEW>];
#pragma unroll
        for (unsigned word = 0; word < 2; word++) {
            uint32_t cut[DIGITS];
            unsigned_digits(weights[word], inverse, cut);
            to_lanes(cut, word, digits);
            if (Value::BIASED) {
#pragma unroll
                for (unsigned digit = 0; digit < DIGITS; digit++) {
                    digit_sums[digit] = byte_sum(cut[digit], digit_sums[digit]);
                }
            }
        }
        const Codes codes = Value::codes(side, tile);
        if constexpr (Value::LOOKS_UP) {
            // Four channels of each of eight quads.
            const unsigned quad = first(0) / CODE_GROUP + lane_row();
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
        const unsigned bits = plain_bits(codes);
        uint32_t words[2];
        // Behind the last channel of a decoded row is something that may be read, and is not used.
        if (bits != 0 && (codes.stride != 0 || count % (STEP_COLUMNS * ATTEND_WARPS) == 0)) {
            const ValueOrder order(codes, bits, first(0) + lane_row());
#pragma unroll
            for (unsigned block = 0; block < BLOCKS; block++) {
                if (block >= blocks) {
                    break;
                }
                order.words(block * STEP_COLUMNS, words);
                multiply<false, Value::SIGNED>(sums[block], digits, words);
            }
            return;
        }
#pragma unroll 1
        for (unsigned mine = 0; mine < blocks; mine++) {
            any_value_words(codes, least(first(mine) + lane_row(), count - 1), words);
#pragma unroll
            for (unsigned block = 0; block < BLOCKS; block++) {
                if (block == mine) {
                    multiply<false, Value::SIGNED>(sums[block], digits, words);
                }
            }
        }
    }

    // Adds a tile's products to the sums of the rows, after these shrink by their factor.
    KVD_DEVICE void add_tile(const SideShape& side, const Tile& tile,
                             const float (&weights)[2][CODE_GROUP], float factor) {
        float all = 0;
#pragma unroll
        for (unsigned at = 0; at < 2 * CODE_GROUP; at++) {
            all += weights[at / CODE_GROUP][at % CODE_GROUP];
        }
        all += KVD_SHUFFLE_XOR(all, 1);
        all += KVD_SHUFFLE_XOR(all, 2);
#pragma unroll
        for (unsigned at = 0; at < 2 * BLOCKS; at++) {
            const unsigned channel = first(at / 2) + 2 * lane_word() + at % 2;
            if (at / 2 >= blocks) {
                break;
            }
            const float sum = unit * whole_of(at);
            if (lane_row() < ROWS && channel < side.dim) {
                float& to = out[lane_row() * side.dim + channel];
                to = to * factor + Value::of_tile(side, tile, channel, sum, all);
            }
        }
        clear();
    }

    // A sum, by all lanes of a warp.
    KVD_DEVICE float whole_of(unsigned at) const {
        int32_t three[DIGITS];
        sums[at / 2].digits(at % 2, three);
        return (float(three[0]) * 256.0f + float(three[1])) * 256.0f + float(three[2]);
    }

    // Adds what was summed up to the sums of the rows, which then shrink by their factor. `step`: what a
    // code of 1 is worth.
    KVD_DEVICE void flush(const SideShape& side, float step, float factor) {
        base += KVD_SHUFFLE_XOR(base, 1);
        base += KVD_SHUFFLE_XOR(base, 2);
        if (Value::BIASED) {
#pragma unroll
            for (unsigned digit = 0; digit < DIGITS; digit++) {
                digit_sums[digit] += KVD_SHUFFLE(digit_sums[digit], lane_index() ^ 1);
                digit_sums[digit] += KVD_SHUFFLE(digit_sums[digit], lane_index() ^ 2);
            }
        }
        const unsigned count = Value::places_of(side, places);
        float held = 0;
#pragma unroll
        for (unsigned at = 0; at < 2 * BLOCKS; at++) {
            const unsigned place = first(at / 2) + 2 * lane_word() + at % 2;
            if (at / 2 >= blocks) {
                break;
            }
            int32_t three[DIGITS];
            sums[at / 2].digits(at % 2, three);
            const uint32_t channel = Value::channel(side, places, place);
            if (lane_row() >= ROWS || (channel & 0xFFFF) >= side.dim) {
                continue;
            }
            float sum = 0;
#pragma unroll
            for (unsigned digit = 0; digit < DIGITS; digit++) {
                const int32_t bias = Value::BIASED
                                         ? int32_t(channel >> 16) * int32_t(digit_sums[digit])
                                         : 0;
                sum = sum * 256.0f + float(three[digit] - bias);
            }
            float& to = out[lane_row() * side.dim + (channel & 0xFFFF)];
            if constexpr (Spreads<Value>::of_runs) {
                // High bytes wait for the low ones.
                held += sum * unit * Value::step_at(side, places, place);
                if (at % 2 == 1 || channel >> 16 == 0) {
                    to = (to + held) * factor;
                    held = 0;
                }
            } else {
                const float of_code = step * Value::channel_step(side, places, channel & 0xFFFF);
                to = (to + (place < count ? sum * unit * of_code : 0) + base) * factor;
            }
        }
        clear();
    }

    // Leaves nothing in registers, of which decoding needs many.
    KVD_DEVICE void settle(const AttendParameters& parameters, const Unit& unit) {
        if constexpr (!SCALES_TILES) {
            flush(unit.value, Value::step_of(unit.value, parameters.tables), 1);
        }
    }

    // Writes the unit's rows.
    KVD_DEVICE void write(const AttendShared<ROWS>& shared, const AttendParameters& parameters,
                          const Unit& unit) {
        // Where there was no tile, nothing else came between the places and who reads them.
        KVD_BARRIER();
        settle(parameters, unit);
        KVD_BARRIER();
        const unsigned dim = unit.value.dim;
        for (unsigned at = thread_index(); at < unit.rows * dim; at += ATTEND_THREADS) {
            parameters.out[uint64_t(unit.partial) * dim + at] = out[at];
        }
    }
};

}  // namespace kvd
