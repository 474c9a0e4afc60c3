// The two channels that RoPE turns together, as the nearest of fixed directions and a radius in steps of
// the page or of the calibration. Directions are found without an arctangent, which the host would not
// round alike: those halfway between two codes of the first octant are counted, then octants unfolded.
// Reference: kvd-codec/src/quantizer/polar.rs.
#pragma once

#include "../polar.cuh"
#include "uniform.cuh"

namespace kvd {

struct StorePolar {
    // Directions halfway between two codes, up to 45 degrees: they precede the reach of each pair.
    KVD_DEVICE static unsigned halfway(const SideShape& side) {
        const unsigned octant = (2u << side.angle_bits) / 8;
        return (octant + 1) / 2;
    }

    KVD_DEVICE static unsigned first_channel(const SideShape& side, unsigned pair) {
        return side.interleaved ? 2 * pair : pair;
    }

    struct Pair {
        uint32_t& word;
        float x;
        float y;

        KVD_DEVICE Pair(const Work& work, unsigned token, unsigned pair)
            : word(work.words[token * work.stride + first_channel(work.side, pair)]) {
            const uint32_t* first = &word;
            x = f32_value(first[0]);
            y = f32_value(first[work.side.interleaved ? 1 : Polar::pairs(work.side)]);
        }

        KVD_DEVICE float radius() const { return root(plus(times(x, x), times(y, y))); }

        // The nearest direction: half a turn on, as in the paper.
        KVD_DEVICE unsigned angle(const Work& work) const {
            const float across = fminf(fabsf(x), fabsf(y));
            const float along = fmaxf(fabsf(x), fabsf(y));
            unsigned code = 0;
            for (unsigned at = 0; at < halfway(work.side); at++) {
                const float cos = work.norms[2 * at];
                const float sin = work.norms[2 * at + 1];
                code += times(across, cos) > times(along, sin) ? 1 : 0;
            }
            const unsigned turn = 1u << work.side.angle_bits;
            code = turn >= 4 && fabsf(y) > fabsf(x) ? turn / 4 - code : code;
            code = x < 0 ? turn / 2 - code : code;
            code = y < 0 ? turn - code : code;
            return (code + turn / 2) & (turn - 1);
        }

        // In place of the first channel.
        KVD_DEVICE void quantize(const Work& work, float inverse) const {
            const unsigned radius_bits = work.side.bits - work.side.angle_bits;
            const float top = float((1u << radius_bits) - 1);
            const float level = fminf(times(radius(), inverse), top);
            const unsigned code = f32_bits(plus(level, ROUND)) & 0xFFFF;
            word = code << work.side.angle_bits | angle(work);
        }
    };

    // Steps of the page: a thread has a pair for the tokens that share one. Gives whether they serve.
    KVD_DEVICE static bool by_groups(const Work& work, float absmax) {
        const unsigned pairs = Polar::pairs(work.side);
        const unsigned share = work.side.scale_tokens;
        const unsigned groups = (work.tokens + share - 1) / share;
        const float top = float((1u << (work.side.bits - work.side.angle_bits)) - 1);
        bool fits = true;
        for (unsigned index = thread_index(); index < groups * pairs; index += STORE_THREADS) {
            const unsigned row = index / pairs;
            const unsigned pair = index % pairs;
            const unsigned end = least(work.tokens, (row + 1) * share);
            float largest = 0;
            for (unsigned token = row * share; token < end; token++) {
                largest = fmaxf(largest, Pair(work, token, pair).radius());
            }
            const float wanted = over(largest, top);
            const float step = f16_at_least(wanted);
            fits &= serves(step, wanted, absmax);
            store16(work.payload + row * Polar::row_bytes(work.side) + 2 * pair, f16_bits(step));
            const float inverse = step > 0 ? over(1.0f, step) : 0.0f;
            for (unsigned token = row * share; token < end; token++) {
                Pair(work, token, pair).quantize(work, inverse);
            }
        }
        return fits;
    }

    // Steps of the calibration. Gives whether all radii are within their pair's reach.
    KVD_DEVICE static bool by_model(const Work& work) {
        const uint8_t* steps =
            work.tables + work.side.table + Polar::direction_bytes(work.side);
        const float* reach = work.norms + 2 * halfway(work.side);
        bool fits = true;
        each_value(work.tokens, Polar::pairs(work.side), [&](unsigned token, unsigned pair) {
            const float step = load_float(steps + 4 * pair);
            const Pair of(work, token, pair);
            fits &= of.radius() <= reach[pair];
            of.quantize(work, step > 0 ? over(1.0f, step) : 0.0f);
        });
        return fits;
    }

    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        const float absmax = f32_value(largest_magnitude(work));
        if (!is_finite(absmax)) {
            return NO_CODES;
        }
        const bool fits = Polar::steps_in_page(work.side) ? by_groups(work, absmax)
                                                          : by_model(work);
        if (block_most(fits ? 0 : 1, work.slots) != 0) {
            return NO_CODES;
        }
        const unsigned scales = unsigned(Polar::codes_at(work.side, work.page()));
        const auto code = [&](unsigned token, unsigned pair) {
            return unsigned(work.words[token * work.stride + first_channel(work.side, pair)]);
        };
        return behind(scales, Stage::write(work, work.payload + scales, Polar::pairs(work.side),
                                           work.side.bits, code));
    }
};

}  // namespace kvd
