// Prints everything that a process can see of itself, before and after it uses CUDA (linked with a runtime and -DCUDA)
// or does nothing (without). Two runs must print the same.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#ifdef CUDA
int cudaMalloc(void **, size_t);
int cudaFree(void *);
#endif
extern char **environ;

static int starts_with(const char *text, const char *const *beginnings) {
    for (; *beginnings; beginnings++) {
        if (strncmp(text, *beginnings, strlen(*beginnings)) == 0) return 1;
    }
    return 0;
}

static void status(void) {
    static const char *const compared[] = {"Name", "Umask", "Uid", "Gid", "Groups", "Threads", "SigPnd", "ShdPnd", "SigBlk",
        "SigIgn", "SigCgt", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed", NULL};
    char line[4096];
    FILE *file = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, file)) {
        unsigned long long signals;
        // The C library uses signals 32 and 33 internally. No program can query them, and the first thread sets one.
        if (sscanf(line, "SigIgn: %llx", &signals) == 1) printf("SigIgn: %llx\n", signals & ~(3ull << 31));
        else if (starts_with(line, compared)) fputs(line, stdout);
    }
    fclose(file);
}

static void descriptors(void) {
    for (int fd = 0; fd < 1024; fd++) {
        struct stat info;
        int flags = fcntl(fd, F_GETFD);
        if (flags < 0 || fstat(fd, &info) != 0) continue;
        printf("fd %d: kind %o, flags %d %o\n", fd, info.st_mode & S_IFMT, flags, fcntl(fd, F_GETFL));
    }
}

static void settings(void) {
    static const char *const ours[] = {"LD_PRELOAD=", "MEMTRACE_SESSION=", "NVTX_INJECTION64_PATH=", "SIMCUDA_LEDGER=", NULL};
    char folder[4096], name[17] = {0};
    struct itimerval timer;
    struct rlimit limit;
    stack_t stack;
    struct sigaction action;
    for (char **entry = environ; *entry; entry++) {
        if (!starts_with(*entry, ours)) puts(*entry);
    }
    printf("cwd %s\n", getcwd(folder, sizeof folder));
    for (int i = 0; i < RLIM_NLIMITS; i++) {
        getrlimit(i, &limit);
        printf("limit %d: %lu %lu\n", i, limit.rlim_cur, limit.rlim_max);
    }
    getitimer(ITIMER_REAL, &timer);
    sigaltstack(NULL, &stack);
    prctl(PR_GET_NAME, name);
    printf("nice %d, personality %x, timer %ld, alternate stack %d, dumpable %d, slack %d, name %s, leader %d\n",
        getpriority(PRIO_PROCESS, 0), personality(0xffffffff), timer.it_value.tv_sec, stack.ss_flags,
        prctl(PR_GET_DUMPABLE), prctl(PR_GET_TIMERSLACK), name, getpgrp() == getpid());
    for (int i = 1; i < 65; i++) {
        if (sigaction(i, NULL, &action) == 0) printf("%d:%d ", i, action.sa_handler == SIG_DFL);
    }
    printf("\nlocale %s, rounding %d, exceptions %d, random %d\n", setlocale(LC_ALL, NULL), fegetround(),
        fetestexcept(FE_ALL_EXCEPT), rand());
}

static void state(const char *when) {
    printf("== %s\n", when);
    status();
    descriptors();
    settings();
}

static void handler(int signal) { (void)signal; }

int main(int argc, char **argv) {
    for (int i = 0; i < argc; i++) printf("argument %s\n", argv[i]);
    state("at the start");
    signal(SIGUSR1, handler);
    signal(SIGPIPE, SIG_IGN);
    fesetround(FE_UPWARD);
    umask(027);
#ifdef CUDA
    void *memory = NULL;
    // The process's first event is a failed call.
    dlerror();
    errno = 77;
    int result = cudaMalloc(&memory, (size_t)1 << 50);
    printf("too much: %d, errno %d, %p\n", result, errno, memory);
    errno = 0;
    result = open("/no/such/file", O_RDONLY);
    int after_open = errno;
    result = cudaMalloc(&memory, 1 << 20);
    printf("after open: %d, errno %d, then %d\n", result, after_open, errno);
    errno = 78;
    result = cudaFree(memory);
    printf("freed: %d, errno %d\n", result, errno);
    result = open("/no/such/file", O_RDONLY);
    printf("open right after a call: %d %s\n", result, strerror(errno));
    errno = 79;
    result = cudaFree((void *)0x1234);
    printf("bad pointer: %d, errno %d\n", result, errno);
    for (int i = 0; i < 8; i++) cudaMalloc(&memory, 1 << 20);
    char *error = dlerror();
    printf("loader's error: %s\n", error ? error : "none");
    dlsym(RTLD_DEFAULT, "cuNoSuchFunction");
    error = dlerror();
    printf("loader's error: %s\n", error ? error : "none");
#endif
    state("at the end");
    return 3;
}
