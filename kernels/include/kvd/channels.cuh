// The weighted sum of a tile's values on CUDA cores, a thread per channel.
#pragma once

#include "shared.cuh"

namespace kvd {

// Value channels that a thread sums: head sizes up to 256.
constexpr unsigned CHANNELS_PER_THREAD = 2;

// The weighted values that a thread sums: a channel or two, over its slice of the tokens. Where thread
// blocks share the channels, of those of this one.
template <class Value, int ROWS>
struct Sums {
    // Floats of a row that are added up at the end.
    static constexpr unsigned SUMS_OF_ROW = ATTEND_THREADS;

    float out[CHANNELS_PER_THREAD][ROWS];
    // Channels of the thread block, and the first of them; whether a thread's are neighbours.
    unsigned channels;
    unsigned first;
    bool neighbours;
    unsigned width;
    unsigned slices;

    // Shared memory of it.
    KVD_DEVICE static unsigned work_bytes(const SideShape&) { return 0; }

    KVD_DEVICE Sums(const AttendShared<ROWS>&, const AttendParameters&, const SideShape& side,
                    bool of_neighbours = false)
        : channels(quotient(side.dim, side.parts)),
          first(side.part * channels),
          neighbours(of_neighbours) {
        const unsigned threads = neighbours ? channels / CHANNELS_PER_THREAD : channels;
        for (width = 1; width < threads && width < ATTEND_THREADS;) {
            width *= 2;
        }
        slices = ATTEND_THREADS / width;
        for (unsigned at = 0; at < CHANNELS_PER_THREAD; at++) {
            for (int row = 0; row < ROWS; row++) {
                out[at][row] = 0;
            }
        }
    }

    // A channel of this thread, of those of the thread block.
    KVD_DEVICE unsigned channel(unsigned at) const {
        const unsigned place = thread_index() % width;
        return neighbours ? CHANNELS_PER_THREAD * place + at : place + at * ATTEND_THREADS;
    }

    KVD_DEVICE void settle(const AttendParameters&, const SideShape&) {}

    KVD_DEVICE void absorb(const SideShape& side, const Tile& tile,
                           const AttendShared<ROWS>& shared) {
#pragma unroll
        for (unsigned at = 0; at < CHANNELS_PER_THREAD; at++) {
            if (channel(at) >= channels) {
                break;
            }
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                out[at][row] *= shared.factors[row];
            }
            const unsigned slice = thread_index() / width;
            Value::template accumulate<ROWS>(side, tile, first + channel(at), slice, slices,
                                             shared.weights, out[at]);
        }
    }

    // Adds the slices up and writes the unit's rows.
    KVD_DEVICE void write(const AttendShared<ROWS>& shared, const AttendParameters& parameters,
                          const AttendUnit& unit, const SideShape& side) const {
        const unsigned dim = side.dim;
        float* sums = shared.sums;
        for (unsigned at = 0; at < CHANNELS_PER_THREAD; at++) {
            KVD_BARRIER();
            for (int row = 0; row < ROWS; row++) {
                sums[row * ATTEND_THREADS + thread_index()] = out[at][row];
            }
            KVD_BARRIER();
            if (thread_index() >= width || channel(at) >= channels) {
                continue;
            }
            for (unsigned row = 0; row < unit.rows; row++) {
                float sum = 0;
                for (unsigned slice = 0; slice < slices; slice++) {
                    sum += sums[row * ATTEND_THREADS + slice * width + thread_index()];
                }
                parameters.out[uint64_t(unit.partial + row) * dim + first + channel(at)] = sum;
            }
        }
    }
};

}  // namespace kvd
