// The CPU lane's meaning of kvd/device.cuh: a CUDA thread is a fiber of one system thread. g++ only.
// ../README.md says which faults it finds and which it cannot.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVD_DEVICE inline
#define KVD_CONSTANT static const
#define KVD_BARRIER() kvd::emu::barrier({__FILE__, __LINE__})
#define KVD_SHUFFLE_XOR(value, mask) kvd::emu::shuffle_xor(value, mask, {__FILE__, __LINE__})
#define KVD_SHUFFLE(word, lane) kvd::emu::exchange(word, lane, {__FILE__, __LINE__})
#define KVD_UNIFORM(word) KVD_SHUFFLE(word, 0)
#define KVD_BALLOT(condition) kvd::emu::ballot(condition, {__FILE__, __LINE__})
#define KVD_MULTIPLY_BYTES(SIGNED_A, SIGNED_B, sums, a, b) \
    kvd::emu::multiply_bytes(SIGNED_A, SIGNED_B, sums, a, b, {__FILE__, __LINE__})
#define KVD_MULTIPLY_HALVES(IS_BF16, sums, a, b) \
    kvd::emu::multiply_halves(IS_BF16, sums, a, b, {__FILE__, __LINE__})
#define KVD_LOAD_MATRICES(words, row) \
    kvd::emu::load_matrices(words, row, {__FILE__, __LINE__})
#define KVD_TRANSPOSE(word) kvd::emu::transpose_word(word, {__FILE__, __LINE__})
#define KVD_WARP_BARRIER() kvd::emu::warp_barrier({__FILE__, __LINE__})
#define KVD_RARELY(condition) __builtin_expect(!!(condition), 0)
#define KVD_EXPECT(condition) \
    ((condition) ? (void)0 : kvd::emu::fail({__FILE__, __LINE__}, "expected " #condition))
#define KVD_KEEP(word) ((void)(word))
#define KVD_KERNEL(name, threads, Parameters, body)                                              \
    static void name(const void* parameters, uint8_t* shared) {                                  \
        body(*static_cast<const Parameters*>(parameters), shared);                               \
    }                                                                                            \
    static const kvd::emu::Kernel name##_kernel(#name, name, sizeof(Parameters), threads);
#define KVD_KERNEL_OF(name, threads, blocks, Parameters, body) \
    KVD_KERNEL(name, threads, Parameters, body)

namespace kvd {
namespace emu {

// Where in the kernels something stands.
struct Source {
    const char* file;
    int line;
};

// A kernel makes itself known by name before main runs.
struct Kernel {
    const char* name;
    void (*body)(const void*, uint8_t*);
    size_t parameter_bytes;
    unsigned threads;
    const Kernel* next;

    Kernel(const char* name, void (*body)(const void*, uint8_t*), size_t bytes, unsigned threads);
};

unsigned thread();
unsigned block();
// All threads of the block meet at one place in the source, or the launch fails.
void barrier(Source at);
// All lanes of the warp meet; gives the word of lane `source`.
uint32_t exchange(uint32_t word, unsigned source, Source at);
// All lanes of the warp meet, and see what the others wrote. The two that exchange a word do not: CUDA
// promises no order of memory for them.
void warp_barrier(Source at);
// All lanes of the warp meet; gives which of them have the condition.
uint32_t ballot(bool condition, Source at);
// All lanes of the warp meet; adds the product of bytes of theirs, in the fragments of PTX's
// `mma.m16n8k32`: four words of A, two of B, four sums.
void multiply_bytes(bool signed_a, bool signed_b, int32_t* sums, const uint32_t* a,
                    const uint32_t* b, Source at);
// As above with halves, bf16 or f16, in the fragments of `mma.m16n8k16`; sums of f32.
void multiply_halves(bool is_bf16, float* sums, const uint32_t* a, const uint32_t* b, Source at);
// All lanes of the warp meet, each with the four words of a row; gives what `ldmatrix.x4.trans` does.
void transpose_matrices(uint32_t* words, const uint32_t* row, Source at);
// All lanes of the warp meet, each with a word; gives what `movmatrix.trans` does.
uint32_t transpose_word(uint32_t word, Source at);
// A copy that is made as late as CUDA allows: when its group is waited for.
// Both ends are aligned to `size`; zeros follow where it copies fewer bytes.
void copy_async(void* to, const void* from, size_t bytes, size_t size);
void copy_async_commit();
void copy_async_wait(unsigned keep);
// Ends the launch with a message.
[[noreturn]] void fail(Source at, const char* message);

inline float shuffle_xor(float value, unsigned mask, Source at) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    word = exchange(word, (thread() % 32) ^ mask, at);
    memcpy(&value, &word, sizeof word);
    return value;
}

// The row is read here, where a sanitizer sees it.
inline void load_matrices(uint32_t (&words)[4], const uint8_t* row, Source at) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        fail(at, "a row of a matrix that is not aligned to its size");
    }
    const uint32_t* from = reinterpret_cast<const uint32_t*>(row);
    const uint32_t mine[4] = {from[0], from[1], from[2], from[3]};
    transpose_matrices(words, mine, at);
}

}  // namespace emu

inline unsigned thread_index() { return emu::thread(); }
inline unsigned block_index() { return emu::block(); }

inline void copy_async16(void* shared, const void* global) {
    emu::copy_async(shared, global, 16, 16);
}
inline void copy_async8(void* shared, const void* global) { emu::copy_async(shared, global, 8, 8); }
inline void copy_async16(void* shared, const void* global, unsigned bytes) {
    emu::copy_async(shared, global, bytes, 16);
}
inline unsigned shared_misaligned(const uint8_t* shared) {
    return unsigned(reinterpret_cast<uintptr_t>(shared) % 16);
}
inline void copy_async_commit() { emu::copy_async_commit(); }
template <int KEEP>
inline void copy_async_wait() {
    emu::copy_async_wait(KEEP);
}

inline uint32_t bytes_of(uint32_t low, uint32_t high, unsigned which) {
    const uint64_t both = uint64_t(high) << 32 | low;
    uint32_t bytes = 0;
    for (unsigned at = 0; at < 4; at++) {
        bytes |= uint32_t(both >> 8 * (which >> 4 * at & 7) & 255) << 8 * at;
    }
    return bytes;
}
inline uint32_t bytes_at(uint32_t low, uint32_t high, unsigned which) {
    return bytes_of(low, high, which);
}
inline uint32_t byte_sum(uint32_t word, uint32_t sum) {
    for (unsigned at = 0; at < 4; at++) {
        sum += word >> 8 * at & 255;
    }
    return sum;
}
inline uint32_t rotated(uint32_t word, unsigned by) {
    return word >> by % 32 | word << (32 - by % 32) % 32;
}
inline uint32_t low_byte(uint32_t word, uint32_t times, uint32_t sum) {
    return (word & 255) * times + sum;
}
inline void append_if(bool condition, uint32_t& word, uint32_t high) {
    word = condition ? bytes_of(word, high, 0x5432) : word;
}
inline void subtract_if(bool condition, uint32_t& word, uint32_t by) {
    word -= condition ? by : 0;
}
inline unsigned ones(uint32_t word) { return unsigned(__builtin_popcount(word)); }
inline float f32_value(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline float bf16_value(uint16_t bits) { return f32_value(uint32_t(bits) << 16); }
// Exponent and mantissa stand where an f32 has them, 112 too low; the product brings subnormals right.
inline float f16_value(uint16_t bits) {
    const uint32_t magnitude = bits & 0x7FFF;
    const float value = magnitude < 0x7C00 ? f32_value(magnitude << 13) * 0x1p112f
                                           : f32_value(0x7F800000 | (magnitude & 0x3FF) << 13);
    return bits & 0x8000 ? -value : value;
}
inline uint32_t f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
// Rounded in place, ties to even; a carry moves into the exponent as it should. Subnormals are rounded
// by an addition that leaves exactly them in the mantissa.
inline uint16_t f16_bits(float value) {
    const uint32_t sign = f32_bits(value) >> 16 & 0x8000;
    const uint32_t magnitude = f32_bits(value) & 0x7FFFFFFF;
    if (magnitude >= 0x477FF000) {
        return uint16_t(sign | (magnitude > 0x7F800000 ? 0x7E00 : 0x7C00));
    }
    if (magnitude < 0x38800000) {
        return uint16_t(sign | (f32_bits(f32_value(magnitude) + 0.5f) - f32_bits(0.5f)));
    }
    const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    return uint16_t(sign | (rounded - 0x38000000) >> 13);
}
inline uint16_t f16_bits_below(float value) {
    const uint16_t near = f16_bits(value);
    if (f16_value(near) <= value) {
        return near;
    }
    // One step down; zero has two encodings.
    if ((near & 0x7FFF) == 0) {
        return 0x8001;
    }
    return uint16_t((near & 0x8000) == 0 ? near - 1 : near + 1);
}
inline uint16_t bf16_bits(float value) {
    const uint32_t bits = f32_bits(value);
    return uint16_t(isnan(value) ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float exp_near(float x) { return expf(x); }
inline float smaller(float a, float b) { return a < b || isnan(a) ? a : b; }
inline float larger(float a, float b) { return a > b || isnan(a) ? a : b; }
inline uint32_t f16_word(float low, float high) {
    return f16_bits(low) | uint32_t(f16_bits(high)) << 16;
}
// To the nearest half: to odd first, so that no tie is made on the way.
inline uint16_t half_of(double number) {
    const float near = float(number);
    uint32_t bits = f32_bits(near);
    if (double(near) != number && isfinite(near)) {
        bits = fabs(double(near)) > fabs(number) ? bits - 1 : bits;
        bits |= 1;
    }
    return f16_bits(f32_value(bits));
}
template <bool SUBTRACTS>
inline uint32_t half_sums(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sums = 0;
    for (unsigned at = 0; at < 2; at++) {
        const auto half = [at](uint32_t word) { return double(f16_value(uint16_t(word >> 16 * at))); };
        const double sum = half(a) * half(b) + (SUBTRACTS ? -half(c) : half(c));
        sums |= uint32_t(half_of(sum)) << 16 * at;
    }
    return sums;
}
inline uint32_t half_products(uint32_t a, uint32_t b) { return half_sums<false>(a, b, 0); }
inline uint32_t bf16_word(float low, float high) {
    return bf16_bits(low) | uint32_t(bf16_bits(high)) << 16;
}
// Built without instructions that fuse, so plain operators are what they say.
inline float times(float a, float b) { return a * b; }
inline float plus(float a, float b) { return a + b; }
inline float minus(float a, float b) { return a - b; }
inline float over(float a, float b) { return a / b; }
inline float reciprocal(float a) { return 1.0f / a; }
inline float root(float a) { return sqrtf(a); }
inline double times(double a, double b) { return a * b; }
inline double plus(double a, double b) { return a + b; }
inline double over(double a, double b) { return a / b; }
inline double root(double a) { return sqrt(a); }
inline uint64_t high_product(uint64_t a, uint64_t b) {
    return uint64_t(static_cast<unsigned __int128>(a) * b >> 64);
}
// One system thread needs no atomics; what looks for races is told by them.
inline void add_shared(uint32_t* to, uint32_t n) { __atomic_fetch_add(to, n, __ATOMIC_RELAXED); }
inline void add_global(uint64_t* to, uint64_t n) { __atomic_fetch_add(to, n, __ATOMIC_RELAXED); }

}  // namespace kvd
