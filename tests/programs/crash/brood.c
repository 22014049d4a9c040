// `brood CHILDREN PAIRS`: prints its process id. For each line on stdin it starts CHILDREN processes at once, each of
// which makes PAIRS allocations and frees and ends, and prints the longest life of one in milliseconds.
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int child(int pairs) {
    for (int i = 0; i < pairs; i++) {
        void *memory;
        if (cudaMalloc(&memory, (size_t)(i % 64 + 1) << 12) != 0 || cudaFree(memory) != 0) return 71;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    int children = atoi(argv[1]), pairs = atoi(argv[2]);
    if (children == 0) return child(pairs);
    char byte;
    printf("%d\n", getpid());
    fflush(stdout);
    while (read(0, &byte, 1) == 1) {
        long began = now_ms(), longest = 0;
        for (int i = 0; i < children; i++) {
            pid_t pid = fork();
            if (pid == 0) {
                execl(argv[0], argv[0], "0", argv[2], NULL);
                _exit(72);
            }
            if (pid < 0) return 73;
        }
        for (int i = 0; i < children; i++) {
            int status;
            if (wait(&status) < 0 || status != 0) return 74;
            longest = now_ms() - began;
        }
        printf("%ld\n", longest);
        fflush(stdout);
    }
    return 3;
}
