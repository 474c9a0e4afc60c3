// The store path: a thread block takes one page of one KV head and side from raw rows in the arena to a
// sealed page (KVComp 2509.00579 section 3.2, its store pipeline): rows in, transforms, quantize in place,
// codes to planes or to Huffman codes, header and checksum. Of a page that its quantizer has no codes for
// it says so, and the host asks for the rows as they came. Reference: kvd-codec/src/encode.rs.
#pragma once

#include "float.cuh"
#include "seal.cuh"
#include "transform.cuh"

namespace kvd {

// Shared memory of a thread block: `STORE_THREADS` sums of the checksum, in whose place outliers are
// counted before it, a slot per warp, rows that transforms read, a shift per row, and words where there
// is room. Mirrored by the host (`SHARED_BYTES` of crates/kvd-cuda/src/store/plan.rs).
struct StoreShared {
    uint64_t* sums;
    uint32_t* slots;
    uint32_t* rows;
    uint8_t* shifts;
    uint32_t* words;

    KVD_DEVICE StoreShared(const StoreParameters& parameters, unsigned char* shared) {
        sums = reinterpret_cast<uint64_t*>(shared);
        slots = reinterpret_cast<uint32_t*>(shared + 8 * STORE_THREADS);
        rows = slots + STORE_WARPS;
        shifts = reinterpret_cast<uint8_t*>(rows) + parameters.row_bytes;
        words = reinterpret_cast<uint32_t*>(shifts + parameters.gain_bytes);
    }
};

// `unit` is this thread block's; the result keeps it by reference.
KVD_DEVICE Work work_of(const StoreParameters& parameters, const StoreUnit& unit,
                        const StoreShared& part) {
    return {unit.side,
            unit,
            parameters.units[block_index()].header,
            unit.tokens,
            unit.side.dim,
            unit.words == IN_SHARED ? part.words : parameters.words + unit.words,
            word_stride(unit.side.dim),
            parameters.pages + unit.page + HEADER_BYTES,
            parameters.tables,
            parameters.steps + unit.steps,
            reinterpret_cast<const float*>(parameters.steps + unit.norms),
            reinterpret_cast<const CodeHead*>(parameters.steps + unit.codes),
            parameters.steps,
            part.sums,
            part.slots,
            part.rows,
            part.shifts};
}

// From rows that are loaded to coefficients.
KVD_DEVICE void make_coefficients(const Work& work) {
    if (work.unit.median != 0) {
        find_shifts(work);
        KVD_BARRIER();
    }
    transform(work);
    KVD_BARRIER();
}

// `Stage` makes codes bytes.
template <class Quantizer, class Stage>
KVD_DEVICE void store_page(const StoreParameters& parameters, unsigned char* shared) {
    const StoreUnit unit = parameters.units[block_index()];
    const StoreShared part(parameters, shared);
    const Work work = work_of(parameters, unit, part);
    uint8_t* header = parameters.headers + uint64_t(block_index()) * HEADER_BYTES;
    load_rows(work, parameters.arena + unit.rows);
    KVD_BARRIER();
    make_coefficients(work);
    const unsigned payload = Quantizer::template store<Stage>(work);
    if (payload == NO_CODES) {
        if (thread_index() < HEADER_BYTES / 4) {
            store32(header + 4 * thread_index(), 0);
        }
        return;
    }
    const unsigned gains = unit.median != 0 ? append_gains(work, work.payload + payload) : 0;
    seal(work, header, payload + gains, gains > 0 ? FLAG_GAINS : 0, part.sums);
}

}  // namespace kvd

#define KVD_STORE(name, Quantizer)                                           \
    KVD_KERNEL(kvd_store_##name, kvd::STORE_THREADS, kvd::StoreParameters, \
               (kvd::store_page<Quantizer, kvd::FixedCodes>))
#define KVD_STORE_HUFFMAN(name, Quantizer)                                           \
    KVD_KERNEL(kvd_store_huffman_##name, kvd::STORE_THREADS, kvd::StoreParameters, \
               (kvd::store_page<Quantizer, kvd::HuffmanCodes>))
