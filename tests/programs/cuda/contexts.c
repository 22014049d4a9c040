// Creates contexts in every way. Prints the memory in use after each step.
//
// `contexts entry|dlsym` looks the functions up through cuGetProcAddress or dlsym.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

static void *driver;
static int by_entry;

// The function of this symbol. `version` is the CUDA release whose cuGetProcAddress returns it for the name.
static void *need(const char *name, const char *symbol, int version) {
    void *found = NULL;
    if (by_entry) {
        int (*get)(const char *, void **, int, uint64_t, int *) = dlsym(driver, "cuGetProcAddress_v2"), status;
        get(name, &found, version, 0, &status);
    } else {
        found = dlsym(driver, symbol);
    }
    if (!found) {
        printf("no %s\n", symbol);
        exit(8);
    }
    return found;
}

static void show(const char *what, int result) {
    size_t free_bytes = 0, total = 0;
    int (*info)(size_t *, size_t *) = need("cuMemGetInfo", "cuMemGetInfo_v2", 12000);
    int answer = info(&free_bytes, &total);
    printf("%s %d: %zu MiB in use (%d)\n", what, result, (total - free_bytes) >> 20, answer);
    if (result != 0) exit(9);
}

int main(int argc, char **argv) {
    (void)argc;
    address context, memory;
    by_entry = strcmp(argv[1], "entry") == 0;
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned) = need("cuInit", "cuInit", 12000);
    int (*oldest)(address *, unsigned, int) = dlsym(driver, "cuCtxCreate");
    int (*second)(address *, unsigned, int) = need("cuCtxCreate", "cuCtxCreate_v2", 11000);
    int (*third)(address *, void *, int, unsigned, int) = need("cuCtxCreate", "cuCtxCreate_v3", 12000);
    int (*fourth)(address *, void *, unsigned, int) = need("cuCtxCreate", "cuCtxCreate_v4", 13000);
    int (*retain)(address *, int) = need("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 12000);
    int (*pop)(address *) = need("cuCtxPopCurrent", "cuCtxPopCurrent_v2", 12000);
    int (*current)(address *) = need("cuCtxGetCurrent", "cuCtxGetCurrent", 12000);
    int (*alloc)(address *, size_t) = need("cuMemAlloc", "cuMemAlloc_v2", 12000);
    init(0);
    show("cuCtxCreate_v4 of no device", fourth(&context, NULL, 0, 7) == 0);
    show("cuCtxCreate_v4", fourth(&context, NULL, 0, 0));
    show("cuCtxCreate_v2", second(&context, 0, 0));
    show("cuMemAlloc", alloc(&memory, 64 << 20));
    show("cuCtxCreate_v3", third(&context, NULL, 0, 0, 0));
    show("cuDevicePrimaryCtxRetain", retain(&context, 0));
    show("cuDevicePrimaryCtxRetain again", retain(&context, 0));
    show("cuCtxCreate on device 1", oldest(&context, 0, 1));
    pop(&context);
    int result = current(&memory);
    printf("current %d: the last one of device 0: %d\n", result, memory != context && memory != 0);
    return 0;
}
