// Equidistant levels, asymmetric or symmetric: extremes of each group, its minimum and step, then its
// codes in place of its coefficients, all by the thread that has the group; where a page has few groups,
// by all threads. The page's largest magnitude is known last, from all extremes. `norms` has the part of a
// group's values that are not clipped, 0 where none is. Reference:
// kvd-codec/src/quantizer/uniform.rs, symmetric.rs.
#pragma once

#include "../uniform.cuh"
#include "scale_group.cuh"
#include "pack.cuh"

namespace kvd {

// Adding this to `0 <= x < 2^22` rounds to an integer, ties to even, in the low mantissa bits.
constexpr float ROUND = 8388608.0f;

// A page with fewer groups is taken by all threads together.
constexpr unsigned FEW_GROUPS = 32;

// The largest f16 that is not above `x`; minus infinity where there is none.
KVD_DEVICE float f16_at_most(float x) { return f16_value(f16_bits_below(x)); }

// The smallest f16 that is not below `x`. Adding zero turns -0 into 0.
KVD_DEVICE float f16_at_least(float x) { return plus(-f16_at_most(-x), 0.0f); }

// A stored step where it is coarser than `wanted`, as below f16's range, else 0; infinity where it is no
// number. Coarse ones are fine where the page is not that small as a whole.
KVD_DEVICE float coarse(float step, float wanted) {
    if (!is_finite(step)) {
        return f32_value(0x7F800000);
    }
    return step > times(2.0f, wanted) ? step : 0.0f;
}
KVD_DEVICE float coarsest(float absmax) { return over(absmax, 1024.0f); }
KVD_DEVICE bool serves(float step, float wanted, float absmax) {
    return coarse(step, wanted) <= coarsest(absmax);
}

// Facts about the page from its groups, each thread's from its own.
struct Fit {
    uint32_t largest = 0;
    float coarse = 0;

    // Whether there are levels for all groups. Every thread of the block calls it.
    KVD_DEVICE bool all(const Work& work) const {
        const float absmax = f32_value(block_most(largest, work.slots));
        const float step = f32_value(block_most(f32_bits(coarse), work.slots));
        return is_finite(absmax) && step <= coarsest(absmax);
    }
};

struct StoreAsymmetric {
    static constexpr unsigned PAIR_BYTES = Asymmetric::PAIR_BYTES;
    float minimum;
    float step;
    float inverse;
    float top;

    // Gives the step where it is coarse; infinity where there are no levels.
    KVD_DEVICE float fit(const Work& work, const Extremes& of) {
        const float part = work.unit.limit;
        top = float(work.side.top);
        minimum = f16_at_most(of.low);
        step = f16_at_least(times(minus(of.high, minimum), part));
        inverse = step > 0 ? reciprocal(step) : 0.0f;
        // Below all f16 the step is infinite as well.
        return coarse(step, times(minus(of.high, of.low), part));
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

    KVD_DEVICE float fit(const Work& work, const Extremes& of) {
        top = float(work.side.top);
        const float largest = fmaxf(fabsf(of.low), fabsf(of.high));
        const float wanted = times(largest, work.unit.limit);
        step = f16_at_least(wanted);
        inverse = step > 0 ? reciprocal(step) : 0.0f;
        return coarse(step, wanted);
    }

    KVD_DEVICE void write(uint8_t* row, unsigned, unsigned pair) const {
        store16(row + 2 * pair, f16_bits(step));
    }

    KVD_DEVICE unsigned code(float x) const {
        const float level = fminf(fmaxf(times(x, inverse), -top), top);
        return f32_bits(plus(plus(level, top), ROUND)) & 0xFFFF;
    }
};

// The part of a group's values that keep their magnitude; 0 where all do.
KVD_DEVICE float clip_part(const Work& work) { return work.norms[0]; }

// Cuts a group to its value of rank `part` by magnitude: largest ones are left out one after another,
// equal ones together. A group with what is no number stays as it is, and has no levels.
KVD_DEVICE void clip_group(const Work& work, const Group& group, float part) {
    const unsigned count = group.width() * group.height();
    const unsigned rank = least(unsigned(times(part, float(count))), count - 1);
    uint32_t most_bits = 0xFFFFFFFF;
    for (unsigned left = count - rank; left > 0;) {
        uint32_t next = 0;
        unsigned equal = 0;
        group.each([&](unsigned token, unsigned channel) {
            const uint32_t bits = f32_bits(fabsf(work.value(token, channel)));
            if (bits < most_bits) {
                equal = bits > next ? 1 : equal + (bits == next);
                next = most(next, bits);
            }
        });
        if (most_bits == 0xFFFFFFFF && next >= 0x7F800000) {
            return;
        }
        most_bits = next;
        left -= least(left, equal);
    }
    const float limit = f32_value(most_bits);
    group.each([&](unsigned token, unsigned channel) {
        uint32_t& word = work.words[token * work.stride + channel];
        const float x = f32_value(word);
        word = f32_bits(x < -limit ? -limit : x > limit ? limit : x);
    });
}

template <class Levels>
struct StoreUniform {
    // Levels for a group that spans `of`; of all threads that have them only one `writes`.
    KVD_DEVICE static Levels levels_of(const Work& work, const Group& group, unsigned pairs,
                                       const Extremes& of, bool writes, Fit& fit) {
        Levels levels;
        fit.coarse = fmaxf(fit.coarse, levels.fit(work, of));
        if (writes) {
            levels.write(work.payload + group.row * pairs * Levels::PAIR_BYTES, pairs, group.pair);
        }
        return levels;
    }

    // A group by this thread.
    KVD_DEVICE static void store_group(const Work& work, const Group& group, unsigned pairs,
                                       Fit& fit) {
        const bool holds = Held::serves(group);
        const Held held(work, group);
        float values[HELD];
        Extremes of;
        if (holds) {
            held.load(values);
            of.add(values);
        } else {
            of.add(work, group);
        }
        fit.largest = most(fit.largest, of.magnitude());
        of.sign(work, group);
        const Levels levels = levels_of(work, group, pairs, of, true, fit);
        if (holds) {
            held.quantize(values, levels);
        } else {
            group.each([&](unsigned token, unsigned channel) {
                uint32_t& word = work.words[token * work.stride + channel];
                word = levels.code(f32_value(word));
            });
        }
    }

    // One by all threads together.
    KVD_DEVICE static void share_group(const Work& work, const Group& group, unsigned pairs,
                                       Fit& fit) {
        Extremes of;
        group.each_of_thread([&](unsigned token, unsigned channel) {
            of.add(work.value(token, channel));
        });
        fit.largest = most(fit.largest, of.magnitude());
        of.meet(work);
        of.sign(work, group);
        const Levels levels = levels_of(work, group, pairs, of, thread_index() == 0, fit);
        // The sign of a zero is looked for before its word is a code.
        KVD_BARRIER();
        group.each_of_thread([&](unsigned token, unsigned channel) {
            uint32_t& word = work.words[token * work.stride + channel];
            word = levels.code(f32_value(word));
        });
    }

    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        const unsigned pairs = scale_pairs(work.side);
        const unsigned groups = all_scale_rows(work.side, work.page()) * pairs;
        if (clip_part(work) > 0) {
            for (unsigned index = thread_index(); index < groups; index += STORE_THREADS) {
                clip_group(work, Group(work, pairs, index), clip_part(work));
            }
            KVD_BARRIER();
        }
        Fit fit;
        if (groups < FEW_GROUPS) {
            for (unsigned index = 0; index < groups; index++) {
                share_group(work, Group(work, pairs, index), pairs, fit);
            }
        } else {
            for (unsigned index = thread_index(); index < groups; index += STORE_THREADS) {
                store_group(work, Group(work, pairs, index), pairs, fit);
            }
        }
        if (!fit.all(work)) {
            return NO_CODES;
        }
        const unsigned scales = groups * Levels::PAIR_BYTES;
        const unsigned bits = work.side.bits;
        return behind(scales, write_in_place<Stage>(work, work.payload + scales, bits));
    }
};

}  // namespace kvd
