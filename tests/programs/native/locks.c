// Locks from frames of many kinds, for the comparison of native stacks with libgcc's: `locks all`.
// `locks registered` takes the lock below a function whose unwinding information only libgcc has.
#define _GNU_SOURCE
#include <alloca.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void take_lock(void) {
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
}

static int compare(const void *a, const void *b) {
    take_lock();
    return *(const int *)a - *(const int *)b;
}

static int deeper(int depth);

// A frame whose size is only known at run time.
static __attribute__((noinline)) int of_unknown_size(int depth) {
    volatile char *bytes = alloca(16 + depth * 24 % 500);
    bytes[0] = 1;
    return deeper(depth - 1) + bytes[0];
}

// A frame with a larger alignment than the stack's.
static __attribute__((noinline)) int aligned(int depth) {
    volatile char bytes[128] __attribute__((aligned(64)));
    bytes[depth] = 1;
    return deeper(depth - 1) + bytes[depth];
}

static __attribute__((noinline)) int deeper(int depth) {
    take_lock();
    if (depth == 0) {
        int numbers[] = {5, 3, 4, 1, 2};
        qsort(numbers, 5, sizeof *numbers, compare);
        raise(SIGUSR1);
        return numbers[0];
    }
    int sum = depth % 2 ? of_unknown_size(depth) : aligned(depth);
    take_lock();
    return sum;
}

static void on_signal(int signal) {
    (void)signal;
    take_lock();
}

static void *thread(void *argument) {
    char *stack = malloc(1 << 16);
    stack_t other = {.ss_sp = stack, .ss_size = 1 << 16};
    sigaltstack(&other, NULL);
    for (int i = 0; i < 20; i++) deeper(i + (argument ? 3 : 0));
    other.ss_flags = SS_DISABLE;
    sigaltstack(&other, NULL);
    free(stack);
    return NULL;
}

static void threads(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, thread, i % 2 ? threads : NULL);
    thread(NULL);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
}

// A function without frame pointer and without unwinding information of its own, and that information beside it, as a
// compiler at run time would make them.
void without_information(void (*call)(void));
extern char registered_information[];
void __register_frame(void *);
__asm__(
    ".text\n"
    "without_information:\n"
    "    push %rbp\n"
    "1:  xor %ebp, %ebp\n"
    "    call *%rdi\n"
    "    pop %rbp\n"
    "2:  ret\n"
    "3:\n"
    ".data\n"
    ".balign 8\n"
    "registered_information:\n"
    "    .long 5f - 4f\n"
    "4:  .long 0\n"           // a CIE
    "    .byte 1, 0, 1, 0x78, 16\n"  // version, no augmentation, code factor, data factor -8, return address
    "    .byte 0x0c, 7, 8\n"  // DW_CFA_def_cfa: rsp + 8
    "    .byte 0x90, 1\n"     // DW_CFA_offset: return address at CFA - 8
    "    .balign 4\n"
    "5:  .long 7f - 6f\n"
    "6:  .long . - registered_information\n"  // an FDE of that CIE
    "    .quad without_information, 3b - without_information\n"
    "    .byte 0x40 + (1b - without_information), 0x0e, 16, 0x86, 2\n"  // after the push: CFA = rsp + 16, rbp at CFA - 16
    "    .byte 0x40 + (2b - 1b), 0x0e, 8, 0xc6\n"  // after the pop
    "    .balign 4\n"
    "7:  .long 0\n"
    ".text\n");

int main(int count, char **arguments) {
    if (count == 2 && !strcmp(arguments[1], "registered")) {
        __register_frame(registered_information);
        without_information(take_lock);
        return 0;
    }
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, NULL);
    threads();
    pid_t child = fork();
    if (child == 0) {
        threads();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    puts(status == 0 ? "ok" : "the child failed");
    return status != 0;
}
