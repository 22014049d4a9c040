// The library of another tool that traces a program's CUDA calls, built like that of Nsight Systems: the driver loads it for
// CUDA_INJECTION64_PATH, it subscribes to all calls of the driver through CUPTI, and asks the driver for the memory in use after each. It
// writes the calls that have returned to the file that INJECTION_LOG names, one line each.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { DRIVER_API = 1, EXIT = 1 };

// CUpti_CallbackData of cupti_callbacks.h.
struct callback_data {
    int site;
    const char *function_name;
    const void *function_params;
    void *function_return_value;
    const char *symbol_name;
    void *context;
    uint32_t context_uid;
    uint64_t *correlation_data;
    uint32_t correlation_id;
};
typedef void (*callback)(void *, int, uint32_t, const struct callback_data *);

static int (*memory_info)(size_t *, size_t *);
static int file;

static void called(void *user_data, int domain, uint32_t id, const struct callback_data *data) {
    (void)id;
    static __thread int is_inside;
    if (user_data != &file || domain != DRIVER_API || is_inside) return;
    is_inside = 1;
    if (data->site == EXIT) {
        size_t free_bytes = 0, total = 0;
        memory_info(&free_bytes, &total);
        dprintf(file, "%s %d %zu\n", data->function_name, *(const int *)data->function_return_value, total - free_bytes);
    }
    is_inside = 0;
}

__attribute__((visibility("default"))) int InitializeInjection(void) {
    void *cupti = dlopen("libcupti.so.13", RTLD_NOW), *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cupti || !driver) return 0;
    memory_info = (int (*)(size_t *, size_t *))dlsym(driver, "cuMemGetInfo_v2");
    int (*subscribe)(void **, callback, void *) = (int (*)(void **, callback, void *))dlsym(cupti, "cuptiSubscribe");
    int (*enable)(uint32_t, void *, int) = (int (*)(uint32_t, void *, int))dlsym(cupti, "cuptiEnableDomain");
    file = open(getenv("INJECTION_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    static void *subscriber;
    if (!memory_info || !subscribe || !enable || file < 0 || subscribe(&subscriber, called, &file)) return 0;
    return enable(1, subscriber, DRIVER_API) == 0;
}
