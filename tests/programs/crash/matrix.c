// `matrix REST`: calls, a thread that ends, a child that records and calls `exec`, then REST more calls. Prints its
// process id and the addresses of its places, and starts after reading one byte. A second byte makes a thread use up
// all memory. `matrix image` is the child's new program. A test stops the program at the marks.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static int made;

#define MARK(name) __attribute__((noinline)) void name(void) { __asm__ volatile("nop\n\tnop"); }
MARK(mark_call)
MARK(mark_drain)
MARK(mark_exec)

static void some(int count) {
    for (int i = 0; i < count; i++) {
        void *memory;
        if (cudaMalloc(&memory, (size_t)(i + 1) << 12) != 0 || cudaFree(memory) != 0) _exit(70);
        made += 2;
    }
}

static void *in_thread(void *nothing) {
    some(5);
    return nothing;
}

static void *eat(void *nothing) {
    char byte;
    if (read(0, &byte, 1) == 1) {
        for (;;) {
            char *memory = malloc(1 << 20);
            if (memory) memset(memory, 1, 1 << 20);
        }
    }
    return nothing;
}

static void child(char *self) {
    pid_t pid = fork();
    if (pid == 0) {
        some(3);
        mark_exec();
        execl(self, self, "image", NULL);
        _exit(71);
    }
    int status;
    if (waitpid(pid, &status, 0) != pid) _exit(72);
    printf("child %x\n", status & 0xff7f); // without the core dump flag, which depends on the machine
}

int main(int argc, char **argv) {
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (argc < 2) return 74;
    if (strcmp(argv[1], "image") == 0) {
        some(3);
        return 5;
    }
    pthread_t thread, eater;
    char byte;
    printf("%d %lx %lx %lx %lx\n", getpid(), (uintptr_t)mark_call, (uintptr_t)mark_drain, (uintptr_t)mark_exec,
           (uintptr_t)cudaMalloc);
    fflush(stdout);
    if (read(0, &byte, 1) != 1) return 73;
    pthread_create(&eater, NULL, eat, NULL);
    some(20);
    mark_call();
    some(10);
    mark_drain();
    pthread_create(&thread, NULL, in_thread, NULL);
    pthread_join(thread, NULL);
    child(argv[0]);
    some(atoi(argv[1]));
    printf("made %d\n", made);
    return 7;
}
