// A CUDA driver with one device of 80 GiB, which a program and the children that it forks share. It takes no locks,
// and calls `inside_allocation` while it makes an allocation.
#include <stddef.h>
#include <sys/mman.h>

#define PUBLIC __attribute__((visibility("default")))

#define TOTAL (80ul << 30)

// The bytes in use.
static size_t *used;

PUBLIC void (*inside_allocation)(size_t bytes);

__attribute__((constructor)) static void begin(void) {
    used = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

PUBLIC int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = TOTAL;
    *free = TOTAL - __atomic_load_n(used, __ATOMIC_SEQ_CST);
    return 0;
}

// The address of an allocation has its size in the upper half.
PUBLIC int cuMemAlloc_v2(unsigned long long *out, size_t bytes) {
    static unsigned next;
    if (inside_allocation) inside_allocation(bytes);
    __atomic_fetch_add(used, bytes, __ATOMIC_SEQ_CST);
    *out = (unsigned long long)bytes << 32 | __atomic_add_fetch(&next, 1, __ATOMIC_SEQ_CST);
    return 0;
}

PUBLIC int cuMemFree_v2(unsigned long long address) {
    __atomic_fetch_sub(used, address >> 32, __ATOMIC_SEQ_CST);
    return 0;
}

PUBLIC int cuCtxGetDevice(int *device) { return *device = 0; }

PUBLIC int cuDeviceGetCount(int *count) { return (*count = 1) - 1; }
