// Huffman codes of a page, decoded into tiles of bytes in shared memory (docs/format.md "Codes";
// KVComp, 2509.00579 section 3.2). A chunk is 64 tokens, read by half a warp: each of its sixteen
// lanes has bits of its own, and takes the next 16-bit word of the chunk when it has too few. So a
// warp reads two chunks of one side in lock step. A look-up gives all codes of a symbol, or several
// short symbols at once, always as many in every lane. CPU reference: kvd-codec/src/lanes/decode.rs;
// the tables are made by crates/kvd-cuda/src/lanes.rs. outlier.cuh reads what the codes do not hold.
#pragma once

#include "codes.cuh"

namespace kvd {

constexpr unsigned CHUNK_TOKENS = 64;
constexpr unsigned CHUNK_TILES = CHUNK_TOKENS / TILE_TOKENS;
// Lanes of a chunk.
constexpr unsigned CODE_LANES = 16;
constexpr unsigned WORD_BITS = 16;
constexpr unsigned WORD_BYTES = 2;
// Words under way to a chunk's lanes: four pieces, each one copy per lane. No step takes more than
// 64 words.
constexpr unsigned PIECE_BYTES = CODE_LANES * COPY_BYTES;
constexpr unsigned RING_BYTES = 4 * PIECE_BYTES;
// An entry of a table holds codes in its low bytes, and in these high bits the bits it takes.
constexpr unsigned ENTRY_LENGTH = 27;

// Consecutive positions of a row that share a table.
struct LaneRun {
    // First position, positions, and where the run begins in a decoded row.
    uint32_t first;
    uint32_t len;
    uint32_t place;
    // The table, from `LaneHead` on, and the bits that choose an entry; codes of an entry.
    uint32_t entries;
    uint32_t index_bits;
    uint32_t per_entry;
    // The same for a single symbol, where an entry holds several, and codes of a symbol.
    uint32_t single;
    uint32_t single_bits;
    uint32_t per_symbol;
    // Codes under one top-up, and the bits that they need.
    uint32_t per_word;
    uint32_t need;
    // Low bits of a code that follow its symbol as they are; what is taken from a code.
    uint32_t raw_bits;
    int32_t bias;
    uint32_t unused[3];
};

// What precedes the runs of a head; after them come, for a grid, `bias << 16 | place` of every
// channel, and the tables.
struct LaneHead {
    uint32_t runs;
    // Bytes of lengths per chunk: 4 when outliers follow the codes.
    uint32_t length_bytes;
    // What a code of 1 is worth, of a grid.
    float step;
    uint32_t channels;
};

KVD_DEVICE const LaneHead& lane_head(const uint8_t* lanes) {
    return *reinterpret_cast<const LaneHead*>(lanes);
}
KVD_DEVICE const LaneRun& lane_run(const uint8_t* lanes, unsigned run) {
    return reinterpret_cast<const LaneRun*>(lanes + sizeof(LaneHead))[run];
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

// Chunk `index` of a page whose codes, lengths first, begin at `codes`.
KVD_DEVICE Chunk chunk_of(const LaneHead& head, const uint8_t* codes, unsigned page_tokens,
                          unsigned index) {
    const unsigned chunks = (page_tokens + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
    const bool outliers = head.length_bytes == 2 * WORD_BYTES;
    const auto length = [&](unsigned chunk, unsigned part) -> unsigned {
        return load16_any(codes + chunk * head.length_bytes + part * WORD_BYTES);
    };
    const uint8_t* at = codes + chunks * head.length_bytes;
    for (unsigned before = 0; before < index; before++) {
        at += WORD_BYTES * (length(before, 0) + (outliers ? length(before, 1) : 0));
    }
    const unsigned count = length(index, 0);
    const unsigned tokens = least(CHUNK_TOKENS, page_tokens - index * CHUNK_TOKENS);
    return {at, count, at + WORD_BYTES * count, outliers ? length(index, 1) : 0, tokens};
}

// The words of a chunk on their way through shared memory, the bits of this lane, and how far the
// lanes of the chunk have come.
struct LaneReader {
    const uint8_t* from;
    uint8_t* ring;
    // Bytes from `from` on: the end of the words, the next one, and where the next piece is due.
    unsigned end;
    unsigned next;
    unsigned due;
    uint32_t below;
    uint32_t bits;
    unsigned left;

    KVD_DEVICE LaneReader(const Chunk& chunk, uint8_t* ring)
        : from(chunk.words - misaligned(chunk.words)),
          ring(ring),
          end(misaligned(chunk.words) + WORD_BYTES * chunk.count),
          next(misaligned(chunk.words)),
          due(PIECE_BYTES),
          below((1u << code_lane()) - 1),
          bits(0),
          left(0) {
        ask(0);
        ask(PIECE_BYTES);
        ask(2 * PIECE_BYTES);
        copy_async_commit();
        ask(3 * PIECE_BYTES);
        copy_async_commit();
        copy_async_wait<1>();
        KVD_WARP_BARRIER();
    }

    // A piece, zeros after the last word.
    KVD_DEVICE void ask(unsigned piece) const {
        const unsigned at = piece + code_lane() * COPY_BYTES;
        const unsigned bytes = end > at ? least(end - at, COPY_BYTES) : 0;
        copy_async16(ring + at % RING_BYTES, bytes > 0 ? from + at : from, bytes);
    }

    // Before a step: where a piece is used up, the one after the next two is there, and another
    // takes its place.
    KVD_DEVICE void turn() {
        if (KVD_BALLOT(next >= due) != 0) {
            copy_async_wait<0>();
            KVD_WARP_BARRIER();
            if (next >= due) {
                ask(due + 3 * PIECE_BYTES);
                due += PIECE_BYTES;
            }
            copy_async_commit();
        }
    }

    // A word of the ring, which may begin at an odd address.
    template <bool EVEN>
    KVD_DEVICE uint32_t word(unsigned at) const {
        if (EVEN) {
            return load16(ring + at % RING_BYTES);
        }
        return ring[at % RING_BYTES] | uint32_t(ring[(at + 1) % RING_BYTES]) << 8;
    }

    // A word for every lane that wants codes and has fewer bits than they need, in the lanes' order.
    template <bool EVEN>
    KVD_DEVICE void top_up(bool wants, unsigned need) {
        const bool takes = wants && left < need;
        const uint32_t taking = code_lanes_with(KVD_BALLOT(takes));
        const uint32_t mine = word<EVEN>(next + WORD_BYTES * ones(taking & below));
        bits |= (takes ? mine : 0) << left;
        left += takes ? WORD_BITS : 0;
        next += WORD_BYTES * ones(taking);
    }

    // The codes of the table's entry for the next bits, above them its length.
    KVD_DEVICE uint32_t take(const uint8_t* entries, uint32_t mask) {
        const uint32_t entry = load32(entries + 4 * (bits & mask));
        bits >>= entry >> ENTRY_LENGTH;
        left -= entry >> ENTRY_LENGTH;
        return entry;
    }

    // The same of a code whose low bits follow its symbol; the length counts them.
    KVD_DEVICE uint32_t take_raw(const uint8_t* entries, uint32_t mask, unsigned raw_bits) {
        const uint32_t entry = load32(entries + 4 * (bits & mask));
        const unsigned length = entry >> ENTRY_LENGTH;
        const uint32_t raw = bits >> (length - raw_bits) & ((1u << raw_bits) - 1);
        bits >>= length;
        left -= length;
        return entry | raw;
    }
};

// The first codes of an entry as bytes `at` and on of `codes`.
template <unsigned PER_ENTRY>
KVD_DEVICE uint32_t with_codes(uint32_t codes, unsigned at, uint32_t entry) {
    if (PER_ENTRY == 4) {
        return entry & ((1u << ENTRY_LENGTH) - 1);
    }
    if (PER_ENTRY == 2) {
        return at == 0 ? entry & 0xFFFF : bytes_of(codes, entry, 0x5410);
    }
    return at == 0 ? entry & 0xFF : bytes_of(codes, entry, at == 1 ? 0x3240 : at == 2 ? 0x3410 : 0x4210);
}

// Runs, tables, and how a chunk's words lie.
template <bool EVEN_WORDS, bool WIDE_CODES>
struct Source {
    static constexpr bool EVEN = EVEN_WORDS;
    // Whether codes take two bytes.
    static constexpr bool WIDE = WIDE_CODES;
    const uint8_t* lanes;
};

// What a run's steps have in common: codes of an entry, codes under a top-up, whether low bits follow
// a symbol.
template <class Source, unsigned PER_ENTRY, unsigned PER_WORD, bool RAW>
struct Coding {
    LaneReader& reader;
    const LaneRun run;
    const uint8_t* lanes;
    const uint8_t* entries;
    uint32_t mask;

    KVD_DEVICE Coding(const Source& source, LaneReader& reader, const LaneRun& run)
        : reader(reader),
          run(run),
          lanes(source.lanes),
          entries(source.lanes + run.entries),
          mask((1u << run.index_bits) - 1) {}

    // `count` codes of this lane, of `len` that other lanes have. `FULL`: of four in every lane.
    template <bool FULL>
    KVD_DEVICE Four quad(unsigned len, unsigned count) {
        Four codes = {0, 0};
#pragma unroll
        for (unsigned first = 0; first < CODE_GROUP; first += PER_WORD) {
            if (!FULL && first >= len) {
                break;
            }
            reader.template top_up<Source::EVEN>(FULL || first < count, run.need);
#pragma unroll
            for (unsigned at = first; at < first + PER_WORD; at += PER_ENTRY) {
                if (FULL || count >= at + PER_ENTRY) {
                    one(at, codes);
                } else if (at < count) {
                    last(at, count, codes);
                }
            }
        }
        return codes;
    }

    // The codes of one entry.
    KVD_DEVICE void one(unsigned at, Four& codes) {
        if (Source::WIDE) {
            const uint32_t code = reader.take(entries, mask);
            codes.low |= (code & 255) << 8 * at;
            codes.high |= (code >> 8 & 255) << 8 * at;
        } else {
            const uint32_t entry = RAW ? reader.take_raw(entries, mask, run.raw_bits)
                                       : reader.take(entries, mask);
            codes.low = with_codes<PER_ENTRY>(codes.low, at, entry);
        }
    }

    // Fewer codes than an entry holds: symbol by symbol.
    KVD_DEVICE void last(unsigned at, unsigned count, Four& codes) {
        for (; at < count; at += run.per_symbol) {
            const uint32_t entry = reader.take(lanes + run.single, (1u << run.single_bits) - 1);
            codes.low |= (entry & ((1u << ENTRY_LENGTH) - 1)) << 8 * at;
        }
    }

    // All quads of a run of keys: positions in fours, sixteen tokens at a time. `tokens`: of this
    // chunk, and of the longer one of the warp. `FULL`: 64 in both.
    template <bool FULL, class Store>
    KVD_DEVICE void keys(Range tokens, const Store& store) {
        unsigned at = 0;
        if (FULL) {
            for (; at + CODE_GROUP <= run.len; at += CODE_GROUP) {
#pragma unroll
                for (unsigned first = 0; first < CHUNK_TOKENS; first += CODE_LANES) {
                    reader.turn();
                    store(first + code_lane(), run.place + at, quad<true>(CODE_GROUP, CODE_GROUP));
                }
            }
        }
        for (; at < run.len; at += CODE_GROUP) {
            const unsigned len = least(CODE_GROUP, run.len - at);
            for (unsigned first = 0; first < tokens.to; first += CODE_LANES) {
                const unsigned token = first + code_lane();
                reader.turn();
                const Four codes = quad<false>(len, token < tokens.from ? len : 0);
                if (token < tokens.from) {
                    store(token, run.place + at, codes);
                }
            }
        }
    }

    // All quads of a run of values: four tokens of this lane, position after position.
    template <bool FULL, class Store>
    KVD_DEVICE void values(Range tokens, const Store& store) {
        const unsigned token = CODE_GROUP * code_lane();
        const unsigned count = tokens.from > token ? least(CODE_GROUP, tokens.from - token) : 0;
        for (unsigned at = 0; at < run.len; at++) {
            reader.turn();
            const Four codes = quad<FULL>(CODE_GROUP, count);
            if (FULL || count > 0) {
                store(token, run.place + at, codes);
            }
        }
    }
};

// Calls `use` with the coding of a run.
template <class Source, class Use>
KVD_DEVICE void with_coding(const Source& source, LaneReader& reader, const LaneRun& run, Use use) {
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

// Decodes a chunk to `out`, tile after tile; the other half of the warp has a chunk of its own, of
// the same side and head. Codes of two bytes have a plane for each.
template <bool IS_KEY, class Source>
KVD_DEVICE void decode_chunk(const SideShape& side, const Source& source, const Chunk& chunk,
                             uint8_t* ring, uint8_t* out) {
    const unsigned plane = TILE_TOKENS * side.stride;
    const unsigned tile_bytes = Source::WIDE ? 2 * plane : plane;
    // All lanes of the warp go through the same steps.
    const unsigned other = KVD_SHUFFLE(chunk.tokens, lane_index() ^ CODE_LANES);
    const Range tokens = {chunk.tokens, most(chunk.tokens, other)};
    const bool full = least(chunk.tokens, other) == CHUNK_TOKENS;
    const auto store = [&](unsigned token, unsigned position, const Four& codes) {
        uint8_t* tile = out + token / TILE_TOKENS * tile_bytes;
        const unsigned row = token % TILE_TOKENS;
        uint8_t* at = tile + (IS_KEY ? position / CODE_GROUP * TILE_TOKENS + row
                                     : row / CODE_GROUP * side.stride + position) * CODE_GROUP;
        *reinterpret_cast<uint32_t*>(at) = codes.low;
        if (Source::WIDE) {
            *reinterpret_cast<uint32_t*>(at + plane) = codes.high;
        }
    };
    LaneReader reader(chunk, ring);
    for (unsigned index = 0; index < lane_head(source.lanes).runs; index++) {
        with_coding(source, reader, lane_run(source.lanes, index), [&](auto coding) {
            if (IS_KEY) {
                full ? coding.template keys<true>(tokens, store)
                     : coding.template keys<false>(tokens, store);
            } else {
                full ? coding.template values<true>(tokens, store)
                     : coding.template values<false>(tokens, store);
            }
        });
    }
    copy_async_wait<0>();
    KVD_WARP_BARRIER();
}

}  // namespace kvd
