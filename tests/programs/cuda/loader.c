// `loader FLAGS LIBRARY...`: loads libraries with these dlopen flags (local, deepbind) and lets each allocate in turn.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    int flags = RTLD_NOW | RTLD_LOCAL;
    if (strcmp(argv[1], "deepbind") == 0) flags |= RTLD_DEEPBIND;
    int (*use[8])(int, size_t) = {0};
    for (int i = 2; i < argc; i++) {
        void *library = dlopen(argv[i], flags);
        if (!library) {
            puts(dlerror());
            return 8;
        }
        use[i - 2] = dlsym(library, "use");
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < argc - 2; i++) {
            if (use[i](4, (size_t)(i + 1) << 20) != 0) return 7;
        }
    }
    puts("done");
    return 0;
}
