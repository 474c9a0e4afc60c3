// A second decoder of Huffman codes, for tests alone, and the one that attention uses, each of one chunk
// to codes in device memory. The second is KVComp's (2509.00579 section 3.3.1): the codes are a tree in an
// array of nodes, a bit chooses a child, and no branch depends on what is read. It shares nothing with
// ../include/kvd/huffman.cuh but the order in which lanes take words, which the format defines: no tables,
// no ring of words, a symbol at a time. crates/kvd-emu/tests/huffman/walk.rs makes the trees and compares.

#include <kvd/huffman.cuh>

namespace {

// A symbol's children are itself, so that what goes on from there stays there.
struct WalkNode {
    uint32_t children[2];
    uint32_t symbol;
    uint32_t is_symbol;
};

// Positions that share a tree.
struct WalkRun {
    uint32_t first;
    uint32_t len;
    uint32_t root;
    uint32_t longest;
    uint32_t raw_bits;
    uint32_t group;
    uint32_t levels;
    // Codes under one top-up, and the bits that they may take.
    uint32_t per_word;
    uint32_t need;
};

struct ChunkParameters {
    kvd::SideShape side;
    // For the table decoder: runs and tables.
    const uint8_t* lanes;
    // For the walk.
    const WalkRun* runs;
    const WalkNode* nodes;
    const uint8_t* words;
    // Written, `[tokens, per_row]`.
    uint16_t* codes;
    uint32_t count;
    uint32_t tokens;
    uint32_t per_row;
    uint32_t run_count;
    uint32_t is_value;
    // For the table decoder: whether the warp's other half decodes the chunk too.
    uint32_t twice;
};

// The bits of one lane.
struct WalkLane {
    uint32_t bits;
    unsigned left;

    KVD_DEVICE uint32_t raw(unsigned count) {
        const uint32_t taken = bits & ((1u << count) - 1);
        bits >>= count;
        left -= count;
        return taken;
    }

    // As many turns as the longest symbol has bits; those after the symbol change nothing.
    KVD_DEVICE uint32_t symbol(const WalkNode* nodes, const WalkRun& run) {
        unsigned index = run.root;
        for (unsigned turn = 0; turn < run.longest; turn++) {
            const unsigned live = 1 - nodes[index].is_symbol;
            index = nodes[index].children[bits & 1];
            bits >>= live;
            left -= live;
        }
        KVD_EXPECT(nodes[index].is_symbol == 1);
        return nodes[index].symbol;
    }
};

// The codes of a lane's quad under one top-up, from `first` on, and where they go.
KVD_DEVICE void walk_codes(const ChunkParameters& chunk, const WalkRun& run, WalkLane& state, unsigned token,
                unsigned position, unsigned first, unsigned count) {
    for (unsigned code = first; code < kvd::least(count, first + run.per_word); code += run.group) {
        uint32_t symbol = state.symbol(chunk.nodes, run);
        const uint32_t raw = state.raw(run.raw_bits);
        for (unsigned of = code; of < kvd::least(count, code + run.group); of++) {
            const unsigned row = token + (chunk.is_value ? of : 0);
            const unsigned column = position + (chunk.is_value ? 0 : of);
            const uint32_t one = run.group == 1 ? symbol : symbol % run.levels;
            chunk.codes[row * chunk.per_row + column] = uint16_t(one << run.raw_bits | raw);
            symbol /= run.levels;
        }
    }
}

// The first half of the warp has the chunk; the other waits with it.
KVD_DEVICE void walk(const ChunkParameters& chunk, uint8_t*) {
    const unsigned lane = kvd::code_lane();
    const bool mine = kvd::lane_index() < kvd::CODE_LANES;
    // Positions of a quad, and sixteens of tokens.
    const unsigned width = chunk.is_value ? 1 : 4;
    const unsigned blocks = chunk.is_value ? 1 : (chunk.tokens + 15) / 16;
    WalkLane state = {0, 0};
    unsigned taken = 0;
    for (unsigned index = 0; index < chunk.run_count; index++) {
        const WalkRun& run = chunk.runs[index];
        for (unsigned step = 0; step < (run.len + width - 1) / width * blocks; step++) {
            const unsigned at = step / blocks * width;
            const unsigned token = chunk.is_value ? 4 * lane : 16 * (step % blocks) + lane;
            const unsigned tokens = token < chunk.tokens ? chunk.tokens - token : 0;
            const unsigned along = chunk.is_value ? tokens : tokens > 0 ? run.len - at : 0;
            const unsigned count = mine ? kvd::least(4, along) : 0;
            for (unsigned first = 0; first < 4; first += run.per_word) {
                const bool takes = first < count && state.left < run.need;
                const uint32_t taking = KVD_BALLOT(takes) & 0xFFFF;
                const unsigned place = taken + kvd::ones(taking & ((1u << lane) - 1));
                if (takes) {
                    const bool there = place < chunk.count;
                    const uint32_t word = there ? kvd::load16_any(chunk.words + 2 * place) : 0;
                    state.bits |= word << state.left;
                    state.left += 16;
                }
                taken += kvd::ones(taking);
                walk_codes(chunk, run, state, token, run.first + at, first, count);
            }
        }
    }
}

template <bool IS_KEY, class Source>
KVD_DEVICE void decode(const ChunkParameters& chunk, const Source& source, uint8_t* shared) {
    const kvd::SideShape& side = chunk.side;
    const unsigned half = kvd::lane_index() / kvd::CODE_LANES;
    const bool live = half == 0 || chunk.twice;
    const kvd::Chunk of = {chunk.words, live ? chunk.count : 0, chunk.words, 0, live ? chunk.tokens : 0};
    const unsigned to = 2 * kvd::RING_BYTES + half * side.chunk_bytes;
    kvd::decode_chunk<IS_KEY>(side, source, of, shared, half * kvd::RING_BYTES, to);
    // The half that has decoded last is the one that is looked at.
    const uint8_t* out = shared + 2 * kvd::RING_BYTES + (chunk.twice ? side.chunk_bytes : 0);
    const unsigned plane = kvd::TILE_TOKENS * side.stride;
    const unsigned tile_bytes = Source::WIDE ? 2 * plane : plane;
    for (unsigned index = 0; index < kvd::lane_head(chunk.lanes).runs; index++) {
        const kvd::StreamRun& run = kvd::lane_run(chunk.lanes, index);
        for (unsigned at = kvd::lane_index(); at < chunk.tokens * run.len; at += kvd::WARP_LANES) {
            const unsigned token = at / run.len;
            const unsigned position = run.place + at % run.len;
            const unsigned row = token % kvd::TILE_TOKENS;
            const uint8_t* tile = out + token / kvd::TILE_TOKENS * tile_bytes;
            const uint8_t* byte =
                tile + (IS_KEY ? (position / 4 * kvd::TILE_TOKENS + row) * 4 + position % 4
                               : (row / 4 * side.stride + position) * 4 + row % 4);
            const unsigned high = Source::WIDE ? byte[plane] : 0;
            chunk.codes[token * chunk.per_row + run.first + at % run.len] = uint16_t(high << 8 | *byte);
        }
    }
}

template <bool IS_KEY>
KVD_DEVICE void tables_of(const ChunkParameters& chunk, uint8_t* shared) {
    const bool odd = reinterpret_cast<uintptr_t>(chunk.words) % 2 != 0;
    if (chunk.side.bits > 8) {
        decode<IS_KEY>(chunk, kvd::Source<false, true>{chunk.lanes, 0}, shared);
    } else if (odd) {
        decode<IS_KEY>(chunk, kvd::Source<false, false>{chunk.lanes, 0}, shared);
    } else {
        decode<IS_KEY>(chunk, kvd::Source<true, false>{chunk.lanes, 0}, shared);
    }
}

KVD_DEVICE void tables(const ChunkParameters& chunk, uint8_t* shared) {
    chunk.is_value ? tables_of<false>(chunk, shared) : tables_of<true>(chunk, shared);
}

}  // namespace

KVD_KERNEL(emu_decode_walk, 32, ChunkParameters, walk)
KVD_KERNEL(emu_decode_tables, 32, ChunkParameters, tables)
