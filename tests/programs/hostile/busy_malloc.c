// A malloc with a non-recursive lock. A signal interrupts it under the lock, and the handler allocates GPU memory.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
void *__libc_malloc(size_t);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile sig_atomic_t armed, handled;

void *malloc(size_t size) {
    pthread_mutex_lock(&lock);
    if (armed) raise(SIGUSR1);
    void *block = __libc_malloc(size);
    pthread_mutex_unlock(&lock);
    return block;
}

// Each call comes from another address, so its stack is new to a recorder.
#define PLACE(n) __attribute__((noinline)) static void place##n(void) { \
        void *memory; \
        if (cudaMalloc(&memory, 4096 * (n + 1)) != 0 || cudaFree(memory) != 0) _exit(71); \
        __asm__ volatile("" ::: "memory"); \
    }
PLACE(0) PLACE(1) PLACE(2) PLACE(3) PLACE(4) PLACE(5) PLACE(6) PLACE(7)
static void (*const PLACES[])(void) = {place0, place1, place2, place3, place4, place5, place6, place7};

static void allocates(int signal) {
    (void)signal;
    armed = 0;
    PLACES[handled++ % 8]();
}

int main(void) {
    struct sigaction action = {.sa_handler = allocates, .sa_flags = SA_NODEFER};
    sigaction(SIGUSR1, &action, NULL);
    place7();
    for (int i = 0; i < 7; i++) {
        armed = 1;
        free(malloc(100));
    }
    printf("handled: %d\n", (int)handled);
    return 0;
}
