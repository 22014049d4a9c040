// `process WHAT [ARGUMENT...]`: processes and threads that start and end in many ways, and allocate meanwhile.
//
// Linked with a runtime. Only the first process writes to stdout.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "allocating.h"

extern char **environ;

static const char *self;

static pid_t raw_fork(void) { return (pid_t)syscall(SYS_fork); }
static pid_t raw_clone(void) { return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }

// The child allocates five times; the parent continues.
static void forked(pid_t (*make)(void), int before) {
    some(before);
    pid_t child = make();
    if (child == 0) {
        some(5);
        _exit(0);
    }
    finished(child);
    some(2);
}

static void generations(int left) {
    some(left);
    if (left == 1) return;
    pid_t child = fork();
    if (child == 0) {
        generations(left - 1);
        exit(0);
    }
    finished(child);
}

static void vforked(void) {
    some(3);
    pid_t child = vfork();
    if (child == 0) {
        execl(self, self, "some", "5", NULL);
        _exit(71);
    }
    finished(child);
    some(2);
}

static void spawned(void) {
    char *arguments[] = {(char *)self, "some", "5", NULL};
    pid_t child;
    some(3);
    check(posix_spawn(&child, self, NULL, NULL, arguments, environ) == 0, "posix_spawn");
    finished(child);
    some(2);
}

static void by_shell(void) {
    char line[4096];
    snprintf(line, sizeof line, "'%s' some 5", self);
    some(3);
    check(system(line) == 0, "system");
    some(2);
}

// A daemon: its parent ends once the daemon has allocated. It continues when GATE opens, and writes to REPORT.
static void daemonise(const char *gate, const char *report) {
    int ready[2];
    char byte = 0;
    check(pipe(ready) == 0, "pipe");
    if (fork() == 0) {
        setsid();
        if (fork() != 0) _exit(0);
        some(5);
        check(write(ready[1], &byte, 1) == 1, "write");
        for (int fd = 0; fd < 3; fd++) close(fd);
        int fd = open(gate, O_RDONLY);
        while (read(fd, &byte, 1) > 0) {}
        some(1000);
        fd = open(report, O_WRONLY);
        check(write(fd, "fine", 4) == 4, "write");
        _exit(0);
    }
    check(read(ready[0], &byte, 1) == 1, "read");
}

static void *thread_some(void *count) {
    some((int)(intptr_t)count);
    return NULL;
}

static void short_lived(int count) {
    for (int i = 0; i < count; i++) {
        pthread_t thread;
        check(pthread_create(&thread, NULL, thread_some, (void *)1) == 0, "pthread_create");
        pthread_join(thread, NULL);
    }
}

static pthread_barrier_t barrier;

static void *in_the_crowd(void *count) {
    pthread_barrier_wait(&barrier);
    some((int)(intptr_t)count);
    // All threads stay alive until all have allocated.
    pthread_barrier_wait(&barrier);
    return NULL;
}

static void crowd(int count, size_t stack) {
    pthread_t *threads = calloc(count, sizeof *threads);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    check(pthread_attr_setstacksize(&attributes, stack) == 0, "stack size");
    pthread_barrier_init(&barrier, NULL, count);
    for (int i = 0; i < count; i++) {
        check(pthread_create(&threads[i], &attributes, in_the_crowd, (void *)2) == 0, "pthread_create");
    }
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static void *wait_for_the_end(void *nothing) {
    some(1);
    pthread_barrier_wait(&barrier);
    for (;;) pause();
    return nothing;
}

// Ends in one of many ways while another thread exists.
static void end(const char *how) {
    pthread_t thread;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    pthread_barrier_init(&barrier, NULL, 2);
    pthread_create(&thread, NULL, wait_for_the_end, NULL);
    pthread_barrier_wait(&barrier);
    some(7);
    if (strcmp(how, "_exit") == 0) _exit(5);
    if (strcmp(how, "exit_group") == 0) syscall(SYS_exit_group, 5);
    if (strcmp(how, "quick_exit") == 0) quick_exit(5);
    if (strcmp(how, "exit") == 0) exit(5);
    if (strcmp(how, "abort") == 0) abort();
    if (strcmp(how, "segv") == 0) raise(SIGSEGV);
    if (strcmp(how, "wild") == 0) *(volatile int *)8 = 1;
    if (strcmp(how, "kill") == 0) kill(getpid(), SIGKILL);
    if (strcmp(how, "interrupt") == 0) kill(getpid(), SIGINT);
    if (strcmp(how, "trap") == 0) __builtin_trap();
    // The main thread ends; the process ends with the other thread.
    if (strcmp(how, "pthread_exit") == 0) {
        pthread_cancel(thread);
        pthread_exit(NULL);
    }
}

static void *until_stopped(void *stop) {
    while (!*(volatile int *)stop) some(1);
    return NULL;
}

// Forks while other threads are inside calls. Needs a driver without locks: the child would inherit locked ones.
static void storm(int threads, int forks) {
    pthread_t others[16];
    volatile int stop = 0;
    some(1);
    for (int i = 0; i < threads; i++) pthread_create(&others[i], NULL, until_stopped, (void *)&stop);
    for (int i = 0; i < forks; i++) {
        pid_t child = i % 3 == 0 ? raw_fork() : i % 3 == 1 ? raw_clone() : fork();
        if (child == 0) {
            some(10);
            _exit(0);
        }
        finished(child);
    }
    stop = 1;
    for (int i = 0; i < threads; i++) pthread_join(others[i], NULL);
}

static int lowest_free(void) {
    int fd = open("/dev/null", O_RDONLY);
    close(fd);
    return fd;
}

static void descriptors(void) {
    printf("%d\n", lowest_free());
    some(1);
    printf("%d\n", lowest_free());
    thread_some((void *)1);
    short_lived(3);
    printf("%d\n", lowest_free());
}

// Closes all descriptors, as daemons do, reuses the numbers for its own files, and continues.
static void close_all(void) {
    some(3);
    int out = fcntl(1, F_DUPFD, 500);
    for (int fd = 0; fd < 500; fd++) close(fd);
    int files[32];
    for (int i = 0; i < 32; i++) files[i] = open("/dev/null", O_RDWR);
    some(2000);
    short_lived(3);
    int wrong = 0;
    for (int i = 0; i < 32; i++) wrong += files[i] != i || fcntl(i, F_GETFL) < 0;
    for (int i = 0; i < 32; i++) close(i);
    dprintf(out, "lowest %d, wrong %d\n", lowest_free(), wrong);
}

// May open no descriptor: after some events (0), from the start (1), during the first events only (2).
static void no_descriptors(int when) {
    struct rlimit limit, none;
    if (when == 0) some(3);
    getrlimit(RLIMIT_NOFILE, &limit);
    none = limit;
    none.rlim_cur = 3;
    setrlimit(RLIMIT_NOFILE, &none);
    some(4);
    printf("%d\n", open("/dev/null", O_RDONLY));
    if (when == 2) {
        setrlimit(RLIMIT_NOFILE, &limit);
        some(100);
    }
}

int main(int argc, char **argv) {
    const char *what = argv[1];
    static char path[4096];
    check(readlink("/proc/self/exe", path, sizeof path - 1) > 0, "self");
    self = path;
    int number = argc > 2 ? atoi(argv[2]) : 0;
    if (strcmp(what, "some") == 0) some(number);
    else if (strcmp(what, "fork") == 0) forked(fork, number);
    else if (strcmp(what, "raw-fork") == 0) forked(raw_fork, number);
    else if (strcmp(what, "raw-clone") == 0) forked(raw_clone, number);
    else if (strcmp(what, "generations") == 0) generations(number);
    else if (strcmp(what, "vfork") == 0) vforked();
    else if (strcmp(what, "spawn") == 0) spawned();
    else if (strcmp(what, "system") == 0) by_shell();
    else if (strcmp(what, "exec") == 0) some(3), execl(self, self, "some", "5", NULL);
    else if (strcmp(what, "daemon") == 0) daemonise(argv[2], argv[3]);
    else if (strcmp(what, "short-lived") == 0) short_lived(number);
    else if (strcmp(what, "crowd") == 0) crowd(number, (size_t)atoi(argv[3]) << 10);
    else if (strcmp(what, "end") == 0) end(argv[2]);
    else if (strcmp(what, "storm") == 0) storm(number, atoi(argv[3]));
    else if (strcmp(what, "descriptors") == 0) descriptors();
    else if (strcmp(what, "close-all") == 0) close_all();
    else if (strcmp(what, "no-descriptors") == 0) no_descriptors(number);
    else return 72;
    return 0;
}
