// cuBLASLt and cuDNN as libraries that start and know their version. cuBLASLt has no algorithm for anything; cuDNN has one for each pass of a
// convolution of f32, by its definition, which takes a workspace and ruins what was in it.
#include <stddef.h>
#include <string.h>

#include <vector>

#define START(name)                                                                                                                        \
    int name(void** handle) {                                                                                                              \
        *handle = (void*)1;                                                                                                                \
        return 0;                                                                                                                          \
    }
#define DONE(name)                                                                                                                         \
    int name(...) { return 0; }
#define NEVER(name)                                                                                                                        \
    int name(...) { return 1; }

extern "C" {
#ifdef CUBLASLT
size_t cublasLtGetVersion() { return 130000; }
START(cublasLtCreate)
DONE(cublasLtDestroy)
START(cublasLtMatmulDescCreate)
DONE(cublasLtMatmulDescSetAttribute)
DONE(cublasLtMatmulDescDestroy)
START(cublasLtMatrixLayoutCreate)
DONE(cublasLtMatrixLayoutSetAttribute)
DONE(cublasLtMatrixLayoutDestroy)
START(cublasLtMatmulPreferenceCreate)
DONE(cublasLtMatmulPreferenceSetAttribute)
DONE(cublasLtMatmulPreferenceDestroy)
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* count) {
    *count = 0;
    return 15;
}
NEVER(cublasLtMatmul)
#else
size_t cudnnGetVersion() { return 91300; }
START(cudnnCreate)
DONE(cudnnDestroy)
DONE(cudnnSetStream)

// A tensor, a filter or a convolution.
struct Descriptor {
    int kind, groups;
    int size[4], stride[4];
    int padding[2], step[2], dilation[2];
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
int cudnnSetTensor4dDescriptorEx(Descriptor* d, int kind, int n, int c, int h, int w, int sn, int sc, int sh, int sw) {
    *d = Descriptor{kind, 1, {n, c, h, w}, {sn, sc, sh, sw}};
    return 0;
}
int cudnnSetFilter4dDescriptor(Descriptor* d, int kind, int format, int n, int c, int h, int w) {
    if (format == 0) *d = Descriptor{kind, 1, {n, c, h, w}, {c * h * w, h * w, w, 1}};
    else *d = Descriptor{kind, 1, {n, c, h, w}, {c * h * w, 1, w * c, c}};
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
DONE(cudnnSetConvolutionMathType)

struct Expected {
    int algorithm, status;
    float time;
    size_t memory;
    int determinism, mathematics, reserved[3];
};
static int ask(int pass, const Descriptor* first, int most, int* count, Expected* found) {
    if (first->kind != 0 || most < 2) return 9;
    // A quicker one that gives other bits each time is none.
    found[0] = Expected{0, 0, 1, 0, 0, 0, {}};
    found[1] = Expected{algorithm[pass], 0, 2, wanted[pass], 1, 0, {}};
    *count = 2;
    return 0;
}
int cudnnGetConvolutionForwardAlgorithm_v7(void*, Descriptor* x, void*, void*, void*, int most, int* count, Expected* found) {
    return ask(0, x, most, count, found);
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(void*, Descriptor* w, void*, void*, void*, int most, int* count, Expected* found) {
    return ask(1, w, most, count, found);
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void*, Descriptor* x, void*, void*, void*, int most, int* count, Expected* found) {
    return ask(2, x, most, count, found);
}

// All products of one convolution, summed in f64 at what `pass` writes.
static int convolve(int pass, const Descriptor* dx, const float* x, const Descriptor* dw, const float* w, const Descriptor* c, int chosen,
                    void* workspace, size_t bytes, const Descriptor* dy, const float* y, float* to) {
    if (chosen != algorithm[pass] || bytes < wanted[pass]) return 9;
    memset(workspace, 0xff, bytes);
    const Descriptor* of[3] = {dy, dx, dw};
    const int *size = of[pass]->size, *stride = of[pass]->stride;
    std::vector<double> sums((size_t)size[0] * size[1] * size[2] * size[3]);
    auto at = [](const Descriptor* d, int i, int j, int k, int l) {
        return (long)i * d->stride[0] + (long)j * d->stride[1] + (long)k * d->stride[2] + (long)l * d->stride[3];
    };
    int out = dw->size[0] / c->groups, in = dw->size[1];
    for (int n = 0; n < dy->size[0]; n++)
        for (int o = 0; o < dw->size[0]; o++)
            for (int i = 0; i < dy->size[2]; i++)
                for (int j = 0; j < dy->size[3]; j++)
                    for (int k = 0; k < in; k++)
                        for (int r = 0; r < dw->size[2]; r++)
                            for (int s = 0; s < dw->size[3]; s++) {
                                int row = i * c->step[0] - c->padding[0] + r * c->dilation[0], channel = o / out * in + k;
                                int column = j * c->step[1] - c->padding[1] + s * c->dilation[1];
                                if (row < 0 || row >= dx->size[2] || column < 0 || column >= dx->size[3]) continue;
                                const int where[3][4] = {{n, o, i, j}, {n, channel, row, column}, {o, k, r, s}};
                                const int* p = where[pass];
                                double a = pass == 1 ? w[at(dw, o, k, r, s)] : x[at(dx, n, channel, row, column)];
                                double b = pass == 0 ? w[at(dw, o, k, r, s)] : y[at(dy, n, o, i, j)];
                                sums[(((size_t)p[0] * size[1] + p[1]) * size[2] + p[2]) * size[3] + p[3]] += a * b;
                            }
    size_t next = 0;
    for (int i = 0; i < size[0]; i++)
        for (int j = 0; j < size[1]; j++)
            for (int k = 0; k < size[2]; k++)
                for (int l = 0; l < size[3]; l++) to[i * (long)stride[0] + j * (long)stride[1] + k * (long)stride[2] + l * (long)stride[3]] = (float)sums[next++];
    return 0;
}
int cudnnConvolutionForward(void*, const void*, Descriptor* dx, const float* x, Descriptor* dw, const float* w, Descriptor* c, int chosen,
                            void* workspace, size_t bytes, const void*, Descriptor* dy, float* y) {
    return convolve(0, dx, x, dw, w, c, chosen, workspace, bytes, dy, 0, y);
}
int cudnnConvolutionBackwardData(void*, const void*, Descriptor* dw, const float* w, Descriptor* dy, const float* y, Descriptor* c, int chosen,
                                 void* workspace, size_t bytes, const void*, Descriptor* dx, float* x) {
    return convolve(1, dx, 0, dw, w, c, chosen, workspace, bytes, dy, y, x);
}
int cudnnConvolutionBackwardFilter(void*, const void*, Descriptor* dx, const float* x, Descriptor* dy, const float* y, Descriptor* c, int chosen,
                                   void* workspace, size_t bytes, const void*, Descriptor* dw, float* w) {
    return convolve(2, dx, x, dw, 0, c, chosen, workspace, bytes, dy, y, w);
}
#endif
}
