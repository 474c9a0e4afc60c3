// The CPU lane's scheduler: runs a launch block by block, each CUDA thread a fiber that runs until it
// waits. Owns fibers, barriers, warp exchanges, late copies and shared memory; never built with a
// sanitizer, so that it may switch stacks. One launch at a time.

#include "launch.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

extern "C" {
// AddressSanitizer's functions, where it is linked.
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
void kvd_emu_switch(void** from, void* to);
// ThreadSanitizer's functions, where it is linked. It sees each fiber as a thread of its own.
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned);
__attribute__((weak)) void __tsan_destroy_fiber(void*);
__attribute__((weak)) void __tsan_switch_to_fiber(void*, unsigned);
__attribute__((weak)) void __tsan_acquire(void*);
__attribute__((weak)) void __tsan_release(void*);
__attribute__((weak)) void __tsan_read_range(void*, unsigned long);
__attribute__((weak)) void __tsan_write_range(void*, unsigned long);
// ThreadSanitizer sees the calls of code compiled without it, but not their order.
const char* __tsan_default_options() { return "ignore_interceptors_accesses=1"; }
}

// Saves what a callee must keep, and continues where `to` was left (System V ABI).
asm(R"(
.pushsection .text
.globl kvd_emu_switch
.type kvd_emu_switch,@function
kvd_emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp,(%rdi)
    mov %rsi,%rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size kvd_emu_switch,.-kvd_emu_switch
.popsection
.pushsection .note.GNU-stack,"",@progbits
.popsection
)");

namespace kvd {
namespace emu {

Launch launch;
Fiber* current;

namespace {

constexpr size_t GUARD_BYTES = 4096;
constexpr size_t SHARED_BYTES_MAX = 227 << 10;
// A switch of fibers orders nothing: what a thread may rely on are barriers, not who ran first.
constexpr unsigned TSAN_NO_SYNC = 1;

const Kernel* kernels;

std::string text(Source at) { return std::string(at.file) + ":" + std::to_string(at.line); }

// Orders this thread's work before that of threads that come to `at` later, and theirs before its
// own.
void pass_on(char* at) {
    if (__tsan_release) {
        __tsan_release(at);
    }
}
void take_over(char* at) {
    if (__tsan_acquire) {
        __tsan_acquire(at);
    }
}

uint64_t next_random() {
    launch.random ^= launch.random << 13;
    launch.random ^= launch.random >> 7;
    launch.random ^= launch.random << 17;
    return launch.random;
}

// Leaves the running fiber for the scheduler.
void leave(bool forever) {
    Fiber* fiber = current;
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(forever ? nullptr : &fiber->sanitizer, launch.stack,
                                       launch.stack_bytes);
    }
    if (__tsan_switch_to_fiber) {
        // The scheduler comes after everything, and frees what a launch that fails has used.
        pass_on(&launch.end);
        __tsan_switch_to_fiber(launch.tsan, TSAN_NO_SYNC);
    }
    kvd_emu_switch(&fiber->stack_pointer, launch.stack_pointer);
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(fiber->sanitizer, nullptr, nullptr);
    }
}

// Runs a fiber until it waits or ends.
void enter(Fiber* fiber) {
    current = fiber;
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(&launch.sanitizer, fiber->stack, STACK_BYTES);
    }
    if (__tsan_switch_to_fiber) {
        __tsan_switch_to_fiber(fiber->tsan, TSAN_NO_SYNC);
    }
    kvd_emu_switch(&launch.stack_pointer, fiber->stack_pointer);
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(launch.sanitizer, nullptr, nullptr);
    }
}

void wake(Fiber* fiber) {
    fiber->state = State::Ready;
    launch.ready.push_back(fiber);
}

// The next fiber to run: by number, by number from the last, or any, as the launch's order says.
Fiber* take_ready() {
    size_t best = 0;
    std::vector<Fiber*>& ready = launch.ready;
    if (launch.order >= 2) {
        best = next_random() % ready.size();
    } else {
        for (size_t at = 1; at < ready.size(); at++) {
            const bool lower = ready[at]->index < ready[best]->index;
            best = lower == (launch.order == 0) ? at : best;
        }
    }
    Fiber* fiber = ready[best];
    ready[best] = ready.back();
    ready.pop_back();
    return fiber;
}

void run_fiber() {
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(nullptr, &launch.stack, &launch.stack_bytes);
    }
    take_over(&launch.start);
    launch.kernel->body(launch.parameters, launch.shared);
    Fiber* fiber = current;
    for (const std::vector<Copy>& group : fiber->copies) {
        if (!group.empty()) {
            fail(fiber->at, "a thread ends with copies that it never waited for");
        }
    }
    fiber->state = State::Done;
    launch.done++;
    if (launch.waiting > 0) {
        fail(launch.barrier, "a thread has ended while others wait at a barrier");
    }
    leave(true);
}

Fiber* new_fiber(unsigned index) {
    Fiber* fiber = new Fiber();
    void* memory = mmap(nullptr, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
        abort();
    }
    fiber->index = index;
    fiber->stack = static_cast<char*>(memory) + GUARD_BYTES;
    return fiber;
}

void reset(Fiber* fiber) {
    fiber->state = State::Ready;
    fiber->at = {"the kernel's start", 0};
    fiber->copies.assign(1, {});
    fiber->sanitizer = nullptr;
    if (__asan_unpoison_memory_region) {
        // A launch that failed left its frames behind.
        __asan_unpoison_memory_region(fiber->stack, STACK_BYTES);
    }
    // Six registers, the entry, and a return address that is never used; the entry is called with
    // the stack as the ABI wants it.
    void** top = reinterpret_cast<void**>(fiber->stack + STACK_BYTES) - 8;
    memset(top, 0, 8 * sizeof *top);
    top[6] = reinterpret_cast<void*>(run_fiber);
    fiber->stack_pointer = top;
}

// Shared memory of exactly the asked size, so that a sanitizer sees an overrun, and full of NaN, so
// that what is read before it is written shows.
void run_block(size_t shared_bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, shared_bytes + (shared_bytes == 0)) != 0) {
        abort();
    }
    memset(memory, 0xFF, shared_bytes);
    launch.shared = static_cast<uint8_t*>(memory);
    launch.shared_bytes = shared_bytes;
    launch.waiting = launch.done = launch.generation = 0;
    launch.warps.assign((launch.kernel->threads + LANES - 1) / LANES, Warp());
    launch.ready.clear();
    for (unsigned index = 0; index < launch.kernel->threads; index++) {
        reset(launch.fibers[index].get());
        launch.ready.push_back(launch.fibers[index].get());
    }
    pass_on(&launch.start);
    while (!launch.ready.empty() && launch.error.empty()) {
        enter(take_ready());
    }
    take_over(&launch.end);
    free(memory);
    if (!launch.error.empty() || launch.done == launch.kernel->threads) {
        return;
    }
    launch.error = std::string(launch.kernel->name) + ": block " + std::to_string(launch.block) +
                   " is stuck:";
    for (unsigned index = 0; index < launch.kernel->threads; index += LANES) {
        const Fiber& fiber = *launch.fibers[index];
        const char* what = fiber.state == State::Done ? " has ended" : " waits at ";
        launch.error += " thread " + std::to_string(index) + what +
                        (fiber.state == State::Done ? "" : text(fiber.at)) + ";";
    }
}

// The fibers of a launch to ThreadSanitizer; a launch that fails leaves their call stacks as they were.
struct TsanFibers {
    unsigned count;

    explicit TsanFibers(unsigned threads) : count(__tsan_create_fiber ? threads : 0) {
        launch.tsan = count > 0 ? __tsan_get_current_fiber() : nullptr;
        for (unsigned index = 0; index < count; index++) {
            launch.fibers[index]->tsan = __tsan_create_fiber(0);
        }
    }
    ~TsanFibers() {
        for (unsigned index = 0; index < count; index++) {
            __tsan_destroy_fiber(launch.fibers[index]->tsan);
        }
    }
};

}  // namespace

Kernel::Kernel(const char* name, void (*body)(const void*, uint8_t*), size_t bytes,
               unsigned threads)
    : name(name), body(body), parameter_bytes(bytes), threads(threads), next(kernels) {
    kernels = this;
}

unsigned thread() { return current->index; }
unsigned block() { return launch.block; }

void fail(Source at, const char* message) {
    launch.error = std::string(launch.kernel->name) + ": block " + std::to_string(launch.block) +
                   ", thread " + std::to_string(current->index) + ": " + message + " (" + text(at) +
                   ")";
    leave(true);
    abort();
}

void barrier(Source at) {
    Fiber* fiber = current;
    fiber->at = at;
    if (launch.done > 0) {
        fail(at, "a barrier that threads which have ended never reach");
    }
    if (launch.waiting > 0 && (launch.barrier.line != at.line || launch.barrier.file != at.file)) {
        const std::string other = "divergent barrier: others wait at " + text(launch.barrier);
        fail(at, other.c_str());
    }
    launch.barrier = at;
    char* passed = &launch.passed[launch.generation % 2];
    pass_on(passed);
    if (++launch.waiting == launch.kernel->threads) {
        launch.waiting = 0;
        launch.generation++;
        for (const std::unique_ptr<Fiber>& other : launch.fibers) {
            if (other->state == State::Barrier) {
                wake(other.get());
            }
        }
        wake(fiber);
    } else {
        fiber->state = State::Barrier;
    }
    leave(false);
    take_over(passed);
}

// All lanes of the running fiber's warp meet, each with some words; gives those of all.
static LaneWords meet(const uint32_t* words, unsigned count, Source at) {
    Fiber* fiber = current;
    fiber->at = at;
    const unsigned first = fiber->index / LANES * LANES;
    Warp& warp = launch.warps[fiber->index / LANES];
    const unsigned generation = warp.generation % 2;
    if (warp.arrived > 0 && (warp.at.line != at.line || warp.at.file != at.file)) {
        const std::string other = "divergent shuffle: other lanes wait at " + text(warp.at);
        fail(at, other.c_str());
    }
    warp.at = at;
    memcpy(warp.words[generation][fiber->index - first], words, count * sizeof *words);
    if (++warp.arrived == LANES) {
        warp.arrived = 0;
        warp.generation++;
        for (unsigned lane = 0; lane < LANES; lane++) {
            Fiber* other = launch.fibers[first + lane].get();
            if (other->state == State::Exchange) {
                wake(other);
            }
        }
        wake(fiber);
    } else {
        fiber->state = State::Exchange;
    }
    leave(false);
    return warp.words[generation];
}

uint32_t exchange(uint32_t word, unsigned source, Source at) {
    return meet(&word, 1, at)[source][0];
}

uint32_t ballot(bool condition, Source at) {
    const uint32_t mine = condition;
    const LaneWords words = meet(&mine, 1, at);
    uint32_t mask = 0;
    for (unsigned lane = 0; lane < LANES; lane++) {
        mask |= words[lane][0] << lane;
    }
    return mask;
}

void multiply_bytes(bool signed_a, bool signed_b, int32_t* sums, const uint32_t* a,
                    const uint32_t* b, Source at) {
    const uint32_t mine[WORDS_MAX] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    add_products(meet(mine, WORDS_MAX, at), current->index % LANES, signed_a, signed_b, sums);
}

void multiply_halves(bool is_bf16, float* sums, const uint32_t* a, const uint32_t* b, Source at) {
    const uint32_t mine[WORDS_MAX] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    add_half_products(meet(mine, WORDS_MAX, at), current->index % LANES, is_bf16, sums);
}

void transpose_matrices(uint32_t* words, const uint32_t* row, Source at) {
    transposed(meet(row, 16 / sizeof *row, at), current->index % LANES, words);
}

uint32_t transpose_word(uint32_t word, Source at) {
    return turned(meet(&word, 1, at), current->index % LANES);
}

void warp_barrier(Source at) {
    Warp& warp = launch.warps[current->index / LANES];
    char* passed = &warp.passed[warp.generation % 2];
    pass_on(passed);
    meet(nullptr, 0, at);
    take_over(passed);
}

// Bytes of all asynchronous copies that this thread's launches have started.
static thread_local uint64_t copied_bytes = 0;

void copy_async(void* to, const void* from, size_t bytes, size_t size) {
    const uintptr_t both = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
    if (both % size != 0 || bytes > size) {
        fail(current->at, "a copy whose ends are not aligned to its size");
    }
    // Until it is waited for, the target holds neither old nor new bytes.
    if (__tsan_write_range) {
        __tsan_write_range(to, size);
    }
    memset(to, 0xFF, size);
    copied_bytes += bytes;
    current->copies.back().push_back({to, from, bytes, size});
}

void copy_async_commit() { current->copies.emplace_back(); }

void copy_async_wait(unsigned keep) {
    std::vector<std::vector<Copy>>& copies = current->copies;
    while (copies.size() > keep + 1) {
        for (const Copy& copy : copies.front()) {
            if (__tsan_write_range) {
                __tsan_write_range(copy.to, copy.size);
                __tsan_read_range(const_cast<void*>(copy.from), copy.bytes);
            }
            memset(copy.to, 0, copy.size);
            memcpy(copy.to, copy.from, copy.bytes);
        }
        copies.erase(copies.begin());
    }
}

}  // namespace emu
}  // namespace kvd

// Bytes that asynchronous copies of this thread's launches have moved since it was last asked.
extern "C" uint64_t kvd_emu_copied_bytes() {
    const uint64_t bytes = kvd::emu::copied_bytes;
    kvd::emu::copied_bytes = 0;
    return bytes;
}

// Runs a kernel. `order`: 0 threads and blocks by number, 1 from the last, others a random order with
// that seed. Returns 0, or 1 with a message in `error`.
extern "C" int kvd_emu_launch(const char* name, unsigned blocks, size_t shared_bytes,
                              const void* parameters, size_t parameter_bytes, uint64_t order,
                              char* error, size_t error_bytes) {
    using namespace kvd::emu;
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    const Kernel* kernel = kernels;
    while (kernel && strcmp(kernel->name, name) != 0) {
        kernel = kernel->next;
    }
    launch.error.clear();
    if (!kernel) {
        launch.error = std::string("no kernel is called ") + name;
    } else if (kernel->parameter_bytes != parameter_bytes) {
        launch.error = std::string(name) + " takes " + std::to_string(kernel->parameter_bytes) +
                       " bytes of parameters, not " + std::to_string(parameter_bytes);
    } else if (shared_bytes > SHARED_BYTES_MAX) {
        launch.error = std::string(name) + ": no GPU has that much shared memory";
    }
    launch.kernel = kernel;
    launch.parameters = parameters;
    launch.order = order;
    launch.random = order * 0x9E3779B97F4A7C15 + 1;
    while (kernel && launch.fibers.size() < kernel->threads) {
        launch.fibers.emplace_back(new_fiber(unsigned(launch.fibers.size())));
    }
    const TsanFibers tsan(kernel ? kernel->threads : 0);
    if (watch_launch) {
        watch_launch();
    }
    const unsigned turn = order < 2 ? 0 : unsigned(next_random() % (blocks + (blocks == 0)));
    for (unsigned at = 0; at < blocks && launch.error.empty(); at++) {
        launch.block = order == 1 ? blocks - 1 - at : (at + turn) % blocks;
        run_block(shared_bytes);
    }
    snprintf(error, error_bytes, "%s", launch.error.c_str());
    return launch.error.empty() ? 0 : 1;
}
