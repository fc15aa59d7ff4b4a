// What every kernel file begins with: types, operands, loads and stores, reductions of a block.
//
// The text is put before each *.cu file, and compiled by NVRTC without any header, or by a C++ compiler after
// shim.h, which runs the same code on the host. A kernel takes one structure by value; its mirror is in
// src/run/backend/cuda/params.rs. No atomics, and grids that depend on shapes alone: the same call gives the same bits.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef SHIM
#define KERNEL(name, Params, threads) KERNEL_HELD(1, name, Params, threads)
// Of which a multiprocessor holds at least so many blocks.
#define KERNEL_HELD(blocks, name, Params, threads)                                                                                         \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)
#define SHARED __shared__
// Shared memory whose size the launch names, since it is more than a kernel may declare.
#define DYNAMIC_SHARED(Type, name)                                                                                                         \
    extern __shared__ Four dynamic_shared[];                                                                                               \
    Type& name = *(Type*)dynamic_shared
// A value of the lane whose number differs in these bits; all threads of a block come here together.
#define OTHER_LANE(value, bits) __shfl_xor_sync(0xffffffff, value, bits)
#define SYNC() __syncthreads()
#define SYNC_OR(flag) __syncthreads_or(flag)
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ONCE _Pragma("unroll 1")
#define TWICE _Pragma("unroll 2")
#endif

#define INF __int_as_float(0x7f800000)
#define RANK 8

enum { F32, BF16, I64, I32, U8, BOOL, F16, F64 };

// A strided tensor, or a number.
struct Operand {
    char* data;
    int dtype;
    int number;
    double value;
    i64 stride[RANK];
};

struct Four {
    alignas(16) float x[4];
};

struct Four16 {
    alignas(8) u16 x[4];
};

DEVICE float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Rounds to the nearest, ties to even.
DEVICE u16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#ifdef SHIM
DEVICE float from_f16(u16 bits) {
    u32 sign = (u32)(bits >> 15) << 31, exponent = bits >> 10 & 31, fraction = bits & 1023;
    // Subnormal numbers are whole numbers of 2^-24.
    u32 size = exponent == 0 ? __float_as_uint((float)fraction / 16777216.0f) : (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    return __uint_as_float(sign | size);
}

DEVICE u16 to_f16(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (u16)(sign | 0x7e00);
    if (size >= 0x477ff000) return (u16)(sign | 0x7c00);
    // Below 2^-14: adding 0.5 leaves a whole number of 2^-24 in the last places, rounded.
    if (size < 0x38800000) return (u16)(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000));
    return (u16)(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}
#else
DEVICE float from_f16(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

DEVICE u16 to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

DEVICE bool is_real(int dtype) { return dtype == F32 || dtype == BF16 || dtype == F16; }

// An element of a type that is_real; callers have refused others.
DEVICE float load_real(const char* data, int dtype, i64 at) {
    if (dtype == F32) return ((const float*)data)[at];
    u16 bits = ((const u16*)data)[at];
    return dtype == BF16 ? from_bf16(bits) : from_f16(bits);
}

DEVICE void store_real(char* data, int dtype, i64 at, float x) {
    if (dtype == F32) ((float*)data)[at] = x;
    else ((u16*)data)[at] = dtype == BF16 ? to_bf16(x) : to_f16(x);
}

// An element of a tensor of such a type, or a number.
template <class T> DEVICE T real(const Operand& o, i64 at) { return o.number ? (T)o.value : (T)load_real(o.data, o.dtype, at); }

template <class T> DEVICE T load(const Operand& o, i64 at) {
    if (o.number) return (T)o.value;
    switch (o.dtype) {
        case F32: return (T)((const float*)o.data)[at];
        case BF16: return (T)from_bf16(((const u16*)o.data)[at]);
        case F16: return (T)from_f16(((const u16*)o.data)[at]);
        case F64: return (T)((const double*)o.data)[at];
        case I64: return (T)((const i64*)o.data)[at];
        case I32: return (T)((const int*)o.data)[at];
        case U8: return (T)((const u8*)o.data)[at];
        default: return (T)(((const u8*)o.data)[at] != 0);
    }
}

template <class T> DEVICE void store(const Operand& o, i64 at, T value) {
    switch (o.dtype) {
        case F32: ((float*)o.data)[at] = (float)value; break;
        case BF16: ((u16*)o.data)[at] = to_bf16((float)value); break;
        case F16: ((u16*)o.data)[at] = to_f16((float)value); break;
        case F64: ((double*)o.data)[at] = (double)value; break;
        case I64: ((i64*)o.data)[at] = (i64)value; break;
        case I32: ((int*)o.data)[at] = (int)value; break;
        case U8: ((u8*)o.data)[at] = (u8)(i64)value; break;
        default: ((u8*)o.data)[at] = value != (T)0;
    }
}

DEVICE i64 first_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE i64 all_threads() { return (i64)gridDim.x * blockDim.x; }

// Takes the last coordinate of `rest` in an extent off it; the caller says whether 32 bits are enough.
DEVICE i64 take(i64& rest, u32 extent, bool small) {
    if (small) {
        u32 whole = (u32)rest, quotient = whole / extent;
        rest = quotient;
        return whole - quotient * extent;
    }
    i64 quotient = rest / extent, coordinate = rest - quotient * extent;
    rest = quotient;
    return coordinate;
}

DEVICE bool is_nan(float x) { return x != x; }
DEVICE bool is_nan(double x) { return x != x; }

// Joins one value of each thread of a block, in a tree whose shape depends on the number of threads alone, a power of two.
// Every thread gets the result. `slots` holds one for each thread.
template <class T, class F> DEVICE T block_reduce(T value, T* slots, F join) {
    u32 thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    slots[thread] = value;
    SYNC();
    for (u32 half = threads / 2; half > 0; half /= 2) {
        if (thread < half) slots[thread] = join(slots[thread], slots[thread + half]);
        SYNC();
    }
    T result = slots[0];
    SYNC();
    return result;
}

DEVICE double block_sum(double value, double* slots) {
    return block_reduce(value, slots, [](double a, double b) { return a + b; });
}

// How a sum is cut over blocks. One part: a launch does it alone. More: a first launch puts the sums of parts into `sums`,
// and a second one adds them. Which part adds what, and in which order, depends on shapes alone.
struct Parts {
    i64 count;
    int second;
    int pad;
    void* sums;
};
DEVICE bool gives_parts(const Parts& parts) { return parts.count > 1 && !parts.second; }

// What a block goes through of `whole` things, as one of `parts`.
DEVICE void part_of(i64 whole, i64 parts, i64 part, i64& begin, i64& end) {
    i64 size = (whole + parts - 1) / parts;
    begin = part * size;
    end = begin + size < whole ? begin + size : whole;
}

// Philox-4x32-10 (Salmon et al., SC 2011), as the host's.
DEVICE void philox(u64 block, u64 iteration, u64 key, u32* words) {
    u32 a = (u32)block, b = (u32)(block >> 32), c = (u32)iteration, d = (u32)(iteration >> 32);
    u32 k0 = (u32)key, k1 = (u32)(key >> 32);
    UNROLL for (int round = 0; round < 10; round++) {
        u64 m = (u64)a * 0xD2511F53u, n = (u64)c * 0xCD9E8D57u;
        a = (u32)(n >> 32) ^ b ^ k0;
        b = (u32)n;
        c = (u32)(m >> 32) ^ d ^ k1;
        d = (u32)m;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

// Which element is drawn, by which operator, and below what it is dropped.
struct Random {
    u64 key;
    u64 iteration;
    u64 threshold;
};

DEVICE bool keep(const Random& random, u64 element) {
    u32 words[4];
    philox(element / 4, random.iteration, random.key, words);
    u32 lane = (u32)element & 3;
    u32 word = lane == 0 ? words[0] : lane == 1 ? words[1] : lane == 2 ? words[2] : words[3];
    return word >= random.threshold;
}

// Elementwise work: up to three inputs broadcast to the output's shape.
struct Map {
    i64 count;
    int rank;
    // 1: all operands are dense f32; 2: dense bf16; 3: dense f16; 0: none of these. Dense includes numbers.
    int dense;
    u32 shape[RANK];
    Operand o[4];
    float s[4];
    i64 k[4];
    Random random;
};

template <int N> DEVICE void places(const Map& p, i64 at, i64* offset) {
    UNROLL for (int k = 0; k < N; k++) offset[k] = 0;
    bool small = p.count <= 0xffffffffll;
    ONCE for (int d = p.rank - 1; d > 0; d--) {
        i64 c = take(at, p.shape[d], small);
        UNROLL for (int k = 0; k < N; k++) offset[k] += c * p.o[k].stride[d];
    }
    UNROLL for (int k = 0; k < N; k++) offset[k] += at * p.o[k].stride[0];
}

// `f(values, element)` for each element, which is numbered in the order of `shape`.
template <class T, int N, class F> DEVICE void each(const Map& p, F f) {
    i64 done = 0;
    if (sizeof(T) == sizeof(float) && p.dense != 0) {
        i64 quads = p.count / 4;
        done = quads * 4;
        ONCE for (i64 q = first_thread(); q < quads; q += all_threads()) {
            float in[N + 1][4];
            UNROLL for (int k = 0; k < N; k++) {
                const Operand& o = p.o[k + 1];
                if (o.number) {
                    UNROLL for (int j = 0; j < 4; j++) in[k][j] = (float)o.value;
                } else if (p.dense == 1) {
                    Four four = ((const Four*)o.data)[q];
                    UNROLL for (int j = 0; j < 4; j++) in[k][j] = four.x[j];
                } else {
                    Four16 four = ((const Four16*)o.data)[q];
                    UNROLL for (int j = 0; j < 4; j++) in[k][j] = p.dense == 2 ? from_bf16(four.x[j]) : from_f16(four.x[j]);
                }
            }
            Four out;
            UNROLL for (int j = 0; j < 4; j++) {
                T one[N + 1];
                UNROLL for (int k = 0; k < N; k++) one[k] = (T)in[k][j];
                out.x[j] = (float)f(one, q * 4 + j);
            }
            if (p.dense == 1) {
                ((Four*)p.o[0].data)[q] = out;
            } else {
                Four16 four;
                UNROLL for (int j = 0; j < 4; j++) four.x[j] = p.dense == 2 ? to_bf16(out.x[j]) : to_f16(out.x[j]);
                ((Four16*)p.o[0].data)[q] = four;
            }
        }
    }
    ONCE for (i64 i = done + first_thread(); i < p.count; i += all_threads()) {
        i64 at[N + 1];
        T in[N + 1];
        places<N + 1>(p, i, at);
        UNROLL for (int k = 0; k < N; k++) in[k] = load<T>(p.o[k + 1], at[k + 1]);
        store<T>(p.o[0], at[0], f(in, i));
    }
}
