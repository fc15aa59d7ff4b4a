// Runs kernels on the host, so that their arithmetic can be checked without a GPU.
//
// Blocks run one after another. The threads of a block are fibres: each runs until it meets a barrier or ends, then the
// next goes on, in an order that the caller chooses; a missing barrier shows as results that depend on the order. What
// this leaves unchecked: real concurrency between blocks, memory models, warps, limits of registers and shared memory.
#define SHIM
#include <alloca.h>
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
struct Fibre {
    ucontext_t context;
    Dim thread;
    bool done;
};
static std::vector<Fibre> fibres;
static std::vector<std::vector<char>> stacks;
static ucontext_t home;
static Fibre* current;
static bool flag, last_flag;
static void (*body)(const void*);
static const void* params;

static void enter() {
    body(params);
    current->done = true;
}

static void barrier() {
    Fibre* own = current;
    swapcontext(&own->context, &home);
}

static int barrier_or(int value) {
    flag |= value != 0;
    barrier();
    int result = last_flag;
    barrier();
    return result;
}

static void block(int order) {
    unsigned int threads = blockDim.x * blockDim.y * blockDim.z;
    if (fibres.size() < threads) {
        fibres.resize(threads);
        stacks.resize(threads, std::vector<char>(64 << 10));
    }
    for (unsigned int t = 0; t < threads; t++) {
        Fibre& f = fibres[t];
        f.thread = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
        f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks[t].data();
        f.context.uc_stack.ss_size = stacks[t].size();
        f.context.uc_link = &home;
        makecontext(&f.context, enter, 0);
    }
    unsigned int left = threads, round = 0;
    while (left > 0) {
        unsigned int ended = 0, waiting = 0;
        for (unsigned int i = 0; i < threads; i++) {
            unsigned int t = order == 0 ? i : order == 1 ? threads - 1 - i : (i * 7919u + round * 31u) % threads;
            Fibre& f = fibres[t];
            if (f.done) continue;
            current = &f;
            threadIdx = f.thread;
            swapcontext(&home, &f.context);
            if (f.done) ended++; else waiting++;
        }
        // A barrier that some threads never reach is undefined on a GPU.
        if (ended > 0 && waiting > 0) {
            fprintf(stderr, "a kernel's barrier is not met by all of its threads\n");
            abort();
        }
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
    for (unsigned int z = 0; z < grid.z; z++)
        for (unsigned int y = 0; y < grid.y; y++)
            for (unsigned int x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                block(order);
            }
}
}  // namespace shim

#define KERNEL(name, Params, threads)                                                                                                      \
    static void name##_body(const Params& p);                                                                                              \
    static void name##_enter(const void* p) { name##_body(*(const Params*)p); }                                                            \
    extern "C" void name(const void* p, unsigned int size, Dim grid, Dim block, int order) {                                               \
        if ((size != 0 && size != sizeof(Params)) || block.x * block.y * block.z > threads) {                                                             \
            fprintf(stderr, "%s: %u bytes of parameters where %zu are declared, or too many threads\n", #name, size, sizeof(Params));       \
            abort();                                                                                                                       \
        }                                                                                                                                  \
        shim::run(name##_enter, p, grid, block, order);                                                                                    \
    }                                                                                                                                      \
    static void name##_body(const Params& p)
#define SHARED static
#define SYNC() shim::barrier()
#define SYNC_OR(flag) shim::barrier_or(flag)
#define DEVICE inline
#define UNROLL
#define ONCE
