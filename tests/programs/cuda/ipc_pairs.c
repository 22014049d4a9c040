// Two processes export memory of one size, and two others open it. All memory is alive before the first is opened, so its
// size does not show whose it is. Prints a line "EXPORTER IMPORTER" for each pair, with process ids.
#include "calls.h"
#include "handle_text.h"
#include <sys/wait.h>
#include <unistd.h>

RUNTIME_CALLS(RUNTIME_POINTER)
DRIVER_CALLS(DRIVER_POINTER)

enum { PAIRS = 2 };

// Exports memory: writes the handle to descriptor 3, and keeps the memory until standard input ends.
static int export_memory(void) {
    void *memory;
    ipc_handle handle;
    char byte, hex[HANDLE_DIGITS + 1];
    MUST(cudaMalloc, &memory, 5 << 20);
    MUST(cudaIpcGetMemHandle, &handle, memory);
    write_handle(&handle, hex);
    dprintf(3, "%s", hex);
    while (read(0, &byte, 1) > 0) {}
    MUST(cudaFree, memory);
    return 0;
}

static int import_memory(const char *hex) {
    ipc_handle handle = read_handle(hex);
    void *memory;
    MUST(cudaSetDevice, 0);
    MUST(cudaIpcOpenMemHandle, &memory, handle, 1);
    MUST(cudaIpcCloseMemHandle, memory);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) return strcmp(argv[1], "export") == 0 ? export_memory() : import_memory(argv[1]);
    int keep[PAIRS], result = 0, status;
    pid_t exporters[PAIRS];
    char hex[PAIRS][HANDLE_DIGITS + 1] = {{0}};
    for (int pair = 0; pair < PAIRS; pair++) {
        int in[2], out[2];
        if (pipe(in) || pipe(out)) return 1;
        exporters[pair] = fork();
        if (exporters[pair] == 0) {
            for (int other = 0; other < pair; other++) close(keep[other]);
            dup2(in[0], 0), close(in[1]), dup2(out[1], 3), dup2(2, 1);
            execl("/proc/self/exe", argv[0], "export", NULL);
            _exit(127);
        }
        close(in[0]), close(out[1]);
        keep[pair] = in[1];
        for (int at = 0; at < HANDLE_DIGITS;) {
            ssize_t got = read(out[0], hex[pair] + at, HANDLE_DIGITS - at);
            if (got <= 0) return 2;
            at += got;
        }
    }
    for (int pair = 0; pair < PAIRS; pair++) {
        pid_t importer = fork();
        if (importer == 0) {
            dup2(2, 1); // The calls' results are no lines of the output.
            execl("/proc/self/exe", argv[0], hex[pair], NULL);
            _exit(127);
        }
        waitpid(importer, &status, 0);
        result |= status;
        printf("%d %d\n", (int)exporters[pair], (int)importer);
    }
    for (int pair = 0; pair < PAIRS; pair++) {
        close(keep[pair]);
        waitpid(exporters[pair], &status, 0);
        result |= status;
    }
    return result != 0;
}
