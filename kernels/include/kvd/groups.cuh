// Bit allocations whose runs are whole groups of sixteen coefficients, in pages of one tile or two: what
// fits have for head sizes that are multiples of sixteen. Their codes go from the staged planes to the words
// of products without being spread (spread.cuh): a word of a full tile's plane is of whole quads, and a
// lane's part of a group is nibbles of one word of each plane, in the same order for every width. Nibbles
// select bytes of levels that registers hold. Terms of products stand in the order of the nibbles, which
// queries and weights are cut in; levels of two bytes are two groups. The page's codes are one piece, and
// two tiles are worked on together. The host lays groups out (kvd-cuda/src/spread.rs).
#pragma once

#include "bitalloc.cuh"

namespace kvd {

// A bit allocation of such runs: products of bytes alone.
struct Groups {};

// A group is half of a step of keys, and two products of values: of even positions, of odd ones.
constexpr unsigned GROUP_POSITIONS = 16;
constexpr unsigned GROUP_BLOCKS = GROUP_POSITIONS / STEP_COLUMNS;
// A place of values that no group with codes has.
constexpr uint32_t GROUP_NONE = ~0u;
// Tiles of a page.
constexpr unsigned GROUP_TILES = 2;
// Outliers of a page that are looked through one by one.
constexpr unsigned GROUP_OUTLIERS = 32;

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

// Levels of one byte, of up to 16 codes; all levels where codes are wider.
struct GroupLevels {
    FourWords few;
    const uint8_t* all;

    KVD_DEVICE GroupLevels(const uint8_t* table, const SpreadRun& run, unsigned part) {
        const uint8_t* levels = table + run.levels;
        all = levels + part;
        few = *reinterpret_cast<const FourWords*>(levels + SPREAD_CODES_REGISTERS * part);
    }

    // Bytes of four codes, nibbles in the low half of a word; of fewer than four bits above nothing else.
    template <unsigned WIDTH>
    KVD_DEVICE uint32_t of(uint32_t nibbles) const {
        return spread_level<WIDTH>(few.word, nibbles);
    }

    // Of four codes of more bits, nibbles of their low and their high bits.
    KVD_DEVICE uint32_t of_wide(uint32_t low, uint32_t high) const {
        return of_bytes(apart(low) | apart(high) << 4);
    }
    KVD_DEVICE uint32_t of_bytes(uint32_t codes) const {
        uint32_t level[CODE_GROUP];
#pragma unroll
        for (unsigned code = 0; code < CODE_GROUP; code++) {
            level[code] = all[2 * bytes_of(codes, 0, 0x4440 + code)];
        }
        return bytes_of(bytes_of(level[0], level[1], 0x0040), bytes_of(level[2], level[3], 0x0040),
                        0x5410);
    }
    KVD_DEVICE static uint32_t apart(uint32_t nibbles) {
        return bytes_of(nibbles & 0x0F0F, nibbles >> 4 & 0x0F0F, 0x5140);
    }

    // Of one code.
    KVD_DEVICE uint32_t one(const SpreadRun& run, unsigned part, unsigned code) const {
        return run.width > SPREAD_BITS_REGISTERS
                   ? all[2 * code]
                   : all[(SPREAD_CODES_REGISTERS - 1) * part + code];
    }
};

// Where a lane's codes of a run of keys are, those of one token: nibbles of quads `lane % 2` and two
// further on of each group, whose quads are as far from one another as the run has groups; of the first two
// neighbours of each, or the others.
struct KeyNibbles {
    // From a group to the next, in bytes.
    static constexpr unsigned STEP = TILE_TOKENS * CODE_GROUP;

    // Bytes between the quads of a group: those of a plane of two bits.
    unsigned apart;
    unsigned odd;
    unsigned upper;

    KVD_DEVICE explicit KeyNibbles(const SpreadRun& run)
        : apart(run.len / GROUP_POSITIONS * STEP),
          odd(lane_word() % 2),
          upper(lane_word() / 2 * 16) {}

    // Of the planes from `at` on, for the token and group so many bytes behind.
    template <unsigned WIDTH>
    KVD_DEVICE uint32_t of(const uint8_t* at, unsigned behind) const {
        if constexpr (WIDTH == 4) {
            return load32(at + behind + odd * apart) >> upper;
        }
        uint32_t all = 0;
        if constexpr ((WIDTH & 2) != 0) {
            all = load32(at + behind) >> (upper + 2 * odd) & 0x3333;
            at += apart;
        }
        if constexpr ((WIDTH & 1) != 0) {
            const unsigned second = 2 * behind >= apart ? 1 : 0;
            const uint32_t word = load32(at + behind - second * (apart / 2));
            all += (word >> (upper + 2 * odd + second) & 0x1111) << (WIDTH & 2);
        }
        return all;
    }

    // Levels of codes of more than four bits.
    KVD_DEVICE uint32_t wide(const GroupLevels& levels, unsigned width, const uint8_t* at,
                             unsigned behind) const {
        if (width == 8) {
            const uint32_t first = load32(at + behind + odd * apart);
            const uint32_t second = load32(at + behind + (odd + 2) * apart);
            return levels.of_bytes(bytes_of(first, second, upper != 0 ? 0x7362 : 0x5140));
        }
        const uint8_t* next = at + 2 * apart;
        const uint32_t high = width == 5   ? of<1>(next, behind)
                              : width == 6 ? of<2>(next, behind)
                                           : of<3>(next, behind);
        return levels.of_wide(of<4>(at, behind), high);
    }
};

// The same of values, of a channel: two neighbours, of quads of tokens.
struct ValueNibbles {
    // Bytes of a row of a plane.
    unsigned row;

    KVD_DEVICE explicit ValueNibbles(const SpreadRun& run) : row(run.len * CODE_GROUP) {}

    template <unsigned WIDTH>
    KVD_DEVICE TwoWords of(const uint8_t* at) const {
        const unsigned lane = lane_word();
        if constexpr (WIDTH == 4) {
            return load(at + lane * row);
        }
        TwoWords all = {};
        if constexpr ((WIDTH & 2) != 0) {
            all = masked(load(at + lane % 2 * row), lane / 2 * 2, 0x33333333);
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
        TwoWords low = of<4>(at);
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

// In which order the positions of keys are cut: groups are the first halves of steps.
struct GroupOrder {
    unsigned quads;

    KVD_DEVICE unsigned steps() const { return quads / STEP_QUADS; }
    KVD_DEVICE unsigned slot(unsigned quad) const {
        return quad / CODE_GROUP * STEP_QUADS + quad % CODE_GROUP;
    }
};

template <>
struct Tensor<Groups> : Tensor<BitAlloc> {
    static constexpr unsigned SPANS = 1;

    // All codes of a page.
    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned) {
        KVD_EXPECT(tile.page_tokens <= GROUP_TILES * TILE_TOKENS);
        return {0, code_bytes(all(side, tile.tables), tile)};
    }

    KVD_DEVICE static GroupOrder order(const SideShape& side, const Tile&) {
        return {side.spread_row / CODE_GROUP};
    }

    // Where a run's codes of a tile are staged.
    KVD_DEVICE static const uint8_t* staged(const SpreadTable& table, const Tile& tile,
                                            unsigned index) {
        return tile.staged + tile.pieces[0].at + spread_start(table, tile, index);
    }
    // Where all tiles of the page are full.
    KVD_DEVICE static const uint8_t* staged(const Tile& tile, const SpreadRun& run) {
        const unsigned before = tile.page_tokens / TILE_TOKENS * run.before;
        return tile.staged + tile.pieces[0].at + before + tile.index * run.bytes;
    }
    KVD_DEVICE static bool is_full(const Tile& tile) {
        return tile.page_tokens % TILE_TOKENS == 0;
    }

    // Calls `use(group, words)` with the bytes of this lane's quad of every group, of its token in each of
    // the tiles.
    template <unsigned TILES, class Use>
    KVD_DEVICE static void each_group(const Tile (&tile)[TILES], unsigned token, Use use) {
        const SpreadTable& table = spread_table(tile[0].table);
        unsigned group = 0;
        for (unsigned index = 0; index < table.runs; index++) {
            const SpreadRun run = table.run[index];
            const unsigned end = run.width == 0 ? 0 : run.parts;
#pragma unroll 1
            for (unsigned part = 0; part < end; part++) {
                const GroupLevels levels(tile[0].table, run, part);
                if (KVD_RARELY(!is_full(tile[0]))) {
                    any_keys(tile, index, part, levels, token, group, use);
                    continue;
                }
                switch (run.width) {
                    case 1: key_groups<1>(tile, run, levels, token, group, use); break;
                    case 2: key_groups<2>(tile, run, levels, token, group, use); break;
                    case 3: key_groups<3>(tile, run, levels, token, group, use); break;
                    case 4: key_groups<4>(tile, run, levels, token, group, use); break;
                    default: key_groups<8>(tile, run, levels, token, group, use); break;
                }
            }
        }
    }

    // Those of a run, of one byte of their levels. `WIDTH`: 8 for all codes of more than four bits.
    template <unsigned WIDTH, unsigned TILES, class Use>
    KVD_DEVICE static void key_groups(const Tile (&tile)[TILES], const SpreadRun& run,
                                      const GroupLevels& levels, unsigned token, unsigned& group,
                                      Use use) {
        const KeyNibbles nibbles(run);
        const uint8_t* at[TILES];
#pragma unroll
        for (unsigned of = 0; of < TILES; of++) {
            at[of] = staged(tile[of], run);
        }
        const unsigned width = run.width;
        unsigned behind = token * CODE_GROUP;
        const unsigned end = group + run.len / GROUP_POSITIONS;
#pragma unroll 1
        for (; group < end; group++, behind += KeyNibbles::STEP) {
            uint32_t words[TILES];
#pragma unroll
            for (unsigned of = 0; of < TILES; of++) {
                if constexpr (WIDTH <= SPREAD_BITS_REGISTERS) {
                    words[of] = levels.of<WIDTH>(nibbles.of<WIDTH>(at[of], behind));
                } else {
                    words[of] = nibbles.wide(levels, width, at[of], behind);
                }
            }
            use(group, words);
        }
    }

    // The same where a tile of the page is not full.
    template <unsigned TILES, class Use>
    KVD_DEVICE static void any_keys(const Tile (&tile)[TILES], unsigned index, unsigned part,
                                    const GroupLevels& levels, unsigned token, unsigned& group,
                                    Use use) {
        const SpreadTable& table = spread_table(tile[0].table);
        const SpreadRun& run = table.run[index];
        const unsigned groups = run.len / GROUP_POSITIONS;
#pragma unroll 1
        for (unsigned mine = 0; mine < groups; mine++, group++) {
            uint32_t words[TILES] = {};
#pragma unroll 1
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                const unsigned quad = mine + (lane_word() % 2 + at % 2 * 2) * groups;
                const unsigned position = quad * CODE_GROUP + lane_word() / 2 * 2 + at / 2;
#pragma unroll
                for (unsigned of = 0; of < TILES; of++) {
                    const Codes codes = {staged(table, tile[of], index), run.width, tile[of].tokens,
                                         run.len, 0};
                    if (token < codes.tokens) {
                        const unsigned code = codes.one(codes.key_element(token, position));
                        words[of] |= levels.one(run, part, code) << 8 * at;
                    }
                }
            }
            use(group, words);
        }
    }

    // Calls `use(tile, words)` with both words of this lane's even channel, and of its odd one, of the group
    // in a place of the sums.
    template <unsigned TILES, class Use>
    KVD_DEVICE static void value_group(const Tile (&tile)[TILES], unsigned place, Use use) {
        const SpreadTable& table = spread_table(tile[0].table);
        const uint32_t job = table.job(place);
        if (job == GROUP_NONE) {
            return;
        }
        const unsigned index = job & 15;
        const SpreadRun run = table.run[index];
        const unsigned part = job >> 4 & 1;
        const unsigned position = (job >> 8) + lane_row() * GROUP_BLOCKS;
        const GroupLevels levels(tile[0].table, run, part);
        if (KVD_RARELY(!is_full(tile[0]))) {
            return any_values(tile, index, part, levels, position, use);
        }
        switch (run.width) {
            case 1: return value_words<1>(tile, run, levels, position, use);
            case 2: return value_words<2>(tile, run, levels, position, use);
            case 3: return value_words<3>(tile, run, levels, position, use);
            case 4: return value_words<4>(tile, run, levels, position, use);
            default: return value_words<8>(tile, run, levels, position, use);
        }
    }

    template <unsigned WIDTH, unsigned TILES, class Use>
    KVD_DEVICE static void value_words(const Tile (&tile)[TILES], const SpreadRun& run,
                                       const GroupLevels& levels, unsigned position, Use use) {
        const ValueNibbles nibbles(run);
#pragma unroll
        for (unsigned of = 0; of < TILES; of++) {
            const uint8_t* at = staged(tile[of], run) + position * CODE_GROUP;
            uint32_t words[GROUP_BLOCKS][2];
            if constexpr (WIDTH <= SPREAD_BITS_REGISTERS) {
                const TwoWords all = nibbles.of<WIDTH>(at);
#pragma unroll
                for (unsigned block = 0; block < GROUP_BLOCKS; block++) {
                    words[block][0] = levels.of<WIDTH>(all.word[block]);
                    words[block][1] = levels.of<WIDTH>(all.word[block] >> 16);
                }
            } else {
                nibbles.wide(levels, run.width, at, words);
            }
            use(of, words);
        }
    }

    template <unsigned TILES, class Use>
    KVD_DEVICE static void any_values(const Tile (&tile)[TILES], unsigned index, unsigned part,
                                      const GroupLevels& levels, unsigned position, Use use) {
        const SpreadTable& table = spread_table(tile[0].table);
        const SpreadRun& run = table.run[index];
#pragma unroll
        for (unsigned of = 0; of < TILES; of++) {
            const Codes codes = {staged(table, tile[of], index), run.width, tile[of].tokens, run.len,
                                 0};
            uint32_t words[GROUP_BLOCKS][2] = {};
#pragma unroll 1
            for (unsigned at = 0; at < CODE_GROUP; at++) {
#pragma unroll
                for (unsigned block_word = 0; block_word < 2 * GROUP_BLOCKS; block_word++) {
                    const unsigned block = block_word / 2;
                    const unsigned quad = lane_word() + at % 2 * CODE_GROUP;
                    const unsigned token = quad * CODE_GROUP + block_word % 2 * 2 + at / 2;
                    if (token < codes.tokens) {
                        const unsigned code =
                            codes.one(codes.value_element(token, position + block));
                        words[block][block_word % 2] |= levels.one(run, part, code) << 8 * at;
                    }
                }
            }
            use(of, words);
        }
    }

    // Calls `use(token, channel, value)` for the outliers of a tile and those behind it, tokens from the tile's
    // first on. There are few.
    template <class Use>
    KVD_DEVICE static void each_rest(const SideShape& side, const Tile& tile, Use use) {
        const SpreadTable& table = spread_table(tile.table);
        unsigned codes = tile.page_tokens / TILE_TOKENS * table.tile_bytes;
        if (KVD_RARELY(!is_full(tile))) {
            codes = code_bytes(table, tile);
        }
        const Outliers all(tile, codes);
        unsigned at = 0;
        if (KVD_RARELY(all.count > GROUP_OUTLIERS)) {
            at = all.from(tile.first_row);
        }
#pragma unroll 1
        for (; at < all.count; at++) {
            const unsigned row = all.row(at);
            const unsigned channel = all.coefficient(at);
            if (row >= tile.first_row && channel < side.dim) {
                use(row - tile.first_row, channel, all.value(at));
            }
        }
    }

    // Of the places of a channel's two bytes the first has it.
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

    KVD_DEVICE static unsigned place_of(const SideShape& side, const uint32_t* places,
                                        unsigned channel) {
        return reinterpret_cast<const uint8_t*>(&place(places, side.spread_places))[channel];
    }
};

}  // namespace kvd
