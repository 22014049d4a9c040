// A signal handler that leaves CUDA calls by siglongjmp, while other threads allocate.
//
// `first WHO`: it leaves the first call of the process while that call waits for memtrace's launcher. The program stops
//   its parent to make it wait. Then the other threads (WHO is `others`) or this thread (`same`) call first.
// `later N`: it leaves about N calls at random moments. Prints nothing that depends on time.
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static sigjmp_buf before_call;
static volatile sig_atomic_t is_in_call;
static volatile sig_atomic_t left;

static void leave(int signal) {
    (void)signal;
    if (is_in_call) {
        is_in_call = 0;
        left++;
        siglongjmp(before_call, 1);
    }
}

extern char __executable_start, etext;

// Whether the signal has interrupted a system call outside this program's own code.
static int is_waiting(const ucontext_t *context) {
    const unsigned char *at = (const unsigned char *)context->uc_mcontext.gregs[REG_RIP];
    int is_outside = (const char *)at < &__executable_start || (const char *)at >= &etext;
    // The instruction before is `syscall`.
    return is_outside && at[-2] == 0x0f && at[-1] == 0x05;
}

static void leave_wait(int signal, siginfo_t *info, void *context) {
    (void)info;
    if (is_waiting(context)) leave(signal);
}

// Whether all threads of a process are stopped.
static int is_stopped(pid_t pid) {
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *threads = opendir(path);
    if (!threads) _exit(72);
    int all = 1;
    for (struct dirent *entry; (entry = readdir(threads));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/stat", pid, entry->d_name);
        FILE *file = fopen(path, "r");
        // The name of a thread of the launcher has no parenthesis.
        all &= file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && state == 'T';
        if (file) fclose(file);
    }
    closedir(threads);
    return all;
}

static void pairs(int count) {
    for (int i = 0; i < count; i++) {
        void *memory;
        if (cudaMalloc(&memory, 4096) != 0 || cudaFree(memory) != 0) _exit(70);
    }
}

static void *allocate(void *unused) {
    (void)unused;
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    pairs(300);
    return NULL;
}

static void run_others(void) {
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, allocate, NULL);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
}

static pthread_t main_thread;
static atomic_int is_done;

static void *disturb(void *unused) {
    allocate(NULL);
    (void)unused;
    unsigned random = 1;
    while (!is_done) {
        random = random * 1103515245 + 12345;
        struct timespec while_ = {0, (random >> 8) % 200000};
        nanosleep(&while_, NULL);
        pthread_kill(main_thread, SIGUSR1);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    // A hang ends with SIGALRM.
    alarm(90);
    struct sigaction action = {.sa_handler = leave};
    sigaction(SIGUSR1, &action, NULL);
    void *memory;
    if (!strcmp(argv[1], "first")) {
        struct sigaction waiting = {.sa_sigaction = leave_wait, .sa_flags = SA_SIGINFO};
        sigaction(SIGUSR1, &waiting, NULL);
        kill(getppid(), SIGSTOP);
        while (!is_stopped(getppid())) usleep(1000);
        timer_t timer;
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
        // Again and again, until a signal comes while the call waits.
        struct itimerspec often = {.it_value = {0, 300000000}, .it_interval = {0, 20000000}}, never = {{0, 0}, {0, 0}};
        timer_create(CLOCK_MONOTONIC, &event, &timer);
        if (sigsetjmp(before_call, 1) == 0) {
            is_in_call = 1;
            timer_settime(timer, 0, &often, NULL);
            cudaMalloc(&memory, 4096);
            is_in_call = 0;
        }
        timer_settime(timer, 0, &never, NULL);
        kill(getppid(), SIGCONT);
        if (!strcmp(argv[2], "same")) pairs(50);
        run_others();
        if (strcmp(argv[2], "same")) pairs(50);
        printf("left %d\n", (int)left);
    } else {
        int requested = atoi(argv[2]);
        main_thread = pthread_self();
        pthread_t thread;
        pthread_create(&thread, NULL, disturb, NULL);
        while (left < requested) {
            if (sigsetjmp(before_call, 1) == 0) {
                is_in_call = 1;
                if (cudaMalloc(&memory, 4096) != 0 || cudaFree(memory) != 0) _exit(71);
                is_in_call = 0;
            }
        }
        is_done = 1;
        pthread_join(thread, NULL);
        signal(SIGUSR1, SIG_IGN);
        run_others();
        pairs(50);
        puts("left all");
    }
    return 0;
}
