// Calls every hooked function of the CUDA driver, successfully and with errors.
//
// Linked with the driver, or (BY_POINTER) `driver HOW [per-thread]`. HOW is the lookup: dlsym, entry
// (cuGetProcAddress_v2), entry-v1 (cuGetProcAddress), runtime (cudaGetDriverEntryPoint), runtime-version
// (cudaGetDriverEntryPointByVersion). per-thread selects the functions of the per-thread default stream.
#include "calls.h"
#include <unistd.h>

DRIVER_CALLS(DRIVER_POINTER)

#ifdef BY_POINTER
#include <dlfcn.h>
static void *driver, *runtime;
static int per_thread;

static void *need(void *handle, const char *name) {
    void *found = handle ? dlsym(handle, name) : NULL;
    if (!found) {
        printf("no %s: %s\n", name, dlerror());
        exit(8);
    }
    return found;
}

static void *find(const char *how, const char *name, const char *symbol) {
    void *found = NULL;
    int status = -1, result = 0;
    // Flags: 1 is the legacy default stream, 2 the per-thread one.
    uint64_t flags = per_thread ? 2 : 0;
    if (strcmp(how, "dlsym") == 0) {
        char ptsz[64];
        snprintf(ptsz, sizeof ptsz, "%s_ptsz", symbol);
        int ordered = per_thread && strstr(name, "Async");
        return need(driver, ordered ? ptsz : symbol);
    } else if (strcmp(how, "entry") == 0) {
        int (*get)(const char *, void **, int, uint64_t, int *) = need(driver, "cuGetProcAddress_v2");
        // Look the function up through itself, as NVIDIA's runtime does.
        void *again = NULL;
        get("cuGetProcAddress", &again, 12000, flags, &status);
        get = again;
        result = get(name, &found, 12080, flags, &status);
    } else if (strcmp(how, "entry-v1") == 0) {
        int (*get)(const char *, void **, int, uint64_t) = need(driver, "cuGetProcAddress");
        result = get(name, &found, 11080, flags);
    } else if (strcmp(how, "runtime") == 0) {
        int (*get)(const char *, void **, uint64_t, int *) = need(runtime, "cudaGetDriverEntryPoint");
        result = get(name, &found, flags, &status);
    } else {
        int (*get)(const char *, void **, unsigned, uint64_t, int *) = need(runtime, "cudaGetDriverEntryPointByVersion");
        result = get(name, &found, 12080, flags, &status);
    }
    if (result != 0 || !found) {
        printf("no %s: %d\n", name, result);
        exit(8);
    }
    return found;
}

static void find_calls(const char *how) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_LOCAL);
#define FIND(name, suffix, arguments) name = (int(*) arguments)find(how, #name, #name #suffix);
    DRIVER_CALLS(FIND)
}
#endif

static void plain(void) {
    address a, b, c;
    size_t pitch;
    MUST(cuMemAlloc, &a, 1 << 20);
    MUST(cuMemAllocPitch, &b, &pitch, 1000, 33, 4);
    MUST(cuMemAllocManaged, &c, 12345, 1);
    MUST(cuMemFree, c);
    MUST(cuMemFree, b);
    MUST(cuMemFree, a);
}

static void ordered(void) {
    address pool, a, b;
    MUST(cuDeviceGetDefaultMemPool, &pool, 0);
    MUST(cuMemAllocAsync, &a, 3 << 20, NULL);
    MUST(cuMemAllocFromPoolAsync, &b, 700, pool, NULL);
    MUST(cuMemFreeAsync, a, NULL);
    MUST(cuMemFree, b);
    MUST(cuMemPoolTrimTo, pool, 0);
}

static void virtual(void) {
    const size_t size = 2 << 20;
    physical where = {.type = 1, .handles = 1, .location_type = 1};
    address base, first, second, again, own;
    int shared;
    MUST(cuMemAddressReserve, &base, 4 * size, 0, 0, 0);
    MUST(cuMemCreate, &first, size, &where, 0);
    MUST(cuMemCreate, &second, 2 * size, &where, 0);
    MUST(cuMemMap, base, size, 0, first, 0);
    MUST(cuMemMap, base + size, 2 * size, 0, second, 0);
    DO(cuMemMap, base, size, 0, first, 0);
    MUST(cuMemRetainAllocationHandle, &again, (void *)(uintptr_t)base);
    MUST(cuMemExportToShareableHandle, &shared, first, 1, 0);
    MUST(cuMemImportFromShareableHandle, &own, (void *)(intptr_t)shared, 1);
    close(shared);
    MUST(cuMemMap, base + 3 * size, size, 0, own, 0);
    MUST(cuMemUnmap, base + 3 * size, size);
    MUST(cuMemRelease, own);
    MUST(cuMemRelease, again);
    MUST(cuMemRelease, second);
    MUST(cuMemUnmap, base + size, 2 * size);
    MUST(cuMemUnmap, base, size);
    MUST(cuMemRelease, first);
    MUST(cuMemAddressFree, base, 4 * size);
}

static void host(void) {
    void *a, *b, *own = aligned_alloc(4096, 1 << 16);
    MUST(cuMemAllocHost, &a, 1 << 16);
    MUST(cuMemHostAlloc, &b, 1 << 17, 1);
    MUST(cuMemHostRegister, own, 1 << 16, 0);
    MUST(cuMemHostUnregister, own);
    MUST(cuMemFreeHost, b);
    MUST(cuMemFreeHost, a);
    free(own);
}

static void arrays(void) {
    address a, b, c;
    array2d flat = {64, 32, 0x20, 2};
    array3d deep = {16, 8, 4, 0x10, 4, 0}, mips = {64, 64, 0, 0x08, 1, 0};
    MUST(cuArrayCreate, &a, &flat);
    MUST(cuArray3DCreate, &b, &deep);
    MUST(cuMipmappedArrayCreate, &c, &mips, 3);
    MUST(cuMipmappedArrayDestroy, c);
    MUST(cuArrayDestroy, b);
    MUST(cuArrayDestroy, a);
}

static void odd(void) {
    address a = 0x1234, kept = 0x77;
    size_t pitch, free_bytes, total;
    physical where = {.type = 1, .location_type = 1};
    DO(cuMemAlloc, &kept, (size_t)1 << 50);
    DO(cuMemAlloc, &kept, 0);
    DO(cuMemAllocPitch, &kept, &pitch, (size_t)1 << 40, 1 << 10, 4);
    DO(cuMemAllocManaged, &kept, (size_t)1 << 50, 1);
    DO(cuMemAllocAsync, &kept, (size_t)1 << 50, NULL);
    DO(cuMemCreate, &kept, (size_t)1 << 50, &where, 0);
    DO(cuMemHostRegister, NULL, 100, 0);
    DO(cuMemFree, a);
    DO(cuMemFree, 0);
    DO(cuMemFreeHost, (void *)a);
    DO(cuMemFreeAsync, a, NULL);
    DO(cuMemRelease, a);
    DO(cuMemUnmap, a, 4096);
    DO(cuMemAddressFree, a, 4096);
    DO(cuMemHostUnregister, (void *)a);
    DO(cuIpcCloseMemHandle, a);
    printf("kept %llx\n", kept);
    MUST(cuMemAlloc, &a, 64 << 20);
    MUST(cuMemGetInfo, &free_bytes, &total);
    printf("free %zu of %zu\n", free_bytes, total);
    MUST(cuMemFree, a);
    DO(cuMemFree, a);
}

// Loads code. The images are empty, which the simulated CUDA accepts.
static void code(void) {
    address loaded;
    MUST(cuModuleLoad, &loaded, "none.cubin");
    MUST(cuModuleLoadData, &loaded, NULL);
    MUST(cuModuleLoadDataEx, &loaded, NULL, 0, NULL, NULL);
    MUST(cuLibraryLoadData, &loaded, NULL, NULL, NULL, 0, NULL, NULL, 0);
}

int main(int argc, char **argv) {
    address context;
    (void)argc, (void)argv;
#ifdef BY_POINTER
    per_thread = argc > 2;
    find_calls(argv[1]);
#endif
    MUST(cuInit, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, 0);
    MUST(cuCtxSetCurrent, context);
    plain();
    code();
    ordered();
    virtual();
    host();
    arrays();
    odd();
    return 0;
}
