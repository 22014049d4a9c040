// A malloc that looks up its functions during its initialization, and must not be called again before that is complete.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

static void *(*next_malloc)(size_t), *(*next_calloc)(size_t, size_t), *(*next_realloc)(void *, size_t);
static void (*next_free)(void *);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void set_up(void) {
    dlsym(RTLD_DEFAULT, "puts");
    next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    next_calloc = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "calloc");
    next_realloc = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
    next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
}

__attribute__((visibility("default"))) void *malloc(size_t size) {
    pthread_once(&once, set_up);
    return next_malloc(size);
}

__attribute__((visibility("default"))) void *calloc(size_t count, size_t size) {
    pthread_once(&once, set_up);
    return next_calloc(count, size);
}

__attribute__((visibility("default"))) void *realloc(void *block, size_t size) {
    pthread_once(&once, set_up);
    return next_realloc(block, size);
}

__attribute__((visibility("default"))) void free(void *block) {
    pthread_once(&once, set_up);
    next_free(block);
}
