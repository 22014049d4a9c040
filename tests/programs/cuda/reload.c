// `reload LIBRARY...`: loads, uses and unloads libraries in turn. Each load has fresh variables, and each unload runs
// the library's destructors.
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    for (int round = 0; round < 3; round++) {
        for (int i = 1; i < argc; i++) {
            void *library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
            int (*use)(int, size_t) = (int (*)(int, size_t))dlsym(library, "use");
            int *used = (int *)dlsym(library, "used");
            int result = use(3, (size_t)i << 16);
            printf("%d: %d, %d times\n", i, result, *used);
            fflush(stdout);
            dlclose(library);
            printf("unloaded: %d\n", dlopen(argv[i], RTLD_NOW | RTLD_NOLOAD) == NULL);
            fflush(stdout);
        }
    }
    return 0;
}
