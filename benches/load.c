// load THREADS EVENTS RATE: THREADS threads make EVENTS calls of cuMemAlloc and cuMemFree in total, RATE a second (0:
// as fast as possible), with few blocks in use. Prints the result as JSON, then waits for a line on stdin.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long address;
int cuMemAlloc_v2(address *found, size_t size);
int cuMemFree_v2(address freed);

enum { LIVE = 64, BATCH = 64 };
static long events;
static double rate;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *work(void *unused) {
    (void)unused;
    address live[LIVE] = {0};
    unsigned random = 1;
    double start = now();
    for (long done = 0; done < events; done += 2) {
        if (rate > 0 && done % BATCH == 0) {
            double wait = start + done / rate - now();
            if (wait > 0) {
                struct timespec t = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
                nanosleep(&t, NULL);
            }
        }
        random = random * 1664525 + 1013904223;
        address *slot = &live[(random >> 16) % LIVE];
        if (*slot) cuMemFree_v2(*slot);
        else done--;
        cuMemAlloc_v2(slot, (size_t)(1 + (random >> 28)) << 21);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int threads = atoi(argv[1]);
    events = atol(argv[2]) / threads;
    rate = atof(argv[3]) / threads;
    pthread_t started[64];
    double start = now();
    for (int i = 0; i < threads && i < 64; i++) pthread_create(&started[i], NULL, work, NULL);
    for (int i = 0; i < threads && i < 64; i++) pthread_join(started[i], NULL);
    printf("{\"pid\": %d, \"seconds\": %.6f, \"events\": %ld}\n", getpid(), now() - start, events * threads);
    fflush(stdout);
    return getchar() == EOF;
}
