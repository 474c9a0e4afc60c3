// State of the emulator's scheduler: fibers, warps, the launch. It belongs to emu.cc; blocks.cc
// reads it.
#pragma once

#include "emu.h"
#include "products.h"

#include <memory>
#include <string>
#include <vector>

namespace kvd {
namespace emu {

constexpr size_t STACK_BYTES = 256 << 10;

enum class State { Ready, Barrier, Exchange, Done };

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    size_t size;
};

struct Fiber {
    unsigned index;
    State state;
    Source at;
    void* stack_pointer;
    char* stack;
    void* sanitizer;
    // ThreadSanitizer's handle, for one launch.
    void* tsan;
    // Copies under way by group; the last group is still open.
    std::vector<std::vector<Copy>> copies;
};

struct Warp {
    unsigned arrived;
    unsigned generation;
    Source at;
    // Two generations: a lane may be in the next exchange before a slow one has read this one.
    uint32_t words[2][LANES][WORDS_MAX];
    // Addresses that stand for warp barriers, by generation.
    char passed[2];
};

struct Launch {
    const Kernel* kernel;
    const void* parameters;
    unsigned block;
    uint8_t* shared;
    size_t shared_bytes;
    uint64_t order;
    uint64_t random;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber*> ready;
    std::vector<Warp> warps;
    unsigned waiting;
    unsigned done;
    Source barrier;
    // Barriers that were passed; what is passed on at them by generation, at the start and at the end.
    unsigned generation;
    char passed[2];
    char start;
    char end;
    std::string error;
    // The scheduler's own stack, while a fiber runs.
    void* stack_pointer;
    void* sanitizer;
    void* tsan;
    const void* stack;
    size_t stack_bytes;
};

extern Launch launch;
extern Fiber* current;

// A launch begins. Of blocks.cc, where it is linked.
__attribute__((weak)) void watch_launch();

}  // namespace emu
}  // namespace kvd
