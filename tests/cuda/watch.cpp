// What the C++ compiler calls before each access with -fsanitize=thread: tells the driver's races.h.
#include <dlfcn.h>
#include <stddef.h>

static void tell(void* at, size_t bytes, int writes) {
    typedef void (*Access)(void*, size_t, int);
    static Access access = (Access)dlsym(dlopen("libcuda.so", RTLD_NOW), "fake_access");
    access(at, bytes, writes);
}

#define SIZE(n)                                                                                                                            \
    void __tsan_read##n(void* at) { tell(at, n, 0); }                                                                                      \
    void __tsan_write##n(void* at) { tell(at, n, 1); }                                                                                     \
    void __tsan_unaligned_read##n(void* at) { tell(at, n, 0); }                                                                            \
    void __tsan_unaligned_write##n(void* at) { tell(at, n, 1); }

extern "C" {
SIZE(1)
SIZE(2)
SIZE(4)
SIZE(8)
SIZE(16)
void __tsan_read_range(void* at, size_t bytes) { tell(at, bytes, 0); }
void __tsan_write_range(void* at, size_t bytes) { tell(at, bytes, 1); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
