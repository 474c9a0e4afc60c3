// Coefficients in a format, and FP8 e4m3 codes under one power-of-two scale per page. Reference:
// kvd-codec/src/quantizer/float.rs.
#pragma once

#include "../float.cuh"
#include "pack.cuh"

namespace kvd {

// A value in a format.
KVD_DEVICE void store_as(F32, uint8_t* at, float value) { store32(at, f32_bits(value)); }
KVD_DEVICE void store_as(F16, uint8_t* at, float value) { store16(at, f16_bits(value)); }
KVD_DEVICE void store_as(Bf16, uint8_t* at, float value) { store16(at, bf16_bits(value)); }

template <class Format>
struct StoreFloat {
    // The bits of the format's largest magnitude stand in `limit`. Gives the payload's bytes.
    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        if (largest_magnitude(work) > f32_bits(work.unit.limit)) {
            return NO_CODES;
        }
        each_value(work.tokens, work.dim, [&](unsigned token, unsigned channel) {
            const unsigned at = token * work.dim + channel;
            store_as(Format{}, work.payload + at * Format::BYTES, work.value(token, channel));
        });
        return work.tokens * work.dim * Format::BYTES;
    }
};

// The nearest e4m3 code, ties to even; saturates at 448.
KVD_DEVICE unsigned e4m3_code(float x) {
    const unsigned sign = f32_bits(x) >> 24 & 0x80;
    const float magnitude = fminf(f32_value(magnitude_bits(x)), 448.0f);
    const uint32_t bits = f32_bits(magnitude);
    if (bits < (127u - 6) << 23) {
        // Subnormal: multiples of 2^-9. Adding 2^14 leaves exactly those in the mantissa.
        return sign | (f32_bits(plus(magnitude, 16384.0f)) - f32_bits(16384.0f));
    }
    const uint32_t rounded = bits + 0x7FFFF + (bits >> 20 & 1);
    return sign | ((rounded >> 20) - ((127u - 7) << 3));
}

struct StoreFp8 {
    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        const float largest = f32_value(largest_magnitude(work));
        // Rounding to 3 mantissa bits adds up to 1/16, which must stay finite.
        if (!is_finite(largest) || !is_finite(times(largest, 1.0625f))) {
            return NO_CODES;
        }
        // The smallest power of two that serves; it and its reciprocal are normal.
        float scale = largest == 0 ? 1.0f : f32_value((127 - 120) << 23);  // 2^-120
        while (largest > times(scale, 448.0f)) {
            scale = times(scale, 2.0f);
        }
        const float inverse = over(1.0f, scale);
        each_value(work.tokens, work.dim, [&](unsigned token, unsigned channel) {
            const float x = times(work.value(token, channel), inverse);
            work.words[token * work.stride + channel] = e4m3_code(x);
        });
        if (thread_index() == 0) {
            store32(work.payload, f32_bits(scale));
        }
        KVD_BARRIER();
        const unsigned scales = Fp8::SCALE_BYTES;
        return behind(scales, write_in_place<Stage>(work, work.payload + scales, 8));
    }
};

}  // namespace kvd
