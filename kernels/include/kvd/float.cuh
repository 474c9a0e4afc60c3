// Rows in f32, f16 or bf16 as they came (raw pages, windows, pages that fell back), and FP8 e4m3
// codes under one power-of-two scale per page (docs/format.md "Sides"; the code is OCP FP8 v1.0:
// bias 7, no infinity). CPU reference: kvd-codec/src/quantizer/float.rs.
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
struct Float : NeverCoded {
    static constexpr unsigned SPANS = 1;
    static constexpr bool ODD_WORDS = false;

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned) {
        const unsigned row = side.dim * Format::BYTES;
        return {uint64_t(tile.index) * TILE_TOKENS * row, tile.tokens * row};
    }

    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint8_t*, unsigned) {}

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
        const uint8_t* row = staged_span<Float>(side, tile, 0) + token * side.dim * Format::BYTES;
        for (unsigned step = 0; step < count; step++) {
            const unsigned at = first + (step + token * (4 / Format::BYTES)) % count;
            add_score(query, side.dim, at, Format::load(row + at * Format::BYTES), scores);
        }
    }

    // Rows outside `from..to` may never have been written: they are not touched.
    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const uint8_t* rows = staged_span<Float>(side, tile, 0) + position * Format::BYTES;
        for (unsigned token = tile.from + slice; token < tile.to; token += slices) {
            const float value = Format::load(rows + token * side.dim * Format::BYTES);
            add_value(weights, token, value, out);
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
    static constexpr unsigned SPANS = 2;
    static constexpr bool ODD_WORDS = false;
    static constexpr unsigned SCALE_BYTES = 4;

    KVD_DEVICE static uint64_t codes_at(const SideShape&, const Tile&) { return SCALE_BYTES; }

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        return part == 0 ? Span{0, SCALE_BYTES} : code_span(tile, SCALE_BYTES, side.dim, 8);
    }

    KVD_DEVICE static void prepare(const SideShape&, const uint8_t*, uint8_t*, unsigned) {}

    KVD_DEVICE static float scale(const SideShape& side, const Tile& tile) {
        return load_float(staged_span<Fp8>(side, tile, 0));
    }

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return tile_codes<Fp8>(side, tile, 1, side.dim, 8);
    }

    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const float scale = Fp8::scale(side, tile);
        score_codes(codes(side, tile), warps, query, scores,
                    [&](unsigned, unsigned code) { return e4m3_value(code) * scale; });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const float scale = Fp8::scale(side, tile);
        accumulate_codes(codes(side, tile), position, slice, slices, weights, out,
                         [&](unsigned, unsigned code) { return e4m3_value(code) * scale; });
    }
};

}  // namespace kvd
