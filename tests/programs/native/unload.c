// `unload ONE TWO`: loads, uses and unloads two libraries in turn. Allocations of ONE have odd sizes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

int main(int argc, char **argv) {
    ElfW(Addr) places[2] = {0};
    int failed = argc != 3;
    for (size_t round = 0; round < 3 && !failed; round++) {
        for (size_t i = 0; i < 2; i++) {
            void *library = dlopen(argv[i + 1], RTLD_NOW | RTLD_LOCAL);
            struct link_map *map;
            dlinfo(library, RTLD_DI_LINKMAP, &map);
            places[i] = map->l_addr;
            int (**allocate)(size_t) = (int (**)(size_t))dlsym(library, "allocate");
            // Allocate twice: the second time uses what a recorder cached the first time.
            failed |= (*allocate)((1 << 20) + round * 10 + 1 - i) | (*allocate)((1 << 20) + round * 10 + 101 - i);
            dlclose(library);
        }
        printf("%s\n", places[0] == places[1] ? "the same place" : "another place");
    }
    return failed;
}
