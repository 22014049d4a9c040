// A library with functions named OUTER and INNER and frames of ROOM bytes. `allocate` points to OUTER.
#include <stddef.h>

int cudaMalloc(void **, size_t);

__attribute__((noinline, noclone)) int INNER(size_t size) {
    volatile char room[ROOM];
    void *memory;
    room[0] = 1;
    return cudaMalloc(&memory, size) + room[0] - 1;
}

__attribute__((noinline, noclone)) int OUTER(size_t size) {
    volatile char room[ROOM + 8];
    room[1] = 1;
    return INNER(size) + room[1] - 1;
}

__attribute__((visibility("default"))) int (*allocate)(size_t) = OUTER;
