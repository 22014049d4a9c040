// A program with its own dlsym, as programs that trace others have, which counts its calls; and a preloaded library
// with one. Both find the C library's dlsym by its version.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static int asked;

void *dlsym(void *handle, const char *name) {
    static void *(*next)(void *, const char *);
    if (!next) next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (strncmp(name, "cu", 2) == 0) asked++;
    return next(handle, name);
}

#ifndef PRELOADED
int cudaMalloc(void **, size_t);
int cudaFree(void *);

int main(void) {
    void *runtime = dlopen("libcudart.so.12", RTLD_NOW);
    int (*allocate)(void **, size_t) = (int (*)(void **, size_t))dlsym(runtime, "cudaMalloc");
    int (*release)(void *) = (int (*)(void *))dlsym(runtime, "cudaFree");
    void *memory, *other;
    int result = allocate(&memory, 1000) + cudaMalloc(&other, 2000) + release(memory) + cudaFree(other);
    printf("%d, asked for %d\n", result, asked);
    return result;
}
#endif
