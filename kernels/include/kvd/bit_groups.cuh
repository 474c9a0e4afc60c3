// Bit allocations whose runs are whole groups of sixteen coefficients, in pages of 64 tokens: what fits have
// for head sizes that are multiples of sixteen. Their codes go from the staged planes to the words of products
// without being spread (unpack.cuh): a word of a full tile's plane is of whole quads, and a lane's part of a
// group is nibbles of one word of each plane, in the same order for every width. Nibbles select bytes of levels
// that registers hold. Terms of products stand in the order of the nibbles, which queries and weights are cut
// in; levels of two bytes are two groups. The page's codes are one piece, and its two tiles are worked on
// together. The host lays groups out (kvd-cuda/src/unpack.rs).
#pragma once

#include "bitalloc.cuh"

namespace kvd {

// A bit allocation of such runs: products of bytes alone.
struct Groups {};

// Two groups of keys are a step; one of values two products, of even positions and of odd ones.
constexpr unsigned GROUP_POSITIONS = 16;
constexpr unsigned GROUP_BLOCKS = GROUP_POSITIONS / STEP_COLUMNS;
// Tiles of a page at most.
constexpr unsigned GROUP_TILES = 2;
// Tokens of a page whose tiles are full: where the codes of its groups are is known beforehand.
constexpr unsigned GROUP_TOKENS = GROUP_TILES * TILE_TOKENS;

template <>
struct Spreads<Tensor<Groups>> {
    static constexpr bool value = false;
    static constexpr bool of_runs = true;
};

// A lane's words of values are nibbles of quads `lane` and `lane + 4`, low and high ones of each byte.
template <>
struct TokenOrder<Tensor<Groups>> {
    KVD_DEVICE static unsigned term(unsigned token) {
        const unsigned quad = token / CODE_GROUP;
        const unsigned at = token % CODE_GROUP;
        const unsigned word = at / 2 * CODE_GROUP + quad % CODE_GROUP;
        return word * CODE_GROUP + at % 2 * 2 + quad / CODE_GROUP;
    }
};

// One group of values, or two neighbouring groups of a run of keys (the second of the last pair may
// be absent): where their codes are in a page of two full tiles, those of the second tile behind
// those of the first; bytes between the quads of keys, or of a row of values.
struct alignas(16) Group {
    uint32_t at;
    uint32_t next;
    uint32_t apart;
    // Bits of a code (none: nothing is to be done), its run, the first token of keys whose bit of a plane of
    // one is the next one, the second group's tokens behind the first's, and where the levels begin, from the
    // table on.
    uint32_t what;

    KVD_DEVICE unsigned width() const { return what & 15; }
    KVD_DEVICE unsigned run() const { return what >> 4 & 15; }
    KVD_DEVICE unsigned next_bit() const { return what >> 8 & 255; }
    KVD_DEVICE unsigned levels() const { return what >> 16; }
};

// Levels of one byte, of up to 16 codes; all levels where codes are wider.
struct GroupLevels {
    FourWords few;
    const uint8_t* all;

    KVD_DEVICE GroupLevels(const uint8_t* table, const Group& group)
        : few(*reinterpret_cast<const FourWords*>(table + group.levels())),
          all(table + group.levels()) {}

    // Bytes of four codes of fewer than four bits, nibbles in the low half of a word.
    KVD_DEVICE uint32_t of_few(uint32_t nibbles) const {
        return bytes_at(few.word[0], few.word[1], nibbles);
    }
    // For codes of four bits, whatever is in the high half.
    KVD_DEVICE uint32_t of_four(uint32_t nibbles) const {
        const uint32_t low = bytes_at(few.word[0], few.word[1], nibbles & 0x7777);
        const uint32_t high = bytes_at(few.word[2], few.word[3], nibbles & 0x7777);
        const uint32_t upper = bytes_at(0xFF00, 0, nibbles >> 3 & 0x1111);
        return (low & ~upper) | (high & upper);
    }

    // For four codes of more bits: nibbles of their low and their high bits.
    KVD_DEVICE uint32_t of_wide(uint32_t low, uint32_t high) const {
        return of_bytes(apart(low) | apart(high) << 4);
    }
    KVD_DEVICE uint32_t of_bytes(uint32_t codes) const {
        uint32_t level[CODE_GROUP];
#pragma unroll
        for (unsigned code = 0; code < CODE_GROUP; code++) {
            level[code] = all[bytes_of(codes, 0, 0x4440 + code)];
        }
        return bytes_of(bytes_of(level[0], level[1], 0x0040), bytes_of(level[2], level[3], 0x0040),
                        0x5410);
    }
    KVD_DEVICE static uint32_t apart(uint32_t nibbles) {
        return bytes_of(nibbles & 0x0F0F, nibbles >> 4 & 0x0F0F, 0x5140);
    }
};

// A lane's codes of a group of keys, those of one token: nibbles of quads `lane % 2` and two further on, of the
// first two neighbours of each, or the others.
struct KeyNibbles {
    // From a group to the next.
    static constexpr unsigned STEP = TILE_TOKENS * CODE_GROUP;

    // Bytes between the quads, those of a plane of two bits.
    unsigned apart;
    unsigned odd;
    unsigned upper;
    // Whether bits of a plane of one are the next.
    unsigned second[2];

    KVD_DEVICE KeyNibbles(const Group& group, unsigned token)
        : apart(group.apart),
          odd(lane_word() % 2),
          upper(lane_word() / 2 * 16),
          second{token >= group.next_bit() ? 1u : 0u,
                 token + TILE_TOKENS >= group.next_bit() ? 1u : 0u} {}

    // Codes from the planes whose first word is at `at`; of the first group or the second.
    template <unsigned WIDTH>
    KVD_DEVICE uint32_t of(const uint8_t* at, unsigned half) const {
        at += half * STEP;
        if constexpr (WIDTH == 4) {
            return load32(at + odd * apart) >> upper;
        }
        uint32_t all = 0;
        if constexpr ((WIDTH & 2) != 0) {
            all = load32(at) >> (upper + 2 * odd) & 0x3333;
            at += apart;
        }
        if constexpr ((WIDTH & 1) != 0) {
            // A plane of one bit is half as long.
            const uint32_t word = load32(at - second[half] * (apart / 2));
            all += (word >> (upper + 2 * odd + second[half]) & 0x1111) << (WIDTH & 2);
        }
        return all;
    }

    // Levels of codes of more than four bits.
    KVD_DEVICE uint32_t wide(const GroupLevels& levels, unsigned width, const uint8_t* at,
                             unsigned half) const {
        if (width == 8) {
            at += half * STEP;
            const uint32_t first = load32(at + odd * apart);
            const uint32_t other = load32(at + (odd + 2) * apart);
            return levels.of_bytes(bytes_of(first, other, upper != 0 ? 0x7362 : 0x5140));
        }
        const uint8_t* next = at + 2 * apart;
        const uint32_t high = width == 5   ? of<1>(next, half)
                              : width == 6 ? of<2>(next, half)
                                           : of<3>(next, half);
        return levels.of_wide(of<4>(at, half), high);
    }
};

// Nibbles of values, of two neighbouring channels: quads of tokens.
struct ValueNibbles {
    // Bytes of a row of a plane, and of those before a lane's in one of two bits.
    unsigned row;
    unsigned odd;

    KVD_DEVICE explicit ValueNibbles(unsigned row) : row(row), odd(lane_word() % 2 * row) {}

    template <unsigned WIDTH>
    KVD_DEVICE TwoWords of(const uint8_t* at) const {
        const unsigned lane = lane_word();
        if constexpr (WIDTH == 4) {
            return load(at + lane * row);
        }
        TwoWords all = {};
        if constexpr ((WIDTH & 2) != 0) {
            all = masked(load(at + odd), lane / 2 * 2, 0x33333333);
            at += 2 * row;
        }
        if constexpr ((WIDTH & 1) != 0) {
            const TwoWords one = masked(load(at), lane, 0x11111111);
            all.word[0] += one.word[0] << (WIDTH & 2);
            all.word[1] += one.word[1] << (WIDTH & 2);
        }
        return all;
    }

    KVD_DEVICE static TwoWords load(const uint8_t* at) {
        return *reinterpret_cast<const TwoWords*>(at);
    }
    KVD_DEVICE static TwoWords masked(const TwoWords& all, unsigned shift, uint32_t mask) {
        return {{all.word[0] >> shift & mask, all.word[1] >> shift & mask}};
    }

    // Levels of codes of more than four bits, both words of each neighbour.
    KVD_DEVICE void wide(const GroupLevels& levels, unsigned width, const uint8_t* at,
                         uint32_t (&words)[GROUP_BLOCKS][2]) const {
        const TwoWords low = of<4>(at);
        TwoWords high;
        if (width == 8) {
            high = load(at + (lane_word() + CODE_GROUP) * row);
        } else {
            const uint8_t* next = at + CODE_GROUP * row;
            high = width == 5 ? of<1>(next) : width == 6 ? of<2>(next) : of<3>(next);
        }
#pragma unroll 1
        for (unsigned word = 0; word < 2; word++) {
#pragma unroll
            for (unsigned block = 0; block < GROUP_BLOCKS; block++) {
                const uint32_t both[2] = {low.word[block], high.word[block]};
                const uint32_t bytes = bytes_of(both[0], both[1], word != 0 ? 0x7362 : 0x5140);
                const uint32_t level = width == 8 ? levels.of_bytes(bytes)
                                                  : levels.of_wide(both[0] >> 16 * word,
                                                                   both[1] >> 16 * word);
                if (word == 0) {
                    words[block][0] = level;
                } else {
                    words[block][1] = level;
                }
            }
        }
    }
};

template <>
struct Tensor<Groups> : Tensor<BitAlloc> {
    static constexpr unsigned SPANS = 1;

    // All codes of a page.
    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned) {
        KVD_EXPECT(tile.page_tokens <= GROUP_TOKENS);
        return {0, code_bytes(all(side, tile.tables), tile)};
    }

    // The page's codes, and groups.
    KVD_DEVICE static const uint8_t* staged(const Tile& tile) {
        return tile.staged + tile.pieces[0].at;
    }
    KVD_DEVICE static Group group(const SpreadTable& table, unsigned index) {
        return reinterpret_cast<const Group*>(&table + 1)[index];
    }
    KVD_DEVICE static bool is_full(const Tile& tile) { return tile.page_tokens == GROUP_TOKENS; }

    // Calls `use(step, words)` with the bytes of this lane's quads of every two groups of keys, of its token in
    // both tiles.
    template <class Use>
    KVD_DEVICE static void each_step(const SideShape& side, const Tile (&tile)[GROUP_TILES],
                                     unsigned token, Use use) {
        const SpreadTable& table = spread_table(tile[0].table);
        const unsigned end = side.spread_row / STEP_TERMS;
        if (KVD_RARELY(!is_full(tile[0]))) {
#pragma unroll 1
            for (unsigned step = 0; step < end; step++) {
                const Group group = Tensor::group(table, step);
                uint32_t words[GROUP_TILES][2] = {};
                any_keys(tile, group, {tile[0].table, group}, token, words);
                use(step, words);
            }
            return;
        }
        unsigned codes = unsigned(staged(tile[0]) - tile[0].table) + token * CODE_GROUP;
        KVD_KEEP(codes);
#pragma unroll 1
        for (unsigned step = 0; step < end; step++) {
            const Group group = Tensor::group(table, step);
            const uint8_t* first = tile[0].table + (codes + group.at);
            const uint8_t* const at[GROUP_TILES] = {first, first + group.next};
            uint32_t words[GROUP_TILES][2];
            key_words(group, {tile[0].table, group}, KeyNibbles(group, token), at, words);
            use(step, words);
        }
    }

    KVD_DEVICE static void key_words(const Group& group, const GroupLevels& levels,
                                     const KeyNibbles& nibbles,
                                     const uint8_t* const (&at)[GROUP_TILES],
                                     uint32_t (&words)[GROUP_TILES][2]) {
        const unsigned width = group.width();
        if (KVD_RARELY(width > SPREAD_BITS_REGISTERS)) {
            each_word(words, [&](unsigned of, unsigned half) {
                return nibbles.wide(levels, width, at[of], half);
            });
        } else if (width == SPREAD_BITS_REGISTERS) {
            each_word(words, [&](unsigned of, unsigned half) {
                return levels.of_four(nibbles.of<4>(at[of], half));
            });
        } else {
            if (width == 2) {
                each_word(words, [&](unsigned of, unsigned half) {
                    return nibbles.of<2>(at[of], half);
                });
            } else if (width == 1) {
                each_word(words, [&](unsigned of, unsigned half) {
                    return nibbles.of<1>(at[of], half);
                });
            } else {
                each_word(words, [&](unsigned of, unsigned half) {
                    return nibbles.of<3>(at[of], half);
                });
            }
            each_word(words, [&](unsigned of, unsigned half) {
                return levels.of_few(words[of][half]);
            });
        }
    }

    template <class Find>
    KVD_DEVICE static void each_word(uint32_t (&words)[GROUP_TILES][2], Find find) {
#pragma unroll
        for (unsigned at = 0; at < 2 * GROUP_TILES; at++) {
            words[at / 2][at % 2] = find(at / 2, at % 2);
        }
    }

    // Where a tile of the page is not full, or missing.
    KVD_DEVICE static Codes any_codes(const Tile& tile, const Group& group) {
        const SpreadTable& table = spread_table(tile.table);
        const SpreadRun& run = table.run[group.run()];
        const uint8_t* at = staged(tile) + spread_start(table, tile, group.run());
        return {at, run.width, tile.tokens, run.len, 0};
    }
    // A group's number in its run, of whose first plane a group has so many bytes.
    KVD_DEVICE static unsigned number_of(const Tile& tile, const Group& group, unsigned bytes) {
        const SpreadTable& table = spread_table(tile.table);
        return (group.at - GROUP_TILES * table.run[group.run()].before) / bytes;
    }
    KVD_DEVICE static void any_keys(const Tile (&tile)[GROUP_TILES], const Group& group,
                                    const GroupLevels& levels, unsigned token,
                                    uint32_t (&words)[GROUP_TILES][2]) {
        each_word(words, [&](unsigned of, unsigned half) {
            const Codes codes = any_codes(tile[of], group);
            const unsigned number = number_of(tile[of], group, KeyNibbles::STEP) + half;
            const unsigned groups = codes.per_row / GROUP_POSITIONS;
            uint32_t word = 0;
#pragma unroll 1
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                const unsigned quad = number + (lane_word() % 2 + at % 2 * 2) * groups;
                const unsigned position = quad * CODE_GROUP + lane_word() / 2 * 2 + at / 2;
                if (token < codes.tokens && number < groups) {
                    const unsigned code = codes.one(codes.key_element(token, position));
                    word |= uint32_t(levels.all[code]) << 8 * at;
                }
            }
            return word;
        });
    }

    // Calls `use(tile, words)` with both words of this lane's even channel, and of its odd one, of a group of
    // values.
    template <class Use>
    KVD_DEVICE static void value_group(const Tile (&tile)[GROUP_TILES], unsigned index, Use use) {
        const Group group = Tensor::group(spread_table(tile[0].table), index);
        const GroupLevels levels(tile[0].table, group);
        const unsigned position = lane_row() * GROUP_BLOCKS;
        const uint8_t* at = staged(tile[0]) + group.at + position * CODE_GROUP;
        if (group.width() == 0) {
            return;
        }
        uint32_t words[GROUP_TILES][GROUP_BLOCKS][2];
        if (KVD_RARELY(!is_full(tile[0]))) {
            any_values(tile, group, levels, position, words);
        } else {
            value_words(group, levels, at, words);
        }
#pragma unroll
        for (unsigned of = 0; of < GROUP_TILES; of++) {
            use(of, words[of]);
        }
    }

    KVD_DEVICE static void value_words(const Group& group, const GroupLevels& levels,
                                       const uint8_t* at,
                                       uint32_t (&words)[GROUP_TILES][GROUP_BLOCKS][2]) {
        const ValueNibbles nibbles(group.apart);
        const unsigned width = group.width();
        if (KVD_RARELY(width > SPREAD_BITS_REGISTERS)) {
            // Nothing is computed for it before it is known.
            unsigned row = group.apart;
            unsigned next = group.next;
            KVD_KEEP(row);
            KVD_KEEP(next);
            const ValueNibbles rare(row);
#pragma unroll
            for (unsigned of = 0; of < GROUP_TILES; of++) {
                rare.wide(levels, width, at + of * next, words[of]);
            }
            return;
        }
        const uint8_t* const both[GROUP_TILES] = {at, at + group.next};
        TwoWords all[GROUP_TILES];
        if (width == SPREAD_BITS_REGISTERS) {
            all[0] = nibbles.of<4>(both[0]);
            all[1] = nibbles.of<4>(both[1]);
            look_up(all, words, [&](uint32_t nibbles) { return levels.of_four(nibbles); });
            return;
        }
        if (width == 2) {
            all[0] = nibbles.of<2>(both[0]);
            all[1] = nibbles.of<2>(both[1]);
        } else if (width == 1) {
            all[0] = nibbles.of<1>(both[0]);
            all[1] = nibbles.of<1>(both[1]);
        } else {
            all[0] = nibbles.of<3>(both[0]);
            all[1] = nibbles.of<3>(both[1]);
        }
        look_up(all, words, [&](uint32_t nibbles) { return levels.of_few(nibbles); });
    }

    template <class Of>
    KVD_DEVICE static void look_up(const TwoWords (&all)[GROUP_TILES],
                                   uint32_t (&words)[GROUP_TILES][GROUP_BLOCKS][2], Of of) {
#pragma unroll
        for (unsigned at = 0; at < 2 * GROUP_TILES * GROUP_BLOCKS; at++) {
            words[at / 4][at / 2 % 2][at % 2] = of(all[at / 4].word[at / 2 % 2] >> at % 2 * 16);
        }
    }

    KVD_DEVICE static void any_values(const Tile (&tile)[GROUP_TILES], const Group& group,
                                      const GroupLevels& levels, unsigned position,
                                      uint32_t (&words)[GROUP_TILES][GROUP_BLOCKS][2]) {
#pragma unroll
        for (unsigned which = 0; which < GROUP_TILES * GROUP_BLOCKS * 2; which++) {
            const unsigned of = which / 4;
            const unsigned block = which / 2 % 2;
            const Codes codes = any_codes(tile[of], group);
            const unsigned number = number_of(tile[of], group, GROUP_POSITIONS * CODE_GROUP);
            uint32_t word = 0;
#pragma unroll 1
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                const unsigned quad = lane_word() + at % 2 * CODE_GROUP;
                const unsigned token = quad * CODE_GROUP + which % 2 * 2 + at / 2;
                const unsigned channel = number * GROUP_POSITIONS + position + block;
                if (token < codes.tokens) {
                    const unsigned code = codes.one(codes.value_element(token, channel));
                    word |= uint32_t(levels.all[code]) << 8 * at;
                }
            }
            words[of][block][which % 2] = word;
        }
    }

    // Calls `use(token, channel, value)` for the outliers of a page, whose first tile it is. There are few.
    template <class Use>
    KVD_DEVICE static void each_rest(const SideShape& side, const Tile& tile, Use use) {
        KVD_EXPECT(tile.first_row == 0);
        const SpreadTable& table = spread_table(tile.table);
        unsigned codes = tile.page_tokens / TILE_TOKENS * table.tile_bytes;
        if (KVD_RARELY(!is_full(tile))) {
            codes = code_bytes(table, tile);
        }
        const Outliers all(tile, codes);
#pragma unroll 1
        for (unsigned at = 0; at < all.count; at++) {
            const unsigned channel = all.coefficient(at);
            if (channel < side.dim) {
                use(all.row(at), channel, all.value(at));
            }
        }
    }

    // A channel with two bytes is entered at the place of the first.
    KVD_DEVICE static void prepare_places(const SideShape& side, const uint8_t* tables,
                                          uint32_t* places) {
        SpreadPosition* to = reinterpret_cast<SpreadPosition*>(places);
        uint8_t* by_channel = reinterpret_cast<uint8_t*>(to + side.spread_places);
        for (unsigned at = thread_index(); at < side.spread_places; at += ATTEND_THREADS) {
            const SpreadPosition of = position(side, tables, at);
            to[at] = of;
            if (of.channel < side.dim && of.is_split == 0) {
                by_channel[of.channel] = uint8_t(at);
            }
        }
    }
    KVD_DEVICE static uint32_t channel(const SideShape& side, const uint32_t* places, unsigned at) {
        return at < side.spread_places ? place(places, at).channel : ~0u;
    }
    // Whether it is the low byte of a channel whose high one is sixteen places before, of the same lane.
    KVD_DEVICE static bool is_low(const uint32_t* places, unsigned at) {
        return place(places, at).is_split != 0;
    }

    KVD_DEVICE static unsigned place_of(const SideShape& side, const uint32_t* places,
                                        unsigned channel) {
        return reinterpret_cast<const uint8_t*>(&place(places, side.spread_places))[channel];
    }
};

}  // namespace kvd
