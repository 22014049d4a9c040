// `both RUNTIME`: is linked with one runtime and looks up the functions of another with dlsym. Each runtime has its own
// last error, which shows whose function was called.
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaGetLastError(void);

int main(int argc, char **argv) {
    const size_t too_much = (size_t)1 << 50;
    void *memory, *other = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    int (*other_malloc)(void **, size_t) = (int (*)(void **, size_t))dlsym(other, "cudaMalloc");
    int (*other_error)(void) = (int (*)(void))dlsym(other, "cudaGetLastError");
    (void)argc;
    printf("%d\n", cudaMalloc(&memory, too_much));
    printf("own %d, other %d\n", cudaGetLastError(), other_error());
    printf("%d\n", other_malloc(&memory, too_much));
    printf("own %d, other %d\n", cudaGetLastError(), other_error());
    printf("%d %d\n", cudaMalloc(&memory, 100), cudaFree(memory));
    printf("%d\n", other_malloc(&memory, 200));
    return 0;
}
