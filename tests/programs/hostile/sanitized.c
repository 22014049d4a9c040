// A program for sanitizers: two threads allocate memory of the GPU and of the host. `sanitized bad`: with an error that
// the sanitizer it is built with finds. With OWN_OPTIONS it answers AddressSanitizer's question for options itself.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

#ifdef OWN_OPTIONS
const char *__asan_default_options(void) { return "detect_leaks=0"; }
#endif

int shared;
static volatile int result;

static int pairs(int count) {
    for (int i = 0; i < count; i++) {
        void *memory = NULL;
        char *host = malloc(100);
        if (host == NULL) return 0;
        memset(host, i, 100);
        if (cudaMalloc(&memory, 4096 * (size_t)(i + 1)) != 0 || cudaFree(memory) != 0) return 0;
        free(host);
    }
    return 1;
}

static void increment(void) {
    for (int i = 0; i < 1000; i++) {
        shared++;
        sched_yield();
    }
}

static void *thread(void *bad) {
    if (bad != NULL) increment();
    return (void *)(size_t)pairs(3);
}

// The compiler does not see what these do, so it neither warns nor optimizes.
static void *(*volatile allocate)(size_t) = malloc;
static void (*volatile release)(void *) = free;

static int use_after_free(void) {
    volatile char *freed = allocate(10);
    release((void *)freed);
    return *freed;
}

static int overflow(volatile int number) { return number + 0x7fffffff; }

static void uninitialized(void) {
    volatile int *unset = allocate(sizeof *unset);
    if (*unset > 7) printf("more\n");
    release((void *)unset);
}

static void *volatile kept;

int main(int argc, char **argv) {
    const char *bad = argc > 1 ? argv[1] : "";
    int race = strcmp(bad, "race") == 0;
    pthread_t other;
    void *done = NULL;
    if (pthread_create(&other, NULL, thread, race ? &shared : NULL) != 0) return 70;
    if (race) increment();
    if (!pairs(3) || pthread_join(other, &done) != 0 || done == NULL) return 71;
    if (strcmp(bad, "use") == 0) result = use_after_free();
    if (strcmp(bad, "overflow") == 0) result = overflow(argc);
    if (strcmp(bad, "uninitialized") == 0) uninitialized();
    if (strcmp(bad, "leak") == 0) {
        kept = allocate(1234);
        kept = NULL;
    }
    printf("fine\n");
    return 0;
}
