// `lookups [linger]`: a program without CUDA that calls each of the loader's lookup functions.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv) {
    (void)argv;
    void *(*malloc_)(size_t) = malloc;
#ifdef __PIC__
    printf("%d", dlsym(RTLD_DEFAULT, "malloc") == dlsym(RTLD_NEXT, "malloc"));
#endif
    printf(" %d %d\n", dlsym(RTLD_DEFAULT, "no such thing") == NULL, malloc_(10) != NULL);
    if (argc > 1) {
        struct timespec while_ = {1, 0};
        nanosleep(&while_, NULL);
    }
    printf("fine\n");
    return 0;
}
