// Allocation through the CUDA runtime for programs that start processes. A failure ends the process with status 70.
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

// Makes `count` allocations and frees.
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
