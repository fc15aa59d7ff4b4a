// cuBLASLt and cuDNN as libraries that start, know their version, and have no algorithm for anything.
#include <stddef.h>

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
START(cudnnCreateTensorDescriptor)
START(cudnnCreateFilterDescriptor)
START(cudnnCreateConvolutionDescriptor)
DONE(cudnnDestroyTensorDescriptor)
DONE(cudnnDestroyFilterDescriptor)
DONE(cudnnDestroyConvolutionDescriptor)
DONE(cudnnSetTensor4dDescriptorEx)
DONE(cudnnSetFilter4dDescriptor)
DONE(cudnnSetConvolution2dDescriptor)
DONE(cudnnSetConvolutionGroupCount)
DONE(cudnnSetConvolutionMathType)
NEVER(cudnnGetConvolutionForwardAlgorithm_v7)
NEVER(cudnnGetConvolutionBackwardDataAlgorithm_v7)
NEVER(cudnnGetConvolutionBackwardFilterAlgorithm_v7)
NEVER(cudnnConvolutionForward)
NEVER(cudnnConvolutionBackwardData)
NEVER(cudnnConvolutionBackwardFilter)
#endif
}
