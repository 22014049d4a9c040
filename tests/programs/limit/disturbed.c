// `disturbed HOW`: something happens inside an allocation under a limit, and then everybody allocates. It runs over
// limit/driver.c. Prints how much memory is in use when nothing more fits.
//
// HOW is what happens:
// - `fork`, `vfork`, `clone`: a child is created that lives on.
// - `kill`, `exit`, `exec`: a child ends there, or executes this program again. It has a child that lives on.
// - `stop`: a child is stopped, and continues later.
// - `leave`: a signal handler leaves the call by siglongjmp, and its thread allocates again, a hundred times.
// - `abandon`: the same, and another thread allocates next.
// - `nest`: a signal handler allocates.
// - `end`: the thread ends.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);
int cuMemGetInfo_v2(size_t *, size_t *);
extern void (*inside_allocation)(size_t);

#define CHUNK (1ul << 20)
// An allocation of this size is disturbed.
#define DISTURBED (1ul << 16)

static const char *how, *self;
static pid_t parent;
// In memory that children share: whether the child that lives on is there, and whether this program ends.
static volatile int *is_there, *is_over;
static sigjmp_buf before_call;

static void allocate(size_t bytes) {
    unsigned long long memory;
    if (cuMemAlloc_v2(&memory, bytes) || cuMemFree_v2(memory)) _exit(70);
}

static void some(void) {
    for (int i = 0; i < 20; i++) allocate(CHUNK);
}

static void *in_thread(void *nothing) {
    some();
    return nothing;
}

static void run_thread(void *(*work)(void *)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL) || pthread_join(thread, NULL)) _exit(71);
}

// Everybody: this thread, another one, and another process.
static void all(void) {
    some();
    run_thread(in_thread);
    int status;
    pid_t child = fork();
    if (child == 0) {
        some();
        _exit(0);
    }
    if (waitpid(child, &status, 0) != child || status != 0) _exit(72);
}

static void live_on(void) {
    *is_there = 1;
    while (!*is_over && syscall(SYS_kill, parent, 0) == 0) syscall(SYS_poll, NULL, 0, 10);
    syscall(SYS_exit_group, 0);
}

static void wait_for_child(void) {
    while (!*is_there) usleep(1000);
}

static void *create_by_vfork(void *nothing) {
    // The thread waits until the child has ended. The other threads go on.
    if (vfork() == 0) live_on();
    return nothing;
}

static void leave(int signal) {
    (void)signal;
    siglongjmp(before_call, 1);
}

static void nest(int signal) {
    (void)signal;
    allocate(CHUNK);
}

static int is(const char *what) { return strcmp(how, what) == 0; }

static void disturb(size_t bytes) {
    if (bytes != DISTURBED) return;
    if (is("fork") || is("kill") || is("exit") || is("exec")) {
        if (fork() == 0) live_on();
        wait_for_child();
        if (is("kill")) raise(SIGKILL);
        if (is("exit")) syscall(SYS_exit_group, 0);
        if (is("exec")) execl(self, self, "again", NULL);
    } else if (is("vfork")) {
        static pthread_t thread;
        pthread_create(&thread, NULL, create_by_vfork, NULL);
        wait_for_child();
    } else if (is("clone")) {
        if (syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) == 0) live_on();
        wait_for_child();
    } else if (is("stop")) {
        raise(SIGSTOP);
    } else if (is("leave") || is("abandon") || is("nest")) {
        raise(SIGUSR1);
    } else if (is("end")) {
        syscall(SYS_exit, 0);
    }
}

static void *allocate_disturbed(void *nothing) {
    if (sigsetjmp(before_call, 1) == 0) allocate(DISTURBED);
    return nothing;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    how = argv[1], self = argv[0], parent = getpid();
    if (is("again")) {
        some();
        return 0;
    }
    // A hang ends with SIGALRM.
    alarm(120);
    is_there = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    is_over = is_there + 1;
    inside_allocation = disturb;
    signal(SIGUSR1, is("nest") ? nest : leave);
    int status;
    some();
    if (is("kill") || is("exit") || is("exec") || is("stop")) {
        pid_t child = fork();
        if (child == 0) {
            allocate(DISTURBED);
            some();
            _exit(0);
        }
        if (waitpid(child, &status, is("stop") ? WUNTRACED : 0) != child) return 73;
        if (is("stop")) {
            all();
            kill(child, SIGCONT);
            if (waitpid(child, &status, 0) != child || status != 0) return 74;
        }
    } else if (is("leave")) {
        for (int i = 0; i < 100; i++) allocate_disturbed(NULL);
    } else if (is("end")) {
        run_thread(allocate_disturbed);
    } else {
        allocate_disturbed(NULL);
        if (is("abandon")) run_thread(in_thread);
    }
    for (int i = 0; i < 5; i++) all();
    unsigned long long memory;
    while (cuMemAlloc_v2(&memory, CHUNK) == 0) {}
    size_t free_bytes, total;
    if (cuMemGetInfo_v2(&free_bytes, &total)) return 75;
    printf("%zu of %zu MiB\n", (total - free_bytes) >> 20, total >> 20);
    fflush(stdout);
    *is_over = 1;
    _exit(0);
}
