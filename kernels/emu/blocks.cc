// Who writes what: kernels are compiled as for ThreadSanitizer, and instead of its runtime these are
// called at every access. Of each byte of device memory they keep which thread block of a launch wrote
// it and which read it. Blocks of a launch run in no order, so that no byte may be one's to write and
// another's to write or read, but for atomics of both. Scheduler and host are not compiled so, and
// sanitizers' own runtimes cannot be linked beside this.

#include "launch.h"

#include <array>
#include <unordered_map>

namespace kvd {
namespace emu {
namespace {

constexpr uintptr_t PAGE_BYTES = 4096;
// More blocks than one, of readers.
constexpr uint32_t MANY = ~0u;
// With the number of the block, of writers: by an atomic.
constexpr uint32_t ATOMIC = 1u << 31;

// Block numbers plus one; 0 for nobody.
struct Owner {
    uint32_t writer;
    uint32_t reader;
};
using Page = std::array<Owner, PAGE_BYTES>;

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_number;
Page* last_page;

enum class Access { Read, Write, Atomic };

Owner& owner_of(uintptr_t at) {
    const uintptr_t number = at / PAGE_BYTES;
    if (last_page == nullptr || number != last_number) {
        std::unique_ptr<Page>& page = pages[number];
        if (!page) {
            page.reset(new Page());
        }
        last_number = number;
        last_page = page.get();
    }
    return (*last_page)[at % PAGE_BYTES];
}

// Shared memory and the thread's own stack are no other block's.
bool is_private(uintptr_t at) {
    const uintptr_t shared = reinterpret_cast<uintptr_t>(launch.shared);
    const uintptr_t stack = reinterpret_cast<uintptr_t>(current->stack);
    return at - shared < launch.shared_bytes || at - stack < STACK_BYTES;
}

const char* conflict(const Owner& owner, uint32_t me, Access access) {
    const uint32_t writer = owner.writer & ~ATOMIC;
    const bool both_atomic = access == Access::Atomic && (owner.writer & ATOMIC) != 0;
    if (writer != 0 && writer != me && !both_atomic) {
        return access == Access::Read ? "a read of what another thread block has written"
                                      : "a write to what another thread block has written";
    }
    // An atomic reads as well, but nobody may rely on what.
    if (access != Access::Read && owner.reader != 0 && owner.reader != me) {
        return "a write to what another thread block has read";
    }
    return nullptr;
}

void look(const volatile void* address, size_t bytes, Access access) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(address);
    // Initialisers of the program run outside of any launch.
    if (current == nullptr || is_private(first)) {
        return;
    }
    const uint32_t me = launch.block + 1;
    for (uintptr_t at = first; at < first + bytes; at++) {
        Owner& owner = owner_of(at);
        if (const char* what = conflict(owner, me, access)) {
            const std::string text = std::string(what) + ", behind";
            fail(current->at, text.c_str());
        }
        if (access == Access::Read) {
            owner.reader = owner.reader == 0 || owner.reader == me ? me : MANY;
        } else if (access == Access::Atomic) {
            // Where a block has also written plainly, others may not add to it.
            owner.writer = owner.writer == me ? me : me | ATOMIC;
        } else {
            owner.writer = me;
        }
    }
}

}  // namespace

void watch_launch() {
    pages.clear();
    last_page = nullptr;
}

}  // namespace emu
}  // namespace kvd

using kvd::emu::Access;
using kvd::emu::look;

#define KVD_ACCESS(prefix, bytes)                                                            \
    void __tsan_##prefix##read##bytes(void* at) { look(at, bytes, Access::Read); }           \
    void __tsan_##prefix##write##bytes(void* at) { look(at, bytes, Access::Write); }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}

KVD_ACCESS(, 1)
KVD_ACCESS(, 2)
KVD_ACCESS(, 4)
KVD_ACCESS(, 8)
KVD_ACCESS(, 16)
KVD_ACCESS(unaligned_, 2)
KVD_ACCESS(unaligned_, 4)
KVD_ACCESS(unaligned_, 8)
KVD_ACCESS(unaligned_, 16)

// The scheduler tells of asynchronous copies, in whose names only shared memory is written.
void __tsan_read_range(void* at, unsigned long bytes) { look(at, bytes, Access::Read); }
void __tsan_write_range(void* at, unsigned long bytes) { look(at, bytes, Access::Write); }

uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* at, uint32_t n, int) {
    look(at, sizeof *at, Access::Atomic);
    return __atomic_fetch_add(at, n, __ATOMIC_RELAXED);
}
uint64_t __tsan_atomic64_fetch_add(volatile uint64_t* at, uint64_t n, int) {
    look(at, sizeof *at, Access::Atomic);
    return __atomic_fetch_add(at, n, __ATOMIC_RELAXED);
}

}  // extern "C"
