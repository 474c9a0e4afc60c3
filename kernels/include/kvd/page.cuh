// Where the parts of a page's tile lie, in memory and staged. The block table and the units of work are in
// abi.cuh; the page format is docs/format.md.
#pragma once

#include "abi.cuh"
#include "device.cuh"

namespace kvd {

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
