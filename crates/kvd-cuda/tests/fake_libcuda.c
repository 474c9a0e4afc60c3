// A CUDA driver without a GPU: it answers what macros say, and its memory is this process's. Copies are
// made as late as CUDA allows, when something waits for them. What neither the probe nor the driver's
// memory calls need exists, because the probe looks for it.
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
// Of this GPU nothing is known but its name.
#ifndef BROKEN
#define BROKEN -1
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
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device == BROKEN) return 999;
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
// Graphs and modules that were not given back.
static int graphs, modules;
int cuDevicePrimaryCtxRelease_v2(int device) {
    if (graphs || modules) abort();
    return device ? 101 : 0;
}
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
// The call that the environment names fails, with an error that sticks but for want of memory.
static int stuck;
static int is_meant(const char *call) {
    const char *named = getenv("FAKE_FAIL");
    return named && !strcmp(named, call);
}
static int fails(const char *call) {
    if (is_meant(call)) stuck = 700;
    return stuck;
}

// Whether work does not end; what waits for it would not either.
static int hangs(void) { return is_meant("hang"); }

// What the two streams were given: copies, and waits for what the other was given.
#define WORK_MAX 100000
static struct { char *to; const char *from; unsigned long bytes; int other, until; } work[2][WORK_MAX];
// What a kernel was given; it reads no memory but this.
struct word { unsigned long *to, value; };
static struct word words[WORK_MAX];
static int streams, given[2], done[2];
static void make(int stream, int until) {
    for (; done[stream] < until; done[stream]++) {
        int at = done[stream];
        if (work[stream][at].until) make(work[stream][at].other, work[stream][at].until);
        else if (!work[stream][at].to) {
            struct word *word = (struct word *)work[stream][at].from;
            *word->to = 10 * *word->to + word->value;
        } else memcpy(work[stream][at].to, work[stream][at].from, work[stream][at].bytes);
    }
}
static void make_all(void) {
    if (hangs()) abort();
    make(0, given[0]);
    make(1, given[1]);
}
static int start(void *to, const void *from, unsigned long bytes, long stream) {
    if (stream < 1 || stream > 2) return 400;
    int at = given[stream - 1]++;
    work[stream - 1][at].to = to;
    work[stream - 1][at].from = from;
    work[stream - 1][at].bytes = bytes;
    return stuck;
}
int cuStreamCreate(long *stream, unsigned flags) {
    *stream = ++streams;
    return flags == 1 ? 0 : 1;
}
int cuStreamDestroy_v2(long stream) { return stream ? 0 : 400; }
int cuStreamSynchronize(long stream) {
    make(stream - 1, given[stream - 1]);
    return stuck;
}
int cuCtxSynchronize(void) {
    for (long stream = 1; stream <= streams; stream++) cuStreamSynchronize(stream);
    return stuck;
}

// Pinned memory; the driver copies from and to no other.
static struct { char *at; unsigned long bytes; } pinned[64];
static int is_pinned(const char *at, unsigned long bytes) {
    for (int i = 0; i < 64; i++) {
        if (pinned[i].at && at >= pinned[i].at && at + bytes <= pinned[i].at + pinned[i].bytes) return 1;
    }
    return 0;
}
int cuMemHostAlloc(char **at, unsigned long bytes, unsigned flags) {
    if (is_meant("cuMemHostAlloc")) return 2;
    for (int i = 0; i < 64; i++) {
        if (pinned[i].at) continue;
        *at = pinned[i].at = malloc(bytes);
        pinned[i].bytes = bytes;
        return flags ? 1 : 0;
    }
    return 2;
}
int cuMemFreeHost(char *at) {
    make_all();
    for (int i = 0; i < 64; i++) {
        if (pinned[i].at != at) continue;
        free(at);
        pinned[i].at = 0;
        return 0;
    }
    return 1;
}

struct event { int stream, until, shared, asked; };
int cuEventCreate(struct event **event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    (*event)->shared = flags == 6;
    return flags == 2 || flags == 6 ? 0 : 1;
}
// A handle is the address of an event that may be shared, under a mark.
int cuIpcGetEventHandle(unsigned char *handle, struct event *event) {
    const char *named = getenv("FAKE_FAIL");
    if (!event->shared || (named && !strcmp(named, "cuIpcGetEventHandle"))) return 801;
    memset(handle, 0xE7, 64);
    memcpy(handle, &event, sizeof event);
    return 0;
}
int cuEventDestroy_v2(struct event *event) { free(event); return 0; }
int cuEventRecord(struct event *event, long stream) {
    event->stream = stream - 1;
    event->until = given[stream - 1];
    event->asked = 0;
    return fails("cuEventRecord");
}
int cuStreamWaitEvent(long stream, struct event *event, unsigned flags) {
    if (event->until) {
        int at = given[stream - 1]++;
        work[stream - 1][at].other = event->stream;
        work[stream - 1][at].until = event->until;
    }
    return flags ? 1 : fails("cuStreamWaitEvent");
}
// Not ready when it is asked first.
int cuEventQuery(struct event *event) {
    if (hangs() || !event->asked++) return 600;
    make(event->stream, event->until);
    return fails("cuEventQuery");
}

int cuMemAlloc_v2(address *at, unsigned long bytes) {
    *at = (address)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *at ? 0 : 2;
}
int cuMemFree_v2(address at) {
    make_all();
    free((void *)at);
    return 0;
}
int cuMemcpyHtoDAsync_v2(address to, const void *from, unsigned long bytes, long stream) {
    return is_pinned(from, bytes) ? start((void *)to, from, bytes, stream) : 1;
}
int cuMemcpyDtoHAsync_v2(void *to, address from, unsigned long bytes, long stream) {
    return is_pinned(to, bytes) ? start(to, (void *)from, bytes, stream) : 1;
}
// For a worker's process, which has no stream.
int cuMemcpyHtoD_v2(address to, const void *from, unsigned long bytes) {
    memcpy((void *)to, from, bytes);
    return stuck;
}
int cuMemcpyDtoH_v2(void *to, address from, unsigned long bytes) {
    memcpy(to, (void *)from, bytes);
    return stuck;
}
int cuMemcpyDtoDAsync_v2(address to, address from, unsigned long bytes, long stream) {
    return start((void *)to, (void *)from, bytes, stream);
}

struct attributes {
    int order;
    char hints[16];
    unsigned flags;
};
int cuMemcpyBatchAsync_v2(address *to, address *from, unsigned long *bytes, unsigned long count,
                          struct attributes *attributes, unsigned long *first, unsigned long kinds, long stream) {
    if (!count || kinds != 1 || *first || attributes->order != 1 || attributes->flags) return 1;
    // In no order that was given.
    for (unsigned long i = count; i-- > 0;) {
        int result = bytes[i] ? start((void *)to[i], (void *)from[i], bytes[i], stream) : 1;
        if (result) return result;
    }
    return stuck;
}

// A handle is the address and size of memory of this process; it is marked when it is closed for good, and its
// second byte counts how often it was closed.
struct handle {
    address at;
    unsigned long bytes;
    char unused[48];
};
static struct handle ipc;
// How often it is open; what was opened twice has one address, and is unmapped when it is closed twice.
static int opens;
int cuIpcOpenMemHandle_v2(address *at, struct handle handle, unsigned flags) {
    if (!handle.at || flags != 1) return 1;
    opens = handle.at == ipc.at ? opens + 1 : 1;
    ipc = handle;
    *at = handle.at;
    return 0;
}
int cuIpcCloseMemHandle(address at) {
    if (at != ipc.at || !opens) return 1;
    if (!--opens) *(char *)at = 'C';
    ((char *)at)[1]++;
    return 0;
}
int cuMemGetAddressRange_v2(address *base, unsigned long *bytes, address at) {
    if (at != ipc.at) return 1;
    *base = ipc.at;
    *bytes = ipc.bytes;
    return 0;
}

// An allocation is a file; its granules are pages.
struct properties {
    int type, handle_types, location, id;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
static int is_exportable(const struct properties *asked) {
    const struct properties can = { .type = 1, .handle_types = 1, .location = 1 };
    return !memcmp(asked, &can, sizeof can);
}
int cuMemGetAllocationGranularity(unsigned long *bytes, const struct properties *asked, int recommended) {
    *bytes = 4096;
    return is_exportable(asked) && !recommended ? 0 : 1;
}
int cuMemCreate(unsigned long long *allocation, unsigned long bytes, const struct properties *asked,
                unsigned long long flags) {
    if (!is_exportable(asked) || bytes % 4096 || flags) return 1;
    int file = memfd_create("allocation", 0);
    *allocation = file;
    return file < 0 || ftruncate(file, bytes) ? 2 : 0;
}
int cuMemExportToShareableHandle(int *file, unsigned long long allocation, int type, unsigned long long flags) {
    *file = type == 1 && !flags ? dup((int)allocation) : -1;
    return *file < 0 ? 1 : 0;
}
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

// Kernels `first`, `second` and `third` append a digit to a number in memory. One has 48 KiB of shared memory
// until it is allowed more, and none runs that does not prefer shared memory to L1 cache. The device has no
// memory for one that was not loaded before it is asked for.
static const char *names[] = { "", "first", "second", "third", "kvd_queries", "kvd_answer", "kvd_stage", "kvd_rows" };
#define NAMES (sizeof names / sizeof *names)
static unsigned allowed[NAMES] = { 0, 48 << 10, 48 << 10, 48 << 10, 48 << 10, 48 << 10, 48 << 10, 48 << 10 };
static int shared_percent[NAMES], loaded[NAMES];
int cuModuleLoadData(long *module, const void *image) {
    *module = 1;
    modules++;
    return image ? 0 : 1;
}
int cuModuleUnload(long module) { return module == 1 && modules-- ? 0 : 1; }
int cuModuleGetFunctionCount(unsigned *count, long module) {
    *count = NAMES - 1;
    return module == 1 ? 0 : 1;
}
int cuModuleEnumerateFunctions(long *functions, unsigned count, long module) {
    for (unsigned at = 0; at < count && at < NAMES - 1; at++) functions[at] = at + 1;
    return module == 1 ? 0 : 1;
}
int cuFuncLoad(long function) {
    if (is_meant("cuFuncLoad") && function == NAMES - 1) return 2;
    loaded[function] = 1;
    return 0;
}
int cuModuleGetFunction(long *function, long module, const char *name) {
    for (*function = 1; *function < (long)NAMES; ++*function) {
        if (strcmp(names[*function], name)) continue;
        return module != 1 ? 1 : loaded[*function] ? 0 : 2;
    }
    return 500;
}
int cuFuncSetAttribute(long function, int attribute, int value) {
    if (attribute == 9) shared_percent[function] = value;
    else if (attribute == 8) allowed[function] = value;
    else return 1;
    return 0;
}
static int append(struct word word, long stream) {
    static int count;
    words[count] = word;
    return start(0, &words[count++], 0, stream);
}
#ifndef WITHOUT_LAUNCH
int cuLaunchKernel(long function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, long stream, void **parameters, void **extra) {
    if (!blocks || !threads || y * z * threads_y * threads_z != 1 || shared > allowed[function] || extra) return 1;
    if (shared_percent[function] != 100) return 1;
    if (is_meant("no room to launch")) return 2;
    int result = fails("cuLaunchKernel");
    return result ? result : append(*(struct word *)parameters[0], stream);
}
#endif

// Graphs of such kernels. A node is behind those that it depends on; of nodes that are not behind one another
// the last runs first.
struct kernel {
    long function;
    unsigned blocks, y, z, threads, threads_y, threads_z, shared;
    void **parameters, **extra;
    void *kernel, *context;
};
struct node { long function; int depth; unsigned shared; struct word word; };
struct graph { struct node node[16]; int nodes, depth, uploaded; };
static int holds(struct node *node, const struct kernel *kernel) {
    if (!kernel->blocks || !kernel->threads || kernel->shared > allowed[kernel->function]) return 1;
    if (shared_percent[kernel->function] != 100) return 1;
    if (kernel->y * kernel->z * kernel->threads_y * kernel->threads_z != 1 || kernel->extra) return 1;
    if (kernel->kernel || kernel->context) return 1;
    node->function = kernel->function;
    node->shared = kernel->shared;
    node->word = *(struct word *)kernel->parameters[0];
    return 0;
}
int cuGraphCreate(struct graph **graph, unsigned flags) {
    int result = fails("cuGraphCreate");
    if (result) return result;
    *graph = calloc(1, sizeof **graph);
    graphs++;
    return flags ? 1 : 0;
}
int cuGraphDestroy(struct graph *graph) {
    free(graph);
    graphs--;
    return 0;
}
static int refuses(const char *call) { return is_meant(call) ? 801 : 0; }
int cuGraphAddKernelNode_v2(struct node **node, struct graph *graph, struct node **before, unsigned long count,
                            const struct kernel *kernel) {
    if (graph->nodes == 16 || refuses("cuGraphAddKernelNode")) return 801;
    *node = &graph->node[graph->nodes++];
    for (unsigned long i = 0; i < count; i++) {
        if (before[i] < graph->node || before[i] >= *node) return 1;
        if (before[i]->depth >= (*node)->depth) (*node)->depth = before[i]->depth + 1;
    }
    if ((*node)->depth > graph->depth) graph->depth = (*node)->depth;
    return holds(*node, kernel);
}
int cuGraphInstantiateWithFlags(struct graph **executable, struct graph *graph, unsigned long long flags) {
    if (flags || refuses("cuGraphInstantiate")) return 801;
    // Nodes of the executable are known by those of the graph: both are at the same place.
    *executable = malloc(sizeof **executable + sizeof graph);
    memcpy(*executable, graph, sizeof *graph);
    memcpy(*executable + 1, &graph, sizeof graph);
    graphs++;
    return 0;
}
// A graph takes device memory when it is uploaded, and when it is launched if it was not.
int cuGraphUpload(struct graph *executable, long stream) {
    if (stream != 2) return 400;
    executable->uploaded = 1;
    return refuses("cuGraphUpload") ? 2 : stuck;
}
int cuGraphExecKernelNodeSetParams_v2(struct graph *executable, struct node *node, const struct kernel *kernel) {
    struct graph *graph = *(struct graph **)(executable + 1);
    long at = node - graph->node;
    if (at < 0 || at >= graph->nodes || refuses("cuGraphExecKernelNodeSetParams")) return 801;
    if (executable->node[at].function != kernel->function) return 910;
    return holds(&executable->node[at], kernel);
}
int cuGraphExecDestroy(struct graph *executable) { return cuGraphDestroy(executable); }
#ifndef WITHOUT_GRAPHS
int cuGraphLaunch(struct graph *executable, long stream) {
    if (!executable->uploaded) return 2;
    // What a function may have when its kernel is launched counts, not what it had when the graph was made.
    for (int at = 0; at < executable->nodes; at++) {
        if (executable->node[at].shared > allowed[executable->node[at].function]) return 1;
    }
    for (int depth = 0; depth <= executable->depth; depth++) {
        for (int at = executable->nodes; at-- > 0;) {
            int result = executable->node[at].depth == depth ? append(executable->node[at].word, stream) : 0;
            if (result) return result;
        }
    }
    return fails("cuGraphLaunch");
}
#endif
