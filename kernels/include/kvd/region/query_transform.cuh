// Rows of one head through the steps of its side's transform, by one thread block: queries into coefficient
// space, sums of values out of it (kvd-codec/src/transform.rs). A step is four words (kind, a number, an
// offset from the head's first step in bytes, a float), then its data. Host side:
// crates/kvd-cuda/src/query_transform.rs.
#pragma once

#include "../abi.cuh"
#include "../device.cuh"

namespace kvd {

constexpr unsigned TRANSFORM_STEP_WORDS = 4;

enum class Turn : uint32_t {
    End = 0,
    // Times a factor, f32 per channel.
    Scale = 1,
    // A mean, f32 per channel: its product with a query is summed, sums of values get it back.
    Mean = 2,
    // Walsh-Hadamard of blocks of that many channels, times the float.
    Hadamard = 3,
    // The channel that a word's low half names, negated where the top bit is set.
    Permute = 4,
    // A matrix, transposed, f32 `[dim, dim]`.
    Matrix = 5,
};

// A unit's rows in shared memory: the values, a copy that a step reads, a number per row, and a word
// per thread.
struct Turned {
    float* rows;
    float* copy;
    float* marks;
    uint32_t* words;
    unsigned count;
    unsigned dim;

    KVD_DEVICE Turned(uint8_t* shared, unsigned rows_of_unit, unsigned channels) {
        rows = reinterpret_cast<float*>(shared);
        copy = rows + TRANSFORM_ROWS * channels;
        marks = copy + TRANSFORM_ROWS * channels;
        words = reinterpret_cast<uint32_t*>(marks + TRANSFORM_ROWS);
        count = rows_of_unit;
        dim = channels;
    }

    // Each value once: `row`, `channel` and where it is.
    template <class Visit>
    KVD_DEVICE void each(Visit visit) const {
        for (unsigned at = thread_index(); at < count * dim; at += REGION_THREADS) {
            visit(at / dim, at % dim, at);
        }
    }

    KVD_DEVICE void make_copy() const {
        each([&](unsigned, unsigned, unsigned at) { copy[at] = rows[at]; });
        KVD_BARRIER();
    }
};

KVD_DEVICE void turn_hadamard(const Turned& of, unsigned block, float norm) {
    for (unsigned half = 1; half < block; half *= 2) {
        for (unsigned pair = thread_index(); pair < of.count * of.dim / 2; pair += REGION_THREADS) {
            // Blocks divide rows, so pairs of all rows are numbered as those of one.
            const unsigned low = (pair & ~(half - 1)) * 2 + (pair & (half - 1));
            const float a = of.rows[low];
            const float b = of.rows[low + half];
            of.rows[low] = a + b;
            of.rows[low + half] = a - b;
        }
        KVD_BARRIER();
    }
    of.each([&](unsigned, unsigned, unsigned at) { of.rows[at] *= norm; });
}

// Outputs lie in threads, each entry is read once for all rows.
KVD_DEVICE void turn_matrix(const Turned& of, const float* columns) {
    of.make_copy();
    for (unsigned at = thread_index(); at < of.dim; at += REGION_THREADS) {
        float sums[TRANSFORM_ROWS] = {};
        for (unsigned input = 0; input < of.dim; input++) {
            const float entry = columns[uint64_t(input) * of.dim + at];
#pragma unroll
            for (unsigned row = 0; row < TRANSFORM_ROWS; row++) {
                if (row < of.count) {
                    sums[row] += of.copy[row * of.dim + input] * entry;
                }
            }
        }
#pragma unroll
        for (unsigned row = 0; row < TRANSFORM_ROWS; row++) {
            if (row < of.count) {
                of.rows[row * of.dim + at] = sums[row];
            }
        }
    }
}

// Products of rows with a mean, added to their marks: a warp per row.
struct MeetMean {
    KVD_DEVICE static void step(const Turned& of, const float* mean) {
        for (unsigned row = warp_index(); row < of.count; row += REGION_THREADS / WARP_LANES) {
            float sum = 0;
            for (unsigned at = lane_index(); at < of.dim; at += WARP_LANES) {
                sum += of.rows[row * of.dim + at] * mean[at];
            }
            sum = warp_sum(sum);
            if (lane_index() == 0) {
                of.marks[row] += sum;
            }
        }
    }
};

// Sums of rows get a mean back as often as their weights, the marks, say.
struct AddMean {
    KVD_DEVICE static void step(const Turned& of, const float* mean) {
        of.each([&](unsigned row, unsigned channel, unsigned at) {
            of.rows[at] += of.marks[row] * mean[channel];
        });
    }
};

// Takes the rows, which are there for all threads, through all steps.
template <class Mean>
KVD_DEVICE void turn(const Turned& of, const uint8_t* steps) {
    const uint32_t* step = reinterpret_cast<const uint32_t*>(steps);
    for (; Turn(step[0]) != Turn::End; step += TRANSFORM_STEP_WORDS) {
        const uint8_t* data = steps + step[2];
        const float* values = reinterpret_cast<const float*>(data);
        const uint32_t* order = reinterpret_cast<const uint32_t*>(data);
        switch (Turn(step[0])) {
            case Turn::Scale:
                of.each([&](unsigned, unsigned channel, unsigned at) {
                    of.rows[at] *= values[channel];
                });
                break;
            case Turn::Mean:
                Mean::step(of, values);
                break;
            case Turn::Hadamard:
                turn_hadamard(of, step[1], f32_value(step[3]));
                break;
            case Turn::Permute:
                of.make_copy();
                of.each([&](unsigned row, unsigned channel, unsigned at) {
                    const uint32_t from = order[channel];
                    const float value = of.copy[row * of.dim + (from & 0xFFFF)];
                    of.rows[at] = from >> 31 ? -value : value;
                });
                break;
            default:
                turn_matrix(of, values);
        }
        KVD_BARRIER();
    }
}

// Row of a unit in the batch's `[tokens, query heads]`.
KVD_DEVICE uint64_t batch_row(const TransformUnit& unit, unsigned row, unsigned heads, unsigned group) {
    const unsigned at = unit.first + row;
    return uint64_t(unit.token + at / group) * heads + unit.head + at % group;
}

}  // namespace kvd
