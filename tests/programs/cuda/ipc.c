// Opens one process's memory in another, in both layers. The second process runs this program again, with the handle.
#include "calls.h"
#include "handle_text.h"
#include <sys/wait.h>
#include <unistd.h>

RUNTIME_CALLS(RUNTIME_POINTER)
DRIVER_CALLS(DRIVER_POINTER)

static int open_both(const char *hex) {
    ipc_handle handle = read_handle(hex);
    void *first;
    address second;
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
    char hex[HANDLE_DIGITS + 1];
    int status;
    MUST(cudaMalloc, &memory, 5 << 20);
    MUST(cudaIpcGetMemHandle, &handle, memory);
    write_handle(&handle, hex);
    fflush(stdout);
    if (fork() == 0) execl("/proc/self/exe", argv[0], hex, NULL);
    wait(&status);
    MUST(cudaFree, memory);
    return status != 0;
}
