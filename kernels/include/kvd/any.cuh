// Any side, chosen when the kernel runs: for the pairs that have no kernel of their own (a page that
// fell back beside one that did not, keys of one paper with values of another). Slower, never wrong.
#pragma once

#include "bitalloc.cuh"
#include "float.cuh"
#include "grid.cuh"
#include "hybrid.cuh"
#include "lloyd.cuh"
#include "polar.cuh"
#include "uniform.cuh"
#include "vq.cuh"

namespace kvd {

struct Any {
    static constexpr unsigned SPANS = BitAlloc::SPANS;
    static constexpr bool ODD_WORDS = true;

    // Calls `use` with a value of the side's type.
    template <class Use>
    KVD_DEVICE static void with(const SideShape& side, Use use) {
        switch (SideKernel(side.kind)) {
            case SideKernel::F32: return use(Float<kvd::F32>());
            case SideKernel::F16: return use(Float<kvd::F16>());
            case SideKernel::Bf16: return use(Float<kvd::Bf16>());
            case SideKernel::Fp8: return use(kvd::Fp8());
            case SideKernel::Uniform: return use(kvd::Uniform<Asymmetric>());
            case SideKernel::Symmetric: return use(kvd::Uniform<kvd::Symmetric>());
            case SideKernel::Hybrid: return use(kvd::Hybrid());
            case SideKernel::Vq: return use(kvd::Vq());
            case SideKernel::Polar: return use(kvd::Polar());
            case SideKernel::Lloyd: return use(kvd::Lloyd());
            case SideKernel::BitAlloc: return use(kvd::BitAlloc());
            case SideKernel::Grid: return use(kvd::Grid());
        }
        KVD_EXPECT(false);
    }

    KVD_DEVICE static uint64_t codes_at(const SideShape& side, const Tile& tile) {
        uint64_t at = 0;
        with(side, [&](auto chosen) { at = decltype(chosen)::codes_at(side, tile); });
        return at;
    }

    KVD_DEVICE static Span span(const SideShape& side, const Tile& tile, unsigned part) {
        Span span = {0, 0};
        with(side, [&](auto chosen) {
            if constexpr (decltype(chosen)::SPANS > 0) {
                if (part < decltype(chosen)::SPANS) {
                    span = decltype(chosen)::span(side, tile, part);
                }
            }
        });
        return span;
    }

    KVD_DEVICE static void prepare(const SideShape& side, const uint8_t* tables, uint8_t* table,
                                   unsigned threads) {
        with(side, [&](auto chosen) {
            decltype(chosen)::prepare(side, tables, table, threads);
        });
    }

    template <int ROWS>
    KVD_DEVICE static void scores(const SideShape& side, const Tile& tile, unsigned warps,
                                  const float* query, float (&scores)[ROWS]) {
        with(side, [&](auto chosen) {
            decltype(chosen)::template scores<ROWS>(side, tile, warps, query, scores);
        });
    }

    template <int ROWS>
    KVD_DEVICE static void accumulate(const SideShape& side, const Tile& tile, unsigned position,
                                      unsigned slice, unsigned slices, const float* weights,
                                      float (&out)[ROWS]) {
        with(side, [&](auto chosen) {
            decltype(chosen)::template accumulate<ROWS>(side, tile, position, slice, slices,
                                                        weights, out);
        });
    }
};

}  // namespace kvd
