// Bit allocation: every coefficient has a width of its own, 0 to 8 bits, and a scale; coefficients of
// equal width stand together in runs (docs/format.md "Sides"). The table holds the runs, the levels
// of all widths, f32, and the scales, f32. After the codes come outliers, `{row, coefficient, f16}`,
// by row: few, so they are read where they are. CPU reference: kvd-codec/src/quantizer/bitalloc.rs.
#pragma once

#include "unpack.cuh"

namespace kvd {

struct BitAlloc : NeverCoded {
    // Widths 8 to 0, widest first, after a matrix that orders them.
    static constexpr unsigned RUNS_MAX = 9;
    static constexpr unsigned SPANS = RUNS_MAX;
    static constexpr bool ODD_WORDS = false;
    static constexpr unsigned OUTLIER_BYTES = 6;

    struct Run {
        uint32_t first;
        uint32_t len;
        uint32_t width;
        uint32_t unused;
    };

    // The table's head; levels, those of width 1 first, and scales follow it.
    struct Head {
        uint32_t runs;
        uint32_t levels;
        uint32_t unused[2];
        Run run[RUNS_MAX];
    };

    KVD_DEVICE static const Head& head(const uint8_t* table) {
        return *reinterpret_cast<const Head*>(table);
    }
    KVD_DEVICE static float level(const uint8_t* table, unsigned width, unsigned code) {
        return load_float(table + sizeof(Head) + 4 * ((1u << width) - 2 + code));
    }
    KVD_DEVICE static float scale(const uint8_t* table, unsigned coefficient) {
        return load_float(table + sizeof(Head) + 4 * (head(table).levels + coefficient));
    }

    // Bytes of a run's codes in a page.
    KVD_DEVICE static unsigned run_bytes(const Tile& tile, const Run& run) {
        const unsigned full = tile.page_tokens / TILE_TOKENS;
        const unsigned left = tile.page_tokens % TILE_TOKENS;
        const unsigned bytes = full * (TILE_TOKENS / 8 * run.len * run.width);
        return bytes + plane_bytes(left * run.len, run.width);
    }

    // The runs are read before the table is in shared memory, so from global memory.
    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        const Head& head = BitAlloc::head(tile.tables + side.table);
        if (part >= head.runs) {
            return {0, 0};
        }
        uint64_t start = 0;
        for (unsigned run = 0; run < part; run++) {
            start += run_bytes(tile, head.run[run]);
        }
        return code_span(tile, start, head.run[part].len, head.run[part].width);
    }

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        copy_table(table, tables + side.table, side.table_bytes, threads);
    }

    // The outliers of a page, and the first of them at or after a row.
    struct Outliers {
        const uint8_t* first;
        unsigned count;

        // Behind so many bytes of codes.
        KVD_DEVICE Outliers(const Tile& tile, unsigned codes)
            : first(tile.payload + codes),
              count(tile.payload_bytes > codes ? (tile.payload_bytes - codes) / OUTLIER_BYTES : 0) {}
        KVD_DEVICE explicit Outliers(const Tile& tile) : Outliers(tile, code_bytes(tile)) {}

        KVD_DEVICE static unsigned code_bytes(const Tile& tile) {
            const Head& head = BitAlloc::head(tile.table);
            unsigned codes = 0;
            for (unsigned run = 0; run < head.runs; run++) {
                codes += run_bytes(tile, head.run[run]);
            }
            return codes;
        }

        KVD_DEVICE unsigned row(unsigned at) const { return load16_any(first + OUTLIER_BYTES * at); }
        KVD_DEVICE unsigned coefficient(unsigned at) const {
            return load16_any(first + OUTLIER_BYTES * at + 2);
        }
        KVD_DEVICE float value(unsigned at) const {
            return f16_value(load16_any(first + OUTLIER_BYTES * at + 4));
        }
        KVD_DEVICE unsigned from(unsigned wanted) const {
            unsigned low = 0;
            for (unsigned high = count; low < high;) {
                const unsigned middle = (low + high) / 2;
                if (row(middle) < wanted) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            return low;
        }
    };

    // A lane per token; its outliers are the first warp's.
    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const Head& head = BitAlloc::head(tile.table);
        for (unsigned index = 0; index < head.runs; index++) {
            const Run& run = head.run[index];
            const Codes codes = {staged_span<BitAlloc>(side, tile, index), run.width, tile.tokens,
                                 run.len, 0};
            if (run.width == 0) {
                continue;
            }
            each_key_code(codes, warps, [&](unsigned position, unsigned code) {
                const unsigned at = run.first + position;
                const float key = level(tile.table, run.width, code) * scale(tile.table, at);
                add_score(query, side.dim, at, key, scores);
            });
        }
        const unsigned row = tile.first_row + lane_index();
        if (warp_index() != 0 || lane_index() >= tile.tokens) {
            return;
        }
        const Outliers outliers(tile);
        for (unsigned at = outliers.from(row); at < outliers.count && outliers.row(at) == row; at++) {
            const unsigned channel = outliers.coefficient(at);
            if (channel < side.dim) {
                add_score(query, side.dim, channel, outliers.value(at), scores);
            }
        }
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const Head& head = BitAlloc::head(tile.table);
        for (unsigned index = 0; index < head.runs; index++) {
            const Run& run = head.run[index];
            if (run.width == 0 || position < run.first || position >= run.first + run.len) {
                continue;
            }
            const Codes codes = {staged_span<BitAlloc>(side, tile, index), run.width, tile.tokens,
                                 run.len, 0};
            const float scale = BitAlloc::scale(tile.table, position);
            accumulate_codes(codes, position - run.first, slice, slices, weights, out,
                             [&](unsigned, unsigned code) {
                                 return level(tile.table, run.width, code) * scale;
                             });
        }
        if (slice != 0) {
            return;
        }
        const Outliers outliers(tile);
        const unsigned end = tile.first_row + tile.tokens;
        for (unsigned at = outliers.from(tile.first_row); at < outliers.count; at++) {
            const unsigned row = outliers.row(at);
            if (row >= end) {
                break;
            }
            if (outliers.coefficient(at) == position) {
                add_value(weights, row - tile.first_row, outliers.value(at), out);
            }
        }
    }
};

template <>
struct Spreads<Tensor<BitAlloc>> {
    static constexpr bool value = true;
    static constexpr bool of_runs = true;
};

// With products of bytes: levels of all widths side by side, of one byte or two; their units and the
// scales go into the queries, or into the sums when they are added up.
template <>
struct Tensor<BitAlloc> : BitAlloc {
    static constexpr bool SIGNED = true;
    static constexpr bool BIASED = false;
    static constexpr bool LOOKS_UP = false;
    static constexpr unsigned WEIGHT_SETS = 0;
    static constexpr bool WANTS_WEIGHTS = true;
    static constexpr bool MAY_SCALE_CHANNELS = false;

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        copy_table(table, tables + side.entries, side.spread_table, threads);
    }
    KVD_DEVICE static const SpreadTable& all(const SideShape& side, const uint8_t* tables) {
        return spread_table(tables + side.entries);
    }
    KVD_DEVICE static const SpreadPosition& position(const SideShape& side, const uint8_t* tables,
                                                     unsigned at) {
        const uint8_t* table = tables + side.entries;
        const uint8_t* positions = table + spread_table(table).positions;
        return reinterpret_cast<const SpreadPosition*>(positions)[at];
    }

    // Codes are staged before the table is in shared memory.
    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        return spread_span(all(side, tile.tables), tile, part);
    }
    template <bool IS_KEY>
    KVD_DEVICE static void spread(const SideShape& side, const Tile& tile, uint8_t* to) {
        kvd::spread<IS_KEY>(side, tile, to);
    }

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return {tile.decoded, 8, tile.tokens, side.spread_row, side.spread_row};
    }
    KVD_DEVICE static SpreadOrder order(const SideShape& side, const Tile&) {
        return {side.spread_row / CODE_GROUP};
    }

    KVD_DEVICE static void fold(const SideShape& side, const Tile& tile, const float* query,
                                unsigned quad, float (&values)[CODE_GROUP], float&) {
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            const SpreadPosition& of = position(side, tile.tables, quad * CODE_GROUP + at);
            values[at] = query[of.channel] * of.factor;
        }
    }

    KVD_DEVICE static int32_t bias(const Tile&, unsigned) { return 0; }
    KVD_DEVICE static float score(const SideShape&, const Tile&, unsigned, float sum, float) {
        return sum;
    }

    KVD_DEVICE static unsigned code_bytes(const SpreadTable& table, const Tile& tile) {
        unsigned codes = tile.page_tokens / TILE_TOKENS * table.tile_bytes;
        const unsigned left = tile.page_tokens % TILE_TOKENS;
        for (unsigned run = 0; left > 0 && run < table.runs; run++) {
            codes += plane_bytes(left * table.run[run].len, table.run[run].width);
        }
        return codes;
    }
    // The outliers of a page.
    KVD_DEVICE static Outliers outliers(const SpreadTable& table, const Tile& tile) {
        return Outliers(tile, code_bytes(table, tile));
    }

    // Adds the outliers of tokens `mine` and the next to their scores; the warp's eight tokens begin at
    // `first`.
    KVD_DEVICE static void add_rests(const SideShape& side, const Tile& tile, const float* query,
                                     unsigned first, unsigned mine, float (&scores)[2]) {
        const Outliers all = outliers(spread_table(tile.table), tile);
        const unsigned row = tile.first_row;
        for (unsigned at = all.from(row + first); at < all.count; at++) {
            const unsigned token = all.row(at) - row;
            if (token >= first + STEP_COLUMNS) {
                break;
            }
            const unsigned channel = all.coefficient(at);
            const float product = channel < side.dim ? all.value(at) * query[channel] : 0;
            scores[0] += token == mine ? product : 0;
            scores[1] += token == mine + 1 ? product : 0;
        }
    }

    // For values the places are the positions, and behind them a place for every coefficient
    // without codes. By place a SpreadPosition; places by channel, a byte each.
    KVD_DEVICE static unsigned place_bytes(const SideShape& side) {
        return sizeof(SpreadPosition) * side.spread_places + (side.dim + 3) / 4 * 4;
    }
    KVD_DEVICE static const SpreadPosition& place(const uint32_t* places, unsigned at) {
        return reinterpret_cast<const SpreadPosition*>(places)[at];
    }
    KVD_DEVICE static void prepare_places(const SideShape& side, const uint8_t* tables,
                                          uint32_t* places) {
        SpreadPosition* to = reinterpret_cast<SpreadPosition*>(places);
        uint8_t* by_channel = reinterpret_cast<uint8_t*>(to + side.spread_places);
        for (unsigned at = thread_index(); at < side.spread_places; at += ATTEND_THREADS) {
            const SpreadPosition of = position(side, tables, at);
            const bool is_low = at > 0 && position(side, tables, at - 1).is_split != 0;
            to[at] = of;
            if (!is_low) {
                by_channel[of.channel] = uint8_t(at);
            }
        }
    }
    KVD_DEVICE static unsigned places_of(const SideShape& side, const uint32_t*) {
        return side.spread_places;
    }
    // Above the channel whether the next place has its low byte.
    KVD_DEVICE static uint32_t channel(const SideShape& side, const uint32_t* places, unsigned at) {
        if (at >= side.spread_places) {
            return ~0u;
        }
        return place(places, at).channel | uint32_t(place(places, at).is_split) << 16;
    }
    KVD_DEVICE static float step_at(const SideShape& side, const uint32_t* places, unsigned at) {
        return at < side.spread_places ? place(places, at).factor : 0;
    }

    KVD_DEVICE static float step(const SideShape&, const Tile&) { return 1; }
    KVD_DEVICE static float step_of(const SideShape&, const uint8_t*) { return 1; }

    // Calls `add(place, channel, weights of the token, value)` for the outliers.
    template <class Add>
    KVD_DEVICE static void add_rests(const SideShape& side, const Tile& tile,
                                     const uint32_t* places, const float* weights, Add add) {
        const uint8_t* by_channel =
            reinterpret_cast<const uint8_t*>(&place(places, side.spread_places));
        const Outliers all = outliers(spread_table(tile.table), tile);
        for (unsigned at = all.from(tile.first_row); at < all.count; at++) {
            const unsigned token = all.row(at) - tile.first_row;
            if (token >= tile.tokens) {
                break;
            }
            const unsigned channel = all.coefficient(at);
            if (channel < side.dim) {
                add(by_channel[channel], channel, weights + token, all.value(at));
            }
        }
    }
};

}  // namespace kvd
