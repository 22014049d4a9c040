// Allocates 1 GiB through the CUDA runtime, and prints the memory of the device.
#include <stddef.h>
#include <stdio.h>

int cudaMalloc(void **pointer, size_t size);
int cudaMemGetInfo(size_t *free, size_t *total);

int main(void) {
    void *block;
    size_t free = 0, total = 0;
    if (cudaMalloc(&block, 1 << 30) != 0 || cudaMemGetInfo(&free, &total) != 0) return 1;
    printf("%zu\n", total);
    return 0;
}
