// Finds the next tiles of a unit and the bytes that they need, some at a time: lanes of the first warp look
// through pages, then each describes a tile. The other warps only copy the described bytes and find spans
// by the description, so a tile costs them no arithmetic of layouts.
#pragma once

#include "huffman_pipeline.cuh"
#include "unpack.cuh"

namespace kvd {

// Bytes of two tiles' gains, 4 bits per row wherever they begin.
constexpr unsigned GAIN_STAGE = 3 * COPY_BYTES;

// Tiles that are worked on together, of one page: two where that takes no more shared memory for bytes of
// their codes.
template <class Side>
struct Together {
    static constexpr unsigned value = 1;
};
template <class Side>
struct Together<Tensor<Side>> {
    static constexpr unsigned value = Spreads<Tensor<Side>>::value ? 1 : 2;
};

// Such tiles: none, behind the last, where no row of them is seen.
template <unsigned PIECES>
struct alignas(16) StopOf {
    Place place;
    // The token of the tile's first row, which may be one before the page's first.
    uint32_t token;
    uint32_t page_tokens;
    // Pieces of keys, values and gains.
    Piece piece[PIECES];
};

// Gains: rows of values that were raised by a power of two before they were quantized. 4 bits per
// row behind the payload; the weight of a row is multiplied by what brings it back.
KVD_DEVICE Span gain_span(const PageEntry& page, unsigned tile) {
    const unsigned first = tile * (TILE_TOKENS / 2);
    const unsigned left = page.gain_bytes > first ? page.gain_bytes - first : 0;
    return {uint64_t(page.value_bytes) + first, least(left, TILE_TOKENS / 2)};
}

template <class Key, class Value, int ROWS, bool CODED>
struct Stops {
    // Where codes are decoded too, more rows leave no registers for two.
    static constexpr bool ALONE = CODED && !Factor<ROWS>::FEW;
    static constexpr unsigned TILES =
        ALONE || Together<Key>::value != Together<Value>::value ? 1 : Together<Key>::value;
    // Tokens of a stop.
    static constexpr unsigned TOKENS = TILES * TILE_TOKENS;
    static constexpr unsigned KEYS = Key::SPANS;
    static constexpr unsigned VALUES = Value::SPANS;
    static constexpr unsigned PIECES = KEYS + VALUES + 1;
    using Stop = StopOf<PIECES>;
    // Bytes that a warp copies at once.
    static constexpr unsigned WARP_COPY = WARP_LANES * COPY_BYTES;
    // Found together: `stops_bytes` of kvd-cuda/src/buffers.rs. Those before are kept, since some tiles of them are
    // still worked on.
    static constexpr unsigned BATCH = CODED ? 4 / TILES : PIECES > 8 ? 8 : 16;
    static constexpr unsigned RING = 2 * BATCH;

    Stop* ring;
    // Where the next ones are looked for; the first warp knows.
    unsigned index;
    unsigned tile;

    KVD_DEVICE explicit Stops(uint8_t* shared)
        : ring(reinterpret_cast<Stop*>(shared)), index(0), tile(0) {}

    KVD_DEVICE Stop& at(unsigned number) const { return ring[number % RING]; }

    // Finds the stops from `number` on, by the first warp.
    KVD_DEVICE void find(const AttendParameters& parameters, const AttendUnit& unit, Range seen,
                         const Decoder<Key, Value, CODED>& decoder, unsigned number) {
        const unsigned count = find_places(parameters, unit, seen, number);
        KVD_WARP_BARRIER();
        if (lane_index() >= BATCH) {
            return;
        }
        Stop& stop = at(number + lane_index());
        if (lane_index() < count) {
            describe(parameters, decoder, stop);
        } else {
            stop.place.to = 0;
        }
    }

    // A page a lane: how many tiles of each are seen, and so which stops they are.
    KVD_DEVICE unsigned find_places(const AttendParameters& parameters, const AttendUnit& unit, Range seen,
                                    unsigned number) {
        unsigned count = 0;
        while (count < BATCH && index < unit.pages) {
            Range rows = {0, 0};
            const PageEntry* page = parameters.pages + unit.first_page + index + lane_index();
            if (index + lane_index() < unit.pages) {
                rows = seen_rows(*page, seen);
            }
            const unsigned to = (rows.to + TOKENS - 1) / TOKENS;
            const unsigned from = most(rows.from / TOKENS, lane_index() == 0 ? tile : 0);
            const unsigned mine = rows.from < rows.to && from < to ? to - from : 0;
            unsigned end = count + mine;
#pragma unroll
            for (unsigned step = 1; step < WARP_LANES; step *= 2) {
                const unsigned before = KVD_SHUFFLE(end, (lane_index() - step) % WARP_LANES);
                end += lane_index() >= step ? before - count : 0;
            }
            for (unsigned of = 0; of < mine && end - mine + of < BATCH; of++) {
                const unsigned start = (from + of) * TOKENS;
                Place& place = at(number + end - mine + of).place;
                place = {page, (from + of) * TILES, most(rows.from, start) - start,
                         least(rows.to, start + TOKENS) - start};
            }
            // The page that the batch ends in, if it has tiles beyond.
            const uint32_t beyond = KVD_BALLOT(end > BATCH);
            if (beyond != 0) {
                const unsigned last = ones((beyond & (0u - beyond)) - 1);
                tile = KVD_SHUFFLE(from + BATCH - (end - mine), last);
                index += last;
                return BATCH;
            }
            count = KVD_SHUFFLE(end, WARP_LANES - 1);
            index += WARP_LANES;
            tile = 0;
        }
        return count;
    }

    KVD_DEVICE void describe(const AttendParameters& parameters,
                             const Decoder<Key, Value, CODED>& decoder, Stop& stop) const {
        const PageEntry& page = *stop.place.page;
        stop.token = page.first_token - page.first_row + stop.place.tile * TILE_TOKENS;
        stop.page_tokens = page.tokens;
        unsigned used = 0;
        for (unsigned part = 0; part != KEYS; part++) {
            used += piece<Key>(decoder, decoder.key, stop, true, part, used, stop.piece[part]);
        }
        KVD_EXPECT(used <= parameters.key_stage);
        used = parameters.key_stage;
        for (unsigned part = 0; part != VALUES; part++) {
            Piece& to = stop.piece[KEYS + part];
            used += piece<Value>(decoder, decoder.value, stop, false, part, used, to);
        }
        KVD_EXPECT(used <= parameters.key_stage + parameters.value_stage);
        used = parameters.key_stage + parameters.value_stage;
        Span gains = gain_span(page, stop.place.tile);
        if (TILES > 1) {
            gains.len += gain_span(page, stop.place.tile + 1).len;
        }
        const uint8_t* values = parameters.arena + page.value;
        place(values + gains.offset, gains.len, 0, used, stop.piece[PIECES - 1]);
    }

    // A span of both tiles: those of the second end behind those of the first.
    template <class Side>
    KVD_DEVICE static unsigned piece(const Decoder<Key, Value, CODED>& decoder,
                                     const SideShape& side, const Stop& stop, bool is_key,
                                     unsigned part, unsigned used, Piece& to) {
        const Tile first = decoder.tile(stop.place, stop.page_tokens, is_key, nullptr, nullptr);
        const Span span = Side::span(side, first, part);
        uint64_t end = span.offset + span.len;
        unsigned step = 0;
        if (TILES > 1 && first.first_row + TILE_TOKENS < stop.page_tokens) {
            const Tile second =
                decoder.tile(stop.place, stop.page_tokens, is_key, nullptr, nullptr, 1);
            const Span next = Side::span(side, second, part);
            KVD_EXPECT(next.offset >= span.offset && next.offset - span.offset <= 0xFFFF);
            step = unsigned(next.offset - span.offset);
            end = next.offset + next.len;
        }
        return place(first.payload + span.offset, unsigned(end - span.offset), step, used, to);
    }

    // Pages and slots begin on sixteens and end with them, so nothing outside the slot is read.
    KVD_DEVICE static unsigned place(const uint8_t* from, unsigned len, unsigned step, unsigned used,
                                     Piece& to) {
        const unsigned bytes = staged_bytes(from, len);
        to = {from - misaligned(from), uint16_t(bytes / COPY_BYTES), uint16_t(step),
              used + misaligned(from)};
        return bytes;
    }

    // Starts copying tiles to their buffer: each warp its own pieces.
    KVD_DEVICE void stage(const Decoder<Key, Value, CODED>& decoder, const Stop& stop,
                          uint8_t* buffer) const {
        if constexpr (Stages<Key>::value) {
            Key::stage(decoder.key, stop.piece, tokens(stop), buffer);
        }
        if constexpr (Stages<Value>::value) {
            Value::stage(decoder.value, stop.piece + KEYS, tokens(stop), buffer);
        }
        constexpr unsigned FIRST = !Stages<Key>::value ? 0 : Stages<Value>::value ? KEYS + VALUES : KEYS;
        // Pieces of values behind those of keys are there already.
        constexpr bool SKIPS = Stages<Value>::value && !Stages<Key>::value;
#pragma unroll 1
        for (unsigned part = FIRST + warp_index(); part < PIECES; part += ATTEND_WARPS) {
            if (SKIPS && part >= KEYS && part + 1 < PIECES) {
                continue;
            }
            const Piece piece = stop.piece[part];
            const unsigned first = lane_index() * COPY_BYTES;
            const uint8_t* from = piece.from + first;
            uint8_t* to = buffer + piece.at / COPY_BYTES * COPY_BYTES + first;
            unsigned left = (piece.copies + WARP_LANES - 1 - lane_index()) / WARP_LANES;
#pragma unroll 1
            for (; left > 1; left -= 2) {
                copy_async16(to, from);
                copy_async16(to + WARP_COPY, from + WARP_COPY);
                to += 2 * WARP_COPY;
                from += 2 * WARP_COPY;
            }
            if (left > 0) {
                copy_async16(to, from);
            }
        }
    }
    KVD_DEVICE static unsigned tokens(const Stop& stop) {
        return least(TILE_TOKENS, stop.page_tokens - stop.place.tile * TILE_TOKENS);
    }

    // Both sides of a staged tile, the first or the second.
    KVD_DEVICE static Tile keys(const Decoder<Key, Value, CODED>& decoder, const Stop& stop,
                                const uint8_t* buffer, unsigned half = 0) {
        return decoder.tile(stop.place, stop.page_tokens, true, buffer, stop.piece, half);
    }
    KVD_DEVICE static Tile values(const Decoder<Key, Value, CODED>& decoder, const Stop& stop,
                                  const uint8_t* buffer, unsigned half = 0) {
        return decoder.tile(stop.place, stop.page_tokens, false, buffer, stop.piece + KEYS, half);
    }
    // Tiles in the page, seen or not: an unseen tile of a pair at an end of the seen range is read and
    // masked.
    KVD_DEVICE static unsigned tiles(const Stop& stop) {
        const unsigned second = (stop.place.tile + 1) * TILE_TOKENS;
        return TILES > 1 && second < stop.page_tokens ? 2 : 1;
    }

    // Factor of the weight of row `row` of a staged tile.
    KVD_DEVICE static float gain(const Stop& stop, const uint8_t* buffer, unsigned row) {
        const Piece& gains = stop.piece[PIECES - 1];
        float factor = 1;
        if (KVD_RARELY(gains.copies != 0) && row < stop.place.to) {
            const unsigned shift = buffer[gains.at + row / 2] >> 4 * (row % 2) & 15;
            factor = f32_value((127 - shift) << 23);
        }
        return factor;
    }
};

}  // namespace kvd
