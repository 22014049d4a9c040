// `load MODE ...`: many threads and many processes at full speed. Prints the work in lines `PID TID PAIRS ADDRESSES
// SIZES`: the number of allocations, each of which it freed, and the sums of their addresses and sizes.
//
//   threads T PAIRS       T threads at once, PAIRS each
//   churn T AT_ONCE       T short-lived threads, 1 to 7 pairs each, up to AT_ONCE of them at once
//   alive T PAIRS         T threads; each makes one pair before the first one continues
//   children P PAIRS      P child processes; each makes one pair before the first one continues
//   storm P               P processes, each forked by a recently forked one, each ends after a few pairs
//   paced T PAIRS MS      as threads, but each prints its longest pair (6th number, us) and rests MS after every 1000
//
// LOAD_STATUS=1: prints the process's memory at its end on stderr.
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long word;

#ifdef DRIVER
int cuMemAlloc_v2(word *found, size_t size);
int cuMemFree_v2(word freed);
static word obtain(size_t size) { word found = 0; return cuMemAlloc_v2(&found, size) == 0 ? found : 0; }
static int release(word address) { return cuMemFree_v2(address); }
#else
int cudaMalloc(void **found, size_t size);
int cudaFree(void *freed);
static word obtain(size_t size) { void *found = NULL; return cudaMalloc(&found, size) == 0 ? (word)found : 0; }
static int release(word address) { return cudaFree((void *)address); }
#endif

struct work { word pairs, addresses, sizes, longest_us; };

static void fail(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    _exit(1);
}

// Writes the line in one call, because children and threads share the output.
static void print_work(const struct work *work, int longest) {
    char line[160];
    int length = snprintf(line, sizeof line, "%d %ld %llu %llu %llu", getpid(), (long)syscall(SYS_gettid), work->pairs, work->addresses, work->sizes);
    if (longest) length += snprintf(line + length, sizeof line - length, " %llu", work->longest_us);
    line[length++] = '\n';
    if (write(1, line, length) != length) fail("write");
}

static void pairs(struct work *work, word count) {
    for (word i = 0; i < count; i++) {
        size_t size = (size_t)(1 + work->pairs % 5) << 21;
        word address = obtain(size);
        if (!address || release(address)) fail("an allocation");
        work->pairs++;
        work->addresses += address;
        work->sizes += size;
    }
}

static word count;
static long rest_ms;
static pthread_barrier_t barrier;

static void *thread_of_many(void *alive) {
    struct work work = {0};
    pthread_barrier_wait(&barrier);
    if (alive) {
        pairs(&work, 1);
        pthread_barrier_wait(&barrier);
    }
    pairs(&work, count);
    print_work(&work, 0);
    return NULL;
}

static word now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (word)t.tv_sec * 1000000 + (word)t.tv_nsec / 1000;
}

static void *paced(void *unused) {
    (void)unused;
    struct work work = {0};
    while (work.pairs < count) {
        word start = now_us();
        pairs(&work, 1);
        word took = now_us() - start;
        if (took > work.longest_us) work.longest_us = took;
        if (work.pairs % 1000 == 0) {
            struct timespec t = {rest_ms / 1000, rest_ms % 1000 * 1000000};
            nanosleep(&t, NULL);
        }
    }
    print_work(&work, 1);
    return NULL;
}

static void *short_lived(void *number) {
    struct work work = {0};
    pairs(&work, 1 + (word)number % 7);
    print_work(&work, 0);
    return NULL;
}

static void start(pthread_t *thread, void *(*body)(void *), void *argument) {
    static pthread_attr_t small;
    static int made;
    if (!made++) {
        pthread_attr_init(&small);
        pthread_attr_setstacksize(&small, 256 << 10);
    }
    if ((errno = pthread_create(thread, &small, body, argument)) != 0) fail("pthread_create");
}

static void together(word threads, void *(*body)(void *), void *argument) {
    pthread_t *all = calloc(threads, sizeof *all);
    pthread_barrier_init(&barrier, NULL, threads);
    for (word i = 0; i < threads; i++) start(&all[i], body, argument);
    for (word i = 0; i < threads; i++) pthread_join(all[i], NULL);
    free(all);
}

static void churn(word threads, word at_once) {
    pthread_t *all = calloc(at_once, sizeof *all);
    for (word i = 0; i < threads; i++) {
        if (i >= at_once) pthread_join(all[i % at_once], NULL);
        start(&all[i % at_once], short_lived, (void *)i);
    }
    for (word i = 0; i < at_once && i < threads; i++) pthread_join(all[i], NULL);
    free(all);
}

static void collect(void) {
    int status;
    while (wait(&status) > 0)
        if (status) fail("a child");
    if (errno != ECHILD) fail("wait");
}

static void children(word processes) {
    int ready[2], go[2];
    char byte = 0;
    if (pipe(ready) || pipe(go)) fail("pipe");
    for (word i = 0; i < processes; i++) {
        pid_t pid = fork();
        if (pid < 0) fail("fork");
        if (pid > 0) continue;
        struct work work = {0};
        close(go[1]);
        pairs(&work, 1);
        if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 0) fail("a pipe");
        pairs(&work, count);
        print_work(&work, 0);
        _exit(0);
    }
    for (word i = 0; i < processes; i++)
        if (read(ready[0], &byte, 1) != 1) fail("read");
    close(go[1]);
    collect();
}

static void storm(word processes) {
    // Fork a child for each half of the remaining processes, as early as possible.
    for (word left = processes; left > 0;) {
        word half = (left + 1) / 2;
        pid_t pid = fork();
        if (pid < 0) fail("fork");
        if (pid == 0) {
            struct work work = {0};
            pairs(&work, 3);
            print_work(&work, 0);
            storm(half - 1);
            _exit(0);
        }
        left -= half;
    }
    collect();
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const char *mode = argv[1];
    word many = strtoull(argv[2], NULL, 10);
    count = argc > 3 ? strtoull(argv[3], NULL, 10) : 0;
    rest_ms = argc > 4 ? atol(argv[4]) : 0;
    word begun = now_us();
    if (!strcmp(mode, "threads")) together(many, thread_of_many, NULL);
    else if (!strcmp(mode, "alive")) together(many, thread_of_many, &count);
    else if (!strcmp(mode, "paced")) together(many, paced, NULL);
    else if (!strcmp(mode, "churn")) churn(many, count);
    else if (!strcmp(mode, "children")) children(many);
    else if (!strcmp(mode, "storm")) storm(many);
    else return 2;
    if (getenv("LOAD_STATUS")) {
        char line[256];
        FILE *status = fopen("/proc/self/status", "r");
        fprintf(stderr, "us %llu\n", now_us() - begun);
        while (status && fgets(line, sizeof line, status))
            if (!strncmp(line, "VmHWM:", 6) || !strncmp(line, "RssAnon:", 8) || !strncmp(line, "RssShmem:", 9)) fputs(line, stderr);
    }
    return 0;
}
