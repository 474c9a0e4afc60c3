// Codes of several widths as bytes with a sign, side by side, in shared memory: what tensor cores
// multiply. All threads spread a tile after it is staged; a job of it is a warp's, of codes of one width.
// A thread takes a word of every plane, which is of the codes of all tokens there, so a plane is loaded
// once. Levels of up to 16 codes are found in registers, others in shared memory; levels that no byte
// holds are two. Bytes of keys are in fours of neighbouring positions, `[positions / 4, tokens, 4]`,
// where tokens change places so that the lanes of a step meet no bank twice; of values in fours of
// tokens, `[tokens / 4, positions, 4]`. The host lays runs, jobs and levels out (kvd-cuda/src/unpack.rs).
#pragma once

#include "tensor.cuh"

namespace kvd {

// Whether a side's codes are spread.
template <class Side>
struct Spreads {
    static constexpr bool value = false;
    // Whether they are those of runs, which have units in the sums. Of runs that are not spread: bit_groups.cuh.
    static constexpr bool of_runs = false;
};
template <class Side>
struct InGroups {
    static constexpr bool value = Spreads<Side>::of_runs && !Spreads<Side>::value;
};

// Runs of a row, and codes whose levels registers hold.
constexpr unsigned SPREAD_RUNS_MAX = 9;
constexpr unsigned SPREAD_BITS_REGISTERS = 4;
// Items of a run that a warp unpacks at once: each is half of the codes that a word of its planes
// holds.
constexpr unsigned SPREAD_JOB = 2 * WARP_LANES;
constexpr unsigned SPREAD_CODES_REGISTERS = 1 << SPREAD_BITS_REGISTERS;

// Coefficients of one width.
struct alignas(16) SpreadRun {
    uint32_t len;
    uint32_t width;
    // First position in a row of bytes; of keys a multiple of four.
    uint32_t place;
    // Bytes of a level.
    uint32_t parts;
    // Bytes of a full tile's codes, and of those of the runs before.
    uint32_t bytes;
    uint32_t before;
    uint32_t unused;
    // Levels, bytes from the table on: of up to 16 codes sixteen high bytes, then low ones; else both
    // bytes of every code.
    uint32_t levels;
};

struct SpreadTable {
    uint32_t runs;
    uint32_t jobs;
    // Bytes of the codes of a full tile; positions, bytes from the table on.
    uint32_t tile_bytes;
    uint32_t positions;
    SpreadRun run[SPREAD_RUNS_MAX];

    // A run in the low byte, above it the first of its items, twice as many as it has codes of a token.
    KVD_DEVICE uint32_t job(unsigned index) const {
        return reinterpret_cast<const uint32_t*>(this + 1)[index];
    }
};

// A position: its coefficient, whether the next one has the low byte of the same, and the value of
// a byte of 1.
struct SpreadPosition {
    uint16_t channel;
    uint16_t is_split;
    float factor;
};

KVD_DEVICE const SpreadTable& spread_table(const uint8_t* table) {
    return *reinterpret_cast<const SpreadTable*>(table);
}

// Where a run's codes of a tile begin in a page.
KVD_DEVICE unsigned spread_start(const SpreadTable& table, const Tile& tile, unsigned index) {
    const SpreadRun& run = table.run[index];
    unsigned start = tile.page_tokens / TILE_TOKENS * run.before + tile.index * run.bytes;
    const unsigned left = tile.page_tokens % TILE_TOKENS;
    for (unsigned before = 0; left > 0 && before < index; before++) {
        start += plane_bytes(left * table.run[before].len, table.run[before].width);
    }
    return start;
}

// Which bytes of a page a run's codes of a tile are; none behind the last run.
KVD_DEVICE Span spread_span(const SpreadTable& table, const Tile& tile, unsigned index) {
    if (index >= table.runs) {
        return {0, 0};
    }
    const SpreadRun& run = table.run[index];
    const bool whole = tile.tokens == TILE_TOKENS;
    return {spread_start(table, tile, index),
            whole ? run.bytes : plane_bytes(tile.tokens * run.len, run.width)};
}

// Where four positions of a token of keys stand, of words `[positions / 4, tokens]`.
KVD_DEVICE uint8_t* spread_key_word(uint8_t* to, unsigned word) {
    return to + (word ^ (word >> 2 & (CODE_GROUP - 1) * STEP_COLUMNS)) * CODE_GROUP;
}

// Where the bytes of a run go. What it says of the run is in registers: who writes bytes may have written
// anything.
template <bool IS_KEY>
struct SpreadTo {
    uint8_t* to;
    // Positions of a row.
    unsigned row;
    unsigned len;
    unsigned place;
    unsigned parts;
    // Words of fours of positions, without those that the last, fewer than four, are in.
    unsigned whole;

    KVD_DEVICE SpreadTo(uint8_t* to, unsigned row, const SpreadRun& run)
        : to(to),
          row(row),
          len(run.len),
          place(run.place),
          parts(run.parts),
          whole(run.len / CODE_GROUP * TILE_TOKENS) {}

    // Words from the first four positions on; of two parts fours of both follow one another.
    KVD_DEVICE unsigned key_word(unsigned word, unsigned part) const {
        const unsigned fours = parts > 1 ? word & ~(TILE_TOKENS - 1) : 0;
        return place * (TILE_TOKENS / CODE_GROUP) + word + fours + part * TILE_TOKENS;
    }

    // The byte of one code.
    KVD_DEVICE uint8_t* byte(unsigned position, unsigned token, unsigned part) const {
        if (IS_KEY) {
            const unsigned word = position / CODE_GROUP * TILE_TOKENS + token;
            return spread_key_word(to, key_word(word, part)) + position % CODE_GROUP;
        }
        const unsigned at = token / CODE_GROUP * row + place + position * parts + part;
        return to + at * CODE_GROUP + token % CODE_GROUP;
    }

    // Four codes that are a word of each plane: number `at` of those of a chunk.
    KVD_DEVICE void put(unsigned chunk, unsigned at, unsigned part, uint32_t bytes) const {
        if (!IS_KEY) {
            const unsigned of_row = place + at * parts + part;
            *reinterpret_cast<uint32_t*>(to + (chunk * row + of_row) * CODE_GROUP) = bytes;
            return;
        }
        const unsigned word = chunk * len + at;
        if (word < whole) {
            *reinterpret_cast<uint32_t*>(spread_key_word(to, key_word(word, part))) = bytes;
            return;
        }
        // A word has those of several tokens.
        const unsigned rest = len % CODE_GROUP;
#pragma unroll 1
        for (unsigned of_word = 0; of_word < CODE_GROUP; of_word++) {
            const unsigned code = (word - whole) * CODE_GROUP + of_word;
            const unsigned token = rest == 3 ? code * 171 >> 9 : code >> (rest - 1);
            const unsigned position = len - rest + code - token * rest;
            *byte(position, token, part) = uint8_t(bytes >> 8 * of_word);
        }
    }
};

// The words of a run's planes that one thread spreads: number `at` of every second chunk from `first` on.
template <unsigned WIDTH>
struct SpreadWords {
    const uint8_t* at;
    unsigned first;
    // Bytes of a row of a plane: a word for every code of a token.
    unsigned row;

    // Low planes, those of one bit and of two, where a width has them: rows before them.
    static constexpr unsigned BEFORE_TWO = WIDTH & 12;
    static constexpr unsigned BEFORE_ONE = WIDTH & 14;

    KVD_DEVICE uint32_t word(unsigned of_row) const { return load32(at + of_row * row); }

    // Codes of chunks `chunk` and four further on, in the low and the high half of each byte.
    KVD_DEVICE uint32_t nibbles(unsigned chunk) const {
        if (WIDTH == 4) {
            return word(chunk);
        }
        uint32_t all = 0;
        if ((WIDTH & 2) != 0) {
            all = word(first) >> (chunk - first) & 0x33333333;
        }
        if ((WIDTH & 1) != 0) {
            all |= (word(BEFORE_ONE) >> chunk & 0x11111111) << BEFORE_ONE;
        }
        return all;
    }

    // Codes of a chunk, of five bits or more.
    KVD_DEVICE uint32_t bytes(unsigned chunk) const {
        if (WIDTH == 8) {
            return word(chunk);
        }
        uint32_t all = word(chunk % 4) >> (chunk & 4) & 0x0F0F0F0F;
        if ((WIDTH & 2) != 0) {
            const unsigned pair = chunk & ~1u;
            all |= (word(BEFORE_TWO + first) >> pair & 0x03030303) << BEFORE_TWO;
        }
        if ((WIDTH & 1) != 0) {
            all |= (word(BEFORE_ONE) >> chunk & 0x01010101) << BEFORE_ONE;
        }
        return all;
    }
};

// Bytes of eight codes of at most `WIDTH` bits: high or low ones, of sixteen.
template <unsigned WIDTH>
KVD_DEVICE uint32_t spread_level(const uint32_t (&levels)[4], uint32_t nibbles) {
    if (WIDTH < SPREAD_BITS_REGISTERS) {
        return bytes_of(levels[0], levels[1], nibbles);
    }
    const uint32_t upper = bytes_of(0xFF00, 0, nibbles >> 3 & 0x1111);
    const uint32_t low = bytes_of(levels[0], levels[1], nibbles & 0x7777);
    const uint32_t high = bytes_of(levels[2], levels[3], nibbles & 0x7777);
    return (low & ~upper) | (high & upper);
}

// One thread's part of unpacking a run: half of the codes that a word of its planes holds. Words
// are loaded before bytes are written, since the compiler must assume that they overlap.
template <unsigned WIDTH, bool IS_KEY>
KVD_DEVICE void spread_words(const SpreadTo<IS_KEY>& out, const SpreadWords<WIDTH>& words,
                             unsigned at, const uint8_t* levels) {
    if constexpr (WIDTH <= SPREAD_BITS_REGISTERS) {
        const uint32_t nibbles[2] = {words.nibbles(words.first), words.nibbles(words.first + 2)};
#pragma unroll 1
        for (unsigned part = 0; part < out.parts; part++) {
            uint32_t of_part[4];
#pragma unroll
            for (unsigned word = 0; word < 4; word++) {
                of_part[word] = load32(levels + SPREAD_CODES_REGISTERS * part + 4 * word);
            }
#pragma unroll
            for (unsigned step = 0; step < 2; step++) {
                const unsigned chunk = words.first + 2 * step;
                const uint32_t one = spread_level<WIDTH>(of_part, nibbles[step]);
                const uint32_t other = spread_level<WIDTH>(of_part, nibbles[step] >> 16);
                out.put(chunk, at, part, bytes_of(one, other, 0x6420));
                out.put(chunk + 4, at, part, bytes_of(one, other, 0x7531));
            }
        }
    } else {
        uint32_t codes[4];
#pragma unroll
        for (unsigned step = 0; step < 4; step++) {
            codes[step] = words.bytes(words.first + 2 * step);
        }
#pragma unroll
        for (unsigned step = 0; step < 4; step++) {
            const unsigned chunk = words.first + 2 * step;
            uint32_t level[CODE_GROUP];
#pragma unroll
            for (unsigned code = 0; code < CODE_GROUP; code++) {
                level[code] = load16(levels + 2 * bytes_of(codes[step], 0, 0x4440 + code));
            }
            const uint32_t first = bytes_of(level[0], level[1], 0x5140);
            const uint32_t second = bytes_of(level[2], level[3], 0x5140);
            out.put(chunk, at, 0, bytes_of(first, second, 0x5410));
            if (out.parts > 1) {
                out.put(chunk, at, 1, bytes_of(first, second, 0x7632));
            }
        }
    }
}

// A tile's codes that are no whole words, one by one.
template <bool IS_KEY>
KVD_DEVICE void spread_any(const SpreadTo<IS_KEY>& out, const Codes& codes, const uint8_t* levels) {
    const unsigned token = lane_index();
    if (token >= codes.tokens) {
        return;
    }
    for (unsigned position = 0; position < codes.per_row; position++) {
        const unsigned element = IS_KEY ? codes.key_element(token, position)
                                        : codes.value_element(token, position);
        const unsigned code = codes.one(element);
        for (unsigned part = 0; part < out.parts; part++) {
            const unsigned level = codes.bits <= SPREAD_BITS_REGISTERS
                                       ? SPREAD_CODES_REGISTERS * part + code
                                       : 2 * code + part;
            *out.byte(position, token, part) = levels[level];
        }
    }
}

// Item `item` of a run's, whose codes are staged at `staged`: words of the planes, one after another for
// one half of their codes, then for the other.
template <bool IS_KEY>
KVD_DEVICE void spread_item(const SpreadTo<IS_KEY>& out, const uint8_t* staged, unsigned width,
                            unsigned item, const uint8_t* levels) {
    const unsigned half = item >= out.len ? 1 : 0;
    const unsigned at = item - half * out.len;
    const uint8_t* word = staged + CODE_GROUP * at;
    const unsigned row = CODE_GROUP * out.len;
    switch (width) {
        case 1: return spread_words<1>(out, {word, half, row}, at, levels);
        case 2: return spread_words<2>(out, {word, half, row}, at, levels);
        case 3: return spread_words<3>(out, {word, half, row}, at, levels);
        case 4: return spread_words<4>(out, {word, half, row}, at, levels);
        case 5: return spread_words<5>(out, {word, half, row}, at, levels);
        case 6: return spread_words<6>(out, {word, half, row}, at, levels);
        case 7: return spread_words<7>(out, {word, half, row}, at, levels);
        default: return spread_words<8>(out, {word, half, row}, at, levels);
    }
}

// Spreads a tile to `to`.
template <bool IS_KEY>
KVD_DEVICE void spread(const SideShape& side, const Tile& tile, uint8_t* to) {
    const SpreadTable& table = spread_table(tile.table);
    const unsigned jobs = table.jobs;
    for (unsigned index = warp_index(); index < jobs; index += ATTEND_WARPS) {
        const uint32_t job = table.job(index);
        const SpreadRun run = table.run[job & 255];
        const unsigned first = job >> 8;
        const uint8_t* staged = tile.staged + tile.pieces[job & 255].at;
        const SpreadTo<IS_KEY> out(to, side.spread_row, run);
        const uint8_t* levels = tile.table + run.levels;
        if (tile.tokens == TILE_TOKENS && shared_misaligned(staged) % CODE_GROUP == 0) {
            const unsigned end = least(2 * run.len, first + SPREAD_JOB);
            for (unsigned item = first + lane_index(); item < end; item += WARP_LANES) {
                spread_item(out, staged, run.width, item, levels);
            }
        } else if (first == 0) {
            spread_any(out, {staged, run.width, tile.tokens, run.len, 0}, levels);
        }
    }
}

// In which order the positions of spread keys are summed: as they stand.
struct SpreadOrder {
    unsigned quads;

    KVD_DEVICE unsigned steps() const { return quads / STEP_QUADS; }
    KVD_DEVICE unsigned slot(unsigned quad) const { return quad; }

    // Calls `use(step, words)` with the bytes of this lane's two quads of each step, of one token.
    template <class Use>
    KVD_DEVICE void each(const Codes& codes, unsigned token, Use use) const {
        const unsigned swapped = token ^ lane_word() * STEP_COLUMNS;
        const uint8_t* at = codes.bytes + (lane_word() * TILE_TOKENS + swapped) * CODE_GROUP;
        constexpr unsigned QUADS_BYTES = CODE_GROUP * TILE_TOKENS * CODE_GROUP;
        const unsigned count = steps();
#pragma unroll 2
        for (unsigned step = 0; step < count; step++) {
            const uint32_t words[2] = {load32(at), load32(at + QUADS_BYTES)};
            use(step, words);
            at += 2 * QUADS_BYTES;
        }
    }
};

}  // namespace kvd
