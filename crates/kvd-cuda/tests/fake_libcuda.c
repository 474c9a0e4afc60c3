// A CUDA driver without a GPU: it answers what macros say, and its memory is this process's. What
// neither the probe nor the driver's memory calls need exists, because the probe looks for it.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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


typedef unsigned long address;

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return device ? 101 : 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device ? 101 : 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)1; return flags == 1 ? 0 : 1; }
int cuStreamDestroy_v2(void *stream) { return stream ? 0 : 400; }
int cuStreamSynchronize(void *stream) { return stream ? 0 : 400; }
int cuMemAlloc_v2(address *at, unsigned long bytes) {
    *at = (address)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *at ? 0 : 2;
}
int cuMemFree_v2(address at) { free((void *)at); return 0; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, unsigned long bytes, void *stream) {
    memcpy((void *)to, from, bytes);
    return stream ? 0 : 400;
}
int cuMemcpyDtoHAsync_v2(void *to, address from, unsigned long bytes, void *stream) {
    memcpy(to, (void *)from, bytes);
    return stream ? 0 : 400;
}
int cuMemcpyDtoDAsync_v2(address to, address from, unsigned long bytes, void *stream) {
    memcpy((void *)to, (void *)from, bytes);
    return stream ? 0 : 400;
}

// A handle is the address and size of memory of this process; it is marked when it is closed.
struct handle {
    address at;
    unsigned long bytes;
    char unused[48];
};
static struct handle ipc;
int cuIpcOpenMemHandle_v2(address *at, struct handle handle, unsigned flags) {
    if (!handle.at || flags != 1) return 1;
    ipc = handle;
    *at = handle.at;
    return 0;
}
int cuIpcCloseMemHandle(address at) {
    *(char *)at = 'C';
    return at == ipc.at ? 0 : 1;
}
int cuMemGetAddressRange_v2(address *base, unsigned long *bytes, address at) {
    if (at != ipc.at) return 1;
    *base = ipc.at;
    *bytes = ipc.bytes;
    return 0;
}

// An allocation is a file; its granules are pages.
int cuMemImportFromShareableHandle(unsigned long long *allocation, void *file, int type) {
    int copy = type == 1 ? dup((int)(address)file) : -1;
    *allocation = copy;
    return copy < 0 ? 1 : 0;
}
int cuMemRelease(unsigned long long allocation) { return close((int)allocation) ? 1 : 0; }
int cuMemAddressReserve(address *at, unsigned long bytes, unsigned long align, address wanted,
                        unsigned long long flags) {
    void *range = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *at = (address)range;
    return range == MAP_FAILED || align || wanted || flags ? 2 : 0;
}
int cuMemAddressFree(address at, unsigned long bytes) { return munmap((void *)at, bytes) ? 1 : 0; }
int cuMemMap(address at, unsigned long bytes, unsigned long offset, unsigned long long allocation,
             unsigned long long flags) {
    struct stat stat;
    if (fstat((int)allocation, &stat) || bytes > (unsigned long)stat.st_size || bytes % 4096) return 1;
    void *range = mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)allocation, offset);
    return range == MAP_FAILED || flags ? 1 : 0;
}
int cuMemUnmap(address at, unsigned long bytes) {
    void *range = mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return range == MAP_FAILED ? 1 : 0;
}
struct access {
    int type;
    int id;
    int flags;
};
int cuMemSetAccess(address at, unsigned long bytes, const struct access *access, unsigned long count) {
    if (count != 1 || access->type != 1 || access->id != 0 || access->flags != 3) return 1;
    return mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) ? 1 : 0;
}

#define THERE(name) int name(void) { return 999; }
#ifndef WITHOUT_LAUNCH
THERE(cuLaunchKernel)
#endif
THERE(cuGetErrorName) THERE(cuModuleLoadData) THERE(cuModuleUnload) THERE(cuModuleGetFunction)
THERE(cuFuncSetAttribute) THERE(cuMemHostAlloc) THERE(cuMemFreeHost) THERE(cuMemsetD8Async)
THERE(cuStreamWaitEvent) THERE(cuEventCreate) THERE(cuEventDestroy_v2) THERE(cuEventRecord)
THERE(cuEventSynchronize) THERE(cuMemGetInfo_v2)
THERE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
