// Equidistant levels, asymmetric or symmetric: extremes of each group, its minimum and step, then its
// codes in place of its coefficients, all by the thread that has the group; where a page has few groups,
// by all threads. Reference: kvd-codec/src/side/uniform.rs, symmetric.rs.
#pragma once

#include "../uniform.cuh"
#include "pack.cuh"

namespace kvd {

// Adding this to `0 <= x < 2^22` rounds to an integer, ties to even, in the low mantissa bits.
constexpr float ROUND = 8388608.0f;

// A page with fewer groups is taken by all threads together.
constexpr unsigned FEW_GROUPS = 32;

// The largest f16 that is not above `x`; minus infinity where there is none.
KVD_DEVICE float f16_at_most(float x) {
    const uint16_t near = f16_bits(x);
    if (f16_value(near) <= x) {
        return f16_value(near);
    }
    // One step down; zero has two encodings.
    if ((near & 0x7FFF) == 0) {
        return f16_value(0x8001);
    }
    return f16_value(uint16_t((near & 0x8000) == 0 ? near - 1 : near + 1));
}

// The smallest f16 that is not below `x`. Adding zero turns -0 into 0.
KVD_DEVICE float f16_at_least(float x) { return plus(-f16_at_most(-x), 0.0f); }

// Whether a stored step serves: below f16's range it is coarser than `wanted`, which is fine where the
// page is not that small as a whole.
KVD_DEVICE bool serves(float step, float wanted, float absmax) {
    const bool coarse = step > times(2.0f, wanted) && step > over(absmax, 1024.0f);
    return is_finite(step) && !coarse;
}

// What shares a pair.
struct Group {
    unsigned row;
    unsigned pair;
    Range tokens;
    Range channels;

    KVD_DEVICE Group(const Work& work, unsigned pairs, unsigned index) {
        row = index / pairs;
        pair = index % pairs;
        const unsigned token = row * work.side.scale_tokens;
        tokens = {token, least(work.tokens - token, work.side.scale_tokens) + token};
        const unsigned channel = pair * work.side.scale_channels;
        channels = {channel, least(work.dim - channel, work.side.scale_channels) + channel};
    }

    KVD_DEVICE unsigned count() const {
        return (tokens.to - tokens.from) * (channels.to - channels.from);
    }

    // Calls `use(token, channel)` for every `of`th value, from number `part` on; with one part in a
    // rotated order of the channels, so that threads read different banks.
    template <class Use>
    KVD_DEVICE void each(unsigned part, unsigned of, Use use) const {
        const unsigned width = channels.to - channels.from;
        if (of > 1) {
            const unsigned tokens_of = of / width;
            const unsigned channels_of = of - tokens_of * width;
            unsigned token = tokens.from + part / width;
            for (unsigned at = part % width; token < tokens.to; token += tokens_of) {
                use(token, channels.from + at);
                at += channels_of;
                token += at >= width ? 1 : 0;
                at -= at >= width ? width : 0;
            }
            return;
        }
        if (width == 1) {
#pragma unroll 4
            for (unsigned token = tokens.from; token < tokens.to; token++) {
                use(token, channels.from);
            }
            return;
        }
        const unsigned first = thread_index() % width;
        for (unsigned token = tokens.from; token < tokens.to; token++) {
            unsigned at = first;
            for (unsigned step = 0; step < width; step++) {
                use(token, channels.from + at);
                at = at + 1 == width ? 0 : at + 1;
            }
        }
    }
};

// The order of floats as that of unsigned integers; -0 and 0 are one.
KVD_DEVICE uint32_t ordered(float x) {
    const uint32_t bits = f32_bits(plus(x, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
KVD_DEVICE float from_ordered(uint32_t bits) {
    return f32_value(bits & 0x80000000u ? bits & 0x7FFFFFFF : ~bits);
}

// Smallest and largest value of a group.
struct Extremes {
    float low;
    float high;

    // By one thread, or by all of them.
    KVD_DEVICE Extremes(const Work& work, const Group& group, bool together) {
        low = f32_value(0x7F800000);
        high = f32_value(0xFF800000);
        const unsigned part = together ? thread_index() : 0;
        group.each(part, together ? STORE_THREADS : 1, [&](unsigned token, unsigned channel) {
            const float x = work.value(token, channel);
            low = x < low ? x : low;
            high = x > high ? x : high;
        });
        if (together) {
            low = from_ordered(~block_most(~ordered(low), work.slots));
            high = from_ordered(block_most(ordered(high), work.slots));
        }
        if (low == 0) {
            // The sign of a zero is stored: it is that of the first.
            low = first_zero(work, group);
        }
    }

    KVD_DEVICE static float first_zero(const Work& work, const Group& group) {
        for (unsigned token = group.tokens.from; token < group.tokens.to; token++) {
            for (unsigned at = group.channels.from; at < group.channels.to; at++) {
                if (work.value(token, at) == 0) {
                    return work.value(token, at);
                }
            }
        }
        return 0;
    }
};

struct StoreAsymmetric {
    static constexpr unsigned PAIR_BYTES = Asymmetric::PAIR_BYTES;
    float minimum;
    float step;
    float inverse;
    float top;

    // Gives whether there are levels for the group.
    KVD_DEVICE bool fit(const Work& work, const Extremes& of, float absmax) {
        const float part = work.unit.limit;
        top = float(work.side.top);
        minimum = f16_at_most(of.low);
        step = f16_at_least(times(minus(of.high, minimum), part));
        inverse = step > 0 ? over(1.0f, step) : 0.0f;
        return is_finite(minimum) && serves(step, times(minus(of.high, of.low), part), absmax);
    }

    KVD_DEVICE void write(uint8_t* row, unsigned pairs, unsigned pair) const {
        store16(row + 2 * pair, f16_bits(minimum));
        store16(row + 2 * (pairs + pair), f16_bits(step));
    }

    KVD_DEVICE unsigned code(float x) const {
        const float level = fminf(times(minus(x, minimum), inverse), top);
        return f32_bits(plus(level, ROUND)) & 0xFFFF;
    }
};

struct StoreSymmetric {
    static constexpr unsigned PAIR_BYTES = Symmetric::PAIR_BYTES;
    float step;
    float inverse;
    float top;

    KVD_DEVICE bool fit(const Work& work, const Extremes& of, float absmax) {
        top = float(work.side.top);
        const float largest = fmaxf(fabsf(of.low), fabsf(of.high));
        const float wanted = times(largest, work.unit.limit);
        step = f16_at_least(wanted);
        inverse = step > 0 ? over(1.0f, step) : 0.0f;
        return serves(step, wanted, absmax);
    }

    KVD_DEVICE void write(uint8_t* row, unsigned, unsigned pair) const {
        store16(row + 2 * pair, f16_bits(step));
    }

    KVD_DEVICE unsigned code(float x) const {
        const float level = fminf(fmaxf(times(x, inverse), -top), top);
        return f32_bits(plus(plus(level, top), ROUND)) & 0xFFFF;
    }
};

template <class Levels>
struct StoreUniform {
    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work, uint32_t absmax) {
        if (!is_finite(f32_value(absmax))) {
            return NO_CODES;
        }
        const unsigned pairs = scale_pairs(work.side);
        const unsigned groups = all_scale_rows(work.side, work.page()) * pairs;
        const bool together = groups < FEW_GROUPS;
        bool fits = true;
        for (unsigned index = together ? 0 : thread_index(); index < groups;
             index += together ? 1 : STORE_THREADS) {
            const Group group(work, pairs, index);
            Levels levels;
            fits &= levels.fit(work, Extremes(work, group, together), f32_value(absmax));
            if (!together || thread_index() == 0) {
                levels.write(work.payload + group.row * pairs * Levels::PAIR_BYTES, pairs, group.pair);
            }
            if (together) {
                // The sign of a zero is looked for before its word is a code.
                KVD_BARRIER();
            }
            group.each(together ? thread_index() : 0, together ? STORE_THREADS : 1,
                       [&](unsigned token, unsigned channel) {
                           uint32_t& word = work.words[token * work.stride + channel];
                           word = levels.code(f32_value(word));
                       });
        }
        if (block_most(fits ? 0 : 1, work.slots) != 0) {
            return NO_CODES;
        }
        const unsigned scales = groups * Levels::PAIR_BYTES;
        const unsigned bits = work.side.bits;
        return behind(scales, write_in_place<Stage>(work, work.payload + scales, bits));
    }
};

}  // namespace kvd
