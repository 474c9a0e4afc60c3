// Vector quantization: a code is the index of a codebook entry of `book_dim` channels; with stages
// a sub-vector is the sum of one entry of each (VecInfer 2510.06175 section 2.2; VQ-LLM 2503.02236
// section II-A). One set of codebooks per head, or one per sub-vector. Codebooks are f16, `[sets,
// stages, entries, book_dim]`, entries most used first: the first `cached` of each stand in shared
// memory, the others are read where they are (VQ-LLM's codebook cache). CPU reference:
// kvd-codec/src/side/vq.rs.
#pragma once

#include "codes.cuh"

namespace kvd {

struct Vq {
    static constexpr unsigned SPANS = 1;
    static constexpr bool ODD_WORDS = false;

    KVD_DEVICE static unsigned subs(const SideShape& side) { return quotient(side.dim, side.book_dim); }

    KVD_DEVICE static uint64_t codes_at(const SideShape&, const Tile&) { return 0; }

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned) {
        return code_span(tile, 0, subs(side) * side.stages, side.bits);
    }

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        const unsigned cached = side.cached * side.book_dim;
        const unsigned all = side.book_dim << side.bits;
        const uint16_t* from = reinterpret_cast<const uint16_t*>(tables + side.table);
        uint16_t* to = reinterpret_cast<uint16_t*>(table);
        for (unsigned book = 0; book < side.sets * side.stages; book++) {
            for (unsigned at = thread_index(); at < cached; at += threads) {
                to[book * cached + at] = from[uint64_t(book) * all + at];
            }
        }
    }

    // The entry of a code.
    KVD_DEVICE static const uint16_t* entry(const SideShape& side, const Tile& tile, unsigned stage,
                                            unsigned sub, unsigned code) {
        const unsigned book = (side.sets > 1 ? sub * side.stages : 0) + stage;
        if (code < side.cached) {
            const uint16_t* entries = reinterpret_cast<const uint16_t*>(tile.table);
            return entries + (book * side.cached + code) * side.book_dim;
        }
        const uint8_t* books = tile.tables + side.table;
        const uint16_t* entries = reinterpret_cast<const uint16_t*>(books);
        return entries + ((uint64_t(book) << side.bits) + code) * side.book_dim;
    }

    KVD_DEVICE static Codes codes(const SideShape& side, const Tile& tile) {
        return tile_codes<Vq>(side, tile, 0, subs(side) * side.stages, side.bits);
    }

    // A lane per token, sub-vectors dealt to the warps.
    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        const unsigned count = subs(side);
        each_key_code(codes(side, tile), warps, [&](unsigned position, unsigned code) {
            const unsigned stage = quotient(position, count);
            const unsigned sub = position - stage * count;
            const uint16_t* values = entry(side, tile, stage, sub, code);
            for (unsigned at = 0; at < side.book_dim; at++) {
                add_score(query, side.dim, sub * side.book_dim + at, f16_value(values[at]), scores);
            }
        });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        const Codes all = codes(side, tile);
        const unsigned sub = quotient(position, side.book_dim);
        const unsigned channel = position - sub * side.book_dim;
        for (unsigned stage = 0; stage < side.stages; stage++) {
            accumulate_codes(all, stage * subs(side) + sub, slice, slices, weights, out,
                             [&](unsigned, unsigned code) {
                                 return f16_value(entry(side, tile, stage, sub, code)[channel]);
                             });
        }
    }
};

}  // namespace kvd
