// Fills the device by every way to allocate on it, and prints how often each succeeds, what fails and what is in use. The
// output is the same on a device of this size and under a limit of it.
#define _GNU_SOURCE
#include "../cuda/calls.h"
#include <dlfcn.h>

RUNTIME_CALLS(RUNTIME_POINTER)
DRIVER_CALLS(DRIVER_POINTER)
int cuDeviceTotalMem(size_t *, int) __asm__("cuDeviceTotalMem_v2");
int cuGetProcAddress(const char *, void **, int, unsigned long long, void *) __asm__("cuGetProcAddress_v2");
int cuStreamBeginCapture(void *, int) __asm__("cuStreamBeginCapture_v2");
int cuStreamEndCapture(void *, address *);
int cuStreamSynchronize(void *);
int cuStreamCreate(void **, unsigned);
int cudaStreamSynchronize(void *);
int cudaDeviceSynchronize(void);

#define MIB (1UL << 20)
#define MOST 4096
static address kept[MOST];
static int count;
static size_t chunk;
static void *stream;
static address pool;

static void state(const char *when) {
    size_t free_bytes = 1, total = 1, runtime_free = 2, runtime_total = 2;
    if (cuMemGetInfo(&free_bytes, &total) != 0 || cudaMemGetInfo(&runtime_free, &runtime_total) != 0) exit(5);
    if (free_bytes != runtime_free || total != runtime_total) puts("driver and runtime differ");
    printf("%s: %zu of %zu KiB are free\n", when, free_bytes >> 10, total >> 10);
}

// Calls `take` until it fails.
static void fill(const char *name, int (*take)(address *), int (*release)(address)) {
    int result = 0;
    while (count < MOST && (result = take(&kept[count])) == 0) count++;
    printf("%s: %d times, then %d; ", name, count, result);
    state("then");
    while (count > 0) {
        if (release(kept[--count]) != 0) exit(6);
    }
    if (cudaDeviceSynchronize() != 0) exit(7);
}

static int take_plain(address *out) { return cuMemAlloc(out, chunk); }
static int give_plain(address a) { return cuMemFree(a); }
static int take_pitched(address *out) { size_t pitch; return cuMemAllocPitch(out, &pitch, 100000, chunk / 100000, 4); }
static int take_physical(address *out) {
    physical what = {.type = 1, .location_type = 1};
    return cuMemCreate(out, chunk, &what, 0);
}
static int give_physical(address a) { return cuMemRelease(a); }
static int take_array(address *out) {
    array2d what = {8192, chunk / 8192 / 4, 0x20, 1};
    return cuArrayCreate(out, &what);
}
static int take_volume(address *out) {
    array3d what = {1024, 1024, chunk / MIB / 4, 0x20, 1, 0};
    return cuArray3DCreate(out, &what);
}
static int give_array(address a) { return cuArrayDestroy(a); }
static int take_mipmap(address *out) {
    array3d what = {8192, chunk / 8192 / 4, 0, 0x20, 1, 0};
    return cuMipmappedArrayCreate(out, &what, 1);
}
static int give_mipmap(address a) { return cuMipmappedArrayDestroy(a); }
static int take_ordered(address *out) { return cuMemAllocAsync(out, chunk, stream); }
static int take_from_pool(address *out) { return cuMemAllocFromPoolAsync(out, chunk, pool, stream); }
static int give_ordered(address a) {
    int result = cuMemFreeAsync(a, stream);
    return result ? result : cuStreamSynchronize(stream);
}
static int take_runtime(address *out) { return cudaMalloc((void **)out, chunk); }
static int give_runtime(address a) { return cudaFree((void *)a); }
static int take_runtime_ordered(address *out) { return cudaMallocAsync((void **)out, chunk, NULL); }
static int give_runtime_ordered(address a) {
    int result = cudaFreeAsync((void *)a, NULL);
    return result ? result : cudaStreamSynchronize(NULL);
}

// The figures of NVML, looked up as Python's ctypes does.
static void nvml(void) {
    struct { unsigned long long total, free, used; } memory = {0};
    struct { unsigned version; unsigned long long total, reserved, free, used; } detailed = {.version = 40 | 2 << 24};
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    if (library == NULL) exit(8);
#define FIND(name, type) __typeof__(type) *name = (__typeof__(type) *)dlsym(library, #name); if (name == NULL) exit(8)
    FIND(nvmlInit_v2, int(void));
    FIND(nvmlDeviceGetHandleByIndex_v2, int(unsigned, void **));
    FIND(nvmlDeviceGetMemoryInfo, int(void *, void *));
    FIND(nvmlDeviceGetMemoryInfo_v2, int(void *, void *));
    if (nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device)) exit(8);
    if (nvmlDeviceGetMemoryInfo(device, &memory) || nvmlDeviceGetMemoryInfo_v2(device, &detailed)) exit(8);
    printf("NVML: %llu = %llu + %llu KiB\n", memory.total >> 10, memory.free >> 10, memory.used >> 10);
    printf("NVML v2: %llu = %llu + %llu + %llu KiB\n", detailed.total >> 10, detailed.free >> 10, detailed.used >> 10,
           detailed.reserved >> 10);
}

int main(int argc, char **argv) {
    address context, graph = 0;
    size_t total = 0;
    int (*info)(size_t *, size_t *) = NULL;
    (void)argc;
    chunk = strtoul(argv[1], NULL, 10) * MIB;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 3;
    if (cuDeviceTotalMem(&total, 0) || cuStreamCreate(&stream, 1) || cuDeviceGetDefaultMemPool(&pool, 0)) return 4;
    printf("the device has %zu KiB\n", total >> 10);
    if (cuGetProcAddress("cuMemGetInfo", (void **)&info, 12000, 0, NULL)) return 4;
    size_t free_bytes = 0, again = 0;
    printf("entry point %d", info(&free_bytes, &again));
    printf(": %zu KiB\n", again >> 10);
    state("begin");
    nvml();
    fill("cuMemAlloc", take_plain, give_plain);
    fill("cuMemAllocPitch", take_pitched, give_plain);
    fill("cuMemCreate", take_physical, give_physical);
    fill("cuArrayCreate", take_array, give_array);
    fill("cuArray3DCreate", take_volume, give_array);
    fill("cuMipmappedArrayCreate", take_mipmap, give_mipmap);
    fill("cuMemAllocAsync", take_ordered, give_ordered);
    fill("cuMemAllocFromPoolAsync", take_from_pool, give_ordered);
    fill("cudaMalloc", take_runtime, give_runtime);
    fill("cudaMallocAsync", take_runtime_ordered, give_runtime_ordered);
    // The memory of a graph counts when the graph allocates it.
    address node = 0;
    if (cuStreamBeginCapture(stream, 2) || cuMemAllocAsync(&node, chunk, stream)) return 10;
    if (cuMemFreeAsync(node, stream) || cuStreamEndCapture(stream, &graph)) return 11;
    // A request that is larger than the device, and one that just fits after all of these.
    address all = 0;
    say("more than the device", cuMemAlloc(&all, total + 1));
    printf("the address is %llu\n", all);
    // Memory that a pool keeps is not freed before it must be.
    if (cuMemPoolTrimTo(pool, 0)) return 12;
    state("end");
    nvml();
    return 0;
}
