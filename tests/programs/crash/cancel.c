// `cancel PART...`: threads whose cancellation is requested (pthread_cancel) around and inside calls of CUDA. Prints its
// process id, reads a line before each part, and prints one line after it: the pairs of an allocation and a free that
// were made, and the slowest pair in microseconds.
//
//   pending N    a thread with a pending request makes N pairs, which are no cancellation points for the program
//   between N    N threads are cancelled between two pairs, again and again; their cleanup handlers make a pair, too
//   handlers     a thread is cancelled while it waits; a cleanup handler and a destructor of thread-specific data free
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long word;

int cuMemAlloc_v2(word *found, size_t size);
int cuMemFree_v2(word freed);

static word made, slowest_us;

static void require(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "cancel: %s\n", what);
        _exit(70);
    }
}

static word now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (word)t.tv_sec * 1000000 + (word)t.tv_nsec / 1000;
}

static void pair(void) {
    word address = 0, began = now_us();
    require(cuMemAlloc_v2(&address, 4096) == 0, "an allocation");
    require(cuMemFree_v2(address) == 0, "a free");
    word took = now_us() - began;
    if (took > slowest_us) slowest_us = took;
    __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED);
}

static void pair_in_handler(void *unused) {
    (void)unused;
    pair();
}

static void *pending(void *count) {
    require(pthread_cancel(pthread_self()) == 0, "pthread_cancel");
    for (word i = 0; i < (word)count; i++) pair();
    pthread_cleanup_push(pair_in_handler, NULL);
    pthread_testcancel();
    pthread_cleanup_pop(0);
    require(0, "the request was lost");
    return NULL;
}

static pthread_barrier_t started;

static void *between(void *unused) {
    pthread_cleanup_push(pair_in_handler, NULL);
    pair();
    pthread_barrier_wait(&started);
    for (;;) {
        pair();
        pthread_testcancel();
    }
    pthread_cleanup_pop(0);
    return unused;
}

static pthread_key_t key;
static word held[2];

static void free_held(void *address) {
    require(cuMemFree_v2(*(word *)address) == 0, "a free");
    __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED);
}

static void *handlers(void *unused) {
    for (int i = 0; i < 2; i++) require(cuMemAlloc_v2(&held[i], 4096) == 0, "an allocation");
    pthread_setspecific(key, &held[0]);
    pthread_cleanup_push(free_held, &held[1]);
    pthread_barrier_wait(&started);
    for (;;) pause();
    pthread_cleanup_pop(0);
    return unused;
}

static void start(pthread_t *thread, void *(*body)(void *), void *argument) {
    require(pthread_create(thread, NULL, body, argument) == 0, "pthread_create");
}

static void end(pthread_t thread) {
    void *result = NULL;
    require(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED, "the thread was not cancelled");
}

int main(int argc, char **argv) {
    pthread_key_create(&key, free_held);
    printf("%d\n", getpid());
    fflush(stdout);
    for (int at = 1; at < argc; at++) {
        char byte;
        require(read(0, &byte, 1) == 1, "stdin");
        made = slowest_us = 0;
        const char *part = argv[at];
        word count = strcmp(part, "handlers") && at + 1 < argc ? strtoull(argv[++at], NULL, 10) : 1;
        pthread_t threads[64];
        require(count > 0 && (!strcmp(part, "pending") || count <= 64), "a number");
        pthread_barrier_init(&started, NULL, (unsigned)(strcmp(part, "pending") ? count + 1 : 1));
        if (!strcmp(part, "pending")) {
            start(&threads[0], pending, (void *)count);
            end(threads[0]);
        } else {
            for (word i = 0; i < count; i++) start(&threads[i], strcmp(part, "handlers") ? between : handlers, NULL);
            pthread_barrier_wait(&started);
            for (word i = 0; i < count; i++) require(pthread_cancel(threads[i]) == 0, "pthread_cancel");
            for (word i = 0; i < count; i++) end(threads[i]);
        }
        printf("%llu %llu\n", made, slowest_us);
        fflush(stdout);
    }
    return 3;
}
