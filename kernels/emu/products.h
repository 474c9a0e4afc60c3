// What a warp's product of bytes adds to a lane's sums, of the words that all lanes brought.

#pragma once

#include <cstdint>

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

}  // namespace emu
}  // namespace kvd
