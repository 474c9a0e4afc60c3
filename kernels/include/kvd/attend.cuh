// The attention loop: one for every codec. Reads pages through a block table of offsets, in tiles
// of 32 tokens that are copied into shared memory while those before are worked on, as many ahead as
// there are buffers but one; a tile is read once for all query rows of the unit (grouped queries, several
// query tokens). A unit has a part of the stored range (split-K, FlashDecoding); merge.cuh adds the parts up. Meaning: design section 4, and the CPU's
// kvd-compute/src/cpu/attend.rs. A codec side is a struct with three verbs: `prepare` once per
// unit, `scores` (query rows times keys of a tile) and `accumulate` (weighted values of a tile);
// `span` says which bytes of a page a tile needs, one of `SPANS` pieces at a time. Huffman codes are
// decoded first, some chunks of 64 tokens at once, each by half a warp (huffman_pipeline.cuh).
#pragma once

#include "scores.cuh"
#include "softmax.cuh"
#include "sums.cuh"

namespace kvd {

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

// How both sides of a unit are stored: as the unit says, or, in a kernel for one codec, with what that
// fixes as constants (specialized.cuh).
struct AsGiven {
    KVD_DEVICE static const SideShape& key(const SideShape& side) { return side; }
    KVD_DEVICE static const SideShape& value(const SideShape& side) { return side; }
};

// Sizes in shared memory that depend on the pair of sides.
template <class Key, class Value, int ROWS, bool CODED>
KVD_DEVICE typename AttendShared<ROWS>::Sizes sizes_of(const SideShape& value, unsigned buffers) {
    using Found = Stops<Key, Value, ROWS, CODED>;
    constexpr unsigned SUMS = Scores<Key, ROWS>::PARTS * Found::TOKENS;
    constexpr unsigned SUMS_OF_ROW =
        SUMS < Sums<Value, ROWS>::SUMS_OF_ROW ? Sums<Value, ROWS>::SUMS_OF_ROW : SUMS;
    return {Found::RING * unsigned(sizeof(typename Found::Stop)), Sums<Value, ROWS>::work_bytes(value),
            SUMS_OF_ROW, Found::TILES, Weights<Value, ROWS, Found::TILES>::SETS, buffers,
            Scores<Key, ROWS>::COPIES_QUERY, CODED};
}

// One unit. Three barriers per tile, or two worked on together: the staged bytes are complete, the scores, the weights; each
// also keeps a buffer from being overwritten while a slower warp still reads it: the first is behind
// the last tile, whose buffer is filled next. `CODED`: a side may
// hold Huffman codes, and a fourth barrier follows where chunks are decoded, tiles are spread, or queries are cut.
template <class Key, class Value, int ROWS, bool CODED, class Shapes = AsGiven>
KVD_DEVICE void attend(const AttendParameters& parameters, uint8_t* memory) {
    const AttendUnit& unit = parameters.units[block_index()];
    const SideShape& key = Shapes::key(unit.key);
    const SideShape& value = Shapes::value(unit.value);
    // Huffman codes come through rings of their own; little else is staged beside them.
    const unsigned buffers = CODED ? 2 : parameters.buffers;
    KVD_EXPECT(buffers >= 2 && buffers <= BUFFERS_MAX);
    KVD_EXPECT(unit.rows <= ROWS && value.dim <= CHANNELS_PER_THREAD * ATTEND_THREADS);
    const AttendShared<ROWS> shared(memory, parameters, unit, key, value,
                                    sizes_of<Key, Value, ROWS, CODED>(value, buffers));
    const unsigned stage_bytes = shared.stage_bytes(parameters);

    for (unsigned at = thread_index(); Scores<Key, ROWS>::COPIES_QUERY && at < ROWS * key.dim;
         at += ATTEND_THREADS) {
        const float* query = parameters.queries + uint64_t(unit.query) * key.dim;
        reinterpret_cast<float*>(memory)[at] = at < unit.rows * key.dim ? query[at] : 0;
    }
    Key::prepare(key, parameters.tables, shared.key_table, ATTEND_THREADS);
    Value::prepare(value, parameters.tables, shared.value_table, ATTEND_THREADS);
    Decoder<Key, Value, CODED> decoder(parameters, unit, key, value, memory, shared.coded,
                                       shared.key_table, shared.value_table);

    // The union of the rows' visible tokens: the first row's start, the last row's end.
    const Range seen = {visible(unit, 0).from, visible(unit, unit.rows - 1).to};
    Stops<Key, Value, ROWS, CODED> stops(shared.stops);
    Scores<Key, ROWS> scores(shared, parameters, key);
    constexpr unsigned TILES = Stops<Key, Value, ROWS, CODED>::TILES;
    Softmax<Value, ROWS, Scores<Key, ROWS>::PARTS, TILES> softmax(parameters, unit);
    Sums<Value, ROWS> sums(shared, parameters, value);
    if (warp_index() == 0) {
        stops.find(parameters, unit, seen, decoder, 0);
    }
    KVD_BARRIER();
    // Starts copying a tile to a buffer. What is committed is counted, so it is also where nothing is copied.
    const auto start = [&](unsigned number, unsigned buffer) {
        const auto& stop = stops.at(number);
        if (stop.place.to != 0) {
            stops.stage(decoder, stop, shared.stages + buffer * stage_bytes);
        }
        copy_async_commit();
    };
    for (unsigned buffer = 0; buffer + 1 < buffers; buffer++) {
        start(buffer, buffer);
    }
    for (unsigned number = 0, buffer = 0;; number++, buffer = buffer + 1 == buffers ? 0 : buffer + 1) {
        wait_for_tile(buffers);
        KVD_BARRIER();
        const auto& stop = stops.at(number);
        const Place place = stop.place;
        if (place.to == 0) {
            break;
        }
        if (KVD_RARELY((number + buffers) % stops.BATCH == 0) && warp_index() == 0) {
            stops.find(parameters, unit, seen, decoder, number + buffers);
        }
        decoder.template advance<TILES == CHUNK_TILES>(
            seen, place, [&]() { sums.settle(parameters, value); });
        start(number + buffers - 1, buffer == 0 ? buffers - 1 : buffer - 1);
        const uint8_t* staged = shared.stages + buffer * stage_bytes;
        // A second tile that the page has not is the first once more, and nothing of it is seen.
        const unsigned count = stops.tiles(stop);
        Tile keys[TILES];
        Tile values[TILES];
        float gains[TILES];
#pragma unroll
        for (unsigned tile = 0; tile < TILES; tile++) {
            const unsigned half = least(tile, count - 1);
            keys[tile] = stops.keys(decoder, stop, staged, half);
            values[tile] = stops.values(decoder, stop, staged, half);
            gains[tile] = stops.gain(stop, staged, tile * TILE_TOKENS + lane_index());
        }
        const bool folds = scores.folds(key);
#pragma unroll
        for (unsigned tile = 0; tile < TILES; tile++) {
            if (folds && tile < count) {
                scores.fold(shared, key, keys[tile]);
            }
        }
        if constexpr (Spreads<Key>::value) {
            Key::template spread<true>(key, keys[0], shared.key_spread);
            keys[0].decoded = shared.key_spread;
        }
        if constexpr (Spreads<Value>::value) {
            Value::template spread<false>(value, values[0], shared.value_spread);
            values[0].decoded = shared.value_spread;
        }
        if (folds || Spreads<Key>::value || Spreads<Value>::value) {
            KVD_BARRIER();
        }
        if constexpr (InGroups<Key>::value) {
            scores.groups(shared, key, keys);
        } else if constexpr (ScalesSums<Key>::value) {
            scores.chosen(shared, key, keys);
        } else {
#pragma unroll
            for (unsigned tile = 0; tile < TILES; tile++) {
                if (tile < count) {
                    scores.tile(shared, key, keys[tile]);
                }
            }
        }
        KVD_BARRIER();
        softmax.absorb(parameters, place, stop.token, shared, value, values, gains);
        KVD_BARRIER();
        if constexpr (TILES > 1) {
            sums.absorb(value, values, count, shared);
        } else {
            sums.absorb(value, values[0], shared);
        }
    }
    softmax.write(parameters, unit, shared);
    sums.write(shared, parameters, unit, value);
}

}  // namespace kvd
