// A user's own allocator for torch.cuda.memory.CUDAPluggableAllocator. It calls CUDA directly and allocates
// OWN_ALLOC_EXTRA bytes more than requested.
#include <stddef.h>
#include <stdlib.h>

typedef struct CUstream_st *stream;
int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);

__attribute__((visibility("default"))) void *own_alloc(ptrdiff_t size, int device, stream on) {
    (void)device, (void)on;
    const char *extra = getenv("OWN_ALLOC_EXTRA");
    void *pointer = NULL;
    return cudaMalloc(&pointer, (size_t)size + (extra ? strtoul(extra, NULL, 10) : 0)) == 0 ? pointer : NULL;
}

__attribute__((visibility("default"))) void own_free(void *pointer, ptrdiff_t size, int device, stream on) {
    (void)size, (void)device, (void)on;
    cudaFree(pointer);
}
