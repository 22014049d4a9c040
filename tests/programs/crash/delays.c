// `delays COUNT...`: prints its process id. For each COUNT it reads a byte, makes COUNT calls, and prints two times in
// microseconds: that of the slowest call, and the sum of all calls above 50 ms.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

int main(int argc, char **argv) {
    printf("%d\n", getpid());
    fflush(stdout);
    for (int batch = 1; batch < argc; batch++) {
        char byte;
        void *memory = NULL;
        long slowest = 0, slow = 0;
        if (read(0, &byte, 1) != 1) return 70;
        for (int i = 0; i < atoi(argv[batch]); i++) {
            long began = now();
            if ((i % 2 ? cudaFree(memory) : cudaMalloc(&memory, 4096)) != 0) return 71;
            long took = now() - began;
            if (took > slowest) slowest = took;
            if (took > 50000) slow += took;
        }
        printf("%ld %ld\n", slowest, slow);
        fflush(stdout);
    }
    return 3;
}
