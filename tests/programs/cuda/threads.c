// `threads COUNT ROUNDS`: COUNT threads allocate and free at once, each in its own random order, in both layers.
#define _GNU_SOURCE
#include "calls.h"
#include <pthread.h>

RUNTIME_CALLS(RUNTIME_POINTER)

static int rounds;

static void *work(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed;
    void *kept[16] = {0};
    for (int i = 0; i < rounds; i++) {
        int place = rand_r(&state) % 16;
        if (kept[place]) {
            if (cudaFree(kept[place]) != 0) exit(7);
            kept[place] = NULL;
        } else if (cudaMalloc(&kept[place], 1 + rand_r(&state) % (4 << 20)) != 0) {
            exit(6);
        }
    }
    for (int place = 0; place < 16; place++) cudaFree(kept[place]);
    return NULL;
}

int main(int argc, char **argv) {
    int count = atoi(argv[1]);
    pthread_t threads[256];
    rounds = atoi(argv[2]);
    (void)argc;
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    puts("done");
    return 0;
}
