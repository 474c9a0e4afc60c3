// Tiles of a unit's pages for its sides, and, where codes are Huffman codes, their decoding: the next
// `chunks` chunks of keys by the first warps, of values by the others, each chunk by half a warp.
// Shared memory: runs and tables behind a side's own table, decoded chunks, lists of outliers, rings.
#pragma once

#include "outlier.cuh"
#include "mask.cuh"

namespace kvd {

// Whether codes of a side may have more than eight bits: not where they are multiplied as bytes.
template <class Side>
struct Tensor;
template <class Side>
struct MayBeWide {
    static constexpr bool value = true;
};
template <class Side>
struct MayBeWide<Tensor<Side>> {
    static constexpr bool value = false;
};

// Half a warp for each, of both sides.
constexpr unsigned CHUNKS_MAX = ATTEND_WARPS;

// Shared memory of a decoder: chunks, lists and rings of both sides.
KVD_DEVICE unsigned decoder_bytes(const AttendParameters& parameters) {
    const unsigned chunks = parameters.key_chunk + parameters.value_chunk + 2 * sizeof(OutlierList);
    return parameters.chunks * chunks + 2 * most(parameters.chunks, 2) * RING_BYTES;
}

template <class Key, class Value, bool CODED>
struct Decoder {
    const AttendParameters& parameters;
    const AttendUnit& unit;
    const SideShape& key;
    const SideShape& value;
    const uint8_t* key_table;
    const uint8_t* value_table;
    const uint8_t* key_lanes;
    const uint8_t* value_lanes;
    // All shared memory, and what of it is a decoder's.
    uint8_t* memory;
    uint8_t* coded_memory;
    // The page and chunk whose tiles are read, and its place among the decoded ones.
    const PageEntry* page;
    unsigned chunk;
    unsigned slot;

    KVD_DEVICE Decoder(const AttendParameters& parameters, const AttendUnit& unit, const SideShape& key,
                       const SideShape& value, uint8_t* memory, uint8_t* coded,
                       uint8_t* key_table, uint8_t* value_table)
        : parameters(parameters),
          unit(unit),
          key(key),
          value(value),
          key_table(key_table),
          value_table(value_table),
          key_lanes(nullptr),
          value_lanes(nullptr),
          memory(memory),
          coded_memory(coded),
          page(nullptr),
          chunk(0),
          slot(parameters.chunks) {
        if (!CODED) {
            return;
        }
        key_lanes = runs(key, key_table);
        value_lanes = runs(value, value_table);
    }

    // Runs and tables of a side in shared memory, behind its own table; those of wide codes, whose
    // tables are too large, are read where they are.
    KVD_DEVICE const uint8_t* runs(const SideShape& side, uint8_t* table) const {
        uint8_t* to = table + (side.table_bytes + COPY_BYTES - 1) / COPY_BYTES * COPY_BYTES;
        copy_table(to, parameters.tables + side.lanes, side.lane_bytes, ATTEND_THREADS);
        return to;
    }

    KVD_DEVICE static bool coded(const SideShape& side) { return CODED && side.stride != 0; }

    // A side's tile, of a page of so many tokens, or the one behind it; it is staged in `buffer` as `pieces`
    // say.
    KVD_DEVICE Tile tile(const Place& place, unsigned page_tokens, bool is_key,
                         const uint8_t* buffer, const Piece* pieces, unsigned half = 0) const {
        const PageEntry& page = *place.page;
        const SideShape& side = is_key ? key : value;
        const unsigned index = place.tile + half;
        const unsigned first = index * TILE_TOKENS;
        Tile tile = {parameters.arena + (is_key ? page.key : page.value),
                     is_key ? page.key_bytes : page.value_bytes,
                     buffer,
                     pieces,
                     half,
                     is_key ? key_table : value_table,
                     parameters.tables,
                     index,
                     first,
                     page_tokens,
                     least(TILE_TOKENS, page_tokens - first),
                     place.from,
                     place.to,
                     coded(side),
                     nullptr,
                     nullptr,
                     nullptr};
        if (tile.coded) {
            const unsigned bytes = TILE_TOKENS * side.stride * (side.bits > 8 ? 2 : 1);
            tile.decoded = out(is_key, slot) + index % CHUNK_TILES * bytes;
            tile.lanes = is_key ? key_lanes : value_lanes;
            tile.outliers = outliers(is_key, slot);
        }
        return tile;
    }

    KVD_DEVICE uint8_t* out(bool is_key, unsigned slot) const {
        const unsigned keys = parameters.chunks * parameters.key_chunk;
        return coded_memory + (is_key ? slot * parameters.key_chunk : keys + slot * parameters.value_chunk);
    }
    KVD_DEVICE OutlierList* outliers(bool is_key, unsigned slot) const {
        const unsigned chunks = parameters.chunks * (parameters.key_chunk + parameters.value_chunk);
        const unsigned list = (is_key ? 0 : parameters.chunks) + slot;
        return reinterpret_cast<OutlierList*>(coded_memory + chunks) + list;
    }
    // Where in the shared memory a ring is.
    KVD_DEVICE unsigned ring(unsigned number) const {
        const uint8_t* first = reinterpret_cast<const uint8_t*>(outliers(false, parameters.chunks));
        return unsigned(first - memory) + number * RING_BYTES;
    }

    // Goes on to a tile of the unit, all threads together: when its chunk is not decoded yet, it and
    // the next ones are. `before` is called first. `WHOLE`: each is a chunk of its own.
    template <bool WHOLE, class Before>
    KVD_DEVICE void advance(Range seen, const Place& place, Before before) {
        if (!CODED || (!WHOLE && page == place.page && chunk == place.tile / CHUNK_TILES)) {
            return;
        }
        page = place.page;
        chunk = place.tile / CHUNK_TILES;
        slot++;
        if (slot >= parameters.chunks) {
            slot = 0;
            before();
            decode(seen, unsigned(place.page - parameters.pages) - unit.first_page, place.tile);
            KVD_BARRIER();
        }
    }

    // Decodes the chunk of a tile of page `index` and those after it.
    KVD_DEVICE void decode(Range seen, unsigned index, unsigned tile) const {
        const unsigned half = 2 * warp_index() + lane_index() / CODE_LANES;
        const bool is_key = warp_index() < CHUNKS_MAX / 2;
        const unsigned mine = half % CHUNKS_MAX;
        if (!coded(is_key ? key : value) || mine / 2 * 2 >= parameters.chunks) {
            return;
        }
        Place place = {nullptr, 0, 0, 0};
        bool has = mine < parameters.chunks && seek(parameters, unit, seen, index, tile, place);
        for (unsigned passed = 0; has && passed < mine; passed++) {
            tile = (tile / CHUNK_TILES + 1) * CHUNK_TILES;
            has = seek(parameters, unit, seen, index, tile, place);
        }
        const unsigned ring = this->ring((is_key ? 0 : most(parameters.chunks, 2)) + mine);
        if (is_key) {
            decode_side<Key, true>(key, has, place, mine, ring);
        } else {
            decode_side<Value, false>(value, has, place, mine, ring);
        }
    }

    // Where words never begin at odd addresses, nothing asks.
    template <class Side, bool IS_KEY>
    KVD_DEVICE void decode_side(const SideShape& side, bool has, const Place& place, unsigned mine,
                                unsigned ring) const {
        const unsigned lanes = unsigned((IS_KEY ? key_lanes : value_lanes) - memory);
        const uint8_t* global = parameters.tables + side.lanes;
        const LaneHead& head = lane_head(global);
        Chunk chunk = {parameters.tables, 0, parameters.tables, 0, 0};
        if (has) {
            const Tile tile = this->tile(place, place.page->tokens, IS_KEY, nullptr, nullptr);
            const uint8_t* codes = tile.payload + Side::codes_at(side, tile);
            chunk = chunk_of(head, codes, tile.payload + tile.payload_bytes, tile.page_tokens,
                             place.tile / CHUNK_TILES);
        }
        const unsigned to = unsigned(out(IS_KEY, mine) - memory);
        const bool odd = reinterpret_cast<uintptr_t>(chunk.words) % WORD_BYTES != 0;
        if (MayBeWide<Side>::value && side.bits > 8) {
            decode_chunk<IS_KEY>(side, Source<false, true>{global, 0}, chunk, memory, ring, to);
        } else if (Side::ODD_WORDS && KVD_BALLOT(odd) != 0) {
            decode_chunk<IS_KEY>(side, Source<false, false>{memory, lanes}, chunk, memory, ring, to);
        } else {
            decode_chunk<IS_KEY>(side, Source<true, false>{memory, lanes}, chunk, memory, ring, to);
        }
        if (head.length_bytes == 2 * WORD_BYTES) {
            read_outliers(chunk, side.dim, mine < parameters.chunks, outliers(IS_KEY, mine));
        }
    }
};

}  // namespace kvd
