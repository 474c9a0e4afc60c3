// The device functions that kernels need: indices, barriers, shuffles, copies that overlap
// arithmetic, narrow floats, and how a kernel is declared. Two implementations: CUDA's, and the
// emulator's (emu/emu.h). No other header uses a CUDA builtin, inline PTX or shared memory.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define KVD_DEVICE __device__ __forceinline__
// Constants of one file that every thread reads.
#define KVD_CONSTANT static __constant__
#define KVD_BARRIER() __syncthreads()
#define KVD_SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xFFFFFFFFu, value, mask)
// The word of another lane; the lanes that meet a condition; makes a lane's writes to shared memory visible
// to the others. Always for all lanes of a warp.
#define KVD_SHUFFLE(word, lane) __shfl_sync(0xFFFFFFFFu, word, lane)
#define KVD_BALLOT(condition) __ballot_sync(0xFFFFFFFFu, condition)
#define KVD_WARP_BARRIER() __syncwarp()
// A word that all lanes of a warp have, said to the compiler: it needs no register of every lane.
#define KVD_UNIFORM(word) kvd::warp_most(word)
// `sums` of 16 rows and 8 columns plus A (16 rows, 32 columns) times B, bytes with a sign or without,
// all by fragment: see multiply_bytes.
#define KVD_MULTIPLY_BYTES(SIGNED_A, SIGNED_B, sums, a, b) \
    kvd::multiply_bytes<SIGNED_A, SIGNED_B>(sums, a, b)
// Product of 16 rows and 16 columns of halves, bf16 or f16, with sums of f32: see multiply_halves.
// Loads the matrices whose rows the lanes of a warp name, transposed: see load_matrices.
#define KVD_MULTIPLY_HALVES(IS_BF16, sums, a, b) kvd::multiply_halves<IS_BF16>(sums, a, b)
#define KVD_LOAD_MATRICES(words, row) kvd::load_matrices(words, row)
// The matrix of eight rows of eight halves whose words the lanes of a warp have, transposed: see
// transposed_word.
#define KVD_TRANSPOSE(word) kvd::transposed_word(word)
// Tested in the emulator only: sizes that the host promised.
#define KVD_EXPECT(condition) ((void)0)
// A condition that full tiles of a long sequence hardly ever meet: its branch is laid out of the way. Where
// instructions are counted (gpu/count.py) the branch is marked.
#ifdef KVD_MARK_RARE
#define KVD_RARELY(condition) (__builtin_expect(!!(condition), 0) && kvd::mark_rare())
#else
#define KVD_RARELY(condition) __builtin_expect(!!(condition), 0)
#endif
// Keeps a word in a register, where the compiler would compute it anew for every tile.
#define KVD_KEEP(word) asm volatile("" : "+r"(word))
// A kernel `name` of `threads` threads whose one parameter is a struct and whose shared memory is
// all dynamic: `body(parameters, shared)`. Its registers leave room for so many thread blocks on a
// multiprocessor.
#define KVD_KERNEL_OF(name, threads, blocks, Parameters, body)                                   \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                \
        name(const Parameters parameters) {                                                      \
        extern __shared__ __align__(16) unsigned char shared[];                                  \
        body(parameters, shared);                                                                \
    }
#define KVD_KERNEL(name, threads, Parameters, body)                                              \
    KVD_KERNEL_OF(name, threads, 4, Parameters, body)

namespace kvd {

#ifdef KVD_MARK_RARE
KVD_DEVICE bool mark_rare() {
    asm volatile("pmevent 15;");
    return true;
}
#endif

KVD_DEVICE unsigned thread_index() { return threadIdx.x; }
KVD_DEVICE unsigned block_index() { return blockIdx.x; }

// Copies 16 bytes, both ends aligned to 16, past the registers; they are there after the wait for
// their group and a barrier.
KVD_DEVICE void copy_async16(void* shared, const void* global) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
// The same of 8 bytes, aligned to 8.
KVD_DEVICE void copy_async8(void* shared, const void* global) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
}
// Copies the first `bytes`, at most 16; zeros for the others.
KVD_DEVICE void copy_async16(void* shared, const void* global, unsigned bytes) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
}
// Where of a sixteen a byte of shared memory is.
KVD_DEVICE unsigned shared_misaligned(const uint8_t* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared)) % 16;
}
KVD_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `KEEP` of this thread's youngest groups are under way.
template <int KEEP>
KVD_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
}

// One product of tensor cores, by all lanes of a warp (PTX ISA "Matrix Fragments for mma.m16n8k32").
// Lane `4 g + t` holds of A rows `g` (words 0, 2) and `g + 8` (1, 3), columns `4 t..` (0, 1) and
// `16 + 4 t..` (2, 3); of B column `g`, rows `4 t..` and `16 + 4 t..`; of the sums rows `g` (0, 1)
// and `g + 8` (2, 3), columns `2 t` and `2 t + 1`.
#define KVD_MMA(a_type, b_type)                                                                    \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." a_type "." b_type                        \
                 ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                 : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <bool SIGNED_A, bool SIGNED_B>
KVD_DEVICE void multiply_bytes(int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (SIGNED_A && SIGNED_B) {
        KVD_MMA("s8", "s8");
    } else if constexpr (SIGNED_A) {
        KVD_MMA("s8", "u8");
    } else if constexpr (SIGNED_B) {
        KVD_MMA("u8", "s8");
    } else {
        KVD_MMA("u8", "u8");
    }
}
#undef KVD_MMA

// Product of halves (PTX ISA "Matrix Fragments for mma.m16n8k16"). Lane `4 g + t` holds of A rows
// `g` (words 0, 2) and `g + 8` (1, 3), columns `2 t, 2 t + 1` (0, 1) and `8 + 2 t, 9 + 2 t` (2, 3);
// of B column `g`, rows as A's columns; the sums as in multiply_bytes.
#define KVD_MMA(type)                                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <bool IS_BF16>
KVD_DEVICE void multiply_halves(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (IS_BF16) {
        KVD_MMA("bf16");
    } else {
        KVD_MMA("f16");
    }
}
#undef KVD_MMA

// Four matrices of eight rows of eight halves, in shared memory: lane `8 m + r` names row `r` of matrix
// `m`, aligned to 16. Lane `4 g + t` gets of each the halves of column `g` in rows `2 t` and `2 t + 1`.
KVD_DEVICE void load_matrices(uint32_t (&words)[4], const uint8_t* row) {
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

// Lane `4 g + t` brings the halves of row `g` in columns `2 t` and `2 t + 1`, and gets those of column `g` in
// rows `2 t` and `2 t + 1`.
KVD_DEVICE uint32_t transposed_word(uint32_t word) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
    return turned;
}

// Products of two f16 numbers with two; and their sums with two more, or differences, each rounded once.
KVD_DEVICE uint32_t half_products(uint32_t a, uint32_t b) {
    uint32_t products;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
}
template <bool SUBTRACTS>
KVD_DEVICE uint32_t half_sums(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sums;
    if constexpr (SUBTRACTS) {
        asm("{ .reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n; }"
            : "=r"(sums)
            : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
    }
    return sums;
}

// Bytes of two words, those of `low` numbered from 0, of `high` from 4, by the digits of `which`.
KVD_DEVICE uint32_t bytes_of(uint32_t low, uint32_t high, unsigned which) {
    return __byte_perm(low, high, which);
}
// For digits of at most 7, which the caller ensures.
KVD_DEVICE uint32_t bytes_at(uint32_t low, uint32_t high, unsigned which) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(which));
    return bytes;
}
// Rotates a word right by the low five bits of `by`.
KVD_DEVICE uint32_t rotated(uint32_t word, unsigned by) { return __funnelshift_r(word, word, by); }
// The low byte of a word `times` a number below 256, plus a sum.
KVD_DEVICE uint32_t low_byte(uint32_t word, uint32_t times, uint32_t sum) {
    return __dp4a(word, times, sum);
}
// Where a condition holds a word loses its low half, and has another's as its high one.
KVD_DEVICE void append_if(bool condition, uint32_t& word, uint32_t high) {
    asm("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p prmt.b32 %0, %0, %2, 0x5432; }"
        : "+r"(word)
        : "r"(uint32_t(condition)), "r"(high));
}
// Where it holds `by` is taken from a word.
KVD_DEVICE void subtract_if(bool condition, uint32_t& word, uint32_t by) {
    asm("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p sub.u32 %0, %0, %2; }"
        : "+r"(word)
        : "r"(uint32_t(condition)), "r"(by));
}
// `sum` and the bytes of a word.
KVD_DEVICE uint32_t byte_sum(uint32_t word, uint32_t sum) { return __dp4a(word, 0x01010101u, sum); }
KVD_DEVICE unsigned ones(uint32_t word) { return unsigned(__popc(word)); }
KVD_DEVICE float f16_value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
KVD_DEVICE float bf16_value(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
KVD_DEVICE float f32_value(uint32_t bits) { return __uint_as_float(bits); }
KVD_DEVICE uint32_t f32_bits(float value) { return __float_as_uint(value); }
// To the nearest, ties to even.
KVD_DEVICE uint16_t f16_bits(float value) { return __half_as_ushort(__float2half_rn(value)); }
// The largest that is not above the value; minus infinity where there is none.
KVD_DEVICE uint16_t f16_bits_below(float value) { return __half_as_ushort(__float2half_rd(value)); }
KVD_DEVICE uint16_t bf16_bits(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
// `e^x` for `x` up to slightly above 0: within 2^-22 of it, and 2^-24 of `x` more; 0 where it is not a
// normal number.
KVD_DEVICE float exp_near(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
    return power;
}
// The largest of a warp's values, none of which is negative.
KVD_DEVICE float warp_max_magnitude(float value) {
    return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(value)));
}
// The largest word in a warp.
KVD_DEVICE uint32_t warp_most(uint32_t word) { return __reduce_max_sync(0xFFFFFFFFu, word); }
// The sum of the words of a warp.
KVD_DEVICE uint32_t warp_total(uint32_t word) { return __reduce_add_sync(0xFFFFFFFFu, word); }
// The smaller, and the larger, of two numbers: NaN where one of them is.
KVD_DEVICE float smaller(float a, float b) {
    float number;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(number) : "f"(a), "f"(b));
    return number;
}
KVD_DEVICE float larger(float a, float b) {
    float number;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(number) : "f"(a), "f"(b));
    return number;
}
// Two numbers as a word, the first one low.
KVD_DEVICE uint32_t f16_word(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
KVD_DEVICE uint32_t bf16_word(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Two e4m3 codes, the low one first, as f16; where an instruction does it.
#define KVD_E4M3_WORD(codes) kvd::e4m3_word(codes)
KVD_DEVICE uint32_t e4m3_word(uint16_t codes) {
    uint32_t word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(codes));
    return word;
}
#endif
// Each is rounded by itself, as on the host, so pages have the same bytes from either. Plain operators may
// be fused.
KVD_DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
KVD_DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
KVD_DEVICE float minus(float a, float b) { return __fsub_rn(a, b); }
KVD_DEVICE float over(float a, float b) { return __fdiv_rn(a, b); }
KVD_DEVICE float reciprocal(float a) { return __frcp_rn(a); }
KVD_DEVICE float root(float a) { return __fsqrt_rn(a); }
KVD_DEVICE double times(double a, double b) { return __dmul_rn(a, b); }
KVD_DEVICE double plus(double a, double b) { return __dadd_rn(a, b); }
KVD_DEVICE double over(double a, double b) { return __ddiv_rn(a, b); }
KVD_DEVICE double root(double a) { return __dsqrt_rn(a); }
KVD_DEVICE uint64_t high_product(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
// Added where others add at the same time; in no order with anything else.
KVD_DEVICE void add_shared(uint32_t* to, uint32_t n) { atomicAdd(to, n); }
KVD_DEVICE void add_global(uint64_t* to, uint64_t n) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(n));
}

}  // namespace kvd

#else
#include "emu.h"
#endif

namespace kvd {

constexpr unsigned WARP_LANES = 32;

KVD_DEVICE unsigned lane_index() { return thread_index() % WARP_LANES; }
KVD_DEVICE unsigned warp_index() { return thread_index() / WARP_LANES; }

KVD_DEVICE float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) {
        value = fmaxf(value, KVD_SHUFFLE_XOR(value, step));
    }
    return value;
}

#ifndef __CUDACC__
KVD_DEVICE float warp_max_magnitude(float value) { return warp_max(value); }

KVD_DEVICE uint32_t warp_most(uint32_t word) {
    for (unsigned step = WARP_LANES / 2; step > 0; step /= 2) {
        const uint32_t other = KVD_SHUFFLE(word, lane_index() ^ step);
        word = other > word ? other : word;
    }
    return word;
}
KVD_DEVICE uint32_t warp_total(uint32_t word) {
    for (unsigned step = WARP_LANES / 2; step > 0; step /= 2) {
        word += KVD_SHUFFLE(word, lane_index() ^ step);
    }
    return word;
}
#endif

KVD_DEVICE float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) {
        value += KVD_SHUFFLE_XOR(value, step);
    }
    return value;
}

KVD_DEVICE unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }
KVD_DEVICE unsigned most(unsigned a, unsigned b) { return a > b ? a : b; }

}  // namespace kvd
