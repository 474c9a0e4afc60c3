// For NVRTC: what device.cuh uses of CUDA's cuda_bf16.h.
#pragma once

struct __nv_bfloat16 {
    unsigned short bits;
};

__device__ __forceinline__ unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
    return value.bits;
}
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float value) {
    __nv_bfloat16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}
