// cuBLASLt and cuDNN by their definitions, summed in f64, one algorithm for each thing that they do. Each takes a workspace and
// ruins what was in it; work waits on its stream, as the driver beside it (driver.cpp) has them. FAKE_NO_ALGORITHM=1: they
// have none for anything. FAKE_NO_EPILOGUE=1: cuBLASLt has none that adds a bias. FAKE_LEAST=N: it has none that works in less
// than N bytes.
// cuBLASLt cuts sums that are long and have few results in three parts, unless FAKE_WHOLE=1, and adds them in order;
// FAKE_IN_PLACE=1: it says that it adds them in whatever order they come. FAKE_TERMS=N: sums leave out terms, so that at
// most N are left of the longest extent that they go over: for jobs whose whole sums would take hours. Memory, order and workspaces
// are as ever, and a planned run still has to give an unplanned one's bits.
#include <dlfcn.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <vector>

// Runs `work` when the stream comes to it.
static void enqueue(void* stream, std::function<void()> work) {
    typedef void (*Enqueue)(void*, void (*)(void*), void (*)(void*), void*);
    static Enqueue put = (Enqueue)dlsym(dlopen("libcuda.so", RTLD_NOW), "fake_enqueue");
    auto run = [](void* data) { (*(std::function<void()>*)data)(); };
    auto drop = [](void* data) { delete (std::function<void()>*)data; };
    put(stream, run, drop, new std::function<void()>(work));
}

// Elements: f32 is 0 for both libraries; bf16 and f16 are numbered differently.
enum { F32, BF16, F16, OTHER };
static double number(const void* data, int64_t at, int type) {
    if (type == F32) return ((const float*)data)[at];
    uint16_t half = ((const uint16_t*)data)[at];
    uint32_t bits = (uint32_t)half << 16;
    if (type == F16) {
        uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
        if (exponent == 0) return (half >> 15 ? -1.0 : 1.0) * fraction / 16777216.0;
        bits = (uint32_t)(half >> 15) << 31 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    }
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// Rounds to the nearest, ties to even.
static void set_number(void* data, int64_t at, int type, float x) {
    if (type == F32) {
        ((float*)data)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    if (type == F16) {
        uint32_t size = bits & 0x7fffffff;
        float tiny = fabsf(x) + 0.5f;
        memcpy(&half, &tiny, 2);
        if (size > 0x7f800000) half = 0x7e00;
        else if (size >= 0x477ff000) half = 0x7c00;
        else if (size >= 0x38800000) half = (uint16_t)((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
        half |= bits >> 16 & 0x8000;
    }
    ((uint16_t*)data)[at] = half;
}

// Tells the driver what the running work reads or writes.
static void touch(const void* at, int64_t elements, int type, int writes) {
    typedef void (*Access)(const void*, size_t, int);
    static Access access = (Access)dlsym(dlopen("libcuda.so", RTLD_NOW), "fake_access");
    access(at, (size_t)elements * (type == F32 ? 4 : 2), writes);
}

// From a term that counts to the next.
static int64_t step_of(int64_t extent) {
    static const int64_t most = getenv("FAKE_TERMS") ? atol(getenv("FAKE_TERMS")) : 0;
    return most > 0 && extent > most ? (extent + most - 1) / most : 1;
}

#define START(name)                                                                                                                        \
    int name(void** handle) {                                                                                                              \
        *handle = (void*)1;                                                                                                                \
        return 0;                                                                                                                          \
    }
#define DONE(name)                                                                                                                         \
    int name(...) { return 0; }

extern "C" {
#ifdef CUBLASLT
size_t cublasLtGetVersion() { return 130000; }
START(cublasLtCreate)
DONE(cublasLtDestroy)

struct Description {
    int transposed[2], epilogue;
    const void* bias;
};
struct Layout {
    int type;
    int64_t rows, columns, step;
    int32_t batch;
    int64_t batch_step;
};
struct Preference {
    uint64_t workspace;
    uint32_t reductions;
};
struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
const size_t SCRATCH = 4096;
const uint64_t NUMBER = 7;

int cublasLtMatmulDescCreate(Description** d, int compute, int scale) {
    *d = new Description{};
    return (compute == 68 || compute == 77) && scale == 0 ? 0 : 7;
}
int cublasLtMatmulDescSetAttribute(Description* d, int which, const void* value, size_t bytes) {
    if (which == 3 || which == 4) return bytes == 4 ? memcpy(&d->transposed[which - 3], value, 4), 0 : 7;
    if (which == 7) return bytes == 4 ? memcpy(&d->epilogue, value, 4), 0 : 7;
    if (which == 8) return bytes == 8 ? memcpy(&d->bias, value, 8), 0 : 7;
    return 7;
}
int cublasLtMatmulDescDestroy(Description* d) {
    delete d;
    return 0;
}
int cublasLtMatrixLayoutCreate(Layout** l, int type, uint64_t rows, uint64_t columns, int64_t step) {
    int element = type == 0 ? F32 : type == 14 ? BF16 : type == 2 ? F16 : OTHER;
    *l = new Layout{element, (int64_t)rows, (int64_t)columns, step, 1, 0};
    return step >= (int64_t)rows && element != OTHER ? 0 : 7;
}
int cublasLtMatrixLayoutSetAttribute(Layout* l, int which, const void* value, size_t bytes) {
    if (which == 5) return bytes == 4 ? memcpy(&l->batch, value, 4), 0 : 7;
    if (which == 6) return bytes == 8 ? memcpy(&l->batch_step, value, 8), 0 : 7;
    return 7;
}
int cublasLtMatrixLayoutDestroy(Layout* l) {
    delete l;
    return 0;
}
int cublasLtMatmulPreferenceCreate(Preference** p) {
    *p = new Preference{};
    return 0;
}
int cublasLtMatmulPreferenceSetAttribute(Preference* p, int which, const void* value, size_t) {
    if (which == 1) memcpy(&p->workspace, value, 8);
    if (which == 3) memcpy(&p->reductions, value, 4);
    return 0;
}
int cublasLtMatmulPreferenceDestroy(Preference* p) {
    delete p;
    return 0;
}
// An algorithm: its number, in how many parts it cuts sums, how it adds them.
int cublasLtMatmulAlgoConfigGetAttribute(const uint64_t* algorithm, int which, void* value, size_t bytes, size_t* written) {
    const uint32_t of[4] = {(uint32_t)algorithm[0], 1, (uint32_t)algorithm[1], (uint32_t)algorithm[2]};
    if (which < 0 || which > 3 || bytes != 4) return 7;
    memcpy(value, &of[which], 4);
    *written = 4;
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, Description* d, Layout* a, Layout*, Layout* c, Layout*, Preference* p, int, Heuristic* found, int* count) {
    // Sums in the output's place, or rounded in between, would give other bits each time.
    const char* least = getenv("FAKE_LEAST");
    bool fits = p->workspace >= (least ? strtoull(least, nullptr, 10) : SCRATCH) && (p->reductions & ~2u) == 0 && !getenv("FAKE_NO_ALGORITHM");
    fits = fits && (d->epilogue == 0 || !getenv("FAKE_NO_EPILOGUE"));
    *count = fits;
    int64_t sum_over = d->transposed[0] ? a->rows : a->columns;
    bool cut = sum_over > c->rows && sum_over > c->columns && !getenv("FAKE_WHOLE");
    uint64_t how = cut ? getenv("FAKE_IN_PLACE") ? 1 : 2 : 0;
    if (fits) *found = Heuristic{{NUMBER, cut ? 3u : 1u, how}, SCRATCH, 0, 1, {}};
    return fits ? 0 : 15;
}
// Matrices by columns; a bias has an element for each row of the result.
static void multiply(const Description& d, float alpha, const void* a, const Layout& la, const void* b, const Layout& lb, float beta, void* c,
                     const Layout& lc, int64_t parts) {
    auto at = [](const Layout& l, bool turned, int64_t row, int64_t column) { return turned ? column + row * l.step : row + column * l.step; };
    int64_t sum_over = d.transposed[0] ? la.rows : la.columns, step = step_of(sum_over);
    auto span = [](const Layout& l) { return l.rows == 0 || l.columns == 0 ? 0 : (l.batch - 1) * l.batch_step + (l.columns - 1) * l.step + l.rows; };
    touch(a, span(la), la.type, 0);
    touch(b, span(lb), lb.type, 0);
    if (beta != 0) touch(c, span(lc), lc.type, 0);
    touch(c, span(lc), lc.type, 1);
    if (d.epilogue == 4) touch(d.bias, lc.rows, lc.type, 0);
    for (int64_t n = 0; n < lc.batch; n++)
        for (int64_t j = 0; j < lc.columns; j++)
            for (int64_t i = 0; i < lc.rows; i++) {
                double sum = 0;
                for (int64_t part = 0; part < parts; part++) {
                    // Kept as f32 until all are there.
                    double own = 0;
                    for (int64_t k = part * sum_over / parts; k < (part + 1) * sum_over / parts; k += step)
                        own += number(a, n * la.batch_step + at(la, d.transposed[0], i, k), la.type) *
                               number(b, n * lb.batch_step + at(lb, d.transposed[1], k, j), lb.type);
                    sum += parts > 1 ? (float)own : own;
                }
                int64_t place = n * lc.batch_step + at(lc, false, i, j);
                double before = beta == 0 ? 0 : beta * number(c, place, lc.type);
                double bias = d.epilogue == 4 ? number(d.bias, i, lc.type) : 0;
                set_number(c, place, lc.type, (float)(alpha * sum + before + bias));
            }
}
// FAKE_OVERRUN=1: an element beyond the result's end is written.
int cublasLtMatmul(void*, Description* d, const float* alpha, const void* a, Layout* la, const void* b, Layout* lb, const float* beta, const void* c,
                   Layout* lc, void* to, Layout*, const uint64_t* algorithm, void* workspace, size_t bytes, void* stream) {
    if (*algorithm != NUMBER || bytes < SCRATCH || !workspace || c != to) return 7;
    Description description = *d;
    Layout layouts[3] = {*la, *lb, *lc};
    float scale[2] = {*alpha, *beta};
    int64_t parts = (int64_t)algorithm[1];
    enqueue(stream, [=] {
        memset(workspace, 0xff, bytes);
        multiply(description, scale[0], a, layouts[0], b, layouts[1], scale[1], to, layouts[2], parts);
        const Layout& last = layouts[2];
        if (getenv("FAKE_OVERRUN")) set_number(to, (last.batch - 1) * last.batch_step + last.columns * last.step, last.type, 1);
    });
    return 0;
}
#else
size_t cudnnGetVersion() { return 91300; }
struct Handle {
    void* stream;
};
// Its parts are opened by bare name; one of another version is not taken.
int cudnnCreate(Handle** handle) {
    void* part = dlopen("libcudnn_ops.so.9", RTLD_NOW);
    auto version = part ? (size_t (*)())dlsym(part, "cudnnGetOpsVersion") : cudnnGetVersion;
    if (version() != cudnnGetVersion()) return 1001;
    *handle = new Handle{};
    return 0;
}
int cudnnDestroy(Handle* handle) {
    delete handle;
    return 0;
}
int cudnnSetStream(Handle* handle, void* stream) {
    handle->stream = stream;
    return 0;
}

// A tensor, a filter or a convolution.
struct Descriptor {
    int kind, groups;
    int size[4], stride[4];
    int padding[2], step[2], dilation[2];
    int mathematics;
};
// The library's numbers, and what they want, of the passes: forward, back to the input, back to the weights.
static const int algorithm[3] = {1, 4, 3};
static const size_t wanted[3] = {1000, 3000, 2000};

static int make(Descriptor** descriptor) {
    *descriptor = new Descriptor{};
    return 0;
}
static int drop(Descriptor* descriptor) {
    delete descriptor;
    return 0;
}
int cudnnCreateTensorDescriptor(Descriptor** d) { return make(d); }
int cudnnCreateFilterDescriptor(Descriptor** d) { return make(d); }
int cudnnCreateConvolutionDescriptor(Descriptor** d) { return make(d); }
int cudnnDestroyTensorDescriptor(Descriptor* d) { return drop(d); }
int cudnnDestroyFilterDescriptor(Descriptor* d) { return drop(d); }
int cudnnDestroyConvolutionDescriptor(Descriptor* d) { return drop(d); }
static int element(int type) { return type == 0 ? F32 : type == 9 ? BF16 : type == 2 ? F16 : OTHER; }
int cudnnSetTensor4dDescriptorEx(Descriptor* d, int kind, int n, int c, int h, int w, int sn, int sc, int sh, int sw) {
    *d = Descriptor{element(kind), 1, {n, c, h, w}, {sn, sc, sh, sw}};
    return 0;
}
int cudnnSetFilter4dDescriptor(Descriptor* d, int kind, int format, int n, int c, int h, int w) {
    if (format == 0) *d = Descriptor{element(kind), 1, {n, c, h, w}, {c * h * w, h * w, w, 1}};
    else *d = Descriptor{element(kind), 1, {n, c, h, w}, {c * h * w, 1, w * c, c}};
    return 0;
}
int cudnnSetConvolution2dDescriptor(Descriptor* d, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int kind) {
    *d = Descriptor{kind, 1, {}, {}, {ph, pw}, {sh, sw}, {dh, dw}};
    return mode == 1 ? 0 : 9;
}
int cudnnSetConvolutionGroupCount(Descriptor* d, int groups) {
    d->groups = groups;
    return 0;
}
int cudnnSetConvolutionMathType(Descriptor* d, int mathematics) {
    d->mathematics = mathematics;
    return 0;
}
// What algorithms compute in when asked for whatever is quickest (0); the descriptor must say so when they run.
const int TENSOR_CORES = 1;

struct Expected {
    int algorithm, status;
    float time;
    size_t memory;
    int determinism, mathematics, reserved[3];
};
static int ask(int pass, const Descriptor* first, const Descriptor* c, int most, int* count, Expected* found) {
    if (first->kind == OTHER || c->kind != 0 || most < 2 || getenv("FAKE_NO_ALGORITHM")) return 9;
    // A quicker one that gives other bits each time is none.
    found[0] = Expected{0, 0, 1, 0, 0, 0, {}};
    found[1] = Expected{algorithm[pass], 0, 2, wanted[pass], 1, c->mathematics ? c->mathematics : TENSOR_CORES, {}};
    *count = 2;
    return 0;
}
int cudnnGetConvolutionForwardAlgorithm_v7(void*, Descriptor* x, void*, Descriptor* c, void*, int most, int* count, Expected* found) {
    return ask(0, x, c, most, count, found);
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(void*, Descriptor* w, void*, Descriptor* c, void*, int most, int* count, Expected* found) {
    return ask(1, w, c, most, count, found);
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void*, Descriptor* x, void*, Descriptor* c, void*, int most, int* count, Expected* found) {
    return ask(2, x, c, most, count, found);
}

// All products of one convolution, summed in f64 at what `pass` writes.
static void convolve(int pass, const Descriptor* dx, const void* x, const Descriptor* dw, const void* w, const Descriptor* c, void* workspace,
                     size_t bytes, const Descriptor* dy, const void* y, void* to) {
    memset(workspace, 0xff, bytes);
    const Descriptor* of[3] = {dy, dx, dw};
    const void* operands[3] = {y, x, w};
    for (int k = 0; k < 3; k++) {
        int64_t span = 1;
        for (int i = 0; i < 4; i++) span += (int64_t)(of[k]->size[i] - 1) * of[k]->stride[i];
        touch(k == pass ? to : operands[k], span, of[k]->kind, k == pass);
    }
    const int *size = of[pass]->size, *stride = of[pass]->stride;
    std::vector<double> sums((size_t)size[0] * size[1] * size[2] * size[3]);
    auto at = [](const Descriptor* d, int i, int j, int k, int l) {
        return (long)i * d->stride[0] + (long)j * d->stride[1] + (long)k * d->stride[2] + (long)l * d->stride[3];
    };
    int out = dw->size[0] / c->groups, in = dw->size[1];
    int step_n = pass == 2 ? (int)step_of(dy->size[0]) : 1, step_i = pass == 2 ? (int)step_of(dy->size[2]) : 1;
    int step_j = pass == 2 ? (int)step_of(dy->size[3]) : 1;
    int step_o = pass == 1 ? (int)step_of(out) : 1, step_k = pass == 0 ? (int)step_of(in) : 1;
    for (int n = 0; n < dy->size[0]; n += step_n)
        for (int o = 0; o < dw->size[0]; o += step_o)
            for (int i = 0; i < dy->size[2]; i += step_i)
                for (int j = 0; j < dy->size[3]; j += step_j)
                    for (int k = 0; k < in; k += step_k)
                        for (int r = 0; r < dw->size[2]; r++)
                            for (int s = 0; s < dw->size[3]; s++) {
                                int row = i * c->step[0] - c->padding[0] + r * c->dilation[0], channel = o / out * in + k;
                                int column = j * c->step[1] - c->padding[1] + s * c->dilation[1];
                                if (row < 0 || row >= dx->size[2] || column < 0 || column >= dx->size[3]) continue;
                                const int where[3][4] = {{n, o, i, j}, {n, channel, row, column}, {o, k, r, s}};
                                const int* p = where[pass];
                                double a = pass == 1 ? number(w, at(dw, o, k, r, s), dw->kind) : number(x, at(dx, n, channel, row, column), dx->kind);
                                double b = pass == 0 ? number(w, at(dw, o, k, r, s), dw->kind) : number(y, at(dy, n, o, i, j), dy->kind);
                                sums[(((size_t)p[0] * size[1] + p[1]) * size[2] + p[2]) * size[3] + p[3]] += a * b;
                            }
    size_t next = 0;
    for (int i = 0; i < size[0]; i++)
        for (int j = 0; j < size[1]; j++)
            for (int k = 0; k < size[2]; k++)
                for (int l = 0; l < size[3]; l++)
                    set_number(to, i * (long)stride[0] + j * (long)stride[1] + k * (long)stride[2] + l * (long)stride[3], of[pass]->kind, (float)sums[next++]);
}
static int put(const Handle* handle, int pass, const Descriptor* dx, const void* x, const Descriptor* dw, const void* w, const Descriptor* c, int chosen,
               void* workspace, size_t bytes, const Descriptor* dy, const void* y, void* to) {
    if (chosen != algorithm[pass] || bytes < wanted[pass] || c->mathematics == 0) return 9;
    Descriptor x_is = *dx, w_is = *dw, y_is = *dy, is = *c;
    enqueue(handle->stream, [=] { convolve(pass, &x_is, x, &w_is, w, &is, workspace, bytes, &y_is, y, to); });
    return 0;
}
int cudnnConvolutionForward(Handle* handle, const void*, Descriptor* dx, const void* x, Descriptor* dw, const void* w, Descriptor* c, int chosen,
                            void* workspace, size_t bytes, const void*, Descriptor* dy, void* y) {
    return put(handle, 0, dx, x, dw, w, c, chosen, workspace, bytes, dy, 0, y);
}
int cudnnConvolutionBackwardData(Handle* handle, const void*, Descriptor* dw, const void* w, Descriptor* dy, const void* y, Descriptor* c, int chosen,
                                 void* workspace, size_t bytes, const void*, Descriptor* dx, void* x) {
    return put(handle, 1, dx, 0, dw, w, c, chosen, workspace, bytes, dy, y, x);
}
int cudnnConvolutionBackwardFilter(Handle* handle, const void*, Descriptor* dx, const void* x, Descriptor* dy, const void* y, Descriptor* c, int chosen,
                                   void* workspace, size_t bytes, const void*, Descriptor* dw, void* w) {
    return put(handle, 2, dx, x, dw, 0, c, chosen, workspace, bytes, dy, y, w);
}
#endif
}
