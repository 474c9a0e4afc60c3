// Data that host and kernels agree on: the block table, the units of work, and where the parts of a
// page's tile lie. Reads nothing itself. Mirrored by crates/kvd-cuda/src/abi.rs (same fields, same
// order); the page format is docs/format.md.
#pragma once

#include "device.cuh"

namespace kvd {

// Tokens of a tile, the unit in which pages are staged and codes are laid out.
constexpr unsigned TILE_TOKENS = 32;

// Threads of an attention kernel.
constexpr unsigned ATTEND_THREADS = 128;
constexpr unsigned ATTEND_WARPS = ATTEND_THREADS / WARP_LANES;

// `number / by`, where `by` is nearly always a power of two, or larger: a division takes twenty
// instructions.
KVD_DEVICE unsigned quotient(unsigned number, unsigned by) {
    if ((by & (by - 1)) == 0) {
        return number >> ones(by - 1);
    }
    return number < by ? 0 : number / by;
}

// Rows or tokens `from..to`.
struct Range {
    unsigned from;
    unsigned to;
};

// How one head's keys or values are stored; fields that a kind does not name are not read.
struct SideShape {
    // Codebooks, levels or directions, as an offset from `AttendParameters::tables`.
    uint64_t table;
    // A side of any.cuh.
    uint32_t kind;
    uint32_t dim;
    // Bits of a code; of fp8 8, of floats 0.
    uint32_t bits;
    // Tokens, and channels, that share a scale; never 0.
    uint32_t scale_tokens;
    uint32_t scale_channels;
    // Symmetric uniform: the largest magnitude of a code.
    uint32_t top;
    // VQ: channels of an entry, stages, codebook sets (1, or one per sub-vector), and the entries of
    // each codebook, most used first, that registers hold or shared memory.
    uint32_t book_dim;
    uint32_t stages;
    uint32_t sets;
    uint32_t cached;
    // Polar: bits of the angle; whether channels `2i, 2i + 1` are a pair, and not `i, i + dim / 2`.
    uint32_t angle_bits;
    uint32_t interleaved;
    // Bytes from `table` on that stand in shared memory; of VQ those of the entries that do.
    uint32_t table_bytes;
    // Huffman codes: codes of a decoded row, padded (huffman.cuh); 0 where codes have a fixed width.
    uint32_t stride;
    // Their runs and tables, from `AttendParameters::tables` on; of these bytes in shared memory, all
    // or none.
    uint64_t lanes;
    uint32_t lane_bytes;
    // Bytes of a decoded chunk.
    uint32_t chunk_bytes;
    // Codes looked up as bytes (lookup.cuh): all entries, from `AttendParameters::tables` on; those in
    // shared memory, how often each stands there (a power of two, as its logarithm), the bytes of one (0 if
    // codes are not looked up so), and the value of a byte of 1.
    uint64_t entries;
    uint32_t entry_count;
    uint32_t entry_copies;
    uint32_t entry_bytes;
    float entry_unit;
    // Codes made bytes before they are multiplied (unpack.cuh): shared memory for a tile of them, 0 where
    // they are not; positions of a row, 0 where they are neither spread nor in groups (bit_groups.cuh); of values
    // places in the sums; bytes of `entries` that stand in shared memory.
    uint32_t spread_bytes;
    uint32_t spread_row;
    uint32_t spread_places;
    uint32_t spread_table;
    // VQ on CUDA cores (codebook_cache.cuh): entries of each codebook that lanes hold in registers, at most
    // `cached`; pairs of channels of an entry that a lane takes at once, and of values exchanges with
    // its neighbours, 0 where every lane reads its channel. Of values the thread blocks that share
    // the channels, at least 1, and which of them this is.
    uint32_t held;
    uint32_t entry_pairs;
    uint32_t parts;
    uint32_t part;
};

// One page of one KV head, or rows as they came: an entry of the block table.
struct PageEntry {
    // Payloads, as offsets into the arena.
    uint64_t key;
    uint64_t value;
    // Rows that the payload was laid out for.
    uint32_t tokens;
    // Rows `first_row..first_row + rows` hold the tokens from `first_token` on.
    uint32_t first_row;
    uint32_t rows;
    uint32_t first_token;
    // Bytes of the payloads, gains apart; 0 for rows as they came.
    uint32_t key_bytes;
    uint32_t value_bytes;
    // Bytes of the values' gains behind their payload, 4 bits per row; 0 where no row has one.
    uint32_t gain_bytes;
    uint32_t unused;
};

// The work of one thread block: up to `ROWS` query rows over some pages of one KV head.
struct Unit {
    SideShape key;
    SideShape value;
    uint32_t first_page;
    uint32_t pages;
    // First row of `queries`, `offsets`.
    uint32_t query;
    uint32_t rows;
    // Rows are `[query token, query head of the KV head]`: number of the first, and heads.
    uint32_t first_row;
    uint32_t heads;
    // Position of query token 0.
    uint32_t position;
    // A query at `p` sees only tokens after `p - window`; 0 for all.
    uint32_t window;
    // First row of `out`, `stats`.
    uint32_t partial;
    // Stops of 64 tokens of its longest page (tokens.cuh).
    uint32_t page_stops;
};

struct AttendParameters {
    const uint8_t* arena;
    // Base of `SideShape::table`.
    const uint8_t* tables;
    const PageEntry* pages;
    const Unit* units;
    // `[rows, key channels]`, scaled, in the space of the unit's keys; what to add to their scores.
    const float* queries;
    const float* offsets;
    // Partial results, `[rows, value channels]`, and `{m, l}` of each.
    float* out;
    float* stats;
    // Bytes of shared memory for one staged tile and one table.
    uint32_t key_stage;
    uint32_t value_stage;
    uint32_t key_table;
    uint32_t value_table;
    // Scores `s` become `cap tanh(s / cap)`; 0 for none.
    float soft_cap;
    // Huffman codes: chunks that are decoded together, bytes of shared memory for one of each side.
    uint32_t chunks;
    uint32_t key_chunk;
    uint32_t value_chunk;
    // Tiles that have room in shared memory: one is worked on, the others are under way.
    uint32_t buffers;
    uint32_t unused;
};

// Bytes of a payload.
struct Span {
    uint64_t offset;
    uint32_t len;
};

struct OutlierList;

// One span, of one tile or two that follow one another, on its way to shared memory: the aligned sixteens
// around it, how many, where its first byte stands in the buffer, and how far behind that the second tile's.
struct alignas(16) Piece {
    const uint8_t* from;
    uint16_t copies;
    uint16_t step;
    uint32_t at;
};

// A page and one of its tiles, before or after it is staged.
struct Tile {
    const uint8_t* payload;
    uint32_t payload_bytes;
    // The buffer that it is staged in, the side's spans there, and the side's table.
    const uint8_t* staged;
    const Piece* pieces;
    // Whether it is the second of two that are staged together.
    unsigned half;
    const uint8_t* table;
    // All tables, in global memory.
    const uint8_t* tables;
    // The tile, the page's row that is its first, rows of the page, rows in the tile.
    unsigned index;
    unsigned first_row;
    unsigned page_tokens;
    unsigned tokens;
    // Rows of the tile that may be read as numbers.
    unsigned from;
    unsigned to;
    // Whether it has Huffman codes; then the decoded tile, runs and tables, and the outliers.
    bool coded;
    const uint8_t* decoded;
    const uint8_t* lanes;
    const OutlierList* outliers;
};

// Whether a side copies its pieces by itself, all threads together, to other places within their lines.
template <class Side>
struct Stages {
    static constexpr bool value = false;
};

// Copies are whole aligned pieces of this size.
constexpr unsigned COPY_BYTES = 16;

KVD_DEVICE unsigned misaligned(const uint8_t* at) {
    return unsigned(reinterpret_cast<uintptr_t>(at) % COPY_BYTES);
}

// Bytes that `len` bytes at `at` take when staged: whole aligned sixteens.
KVD_DEVICE unsigned staged_bytes(const uint8_t* at, unsigned len) {
    return len == 0 ? 0 : (misaligned(at) + len + COPY_BYTES - 1) / COPY_BYTES * COPY_BYTES;
}

// Where span `part` of a side's tile stands in shared memory.
template <class Side>
KVD_DEVICE const uint8_t* staged_span(const SideShape&, const Tile& tile, unsigned part) {
    const Piece& piece = tile.pieces[part];
    return tile.staged + piece.at + tile.half * piece.step;
}

// Copies a side's table into shared memory: whole words, table and place aligned to sixteens.
KVD_DEVICE void copy_table(uint8_t* to, const uint8_t* from, unsigned bytes, unsigned threads) {
    for (unsigned at = 4 * thread_index(); at < bytes; at += 4 * threads) {
        *reinterpret_cast<uint32_t*>(to + at) = *reinterpret_cast<const uint32_t*>(from + at);
    }
}

KVD_DEVICE uint16_t load16(const uint8_t* at) { return *reinterpret_cast<const uint16_t*>(at); }
KVD_DEVICE uint32_t load32(const uint8_t* at) { return *reinterpret_cast<const uint32_t*>(at); }
// Loaded and stored at once.
struct alignas(8) TwoWords {
    uint32_t word[2];
};
struct alignas(16) FourWords {
    uint32_t word[4];
};
// At any address.
KVD_DEVICE uint16_t load16_any(const uint8_t* at) { return uint16_t(at[0] | at[1] << 8); }
KVD_DEVICE uint32_t load32_any(const uint8_t* at) {
    return uint32_t(load16_any(at)) | uint32_t(load16_any(at + 2)) << 16;
}
KVD_DEVICE float load_float(const uint8_t* at) { return f32_value(load32(at)); }

}  // namespace kvd
