// The nearest codebook entry of each sub-vector, the least `|c|^2 / 2 - x c`, ties to the lower index; a
// stage takes the residual of the one before. A thread per sub-vector, neighbours at the same position, so
// that they read the same entry. Reference: kvd-codec/src/quantizer/vq.rs, nearest.rs.
#pragma once

#include "../vq.cuh"
#include "pack.cuh"

namespace kvd {

// Looks `DIM` channels up in one codebook; 0 channels for any number of them.
template <unsigned DIM>
KVD_DEVICE unsigned nearest_entry(const uint32_t* point, unsigned dim, const uint16_t* entries,
                                  const float* norms, unsigned count) {
    const unsigned channels = DIM > 0 ? DIM : dim;
    float x[DIM > 0 ? DIM : 1];
    if constexpr (DIM > 0) {
#pragma unroll
        for (unsigned at = 0; at < DIM; at++) {
            x[at] = f32_value(point[at]);
        }
    }
    float best = f32_value(0x7F800000);
    unsigned found = 0;
    for (unsigned entry = 0; entry < count; entry++) {
        const uint16_t* of = entries + entry * channels;
        float score = norms[entry];
        if constexpr (DIM > 0) {
#pragma unroll
            for (unsigned at = 0; at < DIM; at++) {
                score = minus(score, times(x[at], f16_value(of[at])));
            }
        } else {
            for (unsigned at = 0; at < channels; at++) {
                score = minus(score, times(f32_value(point[at]), f16_value(of[at])));
            }
        }
        const bool closer = score < best;
        best = closer ? score : best;
        found = closer ? entry : found;
    }
    return found;
}

struct StoreVq {
    KVD_DEVICE static unsigned nearest(const SideShape& side, const uint32_t* point,
                                       const uint16_t* entries, const float* norms) {
        const unsigned count = 1u << side.bits;
        switch (side.book_dim) {
            case 2: return nearest_entry<2>(point, 2, entries, norms, count);
            case 4: return nearest_entry<4>(point, 4, entries, norms, count);
            case 8: return nearest_entry<8>(point, 8, entries, norms, count);
            default: return nearest_entry<0>(point, side.book_dim, entries, norms, count);
        }
    }

    // Finds the codes of a sub-vector and leaves them in its first words.
    KVD_DEVICE static void find(const Work& work, unsigned token, unsigned sub) {
        const SideShape& side = work.side;
        uint32_t* point = work.words + token * work.stride + sub * side.book_dim;
        uint32_t codes[VQ_STAGES_MAX] = {};
#pragma unroll
        for (unsigned stage = 0; stage < VQ_STAGES_MAX; stage++) {
            if (stage == side.stages) {
                break;
            }
            const uint64_t book = (side.sets > 1 ? sub * side.stages : 0) + stage;
            const uint16_t* entries = reinterpret_cast<const uint16_t*>(work.tables + side.table) +
                                      (book << side.bits) * side.book_dim;
            codes[stage] = nearest(side, point, entries, work.norms + (book << side.bits));
            for (unsigned at = 0; at < side.book_dim && stage + 1 < side.stages; at++) {
                const float left = minus(f32_value(point[at]),
                                         f16_value(entries[codes[stage] * side.book_dim + at]));
                point[at] = f32_bits(left);
            }
        }
#pragma unroll
        for (unsigned stage = 0; stage < VQ_STAGES_MAX; stage++) {
            if (stage < side.stages) {
                point[stage] = codes[stage];
            }
        }
    }

    template <class Stage>
    KVD_DEVICE static unsigned store(const Work& work) {
        if (largest_magnitude(work) > f32_bits(work.unit.limit)) {
            return NO_CODES;
        }
        const unsigned subs = Vq::subs(work.side);
        for (unsigned at = thread_index(); at < subs * work.tokens; at += STORE_THREADS) {
            find(work, at % work.tokens, at / work.tokens);
        }
        KVD_BARRIER();
        return Stage::write(work, work.payload, subs * work.side.stages, work.side.bits,
                            [&](unsigned token, unsigned position) {
                                const unsigned sub = position % subs;
                                const unsigned first = sub * work.side.book_dim + position / subs;
                                return unsigned(work.words[token * work.stride + first]);
                            });
    }
};

}  // namespace kvd
