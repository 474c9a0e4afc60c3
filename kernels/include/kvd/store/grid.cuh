// `round(c / step)` for every coefficient, cut to the range of its class. The differences, and those of
// symbols without a code, follow the words of each chunk as outliers. Reference:
// kvd-codec/src/quantizer/grid.rs.
#pragma once

#include "huffman.cuh"
#include "outlier.cuh"

namespace kvd {

struct StoreGrid {
    static constexpr float CODE_MAX = 32767;
    // A number of this size has no room for a fraction: adding it rounds, ties to even.
    static constexpr float MAGIC = 12582912;
    // Lengths of a chunk: words and outliers.
    static constexpr unsigned LENGTH_BYTES = 2 * WORD_BYTES;
    // A quantized coefficient: the coded number in the low byte, above it the missing difference.
    static constexpr unsigned REST_AT = 8;

    // Quantizes all coefficients in place. Gives whether they all have codes.
    KVD_DEVICE static bool quantize(const Work& work, const CodeHead& head) {
        const uint32_t* cuts = reinterpret_cast<const uint32_t*>(work.constants + head.cuts);
        bool fits = true;
        each_value(work.tokens, work.dim, [&](unsigned token, unsigned channel) {
            uint32_t& word = work.words[token * work.stride + channel];
            const float quotient = over(f32_value(word), head.step);
            // NaN becomes the lower bound, which has no code.
            const float bounded = fminf(fmaxf(quotient, -2 * CODE_MAX), 2 * CODE_MAX);
            const float rounded = plus(bounded, MAGIC);
            fits &= rounded >= MAGIC - CODE_MAX && rounded <= MAGIC + CODE_MAX;
            const int code = int(f32_bits(rounded) - f32_bits(MAGIC));
            const int bias = int(cuts[channel] & 0xFFFF);
            const int largest = int(cuts[channel] >> 16);
            const int kept = code < -bias ? -bias : code > largest ? largest : code;
            word = uint32_t(code - kept) << REST_AT | uint32_t(kept + bias);
        });
        return fits;
    }

    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        const bool fits = quantize(work, *work.codes);
        if (block_most(fits ? 0 : 1, work.slots) != 0) {
            return NO_CODES;
        }
        const auto word_of = [&](unsigned token, unsigned channel) -> uint32_t& {
            return work.words[token * work.stride + channel];
        };
        const unsigned chunks = (work.tokens + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
        const unsigned room = work.unit.room;
        unsigned used = LENGTH_BYTES * chunks;
        for (unsigned chunk = 0; chunk < chunks; chunk++) {
            const unsigned first = chunk * CHUNK_TOKENS;
            if (used > room) {
                return NO_CODES;
            }
            const unsigned words = encode_chunk(
                work, first, work.payload + used, (room - used) / WORD_BYTES,
                [&](unsigned token, unsigned channel) -> unsigned {
                    return word_of(token, channel) & ((1u << REST_AT) - 1);
                },
                [&](unsigned token, unsigned channel, int what) {
                    word_of(token, channel) += uint32_t(what) << REST_AT;
                });
            used += WORD_BYTES * words;
            if (used > room) {
                return NO_CODES;
            }
            const unsigned tokens = least(CHUNK_TOKENS, work.tokens - first);
            const unsigned outliers = append_outliers(
                work, tokens * work.dim, work.payload + used, (room - used) / WORD_BYTES,
                [&](unsigned place) {
                    const unsigned token = quotient(place, work.dim);
                    const unsigned channel = place - token * work.dim;
                    return int(word_of(first + token, channel)) >> REST_AT;
                });
            used += WORD_BYTES * outliers;
            if (used > room || outliers > 0xFFFF) {
                return NO_CODES;
            }
            if (thread_index() == 0) {
                store16(work.payload + LENGTH_BYTES * chunk, uint16_t(words));
                store16(work.payload + LENGTH_BYTES * chunk + WORD_BYTES, uint16_t(outliers));
            }
        }
        return used;
    }
};

}  // namespace kvd
