// Pages from rows, by quantizer, and how often each of their codes stands in them.

#include <kvd/store/bitalloc.cuh>
#include <kvd/store/grid.cuh>
#include <kvd/store/histogram.cuh>
#include <kvd/store/hybrid.cuh>
#include <kvd/store/lloyd.cuh>
#include <kvd/store/page.cuh>
#include <kvd/store/polar.cuh>
#include <kvd/store/uniform.cuh>
#include <kvd/store/vq.cuh>

KVD_STORE(f32, kvd::StoreFloat<kvd::F32>)
KVD_STORE(f16, kvd::StoreFloat<kvd::F16>)
KVD_STORE(bf16, kvd::StoreFloat<kvd::Bf16>)
KVD_STORE(fp8, kvd::StoreFp8)
KVD_STORE(uniform, kvd::StoreUniform<kvd::StoreAsymmetric>)
KVD_STORE(symmetric, kvd::StoreUniform<kvd::StoreSymmetric>)
KVD_STORE(hybrid, kvd::StoreHybrid)
KVD_STORE(vq, kvd::StoreVq)
KVD_STORE(polar, kvd::StorePolar)
KVD_STORE(lloyd, kvd::StoreLloyd)
KVD_STORE(bitalloc, kvd::StoreBitAlloc)

KVD_STORE_HUFFMAN(fp8, kvd::StoreFp8)
KVD_STORE_HUFFMAN(uniform, kvd::StoreUniform<kvd::StoreAsymmetric>)
KVD_STORE_HUFFMAN(symmetric, kvd::StoreUniform<kvd::StoreSymmetric>)
KVD_STORE_HUFFMAN(hybrid, kvd::StoreHybrid)
KVD_STORE_HUFFMAN(vq, kvd::StoreVq)
KVD_STORE_HUFFMAN(polar, kvd::StorePolar)
KVD_STORE_HUFFMAN(lloyd, kvd::StoreLloyd)
KVD_STORE_HUFFMAN(grid, kvd::StoreGrid)

KVD_HISTOGRAM(fp8, kvd::StoreFp8)
KVD_HISTOGRAM(uniform, kvd::StoreUniform<kvd::StoreAsymmetric>)
KVD_HISTOGRAM(symmetric, kvd::StoreUniform<kvd::StoreSymmetric>)
KVD_HISTOGRAM(hybrid, kvd::StoreHybrid)
KVD_HISTOGRAM(vq, kvd::StoreVq)
KVD_HISTOGRAM(polar, kvd::StorePolar)
KVD_HISTOGRAM(lloyd, kvd::StoreLloyd)
KVD_HISTOGRAM(rows, kvd::CountNothing)
