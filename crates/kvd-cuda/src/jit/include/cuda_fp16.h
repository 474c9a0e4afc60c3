// For NVRTC, which has no header of its own: what device.cuh uses of CUDA's cuda_fp16.h, so that a
// machine that compiles kernels needs libnvrtc alone.
#pragma once

struct __half {
    unsigned short bits;
};

__device__ __forceinline__ __half __ushort_as_half(unsigned short bits) { return {bits}; }
__device__ __forceinline__ unsigned short __half_as_ushort(__half value) { return value.bits; }
__device__ __forceinline__ float __half2float(__half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}
__device__ __forceinline__ __half __float2half_rn(float value) {
    __half narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}
__device__ __forceinline__ __half __float2half_rd(float value) {
    __half narrow;
    asm("cvt.rm.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}
