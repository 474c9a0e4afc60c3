// The level nearest to each coefficient over its scale, among as many as the coefficient's width has, the
// lower of two. Errors beyond the head's bound follow the codes as outliers. A warp takes consecutive rows,
// so its outliers stand in the order of their places behind those of the warps before it. Reference:
// kvd-codec/src/quantizer/bitalloc.rs, bit_levels.rs.
#pragma once

#include "../bitalloc.cuh"
#include "pack.cuh"

namespace kvd {

struct StoreBitAlloc {
    // A quantized coefficient: its code, whether it is an outlier, and then what its level lacks.
    static constexpr uint32_t FAR = 1u << 15;
    static constexpr unsigned RESIDUAL_AT = 16;

    // How many of the bounds, halfway between the levels of a width, lie below `x`.
    KVD_DEVICE static unsigned code(const float* bounds, unsigned width, float x) {
        unsigned below = 0;
        for (unsigned half = 1u << (width - 1); half > 0; half /= 2) {
            below += bounds[below + half - 1] < x ? half : 0;
        }
        return below;
    }

    // Quantizes one coefficient in place. Gives the number of its outliers, none or one, and notes an error
    // that f16 cannot hold.
    KVD_DEVICE static unsigned quantize(const Work& work, const uint8_t* table, unsigned width,
                                        unsigned at, uint32_t& word, bool& fits) {
        const float x = f32_value(word);
        const float scale = BitAlloc::scale(table, at);
        unsigned code = 0;
        float level = 0;
        if (width > 0) {
            code = StoreBitAlloc::code(work.norms + ((1u << width) - 2), width, over(x, scale));
            level = BitAlloc::level(table, width, code);
        }
        const float residual = minus(x, times(level, scale));
        // NaN is an outlier as well, and then without a value.
        if (fabsf(residual) <= work.unit.limit) {
            word = code;
            return 0;
        }
        const uint16_t lacks = f16_bits(residual);
        word = code | FAR | uint32_t(lacks) << RESIDUAL_AT;
        fits &= (lacks & 0x7C00) != 0x7C00;
        return 1;
    }

    // Appends the outliers of a warp's rows, from number `next` on.
    KVD_DEVICE static void append(const Work& work, Range rows, uint8_t* outliers, unsigned next) {
        const uint32_t below = (1u << lane_index()) - 1;
        for (unsigned token = rows.from; token < rows.to; token++) {
            for (unsigned first = 0; first < work.dim; first += WARP_LANES) {
                const unsigned at = first + lane_index();
                const uint32_t word = at < work.dim ? work.words[token * work.stride + at] : 0;
                const uint32_t far = KVD_BALLOT((word & FAR) != 0);
                if ((word & FAR) != 0) {
                    uint8_t* to = outliers + BitAlloc::OUTLIER_BYTES * (next + ones(far & below));
                    store16_any(to, uint16_t(token));
                    store16_any(to + 2, uint16_t(at));
                    store16_any(to + 4, uint16_t(word >> RESIDUAL_AT));
                }
                next += ones(far);
            }
        }
    }

    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        const uint8_t* table = work.tables + work.side.table;
        const BitAlloc::Head& head = BitAlloc::head(table);
        const Range rows = part_of_warp(work.tokens);
        uint32_t found = 0;
        bool fits = true;
        unsigned bytes = 0;
        for (unsigned index = 0; index < head.runs; index++) {
            const BitAlloc::Run& run = head.run[index];
            bytes += BitAlloc::run_bytes(work.page(), run);
            for (unsigned token = rows.from; token < rows.to; token++) {
                uint32_t* row = work.words + token * work.stride;
                for (unsigned at = run.first + lane_index(); at < run.first + run.len;
                     at += WARP_LANES) {
                    found += quantize(work, table, run.width, at, row[at], fits);
                }
            }
        }
        if (block_most(fits ? 0 : 1, work.slots) != 0) {
            return NO_CODES;
        }
        // Outliers take no more than rows as they came would.
        const unsigned limit = work.tokens * work.dim * row_value_bytes(work.unit);
        const unsigned room = limit > bytes ? (limit - bytes) / BitAlloc::OUTLIER_BYTES : 0;
        const WarpSums sums(found, work.slots);
        if (sums.all > room) {
            return NO_CODES;
        }
        uint8_t* codes = work.payload;
        for (unsigned index = 0; index < head.runs; index++) {
            const BitAlloc::Run& run = head.run[index];
            codes += pack_codes(work, codes, run.len, run.width,
                                [&](unsigned token, unsigned position) {
                                    const unsigned at = run.first + position;
                                    return unsigned(work.words[token * work.stride + at]);
                                });
        }
        append(work, rows, codes, sums.before);
        return bytes + BitAlloc::OUTLIER_BYTES * sums.all;
    }
};

}  // namespace kvd
