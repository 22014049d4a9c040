// Calls every hooked function of the CUDA runtime: successes, errors, and calls that concern no memory.
//
// Linked with a runtime, or (BY_POINTER) `runtime LIBRARY`, which finds everything with dlopen and dlsym.
#include "calls.h"

RUNTIME_CALLS(RUNTIME_POINTER)

#ifdef BY_POINTER
#include <dlfcn.h>
static void find_calls(const char *library) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        puts(dlerror());
        exit(8);
    }
#define FIND(name, arguments) name = (int(*) arguments)dlsym(handle, #name);
    RUNTIME_CALLS(FIND)
}
#endif

static const channels floats = {32, 32, 0, 0, 2};

static void plain(void) {
    void *a, *b, *c;
    size_t pitch;
    pitched cube;
    MUST(cudaMalloc, &a, 1 << 20);
    MUST(cudaMallocPitch, &b, &pitch, 1000, 33);
    MUST(cudaMalloc3D, &cube, ((extent){500, 20, 3}));
    MUST(cudaMallocManaged, &c, 12345, 1);
    MUST(cudaFree, c);
    MUST(cudaFree, cube.ptr);
    MUST(cudaFree, b);
    MUST(cudaFree, a);
    MUST(cudaMalloc, &a, 1);
    MUST(cudaFree, a);
}

static void ordered(void) {
    void *stream, *pool, *a, *b, *c, *d;
    MUST(cudaStreamCreate, &stream);
    MUST(cudaDeviceGetDefaultMemPool, &pool, 0);
    MUST(cudaMallocAsync, &a, 3 << 20, stream);
    MUST(cudaMallocAsync_ptsz, &b, 5 << 20, stream);
    MUST(cudaMallocFromPoolAsync, &c, 700, pool, stream);
    MUST(cudaMallocFromPoolAsync_ptsz, &d, 800, pool, stream);
    MUST(cudaFreeAsync, c, stream);
    MUST(cudaFreeAsync_ptsz, d, stream);
    MUST(cudaFree, b);
    MUST(cudaFreeAsync, a, stream);
    // The legacy and the per-thread null stream.
    MUST(cudaMallocAsync, &a, 4096, NULL);
    MUST(cudaFreeAsync, a, NULL);
    MUST(cudaMallocAsync_ptsz, &a, 4096, NULL);
    MUST(cudaFreeAsync_ptsz, a, NULL);
}

static void host(void) {
    void *a, *b, *own = aligned_alloc(4096, 1 << 16);
    MUST(cudaMallocHost, &a, 1 << 16);
    MUST(cudaHostAlloc, &b, 1 << 17, 1);
    MUST(cudaHostRegister, own, 1 << 16, 0);
    MUST(cudaHostUnregister, own);
    MUST(cudaFreeHost, b);
    MUST(cudaFreeHost, a);
    free(own);
}

static void arrays(void) {
    void *a, *b, *c;
    MUST(cudaMallocArray, &a, &floats, 64, 32, 0);
    MUST(cudaMalloc3DArray, &b, &floats, ((extent){16, 8, 4}), 0);
    MUST(cudaMallocMipmappedArray, &c, &floats, ((extent){64, 64, 0}), 4, 0);
    MUST(cudaFreeMipmappedArray, c);
    MUST(cudaFreeArray, b);
    MUST(cudaFreeArray, a);
}

// Calls that fail, and requests that concern no memory.
static void odd(void) {
    void *a = (void *)0x1234, *kept = (void *)0x77;
    size_t pitch, free_bytes, total;
    pitched cube;
    DO(cudaMalloc, &kept, (size_t)1 << 50);
    DO(cudaMallocPitch, &kept, &pitch, (size_t)1 << 40, 1 << 10);
    DO(cudaMalloc3D, &cube, ((extent){1 << 20, 1 << 20, 1 << 10}));
    DO(cudaMallocManaged, &kept, (size_t)1 << 50, 1);
    DO(cudaMallocAsync, &kept, (size_t)1 << 50, NULL);
    DO(cudaHostRegister, NULL, 100, 0);
    DO(cudaMallocArray, &kept, &floats, (size_t)1 << 40, 1 << 10, 0);
    DO(cudaFree, a);
    DO(cudaFreeHost, a);
    DO(cudaFreeAsync, a, NULL);
    DO(cudaFreeArray, a);
    DO(cudaFreeMipmappedArray, a);
    DO(cudaHostUnregister, a);
    DO(cudaIpcCloseMemHandle, a);
    DO(cudaFree, NULL);
    DO(cudaFreeHost, NULL);
    DO(cudaFreeArray, NULL);
    DO(cudaMalloc, &a, 0);
    printf("nothing: %p %p\n", a, kept);
    DO(cudaFree, a);
    // The second free fails.
    MUST(cudaMalloc, &a, 4096);
    MUST(cudaFree, a);
    DO(cudaFree, a);
    MUST(cudaMalloc, &a, 64 << 20);
    MUST(cudaMemGetInfo, &free_bytes, &total);
    printf("free %zu of %zu\n", free_bytes, total);
    MUST(cudaFree, a);
}

int main(int argc, char **argv) {
    (void)argc, (void)argv;
#ifdef BY_POINTER
    find_calls(argv[1]);
#endif
    plain();
    ordered();
    host();
    arrays();
    odd();
    return 0;
}
