// Functions for tests/programs/attach/helped.py: threads and children that no Python code has started, and waits that end
// only when the test wants it.

#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static void pause_for(long nanoseconds) {
    struct timespec time = {0, nanoseconds};
    nanosleep(&time, NULL);
}

static void slow_child(void) { pause_for(20000000); }

// Every child that the process forks waits for 20 ms before it goes on.
EXPORT void slow_children(void) { pthread_atfork(NULL, NULL, slow_child); }

static atomic_int is_forking;
static atomic_int forked;
static atomic_int failed;
static pthread_t forker;
static int (*called)(void *);

static void *fork_all_the_time(void *unused) {
    (void)unused;
    while (is_forking) {
        pid_t child = fork();
        if (child == 0) {
            pause_for(1000000);
            // A function of the interpreter that needs nothing of it.
            _exit(called(NULL) == 0 ? 0 : 1);
        }
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            failed++;
        forked++;
    }
    return NULL;
}

// Forks children from a thread that is not Python's. Each of them calls `function`.
EXPORT void start_forking(int (*function)(void *)) {
    called = function;
    is_forking = 1;
    pthread_create(&forker, NULL, fork_all_the_time, NULL);
}

EXPORT int forked_children(void) { return forked; }
EXPORT int failed_children(void) { return failed; }

EXPORT void stop_forking(void) {
    is_forking = 0;
    pthread_join(forker, NULL);
}

static int gate[2];

static void *wait_in_vfork(void *unused) {
    (void)unused;
    pid_t child = vfork();
    if (child == 0) {
        // This thread is suspended until the child ends.
        char byte;
        (void)!read(gate[0], &byte, 1);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    return NULL;
}

static atomic_int has_lock;

static int wait_with_lock(struct dl_phdr_info *info, size_t size, void *data) {
    (void)info, (void)size, (void)data;
    has_lock = 1;
    char byte;
    (void)!read(gate[0], &byte, 1);
    return 1;
}

static void *wait_in_loader(void *unused) {
    (void)unused;
    dl_iterate_phdr(wait_with_lock, NULL);
    return NULL;
}

static pthread_t waiter;

// Lets a thread wait for a child that shares its memory. Returns its id.
EXPORT int start_vfork(void) {
    (void)!pipe(gate);
    pthread_create(&waiter, NULL, wait_in_vfork, NULL);
    return 0;
}

// Lets a thread wait while it has the loader's lock.
EXPORT int start_loader_wait(void) {
    (void)!pipe(gate);
    has_lock = 0;
    pthread_create(&waiter, NULL, wait_in_loader, NULL);
    while (!has_lock)
        pause_for(1000000);
    return 0;
}

// Ends the wait.
EXPORT int end_wait(void) {
    (void)!write(gate[1], "x", 1);
    pthread_join(waiter, NULL);
    return 0;
}

// Waits for descriptors in a loop, until another thread ends it. Returns how many calls were interrupted.
static atomic_int is_waiting;

EXPORT int wait_for_descriptors(void) {
    int descriptor = epoll_create1(EPOLL_CLOEXEC), interrupted = 0;
    struct epoll_event event;
    is_waiting = 1;
    while (is_waiting)
        if (epoll_wait(descriptor, &event, 1, 300) < 0)
            interrupted++;
    close(descriptor);
    return interrupted;
}

EXPORT void end_wait_for_descriptors(void) { is_waiting = 0; }

// From here on, a call that makes writable and executable memory ends the process.
EXPORT int forbid_writable_code(void) {
    const unsigned both = PROT_WRITE | PROT_EXEC;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, both),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, both, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}
