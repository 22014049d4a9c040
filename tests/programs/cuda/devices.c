// Two devices: allocates on one while the other is current, where a call names the device itself.
#include "calls.h"

RUNTIME_CALLS(RUNTIME_POINTER)
DRIVER_CALLS(DRIVER_POINTER)

int main(void) {
    const size_t size = 2 << 20;
    address handle, pool, memory;
    void *a, *b, *ordered;
    MUST(cudaSetDevice, 1);
    MUST(cudaMalloc, &a, 100);
    MUST(cudaSetDevice, 0);
    MUST(cudaMalloc, &b, 200);
    // The call itself names device 1.
    MUST(cuMemCreate, &handle, size, (&(physical){.type = 1, .location_type = 1, .location_id = 1}), 0);
    MUST(cuMemAddressReserve, &memory, size, 0, 0, 0);
    MUST(cuMemMap, memory, size, 0, handle, 0);
    MUST(cuDeviceGetDefaultMemPool, &pool, 1);
    MUST(cudaMallocFromPoolAsync, &ordered, 300, (void *)pool, NULL);
    MUST(cudaFree, ordered);
    MUST(cuMemUnmap, memory, size);
    MUST(cuMemRelease, handle);
    MUST(cuMemAddressFree, memory, size);
    MUST(cudaFree, a);
    MUST(cudaFree, b);
    return 0;
}
