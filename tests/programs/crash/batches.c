// `batches KIND N...`: prints its process id. For each KIND and N it reads a line, makes N allocations and frees, and
// prints `done`. KIND is `own`, for this process, or `child`, for a new program that ends afterwards.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static int pairs(const char *count) {
    for (long i = 0; i < atol(count); i++) {
        void *memory;
        if (cudaMalloc(&memory, (size_t)(i % 64 + 1) << 12) != 0 || cudaFree(memory) != 0) return 71;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "now")) return pairs(argv[2]);
    printf("%d\n", getpid());
    fflush(stdout);
    for (int at = 1; at + 1 < argc; at += 2) {
        char byte;
        int status = 0;
        if (read(0, &byte, 1) != 1) return 70;
        if (!strcmp(argv[at], "own")) {
            status = pairs(argv[at + 1]);
        } else {
            pid_t pid = fork();
            if (pid == 0) {
                execl(argv[0], argv[0], "now", argv[at + 1], NULL);
                _exit(72);
            }
            if (pid < 0 || waitpid(pid, &status, 0) != pid) return 73;
        }
        if (status != 0) return 74;
        printf("done\n");
        fflush(stdout);
    }
    return 3;
}
