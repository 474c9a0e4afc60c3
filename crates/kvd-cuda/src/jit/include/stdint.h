// For NVRTC: the names of <stdint.h> that kernels use.
#pragma once

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;

// Functions of <math.h>, which CUDA's compiler brings along and NVRTC does not.
#define INFINITY (__int_as_float(0x7F800000))
