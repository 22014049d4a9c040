// Another tool's preloaded library: it counts allocations, makes one size fail, answers `dlsym` for its own functions,
// and prints its counts at the end.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int allocations, questions;
static void *(*real_dlsym)(void *, const char *);

static void *next(const char *name) {
    if (!real_dlsym) real_dlsym = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!real_dlsym) real_dlsym = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return name ? real_dlsym(RTLD_NEXT, name) : NULL;
}

int cudaMalloc(void **out, size_t size) {
    static int (*real)(void **, size_t);
    if (!real) real = (int (*)(void **, size_t))next("cudaMalloc");
    allocations++;
    if (size == 4321) return 2;
    return real(out, size);
}

void *dlsym(void *handle, const char *name) {
    next(NULL);
    if (strcmp(name, "magic") == 0) return (void *)"from the other library";
    if (strcmp(name, "cudaMalloc") == 0) {
        questions++;
        return (void *)cudaMalloc;
    }
    return real_dlsym(handle, name);
}

__attribute__((destructor)) static void report(void) {
    char line[64];
    int length = snprintf(line, sizeof line, "preload: %d allocations, %d questions\n", allocations, questions);
    if (write(1, line, length) < 0) _exit(73);
}
