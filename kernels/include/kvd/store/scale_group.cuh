// Groups of coefficients that share a scale, and their range. Values of a group of a usual shape stay in
// registers from the walk for their extremes to the one for their codes. Reference:
// kvd-codec/src/quantizer/ranges.rs.
#pragma once

#include "work.cuh"

namespace kvd {

// Values of a group that registers hold.
constexpr unsigned HELD = 32;

// Values that share a scale pair.
struct Group {
    unsigned row;
    unsigned pair;
    Range tokens;
    Range channels;

    KVD_DEVICE Group(const Work& work, unsigned pairs, unsigned index) {
        row = quotient(index, pairs);
        pair = index - row * pairs;
        const unsigned token = row * work.side.scale_tokens;
        tokens = {token, least(work.tokens - token, work.side.scale_tokens) + token};
        const unsigned channel = pair * work.side.scale_channels;
        channels = {channel, least(work.dim - channel, work.side.scale_channels) + channel};
    }

    KVD_DEVICE unsigned width() const { return channels.to - channels.from; }
    KVD_DEVICE unsigned height() const { return tokens.to - tokens.from; }

    // The first zero of a group that has one: zeros have signs.
    KVD_DEVICE float first_zero(const Work& work) const {
        for (unsigned token = tokens.from; token < tokens.to; token++) {
            for (unsigned at = channels.from; at < channels.to; at++) {
                if (work.value(token, at) == 0) {
                    return work.value(token, at);
                }
            }
        }
        return 0;
    }

    // Calls `use(token, channel)` for all values, in a rotated order of the channels, so that threads
    // read different banks.
    template <class Use>
    KVD_DEVICE void each(Use use) const {
        if (width() == 1) {
#pragma unroll 4
            for (unsigned token = tokens.from; token < tokens.to; token++) {
                use(token, channels.from);
            }
            return;
        }
        const unsigned first = thread_index() % width();
        for (unsigned token = tokens.from; token < tokens.to; token++) {
            unsigned at = first;
            for (unsigned step = 0; step < width(); step++) {
                use(token, channels.from + at);
                at = at + 1 == width() ? 0 : at + 1;
            }
        }
    }

    // For this thread's part, where all threads share the group.
    template <class Use>
    KVD_DEVICE void each_of_thread(Use use) const {
        for (Walk walk(width(), thread_index(), STORE_THREADS); walk.row < height(); walk.next()) {
            use(tokens.from + walk.row, channels.from + walk.column);
        }
    }
};

// The values of a group of `HELD`, one channel or one token, on their way to registers and back. Threads that
// have neighbouring channels read different banks. Channels of a token go in aligned fours, and are as long
// as all banks together: a thread begins with another four than its neighbours, so that eight read them all.
struct Held {
    static constexpr unsigned FOURS = HELD / 4;
    bool is_column;
    uint32_t* first;
    unsigned stride;
    unsigned turn;

    KVD_DEVICE Held(const Work& work, const Group& group)
        : is_column(group.width() == 1),
          first(work.words + group.tokens.from * work.stride + group.channels.from),
          stride(work.stride),
          turn(thread_index() - group.row) {}

    KVD_DEVICE static bool serves(const Group& group) {
        const bool is_run = group.height() == 1 && group.width() == HELD;
        return (is_run && group.channels.from % 4 == 0) ||
               (group.width() == 1 && group.height() == HELD);
    }

    KVD_DEVICE FourWords* four(unsigned at) const {
        return reinterpret_cast<FourWords*>(first) + (at + turn) % FOURS;
    }

    // Calls `use` with how far the words of a column are apart: offsets that are constants cost nothing.
    template <class Use>
    KVD_DEVICE void by_stride(Use use) const {
        switch (stride) {
            case word_stride(128): return use(word_stride(128));
            case word_stride(64): return use(word_stride(64));
            default: return use(stride);
        }
    }

    KVD_DEVICE void load(float (&values)[HELD]) const {
        if (is_column) {
            by_stride([&](unsigned apart) { load_column(values, apart); });
        } else {
            load_fours(values);
        }
    }
    KVD_DEVICE void load_column(float (&values)[HELD], unsigned apart) const {
#pragma unroll
        for (unsigned at = 0; at < HELD; at++) {
            values[at] = f32_value(first[at * apart]);
        }
    }
    KVD_DEVICE void load_fours(float (&values)[HELD]) const {
#pragma unroll
        for (unsigned at = 0; at < FOURS; at++) {
            const FourWords of = *four(at);
#pragma unroll
            for (unsigned part = 0; part < 4; part++) {
                values[4 * at + part] = f32_value(of.word[part]);
            }
        }
    }

    // Puts the code of each value in its place.
    template <class Levels>
    KVD_DEVICE void quantize(const float (&values)[HELD], const Levels& levels) const {
        uint32_t codes[HELD];
#pragma unroll
        for (unsigned at = 0; at < HELD; at++) {
            codes[at] = levels.code(values[at]);
        }
        if (is_column) {
            by_stride([&](unsigned apart) { store_column(codes, apart); });
        } else {
            store_fours(codes);
        }
    }
    KVD_DEVICE void store_column(const uint32_t (&codes)[HELD], unsigned apart) const {
#pragma unroll
        for (unsigned at = 0; at < HELD; at++) {
            first[at * apart] = codes[at];
        }
    }
    KVD_DEVICE void store_fours(const uint32_t (&codes)[HELD]) const {
#pragma unroll
        for (unsigned at = 0; at < FOURS; at++) {
            *four(at) = {codes[4 * at], codes[4 * at + 1], codes[4 * at + 2], codes[4 * at + 3]};
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

// Smallest and largest of some values; both NaN where one is.
struct Extremes {
    float low = f32_value(0x7F800000);
    float high = f32_value(0xFF800000);

    KVD_DEVICE void add(float x) {
        low = smaller(low, x);
        high = larger(high, x);
    }

    KVD_DEVICE void add(const float (&values)[HELD]) {
#pragma unroll
        for (unsigned at = 0; at < HELD; at++) {
            add(values[at]);
        }
    }
    KVD_DEVICE void add(const Work& work, const Group& group) {
        group.each([&](unsigned token, unsigned channel) { add(work.value(token, channel)); });
    }

    // The bits of the largest magnitude; above those of infinity where a value is NaN.
    KVD_DEVICE uint32_t magnitude() const {
        const bool is_empty = low > high;
        return is_empty ? 0 : most(magnitude_bits(low), magnitude_bits(high));
    }

    // Combines all threads, where none has NaN.
    KVD_DEVICE void meet(const Work& work) {
        low = from_ordered(~block_most(~ordered(low), work.slots));
        high = from_ordered(block_most(ordered(high), work.slots));
    }

    // The sign of a zero is stored: it is that of the first.
    KVD_DEVICE void sign(const Work& work, const Group& group) {
        if (KVD_RARELY(low == 0)) {
            low = group.first_zero(work);
        }
    }
};

}  // namespace kvd
