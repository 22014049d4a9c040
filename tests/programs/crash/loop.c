// `loop THREADS ROUNDS`: allocates and frees on THREADS threads, in random order, ROUNDS times each (0: until killed).
// Prints its process id first and its results at the end.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMallocHost(void **, size_t);
int cudaFreeHost(void *);

static long rounds;
static unsigned long done;

static void *work(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed * 7919;
    void *kept[8] = {0};
    for (long i = 0; rounds == 0 || i < rounds; i++) {
        int place = (rand_r(&state) >> 8) % 8;
        if (!kept[place]) {
            size_t size = 1 + rand_r(&state) % (1 << 20);
            if ((place ? cudaMalloc(&kept[place], size) : cudaMallocHost(&kept[place], size)) != 0) exit(6);
        } else {
            if ((place ? cudaFree(kept[place]) : cudaFreeHost(kept[place])) != 0) exit(7);
            kept[place] = NULL;
        }
        __atomic_fetch_add(&done, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int count = atoi(argv[1]);
    pthread_t threads[64];
    rounds = atol(argv[2]);
    (void)argc;
    printf("%d\n", getpid());
    fflush(stdout);
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    printf("done %lu\n", done);
    return 0;
}
