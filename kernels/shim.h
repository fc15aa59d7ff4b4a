// Runs kernels on the host, so that their arithmetic can be checked without a GPU.
//
// Blocks run one after another. The threads of a block are fibres: each runs until it meets a barrier or ends, then the
// next goes on, in an order that the caller chooses; a missing barrier shows as results that depend on the order. What
// this leaves unchecked: real concurrency between blocks, memory models, warps, limits of registers and shared memory.
#define SHIM
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

struct Dim {
    unsigned int x, y, z;
};
static Dim gridDim, blockDim, blockIdx, threadIdx;

static inline float __uint_as_float(unsigned int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline unsigned int __float_as_uint(float x) {
    unsigned int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float __int_as_float(int bits) { return __uint_as_float((unsigned int)bits); }

namespace shim {
// One for each thread of a block; it stays, and does its thread of one block after another.
struct Fibre {
    ucontext_t context;
    void* jump[5];
    Dim thread;
    bool started, done;
};
static std::vector<Fibre> fibres;
static std::vector<std::vector<char>> stacks;
static void* home[5];
static Fibre* current;
static bool flag, last_flag;
// Whether threads run without fibres.
static bool direct;
static void (*body)(const void*);
static const void* params;

// A barrier that some threads never reach is undefined on a GPU.
static void unmet() {
    fprintf(stderr, "a kernel's barrier is not met by all of its threads\n");
    abort();
}

static __attribute__((noinline)) void barrier() {
    if (direct) unmet();
    if (!__builtin_setjmp(current->jump)) __builtin_longjmp(home, 1);
}

static void enter() {
    for (;;) {
        body(params);
        current->done = true;
        barrier();
    }
}

static __attribute__((noinline)) void resume(Fibre& fibre) {
    current = &fibre;
    threadIdx = fibre.thread;
    if (__builtin_setjmp(home)) return;
    if (fibre.started) __builtin_longjmp(fibre.jump, 1);
    fibre.started = true;
    setcontext(&fibre.context);
}

static int barrier_or(int value) {
    flag |= value != 0;
    barrier();
    int result = last_flag;
    barrier();
    return result;
}

static unsigned int thread_number() { return threadIdx.y * blockDim.x + threadIdx.x; }

// Of the lane whose number differs in these bits. All threads of the block must come here, as at a barrier.
static float other_lane(float value, unsigned int bits) {
    static float all[1024];
    unsigned int own = thread_number();
    all[own] = value;
    barrier();
    float other = all[own ^ bits];
    barrier();
    return other;
}

// What a launch asks for beside a kernel's own; no launch gets more on sm_90.
alignas(16) static char dynamic_shared[227 << 10];

// Fibres for all threads of a block.
static void prepare(unsigned int threads) {
    fibres.reserve(1024);
    for (unsigned int t = (unsigned int)fibres.size(); t < threads; t++) {
        fibres.emplace_back();
        stacks.emplace_back(64 << 10);
        Fibre& f = fibres[t];
        f.started = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks[t].data();
        f.context.uc_stack.ss_size = stacks[t].size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    for (unsigned int t = 0; t < threads; t++)
        fibres[t].thread = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}

static void block(unsigned int threads, int order) {
    for (unsigned int t = 0; t < threads; t++) fibres[t].done = false;
    auto which = [=](unsigned int i, unsigned int round) {
        return order == 0 ? i : order == 1 ? threads - 1 - i : (i * 7919u + round * 31u) % threads;
    };
    unsigned int left = threads, round = 0;
    while (left > 0) {
        unsigned int ended = 0, waiting = 0;
        for (unsigned int i = 0; i < threads; i++) {
            Fibre& f = fibres[which(i, round)];
            if (f.done) continue;
            resume(f);
            if (f.done) ended++; else waiting++;
            // The first thread has met no barrier, so none may: a call for each is quicker.
            if (round == 0 && i == 0 && f.done) {
                direct = true;
                for (i = 1; i < threads; i++) {
                    threadIdx = fibres[which(i, 0)].thread;
                    body(params);
                }
                direct = false;
                return;
            }
        }
        if (ended > 0 && waiting > 0) unmet();
        left -= ended;
        round++;
        last_flag = flag;
        flag = false;
    }
}

static void run(void (*kernel)(const void*), const void* with, Dim grid, Dim threads, int order) {
    body = kernel;
    params = with;
    gridDim = grid;
    blockDim = threads;
    unsigned int count = threads.x * threads.y * threads.z;
    prepare(count);
    for (unsigned int z = 0; z < grid.z; z++)
        for (unsigned int y = 0; y < grid.y; y++)
            for (unsigned int x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                block(count, order);
            }
}
}  // namespace shim

#define KERNEL(name, Params, threads)                                                                                                      \
    static void name##_body(const Params& p);                                                                                              \
    static void name##_enter(const void* p) { name##_body(*(const Params*)p); }                                                            \
    extern "C" const unsigned int name##_bytes = sizeof(Params);                                                                           \
    extern "C" void name(const void* p, unsigned int size, Dim grid, Dim block, int order) {                                               \
        if ((size != 0 && size != sizeof(Params)) || block.x * block.y * block.z > threads) {                                                             \
            fprintf(stderr, "%s: %u bytes of parameters where %zu are declared, or too many threads\n", #name, size, sizeof(Params));       \
            abort();                                                                                                                       \
        }                                                                                                                                  \
        shim::run(name##_enter, p, grid, block, order);                                                                                    \
    }                                                                                                                                      \
    static void name##_body(const Params& p)
#define KERNEL_HELD(blocks, name, Params, threads) KERNEL(name, Params, threads)
#define SHARED static
#define DYNAMIC_SHARED(Type, name) Type& name = *(Type*)shim::dynamic_shared
#define OTHER_LANE(value, bits) shim::other_lane(value, bits)
#define SYNC() shim::barrier()
#define SYNC_OR(flag) shim::barrier_or(flag)
#define DEVICE inline
#define UNROLL
#define ONCE
#define TWICE
