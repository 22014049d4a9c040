// `paused THREADS PAIRS`: THREADS threads make PAIRS allocations and frees each, while the recording is paused. Then a
// child, which is forked during the pause and never resumes it, makes PAIRS. Twice.
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static int pairs;
static pthread_barrier_t begin;

static void allocate(void) {
    for (int i = 0; i < pairs; i++) {
        void *memory;
        assert(cudaMalloc(&memory, 512) == 0 && cudaFree(memory) == 0);
    }
}

static void *in_thread(void *nothing) {
    pthread_barrier_wait(&begin);
    allocate();
    return nothing;
}

int main(int argc, char **argv) {
    void (*pause_recording)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "memtrace_pause");
    void (*resume_recording)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "memtrace_resume");
    assert(argc == 3 && pause_recording && resume_recording);
    int threads = atoi(argv[1]);
    pairs = atoi(argv[2]);
    pthread_barrier_init(&begin, NULL, threads);
    for (int round = 0; round < 2; round++) {
        pthread_t started[64];
        pause_recording();
        for (int i = 0; i < threads; i++) pthread_create(&started[i], NULL, in_thread, NULL);
        for (int i = 0; i < threads; i++) pthread_join(started[i], NULL);
        pid_t child = fork();
        if (child == 0) {
            allocate();
            _exit(0);
        }
        int status;
        assert(waitpid(child, &status, 0) == child && status == 0);
        resume_recording();
        void *memory;
        assert(cudaMalloc(&memory, 512) == 0 && cudaFree(memory) == 0);
    }
    return 0;
}
