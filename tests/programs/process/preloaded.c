// `preloaded LIBRARY RUNTIME`: runs with another tool's preloaded library. Allocates by name, through a linked library,
// through a library loaded with RTLD_LOCAL, and by dlsym.
#include <dlfcn.h>
#include <stdio.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int use(int rounds, size_t size);

int main(int argc, char **argv) {
    void *memory;
    int (*plugin)(int, size_t), (*alloc)(void **, size_t);
    (void)argc;
    printf("%d\n", cudaMalloc(&memory, 100));
    printf("%d\n", cudaFree(memory));
    printf("%d\n", cudaMalloc(&memory, 4321));
    printf("linked %d %d\n", use(3, 1 << 16), use(1, 4321));
    plugin = (int (*)(int, size_t))dlsym(dlopen(argv[1], RTLD_NOW | RTLD_LOCAL), "use");
    printf("local %d %d\n", plugin(3, 1 << 16), plugin(1, 4321));
    alloc = (int (*)(void **, size_t))dlsym(dlopen(argv[2], RTLD_NOW | RTLD_LOCAL), "cudaMalloc");
    printf("dlsym %d %d\n", alloc(&memory, 100), alloc(&memory, 4321));
    printf("%s\n", (char *)dlsym(RTLD_DEFAULT, "magic"));
    fflush(stdout);
    return 0;
}
