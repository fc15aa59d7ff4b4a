// A CUDA driver without a GPU, for tests. Work waits on its stream until the host synchronises; then streams go on in a
// random legal order. Kernels are those that the compiler beside it (compiler.cpp) made for the host.
//
// Device memory can't be touched by the host except through the driver. A pageable write lands late. The target of a copy
// is garbage from the moment at which the copy may start. It stops on what a GPU would not forgive quietly: a wait for an
// event that was never recorded, addresses outside of what was allocated, bytes written beyond an allocation's end.
//
// FAKE_SEED chooses the orders. FAKE_NO_DEVICE=1 has no device. FAKE_DROP_WAIT=N ignores the Nth wait of each iteration and
// holds back what it waited for; FAKE_DROP_SYNC=N the Nth time that the host waits for a stream or for all. FAKE_REPORT names
// a file that says how many waits an iteration has, whether the ignored one follows from others, how often the host waits,
// whether a copy or something else stood behind the ignored wait, how often memory was pinned, how many events were
// recorded, and for each stream that was given back KERNELS/INTO/OUT/LEFT: kernels launched, copies to the device and from it,
// and how many of all these had not run then, in the order in which streams were made. FAKE_PINS=N pins memory N times.
// FAKE_NO_GRAPHS=1 captures no stream. FAKE_PAUSE=MS lets the host see MS milliseconds late that a stream has ended.
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

typedef unsigned long long Address;
typedef int Result;
struct Dim {
    unsigned int x, y, z;
};
struct Stream;
// By stream, how many of its operations have been ordered before.
typedef std::map<const Stream*, size_t> Clock;
struct Event {
    double at = 0;
    size_t recorded = 0, passed = 0;
    bool timed = true;
    const Stream* on = nullptr;
    Clock clock;
};
struct Operation {
    enum { WORK, WAIT, RECORD } kind;
    std::function<void()> work;
    // What a copy writes, for as long as it has not started.
    void* target = nullptr;
    size_t bytes = 0;
    Event* event = nullptr;
    size_t version = 0;
    // Of work: which of its stream's works it is, and what comes before it.
    size_t turn = 0;
    Clock before;
    // Between host and device.
    bool copy = false;
};
// Work in the order in which it was asked for.
typedef std::vector<std::function<void()>> Graph;
struct Stream {
    std::deque<Operation> queue;
    size_t enqueued = 0;
    // Its number, and what it was asked for: kernels, copies to the device, copies from it.
    size_t made = 0, kernels = 0, into = 0, out = 0;
    Clock clock;
    // While it is captured, what was asked for.
    Graph* captured = nullptr;
};
struct Function {
    void (*entry)(const void*, unsigned int, Dim, Dim, int);
    unsigned int bytes;
    // Beside its own, as was allowed.
    unsigned int shared = 0;
};

static std::map<Address, size_t> device, pinned;
static std::vector<Stream*> streams;
static Stream pageable;
static int retained = 0;
static std::mt19937 random_numbers(getenv("FAKE_SEED") ? atoi(getenv("FAKE_SEED")) : 1);
// What this thread knows to be done.
static thread_local Clock host;
// What calls of the host's functions stood behind. Work that is asked for after such a call comes
// after it.
static Clock called;
// Several jobs' threads call at once; one thing happens at a time.
static std::recursive_mutex mutex;
#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> one(mutex)

// The wait that is left out, if any, and what it would have waited for.
static long dropped = getenv("FAKE_DROP_WAIT") ? atol(getenv("FAKE_DROP_WAIT")) : -1;
static long waits = 0, most_waits = 0;
static bool needed = false;
static Event* held = nullptr;
static size_t held_version = 0;
static const Stream* waited = nullptr;
static const char* behind = "nothing";
// The same of the host; the stream that it does not wait for is held back until it does.
static const Stream *unawaited = nullptr, *unseen = nullptr;
static size_t unseen_turn = 0;
static const long dropped_sync = getenv("FAKE_DROP_SYNC") ? atol(getenv("FAKE_DROP_SYNC")) : -1;
static long syncs = 0;
static long pins = 0, records = 0, graphs = 0;
// What streams did that were given back, by their number.
static std::map<size_t, std::string> done_by;

static void stop(const char* what) {
    fprintf(stderr, "fake driver: %s\n", what);
    abort();
}

#include "races.h"

struct AtExit {
    ~AtExit() {
        const char* path = getenv("FAKE_REPORT");
        FILE* file = path ? fopen(path, "w") : nullptr;
        if (!file) return;
        fprintf(file, "%ld %s %ld %s %ld %ld", std::max(most_waits, waits), needed ? "needed" : "redundant", syncs, behind, pins, records);
        for (auto& stream : done_by) fprintf(file, " %s", stream.second.c_str());
        fprintf(file, "\n");
        fclose(file);
    }
} at_exit;

static void inside(const std::map<Address, size_t>& memory, Address at, size_t bytes, const char* what) {
    auto next = memory.upper_bound(at);
    if (next == memory.begin()) stop(what);
    --next;
    if (at + bytes > next->first + next->second) stop(what);
}

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

static void merge(Clock& into, const Clock& from) {
    for (auto& entry : from) into[entry.first] = std::max(into[entry.first], entry.second);
}

// Memory: whole pages, and behind its end bytes that nobody may write.

const size_t PAGE = 4096;
const unsigned char GUARD = 0xa5;

static size_t whole(size_t bytes) { return (bytes + 64 + PAGE - 1) / PAGE * PAGE; }

static Address allocate(size_t bytes) {
    void* memory = mmap(nullptr, whole(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0;
    memset(memory, 0xff, bytes);
    memset((char*)memory + bytes, GUARD, whole(bytes) - bytes);
    return (Address)memory;
}

static void release(std::map<Address, size_t>& memory, Address at) {
    auto found = memory.find(at);
    if (found == memory.end()) stop("memory was given back twice");
    mprotect((void*)at, whole(found->second), PROT_READ | PROT_WRITE);
    const unsigned char* end = (const unsigned char*)at + found->second;
    for (size_t i = 0; i < whole(found->second) - found->second; i++)
        if (end[i] != GUARD) stop("something wrote beyond the end of an allocation");
    munmap((void*)at, whole(found->second));
    races.released(at);
    memory.erase(found);
}

// While this lives, device memory can be touched.
struct OnDevice {
    static void protect(int flags) {
        for (auto& one : device) mprotect((void*)one.first, whole(one.second), flags);
    }
    OnDevice() { protect(PROT_READ | PROT_WRITE); }
    ~OnDevice() { protect(PROT_NONE); }
};

// Streams.

static bool runnable(const Stream& stream) {
    if (stream.queue.empty()) return false;
    const Operation& next = stream.queue.front();
    return next.kind != Operation::WAIT || next.event->passed >= next.version;
}

static void go_on(Stream& stream) {
    Operation next = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (next.kind == Operation::WORK) {
        races.begin(&stream, next.turn, &next.before);
        next.work();
        races.end();
    }
    if (next.kind == Operation::RECORD) {
        next.event->at = now();
        next.event->passed = std::max(next.event->passed, next.version);
    }
}

// A copy that may start has ruined what it will write.
static void start_copies() {
    for (Stream* stream : streams)
        if (runnable(*stream) && stream->queue.front().target) {
            memset(stream->queue.front().target, 0xff, stream->queue.front().bytes);
            stream->queue.front().target = nullptr;
        }
}

// Runs streams in a random legal order until `done`; what that does not need may stay behind.
static void run_until(const std::function<bool()>& done) {
    if (done()) return;
    OnDevice open;
    std::vector<Stream*> by_priority = streams;
    std::shuffle(by_priority.begin(), by_priority.end(), random_numbers);
    bool any = random_numbers() % 4 == 0;
    while (!done()) {
        start_copies();
        std::vector<Stream*> can;
        for (Stream* stream : by_priority)
            if (runnable(*stream)) can.push_back(stream);
        if (can.empty()) stop("streams wait for each other");
        if (held && held->passed >= held_version) held = nullptr;
        if (unawaited && can.size() > 1) can.erase(std::remove(can.begin(), can.end(), unawaited), can.end());
        if (held && can.size() > 1) can.erase(std::remove(can.begin(), can.end(), held->on), can.end());
        go_on(*can[any ? random_numbers() % can.size() : 0]);
    }
}

static void synchronise(Stream* stream) {
    if (stream == unawaited) unawaited = nullptr;
    run_until([stream] { return stream->queue.empty(); });
    merge(host, stream->clock);
    most_waits = std::max(most_waits, waits);
    waits = 0;
}

static void synchronise_all() {
    for (Stream* stream : streams) synchronise(stream);
}

// The host looks at results: the wait that was left out was needed, unless others stood for it.
static void look() {
    if (unseen && host[unseen] < unseen_turn) needed = true;
}

static void enqueue(Stream* stream, Operation operation) {
    if (stream->captured) {
        if (operation.kind != Operation::WORK || operation.copy) stop("something other than work in a graph");
        stream->captured->push_back(operation.work);
        return;
    }
    merge(stream->clock, host);
    merge(stream->clock, called);
    if (operation.kind == Operation::WORK) {
        if (waited == stream) {
            behind = operation.copy ? "copy" : "step";
            waited = nullptr;
        }
        operation.before = stream->clock;
        operation.turn = stream->clock[stream] = ++stream->enqueued;
    }
    stream->queue.push_back(std::move(operation));
}

static void work(Stream* stream, std::function<void()> what, void* target = nullptr, size_t bytes = 0) {
    Operation operation{Operation::WORK, std::move(what), target, bytes};
    operation.copy = target != nullptr;
    enqueue(stream, std::move(operation));
}

// Ruins what it will write as soon as it may start, where that is `target`.
static void transfer(Stream* stream, Address to, Address from, size_t bytes, void* target) {
    auto copy = [=] {
        races.access(from, bytes, false);
        races.access(to, bytes, true);
        memmove((void*)to, (void*)from, bytes);
    };
    work(stream, copy, target, target ? bytes : 0);
}

extern "C" {
// From watch.cpp and the libraries.
void fake_access(void* at, size_t bytes, int writes) { races.access((Address)at, bytes, writes); }
// For the libraries beside it: `what(data)` when the stream comes to it, each time if it is part of a graph.
void fake_enqueue(Stream* stream, void (*what)(void*), void (*drop)(void*), void* data) {
    ONE_AT_A_TIME;
    std::shared_ptr<void> kept(data, drop);
    work(stream, [=] { what(kept.get()); });
}

Result cuInit(unsigned int) { return getenv("FAKE_NO_DEVICE") ? 100 : 0; }
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
    *bytes = 16ull << 30;
    return 0;
}
// Compute capability 9.0.
Result cuDeviceGetAttribute(int* value, int which, int) {
    *value = which == 75 ? 9 : 0;
    return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int) {
    ONE_AT_A_TIME;
    if (streams.empty()) streams.push_back(&pageable);
    ++retained;
    *context = (void*)1;
    return 0;
}
Result cuDevicePrimaryCtxRelease_v2(int) {
    ONE_AT_A_TIME;
    if (--retained > 0) return 0;
    if (!device.empty() || !pinned.empty()) stop("memory was not given back");
    if (streams.size() != 1) stop("a stream was not given back");
    if (graphs) stop("a graph was not given back");
    return 0;
}
Result cuCtxSetCurrent(void*) { return 0; }
Result cuCtxSynchronize() {
    ONE_AT_A_TIME;
    if (syncs++ != dropped_sync) synchronise_all();
    else for (Stream* stream : streams) needed |= stream->clock[stream] > host[stream];
    return 0;
}
Result cuStreamCreate(Stream** stream, unsigned int flags) {
    ONE_AT_A_TIME;
    if (flags != 1) stop("a stream that waits for the default one");
    static size_t made = 0;
    *stream = new Stream;
    (*stream)->made = made++;
    streams.push_back(*stream);
    return 0;
}
Result cuStreamDestroy_v2(Stream* stream) {
    ONE_AT_A_TIME;
    size_t left = stream->queue.size();
    synchronise(stream);
    done_by[stream->made] = std::to_string(stream->kernels) + "/" + std::to_string(stream->into) + "/" + std::to_string(stream->out) + "/" + std::to_string(left);
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    delete stream;
    return 0;
}
Result cuStreamSynchronize(Stream* stream) {
    ONE_AT_A_TIME;
    static const long pause = getenv("FAKE_PAUSE") ? atol(getenv("FAKE_PAUSE")) : 0;
    if (syncs++ != dropped_sync) {
        synchronise(stream);
        usleep((useconds_t)pause * 1000);
    } else {
        unawaited = unseen = stream;
        unseen_turn = stream->clock[stream];
    }
    return 0;
}
Result cuStreamWaitEvent(Stream* stream, Event* event, unsigned int) {
    ONE_AT_A_TIME;
    if (!event->recorded) stop("a stream waits for what was never recorded");
    if (waits++ == dropped) {
        waited = stream;
        merge(stream->clock, host);
        if (event->clock[event->on] > stream->clock[event->on]) {
            needed = true;
            held = event;
            held_version = event->recorded;
        }
        return 0;
    }
    enqueue(stream, Operation{Operation::WAIT, {}, nullptr, 0, event, event->recorded});
    merge(stream->clock, event->clock);
    return 0;
}
Result cuEventCreate(Event** event, unsigned int flags) {
    *event = new Event;
    (*event)->timed = !(flags & 2);
    return 0;
}
Result cuEventRecord(Event* event, Stream* stream) {
    ONE_AT_A_TIME;
    records++;
    enqueue(stream, Operation{Operation::RECORD, {}, nullptr, 0, event, ++event->recorded});
    event->on = stream;
    event->clock = stream->clock;
    return 0;
}
Result cuEventSynchronize(Event* event) {
    ONE_AT_A_TIME;
    size_t version = event->recorded;
    run_until([=] { return event->passed >= version; });
    merge(host, event->clock);
    return 0;
}
Result cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    ONE_AT_A_TIME;
    look();
    if (!from->recorded || !to->recorded || !from->timed || !to->timed) return 400;
    // An event for which the host has not waited may have passed or not: here it has not.
    auto ahead = [](Event* event) { return event->passed < event->recorded || host[event->on] < event->clock[event->on]; };
    if (ahead(from) || ahead(to)) return 600;
    *milliseconds = (float)(to->at - from->at);
    return 0;
}
Result cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) { return cuEventElapsedTime(milliseconds, from, to); }
Result cuEventDestroy_v2(Event* event) {
    ONE_AT_A_TIME;
    synchronise_all();
    delete event;
    return 0;
}
Result cuMemAlloc_v2(Address* at, size_t bytes) {
    ONE_AT_A_TIME;
    *at = allocate(bytes);
    if (!*at) return 2;
    device[*at] = bytes;
    races.allocated(*at, bytes);
    mprotect((void*)*at, whole(bytes), PROT_NONE);
    return 0;
}
Result cuMemFree_v2(Address at) {
    ONE_AT_A_TIME;
    synchronise_all();
    release(device, at);
    return 0;
}
Result cuMemHostAlloc(void** at, size_t bytes, unsigned int flags) {
    ONE_AT_A_TIME;
    if (flags & 4) stop("write-combined memory is slow to read back");
    *at = (void*)allocate(bytes);
    if (!*at) return 2;
    pinned[(Address)*at] = bytes;
    races.allocated((Address)*at, bytes);
    return 0;
}
Result cuMemFreeHost(void* at) {
    ONE_AT_A_TIME;
    synchronise_all();
    release(pinned, (Address)at);
    return 0;
}
Result cuMemHostRegister_v2(void* at, size_t bytes, unsigned int) {
    ONE_AT_A_TIME;
    static const long most = getenv("FAKE_PINS") ? atol(getenv("FAKE_PINS")) : -1;
    if ((Address)at % PAGE) return 1;
    if (pins == most) return 2;
    pins++;
    pinned[(Address)at] = bytes;
    races.allocated((Address)at, bytes);
    return 0;
}
Result cuMemHostUnregister(void* at) {
    ONE_AT_A_TIME;
    synchronise_all();
    races.released((Address)at);
    if (!pinned.erase((Address)at)) stop("memory that is not pinned was unpinned");
    return 0;
}
// From pageable memory: the bytes are taken at once, and land before anything that comes later on the default stream.
Result cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
    ONE_AT_A_TIME;
    inside(device, to, bytes, "a copy to outside the arena");
    std::string data((const char*)from, bytes);
    auto copy = [=] {
        races.access(to, data.size(), true);
        memcpy((void*)to, data.data(), data.size());
    };
    work(&pageable, copy, (void*)to, bytes);
    return 0;
}
Result cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    ONE_AT_A_TIME;
    inside(device, from, bytes, "a copy from outside the arena");
    look();
    synchronise(&pageable);
    OnDevice open;
    memcpy(to, (void*)from, bytes);
    return 0;
}
// Asynchronous copies must be between allocations: pageable memory would make them wait.
Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    inside(device, to, bytes, "a copy to outside the arena");
    inside(pinned, (Address)from, bytes, "a copy from memory that is not pinned");
    stream->into++;
    transfer(stream, to, (Address)from, bytes, (void*)to);
    return 0;
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    inside(device, from, bytes, "a copy from outside the arena");
    inside(pinned, (Address)to, bytes, "a copy to memory that is not pinned");
    stream->out++;
    transfer(stream, (Address)to, from, bytes, to);
    return 0;
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    inside(device, to, bytes, "a copy to outside the arena");
    inside(device, from, bytes, "a copy from outside the arena");
    transfer(stream, to, from, bytes, nullptr);
    return 0;
}
Result cuMemsetD8Async(Address to, unsigned char byte, size_t bytes, Stream* stream) {
    ONE_AT_A_TIME;
    inside(device, to, bytes, "a fill outside the arena");
    work(stream, [=] {
        races.access(to, bytes, true);
        memset((void*)to, byte, bytes);
    });
    return 0;
}
// The image is a library of the host (compiler.cpp), whose section headers come last.
Result cuModuleLoadData(void** module, const void* image) {
    const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG)) return 200;
    size_t bytes = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    int file = memfd_create("kernels", 0);
    if (file < 0 || write(file, image, bytes) != (ssize_t)bytes) return 200;
    *module = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "fake driver: %s\n", dlerror());
    // Its number stays taken: the loader knows a library by its path.
    return *module ? 0 : 200;
}
Result cuModuleUnload(void* module) {
    ONE_AT_A_TIME;
    synchronise_all();
    return dlclose(module);
}
Result cuModuleGetFunction(Function** function, void* module, const char* name) {
    void* entry = dlsym(module, name);
    void* bytes = dlsym(module, (std::string(name) + "_bytes").c_str());
    if (!entry || !bytes) return 500;
    static std::map<std::pair<void*, std::string>, Function> functions;
    ONE_AT_A_TIME;
    *function = &(functions[{module, name}] = Function{(void (*)(const void*, unsigned int, Dim, Dim, int))entry, *(unsigned int*)bytes});
    return 0;
}
// Of attributes only the shared memory of launches, as an H100 has it.
Result cuFuncSetAttribute(Function* function, int which, int value) {
    ONE_AT_A_TIME;
    if (which != 8 || value < 0 || value > 227 << 10) return 1;
    function->shared = (unsigned int)value;
    return 0;
}
Result cuLaunchKernel(Function* function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
                      unsigned int shared, Stream* stream, void** parameters, void**) {
    ONE_AT_A_TIME;
    Function kernel = *function;
    if (shared > 48 << 10 && shared > kernel.shared) return 1;
    // Aligned for whatever it holds.
    std::vector<long double> copy(kernel.bytes / sizeof(long double) + 1);
    memcpy(copy.data(), parameters[0], kernel.bytes);
    int order = random_numbers() % 3;
    stream->kernels++;
    work(stream, [=] { kernel.entry(copy.data(), kernel.bytes, Dim{gx, gy, gz}, Dim{bx, by, bz}, order); });
    return 0;
}
Result cuLaunchHostFunc(Stream* stream, void (*what)(void*), void* data) {
    ONE_AT_A_TIME;
    Clock before = stream->clock;
    work(stream, [=] {
        merge(called, before);
        what(data);
    });
    return 0;
}
// A graph that can be launched is a copy of what was captured.
Result cuStreamBeginCapture_v2(Stream* stream, int) {
    ONE_AT_A_TIME;
    if (getenv("FAKE_NO_GRAPHS")) return 801;
    if (stream->captured) stop("a capture within a capture");
    stream->captured = new Graph;
    return 0;
}
Result cuStreamEndCapture(Stream* stream, Graph** graph) {
    ONE_AT_A_TIME;
    if (!stream->captured) return 1;
    *graph = stream->captured;
    stream->captured = nullptr;
    graphs++;
    return 0;
}
Result cuGraphInstantiateWithFlags(Graph** made, Graph* graph, unsigned long long) {
    ONE_AT_A_TIME;
    *made = new Graph(*graph);
    graphs++;
    return 0;
}
Result cuGraphDestroy(Graph* graph) {
    ONE_AT_A_TIME;
    delete graph;
    graphs--;
    return 0;
}
Result cuGraphExecDestroy(Graph* graph) { return cuGraphDestroy(graph); }
Result cuGraphLaunch(Graph* graph, Stream* stream) {
    ONE_AT_A_TIME;
    for (auto& one : *graph) work(stream, one);
    return 0;
}
}
