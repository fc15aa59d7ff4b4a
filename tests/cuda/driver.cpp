// A CUDA driver without a GPU, for tests: device memory is the host's, everything happens where it is called, and kernels
// are those that the compiler beside it (compiler.cpp) made for the host. It stops on what a GPU would not forgive quietly:
// a wait for an event that was never recorded, addresses outside of what was allocated.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <map>
#include <mutex>

typedef unsigned long long Address;
typedef int Result;
struct Dim {
    unsigned int x, y, z;
};
struct Event {
    double at;
    bool recorded;
};

static std::map<Address, size_t> allocated;
static int retained = 0;
// Several jobs' threads call at once; one thing happens at a time.
static std::recursive_mutex mutex;
#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> one(mutex)

static void stop(const char* what) {
    fprintf(stderr, "fake driver: %s\n", what);
    abort();
}

static void inside(Address at, size_t bytes, const char* what) {
    ONE_AT_A_TIME;
    auto next = allocated.upper_bound(at);
    if (next == allocated.begin()) stop(what);
    --next;
    if (at + bytes > next->first + next->second) stop(what);
}

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

extern "C" {
#ifdef NO_DEVICE
Result cuInit(unsigned int) { return 100; }
#else
Result cuInit(unsigned int) { return 0; }
#endif
Result cuDriverGetVersion(int* version) {
    *version = getenv("FAKE_DRIVER_VERSION") ? atoi(getenv("FAKE_DRIVER_VERSION")) : 13000;
    return 0;
}
Result cuDeviceGetCount(int* count) {
    *count = 1;
    return 0;
}
Result cuDeviceGet(int* device, int) {
    *device = 0;
    return 0;
}
Result cuDeviceGetName(char* name, int, int) {
    strcpy(name, "no GPU at all");
    return 0;
}
Result cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = 1ull << 30;
    return 0;
}
// Compute capability 9.0.
Result cuDeviceGetAttribute(int* value, int which, int) {
    *value = which == 75 ? 9 : 0;
    return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int) {
    ONE_AT_A_TIME;
    ++retained;
    *context = (void*)1;
    return 0;
}
Result cuDevicePrimaryCtxRelease_v2(int) {
    ONE_AT_A_TIME;
    if (--retained == 0 && !allocated.empty()) stop("memory was not given back");
    return 0;
}
Result cuCtxSetCurrent(void*) { return 0; }
Result cuStreamCreate(void** stream, unsigned int) {
    *stream = malloc(1);
    return 0;
}
Result cuStreamDestroy_v2(void* stream) {
    free(stream);
    return 0;
}
Result cuStreamSynchronize(void*) { return 0; }
Result cuStreamWaitEvent(void*, Event* event, unsigned int) {
    if (!event->recorded) stop("a stream waits for what was never recorded");
    return 0;
}
Result cuEventCreate(Event** event, unsigned int flags) {
    if (flags & 2) stop("an event without the time");
    *event = new Event{0.0, false};
    return 0;
}
Result cuEventRecord(Event* event, void*) {
    *event = {now(), true};
    return 0;
}
Result cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    if (!from->recorded || !to->recorded) return 600;
    *milliseconds = (float)(to->at - from->at);
    return 0;
}
Result cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) { return cuEventElapsedTime(milliseconds, from, to); }
Result cuEventDestroy_v2(Event* event) {
    delete event;
    return 0;
}
Result cuMemAlloc_v2(Address* at, size_t bytes) {
    ONE_AT_A_TIME;
    void* memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (!memory) return 2;
    memset(memory, 0xff, bytes);
    *at = (Address)memory;
    allocated[*at] = bytes;
    return 0;
}
Result cuMemFree_v2(Address at) {
    ONE_AT_A_TIME;
    if (!allocated.erase(at)) stop("memory was given back twice");
    free((void*)at);
    return 0;
}
Result cuMemHostAlloc(void** at, size_t bytes, unsigned int flags) {
    if (flags & 4) stop("write-combined memory is slow to read back");
    return cuMemAlloc_v2((Address*)at, bytes);
}
Result cuMemFreeHost(void* at) { return cuMemFree_v2((Address)at); }
static Result move(Address to, Address from, size_t bytes) {
    memmove((void*)to, (void*)from, bytes);
    return 0;
}
Result cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
    inside(to, bytes, "a copy to outside the arena");
    return move(to, (Address)from, bytes);
}
Result cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    inside(from, bytes, "a copy from outside the arena");
    return move((Address)to, from, bytes);
}
// Asynchronous copies must be between allocations: pageable memory would make them wait.
Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void*) {
    inside(to, bytes, "a copy to outside the arena");
    inside((Address)from, bytes, "a copy from memory that is not pinned");
    return move(to, (Address)from, bytes);
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void*) {
    inside(from, bytes, "a copy from outside the arena");
    inside((Address)to, bytes, "a copy to memory that is not pinned");
    return move((Address)to, from, bytes);
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void*) {
    inside(to, bytes, "a copy to outside the arena");
    inside(from, bytes, "a copy from outside the arena");
    return move(to, from, bytes);
}
Result cuMemsetD8Async(Address to, unsigned char byte, size_t bytes, void*) {
    inside(to, bytes, "a fill outside the arena");
    memset((void*)to, byte, bytes);
    return 0;
}
// The image is the path of a library.
Result cuModuleLoadData(void** module, const void* image) {
    *module = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "fake driver: %s\n", dlerror());
    return *module ? 0 : 200;
}
Result cuModuleUnload(void* module) { return dlclose(module); }
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = dlsym(module, name);
    return *function ? 0 : 500;
}
Result cuLaunchKernel(void* function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
                      unsigned int, void*, void** parameters, void**) {
    ONE_AT_A_TIME;
    typedef void (*Entry)(const void*, unsigned int, Dim, Dim, int);
    ((Entry)function)(parameters[0], 0, Dim{gx, gy, gz}, Dim{bx, by, bz}, 0);
    return 0;
}
}
