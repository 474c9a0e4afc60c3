// Codes to Huffman codes in lock step (docs/format.md "Codes"; KVComp, 2509.00579 section 3.2): the
// inverse of ../huffman.cuh. All threads take one chunk together: half a warp takes a segment of its
// steps, a thread one lane of it.
//
// A lane takes a word of 16 bits whenever it has fewer than its next symbols may need. Of `C` bits used
// and `n` needed it has then taken `max(before, ceil((C + n) / 16))` words, so that sums and largest
// numbers of segments say where each begins: lengths first, then a scan of them, then the words. A thread
// writes those that its lane takes in its segment, and reads on behind it until they are full. Reference:
// kvd-codec/src/huffman/streams/encode.rs; tables: crates/kvd-cuda/src/store/streams.rs.
#pragma once

#include "../huffman.cuh"
#include "work.cuh"

namespace kvd {

// Parts of a chunk that are encoded side by side.
constexpr unsigned SEGMENTS = STORE_THREADS / CODE_LANES;
// A unit: the bits of a symbol and of its low bits, then how many, then whether they are another's.
constexpr unsigned UNIT_LENGTH = 16;
constexpr uint32_t UNIT_SUBSTITUTED = 1u << 31;

// Consecutive positions that share a table. Offsets are bytes from `StoreParameters::steps` on.
struct CodeRun {
    uint32_t first;
    uint32_t len;
    // Quads of positions of the runs up to this one.
    uint32_t quads;
    // Units, by symbol and low bits; the symbol that is coded for each, 0 where all have a code.
    uint32_t units;
    uint32_t substitutes;
    // Codes of a symbol, and below that codes without their low bits; the number that a missing one counts
    // as.
    uint32_t group;
    uint32_t levels;
    uint32_t missing;
    uint32_t raw_bits;
    // Codes under one top-up, and the bits that they may take.
    uint32_t per_word;
    uint32_t need;
    uint32_t unused;
};

// Header before the runs of a head.
struct CodeHead {
    uint32_t runs;
    // For a grid: its step; `bias | largest << 16` of each channel, bytes from `steps` on.
    float step;
    uint32_t cuts;
    uint32_t unused;
};

// State that all threads share while they encode a chunk.
struct ChunkPlan {
    const uint8_t* tables;
    const CodeHead* head;
    bool is_value;
    // The chunk's first token, tokens, and sixteens of them that keys are read in.
    unsigned first;
    unsigned tokens;
    unsigned blocks;
    unsigned steps;

    KVD_DEVICE ChunkPlan(const Work& work, unsigned first)
        : tables(work.constants),
          head(work.codes),
          is_value(work.unit.is_value != 0),
          first(first),
          tokens(least(CHUNK_TOKENS, work.tokens - first)) {
        blocks = is_value ? 1 : (tokens + CODE_LANES - 1) / CODE_LANES;
        steps = head->runs == 0 ? 0 : blocks * run(head->runs - 1).quads;
    }

    KVD_DEVICE const CodeRun& run(unsigned index) const {
        return reinterpret_cast<const CodeRun*>(head + 1)[index];
    }
    KVD_DEVICE const uint32_t* words_at(unsigned offset) const {
        return reinterpret_cast<const uint32_t*>(tables + offset);
    }
    // Steps of a segment; the last may have fewer, or none.
    KVD_DEVICE Range segment(unsigned index) const {
        const unsigned part = (steps + SEGMENTS - 1) / SEGMENTS;
        const unsigned from = least(steps, index * part);
        return {from, least(steps, from + part)};
    }
};

// A step, as this thread's lane sees it.
struct LaneStep {
    const ChunkPlan& plan;
    unsigned index;
    unsigned run;
    // Position in the run, and which sixteen tokens.
    unsigned at;
    unsigned block;

    KVD_DEVICE LaneStep(const ChunkPlan& plan, unsigned index)
        : plan(plan), index(index), run(0), at(0), block(0) {
        if (index >= plan.steps) {
            return;
        }
        const unsigned quad = index / plan.blocks;
        block = index % plan.blocks;
        while (quad >= plan.run(run).quads) {
            run++;
        }
        at = (quad - (run > 0 ? plan.run(run - 1).quads : 0)) * width();
    }

    // Positions from quad to quad.
    KVD_DEVICE unsigned width() const { return plan.is_value ? 1 : CODE_GROUP; }

    KVD_DEVICE void next() {
        index++;
        block++;
        if (block == plan.blocks) {
            block = 0;
            at += width();
            if (at >= plan.run(run).len) {
                run++;
                at = 0;
            }
        }
    }

    KVD_DEVICE const CodeRun& run_of() const { return plan.run(run); }

    // The first token of the lane's quad, in its chunk, and how many codes the quad has.
    KVD_DEVICE unsigned token() const {
        return plan.is_value ? CODE_GROUP * code_lane() : CODE_LANES * block + code_lane();
    }
    KVD_DEVICE unsigned count() const {
        const unsigned left = token() < plan.tokens ? plan.tokens - token() : 0;
        if (plan.is_value) {
            return least(CODE_GROUP, left);
        }
        return left > 0 ? least(CODE_GROUP, run_of().len - at) : 0;
    }

    // Calls `use(token of the page, position)` with the place of a code.
    template <class Use>
    KVD_DEVICE auto place(unsigned code, Use use) const {
        const unsigned first = plan.first + token();
        const unsigned position = run_of().first + at;
        return plan.is_value ? use(first + code, position) : use(first, position + code);
    }
};

// The symbol of codes `first` and on of a quad of `count`, and its unit.
template <class Code>
KVD_DEVICE unsigned symbol_of(const LaneStep& step, unsigned first, unsigned count, Code code) {
    const CodeRun& run = step.run_of();
    unsigned symbol = 0;
    for (unsigned next = run.group; next > 0; next--) {
        const unsigned at = first + next - 1;
        symbol = symbol * run.levels + (at < count ? step.place(at, code) >> run.raw_bits : run.missing);
    }
    return symbol;
}
template <class Code>
KVD_DEVICE uint32_t unit_of(const LaneStep& step, unsigned first, unsigned count, Code code) {
    const CodeRun& run = step.run_of();
    const uint32_t* units = step.plan.words_at(run.units);
    return run.group == 1 ? units[step.place(first, code)]
                          : units[symbol_of(step, first, count, code)];
}

// The bits of codes `first` and on that are under one top-up, from bit 16 on how many, and whether a
// symbol's are another's.
template <class Code>
KVD_DEVICE uint32_t batch_of(const LaneStep& step, unsigned first, unsigned count, Code code) {
    const CodeRun& run = step.run_of();
    const unsigned end = least(count, first + run.per_word);
    uint32_t bits = 0;
    uint32_t length = 0;
    uint32_t flags = 0;
    for (unsigned at = first; at < end; at += run.group) {
        const uint32_t unit = unit_of(step, at, count, code);
        bits |= (unit & 0xFFFF) << length;
        length += unit >> UNIT_LENGTH & 0xFF;
        flags |= unit & UNIT_SUBSTITUTED;
    }
    return bits | length << UNIT_LENGTH | flags;
}

// Tells what codes lack whose symbols are coded as others: `rest(token, position, what)`.
template <class Code, class Rest>
KVD_DEVICE void tell_missing(const LaneStep& step, unsigned first, unsigned count, Code code,
                             Rest rest) {
    const CodeRun& run = step.run_of();
    const unsigned end = least(count, first + run.per_word);
    for (unsigned at = first; at < end; at += run.group) {
        if ((unit_of(step, at, count, code) & UNIT_SUBSTITUTED) == 0) {
            continue;
        }
        const unsigned symbol = symbol_of(step, at, count, code);
        unsigned coded = step.plan.words_at(run.substitutes)[symbol];
        for (unsigned of = at; of < least(count, at + run.group); of++) {
            const int had = int(step.place(of, code) >> run.raw_bits);
            const int has = int(run.group == 1 ? coded : coded % run.levels);
            coded /= run.levels;
            step.place(of, [&](unsigned token, unsigned position) {
                rest(token, position, (had - has) * (1 << run.raw_bits));
            });
        }
    }
}

// Where a lane's segment begins: bits that it has used, words that it has taken.
struct LaneStart {
    unsigned bits;
    unsigned words;

    // Pass one: bits of the segment, and the most that were asked for up to any of its top-ups.
    template <class Code, class Rest>
    KVD_DEVICE static void find(const ChunkPlan& plan, Code code, Rest rest, uint64_t* sums) {
        const Range range = plan.segment(thread_index() / CODE_LANES);
        LaneStep step(plan, range.from);
        unsigned bits = 0;
        unsigned asked = 0;
        for (unsigned index = range.from; index < range.to; index++, step.next()) {
            const CodeRun& run = step.run_of();
            const unsigned count = step.count();
            for (unsigned first = 0; first < count; first += run.per_word) {
                asked = most(asked, bits + run.need);
                const uint32_t batch = batch_of(step, first, count, code);
                if ((batch & UNIT_SUBSTITUTED) != 0) {
                    tell_missing(step, first, count, code, rest);
                }
                bits += batch >> UNIT_LENGTH & 0xFF;
            }
        }
        sums[thread_index()] = uint64_t(asked) << 32 | bits;
    }

    // The scan.
    KVD_DEVICE explicit LaneStart(const uint64_t* sums) : bits(0), words(0) {
        for (unsigned at = code_lane(); at < thread_index(); at += CODE_LANES) {
            const unsigned asked = unsigned(sums[at] >> 32);
            words = most(words, asked > 0 ? (bits + asked + WORD_BITS - 1) / WORD_BITS : 0);
            bits += unsigned(sums[at]);
        }
    }
};

// Writes the words that a lane takes in its segment.
struct LaneWriter {
    uint8_t* out;
    // Words that there is room for.
    unsigned room;
    // The next word that the half warp takes; bits that the lane has taken and not used.
    unsigned next;
    unsigned ready;
    // Bits that still belong to words of the segments before.
    unsigned skip;
    uint32_t held;
    unsigned filled;
    // Words that were taken and are not full, at most two: where they go.
    unsigned places[2];
    unsigned open;
    // Behind the last word that is not zero.
    unsigned used;

    KVD_DEVICE LaneWriter(const LaneStart& start, uint8_t* out, unsigned room)
        : out(out),
          room(room),
          next(start.words),
          ready(WORD_BITS * start.words - start.bits),
          skip(ready),
          held(0),
          filled(0),
          places{0, 0},
          open(0),
          used(0) {
        for (unsigned step = CODE_LANES / 2; step > 0; step /= 2) {
            next += KVD_SHUFFLE(next, lane_index() ^ step);
        }
    }

    // A word for every lane that has fewer bits than it needs, in the lanes' order.
    KVD_DEVICE void take(bool wants, unsigned need) {
        const bool takes = wants && ready < need;
        const uint32_t taking = code_lanes_with(KVD_BALLOT(takes));
        const unsigned place = next + ones(taking & ((1u << code_lane()) - 1));
        if (takes) {
            places[0] = open == 0 ? place : places[0];
            places[1] = place;
            open++;
            ready += WORD_BITS;
        }
        next += ones(taking);
    }

    KVD_DEVICE void put(uint32_t batch) {
        unsigned length = batch >> UNIT_LENGTH & 0xFF;
        ready -= length;
        const unsigned others = least(skip, length);
        skip -= others;
        held |= (batch & 0xFFFF) >> others << filled;
        filled += length - others;
        if (filled >= WORD_BITS && open > 0) {
            write();
        }
    }

    KVD_DEVICE void write() {
        const unsigned place = places[0];
        const uint16_t word = uint16_t(held);
        if (place < room) {
            uint8_t* to = out + WORD_BYTES * place;
            if (misaligned(to) % WORD_BYTES == 0) {
                store16(to, word);
            } else {
                store16_any(to, word);
            }
        }
        used = word != 0 ? most(used, place + 1) : used;
        held >>= WORD_BITS;
        filled -= least(filled, WORD_BITS);
        places[0] = places[1];
        open--;
    }
};

// Pass two: the words of this thread's segment. Gives where the last that is not zero ends.
template <class Code>
KVD_DEVICE unsigned write_words(const ChunkPlan& plan, const LaneStart& start, uint8_t* out,
                                unsigned room, Code code) {
    LaneWriter writer(start, out, room);
    const Range range = plan.segment(thread_index() / CODE_LANES);
    LaneStep step(plan, range.from);
    // The halves of a warp go through as many steps and top-ups.
    const unsigned mine = range.to - range.from;
    const unsigned steps = most(mine, KVD_SHUFFLE(mine, lane_index() ^ CODE_LANES));
    for (unsigned index = 0; index < steps; index++) {
        const bool live = index < mine;
        const unsigned per_word = live ? step.run_of().per_word : CODE_GROUP;
        const unsigned need = live ? step.run_of().need : 0;
        const unsigned count = live ? step.count() : 0;
        const unsigned batches = CODE_GROUP / per_word;
        const unsigned all = most(batches, KVD_SHUFFLE(batches, lane_index() ^ CODE_LANES));
        for (unsigned batch = 0; batch < all; batch++) {
            const unsigned first = batch * per_word;
            const bool wants = batch < batches && first < count;
            writer.take(wants, need);
            if (wants) {
                writer.put(batch_of(step, first, count, code));
            }
        }
        if (live) {
            step.next();
        }
    }
    for (; writer.open > 0 && step.index < plan.steps; step.next()) {
        const unsigned count = step.count();
        for (unsigned first = 0; first < count && writer.open > 0; first += step.run_of().per_word) {
            writer.put(batch_of(step, first, count, code));
        }
    }
    while (writer.open > 0) {
        writer.write();
    }
    return writer.used;
}

// Encodes the chunk whose first token is `first` to `out`, and gives its words; those beyond `room` are
// not written. `code(token, position)`; `rest(token, position, what)` is told what codes lack. Every
// thread of the block calls it, and after it all see the words.
template <class Code, class Rest>
KVD_DEVICE unsigned encode_chunk(const Work& work, unsigned first, uint8_t* out, unsigned room,
                                 Code code, Rest rest) {
    const ChunkPlan plan(work, first);
    LaneStart::find(plan, code, rest, work.sums);
    KVD_BARRIER();
    const LaneStart start(work.sums);
    return block_most(write_words(plan, start, out, room, code), work.slots);
}

// How codes become bytes, of a quantizer whose symbols all have codes: lengths of chunks, then their
// words. The host leaves room for the longest; where that is not so there are no codes, and nothing is
// written behind it.
struct HuffmanCodes {
    template <class Code>
    KVD_DEVICE static unsigned write(const Work& work, uint8_t* to, unsigned, unsigned, Code code) {
        const unsigned chunks = (work.tokens + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
        uint8_t* at = to + WORD_BYTES * chunks;
        for (unsigned chunk = 0; chunk < chunks; chunk++) {
            const unsigned used = unsigned(at - work.payload);
            if (used > work.unit.room) {
                return NO_CODES;
            }
            const unsigned room = (work.unit.room - used) / WORD_BYTES;
            const unsigned words = encode_chunk(work, chunk * CHUNK_TOKENS, at, room, code,
                                                [](unsigned, unsigned, int) {});
            if (words > room) {
                return NO_CODES;
            }
            if (thread_index() == 0) {
                store16_any(to + WORD_BYTES * chunk, uint16_t(words));
            }
            at += WORD_BYTES * words;
        }
        return unsigned(at - to);
    }
};

}  // namespace kvd
