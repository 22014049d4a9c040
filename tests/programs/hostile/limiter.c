// A preloaded library that limits GPU memory, built like HAMi-core: it replaces dlsym, cuGetProcAddress, the driver's
// allocations and its answer about free memory. It finds the C library's dlsym by its version, its own functions with that
// dlsym in its own handle, and the driver's in the driver's handle.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_OF_MEMORY = 2, TABLE = 16 };
static const size_t LIMIT = 256u << 20;

typedef void *(*lookup)(void *, const char *);
static lookup next_dlsym;
static void *self;
static size_t used;
// The sizes of live allocations, by address or handle.
static struct { uint64_t key; size_t size; } sizes[4096];

static const char *const NAMES[] = {"cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemRelease", "cuMemGetInfo_v2",
                                    "cuGetProcAddress", "cuGetProcAddress_v2"};
static void *real[TABLE];

static void load(void) {
    if (next_dlsym) return;
    next_dlsym = (lookup)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NODELETE);
    for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) real[i] = next_dlsym(driver, NAMES[i]);
    self = dlopen(getenv("LIMITER"), RTLD_LAZY);
}

static int charge(uint64_t key, size_t size) {
    for (unsigned i = 0; i < 4096; i++)
        if (!sizes[i].key) {
            sizes[i].key = key;
            sizes[i].size = size;
            used += size;
            break;
        }
    return 0;
}

static void discharge(uint64_t key) {
    for (unsigned i = 0; i < 4096; i++)
        if (sizes[i].key == key) {
            used -= sizes[i].size;
            sizes[i].key = 0;
            return;
        }
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    load();
    if (used + size > LIMIT) return OUT_OF_MEMORY;
    int result = ((int (*)(uint64_t *, size_t))real[0])(address, size);
    return result ? result : charge(*address, size);
}

int cuMemFree_v2(uint64_t address) {
    load();
    discharge(address);
    return ((int (*)(uint64_t))real[1])(address);
}

int cuMemCreate(uint64_t *handle, size_t size, const void *properties, unsigned long long flags) {
    load();
    if (used + size > LIMIT) return OUT_OF_MEMORY;
    int result = ((int (*)(uint64_t *, size_t, const void *, unsigned long long))real[2])(handle, size, properties, flags);
    return result ? result : charge(*handle, size);
}

int cuMemRelease(uint64_t handle) {
    load();
    discharge(handle);
    return ((int (*)(uint64_t))real[3])(handle);
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    load();
    int result = ((int (*)(size_t *, size_t *))real[4])(free_bytes, total);
    *total = LIMIT;
    *free_bytes = LIMIT - used;
    return result;
}

// The address of a function of this file, as its own references resolve.
static void *replacement(const char *name) {
    if (!strcmp(name, "cuMemAlloc")) return (void *)cuMemAlloc_v2;
    if (!strcmp(name, "cuMemFree")) return (void *)cuMemFree_v2;
    if (!strcmp(name, "cuMemCreate")) return (void *)cuMemCreate;
    if (!strcmp(name, "cuMemRelease")) return (void *)cuMemRelease;
    if (!strcmp(name, "cuMemGetInfo")) return (void *)cuMemGetInfo_v2;
    return NULL;
}

int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags) {
    load();
    int result = ((int (*)(const char *, void **, int, unsigned long long))real[5])(name, out, version, flags);
    void *mine = replacement(name);
    if (!result && mine) *out = mine;
    return result;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags, int *status) {
    load();
    int result = ((int (*)(const char *, void **, int, unsigned long long, int *))real[6])(name, out, version, flags, status);
    void *mine = replacement(name);
    if (!result && mine) *out = mine;
    if (!result && !strcmp(name, "cuGetProcAddress")) *out = (void *)cuGetProcAddress_v2;
    return result;
}

void *dlsym(void *handle, const char *name) {
    load();
    if (!strncmp(name, "cu", 2) && handle != RTLD_NEXT) {
        void *mine = next_dlsym(self, name);
        if (mine) return mine;
    }
    return next_dlsym(handle, name);
}
