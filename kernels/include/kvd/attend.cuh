// The attention loop: one for every codec. Reads pages through a block table of offsets, in tiles
// of 32 tokens that are copied into shared memory while those before are worked on, as many ahead as
// there are buffers but one; a tile is read once for all query rows of the unit (grouped queries, several
// query tokens). Online softmax
// (Milakov and Gimelshein, 1805.02867) over a part of the stored range per unit (split-K,
// FlashDecoding); merge.cuh adds the parts up. Meaning: design section 4, and the CPU's
// kvd-compute/src/cpu/attend.rs. A codec side is a struct with three verbs: `prepare` once per
// unit, `scores` (query rows times keys of a tile) and `accumulate` (weighted values of a tile);
// `span` says which bytes of a page a tile needs, one of `SPANS` pieces at a time. Huffman codes are
// decoded first, some chunks of 64 tokens at once, each by half a warp (coded.cuh).
#pragma once

#include "scores.cuh"
#include "sums.cuh"

namespace kvd {

// Scores are kept finite, as on the CPU: huge keys saturate instead of turning into NaN.
constexpr float SCORE_MAX = 1.0e38f;

// What query row `row` of a unit sees: the causal rule and the sliding window.
KVD_DEVICE Range visible(const Unit& unit, unsigned row) {
    const unsigned token = (unit.first_row + row) / unit.heads;
    const unsigned position = unit.position > ~0u - 1 - token ? ~0u - 1 : unit.position + token;
    const unsigned to = position + 1;
    return {unit.window && to > unit.window ? to - unit.window : 0, to};
}

// Starts copying the aligned sixteens around `len` bytes at `from`. Pages and slots begin on
// sixteens and end with them, so nothing outside the slot is read.
KVD_DEVICE void stage_bytes(uint8_t* to, const uint8_t* from, unsigned len) {
    const unsigned bytes = staged_bytes(from, len);
    const uint8_t* start = from - misaligned(from);
    for (unsigned at = thread_index() * COPY_BYTES; at < bytes; at += ATTEND_THREADS * COPY_BYTES) {
        copy_async16(to + at, start + at);
    }
}

// Starts copying a side's bytes of a tile to `to`, span after span.
template <class Side>
KVD_DEVICE void stage(const SideShape& side, const Tile& tile, uint8_t* to, unsigned capacity) {
    if constexpr (Spreads<Side>::stages) {
        return Side::stage(side, tile, to, capacity);
    }
    unsigned used = 0;
    for (unsigned part = 0; part < Side::SPANS; part++) {
        const Span span = Side::span(side, tile, part);
        const uint8_t* from = tile.payload + span.offset;
        const unsigned bytes = staged_bytes(from, span.len);
        KVD_EXPECT(used + bytes <= capacity);
        stage_bytes(to + used, from, span.len);
        used += bytes;
    }
}

// Waits until the oldest of the tiles that this thread copies is there: all are under way but one.
KVD_DEVICE void wait_for_tile(unsigned buffers) {
    if (buffers == 2) {
        copy_async_wait<0>();
    } else if (buffers == 3) {
        copy_async_wait<1>();
    } else {
        copy_async_wait<BUFFERS_MAX - 2>();
    }
}

// Gains: rows of values that were raised by a power of two before they were quantized. 4 bits per
// row behind the payload; the weight of a row is multiplied by what brings it back.
KVD_DEVICE Span gain_span(const PageEntry& page, unsigned tile) {
    const unsigned first = tile * (TILE_TOKENS / 2);
    const unsigned left = page.gain_bytes > first ? page.gain_bytes - first : 0;
    return {uint64_t(page.value_bytes) + first, least(left, TILE_TOKENS / 2)};
}

// What the weight of row `row` of a tile is multiplied by; its gains are staged at `staged`.
KVD_DEVICE float gain_factor(const AttendParameters& parameters, const Place& place,
                             const uint8_t* staged, unsigned row) {
    const Span span = gain_span(*place.page, place.tile);
    if (row / 2 >= span.len) {
        return 1;
    }
    const uint8_t* at = parameters.arena + place.page->value + span.offset;
    const unsigned shift = staged[misaligned(at) + row / 2] >> 4 * (row % 2) & 15;
    return f32_value((127 - shift) << 23);
}

// The softmax of the rows that a warp owns: every `ATTEND_WARPS`th.
template <int ROWS, unsigned PARTS>
struct Softmax {
    static constexpr unsigned OWNED = (ROWS + ATTEND_WARPS - 1) / ATTEND_WARPS;
    float max[OWNED];
    float sum[OWNED];

    KVD_DEVICE Softmax() {
        for (unsigned own = 0; own < OWNED; own++) {
            max[own] = -INFINITY;
            sum[own] = 0;
        }
    }

    // Turns a tile's scores into weights, and says by which factor what was summed so far shrinks.
    // Gains scale the weight of a value, not its part of the sum.
    KVD_DEVICE void absorb(const AttendParameters& parameters, const Unit& unit, const Place& place,
                           const AttendShared<ROWS>& shared, const uint8_t* gains) {
        const float gain = gain_factor(parameters, place, gains, lane_index());
#pragma unroll
        for (unsigned own = 0; own < OWNED; own++) {
            const unsigned row = own * ATTEND_WARPS + warp_index();
            if (row >= ROWS) {
                break;
            }
            const float score = this->score(parameters, unit, place, shared, row);
            const float high = fmaxf(max[own], warp_max(score));
            const float weight = score == -INFINITY ? 0 : expf(score - high);
            // Exactly 1 where nothing larger came.
            const float factor = max[own] == high        ? 1
                                 : max[own] == -INFINITY ? 0
                                                         : expf(max[own] - high);
            max[own] = high;
            sum[own] = sum[own] * factor + warp_sum(weight);
            shared.weights[row * TILE_TOKENS + lane_index()] = weight * gain;
            if (lane_index() == 0) {
                shared.factors[row] = factor;
            }
        }
    }

    // The score of this lane's token, `-INFINITY` when the row does not see it.
    KVD_DEVICE float score(const AttendParameters& parameters, const Unit& unit, const Place& place,
                           const AttendShared<ROWS>& shared, unsigned row) const {
        const unsigned lane = lane_index();
        if (row >= unit.rows || lane < place.from || lane >= place.to) {
            return -INFINITY;
        }
        const PageEntry& page = *place.page;
        const unsigned token = page.first_token + (place.tile * TILE_TOKENS + lane - page.first_row);
        const Range seen = visible(unit, row);
        if (token < seen.from || token >= seen.to) {
            return -INFINITY;
        }
        float score = parameters.offsets[unit.query + row];
        for (unsigned part = 0; part < PARTS; part++) {
            score += shared.sums[(part * ROWS + row) * TILE_TOKENS + lane];
        }
        if (parameters.soft_cap > 0) {
            score = parameters.soft_cap * tanhf(score / parameters.soft_cap);
        }
        return fminf(fmaxf(score, -SCORE_MAX), SCORE_MAX);
    }
};

// One unit. Three barriers per tile: the staged bytes are complete, the scores, the weights; each
// also keeps a buffer from being overwritten while a slower warp still reads it: the first is behind
// the last tile, whose buffer is filled next. `CODED`: a side may
// hold Huffman codes, and a fourth barrier follows where chunks are decoded, or tiles are spread.
template <class Key, class Value, int ROWS, bool CODED>
KVD_DEVICE void attend(const AttendParameters& parameters, uint8_t* memory) {
    const Unit& unit = parameters.units[block_index()];
    const unsigned dim = unit.key.dim;
    const unsigned value_work = Sums<Value, ROWS>::work_bytes(unit.value);
    constexpr unsigned SUMS = Scores<Key, ROWS>::PARTS * TILE_TOKENS;
    constexpr unsigned SUMS_OF_ROW =
        SUMS < Sums<Value, ROWS>::SUMS_OF_ROW ? Sums<Value, ROWS>::SUMS_OF_ROW : SUMS;
    constexpr bool COPIES = Scores<Key, ROWS>::COPIES_QUERY;
    // Huffman codes come through rings of their own; what is staged beside them is little.
    const unsigned buffers = CODED ? 2 : parameters.buffers;
    KVD_EXPECT(buffers >= 2 && buffers <= BUFFERS_MAX);
    const AttendShared<ROWS> shared(memory, parameters, unit, COPIES, SUMS_OF_ROW, value_work,
                                    CODED, buffers);
    const unsigned stage_size = parameters.key_stage + parameters.value_stage;
    KVD_EXPECT(unit.rows <= ROWS && unit.value.dim <= CHANNELS_PER_THREAD * ATTEND_THREADS);

    for (unsigned at = thread_index(); COPIES && at < ROWS * dim; at += ATTEND_THREADS) {
        const float* query = parameters.queries + uint64_t(unit.query) * dim;
        reinterpret_cast<float*>(memory)[at] = at < unit.rows * dim ? query[at] : 0;
    }
    Key::prepare(unit.key, parameters.tables, shared.key_table, ATTEND_THREADS);
    Value::prepare(unit.value, parameters.tables, shared.value_table, ATTEND_THREADS);
    Decoder<Key, Value, CODED> decoder(parameters, unit, shared.coded, shared.key_table,
                                             shared.value_table);

    // The union of what the rows see: the first row's start, the last row's end.
    const Range seen = {visible(unit, 0).from, visible(unit, unit.rows - 1).to};
    Scores<Key, ROWS> scores(shared, parameters, unit.key);
    Softmax<ROWS, Scores<Key, ROWS>::PARTS> softmax;
    Sums<Value, ROWS> sums(shared, parameters, unit);
    unsigned index = 0;
    unsigned tile = 0;
    // Starts copying the next seen tile to a buffer; its place is no page behind the last. What is
    // committed is counted, so it is also where nothing is copied.
    const auto start = [&](unsigned buffer) {
        Place next = {nullptr, 0, 0, 0};
        if (seek(parameters, unit, seen, index, tile, next)) {
            tile++;
            uint8_t* to = shared.stages + buffer * stage_size;
            const Tile keys = decoder.tile(next, true, to);
            stage<Key>(unit.key, keys, to, parameters.key_stage);
            to += parameters.key_stage;
            const Tile values = decoder.tile(next, false, to);
            stage<Value>(unit.value, values, to, parameters.value_stage);
            const Span gains = gain_span(*next.page, next.tile);
            stage_bytes(shared.gains + buffer * GAIN_STAGE, values.payload + gains.offset, gains.len);
        }
        if (thread_index() == 0) {
            shared.places[buffer] = next;
        }
        copy_async_commit();
    };
    for (unsigned buffer = 0; buffer + 1 < buffers; buffer++) {
        start(buffer);
    }
    for (unsigned buffer = 0;; buffer = buffer + 1 == buffers ? 0 : buffer + 1) {
        wait_for_tile(buffers);
        KVD_BARRIER();
        const Place place = shared.places[buffer];
        if (place.page == nullptr) {
            break;
        }
        decoder.advance(seen, place, [&]() { sums.settle(parameters, unit); });
        start(buffer == 0 ? buffers - 1 : buffer - 1);
        const uint8_t* at = shared.stages + buffer * stage_size;
        Tile keys = decoder.tile(place, true, at);
        const bool folds = scores.folds(unit.key);
        if (folds) {
            scores.fold(shared, unit.key, keys);
        }
        if constexpr (Spreads<Key>::value) {
            Key::template spread<true>(unit.key, keys, shared.key_spread);
            keys.decoded = shared.key_spread;
        }
        if constexpr (Spreads<Value>::value) {
            const Tile staged = decoder.tile(place, false, at + parameters.key_stage);
            Value::template spread<false>(unit.value, staged, shared.value_spread);
        }
        if (folds || Spreads<Key>::value || Spreads<Value>::value) {
            KVD_BARRIER();
        }
        scores.tile(shared, unit.key, keys);
        KVD_BARRIER();
        const uint8_t* gains = shared.gains + buffer * GAIN_STAGE;
        softmax.absorb(parameters, unit, place, shared, gains);
        KVD_BARRIER();
        Tile values = decoder.tile(place, false, at + parameters.key_stage);
        if constexpr (Spreads<Value>::value) {
            values.decoded = shared.value_spread;
        }
        sums.absorb(unit.value, values, shared);
    }
    sums.write(shared, parameters, unit);
    for (unsigned own = 0; own < softmax.OWNED; own++) {
        const unsigned row = own * ATTEND_WARPS + warp_index();
        // Thread blocks that share the channels of the values have the same.
        if (row < unit.rows && lane_index() == 0 && unit.value.part == 0) {
            parameters.stats[2 * (unit.partial + row)] = softmax.max[own];
            parameters.stats[2 * (unit.partial + row) + 1] = softmax.sum[own];
        }
    }
}

}  // namespace kvd
