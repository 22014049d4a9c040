// No PyTorch: plain and stream-ordered memory, freed in a different order than allocated, some of it never.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);
int cudaMallocAsync(void **pointer, size_t size, void *stream);
int cudaFreeAsync(void *pointer, void *stream);
int cudaStreamCreate(void **stream);
int cudaStreamSynchronize(void *stream);

static void must(int result) {
    if (result) {
        printf("CUDA error %d\n", result);
        exit(9);
    }
}

enum { COUNT = 20 };

int main(void) {
    void *plain[COUNT], *ordered[COUNT], *streams[2];
    must(cudaStreamCreate(&streams[0]));
    must(cudaStreamCreate(&streams[1]));
    for (size_t i = 0; i < COUNT; i++) {
        must(cudaMalloc(&plain[i], (i + 1) * 100000));
        must(cudaMallocAsync(&ordered[i], (i * i + 1) * 5000, streams[i % 2]));
    }
    for (size_t i = 0; i < COUNT; i += 2) {
        must(cudaFree(plain[(i * 3) % COUNT]));
        // Free on the other stream than the allocation's; some blocks are freed synchronously.
        must(i % 4 ? cudaFreeAsync(ordered[i], streams[1]) : cudaFree(ordered[i]));
    }
    must(cudaStreamSynchronize(streams[1]));
    must(cudaMallocAsync(&ordered[0], 1 << 20, NULL));
    return 0;
}
