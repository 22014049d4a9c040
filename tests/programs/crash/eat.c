// `eat PAIRS [MICROSECONDS]`: prints its process id. After a line it makes PAIRS allocations and frees and prints
// `made PAIRS`. After another line it uses up all memory, a MiB in that time; at the end of stdin it ends.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

int main(int argc, char **argv) {
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    long pairs = argc > 1 ? atol(argv[1]) : 0, pause = argc > 2 ? atol(argv[2]) : 0;
    char byte;
    printf("%d\n", getpid());
    fflush(stdout);
    if (read(0, &byte, 1) != 1) return 70;
    for (long i = 0; i < pairs; i++) {
        void *memory;
        if (cudaMalloc(&memory, (size_t)(i % 64 + 1) << 12) != 0 || cudaFree(memory) != 0) return 71;
    }
    printf("made %ld\n", pairs);
    fflush(stdout);
    if (read(0, &byte, 1) != 1) return 3;
    for (;;) {
        char *memory = malloc(1 << 20);
        if (memory) memset(memory, 1, 1 << 20);
        if (pause) usleep(pause);
    }
}
