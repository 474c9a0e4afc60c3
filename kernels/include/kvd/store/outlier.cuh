// Values that Huffman codes do not hold, as words of 16 bits behind those of the codes
// (docs/format.md, "Sides", grid): the distance and the missing difference. A warp takes
// consecutive places: it counts its words first, and writes them when it knows how many there are
// before and where the last of them is. Reference: kvd-codec/src/huffman/streams/outlier.rs.
#pragma once

#include "../outlier.cuh"
#include "work.cuh"

namespace kvd {

// The sum over the lanes before this one, and over all.
struct LaneSums {
    unsigned before;
    unsigned all;

    KVD_DEVICE explicit LaneSums(unsigned mine) {
        unsigned sum = mine;
        for (unsigned step = 1; step < WARP_LANES; step *= 2) {
            const unsigned other = KVD_SHUFFLE(sum, lane_index() - least(step, lane_index()));
            sum += lane_index() >= step ? other : 0;
        }
        before = sum - mine;
        all = KVD_SHUFFLE(sum, WARP_LANES - 1);
    }
};

struct OutlierWriter {
    // Largest step from one outlier to the next, and largest rest in its word.
    static constexpr unsigned GAP_BITS = 12;
    static constexpr unsigned GAP_MAX = (1u << GAP_BITS) - 1;
    static constexpr int SHORT_MAX = 7;
    // The rest is in the next word.
    static constexpr unsigned LONG = 8u << GAP_BITS;
    static constexpr int REST_MAX = 32767;
    static constexpr unsigned NONE = ~0u;

    // Words that only lead across a gap, and words that hold a rest.
    KVD_DEVICE static unsigned words_across(unsigned gap) { return gap > 0 ? (gap - 1) / GAP_MAX : 0; }
    KVD_DEVICE static unsigned words_of(int rest) {
        const int size = rest < 0 ? -rest : rest;
        return size <= SHORT_MAX ? 1 : 2 * unsigned((size + REST_MAX - 1) / REST_MAX);
    }

    KVD_DEVICE static void write(uint8_t* to, unsigned gap, int rest) {
        for (; gap > GAP_MAX; gap -= GAP_MAX, to += WORD_BYTES) {
            store16_any(to, uint16_t(GAP_MAX));
        }
        if (rest >= -SHORT_MAX && rest <= SHORT_MAX) {
            store16_any(to, uint16_t(unsigned(rest) << GAP_BITS | gap));
            return;
        }
        for (; rest != 0; gap = 0, to += 2 * WORD_BYTES) {
            const int part = rest > REST_MAX ? REST_MAX : rest < -REST_MAX ? -REST_MAX : rest;
            store16_any(to, uint16_t(LONG | gap));
            store16_any(to + WORD_BYTES, uint16_t(part));
            rest -= part;
        }
    }

    // A warp's outliers: the first and the last place, and the words that they take, without those
    // that lead to the first.
    unsigned first;
    unsigned last;
    unsigned words;

    // `rest(place)` for places `from..to`; `use(words before, gap, rest)` for each that has one. `before`
    // is the place of the outlier before, or `NONE` where it is not yet known.
    template <class Rest, class Use>
    KVD_DEVICE OutlierWriter(Range places, unsigned before, Rest rest, Use use)
        : first(NONE), last(before), words(0) {
        for (unsigned from = places.from; from < places.to; from += WARP_LANES) {
            const unsigned place = from + lane_index();
            const int mine = place < places.to ? rest(place) : 0;
            const uint32_t found = KVD_BALLOT(mine != 0);
            if (found == 0) {
                continue;
            }
            const uint32_t below = found & ((1u << lane_index()) - 1);
            const unsigned previous = below != 0 ? from + highest(below) : last;
            const unsigned gap = previous == NONE ? 0 : place - previous;
            const LaneSums sums(mine != 0 ? words_across(gap) + words_of(mine) : 0);
            if (mine != 0) {
                use(words + sums.before, gap, mine);
            }
            first = first == NONE ? from + highest(found & (0 - found)) : first;
            last = from + highest(found);
            words += sums.all;
        }
    }

    // The number of the highest bit.
    KVD_DEVICE static unsigned highest(uint32_t bits) {
        unsigned at = 0;
        for (unsigned step = WARP_LANES / 2; step > 0; step /= 2) {
            at += bits >> (at + step) != 0 ? step : 0;
        }
        return at;
    }
};

// Appends the outliers of a chunk of `count` places at `out`, unless they are more than `room` words.
// Gives how many words they are. Every thread of the block calls it.
template <class Rest>
KVD_DEVICE unsigned append_outliers(const Work& work, unsigned count, uint8_t* out, unsigned room,
                                    Rest rest) {
    const unsigned groups = (count + WARP_LANES - 1) / WARP_LANES;
    Range places = part_of_warp(groups);
    places = {least(count, places.from * WARP_LANES), least(count, places.to * WARP_LANES)};
    const unsigned none = OutlierWriter::NONE;
    const OutlierWriter found(places, none, rest, [](unsigned, unsigned, int) {});
    if (lane_index() == 0) {
        work.sums[2 * warp_index()] = uint64_t(found.first) << 32 | found.last;
        work.sums[2 * warp_index() + 1] = found.words;
    }
    KVD_BARRIER();
    // Places are counted from the first of the chunk.
    unsigned all = 0;
    unsigned before = 0;
    unsigned last = 0;
    unsigned last_before = 0;
    for (unsigned warp = 0; warp < STORE_WARPS; warp++) {
        before = warp == warp_index() ? all : before;
        last_before = warp == warp_index() ? last : last_before;
        const unsigned first = unsigned(work.sums[2 * warp] >> 32);
        if (first != none) {
            all += OutlierWriter::words_across(first - last) + unsigned(work.sums[2 * warp + 1]);
            last = unsigned(work.sums[2 * warp]);
        }
    }
    KVD_BARRIER();
    if (all > room) {
        return all;
    }
    out += WORD_BYTES * before;
    const OutlierWriter written(places, last_before, rest, [&](unsigned at, unsigned gap, int mine) {
        OutlierWriter::write(out + WORD_BYTES * at, gap, mine);
    });
    return all;
}

}  // namespace kvd
