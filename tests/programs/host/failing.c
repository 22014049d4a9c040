// A CUDA driver and runtime in one: it has one allocation, refuses large and strange requests, and never changes errno.
#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int cudaMalloc(void **out, size_t size) {
    static char memory[16];
    if (size > 1 << 30) return 2;
    *out = memory;
    return 0;
}

PUBLIC int cudaFree(void *address) { return address == (void *)0x1234; }

PUBLIC int cuCtxGetDevice(int *device) { return *device = 0; }
