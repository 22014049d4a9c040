// A library that calls CUDA directly, through the driver or through the runtime.
#include "oracle.h"

#include <stdio.h>
#include <stdlib.h>

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t);
int cudaMalloc(void **, size_t);
int cudaFree(void *);

static void must(int result) {
    if (result != 0) {
        fprintf(stderr, "calls: CUDA says %d\n", result);
        abort();
    }
}

void driver_pairs(int count) {
    static void *context;
    if (!context) {
        must(cuInit(0));
        must(cuDevicePrimaryCtxRetain(&context, 0));
        must(cuCtxSetCurrent(context));
    }
    for (int i = 0; i < count; i++) {
        uint64_t address = 0;
        must(cuMemAlloc_v2(&address, 4096));
        oracle_event("driver", "alloc", address, 4096, -1);
        must(cuMemFree_v2(address));
        oracle_event("driver", "free_completed", address, 0, -1);
    }
}

void runtime_pairs(int count) {
    for (int i = 0; i < count; i++) {
        void *address = NULL;
        must(cudaMalloc(&address, 4096));
        // cudaMalloc makes the driver's call, so the driver's event comes first.
        oracle_event("driver", "alloc", (uint64_t)address, 4096, -1);
        oracle_event("runtime", "alloc", (uint64_t)address, 4096, -1);
        must(cudaFree(address));
        oracle_event("runtime", "free_completed", (uint64_t)address, 0, -1);
        oracle_event("driver", "free_completed", (uint64_t)address, 0, -1);
    }
}
