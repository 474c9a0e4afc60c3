// Rows in f32, f16 or bf16 as they came (raw pages, windows, pages that fell back), and FP8 e4m3
// codes under one power-of-two scale per page (docs/format.md "Sides"; the code is OCP FP8 v1.0:
// bias 7, no infinity). CPU reference: kvd-codec/src/side/float.rs.
#pragma once

#include "codes.cuh"

namespace kvd {

struct F32 {
    static constexpr unsigned BYTES = 4;
    KVD_DEVICE static float load(const uint8_t* at) { return f32_value(load32(at)); }
};

struct F16 {
    static constexpr unsigned BYTES = 2;
    KVD_DEVICE static float load(const uint8_t* at) { return f16_value(load16(at)); }
};

struct Bf16 {
    static constexpr unsigned BYTES = 2;
    KVD_DEVICE static float load(const uint8_t* at) { return bf16_value(load16(at)); }
};

// Rows of a format, row-major.
template <class Format>
struct Float {
    KVD_DEVICE static TileSpans spans(const SideShape& side, unsigned tokens, unsigned tile) {
        const unsigned row = side.dim * Format::BYTES;
        const unsigned rows = least(TILE_TOKENS, tokens - tile * TILE_TOKENS);
        return {0, 0, uint64_t(tile) * TILE_TOKENS * row, rows * row};
    }

    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint16_t*, unsigned) {}

    // A lane per token. Lanes start at different channels, or their rows would meet in one bank.
    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const unsigned token = lane_index();
        if (token < tile.from || token >= tile.to) {
            return;
        }
        const unsigned share = (side.dim + warps - 1) / warps;
        const unsigned first = least(side.dim, warp_index() * share);
        const unsigned count = least(side.dim, first + share) - first;
        const uint8_t* row = tile.codes + token * side.dim * Format::BYTES;
        for (unsigned step = 0; step < count; step++) {
            const unsigned at = first + (step + token * (4 / Format::BYTES)) % count;
            const float key = Format::load(row + at * Format::BYTES);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                scores[r] += query[r * side.dim + at] * key;
            }
        }
    }

    // Rows outside `from..to` may never have been written: they are not touched.
    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        for (unsigned token = tile.from + slice; token < tile.to; token += slices) {
            const float value =
                Format::load(tile.codes + (token * side.dim + position) * Format::BYTES);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                out[r] += weights[r * TILE_TOKENS + token] * value;
            }
        }
    }
};

// The value of an e4m3 code. Exponent and mantissa stand where an f32 has them, 120 too low; the
// product brings subnormal codes right as well.
KVD_DEVICE float e4m3_value(unsigned code) {
    const uint32_t magnitude = (code & 0x7F) == 0x7F ? 0x7FC00000u : (code & 0x7F) << 20;
    return f32_value(magnitude | (code & 0x80) << 24) * 1.329227995784916e36f;  // 2^120
}

struct Fp8 {
    static constexpr unsigned SCALE_BYTES = 4;

    KVD_DEVICE static TileSpans spans(const SideShape& side, unsigned tokens, unsigned tile) {
        TileSpans spans = {0, SCALE_BYTES, 0, 0};
        code_span(spans, SCALE_BYTES, tokens, tile, side.dim, 8);
        return spans;
    }

    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint16_t*, unsigned) {}

    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const float scale = f32_value(load32(tile.scales));
        score_codes(Codes{tile.codes, 8, tile.tokens, side.dim}, warps, query, scores,
                    [&](unsigned, unsigned code) { return e4m3_value(code) * scale; });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const float scale = f32_value(load32(tile.scales));
        accumulate_codes(Codes{tile.codes, 8, tile.tokens, side.dim}, position, slice, slices,
                         weights, out,
                         [&](unsigned, unsigned code) { return e4m3_value(code) * scale; });
    }
};

}  // namespace kvd
