// Calls the functions that the preloaded library exports for programs.
//
// `functions THREADS ROUNDS`: in each round, THREADS threads allocate and free 500 times. Then the program asks for the
// events to be written, prints the trace file's path, and waits for a line.
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static uint64_t (*annotation_start)(const char *);
static void (*annotation_end)(uint64_t);
static int (*flush)(unsigned), (*is_recording)(void);
static size_t (*run_folder)(char *, size_t), (*trace_file)(char *, size_t);
static void (*pause_recording)(void), (*resume_recording)(void);

static void *find(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) {
        printf("no %s\n", name);
        exit(3);
    }
    return found;
}

static void *work(void *unused) {
    (void)unused;
    for (int i = 0; i < 500; i++) {
        void *memory;
        assert(cudaMalloc(&memory, 512) == 0 && cudaFree(memory) == 0);
    }
    return NULL;
}

int main(int argc, char **argv) {
    annotation_start = find("memtrace_annotation_start"), annotation_end = find("memtrace_annotation_end");
    flush = find("memtrace_flush"), is_recording = find("memtrace_is_recording");
    run_folder = find("memtrace_run_folder"), trace_file = find("memtrace_trace_file");
    pause_recording = find("memtrace_pause"), resume_recording = find("memtrace_resume");
    assert(argc == 3);
    char path[4096] = "?", folder[4096];

    errno = 77;
    assert(is_recording() == 1);
    // Nothing has been recorded.
    assert(flush(60000) == 1 && trace_file(path, sizeof path) == 0 && path[0] == 0);
    size_t length = run_folder(folder, sizeof folder);
    assert(length > 0 && length == strlen(folder));
    assert(run_folder(path, length) == length && path[0] == 0);
    pause_recording();
    assert(is_recording() == 0 && annotation_start("paused") == 0);
    resume_recording();

    // The first event is a range.
    uint64_t first = annotation_start("first");
    assert(first != 0 && flush(60000) == 0 && errno == 77);
    void *memory;
    assert(cudaMalloc(&memory, 4096) == 0);
    uint64_t second = annotation_start("second");
    assert(second != 0 && second != first);
    annotation_end(first);
    assert(cudaFree(memory) == 0);
    annotation_end(second);
    annotation_end(0);
    assert(annotation_start(NULL) == 0);
    char *long_name = malloc(100001);
    memset(long_name, 'x', 100000);
    long_name[100000] = 0;
    annotation_end(annotation_start(long_name));
    annotation_end(annotation_start("\xff"));

    for (int round = 0; round < atoi(argv[2]); round++) {
        pthread_t threads[64];
        int count = atoi(argv[1]);
        for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, NULL);
        for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
        assert(flush(60000) == 0);
        assert(trace_file(path, sizeof path) == strlen(path) && strncmp(path, folder, length) == 0);
        puts(path);
        fflush(stdout);
        if (getchar() == EOF) return 4;
    }
    return 0;
}
