// `processes COUNT CHUNK`: COUNT processes fill the device at once, in chunks of CHUNK MiB. Prints how many chunks fitted
// together, and what is free while all hold theirs.
#define _GNU_SOURCE
#include "../cuda/calls.h"
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

DRIVER_CALLS(DRIVER_POINTER)

static void start(void) {
    address context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) exit(3);
}

int main(int argc, char **argv) {
    int processes = atoi(argv[1]);
    size_t chunk = strtoul(argv[2], NULL, 10) << 20;
    volatile int *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    (void)argc;
    // shared: how many have their context, how many chunks they got, how many are full, whether all may end.
    for (int i = 0; i < processes; i++) {
        if (fork() == 0) {
            address a;
            int result;
            start();
            __sync_fetch_and_add(&shared[0], 1);
            while (shared[0] < processes) usleep(100);
            while ((result = cuMemAlloc(&a, chunk)) == 0) __sync_fetch_and_add(&shared[1], 1);
            if (result != 2) _exit(4);
            __sync_fetch_and_add(&shared[2], 1);
            while (!shared[3]) usleep(1000);
            _exit(0);
        }
    }
    while (shared[2] < processes) {
        int status;
        if (waitpid(-1, &status, WNOHANG) > 0) return 5;
        usleep(1000);
    }
    printf("%d chunks\n", shared[1]);
    shared[3] = 1;
    for (int i = 0; i < processes; i++) {
        int status;
        wait(&status);
        if (status != 0) return 6;
    }
    return 0;
}
