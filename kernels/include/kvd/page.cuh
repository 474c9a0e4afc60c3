// What host and kernels agree on: the block table, the units of work, and where the parts of a
// page's tile lie. Reads nothing itself. Mirrored by crates/kvd-cuda/src/abi.rs (same fields, same
// order); the page format is docs/format.md, the table design section 7.
#pragma once

#include "device.cuh"

namespace kvd {

// Tokens of a tile, the unit in which pages are staged and codes are laid out.
constexpr unsigned TILE_TOKENS = 32;

// How one head's keys or values are stored.
struct SideShape {
    // Codebook entries, f16 `[2^bits, book_dim]`, as an offset from `AttendParameters::books`.
    uint64_t book;
    uint32_t dim;
    // Bits of a code; of fp8 8, of floats 0.
    uint32_t bits;
    // Tokens, and channels, that share a scale; never 0.
    uint32_t scale_tokens;
    uint32_t scale_channels;
    // Channels of a codebook entry.
    uint32_t book_dim;
    uint32_t unused;
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
};

// What one thread block does: up to `ROWS` query rows over some pages of one KV head.
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
    uint32_t unused;
};

struct AttendParameters {
    const uint8_t* arena;
    const uint8_t* books;
    const PageEntry* pages;
    const Unit* units;
    // `[rows, key channels]`, scaled, in the space of the unit's keys; what to add to their scores.
    const float* queries;
    const float* offsets;
    // Partial results, `[rows, value channels]`, and `{m, l}` of each.
    float* out;
    float* stats;
    // Bytes of shared memory for one staged tile and one codebook.
    uint32_t key_stage;
    uint32_t value_stage;
    uint32_t key_book;
    uint32_t value_book;
    // Scores `s` become `cap tanh(s / cap)`; 0 for none.
    float soft_cap;
    uint32_t unused;
};

// Bytes of a tile within a payload.
struct TileSpans {
    uint64_t scales;
    uint32_t scales_len;
    uint64_t codes;
    uint32_t codes_len;
};

// A staged tile of keys or values.
struct Tile {
    const uint8_t* scales;
    const uint8_t* codes;
    const uint16_t* book;
    // Row of the page that is the tile's first, rows of the page, rows in the tile.
    unsigned first_row;
    unsigned page_tokens;
    unsigned tokens;
    // Rows of the tile that may be read as numbers.
    unsigned from;
    unsigned to;
};

KVD_DEVICE uint16_t load16(const uint8_t* at) { return *reinterpret_cast<const uint16_t*>(at); }
KVD_DEVICE uint32_t load32(const uint8_t* at) { return *reinterpret_cast<const uint32_t*>(at); }

}  // namespace kvd
