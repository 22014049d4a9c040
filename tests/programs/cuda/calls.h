// The CUDA functions that memtrace hooks. They are declared for linking or, with BY_POINTER, as pointers of the same
// names that `find_calls` fills. The code that calls them is the same.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address; // CUdeviceptr, handles
typedef struct { size_t width, height, depth; } extent;
typedef struct { void *ptr; size_t pitch, xsize, ysize; } pitched;
typedef struct { int x, y, z, w, kind; } channels;
typedef struct { size_t width, height; unsigned format, channels; } array2d;
typedef struct { size_t width, height, depth; unsigned format, channels, flags; } array3d;
typedef struct { char bytes[64]; } ipc_handle;
typedef struct { int type, handles, location_type, location_id; void *security; unsigned char flags[8]; } physical;

#define RUNTIME_CALLS(X) \
    X(cudaMalloc, (void **, size_t)) \
    X(cudaMallocPitch, (void **, size_t *, size_t, size_t)) \
    X(cudaMalloc3D, (pitched *, extent)) \
    X(cudaMallocManaged, (void **, size_t, unsigned)) \
    X(cudaMallocAsync, (void **, size_t, void *)) \
    X(cudaMallocAsync_ptsz, (void **, size_t, void *)) \
    X(cudaMallocFromPoolAsync, (void **, size_t, void *, void *)) \
    X(cudaMallocFromPoolAsync_ptsz, (void **, size_t, void *, void *)) \
    X(cudaFreeAsync, (void *, void *)) \
    X(cudaFreeAsync_ptsz, (void *, void *)) \
    X(cudaFree, (void *)) \
    X(cudaMallocHost, (void **, size_t)) \
    X(cudaHostAlloc, (void **, size_t, unsigned)) \
    X(cudaHostRegister, (void *, size_t, unsigned)) \
    X(cudaHostUnregister, (void *)) \
    X(cudaFreeHost, (void *)) \
    X(cudaMallocArray, (void **, const channels *, size_t, size_t, unsigned)) \
    X(cudaMalloc3DArray, (void **, const channels *, extent, unsigned)) \
    X(cudaFreeArray, (void *)) \
    X(cudaMallocMipmappedArray, (void **, const channels *, extent, unsigned, unsigned)) \
    X(cudaFreeMipmappedArray, (void *)) \
    X(cudaIpcOpenMemHandle, (void **, ipc_handle, unsigned)) \
    X(cudaIpcCloseMemHandle, (void *)) \
    X(cudaIpcGetMemHandle, (ipc_handle *, void *)) \
    X(cudaMemGetInfo, (size_t *, size_t *)) \
    X(cudaStreamCreate, (void **)) \
    X(cudaSetDevice, (int)) \
    X(cudaDeviceGetDefaultMemPool, (void **, int))

#define DRIVER_CALLS(X) \
    X(cuMemAlloc, _v2, (address *, size_t)) \
    X(cuMemAllocPitch, _v2, (address *, size_t *, size_t, size_t, unsigned)) \
    X(cuMemAllocManaged, , (address *, size_t, unsigned)) \
    X(cuMemAllocAsync, , (address *, size_t, void *)) \
    X(cuMemAllocFromPoolAsync, , (address *, size_t, address, void *)) \
    X(cuMemFreeAsync, , (address, void *)) \
    X(cuMemPoolTrimTo, , (address, size_t)) \
    X(cuMemFree, _v2, (address)) \
    X(cuMemCreate, , (address *, size_t, const physical *, unsigned long long)) \
    X(cuMemRelease, , (address)) \
    X(cuMemMap, , (address, size_t, size_t, address, unsigned long long)) \
    X(cuMemUnmap, , (address, size_t)) \
    X(cuMemRetainAllocationHandle, , (address *, void *)) \
    X(cuMemExportToShareableHandle, , (void *, address, int, unsigned long long)) \
    X(cuMemImportFromShareableHandle, , (address *, void *, int)) \
    X(cuMemAddressReserve, , (address *, size_t, size_t, address, unsigned long long)) \
    X(cuMemAddressFree, , (address, size_t)) \
    X(cuMemHostAlloc, , (void **, size_t, unsigned)) \
    X(cuMemAllocHost, _v2, (void **, size_t)) \
    X(cuMemHostRegister, _v2, (void *, size_t, unsigned)) \
    X(cuMemHostUnregister, , (void *)) \
    X(cuMemFreeHost, , (void *)) \
    X(cuArrayCreate, _v2, (address *, const array2d *)) \
    X(cuArray3DCreate, _v2, (address *, const array3d *)) \
    X(cuArrayDestroy, , (address)) \
    X(cuMipmappedArrayCreate, , (address *, const array3d *, unsigned)) \
    X(cuMipmappedArrayDestroy, , (address)) \
    X(cuIpcOpenMemHandle, _v2, (address *, ipc_handle, unsigned)) \
    X(cuIpcCloseMemHandle, , (address)) \
    X(cuIpcGetMemHandle, , (ipc_handle *, address)) \
    X(cuMemGetInfo, _v2, (size_t *, size_t *)) \
    X(cuInit, , (unsigned)) \
    X(cuDevicePrimaryCtxRetain, , (address *, int)) \
    X(cuCtxSetCurrent, , (address)) \
    X(cuModuleLoad, , (address *, const char *)) \
    X(cuModuleLoadData, , (address *, const void *)) \
    X(cuModuleLoadDataEx, , (address *, const void *, unsigned, void *, void *)) \
    X(cuLibraryLoadData, , (address *, const void *, void *, void *, unsigned, void *, void *, unsigned)) \
    X(cuDeviceGetDefaultMemPool, , (address *, int))

#define TEXT_(name) #name

#ifdef BY_POINTER
#define RUNTIME_POINTER(name, arguments) static int(*name) arguments;
#define DRIVER_POINTER(name, suffix, arguments) static int(*name) arguments;
#else
#define RUNTIME_POINTER(name, arguments) int name arguments;
#define DRIVER_POINTER(name, suffix, arguments) int name arguments __asm__(TEXT_(name) TEXT_(suffix));
#endif

// Prints what a call returned. The program's output must be the same with and without memtrace.
__attribute__((unused)) static int say(const char *name, int result) {
    printf("%s %d\n", name, result);
    return result;
}
#define DO(call, ...) say(#call, call(__VA_ARGS__))
#define MUST(call, ...) do { if (DO(call, __VA_ARGS__) != 0) exit(9); } while (0)
