// `hostile WHAT [ARGUMENT...]`: allocates in situations that are hard for a recorder, because of the environment or of
// the program itself. It prints its results, which must be the same with a recorder.
//
// Linked with a runtime.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../process/allocating.h"

// ---- system call filters

static int number(const char *call) {
    static const struct { const char *name; int number; } CALLS[] = {
        {"memfd_create", SYS_memfd_create}, {"socket", SYS_socket},   {"connect", SYS_connect}, {"recvmsg", SYS_recvmsg},
        {"process_vm_readv", SYS_process_vm_readv}, {"clone", SYS_clone}, {"ptrace", SYS_ptrace},
    };
    for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
        if (strcmp(CALLS[i].name, call) == 0) return CALLS[i].number;
    }
    check(0, "no such call");
    return -1;
}

// Kills the process (`kill`) or fails the call (`refuse`) for each of these calls; allows all others.
static void filter(const char *action, char **calls, int count) {
    uint32_t verdict = strcmp(action, "kill") == 0 ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | EPERM;
    struct sock_filter code[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    int length = 1;
    for (int i = 0; i < count; i++) {
        code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number(calls[i]), 0, 1);
        code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, verdict);
    }
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {(unsigned short)length, code};
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
    check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "filter");
}

// ---- signal handlers

static volatile sig_atomic_t handled;

static void allocates(int signal) {
    (void)signal;
    some(1);
    handled++;
}

static void handler(void) {
    static char stack[64 << 10];
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    check(sigaltstack(&alternate, NULL) == 0, "sigaltstack");
    struct sigaction action = {.sa_handler = allocates, .sa_flags = SA_ONSTACK};
    check(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
}

// ---- the end of a stack

static char *lowest;

__attribute__((noinline)) static int down(size_t room) {
    volatile char frame[512];
    frame[0] = 1;
    if ((size_t)((char *)frame - lowest) > room) return down(room) + frame[0];
    some(1);
    return frame[0];
}

static void *on_small_stack(void *room) {
    pthread_attr_t attributes;
    void *address;
    size_t size;
    check(pthread_getattr_np(pthread_self(), &attributes) == 0, "attributes");
    check(pthread_attr_getstack(&attributes, &address, &size) == 0, "stack");
    pthread_attr_destroy(&attributes);
    lowest = address;
    return (void *)(intptr_t)(down((size_t)room) > 0);
}

// ---- processes with other privileges

static void become_nobody(void) {
    check(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0, "setuid");
}

static void limited(int resource, rlim_t value) {
    struct rlimit limit = {value, value};
    check(setrlimit(resource, &limit) == 0, "setrlimit");
}

static int lowest_descriptor(void) {
    int fd = open("/dev/null", O_RDONLY);
    close(fd);
    return fd;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "some") == 0) {
        some(atoi(argv[2]));
    } else if (strcmp(what, "seccomp") == 0) { // BEFORE ACTION CALL...
        some(atoi(argv[2]));
        filter(argv[3], argv + 4, argc - 4);
        some(5);
        printf("children: %d\n", (int)syscall(SYS_wait4, -1, NULL, WNOHANG | __WALL, NULL));
    } else if (strcmp(what, "under") == 0) { // ACTION CALL COMMAND...
        filter(argv[2], argv + 3, 1);
        execvp(argv[4], argv + 4);
        check(0, argv[4]);
    } else if (strcmp(what, "handler") == 0) {
        handler();
        for (int i = 0; i < 20; i++) {
            raise(SIGUSR1);
            some(1);
        }
        printf("handled: %d\n", (int)handled);
    } else if (strcmp(what, "stack-end") == 0) { // BYTES left, BEFORE
        some(atoi(argv[3]));
        pthread_attr_t attributes;
        pthread_t thread;
        void *result;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 256 << 10);
        check(pthread_create(&thread, &attributes, on_small_stack, (void *)(size_t)atoi(argv[2])) == 0, "thread");
        pthread_join(thread, &result);
        printf("came back: %d\n", (int)(intptr_t)result);
    } else if (strcmp(what, "nobody") == 0) { // BEFORE
        some(atoi(argv[2]));
        become_nobody();
        some(3);
        pid_t child = fork();
        if (child == 0) {
            some(2);
            _exit(0);
        }
        finished(child);
        printf("user %d\n", (int)getuid());
    } else if (strcmp(what, "undumpable") == 0) {
        check(prctl(PR_SET_DUMPABLE, 0) == 0, "dumpable");
        some(4);
        printf("dumpable %d\n", prctl(PR_GET_DUMPABLE));
    } else if (strcmp(what, "chroot") == 0) { // FOLDER BEFORE
        some(atoi(argv[3]));
        check(chroot(argv[2]) == 0 && chdir("/") == 0, "chroot");
        some(3);
    } else if (strcmp(what, "address-limit") == 0) { // BEFORE MEBIBYTES
        some(atoi(argv[2]));
        limited(RLIMIT_AS, (rlim_t)atoi(argv[3]) << 20);
        some(5);
        size_t taken = 0;
        void *last = NULL;
        for (void *more; (more = malloc(1 << 20)); taken++) last = more;
        free(last); // The simulated driver needs room for one allocation.
        some(1);
        printf("%s\n", taken > (size_t)atoi(argv[3]) / 2 ? "got what the limit allows" : "got too little");
    } else if (strcmp(what, "closed") == 0) {
        some(2);
        syscall(SYS_close_range, 3, ~0u, 0);
        some(2);
        for (int fd = 3; fd < 64; fd++) dup2(0, fd);
        some(2);
        syscall(SYS_close_range, 3, ~0u, 0);
        limited(RLIMIT_NOFILE, 3);
        some(2);
        printf("descriptor %d\n", lowest_descriptor());
    } else if (strcmp(what, "namespace") == 0) { // LIBRARY
        void *library = dlmopen(LM_ID_NEWLM, argv[2], RTLD_NOW);
        check(library != NULL, "dlmopen");
        int (*use)(int, size_t) = (int (*)(int, size_t))dlsym(library, "use");
        printf("use: %d\n", use(3, 1 << 16));
        some(2);
    } else if (strcmp(what, "versioned") == 0) {
        int (*allocate)(void **, size_t) = (int (*)(void **, size_t))dlvsym(RTLD_DEFAULT, "cudaMalloc", "libcudart.so.12");
        check(allocate != NULL, "dlvsym");
        void *memory;
        printf("allocate: %d\n", allocate(&memory, 12345));
        some(2);
    } else {
        return 64;
    }
    printf("fine\n");
    return 0;
}
