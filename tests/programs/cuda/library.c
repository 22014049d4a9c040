// A library that allocates. It links a runtime or, with EMBEDDED, contains its own copy of one, as programs linked with
// libcudart_static do. `use` makes ROUNDS allocations and frees them.
#include "calls.h"

#ifdef EMBEDDED
// As in NVIDIA's static runtime: dlopen of libcuda.so.1, dlsym of cuGetProcAddress, which finds all other functions.
#include <dlfcn.h>
static int (*alloc)(address *, size_t), (*release)(address);
static int (*set_current)(address);
static address context;

static void connect_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*get)(const char *, void **, int, uint64_t, int *) = dlsym(driver, "cuGetProcAddress_v2");
    int (*init)(unsigned), (*retain)(address *, int), status;
    get("cuInit", (void **)&init, 12000, 0, &status);
    get("cuDevicePrimaryCtxRetain", (void **)&retain, 12000, 0, &status);
    get("cuCtxSetCurrent", (void **)&set_current, 12000, 0, &status);
    get("cuMemAlloc", (void **)&alloc, 12000, 0, &status);
    get("cuMemFree", (void **)&release, 12000, 0, &status);
    if (init(0) != 0 || retain(&context, 0) != 0) exit(7);
}

static int cudaMalloc(void **out, size_t size) {
    if (!alloc) connect_driver();
    set_current(context);
    return alloc((address *)out, size);
}

static int cudaFree(void *pointer) { return release((address)pointer); }
#else
int cudaMalloc(void **, size_t);
int cudaFree(void *);
#endif

__attribute__((visibility("default"))) int used;

__attribute__((visibility("default"))) int use(int rounds, size_t size) {
    for (int i = 0; i < rounds; i++) {
        void *memory;
        if (cudaMalloc(&memory, size + i) != 0 || cudaFree(memory) != 0) return 1;
        used++;
    }
    return 0;
}
