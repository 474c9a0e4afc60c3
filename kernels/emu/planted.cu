// Kernels with a bug each, and one without: the CPU lane's own tests run them to prove that it would
// notice. Each reverses 64 words of `data` through shared memory.

#include <kvd/device.cuh>
#include <kvd/tokens.cuh>

namespace {

struct Planted {
    uint32_t* data;
};

constexpr unsigned THREADS = 64;

void correct(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    shared[kvd::thread_index()] = planted.data[kvd::thread_index()];
    KVD_BARRIER();
    planted.data[kvd::thread_index()] = shared[THREADS - 1 - kvd::thread_index()];
}

void missing_barrier(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    shared[kvd::thread_index()] = planted.data[kvd::thread_index()];
    planted.data[kvd::thread_index()] = shared[THREADS - 1 - kvd::thread_index()];
}

// Lanes meet in a shuffle, so that every order gives the right result here; on a GPU a shuffle says
// nothing about memory.
void racing_lanes(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    shared[kvd::thread_index()] = planted.data[kvd::thread_index()];
    KVD_SHUFFLE(0, 0);
    const unsigned other = kvd::warp_index() * 32 + 31 - kvd::lane_index();
    planted.data[kvd::thread_index()] = shared[other];
}

// The function above without its bug: the lanes meet first.
void meeting_lanes(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    shared[kvd::thread_index()] = planted.data[kvd::thread_index()];
    KVD_WARP_BARRIER();
    const unsigned other = kvd::warp_index() * 32 + 31 - kvd::lane_index();
    planted.data[kvd::thread_index()] = shared[other];
}

void divergent_barrier(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    shared[kvd::thread_index()] = planted.data[kvd::thread_index()];
    if (kvd::thread_index() < 32) {
        KVD_BARRIER();
    } else {
        KVD_BARRIER();
    }
    planted.data[kvd::thread_index()] = shared[THREADS - 1 - kvd::thread_index()];
}

void skipped_barrier(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    shared[kvd::thread_index()] = planted.data[kvd::thread_index()];
    if (kvd::thread_index() == 7) {
        return;
    }
    KVD_BARRIER();
    planted.data[kvd::thread_index()] = shared[THREADS - 1 - kvd::thread_index()];
}

// One word is never written.
void unwritten(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    if (kvd::thread_index() != 5) {
        shared[kvd::thread_index()] = planted.data[kvd::thread_index()];
    }
    KVD_BARRIER();
    planted.data[kvd::thread_index()] = shared[THREADS - 1 - kvd::thread_index()];
}

// One word past the end of shared memory; a sanitizer sees it.
void shared_overrun(const Planted& planted, uint8_t* memory) {
    uint32_t* shared = reinterpret_cast<uint32_t*>(memory);
    shared[kvd::thread_index() + 1] = planted.data[kvd::thread_index()];
    KVD_BARRIER();
    planted.data[kvd::thread_index()] = shared[THREADS - kvd::thread_index()];
}

// The copies are read before they are waited for.
void early_read(const Planted& planted, uint8_t* memory) {
    if (kvd::thread_index() < 16) {
        kvd::copy_async16(memory + 16 * kvd::thread_index(), planted.data + 4 * kvd::thread_index());
    }
    kvd::copy_async_commit();
    kvd::copy_async_wait<1>();
    KVD_BARRIER();
    const uint32_t* shared = reinterpret_cast<const uint32_t*>(memory);
    const uint32_t word = shared[THREADS - 1 - kvd::thread_index()];
    KVD_BARRIER();
    planted.data[kvd::thread_index()] = word;
    kvd::copy_async_wait<0>();
}

// Quarters of the words through buffers in turn, two under way while one is read. Right with three
// buffers and `KEEP` 1: with 2 a quarter is read before its copy is waited for; with two buffers the next
// but one is copied to where the others still read.
template <int KEEP, unsigned BUFFERS>
void in_turns(const Planted& planted, uint8_t* memory) {
    constexpr unsigned QUARTER = THREADS / 4;
    const auto start = [&](unsigned quarter) {
        const unsigned word = quarter * QUARTER + 4 * kvd::thread_index();
        if (quarter < 4 && kvd::thread_index() < QUARTER / 4) {
            uint8_t* to = memory + quarter % BUFFERS * 4 * QUARTER + 16 * kvd::thread_index();
            kvd::copy_async16(to, planted.data + word);
        }
        kvd::copy_async_commit();
    };
    start(0);
    start(1);
    const unsigned mine = THREADS - 1 - kvd::thread_index();
    uint32_t word = 0;
    for (unsigned quarter = 0; quarter < 4; quarter++) {
        kvd::copy_async_wait<KEEP>();
        KVD_BARRIER();
        start(quarter + 2);
        if (mine / QUARTER == quarter) {
            const uint8_t* from = memory + quarter % BUFFERS * 4 * QUARTER;
            word = reinterpret_cast<const uint32_t*>(from)[mine % QUARTER];
        }
    }
    kvd::copy_async_wait<0>();
    KVD_BARRIER();
    planted.data[kvd::thread_index()] = word;
}

// Half of a warp's lanes take part in a shuffle.
void half_shuffle(const Planted& planted, uint8_t*) {
    if (kvd::lane_index() < 16) {
        planted.data[kvd::thread_index()] = uint32_t(KVD_SHUFFLE_XOR(1.0f, 1));
    }
}

// Two thread blocks: each reverses words of its own, and counts its threads where both do.
void blocks_apart(const Planted& planted, uint8_t* memory) {
    uint64_t* count = reinterpret_cast<uint64_t*>(planted.data);
    const Planted mine = {planted.data + 2 + THREADS * kvd::block_index()};
    correct(mine, memory);
    kvd::add_global(count, 1);
}

// Both write the same words, the same as the other: no order shows it.
void blocks_together(const Planted& planted, uint8_t*) {
    planted.data[kvd::thread_index()] = kvd::thread_index();
}

// The second block's words are what it finds in the first's, which is right in one order.
void blocks_in_order(const Planted& planted, uint8_t*) {
    uint32_t* mine = planted.data + THREADS * kvd::block_index();
    mine[kvd::thread_index()] = planted.data[kvd::thread_index()];
}

// One adds where the other writes.
void blocks_half_atomic(const Planted& planted, uint8_t*) {
    uint64_t* count = reinterpret_cast<uint64_t*>(planted.data) + kvd::thread_index();
    if (kvd::block_index() == 0) {
        kvd::add_global(count, 1);
    } else {
        *count = 1;
    }
}

// One product of tensor cores of each kind: words of A `[16, 8]`, of B by column `[8, 8]`, then for each
// kind the sums `[16, 8]`. `SWAPPED`: two words of A in each other's place.
template <bool SIGNED_A, bool SIGNED_B, bool SWAPPED>
void multiply(const uint32_t* words, uint32_t* out) {
    const unsigned group = kvd::lane_index() / 4;
    const unsigned within = kvd::lane_index() % 4;
    const unsigned low = SWAPPED ? 4 : 0;
    const uint32_t a[4] = {words[group * 8 + low + within], words[(group + 8) * 8 + low + within],
                           words[group * 8 + 4 - low + within],
                           words[(group + 8) * 8 + 4 - low + within]};
    const uint32_t b[2] = {words[128 + group * 8 + within], words[128 + group * 8 + 4 + within]};
    int32_t sums[4] = {1, 2, 3, 4};
    KVD_MULTIPLY_BYTES(SIGNED_A, SIGNED_B, sums, a, b);
    for (unsigned i = 0; i < 4; i++) {
        out[(group + i / 2 * 8) * 8 + 2 * within + i % 2] = uint32_t(sums[i]) - (i + 1);
    }
}

template <bool SWAPPED>
void products(const Planted& planted, uint8_t*) {
    uint32_t* out = planted.data + 192;
    multiply<false, false, SWAPPED>(planted.data, out);
    multiply<false, true, SWAPPED>(planted.data, out + 128);
    multiply<true, false, SWAPPED>(planted.data, out + 256);
    multiply<true, true, SWAPPED>(planted.data, out + 384);
}

// The attention loop whose warps own tokens: values of one tile with the steps of the other; steps that are
// never brought into order; codes of values taken for the other half's.
template <class Pages>
struct SwappedTiles : Pages {
    using Pages::Pages;
    kvd::FourWords value_steps(unsigned tile, unsigned set) const {
        return Pages::value_steps(1 - tile, set);
    }
};
template <class Pages>
struct UnorderedSteps : Pages {
    using Pages::Pages;
    void order_value_steps() const {}
};
template <class Pages>
struct SwappedHalves : Pages {
    using Pages::Pages;
    static uint32_t value_mask(unsigned half) { return Pages::value_mask(1 - half); }
};

}  // namespace

// For four rows in heads of 128 channels, and for eight in such of 64.
#define PLANTED_TOKENS(name, Bug)                                                                \
    KVD_KERNEL(planted_##name, kvd::ATTEND_THREADS, kvd::AttendParameters,                       \
               kvd::attend_tokens<Bug<kvd::TokenPages<4>>>)                                      \
    KVD_KERNEL(planted_##name##_64, kvd::ATTEND_THREADS, kvd::AttendParameters,                  \
               (kvd::attend_tokens<Bug<kvd::TokenPages<4, 64, 2>>>))
PLANTED_TOKENS(swapped_tiles, SwappedTiles)
PLANTED_TOKENS(unordered_steps, UnorderedSteps)
PLANTED_TOKENS(swapped_halves, SwappedHalves)
KVD_KERNEL(planted_products, 32, Planted, products<false>)
KVD_KERNEL(planted_swapped_products, 32, Planted, products<true>)
KVD_KERNEL(planted_correct, THREADS, Planted, correct)
KVD_KERNEL(planted_missing_barrier, THREADS, Planted, missing_barrier)
KVD_KERNEL(planted_racing_lanes, THREADS, Planted, racing_lanes)
KVD_KERNEL(planted_meeting_lanes, THREADS, Planted, meeting_lanes)
KVD_KERNEL(planted_divergent_barrier, THREADS, Planted, divergent_barrier)
KVD_KERNEL(planted_skipped_barrier, THREADS, Planted, skipped_barrier)
KVD_KERNEL(planted_unwritten, THREADS, Planted, unwritten)
KVD_KERNEL(planted_shared_overrun, THREADS, Planted, shared_overrun)
KVD_KERNEL(planted_early_read, THREADS, Planted, early_read)
KVD_KERNEL(planted_in_turns, THREADS, Planted, (in_turns<1, 3>))
KVD_KERNEL(planted_early_turn, THREADS, Planted, (in_turns<2, 3>))
KVD_KERNEL(planted_reused_buffer, THREADS, Planted, (in_turns<1, 2>))
KVD_KERNEL(planted_half_shuffle, THREADS, Planted, half_shuffle)
KVD_KERNEL(planted_blocks_apart, THREADS, Planted, blocks_apart)
KVD_KERNEL(planted_blocks_together, THREADS, Planted, blocks_together)
KVD_KERNEL(planted_blocks_in_order, THREADS, Planted, blocks_in_order)
KVD_KERNEL(planted_blocks_half_atomic, THREADS, Planted, blocks_half_atomic)
