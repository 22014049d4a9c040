// A C program that CUDA refuses memory: 1 GiB of 512 MiB (SIMCUDA_MEMORY=512M). It ends with exit status 3.
#include <stddef.h>

int cudaMalloc(void **pointer, size_t bytes);

static int make_table(size_t bytes) {
    void *table = NULL;
    return cudaMalloc(&table, bytes);
}

int main(void) {
    if (make_table(64 << 20) != 0)
        return 1;
    return make_table(1 << 30) == 2 ? 3 : 2;
}
