// Opens one process's memory in another, in both layers. The second process runs this program again, with the handle.
#include "calls.h"
#include <sys/wait.h>
#include <unistd.h>

RUNTIME_CALLS(RUNTIME_POINTER)
DRIVER_CALLS(DRIVER_POINTER)

static int open_both(const char *hex) {
    ipc_handle handle;
    void *first;
    address second;
    for (int i = 0; i < 64; i++) {
        unsigned byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        handle.bytes[i] = (char)byte;
    }
    MUST(cudaSetDevice, 0);
    MUST(cudaIpcOpenMemHandle, &first, handle, 1);
    MUST(cudaIpcCloseMemHandle, first);
    MUST(cuIpcOpenMemHandle, &second, handle, 1);
    MUST(cuIpcCloseMemHandle, second);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) return open_both(argv[1]);
    void *memory;
    ipc_handle handle;
    char hex[129];
    int status;
    MUST(cudaMalloc, &memory, 5 << 20);
    MUST(cudaIpcGetMemHandle, &handle, memory);
    for (int i = 0; i < 64; i++) sprintf(hex + 2 * i, "%02x", (unsigned char)handle.bytes[i]);
    fflush(stdout);
    if (fork() == 0) execl("/proc/self/exe", argv[0], hex, NULL);
    wait(&status);
    MUST(cudaFree, memory);
    return status != 0;
}
