// Asymmetric or symmetric levels, group by group, whichever err less. A thread has a group; neighbours'
// choices are a ballot, which is the mask. Reference: kvd-codec/src/quantizer/hybrid.rs.
#pragma once

#include "../hybrid.cuh"
#include "uniform.cuh"

namespace kvd {

// Levels of one mode; a step that does not serve is infinite.
struct HybridLevels {
    float zero;
    float step;
    float inverse;

    KVD_DEVICE HybridLevels(float zero, float range, const Work& work, float absmax) : zero(zero) {
        const float wanted = times(range, work.unit.limit);
        step = f16_at_least(wanted);
        step = serves(step, wanted, absmax) ? step : f32_value(0x7F800000);
        inverse = step > 0 ? over(1.0f, step) : 0.0f;
    }

    // The level of a value, as the bits of a number that ends in it.
    KVD_DEVICE float rounded(float x, float top) const {
        return plus(fminf(times(fabsf(minus(x, zero)), inverse), top), ROUND);
    }

    // Squared error over a group: of each channel, then of all.
    KVD_DEVICE float error(const Work& work, const Group& group) const {
        if (!is_finite(step)) {
            return step;
        }
        const float top = float(work.side.top);
        float sum = 0;
        for (unsigned channel = group.channels.from; channel < group.channels.to; channel++) {
            float of_channel = 0;
            for (unsigned token = group.tokens.from; token < group.tokens.to; token++) {
                const float x = work.value(token, channel);
                const float level = minus(rounded(x, top), ROUND);
                const float off = minus(fabsf(minus(x, zero)), times(level, step));
                of_channel = plus(of_channel, times(off, off));
            }
            sum = plus(sum, of_channel);
        }
        return sum;
    }
};

struct StoreHybrid {
    // Writes a group's word, and its codes in place.
    KVD_DEVICE static void write(const Work& work, const Group& group, const HybridLevels& levels,
                                 bool symmetric, uint8_t* word, unsigned word_bytes) {
        for (unsigned at = 0; at < word_bytes; at++) {
            word[at] = 0;
        }
        if (!symmetric) {
            store32_any(word, f32_bits(levels.zero));
        }
        const float top = float(work.side.top);
        for (unsigned token = group.tokens.from; token < group.tokens.to; token++) {
            const unsigned first = (token - group.tokens.from) * work.side.scale_channels;
            for (unsigned channel = group.channels.from; channel < group.channels.to; channel++) {
                uint32_t& value = work.words[token * work.stride + channel];
                const float x = f32_value(value);
                const unsigned bit = first + channel - group.channels.from;
                if (symmetric && x < 0) {
                    word[bit / 8] = uint8_t(word[bit / 8] | 1u << bit % 8);
                }
                value = f32_bits(levels.rounded(x, top)) & 0xFFFF;
            }
        }
    }

    // One group. Gives whether it is symmetric; `fits` is cleared where neither mode serves.
    KVD_DEVICE static bool store_group(const Work& work, const Group& group, float absmax,
                                       bool& fits) {
        const Tile page = work.page();
        Extremes of;
        of.add(work, group);
        of.sign(work, group);
        const float largest = fmaxf(fabsf(of.low), fabsf(of.high));
        const HybridLevels wide(of.low, minus(of.high, of.low), work, absmax);
        const HybridLevels even(0.0f, largest, work, absmax);
        const bool symmetric = even.error(work, group) < wide.error(work, group);
        const HybridLevels levels = symmetric ? even : wide;
        fits &= is_finite(levels.step);
        const unsigned pairs = scale_pairs(work.side);
        const unsigned word_bytes = Hybrid::word_bytes(work.side, page);
        uint8_t* row = work.payload + Hybrid::mask_bytes(work.side, page) +
                       group.row * Hybrid::row_bytes(work.side, page);
        write(work, group, levels, symmetric, row + group.pair * word_bytes, word_bytes);
        store16_any(row + pairs * word_bytes + 2 * group.pair, f16_bits(levels.step));
        return symmetric;
    }

    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        const float absmax = f32_value(largest_magnitude(work));
        if (!is_finite(absmax)) {
            return NO_CODES;
        }
        const unsigned pairs = scale_pairs(work.side);
        const unsigned groups = all_scale_rows(work.side, work.page()) * pairs;
        const unsigned mask_bytes = Hybrid::mask_bytes(work.side, work.page());
        bool fits = true;
        for (unsigned base = 0; base < groups; base += STORE_THREADS) {
            const unsigned index = base + thread_index();
            bool symmetric = false;
            if (index < groups) {
                const Group group(work, pairs, index);
                symmetric = store_group(work, group, absmax, fits);
            }
            const uint32_t mask = KVD_BALLOT(symmetric);
            const unsigned byte = (base + warp_index() * WARP_LANES) / 8 + lane_index();
            if (lane_index() < 4 && byte < mask_bytes) {
                work.payload[byte] = uint8_t(mask >> 8 * lane_index());
            }
        }
        if (block_most(fits ? 0 : 1, work.slots) != 0) {
            return NO_CODES;
        }
        const unsigned scales = unsigned(Hybrid::codes_at(work.side, work.page()));
        const unsigned bits = work.side.bits;
        return behind(scales, write_in_place<Stage>(work, work.payload + scales, bits));
    }
};

}  // namespace kvd
