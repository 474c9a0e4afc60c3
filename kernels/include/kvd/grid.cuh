// Codes under one step per head, entropy coded by class of coefficient (docs/adr/0005-grid-codec.md,
// docs/format.md "Sides"): `(code - bias) * step`, and outliers. Always Huffman codes: huffman.cuh has
// decoded the tile. CPU reference: kvd-codec/src/quantizer/grid.rs.
#pragma once

#include "outlier.cuh"
#include "tensor.cuh"

namespace kvd {

struct Grid {
    static constexpr unsigned SPANS = 0;
    static constexpr bool ODD_WORDS = false;
    // A channel of the zero class.
    static constexpr unsigned NOWHERE = 0xFFFF;

    KVD_DEVICE static uint64_t codes_at(const SideShape&, const Tile&) { return 0; }
    KVD_DEVICE static Span span(const SideShape&, const Tile&, unsigned) { return {0, 0}; }
    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint8_t*, unsigned) {}

    // The tile's tokens in its chunk.
    KVD_DEVICE static Range tokens(const Tile& tile) {
        const unsigned first = tile.index % CHUNK_TILES * TILE_TOKENS;
        return {first, first + tile.tokens};
    }

    KVD_DEVICE static unsigned end_of(const StreamRun& run) { return run.place + run.len; }

    // A lane per token, quads dealt to the warps; outliers of a token as well.
    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const unsigned token = lane_index();
        if (token >= tile.tokens) {
            return;
        }
        float sums[ROWS] = {};
        const unsigned runs = lane_head(tile.lanes).runs;
        unsigned index = 0;
        for (unsigned place = warp_index() * CODE_GROUP; place < side.stride;
             place += warps * CODE_GROUP) {
            while (index < runs && place >= end_of(lane_run(tile.lanes, index))) {
                index++;
            }
            if (index == runs) {
                break;
            }
            const StreamRun& run = lane_run(tile.lanes, index);
            const unsigned first = place - run.place;
            const unsigned len = least(CODE_GROUP, run.len - first);
            const uint32_t word = load32(tile.decoded + place * TILE_TOKENS + token * CODE_GROUP);
#pragma unroll
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                if (at < len) {
                    const float code = float(int(word >> 8 * at & 255) - run.bias);
                    add_score(query, side.dim, run.first + first + at, code, sums);
                }
            }
        }
        const unsigned row = tokens(tile).from + token;
        each_outlier(*tile.outliers, side.dim, {row, row + 1}, warp_index(), warps,
                     [&](unsigned, unsigned channel, float rest) {
                         add_score(query, side.dim, channel, rest, sums);
                     });
        const float step = lane_head(tile.lanes).step;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            scores[row] += step * sums[row];
        }
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const LaneHead& head = lane_head(tile.lanes);
        const uint32_t channel = load32(tile.lanes + head.channels + 4 * position);
        const unsigned place = channel & 0xFFFF;
        float sums[ROWS] = {};
        if (place != NOWHERE) {
            const int bias = int(channel >> 16);
            const Codes codes = {tile.decoded, 8, tile.tokens, side.stride, side.stride};
            accumulate_codes(codes, place, slice, slices, weights, sums,
                             [&](unsigned, unsigned code) { return float(int(code) - bias); });
        }
        const Range rows = tokens(tile);
        each_outlier(*tile.outliers, side.dim, rows, slice, slices,
                     [&](unsigned token, unsigned at, float rest) {
                         if (at == position) {
                             add_value(weights, token - rows.from, rest, sums);
                         }
                     });
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            out[row] += head.step * sums[row];
        }
    }
};

// With products of codes: the bias of a run's codes is subtracted from the sums, as integers.
template <>
struct Tensor<Grid> : Grid {
    static constexpr bool SIGNED = false;
    static constexpr bool BIASED = true;
    static constexpr bool LOOKS_UP = false;
    static constexpr unsigned WEIGHT_SETS = 0;
    static constexpr bool WANTS_WEIGHTS = true;
    static constexpr bool MAY_SCALE_CHANNELS = false;


    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return {tile.decoded, 8, tile.tokens, side.stride, side.stride};
    }
    KVD_DEVICE static KeyOrder order(const SideShape& side, const Tile&) {
        return KeyOrder(side.stride, 8, true);
    }

    // The run of a quad, or none.
    KVD_DEVICE static const StreamRun* run_of(const Tile& tile, unsigned quad) {
        const unsigned place = quad * CODE_GROUP;
        for (unsigned index = 0; index < lane_head(tile.lanes).runs; index++) {
            const StreamRun& run = lane_run(tile.lanes, index);
            if (place >= run.place && place < end_of(run)) {
                return &run;
            }
        }
        return nullptr;
    }

    KVD_DEVICE static void fold(const SideShape&, const Tile& tile, const float* query,
                                unsigned quad, float (&values)[CODE_GROUP], float&) {
        const StreamRun* run = run_of(tile, quad);
        if (run == nullptr) {
            return;
        }
        const unsigned first = quad * CODE_GROUP - run->place;
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            values[at] = first + at < run->len ? query[run->first + first + at] : 0;
        }
    }

    KVD_DEVICE static int32_t bias(const Tile& tile, unsigned quad) {
        const StreamRun* run = run_of(tile, quad);
        return run == nullptr ? 0 : run->bias;
    }

    KVD_DEVICE static float score(const SideShape&, const Tile& tile, unsigned, float sum, float) {
        return lane_head(tile.lanes).step * sum;
    }

    // Adds the outliers of tokens `mine` and the next to their scores; the warp's eight tokens begin at
    // `first`.
    KVD_DEVICE static void add_rests(const SideShape& side, const Tile& tile, const float* query,
                                     unsigned first, unsigned mine, float (&scores)[2]) {
        const float step = lane_head(tile.lanes).step;
        const unsigned row = tokens(tile).from;
        each_outlier(*tile.outliers, side.dim, {row + first, row + first + STEP_COLUMNS}, 0, 1,
                     [&](unsigned token, unsigned channel, float rest) {
                         const float product = step * rest * query[channel];
                         scores[0] += token - row == mine ? product : 0;
                         scores[1] += token - row == mine + 1 ? product : 0;
                     });
    }

    // A decoded row of values has the coded channels, run after run; the others are numbered behind
    // them. By place its channel, and above it the bias of its codes, a byte each; places by
    // channel, a byte each; coded ones.
    KVD_DEVICE static unsigned place_bytes(const SideShape& side) { return 3 * side.dim + 4; }
    KVD_DEVICE static uint16_t* by_place(uint32_t* places) {
        return reinterpret_cast<uint16_t*>(places);
    }
    KVD_DEVICE static uint8_t* by_channel(const SideShape& side, uint32_t* places) {
        return reinterpret_cast<uint8_t*>(places) + 2 * side.dim;
    }

    KVD_DEVICE static void prepare_places(const SideShape& side, const uint8_t* tables,
                                          uint32_t* places) {
        const uint8_t* lanes = tables + side.lanes;
        const LaneHead& head = lane_head(lanes);
        unsigned coded = 0;
        for (unsigned index = 0; index < head.runs; index++) {
            coded += lane_run(lanes, index).len;
        }
        if (warp_index() != 0) {
            return;
        }
        unsigned others = coded;
        for (unsigned first = 0; first < side.dim; first += WARP_LANES) {
            const unsigned channel = first + lane_index();
            const bool is_channel = channel < side.dim;
            const uint32_t word = is_channel ? load32(lanes + head.channels + 4 * channel) : 0;
            const bool is_other = is_channel && (word & 0xFFFF) == NOWHERE;
            const uint32_t all = KVD_BALLOT(is_other);
            const unsigned before = ones(all & ((1u << lane_index()) - 1));
            const unsigned place = is_other ? others + before : word & 0xFFFF;
            if (is_channel) {
                by_place(places)[place] = uint16_t(channel | (is_other ? 0 : word >> 16 << 8));
                by_channel(side, places)[channel] = uint8_t(place);
            }
            others += ones(all);
        }
        if (lane_index() == 0) {
            places[3 * side.dim / 4] = coded;
        }
    }
    KVD_DEVICE static unsigned places_of(const SideShape& side, const uint32_t* places) {
        return places[3 * side.dim / 4];
    }
    KVD_DEVICE static uint32_t channel(const SideShape& side, const uint32_t* places,
                                       unsigned place) {
        if (place >= side.dim) {
            return NOWHERE;
        }
        const unsigned word = reinterpret_cast<const uint16_t*>(places)[place];
        return (word & 255) | word >> 8 << 16;
    }

    KVD_DEVICE static float step(const SideShape&, const Tile& tile) { return lane_head(tile.lanes).step; }
    KVD_DEVICE static float step_of(const SideShape& side, const uint8_t* tables) {
        return lane_head(tables + side.lanes).step;
    }

    KVD_DEVICE static float channel_step(const SideShape&, const uint32_t*, unsigned) { return 1; }

    // Calls `add(place, channel, weights of the token, value)` for what the codes do not hold.
    template <class Add>
    KVD_DEVICE static void add_rests(const SideShape& side, const Tile& tile,
                                     const uint32_t* places, const float* weights, Add add) {
        const Range rows = tokens(tile);
        const float step = lane_head(tile.lanes).step;
        const uint8_t* of_channel = reinterpret_cast<const uint8_t*>(places) + 2 * side.dim;
        each_outlier(*tile.outliers, side.dim, rows, 0, 1,
                     [&](unsigned token, unsigned channel, float rest) {
                         add(of_channel[channel], channel, weights + token - rows.from,
                             step * rest);
                     });
    }
};

}  // namespace kvd
