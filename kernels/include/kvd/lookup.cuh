// Codes that stand for bytes with a sign, one or more each, that tensor cores multiply: entries of
// codebooks whose values are whole numbers of a unit, levels and directions as high and low bytes.
// They are looked up into the words of the products' second factor, four neighbours each. Entries of
// two bytes of at most 16 codes are found in registers, eight codes of a plane's word at once; others
// in shared memory, a word at a time, where each word stands several times so that lanes meet fewer
// banks twice. The host lays the table out (kvd-cuda/src/lookup.rs).
#pragma once

#include "tensor.cuh"

namespace kvd {

// Words that a look-up gives a lane: of keys two steps, of values four channels.
constexpr unsigned LOOKED_UP = 4;
// Codes whose bytes registers hold.
constexpr unsigned REGISTER_CODES = 16;

// Where a side's bytes are.
struct Lookup {
    // This lane's copy in shared memory; all entries.
    const uint8_t* mine;
    const uint8_t* all;
    // Entries in shared memory, and the bytes from a word to the next there.
    unsigned cached;
    unsigned stride;
    bool whole;
    bool in_registers;
    // Bytes of an entry and the words that it takes, powers of two; and of which one that is.
    unsigned bytes;
    unsigned words;
    unsigned words_log2;
    // Bytes from the codebook of a code of a row to the next one's, there; 0 where all share one.
    unsigned next;
    unsigned next_of_all;

    KVD_DEVICE Lookup(const SideShape& side, const Tile& tile)
        : mine(tile.table + 4 * (lane_index() & ((1u << side.entry_copies) - 1))),
          all(tile.tables + side.entries),
          cached(side.entry_count),
          stride(4u << side.entry_copies),
          whole(side.entry_count >> side.bits != 0),
          in_registers(Lookup::registers(side)),
          bytes(side.entry_bytes),
          words(words_of(side)),
          words_log2(ones(words - 1)),
          next(side.sets > 1 ? cached * words * stride : 0),
          next_of_all(side.sets > 1 ? 4 * words << side.bits : 0) {}

    KVD_DEVICE static bool registers(const SideShape& side) {
        return side.entry_bytes == 2 && 1u << side.bits <= REGISTER_CODES && side.sets == 1;
    }
    KVD_DEVICE static unsigned words_of(const SideShape& side) {
        return (side.entry_bytes + 3) / 4;
    }

    // Copies the entries that are to stand in shared memory.
    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        const unsigned count = registers(side) ? 2 * REGISTER_CODES / 4
                                               : side.entry_count * words_of(side);
        const uint32_t* from = reinterpret_cast<const uint32_t*>(tables + side.entries);
        uint32_t* to = reinterpret_cast<uint32_t*>(table);
        for (unsigned set = 0; set < side.sets; set++) {
            for (unsigned at = thread_index(); at < count << side.entry_copies; at += threads) {
                to[at] = from[at >> side.entry_copies];
            }
            from += words_of(side) << side.bits;
            to += count << side.entry_copies;
        }
    }

    // A word of the entry of a row's code number `position`. `WHOLE`: shared memory has all entries.
    template <bool WHOLE, bool ONE_BOOK>
    KVD_DEVICE uint32_t word(unsigned position, unsigned code, unsigned of, unsigned at) const {
        const unsigned index = code * of + at;
        const uint8_t* near = mine + (ONE_BOOK ? 0 : position * next) + index * stride;
        if (WHOLE) {
            return load32(near);
        }
        const uint8_t* far = all + (ONE_BOOK ? 0 : position * next_of_all) + 4 * index;
        return load32(code < cached ? near : far);
    }

    // Bytes of a channel for eight codes of four bits, that stand in a word in the order of `nibbles`.
    struct alignas(16) Channel {
        uint32_t word[REGISTER_CODES / 4];

        KVD_DEVICE uint32_t four(uint32_t nibbles) const {
            const uint32_t upper = bytes_of(0xFF00, 0, nibbles >> 3 & 0x1111);
            const uint32_t low = bytes_of(word[0], word[1], nibbles & 0x7777);
            const uint32_t high = bytes_of(word[2], word[3], nibbles & 0x7777);
            return (low & ~upper) | (high & upper);
        }
    };

    KVD_DEVICE Channel channel(unsigned at) const {
        return reinterpret_cast<const Channel*>(mine)[at];
    }

    // A byte of a code, whatever its tile.
    KVD_DEVICE uint32_t byte(unsigned position, unsigned code, unsigned at) const {
        const uint8_t* book = all + position * next_of_all;
        return book[in_registers ? at * REGISTER_CODES + code : code * 4 * words + at];
    }

    // Two words of each channel for eight codes of few bits, four in the low halves of `nibbles`' bytes.
    KVD_DEVICE static void of_registers(const Channel (&channels)[2], uint32_t nibbles,
                                        uint32_t (&to)[LOOKED_UP]) {
#pragma unroll
        for (unsigned at = 0; at < 2; at++) {
            to[2 * at] = channels[at].four(nibbles);
            to[2 * at + 1] = channels[at].four(nibbles >> 16);
        }
    }

    // The entries of four codes, the row's from `first` on, if they take a word each; of two, if those
    // go into one; else four words from number `part` of fours on of the entries.
    template <bool WHOLE, unsigned BYTES>
    KVD_DEVICE void of_codes(const Four& four, unsigned first, unsigned part,
                             uint32_t (&to)[LOOKED_UP]) const {
#pragma unroll
        for (unsigned at = 0; at < LOOKED_UP; at++) {
            if (BYTES == 4) {
                to[at] = word<WHOLE, true>(0, four.code(at), 1, 0);
                continue;
            }
            if (BYTES == 8) {
                to[at] = word<WHOLE, true>(0, four.code(2 * part + at / 2), 2, at % 2);
                continue;
            }
            const unsigned number = part * LOOKED_UP + at;
            const unsigned of_code = number & (words - 1);
            const unsigned code = number >> words_log2;
            to[at] = word<WHOLE, false>(first + code, four.code(code), words, of_code);
        }
    }
    template <bool WHOLE, bool ONE_BOOK>
    KVD_DEVICE void of_pairs(const Four (&fours)[2], const unsigned (&first)[2],
                             uint32_t (&to)[LOOKED_UP]) const {
#pragma unroll
        for (unsigned at = 0; at < LOOKED_UP; at++) {
            const Four& four = fours[at / 2];
            const unsigned code = at % 2 * 2;
            const unsigned position = first[at / 2] + code;
            to[at] = bytes_of(word<WHOLE, ONE_BOOK>(position, four.code(code), 1, 0),
                              word<WHOLE, ONE_BOOK>(position + 1, four.code(code + 1), 1, 0),
                              0x5410);
        }
    }

    // Four neighbouring channels, `quad` of the row, of this lane's eight tokens.
    KVD_DEVICE void value_words(const Codes& codes, unsigned quad,
                                uint32_t (&to)[LOOKED_UP][2]) const {
        if (!codes.words()) {
            return any_values(codes, quad, to);
        }
        if (in_registers) {
            return register_values(codes, quad, to);
        }
        return whole ? looked_up_values<true>(codes, quad, to)
                     : looked_up_values<false>(codes, quad, to);
    }

    KVD_DEVICE void any_values(const Codes& codes, unsigned quad,
                               uint32_t (&to)[LOOKED_UP][2]) const {
#pragma unroll
        for (unsigned at = 0; at < 2 * LOOKED_UP; at++) {
            const unsigned channel = quad * LOOKED_UP + at / 2;
            const unsigned position = quotient(channel, bytes);
            const unsigned first = (at % 2 * CODE_GROUP + lane_word()) * CODE_GROUP;
            uint32_t of_tokens = 0;
#pragma unroll 1
            for (unsigned token = first; token < least(codes.tokens, first + CODE_GROUP); token++) {
                const unsigned code = codes.one(codes.value_element(token, position));
                of_tokens |= byte(position, code, channel - position * bytes) << 8 * (token - first);
            }
            to[at / 2][at % 2] = of_tokens;
        }
    }

    KVD_DEVICE void register_values(const Codes& codes, unsigned quad,
                                    uint32_t (&to)[LOOKED_UP][2]) const {
        const Channel channels[2] = {channel(0), channel(1)};
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            const unsigned position = 2 * quad + half;
            // Tokens of the first word in the low bits, those of the second above them: as in a plane.
            uint32_t nibbles;
            if (codes.bits == 4) {
                const unsigned row = lane_word() * codes.per_row + position;
                nibbles = load32(codes.bytes + row * CODE_GROUP);
            } else {
                const unsigned token = lane_word() * CODE_GROUP;
                const unsigned second = codes.value_element(token + TILE_TOKENS / 2, position);
                nibbles = codes.four(codes.value_element(token, position)).low |
                          codes.four(second).low << 4;
            }
            uint32_t all[LOOKED_UP];
            of_registers(channels, nibbles, all);
#pragma unroll
            for (unsigned at = 0; at < 2; at++) {
                to[2 * half + at][0] = bytes_of(all[2 * at], all[2 * at + 1], 0x6420);
                to[2 * half + at][1] = bytes_of(all[2 * at], all[2 * at + 1], 0x7531);
            }
        }
    }

    template <bool WHOLE>
    KVD_DEVICE void looked_up_values(const Codes& codes, unsigned quad,
                                     uint32_t (&to)[LOOKED_UP][2]) const {
        const unsigned position = bytes == 2 ? 2 * quad : quad >> words_log2;
        const unsigned of_code = bytes == 2 ? 0 : quad & (words - 1);
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            const unsigned token = (half * CODE_GROUP + lane_word()) * CODE_GROUP;
            const Four four = value_four(codes, token, position);
            uint32_t of_token[CODE_GROUP];
#pragma unroll
            for (unsigned at = 0; at < CODE_GROUP; at++) {
                of_token[at] = word<WHOLE, false>(position, four.code(at), words, of_code);
            }
            if (bytes == 2) {
                const Four following = value_four(codes, token, position + 1);
#pragma unroll
                for (unsigned at = 0; at < CODE_GROUP; at++) {
                    const uint32_t second =
                        word<WHOLE, false>(position + 1, following.code(at), 1, 0);
                    of_token[at] = bytes_of(of_token[at], second, 0x5410);
                }
            }
            transpose(of_token, half, to);
        }
    }

    KVD_DEVICE static Four value_four(const Codes& codes, unsigned token, unsigned position) {
        if (codes.bits == 8) {
            return {load32(codes.bytes + token * codes.per_row + position * CODE_GROUP), 0};
        }
        return codes.four(codes.value_element(token, position));
    }

    // Four channels of four tokens to four tokens of four channels.
    KVD_DEVICE static void transpose(const uint32_t (&from)[CODE_GROUP], unsigned half,
                                     uint32_t (&to)[LOOKED_UP][2]) {
        uint32_t pairs[2][2];
#pragma unroll
        for (unsigned at = 0; at < 2; at++) {
            pairs[at][0] = bytes_of(from[2 * at], from[2 * at + 1], 0x5140);
            pairs[at][1] = bytes_of(from[2 * at], from[2 * at + 1], 0x7362);
        }
#pragma unroll
        for (unsigned at = 0; at < LOOKED_UP; at++) {
            const unsigned which = at % 2 == 0 ? 0x5410 : 0x7632;
            to[at][half] = bytes_of(pairs[0][at / 2], pairs[1][at / 2], which);
        }
    }
};

// In which order the bytes of a key are summed: in words, of which a chunk gives each of four lanes
// four, two steps. Of entries in registers a chunk's lane has eight codes, four from the first half of
// the row and as many from the second, as a word of a plane holds them; else codes as they follow one
// another, four of four bytes in a chunk. `BYTES`: of an entry, of which shared memory has all; 0 for any.
template <unsigned BYTES = 0>
struct LookupOrder {
    Lookup lookup;
    unsigned per_row;
    unsigned half;
    unsigned chunks;
    // Four bytes each, with those that are nothing.
    unsigned quads;

    // A byte of a code.
    struct Term {
        unsigned code;
        unsigned byte;
    };

    KVD_DEVICE LookupOrder(const SideShape& side, const Tile& tile, unsigned codes)
        : lookup(side, tile), per_row(codes) {
        const unsigned fours = (codes + CODE_GROUP - 1) / CODE_GROUP;
        half = (fours + 1) / 2;
        const unsigned of_lane = ((lookup.in_registers ? half : fours) + CODE_GROUP - 1) / CODE_GROUP;
        chunks = lookup.in_registers ? of_lane : (of_lane * bytes() + 3) / 4;
        quads = steps() * STEP_QUADS;
    }

    KVD_DEVICE unsigned bytes() const { return BYTES == 0 ? lookup.bytes : BYTES; }
    KVD_DEVICE unsigned steps() const { return 2 * chunks; }
    KVD_DEVICE unsigned slot(unsigned quad) const { return quad; }

    // Meaning of byte `at` of the word at `slot`; for nothing, a code that no row has.
    KVD_DEVICE Term term(unsigned slot, unsigned at) const {
        const unsigned lane = slot % CODE_GROUP;
        const unsigned word = slot / CODE_GROUP;
        if (lookup.in_registers) {
            const unsigned quad = word / LOOKED_UP * CODE_GROUP + lane;
            const unsigned code = (quad + at % 2 * half) * CODE_GROUP + word % 2 * 2 + at / 2;
            return {quad < half ? code : per_row, word % LOOKED_UP / 2};
        }
        const unsigned fours = quotient(word, bytes());
        const unsigned byte = (word - fours * bytes()) * 4 + at;
        const unsigned code = quotient(byte, bytes());
        return {(fours * CODE_GROUP + lane) * CODE_GROUP + code, byte - code * bytes()};
    }

    // Query values for the word at `slot`: `value(term)`, nothing where no row has a code.
    template <class Value>
    KVD_DEVICE void fold(unsigned slot, float (&values)[CODE_GROUP], Value value) const {
#pragma unroll
        for (unsigned at = 0; at < CODE_GROUP; at++) {
            const Term of = term(slot, at);
            values[at] = of.code < per_row ? value(of) : 0;
        }
    }

    // Calls `use(step, words)` with this lane's words of each step, of one token.
    template <class Use>
    KVD_DEVICE void each(const Codes& codes, unsigned token, Use use) const {
        if (!codes.words()) {
            return each_of_any(codes, token, use);
        }
        if (BYTES != 4 && lookup.in_registers) {
            return codes.bits == 4 && per_row % (2 * CODE_GROUP) == 0
                       ? each_of_registers<true>(codes, token, use)
                       : each_of_registers<false>(codes, token, use);
        }
        if constexpr (BYTES != 0) {
            return codes.bits == 8 ? each_of<8, true, BYTES>(codes, token, use)
                                   : each_of<0, true, BYTES>(codes, token, use);
        }
        if (codes.bits == 12 && per_row % (2 * CODE_GROUP) == 0 && lookup.next == 0) {
            if (lookup.bytes == 4) {
                return lookup.whole ? each_of<12, true, 4>(codes, token, use)
                                    : each_of<12, false, 4>(codes, token, use);
            }
            if (lookup.bytes == 8) {
                return lookup.whole ? each_of<12, true, 8>(codes, token, use)
                                    : each_of<12, false, 8>(codes, token, use);
            }
        }
        if (codes.bits != 8) {
            return each_of<0, false, 0>(codes, token, use);
        }
        if (!lookup.whole) {
            return each_of<8, false, 0>(codes, token, use);
        }
        if (lookup.next == 0 && lookup.bytes == 2) {
            return each_of<8, true, 2>(codes, token, use);
        }
        return lookup.next == 0 && lookup.bytes == 4 ? each_of<8, true, 4>(codes, token, use)
                                                     : each_of<8, true, 0>(codes, token, use);
    }

    template <class Use>
    KVD_DEVICE static void use_both(Use use, unsigned chunk, const uint32_t (&words)[LOOKED_UP]) {
        const uint32_t first[2] = {words[0], words[1]};
        const uint32_t second[2] = {words[2], words[3]};
        use(2 * chunk, first);
        use(2 * chunk + 1, second);
    }

    // This lane's of four quads of codes; for those beyond the last the last, whose digits are nothing.
    KVD_DEVICE unsigned quad_of(unsigned fours) const {
        return least(fours * CODE_GROUP + lane_word(), per_row / CODE_GROUP - 1);
    }

    // `BITS` of a code: 8, 12 in two planes, 0 for any.
    template <unsigned BITS>
    KVD_DEVICE Four key_four(const Codes& codes, unsigned token, unsigned quad) const {
        const unsigned element = (quad * TILE_TOKENS + token) * CODE_GROUP;
        if (BITS == 8) {
            return {load32(codes.bytes + element), 0};
        }
        if (BITS == 12) {
            // The second plane has the first half of the codes in its low bits.
            const unsigned size = TILE_TOKENS / 2 * per_row;
            const bool upper = element >= size;
            const uint8_t* plane = codes.bytes + 2 * size;
            const uint32_t high = load32(plane + (upper ? element - size : element));
            return {load32(codes.bytes + element), high >> (upper ? 4 : 0) & 0x0F0F0F0F};
        }
        return codes.four(element);
    }

    // `WHOLE`: shared memory has all entries. `OF_ENTRY`: its bytes, 0
    // for any number.
    template <unsigned BITS, bool WHOLE, unsigned OF_ENTRY, class Use>
    KVD_DEVICE void each_of(const Codes& codes, unsigned token, Use use) const {
#pragma unroll 2
        for (unsigned chunk = 0; chunk < chunks; chunk++) {
            uint32_t words[LOOKED_UP];
            if ((OF_ENTRY == 0 ? lookup.bytes : OF_ENTRY) == 2) {
                const unsigned one = quad_of(2 * chunk);
                const unsigned other = quad_of(2 * chunk + 1);
                const Four both[2] = {key_four<BITS>(codes, token, one),
                                      key_four<BITS>(codes, token, other)};
                const unsigned first[2] = {one * CODE_GROUP, other * CODE_GROUP};
                lookup.template of_pairs<WHOLE, OF_ENTRY == 2>(both, first, words);
            } else {
                const unsigned log2 = OF_ENTRY == 0 ? lookup.words_log2 : OF_ENTRY / 8;
                const unsigned quad = quad_of(chunk >> log2);
                const unsigned part = chunk & ((1u << log2) - 1);
                lookup.template of_codes<WHOLE, OF_ENTRY>(key_four<BITS>(codes, token, quad),
                                                          quad * CODE_GROUP, part, words);
            }
            use_both(use, chunk, words);
        }
    }

    // `PLANE`: a word of the plane has both halves' codes.
    template <bool PLANE, class Use>
    KVD_DEVICE void each_of_registers(const Codes& codes, unsigned token, Use use) const {
        const Lookup::Channel channels[2] = {lookup.channel(0), lookup.channel(1)};
#pragma unroll 2
        for (unsigned chunk = 0; chunk < chunks; chunk++) {
            const unsigned quad = least(chunk * CODE_GROUP + lane_word(), half - 1);
            const unsigned element = (quad * TILE_TOKENS + token) * CODE_GROUP;
            const uint32_t nibbles =
                PLANE ? load32(codes.bytes + element)
                      : key_four<0>(codes, token, quad).low |
                            key_four<0>(codes, token, least(quad + half, per_row / CODE_GROUP - 1)).low << 4;
            uint32_t words[LOOKED_UP];
            Lookup::of_registers(channels, nibbles, words);
            use_both(use, chunk, words);
        }
    }

    // For any codes, a byte at a time.
    template <class Use>
    KVD_DEVICE void each_of_any(const Codes& codes, unsigned token, Use use) const {
#pragma unroll 1
        for (unsigned step = 0; step < steps(); step++) {
            uint32_t words[2] = {0, 0};
#pragma unroll 1
            for (unsigned at = 0; at < 2 * CODE_GROUP; at++) {
                const unsigned slot = (2 * step + at / CODE_GROUP) * CODE_GROUP + lane_word();
                const Term of_slot = term(slot, at % CODE_GROUP);
                if (token < codes.tokens && of_slot.code < per_row) {
                    const unsigned code = codes.one(codes.key_element(token, of_slot.code));
                    const uint32_t byte = lookup.byte(of_slot.code, code, of_slot.byte) << 8 * (at % CODE_GROUP);
                    words[0] |= at < CODE_GROUP ? byte : 0;
                    words[1] |= at < CODE_GROUP ? 0 : byte;
                }
            }
            use(step, words);
        }
    }
};

// The low one of a level's two bytes counts 1/256 of the high one.
KVD_DEVICE float byte_worth(unsigned byte) { return byte % 2 == 0 ? 1.0f : 1.0f / 256.0f; }

// Base of the sides with such codes.
template <class Side>
struct LookedUp : Side {
    static constexpr bool SIGNED = true;
    static constexpr bool BIASED = false;
    static constexpr bool LOOKS_UP = true;
    static constexpr unsigned WEIGHT_SETS = 0;
    static constexpr bool WANTS_WEIGHTS = false;
    static constexpr bool MAY_SCALE_CHANNELS = false;

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        Lookup::prepare(side, tables, table, threads);
    }

    KVD_DEVICE static int32_t bias(const Tile&, unsigned) { return 0; }
    KVD_DEVICE static void add_rests(const SideShape&, const Tile&, const float*, unsigned,
                                     unsigned, float (&)[2]) {}
    template <class Add>
    KVD_DEVICE static void add_rests(const SideShape&, const Tile&, const uint32_t*, const float*,
                                     Add) {}
};

}  // namespace kvd
