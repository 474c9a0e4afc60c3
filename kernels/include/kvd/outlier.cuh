// Values that Huffman codes do not hold: places in a chunk and the missing differences, as words of
// 12 bits of distance and 4 bits of difference (docs/format.md "Sides", grid; CPU reference:
// kvd-codec/src/huffman/streams/outlier.rs). Sixteen lanes read sixteen words at a time into a list
// in shared memory; words that do not fit there are read one by one where they lie, by the thread
// that needs them.
#pragma once

#include "huffman.cuh"

namespace kvd {

constexpr unsigned OUTLIERS_MAX = 120;
constexpr unsigned OUTLIER_WAY_BITS = 12;
// High bits of a word whose rest is in the next.
constexpr unsigned OUTLIER_LONG = 8;
// Bits of a coefficient in an outlier's place, above which stands the token.
constexpr unsigned OUTLIER_CHANNEL_BITS = 10;

struct OutlierList {
    const uint8_t* words;
    // Words; those that are in the list; whether the next belongs to the word before it; the place
    // that was reached, `token * dim + coefficient`.
    uint32_t count;
    uint32_t taken;
    uint32_t inside;
    uint32_t place;
    uint32_t length;
    uint32_t unused;
    // Place, `token << 10 | coefficient`, and rest, by place.
    uint32_t outlier[OUTLIERS_MAX];
};

KVD_DEVICE unsigned outlier_place(unsigned place, unsigned dim) {
    return place / dim << OUTLIER_CHANNEL_BITS | place % dim;
}

// Which of sixteen words belong to the word before them, from those that would be long: every second
// one of a row of them. `inside` says so of the first word, and then of the first after these.
KVD_DEVICE uint32_t outlier_data(uint32_t is_long, uint32_t& inside) {
    uint32_t data = inside;
    for (unsigned word = 0; word < CODE_LANES; word++) {
        data |= (is_long >> word & ~(data >> word) & 1) << (word + 1);
    }
    inside = data >> CODE_LANES & 1;
    return data;
}

// Fills the list of a chunk; the other half of the warp has a chunk of its own, or none and no list
// (`has`).
KVD_DEVICE void read_outliers(const Chunk& chunk, unsigned dim, bool has, OutlierList* list) {
    const unsigned lane = code_lane();
    unsigned at = 0;
    unsigned length = 0;
    unsigned place = 0;
    uint32_t inside = 0;
    bool room = true;
    const auto word = [&](unsigned index) -> unsigned {
        return index < chunk.outlier_words ? load16_any(chunk.outliers + WORD_BYTES * index) : 0;
    };
    while (KVD_BALLOT(room && at < chunk.outlier_words) != 0) {
        const unsigned mine = word(at + lane);
        const unsigned rest = mine >> OUTLIER_WAY_BITS;
        uint32_t after = inside;
        const uint32_t is_long = code_lanes_with(KVD_BALLOT(rest == OUTLIER_LONG));
        const bool is_data = outlier_data(is_long, after) >> lane & 1;
        unsigned way = is_data ? 0 : mine & ((1u << OUTLIER_WAY_BITS) - 1);
        for (unsigned step = 1; step < CODE_LANES; step *= 2) {
            const unsigned before = KVD_SHUFFLE(way, (lane_index() - step) % WARP_LANES);
            way += lane >= step ? before : 0;
        }
        const unsigned reached = KVD_SHUFFLE(way, lane_index() - lane + CODE_LANES - 1);
        const bool found = !is_data && rest != 0;
        const uint32_t all = code_lanes_with(KVD_BALLOT(found));
        room = room && length + ones(all) <= OUTLIERS_MAX;
        if (!room || at >= chunk.outlier_words) {
            continue;
        }
        if (found) {
            const uint32_t missing = rest == OUTLIER_LONG ? word(at + lane + 1)
                                                          : rest | (rest >= 8 ? 0xFFF0 : 0);
            const unsigned slot = length + ones(all & ((1u << lane) - 1));
            list->outlier[slot] = outlier_place(place + way, dim) << 16 | missing;
        }
        length += ones(all);
        place += reached;
        inside = after;
        at += CODE_LANES;
    }
    if (has && lane == 0) {
        list->words = chunk.outliers;
        list->count = chunk.outlier_words;
        list->taken = at;
        list->inside = inside;
        list->place = place;
        list->length = length;
    }
}

// The first outlier of the list at or after a token of the chunk.
KVD_DEVICE unsigned outliers_from(const OutlierList& list, unsigned token) {
    unsigned low = 0;
    for (unsigned high = list.length; low < high;) {
        const unsigned middle = (low + high) / 2;
        if (list.outlier[middle] >> (16 + OUTLIER_CHANNEL_BITS) < token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Calls `use(token, coefficient, rest)` for the outliers of tokens `from..to` of the chunk: every
// `parts`th of the list from `part` on, and for the first part those that found no room in it.
template <class Use>
KVD_DEVICE void each_outlier(const OutlierList& list, unsigned dim, Range tokens, unsigned part,
                             unsigned parts, Use use) {
    const auto tell = [&](unsigned place, unsigned missing) {
        const unsigned token = place >> OUTLIER_CHANNEL_BITS;
        if (token >= tokens.from && token < tokens.to) {
            use(token, place & ((1u << OUTLIER_CHANNEL_BITS) - 1), float(int16_t(missing)));
        }
        return token < tokens.to;
    };
    for (unsigned at = outliers_from(list, tokens.from) + part; at < list.length; at += parts) {
        if (!tell(list.outlier[at] >> 16, list.outlier[at] & 0xFFFF)) {
            break;
        }
    }
    unsigned place = list.place;
    for (unsigned at = list.taken + list.inside; part == 0 && at < list.count; at++) {
        const unsigned word = load16_any(list.words + WORD_BYTES * at);
        const unsigned rest = word >> OUTLIER_WAY_BITS;
        place += word & ((1u << OUTLIER_WAY_BITS) - 1);
        if (rest == OUTLIER_LONG) {
            at++;
            const unsigned missing = at < list.count ? load16_any(list.words + WORD_BYTES * at) : 0;
            tell(outlier_place(place, dim), missing);
        } else if (rest != 0) {
            tell(outlier_place(place, dim), rest | (rest > 8 ? 0xFFF0 : 0));
        }
    }
}

}  // namespace kvd
