// What programs that come and go do on their way: allocate through the CUDA runtime, and end with status 70 where that fails.
#pragma once
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static void check(int ok, const char *what) {
    if (!ok) {
        perror(what);
        _exit(70);
    }
}

// So many allocations and frees.
static void some(int count) {
    for (int i = 0; i < count; i++) {
        void *memory;
        check(cudaMalloc(&memory, (size_t)(i + 1) << 12) == 0, "cudaMalloc");
        check(cudaFree(memory) == 0, "cudaFree");
    }
}

static void finished(pid_t child) {
    int status;
    check(child > 0 && waitpid(child, &status, 0) == child && status == 0, "child");
}
