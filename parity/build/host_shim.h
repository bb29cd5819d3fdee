// Runs a CUDA kernel's unchanged source on a CPU: one fibre a CUDA thread, the 32 lanes of a warp in lockstep at
// shuffles. Include it before the kernel; launch with host::launch. It covers what impl/fused_store.cu uses and nothing
// more: threadIdx.x, blockIdx.x, full-mask __shfl_xor_sync and __reduce_max_sync, bit casts. No shared memory, no __syncthreads, no atomics:
// a kernel that uses them does not compile here.
//
// A shuffle that some lane of the warp does not reach, or reaches with other operands, is reported by host::launch with
// the lanes' numbers; on a GPU it would hang or read a stale register.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace host {

constexpr unsigned WARP = 32;
constexpr std::size_t STACK = 256 << 10;

struct Index { unsigned x, y, z; };

struct Fibre {
    ucontext_t context;
    jmp_buf resume;
    void* fake_stack = nullptr;
    bool started = false, done = true;
    unsigned shuffles = 0;  // reached so far in this run
    int operand = 0;        // lane mask of the shuffle it waits at
    unsigned value[2];      // what it offered at its last two shuffles, by parity
    std::unique_ptr<char[]> stack{new char[STACK]};
};

struct Machine {
    Fibre lanes[WARP];
    ucontext_t context;
    jmp_buf resume;
    void* fake_stack = nullptr;
    const void* stack = nullptr;
    std::size_t stack_size = 0;
    unsigned lane = 0, first = 0, block = 0, threads = 0;
    std::function<void()> body;
};

inline std::unique_ptr<Machine> machine;

// Switching. glibc's swapcontext makes a system call, so it only starts a fibre and _setjmp does the rest; under
// AddressSanitizer, which intercepts longjmp, swapcontext does everything and the sanitizer is told of each switch.
#if defined(__SANITIZE_ADDRESS__)
inline void to_lane(Fibre& f) {
    __sanitizer_start_switch_fiber(&machine->fake_stack, f.stack.get(), STACK);
    swapcontext(&machine->context, &f.context);
    __sanitizer_finish_switch_fiber(machine->fake_stack, nullptr, nullptr);
}
inline void to_machine(Fibre& f) {
    __sanitizer_start_switch_fiber(&f.fake_stack, machine->stack, machine->stack_size);
    swapcontext(&f.context, &machine->context);
    __sanitizer_finish_switch_fiber(f.fake_stack, &machine->stack, &machine->stack_size);
}
#else
inline void to_lane(Fibre& f) {
    if (_setjmp(machine->resume)) return;
    if (f.started) _longjmp(f.resume, 1);
    f.started = true;
    setcontext(&f.context);
}
inline void to_machine(Fibre& f) {
    if (!_setjmp(f.resume)) _longjmp(machine->resume, 1);
}
#endif

inline void enter() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &machine->stack, &machine->stack_size);
#endif
    for (;;) {  // a fibre serves one CUDA thread after the other
        Fibre& me = machine->lanes[machine->lane];
        machine->body();
        me.done = true;
        to_machine(me);
    }
}

inline void prepare() {
    machine.reset(new Machine);
    for (Fibre& f : machine->lanes) {
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
}

// After every live lane has run up to its next shuffle: have all of them reached the same one?
inline std::string disagreement() {
    const Fibre* waiting = nullptr;
    unsigned lane = 0;
    for (unsigned l = 0; l < WARP; ++l)
        if (!machine->lanes[l].done) { waiting = &machine->lanes[l]; lane = l; break; }
    if (!waiting) return {};
    for (unsigned l = 0; l < WARP; ++l) {
        const Fibre& f = machine->lanes[l];
        const char* what = f.done ? "has returned" : f.shuffles != waiting->shuffles ? "is at another shuffle"
                         : f.operand != waiting->operand ? "shuffles with another mask" : nullptr;
        if (!what) continue;
        char text[200];
        std::snprintf(text, sizeof text,
                      "block %u, warp %u: lane %u waits at shuffle %u (xor %d) that lane %u misses, which %s",
                      machine->block, machine->first / WARP, lane, waiting->shuffles, waiting->operand, l, what);
        return text;
    }
    return {};
}

// Runs blocks x threads CUDA threads, warp by warp, threads a multiple of 32. Returns "" or what went wrong.
inline std::string launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
    if (!machine) prepare();
    machine->body = std::move(kernel);
    machine->threads = threads;
    for (unsigned block = 0; block < blocks; ++block)
        for (unsigned first = 0; first < threads; first += WARP) {
            machine->block = block;
            machine->first = first;
            for (Fibre& f : machine->lanes) { f.done = false; f.shuffles = 0; }
            for (bool live = true; live;) {
                live = false;
                for (unsigned l = 0; l < WARP; ++l)
                    if (Fibre& f = machine->lanes[l]; !f.done) {
                        machine->lane = l;
                        to_lane(f);
                        live |= !f.done;
                    }
                if (std::string wrong = disagreement(); !wrong.empty()) {
                    machine.reset();  // the lanes stand somewhere inside the kernel: their stacks go with them
                    return wrong;
                }
            }
        }
    return {};
}

template <class T> T shuffle_xor(T value, int mask) {
    static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
    const unsigned lane = machine->lane;
    Fibre& me = machine->lanes[lane];
    const unsigned parity = me.shuffles++ & 1;
    std::memcpy(&me.value[parity], &value, 4);
    me.operand = mask;
    to_machine(me);
    T result;
    std::memcpy(&result, &machine->lanes[(lane ^ (unsigned)mask) % WARP].value[parity], 4);
    return result;
}

inline Index thread_index() { return {machine->first + machine->lane, 0, 0}; }
inline Index block_index() { return {machine->block, 0, 0}; }

template <class To, class From> To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace host

#define threadIdx (host::thread_index())
#define blockIdx (host::block_index())
#undef __device__
#undef __global__
#undef __launch_bounds__
#define __device__
#define __global__
#define __launch_bounds__(...)

template <class T> T __shfl_xor_sync(unsigned, T value, int mask) { return host::shuffle_xor(value, mask); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    for (int mask = 16; mask; mask >>= 1) value = std::max(value, host::shuffle_xor(value, mask));
    return value;
}
inline float __uint_as_float(unsigned bits) { return host::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return host::bit_cast<unsigned>(x); }
