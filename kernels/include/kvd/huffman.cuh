// Huffman codes of a page, decoded into tiles of bytes in shared memory (docs/format.md "Codes";
// KVComp, 2509.00579 section 3.2). A chunk is 64 tokens, read by half a warp: each of its sixteen
// lanes has bits of its own, and takes the next 16-bit word of the chunk when it has too few. So a
// warp reads two chunks of one side in lock step. A look-up gives all codes of a symbol, or several
// short symbols at once, always as many in every lane. CPU reference: kvd-codec/src/huffman/streams/decode.rs;
// the tables are made by crates/kvd-cuda/src/huffman_tables.rs. outlier.cuh reads what the codes do not hold.
#pragma once

#include "codes.cuh"

namespace kvd {

constexpr unsigned CHUNK_TOKENS = 64;
constexpr unsigned CHUNK_TILES = CHUNK_TOKENS / TILE_TOKENS;
// Lanes of a chunk.
constexpr unsigned CODE_LANES = 16;
constexpr unsigned WORD_BITS = 16;
constexpr unsigned WORD_BYTES = 2;
// Words under way to a chunk's lanes: three pieces, each one copy per lane, and behind them the first
// once more, so that nobody who reads on has to look whether they end.
constexpr unsigned PIECE_BYTES = CODE_LANES * COPY_BYTES;
constexpr unsigned PIECES_BYTES = 3 * PIECE_BYTES;
constexpr unsigned RING_BYTES = PIECES_BYTES + PIECE_BYTES;
// An entry of a table holds codes, and the bits that they take: of one or two codes in the low byte, so
// that the entry itself says how far to shift, with the codes in the bytes that end it (one of two bytes
// too); of four codes in the bits from `ENTRY_LENGTH` on, with the codes in the low bytes.

// Consecutive positions of a row that share a table.
struct StreamRun {
    // First position, positions, and where the run begins in a decoded row.
    uint32_t first;
    uint32_t len;
    uint32_t place;
    // The table, from `LaneHead` on, and the bits that choose an entry; codes of an entry.
    uint32_t entries;
    uint32_t index_bits;
    uint32_t per_entry;
    // For a single symbol, where an entry holds several, and codes of a symbol.
    uint32_t single;
    uint32_t single_bits;
    uint32_t per_symbol;
    // Codes under one top-up, and the bits that they need.
    uint32_t per_word;
    uint32_t need;
    // Low bits of a code that follow its symbol as they are; the bias of a code.
    uint32_t raw_bits;
    int32_t bias;
    uint32_t unused[3];
};

// Header before the runs of a head; after them come, for values of a grid, `bias << 16 | place` of
// every channel, and the tables.
struct LaneHead {
    uint32_t runs;
    // Bytes of lengths per chunk: 4 when outliers follow the codes.
    uint32_t length_bytes;
    // Value of a code of 1, for a grid.
    float step;
    uint32_t channels;
};

KVD_DEVICE const LaneHead& lane_head(const uint8_t* lanes) {
    return *reinterpret_cast<const LaneHead*>(lanes);
}
KVD_DEVICE const StreamRun& lane_run(const uint8_t* lanes, unsigned run) {
    return reinterpret_cast<const StreamRun*>(lanes + sizeof(LaneHead))[run];
}

// The lane of a chunk that this thread is.
KVD_DEVICE unsigned code_lane() { return lane_index() % CODE_LANES; }
// Which of the warp's chunk lanes have a condition.
KVD_DEVICE uint32_t code_lanes_with(uint32_t ballot) {
    return ballot >> (lane_index() - code_lane()) & 0xFFFF;
}

// A chunk of a page, of no tokens when there is none to decode.
struct Chunk {
    const uint8_t* words;
    unsigned count;
    const uint8_t* outliers;
    unsigned outlier_words;
    unsigned tokens;
};

// Chunk `index` of a page whose codes, lengths first, begin at `codes`. What lengths say is behind
// `end`, where the payload does, is not read.
KVD_DEVICE Chunk chunk_of(const LaneHead& head, const uint8_t* codes, const uint8_t* end,
                          unsigned page_tokens, unsigned index) {
    const unsigned chunks = (page_tokens + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
    const bool outliers = head.length_bytes == 2 * WORD_BYTES;
    const auto length = [&](unsigned chunk, unsigned part) -> unsigned {
        return load16_any(codes + chunk * head.length_bytes + part * WORD_BYTES);
    };
    const uint8_t* at = codes + chunks * head.length_bytes;
    for (unsigned before = 0; before < index; before++) {
        at += WORD_BYTES * (length(before, 0) + (outliers ? length(before, 1) : 0));
    }
    const unsigned left = at < end ? unsigned(end - at) / WORD_BYTES : 0;
    const unsigned count = least(length(index, 0), left);
    const unsigned outlier_words = outliers ? least(length(index, 1), left - count) : 0;
    const unsigned tokens = least(CHUNK_TOKENS, page_tokens - index * CHUNK_TOKENS);
    return {at, count, at + WORD_BYTES * count, outlier_words, tokens};
}

// The words of a chunk on their way through shared memory, the bits of this lane, and how far the
// lanes of the chunk have come.
struct LaneReader {
    const uint8_t* from;
    // Bytes from `from` on: the end of the words, and the first that is not yet requested.
    unsigned end;
    unsigned asked;
    // Shared memory, and in it: the ring, the next word, and the end of the piece that it is in.
    uint8_t* shared;
    unsigned ring;
    unsigned next;
    unsigned due;
    // The chunk's lanes, and those of them before this one.
    uint32_t all;
    uint32_t below;
    // They end at bit 31; the place of the next one (only its low byte counts).
    uint32_t bits;
    uint32_t place;

    KVD_DEVICE LaneReader(const Chunk& chunk, uint8_t* shared, unsigned ring)
        : from(chunk.words - misaligned(chunk.words)),
          end(misaligned(chunk.words) + WORD_BYTES * chunk.count),
          asked(0),
          shared(shared),
          ring(ring),
          next(ring + misaligned(chunk.words)),
          due(ring + PIECE_BYTES),
          all(0xFFFFu << (lane_index() - code_lane())),
          below(all & ((1u << lane_index()) - 1)),
          bits(0),
          place(32) {
        ask(ring);
        ask(ring + PIECE_BYTES);
        copy_async_commit();
        ask(ring + 2 * PIECE_BYTES);
        copy_async_commit();
        copy_async_wait<1>();
        KVD_WARP_BARRIER();
    }

    // The next piece to its place, zeros after the last word.
    KVD_DEVICE void ask(unsigned to) {
        const unsigned at = asked + code_lane() * COPY_BYTES;
        const unsigned bytes = end > at ? least(end - at, COPY_BYTES) : 0;
        to += code_lane() * COPY_BYTES;
        copy_async16(shared + to, bytes > 0 ? from + at : from, bytes);
        asked += PIECE_BYTES;
    }

    // Before steps that take no more than a piece: where one is used up, the one after the next is there,
    // and another takes its place.
    KVD_DEVICE void turn() {
        if (KVD_BALLOT(next >= due) == 0) {
            return;
        }
        copy_async_wait<0>();
        const bool turns = next >= due;
        const unsigned first = ring + code_lane() * COPY_BYTES;
        if (turns && due == ring + PIECES_BYTES - PIECE_BYTES) {
            *reinterpret_cast<FourWords*>(shared + first + PIECES_BYTES) =
                *reinterpret_cast<const FourWords*>(shared + first);
        }
        KVD_WARP_BARRIER();
        if (turns) {
            ask(due - PIECE_BYTES);
            const unsigned back = due == ring + PIECES_BYTES ? PIECES_BYTES : 0;
            next -= back;
            due += PIECE_BYTES - back;
        }
        copy_async_commit();
    }

    // A word for every lane that wants codes and has fewer bits than they need, whose place is beyond `full`, in
    // the lanes' order. Gives the bits from the next on.
    template <bool EVEN>
    KVD_DEVICE uint32_t top_up(bool wants, unsigned full) {
        place &= 0xFF;
        const bool takes = wants && place > full;
        const uint32_t taking = KVD_BALLOT(takes);
        const uint8_t* mine = shared + (next + WORD_BYTES * ones(taking & below));
        const uint32_t word = EVEN ? load16(mine) : load16_any(mine);
        append_if(takes, bits, word);
        subtract_if(takes, place, WORD_BITS);
        next += WORD_BYTES * ones(taking & all);
        return rotated(bits, place);
    }

    // Goes on behind what an entry took.
    KVD_DEVICE void skip(uint32_t& window, uint32_t length) {
        window = rotated(window, length);
        place += length;
    }
};

// Runs, tables, and how a chunk's words lie.
template <bool EVEN_WORDS, bool WIDE_CODES>
struct Source {
    static constexpr bool EVEN = EVEN_WORDS;
    // Whether codes take two bytes.
    static constexpr bool WIDE = WIDE_CODES;
    // Source: shared memory, or global memory for tables that are too large for it. Beginning of
    // runs and tables.
    const uint8_t* memory;
    unsigned lanes;

    KVD_DEVICE const uint8_t* begin() const { return memory + lanes; }
};

// Where the quads of this lane go: of its first token that of position 0; what keys of the second tile,
// and high bytes of codes, are behind.
template <bool IS_KEY, bool WIDE>
struct Quads {
    uint8_t* first;
    unsigned tile;
    unsigned plane;

    KVD_DEVICE Quads(uint8_t* out, unsigned stride)
        : first(out), tile(TILE_TOKENS * stride * (WIDE ? 2 : 1)), plane(TILE_TOKENS * stride) {
        const unsigned lane = code_lane();
        const unsigned lanes = TILE_TOKENS / CODE_GROUP;
        first += IS_KEY ? lane * CODE_GROUP
                        : lane / lanes * tile + lane % lanes * CODE_GROUP * stride;
    }

    // Tokens, multiples of a chunk's lanes, and positions from the first on; of keys in fours.
    KVD_DEVICE void put(unsigned tokens, unsigned position, const Four& codes) const {
        uint8_t* to = first + tokens / TILE_TOKENS * tile + tokens % TILE_TOKENS * CODE_GROUP +
                      position * (IS_KEY ? TILE_TOKENS : CODE_GROUP);
        *reinterpret_cast<uint32_t*>(to) = codes.low;
        if (WIDE) {
            *reinterpret_cast<uint32_t*>(to + plane) = codes.high;
        }
    }
};

// Facts common to a run's steps: codes of an entry, codes under a top-up, whether low bits follow a
// symbol.
template <class Source, unsigned PER_ENTRY, unsigned PER_WORD, bool RAW>
struct Coding {
    static constexpr unsigned ENTRIES = CODE_GROUP / PER_ENTRY;
    // Whether a byte chooses an entry: all but the codes that are so long that each has a top-up of its own and
    // not because low bits follow.
    static constexpr bool BY_BYTE = PER_WORD > 1 || RAW;
    // Steps that take no more than a piece of the ring, a word for each lane and top-up; where words may begin at
    // odd addresses less, so that a lane that takes none does not look behind the ring.
    static constexpr unsigned STEPS = (PER_WORD == 1 ? 2 : 4) / (Source::EVEN ? 1 : 2);
    static_assert(STEPS * (CODE_GROUP / PER_WORD) * CODE_LANES * WORD_BYTES + !Source::EVEN <= PIECE_BYTES, "");

    LaneReader& reader;
    const StreamRun run;
    const Source source;
    unsigned entries;
    uint32_t mask;
    // The place of the next bit from which on there are too few.
    unsigned full;

    KVD_DEVICE Coding(const Source& source, LaneReader& reader, const StreamRun& run)
        : reader(reader),
          run(run),
          source(source),
          entries(KVD_UNIFORM(source.lanes + run.entries)),
          mask((1u << run.index_bits) - 1),
          full(32 - run.need) {}

    // `count` codes of this lane, of `len` that other lanes have. `FULL`: of four in every lane.
    template <bool FULL>
    KVD_DEVICE Four quad(unsigned len, unsigned count) {
        uint32_t found[ENTRIES] = {};
#pragma unroll
        for (unsigned first = 0; first < CODE_GROUP; first += PER_WORD) {
            if (!FULL && first >= len) {
                break;
            }
            uint32_t window = reader.template top_up<Source::EVEN>(FULL || first < count, full);
#pragma unroll
            for (unsigned at = first; at < first + PER_WORD; at += PER_ENTRY) {
                if (FULL || count >= at + PER_ENTRY) {
                    found[at / PER_ENTRY] = one(window);
                } else if (at < count) {
                    found[at / PER_ENTRY] = last(window, count - at);
                }
            }
        }
        return codes_of(found);
    }

    // An entry.
    KVD_DEVICE uint32_t one(uint32_t& window) {
        const unsigned at = BY_BYTE ? low_byte(window, 4, entries) : entries + 4 * (window & mask);
        const uint32_t entry = load32(source.memory + at);
        uint32_t low = 0;
        if (RAW) {
            // Behind the symbol, into the last byte.
            const uint32_t ahead = rotated(window, 8 - run.raw_bits);
            low = rotated(ahead, entry) & ((1u << run.raw_bits) - 1) << 24;
        }
        reader.skip(window, PER_ENTRY == 4 ? entry >> ENTRY_LENGTH : entry);
        return entry | low;
    }

    // Fewer codes than an entry holds: symbol by symbol, as an entry would hold them.
    KVD_DEVICE uint32_t last(uint32_t& window, unsigned count) {
        if (run.per_symbol == PER_ENTRY) {
            return one(window);
        }
        uint32_t codes = 0;
        for (unsigned at = 0; at < count; at++) {
            const uint32_t index = window & ((1u << run.single_bits) - 1);
            const uint32_t entry = load32(source.begin() + run.single + 4 * index);
            codes |= entry >> 24 << 8 * (at + (PER_ENTRY == 2 ? 2 : 0));
            reader.skip(window, entry);
        }
        return codes;
    }

    KVD_DEVICE static Four codes_of(const uint32_t (&found)[ENTRIES]) {
        if constexpr (PER_ENTRY == 4) {
            return {found[0] & ((1u << ENTRY_LENGTH) - 1), 0};
        } else if constexpr (PER_ENTRY == 2) {
            return {bytes_of(found[0], found[1], 0x7632), 0};
        } else {
            const auto bytes = [&](unsigned of) {
                return bytes_of(bytes_of(found[0], found[1], of), bytes_of(found[2], found[3], of),
                                0x5410);
            };
            // The third byte of entries, and the last.
            return Source::WIDE ? Four{bytes(0x62), bytes(0x73)} : Four{bytes(0x73), 0};
        }
    }

    // All quads of a run of keys: positions in fours, sixteen tokens at a time. `tokens`: of this
    // chunk, and of the longer one of the warp. `FULL`: 64 in both.
    template <bool FULL>
    KVD_DEVICE void keys(Range tokens, const Quads<true, Source::WIDE>& quads) {
        unsigned at = 0;
        if (FULL) {
            for (; at + CODE_GROUP <= run.len; at += CODE_GROUP) {
#pragma unroll
                for (unsigned first = 0; first < CHUNK_TOKENS; first += CODE_LANES) {
                    if (first / CODE_LANES % STEPS == 0) {
                        reader.turn();
                    }
                    quads.put(first, run.place + at, quad<true>(CODE_GROUP, CODE_GROUP));
                }
            }
        }
        for (; at < run.len; at += CODE_GROUP) {
            const unsigned len = least(CODE_GROUP, run.len - at);
            for (unsigned first = 0; first < tokens.to; first += CODE_LANES) {
                const bool has = first + code_lane() < tokens.from;
                reader.turn();
                const Four codes = quad<false>(len, has ? len : 0);
                if (has) {
                    quads.put(first, run.place + at, codes);
                }
            }
        }
    }

    // All quads of a run of values: four tokens of this lane, position after position.
    template <bool FULL>
    KVD_DEVICE void values(Range tokens, const Quads<false, Source::WIDE>& quads) {
        const unsigned token = CODE_GROUP * code_lane();
        const unsigned count = tokens.from > token ? least(CODE_GROUP, tokens.from - token) : 0;
        unsigned at = 0;
        if (FULL) {
            for (; at + STEPS <= run.len; at += STEPS) {
                reader.turn();
#pragma unroll
                for (unsigned step = 0; step < STEPS; step++) {
                    quads.put(0, run.place + at + step, quad<true>(CODE_GROUP, CODE_GROUP));
                }
            }
        }
        for (; at < run.len; at++) {
            reader.turn();
            const Four codes = quad<FULL>(CODE_GROUP, count);
            if (FULL || count > 0) {
                quads.put(0, run.place + at, codes);
            }
        }
    }
};

// Calls `use` with the coding of a run.
template <class Source, class Use>
KVD_DEVICE void with_coding(const Source& source, LaneReader& reader, const StreamRun& run, Use use) {
    if (Source::WIDE) {
        return use(Coding<Source, 1, 1, false>(source, reader, run));
    }
    if (run.raw_bits > 0) {
        return run.per_word == 1   ? use(Coding<Source, 1, 1, true>(source, reader, run))
               : run.per_word == 2 ? use(Coding<Source, 1, 2, true>(source, reader, run))
                                   : use(Coding<Source, 1, 4, true>(source, reader, run));
    }
    if (run.per_entry == 4) {
        return use(Coding<Source, 4, 4, false>(source, reader, run));
    }
    if (run.per_entry == 2) {
        return run.per_word == 4 ? use(Coding<Source, 2, 4, false>(source, reader, run))
                                 : use(Coding<Source, 2, 2, false>(source, reader, run));
    }
    return run.per_word == 1   ? use(Coding<Source, 1, 1, false>(source, reader, run))
           : run.per_word == 2 ? use(Coding<Source, 1, 2, false>(source, reader, run))
                               : use(Coding<Source, 1, 4, false>(source, reader, run));
}

// Decodes a chunk to `out`, tile after tile, through a ring, both in shared memory; the other half of the warp
// has a chunk of its own, of the same side and head. Codes of two bytes have a plane for each.
template <bool IS_KEY, class Source>
KVD_DEVICE void decode_chunk(const SideShape& side, const Source& source, const Chunk& chunk,
                             uint8_t* shared, unsigned ring, unsigned out) {
    // All lanes of the warp go through the same steps.
    const unsigned other = KVD_SHUFFLE(chunk.tokens, lane_index() ^ CODE_LANES);
    const Range tokens = {chunk.tokens, most(chunk.tokens, other)};
    const bool full = least(chunk.tokens, other) == CHUNK_TOKENS;
    const Quads<IS_KEY, Source::WIDE> quads(shared + out, side.stride);
    LaneReader reader(chunk, shared, ring);
    for (unsigned index = 0; index < lane_head(source.begin()).runs; index++) {
        with_coding(source, reader, lane_run(source.begin(), index), [&](auto coding) {
            if constexpr (IS_KEY) {
                full ? coding.template keys<true>(tokens, quads)
                     : coding.template keys<false>(tokens, quads);
            } else {
                full ? coding.template values<true>(tokens, quads)
                     : coding.template values<false>(tokens, quads);
            }
        });
    }
    copy_async_wait<0>();
    KVD_WARP_BARRIER();
}

}  // namespace kvd
