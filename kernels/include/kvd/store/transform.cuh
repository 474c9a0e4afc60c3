// From raw rows to the coefficients that are quantized (docs/format.md "Transforms"): a warp takes rows,
// four at a time, through all steps of its side. A step is four words (kind, a number, an offset from the
// side's first step in bytes, a float), then its data. Host side: crates/kvd-cuda/src/store/steps.rs;
// reference: kvd-codec/src/transform.rs, rotation.rs, gain.rs.
#pragma once

#include "work.cuh"

namespace kvd {

enum class Step : uint32_t {
    End = 0,
    // Times a factor, minus a mean: f32 per channel.
    Scale = 1,
    Offset = 2,
    // Walsh-Hadamard of blocks of that many channels, times the float.
    Hadamard = 3,
    // The channel that a word's low half names, negated where the top bit is set.
    Permute = 4,
    // A matrix, transposed, f16 `[dim, dim]`.
    Matrix = 5,
};

constexpr unsigned STEP_BYTES = 16;

// Pieces of rows that a thread has under way at once.
constexpr unsigned ROW_LOADS = 8;

template <bool IS_BF16>
KVD_DEVICE FourWords widened(const TwoWords& halves) {
    FourWords words;
#pragma unroll
    for (unsigned at = 0; at < 4; at++) {
        const uint32_t half = halves.word[at / 2] >> 16 * (at % 2);
        words.word[at] = IS_BF16 ? half << 16 : f32_bits(f16_value(uint16_t(half)));
    }
    return words;
}

// Rows of a power of two of channels: a thread has the same four of each of its rows. Words that neighbours
// write are neighbours.
template <bool IS_BF16>
KVD_DEVICE void load_fours(const Work& work, const uint8_t* rows) {
    const unsigned shift = ones(work.dim / 4 - 1);
    const unsigned step = STORE_THREADS >> shift;
    const unsigned first = thread_index() >> shift;
    const TwoWords* from = reinterpret_cast<const TwoWords*>(rows) + thread_index();
    // As long as a row and four words more for each.
    uint32_t* to = work.words + 4 * (thread_index() + first);
    for (unsigned token = first; token < work.tokens; token += ROW_LOADS * step) {
        TwoWords halves[ROW_LOADS];
#pragma unroll
        for (unsigned at = 0; at < ROW_LOADS; at++) {
            if (token + at * step < work.tokens) {
                halves[at] = from[at * STORE_THREADS];
            }
        }
#pragma unroll
        for (unsigned at = 0; at < ROW_LOADS; at++) {
            if (token + at * step < work.tokens) {
                *reinterpret_cast<FourWords*>(to + at * step * work.stride) =
                    widened<IS_BF16>(halves[at]);
            }
        }
        from += ROW_LOADS * STORE_THREADS;
        to += ROW_LOADS * step * work.stride;
    }
}

// Brings the rows to words. A thread reads four bytes at a time: dims are even.
KVD_DEVICE void load_rows(const Work& work, const uint8_t* rows) {
    const bool is_power = (work.dim & (work.dim - 1)) == 0;
    const bool in_fours = is_power && work.dim >= 4 && work.dim <= 4 * STORE_THREADS;
    if (work.unit.dtype != 0 && in_fours && misaligned(rows) % 8 == 0) {
        return work.unit.dtype == 1 ? load_fours<false>(work, rows) : load_fours<true>(work, rows);
    }
    const unsigned per_word = work.unit.dtype == 0 ? 1 : 2;
    const unsigned count = work.dim / per_word;
    each_value(work.tokens, count, [&](unsigned token, unsigned at) {
        const uint32_t word = load32(rows + 4 * (uint64_t(token) * count + at));
        uint32_t* to = work.words + token * work.stride + at * per_word;
        if (work.unit.dtype == 0) {
            to[0] = word;
        } else if (work.unit.dtype == 1) {
            to[0] = f32_bits(f16_value(uint16_t(word)));
            to[1] = f32_bits(f16_value(uint16_t(word >> 16)));
        } else {
            to[0] = word << 16;
            to[1] = word & 0xFFFF0000;
        }
    });
}

// How far each row is raised (kvd-codec/src/gain.rs): a thread per row, in the order of the channels.
KVD_DEVICE void find_shifts(const Work& work) {
    for (unsigned token = thread_index(); token < work.tokens; token += STORE_THREADS) {
        float sum = 0;
        for (unsigned channel = 0; channel < work.dim; channel++) {
            const float x = work.value(token, channel);
            sum = plus(sum, times(x, x));
        }
        const float ratio = over(work.unit.median, root(sum));
        unsigned shift = 0;
        while (shift < 7 && ratio >= times(1.41421356237309504880f, float(1u << shift))) {
            shift++;
        }
        work.shifts[token] = uint8_t(shift);
    }
}

KVD_DEVICE void hadamard(uint32_t* row, unsigned dim, unsigned block, float norm) {
    for (unsigned half = 1; half < block; half *= 2) {
        for (unsigned pair = lane_index(); pair < dim / 2; pair += WARP_LANES) {
            const unsigned low = (pair & ~(half - 1)) * 2 + (pair & (half - 1));
            const float a = f32_value(row[low]);
            const float b = f32_value(row[low + half]);
            row[low] = f32_bits(plus(a, b));
            row[low + half] = f32_bits(minus(a, b));
        }
        KVD_WARP_BARRIER();
    }
    for (unsigned at = lane_index(); at < dim; at += WARP_LANES) {
        row[at] = f32_bits(times(f32_value(row[at]), norm));
    }
    KVD_WARP_BARRIER();
}

// The rows of a warp, and a copy of them that a step reads.
struct RowsOfWarp {
    uint32_t* rows;
    unsigned stride;
    unsigned count;
    unsigned dim;
    uint32_t* copy;

    KVD_DEVICE void make_copy() const {
        for (unsigned row = 0; row < count; row++) {
            for (unsigned at = lane_index(); at < dim; at += WARP_LANES) {
                copy[row * dim + at] = rows[row * stride + at];
            }
        }
        KVD_WARP_BARRIER();
    }
};

// Outputs lie in lanes, each the sum in the order of the inputs.
KVD_DEVICE void multiply(const RowsOfWarp& of, const uint16_t* columns) {
    of.make_copy();
    for (unsigned at = lane_index(); at < of.dim; at += WARP_LANES) {
        float sums[WARP_ROWS] = {};
        for (unsigned input = 0; input < of.dim; input++) {
            const float entry = f16_value(columns[input * of.dim + at]);
#pragma unroll
            for (unsigned row = 0; row < WARP_ROWS; row++) {
                if (row < of.count) {
                    const float x = f32_value(of.copy[row * of.dim + input]);
                    sums[row] = plus(sums[row], times(x, entry));
                }
            }
        }
#pragma unroll
        for (unsigned row = 0; row < WARP_ROWS; row++) {
            if (row < of.count) {
                of.rows[row * of.stride + at] = f32_bits(sums[row]);
            }
        }
    }
    KVD_WARP_BARRIER();
}

KVD_DEVICE void permute(const RowsOfWarp& of, const uint32_t* order) {
    of.make_copy();
    for (unsigned row = 0; row < of.count; row++) {
        for (unsigned at = lane_index(); at < of.dim; at += WARP_LANES) {
            const uint32_t from = order[at];
            // A product with minus one, or one, is the value with its sign turned, or not.
            of.rows[row * of.stride + at] =
                of.copy[row * of.dim + (from & 0xFFFF)] ^ (from & 0x80000000u);
        }
    }
    KVD_WARP_BARRIER();
}

// One step of the rows of a warp.
KVD_DEVICE void apply(const RowsOfWarp& of, const uint32_t* step, const uint8_t* data) {
    switch (Step(step[0])) {
        case Step::Scale:
        case Step::Offset:
            for (unsigned row = 0; row < of.count; row++) {
                for (unsigned at = lane_index(); at < of.dim; at += WARP_LANES) {
                    uint32_t& word = of.rows[row * of.stride + at];
                    const float by = load_float(data + 4 * at);
                    const float x = f32_value(word);
                    word = f32_bits(Step(step[0]) == Step::Scale ? times(x, by) : minus(x, by));
                }
            }
            KVD_WARP_BARRIER();
            break;
        case Step::Hadamard:
            for (unsigned row = 0; row < of.count; row++) {
                hadamard(of.rows + row * of.stride, of.dim, step[1], f32_value(step[3]));
            }
            break;
        case Step::Permute:
            permute(of, reinterpret_cast<const uint32_t*>(data));
            break;
        default:
            multiply(of, reinterpret_cast<const uint16_t*>(data));
    }
}

// Takes all rows of the page through the side's steps, and raises those that have a shift.
KVD_DEVICE void transform(const Work& work) {
    const uint32_t* first = reinterpret_cast<const uint32_t*>(work.steps);
    uint32_t* copy = work.rows + warp_index() * WARP_ROWS * work.dim;
    for (unsigned token = warp_index() * WARP_ROWS; token < work.tokens;
         token += STORE_WARPS * WARP_ROWS) {
        const unsigned count = least(WARP_ROWS, work.tokens - token);
        const RowsOfWarp of = {work.words + token * work.stride, work.stride, count, work.dim, copy};
        for (const uint32_t* step = first; Step(step[0]) != Step::End; step += STEP_BYTES / 4) {
            apply(of, step, work.steps + step[2]);
        }
        if (work.unit.median == 0) {
            continue;
        }
        for (unsigned row = 0; row < count; row++) {
            const float gain = float(1u << work.shifts[token + row]);
            for (unsigned at = lane_index(); at < work.dim; at += WARP_LANES) {
                uint32_t& word = of.rows[row * of.stride + at];
                word = f32_bits(times(f32_value(word), gain));
            }
        }
    }
}

}  // namespace kvd
