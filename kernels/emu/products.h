// The sums that a warp's product of bytes, or of halves, adds for a lane, from the words that all
// lanes brought.

#pragma once

#include <cmath>
#include <cstdint>

#include "emu.h"

namespace kvd {
namespace emu {

constexpr unsigned LANES = 32;
// Words that a lane brings to a meeting, at most: its parts of A and B.
constexpr unsigned WORDS_MAX = 6;
// Those of all lanes.
using LaneWords = const uint32_t (*)[WORDS_MAX];

// A byte of a word as a number.
inline int32_t byte(uint32_t word, unsigned at, bool is_signed) {
    const uint8_t bits = uint8_t(word >> 8 * at);
    return is_signed ? int8_t(bits) : bits;
}

// The fragments are the PTX ISA's ("Matrix Fragments for mma.m16n8k32"), by its own numbers: lane
// `4 group + within` holds of A rows `group` (registers 0 and 2) and `group + 8` (1 and 3), columns
// `4 within..` (0 and 1) and `16 + 4 within..` (2 and 3); of B column `group`, rows as A's columns;
// of the sums rows `group` and `group + 8`, columns `2 within` and the next.
inline void add_products(LaneWords lanes, unsigned lane, bool signed_a, bool signed_b,
                         int32_t* sums) {
    const unsigned group = lane / 4;
    const unsigned within = lane % 4;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned column = 2 * within + i % 2;
        // As the hardware, without saturation.
        uint32_t sum = uint32_t(sums[i]);
        for (unsigned k = 0; k < 8; k++) {
            const uint32_t of_a = lanes[4 * group + k % 4][i / 2 + k / 4 * 2];
            const uint32_t of_b = lanes[4 * column + k % 4][4 + k / 4];
            for (unsigned at = 0; at < 4; at++) {
                sum += uint32_t(byte(of_a, at, signed_a) * byte(of_b, at, signed_b));
            }
        }
        sums[i] = int32_t(sum);
    }
}

// The low or the high half of a word as a number.
inline double half(uint32_t word, unsigned at, bool is_bf16) {
    const uint16_t bits = uint16_t(word >> 16 * at);
    return double(is_bf16 ? bf16_value(bits) : f16_value(bits));
}

// Terms of a sum of halves: 16 products, and what was summed before.
constexpr unsigned TERMS = 17;

// Their sum as tensor cores make it, or a little worse (Fasi et al., PeerJ CS 7:e330): products are
// exact, all terms are cut off 24 bits below the largest one's first, and so is the sum.
inline float cut_sum(const double (&terms)[TERMS]) {
    double largest = 0;
    double plain = 0;
    for (const double term : terms) {
        largest = std::fmax(largest, std::fabs(term));
        plain += term;
    }
    if (!std::isfinite(plain) || largest == 0) {
        return float(plain);
    }
    const double step = std::ldexp(1.0, std::ilogb(largest) - 24);
    const double inverse = 1 / step;
    int64_t steps = 0;
    for (const double term : terms) {
        steps += int64_t(term * inverse);
    }
    const double sum = double(steps) * step;
    const float near = float(sum);
    return std::fabs(double(near)) > std::fabs(sum) ? std::nextafterf(near, 0) : near;
}

// Fragments of "mma.m16n8k16": as above, of A columns `2 within` and the next (registers 0 and 1), and
// those eight further on (2 and 3).
inline void add_half_products(LaneWords lanes, unsigned lane, bool is_bf16, float* sums) {
    const unsigned group = lane / 4;
    const unsigned within = lane % 4;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned column = 2 * within + i % 2;
        double terms[TERMS] = {};
        for (unsigned k = 0; k < 8; k++) {
            const uint32_t of_a = lanes[4 * group + k % 4][i / 2 + k / 4 * 2];
            const uint32_t of_b = lanes[4 * column + k % 4][4 + k / 4];
            for (unsigned at = 0; at < 2; at++) {
                terms[2 * k + at] = half(of_a, at, is_bf16) * half(of_b, at, is_bf16);
            }
        }
        terms[TERMS - 1] = double(sums[i]);
        sums[i] = cut_sum(terms);
    }
}

// A lane's words from `ldmatrix.x4.trans` ("ldmatrix" of the PTX ISA): the rows of four matrices, a
// row of each lane; of each matrix column `group`, rows `2 within` and the next.
inline void transposed(LaneWords lanes, unsigned lane, uint32_t* words) {
    const unsigned group = lane / 4;
    const unsigned row = 2 * (lane % 4);
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        const auto half = [&](unsigned of_row) {
            return lanes[8 * matrix + of_row][group / 2] >> 16 * (group % 2) & 0xFFFF;
        };
        words[matrix] = half(row) | half(row + 1) << 16;
    }
}

// A lane's word from `movmatrix.trans`: of the matrix whose rows are the lanes' words column `group`, rows
// `2 within` and the next.
inline uint32_t turned(LaneWords lanes, unsigned lane) {
    const unsigned column = lane / 4;
    const auto half = [&](unsigned row) {
        return lanes[4 * row + column / 2][0] >> 16 * (column % 2) & 0xFFFF;
    };
    return half(lane % 4 * 2) | half(lane % 4 * 2 + 1) << 16;
}

}  // namespace emu
}  // namespace kvd
