// Counts of each code in pages that are not written yet; a layer's first Huffman tables are built from them
// (KVComp, 2509.00579 section 3.2). A thread block takes a page as far as its codes, counts them in shared
// memory, and adds its counts to the counters of its layer and side. Codes are few and skewed, so lanes
// would meet in the same counters: each counter has several copies, dealt to the threads, in banks of their
// own where there are as many as lanes. Reference: count_codes of kvd-codec/src/train.rs; host side:
// crates/kvd-cuda/src/store/histogram.rs.
#pragma once

#include "page.cuh"

namespace kvd {

// In place of bytes.
struct CountCodes {
    template <class Code>
    KVD_DEVICE static unsigned write(const Work& work, uint8_t*, unsigned per_row, unsigned,
                                     Code code) {
        // Where transforms had their copies of rows.
        uint32_t* counters = work.rows;
        const unsigned codes = work.unit.room;
        const unsigned copies = work.unit.copies;
        for (unsigned at = thread_index(); at < codes * copies; at += STORE_THREADS) {
            counters[at] = 0;
        }
        KVD_BARRIER();
        const unsigned mine = thread_index() & (copies - 1);
        each_value(work.tokens, per_row, [&](unsigned token, unsigned position) {
            const unsigned one = code(token, position);
            KVD_EXPECT(one < codes);
            add_shared(counters + one * copies + mine, 1);
        });
        KVD_BARRIER();
        return 0;
    }
};

// For a side whose codes nobody counts: its rows are checked all the same.
struct CountNothing {
    template <class Stage>
    KVD_DEVICE static unsigned store(const Work&) {
        return NO_CODES;
    }
};

// The first counter counts pages whose rows have values that are not finite: no page of their block
// counts, so that the host counts instead. The counters of a layer follow, by side and variant. A
// page that its quantizer has no codes for counts nothing.
template <class Quantizer>
KVD_DEVICE void count_page(const StoreParameters& parameters, unsigned char* shared) {
    const StoreUnit unit = parameters.units[block_index()];
    const StoreShared part(parameters, shared);
    const Work work = work_of(parameters, unit, part);
    uint64_t* counts = reinterpret_cast<uint64_t*>(parameters.headers);
    load_rows(work, parameters.arena + unit.rows);
    KVD_BARRIER();
    bool finite = true;
    each_value(work.tokens, work.dim, [&](unsigned token, unsigned channel) {
        finite &= is_finite(work.value(token, channel));
    });
    if (block_most(finite ? 0 : 1, part.slots) != 0) {
        if (thread_index() == 0) {
            add_global(counts, 1);
        }
        return;
    }
    make_coefficients(work);
    if (Quantizer::template store<CountCodes>(work) == NO_CODES) {
        return;
    }
    for (unsigned code = thread_index(); code < unit.room; code += STORE_THREADS) {
        unsigned sum = 0;
        for (unsigned copy = 0; copy < unit.copies; copy++) {
            // Neighbours begin in banks of their own.
            sum += work.rows[code * unit.copies + ((copy + thread_index()) & (unit.copies - 1))];
        }
        if (sum > 0) {
            add_global(counts + unit.codes + code, sum);
        }
    }
}

}  // namespace kvd

#define KVD_HISTOGRAM(name, Quantizer)                                           \
    KVD_KERNEL(kvd_histogram_##name, kvd::STORE_THREADS, kvd::StoreParameters, \
               (kvd::count_page<Quantizer>))
