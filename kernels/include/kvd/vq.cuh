// Vector quantization: a code is the index of a codebook entry of `book_dim` channels; with stages
// a sub-vector is the sum of one entry of each (VecInfer 2510.06175 section 2.2; VQ-LLM 2503.02236
// section II-A). One set of codebooks per head, or one per sub-vector. Codebooks are f16, `[sets,
// stages, entries, book_dim]`, entries most used first: the first `held` of each are in registers
// (codebook_cache.cuh), those up to `cached` in shared memory, the others are read where they are (VQ-LLM's
// codebook cache). CPU reference: kvd-codec/src/quantizer/vq.rs.
#pragma once

#include "lookup.cuh"

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
        const unsigned count = (side.cached - side.held) * side.book_dim;
        const unsigned all = side.book_dim << side.bits;
        const uint64_t first = first_book(side);
        const uint16_t* books = reinterpret_cast<const uint16_t*>(tables + side.table);
        const uint16_t* from = books + first * all + side.held * side.book_dim;
        uint16_t* to = reinterpret_cast<uint16_t*>(table);
        for (unsigned book = 0; book < books_of_part(side); book++) {
            for (unsigned at = thread_index(); at < count; at += threads) {
                to[book * count + at] = from[uint64_t(book) * all + at];
            }
        }
    }

    // Codebooks of the channels that this thread block has, and the first of them.
    KVD_DEVICE static unsigned books_of_part(const SideShape& side) {
        return quotient(side.sets, side.parts) * side.stages;
    }
    KVD_DEVICE static unsigned first_book(const SideShape& side) {
        return side.part * books_of_part(side);
    }

    // The entry of a code; of one that registers hold too, where it is in global memory.
    KVD_DEVICE static const uint16_t* entry(const SideShape& side, const Tile& tile, unsigned stage,
                                            unsigned sub, unsigned code) {
        const unsigned book = (side.sets > 1 ? sub * side.stages : 0) + stage;
        if (code >= side.held && code < side.cached) {
            const uint16_t* entries = reinterpret_cast<const uint16_t*>(tile.table);
            const unsigned before = (book - first_book(side)) * (side.cached - side.held);
            return entries + (before + code - side.held) * side.book_dim;
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

// Codebooks whose values are whole numbers of a unit, at most 127, as fitted ones are, one stage of them:
// products of bytes, looked up.
template <>
struct Tensor<Vq> : LookedUp<Vq> {
    using Order = LookupOrder<>;

    KVD_DEVICE static Order order(const SideShape& side, const Tile& tile) {
        return Order(side, tile, subs(side));
    }

    KVD_DEVICE static void fold(const SideShape& side, const Tile& tile, const float* query,
                                unsigned slot, float (&values)[CODE_GROUP], float&) {
        order(side, tile).fold(slot, values, [&](const Order::Term& term) {
            const float value = query[term.code * side.book_dim + term.byte];
            return value * part_of(side, tile.tables, term.code);
        });
    }

    // The part of the unit that entries for a sub-vector have, where each has a codebook of its own:
    // behind the entries.
    KVD_DEVICE static float part_of(const SideShape& side, const uint8_t* tables, unsigned sub) {
        const uint64_t entries = uint64_t(side.sets) * Lookup::words_of(side) << side.bits;
        return side.sets > 1 ? load_float(tables + side.entries + 4 * (entries + sub)) : 1;
    }

    KVD_DEVICE static float score(const SideShape& side, const Tile&, unsigned, float sum, float) {
        return side.entry_unit * sum;
    }

    KVD_DEVICE static unsigned place_bytes(const SideShape& side) {
        return side.sets > 1 ? 4 * side.sets : 0;
    }
    KVD_DEVICE static void prepare_places(const SideShape& side, const uint8_t* tables,
                                          uint32_t* places) {
        for (unsigned at = thread_index(); 4 * at < place_bytes(side); at += ATTEND_THREADS) {
            places[at] = f32_bits(part_of(side, tables, at));
        }
    }
    KVD_DEVICE static float channel_step(const SideShape& side, const uint32_t* places,
                                         unsigned channel) {
        return side.sets > 1 ? f32_value(places[quotient(channel, side.book_dim)]) : 1;
    }
    KVD_DEVICE static unsigned places_of(const SideShape&, const uint32_t*) { return ~0u; }
    KVD_DEVICE static uint32_t channel(const SideShape&, const uint32_t*, unsigned place) {
        return place;
    }
    KVD_DEVICE static float step(const SideShape& side, const Tile&) { return side.entry_unit; }
    KVD_DEVICE static float step_of(const SideShape& side, const uint8_t*) {
        return side.entry_unit;
    }
    KVD_DEVICE static void value_words(const SideShape& side, const Tile& tile, const Codes& codes,
                                       unsigned quad, uint32_t (&to)[LOOKED_UP][2]) {
        Lookup(side, tile).value_words(codes, quad, to);
    }
};

}  // namespace kvd
