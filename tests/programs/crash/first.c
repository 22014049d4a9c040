// `first HOW`: prints a process id and the address of `mark_call`, and makes the first allocation of that process
// after it has read one byte. HOW says whose it is: `plain`, this process's; `child`, a child's that was forked after
// this process has allocated.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);

__attribute__((noinline)) void mark_call(void) { __asm__ volatile("nop\n\tnop"); }

static void allocate(void) {
    void *memory;
    if (cudaMalloc(&memory, 4096) != 0) _exit(70);
}

int main(int argc, char **argv) {
    int is_child = argc > 1 && strcmp(argv[1], "child") == 0;
    if (is_child) {
        allocate();
        int status;
        pid_t child = fork();
        if (child > 0) {
            close(0);
            return waitpid(child, &status, 0) == child ? 0 : 71;
        }
    }
    char byte;
    printf("%d %lx\n", getpid(), (uintptr_t)mark_call);
    fflush(stdout);
    if (read(0, &byte, 1) != 1) _exit(72);
    mark_call();
    allocate();
    mark_call();
    _exit(0);
}
