// A library that waits for a thread of its own while the loader holds its lock: in its constructor, and with DESTRUCTOR
// in its destructor. The thread allocates and frees twice. With LOOKUP it calls functions that the waiting thread has
// looked up, otherwise the library is linked with the runtime.
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

static int (*allocate)(void **, size_t), (*release)(void *);

#ifndef LOOKUP
int cudaMalloc(void **, size_t);
int cudaFree(void *);
#endif

static void *work(void *unused) {
    (void)unused;
    for (int i = 0; i < 2; i++) {
        void *memory;
        if (allocate(&memory, 4096) != 0 || release(memory) != 0) _exit(70);
    }
    return NULL;
}

#ifdef DESTRUCTOR
__attribute__((destructor))
#else
__attribute__((constructor))
#endif
static void wait_for_a_thread(void) {
    // A hang ends with SIGALRM.
    alarm(60);
#ifdef LOOKUP
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) _exit(71);
    *(void **)&allocate = dlsym(driver, "cudaMalloc");
    *(void **)&release = dlsym(driver, "cudaFree");
#else
    allocate = cudaMalloc;
    release = cudaFree;
#endif
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL) != 0 || pthread_join(thread, NULL) != 0) _exit(72);
    alarm(0);
}
