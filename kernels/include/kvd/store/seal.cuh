// The end of a page: gains, padding, header, and the XXH3-64 of the whole page with the checksum's own
// eight bytes zero (docs/format.md "Page"; the hash is that of github.com/Cyan4973/xxHash, seed 0). Sums of
// stripes are independent, so a thread takes a lane of a kilobyte; eight threads fold the results. CPU
// reference: kvd-codec/src/page.rs.
#pragma once

#include "work.cuh"

namespace kvd {

constexpr unsigned HEADER_BYTES = 32;
constexpr unsigned CHECKSUM_AT = 24;
constexpr uint32_t FLAG_GAINS = 4u << 24;

KVD_CONSTANT uint64_t XXH3_SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

constexpr uint32_t XXH_PRIME32_1 = 0x9E3779B1u;
constexpr uint32_t XXH_PRIME32_2 = 0x85EBCA77u;
constexpr uint32_t XXH_PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t XXH_PRIME64_1 = 0x9E3779B185EBCA87ull;
constexpr uint64_t XXH_PRIME64_2 = 0xC2B2AE3D27D4EB4Full;
constexpr uint64_t XXH_PRIME64_3 = 0x165667B19E3779F9ull;
constexpr uint64_t XXH_PRIME64_4 = 0x85EBCA77C2B2AE63ull;
constexpr uint64_t XXH_PRIME64_5 = 0x27D4EB2F165667C5ull;

constexpr unsigned XXH_STRIPE_BYTES = 64;
constexpr unsigned XXH_LANES = 8;
// Stripes between two scrambles.
constexpr unsigned XXH_STRIPES = 16;
constexpr unsigned XXH_BLOCK_BYTES = XXH_STRIPES * XXH_STRIPE_BYTES;
// Blocks whose sums the threads find together.
constexpr unsigned XXH_BLOCKS = STORE_THREADS / XXH_LANES;

// Eight bytes of the secret, from any byte on.
KVD_DEVICE uint64_t secret(unsigned at) {
    const uint64_t low = XXH3_SECRET[at / 8];
    const unsigned shift = 8 * (at % 8);
    return shift == 0 ? low : low >> shift | XXH3_SECRET[at / 8 + 1] << (64 - shift);
}

KVD_DEVICE uint64_t load64(const uint8_t* at) { return *reinterpret_cast<const uint64_t*>(at); }

KVD_DEVICE uint64_t fold_product(uint64_t a, uint64_t b) { return a * b ^ high_product(a, b); }

KVD_DEVICE uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

KVD_DEVICE uint64_t mix16(const uint8_t* at, unsigned key) {
    return fold_product(load64(at) ^ secret(key), load64(at + 8) ^ secret(key + 8));
}

// Hash of 17 to 128 bytes: pairs of sixteens from both ends.
KVD_DEVICE uint64_t hash_short(const uint8_t* page, unsigned len) {
    uint64_t sum = len * XXH_PRIME64_1;
    for (unsigned pair = 0; pair <= (len - 1) / 32; pair++) {
        sum += mix16(page + 16 * pair, 32 * pair);
        sum += mix16(page + len - 16 * (pair + 1), 32 * pair + 16);
    }
    return avalanche(sum);
}

// Hash of 129 to 240 bytes.
KVD_DEVICE uint64_t hash_middle(const uint8_t* page, unsigned len) {
    uint64_t sum = len * XXH_PRIME64_1;
    for (unsigned at = 0; at < 8; at++) {
        sum += mix16(page + 16 * at, 16 * at);
    }
    sum = avalanche(sum);
    for (unsigned at = 8; at < len / 16; at++) {
        sum += mix16(page + 16 * at, 16 * (at - 8) + 3);
    }
    return avalanche(sum + mix16(page + len - 16, 136 - 17));
}

// The sum that a stripe adds to a lane.
KVD_DEVICE uint64_t stripe_sum(const uint8_t* stripe, unsigned lane, unsigned key) {
    const uint64_t keyed = load64(stripe + 8 * lane) ^ secret(key + 8 * lane);
    return load64(stripe + 8 * (lane ^ 1)) + uint64_t(uint32_t(keyed)) * (keyed >> 32);
}

KVD_DEVICE uint64_t first_sum(unsigned lane) {
    switch (lane) {
        case 0: return XXH_PRIME32_3;
        case 1: return XXH_PRIME64_1;
        case 2: return XXH_PRIME64_2;
        case 3: return XXH_PRIME64_3;
        case 4: return XXH_PRIME64_4;
        case 5: return XXH_PRIME32_2;
        case 6: return XXH_PRIME64_5;
        default: return XXH_PRIME32_1;
    }
}

// Hash of more than 240 bytes. All threads take part; the result is the first's. `sums` are
// `STORE_THREADS` numbers of shared memory.
KVD_DEVICE uint64_t hash_long(const uint8_t* page, unsigned len, uint64_t* sums) {
    const unsigned lane = thread_index() % XXH_LANES;
    const unsigned blocks = (len - 1) / XXH_BLOCK_BYTES;
    const unsigned all = (len - 1) / XXH_STRIPE_BYTES;
    // Threads that share a lane of a block: more where there are few blocks.
    unsigned parts = XXH_BLOCKS;
    while (parts > 1 && parts * (blocks + 1) > XXH_BLOCKS) {
        parts /= 2;
    }
    const unsigned shift = ones(parts - 1);
    const unsigned at_once = XXH_BLOCKS >> shift;
    const unsigned part = thread_index() / XXH_LANES & (parts - 1);
    uint64_t sum = first_sum(lane);
    for (unsigned first = 0; first <= blocks; first += at_once) {
        const unsigned from = (first + (thread_index() / XXH_LANES >> shift)) * XXH_STRIPES;
        const unsigned count = least(all - least(all, from), XXH_STRIPES);
        const uint8_t* stripes = page + from * XXH_STRIPE_BYTES;
        uint64_t mine = 0;
#pragma unroll 4
        for (unsigned stripe = part; stripe < count; stripe += parts) {
            mine += stripe_sum(stripes + stripe * XXH_STRIPE_BYTES, lane, 8 * stripe);
        }
        sums[thread_index()] = mine;
        KVD_BARRIER();
        if (thread_index() < XXH_LANES) {
            for (unsigned of = first; of < least(first + at_once, blocks + 1); of++) {
                for (unsigned next = 0; next < parts; next++) {
                    sum += sums[((of - first) * parts + next) * XXH_LANES + lane];
                }
                if (of < blocks) {
                    sum = ((sum ^ sum >> 47) ^ secret(128 + 8 * lane)) * XXH_PRIME32_1;
                }
            }
        }
        KVD_BARRIER();
    }
    if (thread_index() < XXH_LANES) {
        sums[lane] = sum + stripe_sum(page + len - XXH_STRIPE_BYTES, lane, 192 - 64 - 7);
    }
    KVD_BARRIER();
    uint64_t hash = len * XXH_PRIME64_1;
    if (warp_index() != 0) {
        return hash;
    }
    for (unsigned pair = 0; pair < XXH_LANES / 2; pair++) {
        hash += fold_product(sums[2 * pair] ^ secret(11 + 16 * pair),
                             sums[2 * pair + 1] ^ secret(11 + 16 * pair + 8));
    }
    return avalanche(hash);
}

// Appends the shifts of rows, where any row has one. Gives their bytes.
KVD_DEVICE unsigned append_gains(const Work& work, uint8_t* to) {
    unsigned mine = 0;
    for (unsigned token = thread_index(); token < work.tokens; token += STORE_THREADS) {
        mine = most(mine, work.shifts[token]);
    }
    if (block_most(mine, work.slots) == 0) {
        return 0;
    }
    const unsigned bytes = (work.tokens + 1) / 2;
    for (unsigned at = thread_index(); at < bytes; at += STORE_THREADS) {
        const unsigned high = 2 * at + 1 < work.tokens ? work.shifts[2 * at + 1] : 0;
        to[at] = uint8_t(work.shifts[2 * at] | high << 4);
    }
    return bytes;
}

// Pads a page whose payload is written, and writes its header, here and once more at `header`.
KVD_DEVICE void seal(const Work& work, uint8_t* header, unsigned payload, uint32_t flags,
                     uint64_t* sums) {
    uint8_t* page = work.payload - HEADER_BYTES;
    const unsigned len = (HEADER_BYTES + payload + 15) / 16 * 16;
    const unsigned padding = len - HEADER_BYTES - payload;
    if (thread_index() < padding) {
        work.payload[payload + thread_index()] = 0;
    }
    if (thread_index() < HEADER_BYTES / 4) {
        const unsigned at = thread_index();
        uint32_t word = at < 5 ? work.header[at] : at == 5 ? payload : 0;
        word |= at == 1 ? flags : 0;
        store32(page + 4 * at, word);
    }
    KVD_BARRIER();
    uint64_t hash = 0;
    if (len > 240) {
        hash = hash_long(page, len, sums);
    } else {
        hash = len > 128 ? hash_middle(page, len) : hash_short(page, len);
    }
    KVD_BARRIER();
    if (thread_index() == 0) {
        store32(page + CHECKSUM_AT, uint32_t(hash));
        store32(page + CHECKSUM_AT + 4, uint32_t(hash >> 32));
    }
    KVD_BARRIER();
    if (thread_index() < HEADER_BYTES / 4) {
        store32(header + 4 * thread_index(), load32(page + 4 * thread_index()));
    }
}

}  // namespace kvd
