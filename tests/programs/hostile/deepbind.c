// Loads a library with RTLD_DEEPBIND, uses it and unloads it, repeatedly: it is loaded at the same address again.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    (void)argc;
    for (int round = 0; round < 4; round++) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
        int (*use)(int, size_t) = (int (*)(int, size_t))dlsym(library, "use");
        printf("%d\n", use(3, 1 << 16));
        dlclose(library);
        printf("unloaded: %d\n", dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD) == NULL);
    }
    return 0;
}
