// The nearest of fixed levels to each coordinate of a row of root mean square 1, and the f16 that gives
// the decoded row its length back. A thread per row, sums in f64 in the host's order. Reference:
// kvd-codec/src/quantizer/lloyd.rs.
#pragma once

#include "../lloyd.cuh"
#include "pack.cuh"

namespace kvd {

struct StoreLloyd {
    // The sum of squares: eight sums side by side, then the rest.
    KVD_DEVICE static double squares(const Work& work, unsigned token) {
        const unsigned whole = work.dim / 8 * 8;
        double sums[8] = {};
        for (unsigned first = 0; first < whole; first += 8) {
#pragma unroll
            for (unsigned at = 0; at < 8; at++) {
                const double x = work.value(token, first + at);
                sums[at] = plus(sums[at], times(x, x));
            }
        }
        double sum = 0;
#pragma unroll
        for (unsigned at = 0; at < 8; at++) {
            sum = plus(sum, sums[at]);
        }
        double rest = 0;
        for (unsigned at = whole; at < work.dim; at++) {
            const double x = work.value(token, at);
            rest = plus(rest, times(x, x));
        }
        return plus(sum, rest);
    }

    // How many of the bounds, halfway between neighbouring levels, lie below `x`.
    KVD_DEVICE static unsigned code(const float* levels, unsigned bits, float x) {
        unsigned below = 0;
        for (unsigned half = 1u << (bits - 1); half > 0; half /= 2) {
            const unsigned at = below + half - 1;
            const float bound = over(plus(levels[at], levels[at + 1]), 2.0f);
            below += x > bound ? half : 0;
        }
        return below;
    }

    // Gives whether the row has a scale.
    KVD_DEVICE static bool store_row(const Work& work, unsigned token, float absmax) {
        const float* levels = reinterpret_cast<const float*>(work.tables + work.side.table);
        const double energy = squares(work, token);
        const float inverse = energy > 0 ? float(root(over(double(work.dim), energy))) : 0.0f;
        double decoded = 0;
        for (unsigned channel = 0; channel < work.dim; channel++) {
            uint32_t& word = work.words[token * work.stride + channel];
            word = code(levels, work.side.bits, times(f32_value(word), inverse));
            const double level = levels[word];
            decoded = plus(decoded, times(level, level));
        }
        const float scale = float(root(over(energy, decoded)));
        const uint16_t stored = f16_bits(scale);
        store16(work.payload + Lloyd::SCALE_BYTES * token, stored);
        // Below this an f16 loses digits.
        const bool coarse = scale < 6.1035156e-5f && scale > over(absmax, 1024.0f);
        return (stored & 0x7C00) != 0x7C00 && !coarse;
    }

    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        const float absmax = f32_value(largest_magnitude(work));
        if (!is_finite(absmax)) {
            return NO_CODES;
        }
        bool fits = true;
        for (unsigned token = thread_index(); token < work.tokens; token += STORE_THREADS) {
            fits &= store_row(work, token, absmax);
        }
        if (block_most(fits ? 0 : 1, work.slots) != 0) {
            return NO_CODES;
        }
        const unsigned scales = Lloyd::SCALE_BYTES * work.tokens;
        const unsigned bits = work.side.bits;
        return behind(scales, write_in_place<Stage>(work, work.payload + scales, bits));
    }
};

}  // namespace kvd
