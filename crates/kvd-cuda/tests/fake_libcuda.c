// A CUDA driver without a GPU, for the tests of the probe: it answers what macros say. Only the
// functions that the probe calls do something; the others exist, because the probe looks for them.
#include <string.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef VERSION
#define VERSION 13000
#endif
#ifndef COUNT
#define COUNT 1
#endif
#ifndef MAJOR
#define MAJOR 9
#endif

int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int len, int device) {
    strncpy(name, "Fake GPU", len);
    return device < COUNT ? 0 : 101;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i;
    return 0;
}
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 80ul << 30; return 0 * device; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 75: *value = MAJOR; break;
    case 76: *value = 0; break;
    case 16: *value = 132; break;
    case 81: *value = 228 << 10; break;
    case 97: *value = 227 << 10; break;
    case 82: *value = 65536; break;
    case 39: *value = 2048; break;
    case 106: *value = 32; break;
    case 13: *value = 1980000; break;
    case 36: *value = 2619000; break;
    case 37: *value = 5120; break;
    default: return 1 + 0 * device;
    }
    return 0;
}

#define THERE(name) int name(void) { return 999; }
#ifndef WITHOUT_LAUNCH
THERE(cuLaunchKernel)
#endif
THERE(cuGetErrorName) THERE(cuDevicePrimaryCtxRetain) THERE(cuDevicePrimaryCtxRelease_v2)
THERE(cuCtxSetCurrent) THERE(cuModuleLoadData) THERE(cuModuleUnload) THERE(cuModuleGetFunction)
THERE(cuFuncSetAttribute) THERE(cuMemAlloc_v2) THERE(cuMemFree_v2) THERE(cuMemHostAlloc)
THERE(cuMemFreeHost) THERE(cuMemcpyHtoDAsync_v2) THERE(cuMemcpyDtoHAsync_v2)
THERE(cuMemcpyDtoDAsync_v2) THERE(cuMemsetD8Async) THERE(cuStreamCreate)
THERE(cuStreamDestroy_v2) THERE(cuStreamSynchronize) THERE(cuStreamWaitEvent)
THERE(cuEventCreate) THERE(cuEventDestroy_v2) THERE(cuEventRecord) THERE(cuEventSynchronize)
THERE(cuMemGetInfo_v2) THERE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
