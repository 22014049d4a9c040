// Calls CUDA while the loader is busy. Without a first argument it does nothing: a linked library does the work.
//
// `open LIBRARY...`: loads and unloads each library.
// `during LIBRARY`: two threads load and unload the library 200 times each, while a third one allocates. Each of the
//   first calls of hooked functions in the process happens meanwhile.
// `exit`: threads free their memory in a destructor of thread-specific data.
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static const char *library;
static atomic_int loaders;
static pthread_key_t memory_of_thread;

static void *load(void *unused) {
    (void)unused;
    for (int i = 0; i < 200; i++) {
        void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        if (!handle || !dlsym(handle, "compress") || dlclose(handle) != 0) _exit(70);
    }
    loaders--;
    return NULL;
}

static void *allocate(void *unused) {
    (void)unused;
    for (int i = 0; i < 1000 || loaders > 0; i++) {
        void *memory;
        if (i < 1000 && (cudaMalloc(&memory, 4096) != 0 || cudaFree(memory) != 0)) _exit(71);
    }
    return NULL;
}

static void release(void *memory) {
    if (cudaFree(memory) != 0) _exit(72);
}

static void *keep(void *unused) {
    (void)unused;
    void *memory;
    if (cudaMalloc(&memory, 4096) != 0 || pthread_setspecific(memory_of_thread, memory) != 0) _exit(73);
    return NULL;
}

int main(int argc, char **argv) {
    alarm(60);
    if (argc > 1 && !strcmp(argv[1], "open")) {
        for (int i = 2; i < argc; i++) {
            void *handle = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
            if (!handle || dlclose(handle) != 0) return 74;
            printf("unloaded: %d\n", dlopen(argv[i], RTLD_NOW | RTLD_NOLOAD) == NULL);
        }
    } else if (argc > 1 && !strcmp(argv[1], "during")) {
        pthread_t threads[3];
        library = argv[2];
        loaders = 2;
        for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, i < 2 ? load : allocate, NULL);
        for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    } else if (argc > 1 && !strcmp(argv[1], "exit")) {
        pthread_key_create(&memory_of_thread, release);
        for (int i = 0; i < 20; i++) {
            pthread_t thread;
            pthread_create(&thread, NULL, keep, NULL);
            pthread_join(thread, NULL);
        }
    }
    puts("done");
    return 0;
}
