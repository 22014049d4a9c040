// `life`: children that record and end, threads, `exec`, children again. Prints its process id first and ignores how
// its children end. `life image`: the program that some children become.
#define _GNU_SOURCE
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
extern char **environ;

static void some(int count, unsigned state) {
    void *kept[4] = {0};
    for (int i = 0; i < count; i++) {
        void **place = &kept[rand_r(&state) % 4];
        if (*place) {
            if (cudaFree(*place) != 0) _exit(70);
            *place = NULL;
        } else if (cudaMalloc(place, 1 + rand_r(&state) % (1 << 20)) != 0) {
            _exit(71);
        }
    }
}

static void *in_thread(void *seed) {
    some(150, (unsigned)(uintptr_t)seed);
    return NULL;
}

static pid_t child(int calls) {
    pid_t pid = fork();
    if (pid != 0) return pid;
    some(calls, 5);
    _exit(0);
}

static void wait_for(pid_t pid) {
    int status;
    if (waitpid(pid, &status, 0) != pid) _exit(72);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        some(5, 1);
        return 0;
    }
    printf("%d\n", getpid());
    fflush(stdout);
    some(10, 2);
    pid_t early[2] = {child(60), child(20)};
    pthread_t threads[3];
    for (uintptr_t i = 0; i < 3; i++) pthread_create(&threads[i], NULL, in_thread, (void *)(i + 3));
    char *image[] = {argv[0], "image", NULL};
    for (int i = 0; i < 2; i++) {
        pid_t pid;
        if (posix_spawn(&pid, argv[0], NULL, NULL, image, environ) != 0) return 73;
        some(5, 6);
        wait_for(pid);
    }
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    wait_for(early[0]);
    wait_for(early[1]);
    wait_for(child(10));
    printf("done\n");
    return 9;
}
