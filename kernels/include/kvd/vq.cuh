// Vector quantization: a code is the index of a codebook entry of `book_dim` channels, at most 256
// entries, one codebook per head and side (VecInfer 2510.06175 §2.2). `prepare` brings the codebook
// into shared memory once per thread block, as VQ-LLM's (2503.02236 §4) shared-memory level does;
// entries are f16, most used first. CPU reference: kvd-codec/src/side/vq.rs.
#pragma once

#include "codes.cuh"

namespace kvd {

struct Vq {
    KVD_DEVICE static TileSpans spans(const SideShape& side, unsigned tokens, unsigned tile) {
        TileSpans spans = {0, 0, 0, 0};
        code_span(spans, 0, tokens, tile, side.dim / side.book_dim, side.bits);
        return spans;
    }

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* books, uint16_t* book,
                                   unsigned threads) {
        const unsigned values = side.book_dim << side.bits;
        const uint16_t* entries = reinterpret_cast<const uint16_t*>(books + side.book);
        for (unsigned at = thread_index(); at < values; at += threads) {
            book[at] = entries[at];
        }
    }

    // A lane per token, sub-vectors dealt to the warps.
    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const unsigned per_row = side.dim / side.book_dim;
        const Codes codes = {tile.codes, side.bits, tile.tokens, per_row};
        const unsigned token = lane_index();
        if (token >= tile.tokens) {
            return;
        }
        for (unsigned sub = warp_index(); sub < per_row; sub += warps) {
            const unsigned code = codes.one(codes.key_element(token, sub));
            const uint16_t* entry = tile.book + code * side.book_dim;
            for (unsigned at = 0; at < side.book_dim; at++) {
                const float key = f16_value(entry[at]);
                const float* column = query + sub * side.book_dim + at;
#pragma unroll
                for (int row = 0; row < ROWS; row++) {
                    scores[row] += column[row * side.dim] * key;
                }
            }
        }
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const Codes codes = {tile.codes, side.bits, tile.tokens, side.dim / side.book_dim};
        const unsigned channel = position % side.book_dim;
        accumulate_codes(codes, position / side.book_dim, slice, slices, weights, out,
                         [&](unsigned, unsigned code) {
                             return f16_value(tile.book[code * side.book_dim + channel]);
                         });
    }
};

}  // namespace kvd
