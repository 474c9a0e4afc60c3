// Bit allocation: every coefficient has a width of its own, 0 to 8 bits, and a scale; coefficients of
// equal width stand together in runs (docs/format.md "Sides"). The table holds the runs, the levels
// of all widths, f32, and the scales, f32. After the codes come outliers, `{row, coefficient, f16}`,
// by row: few, so they are read where they are. CPU reference: kvd-codec/src/side/bitalloc.rs.
#pragma once

#include "codes.cuh"

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

        KVD_DEVICE explicit Outliers(const Tile& tile) {
            const Head& head = BitAlloc::head(tile.table);
            unsigned codes = 0;
            for (unsigned run = 0; run < head.runs; run++) {
                codes += run_bytes(tile, head.run[run]);
            }
            first = tile.payload + codes;
            count = tile.payload_bytes > codes ? (tile.payload_bytes - codes) / OUTLIER_BYTES : 0;
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

}  // namespace kvd
