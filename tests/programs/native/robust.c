// `robust MODE`: stacks that are hard or impossible to unwind. The program ends with success, whatever a recorder makes
// of its stack.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);

#define ALONE __attribute__((noinline, noclone))

static size_t size = 1 << 20;

ALONE static int allocate(void) {
    void *memory;
    int result = cudaMalloc(&memory, __atomic_fetch_add(&size, 1, __ATOMIC_RELAXED));
    __asm__ volatile("" ::: "memory");
    return result;
}

// ---- threads with small stacks

ALONE static int down(int n) {
    volatile char room[200];
    room[n % 200] = 0;
    return n == 0 ? allocate() : down(n - 1) + room[n % 200];
}

static void *small(void *argument) {
    (void)argument;
    int failed = 0;
    for (int depth = 0; depth < 60; depth += 9) failed += down(depth);
    return (void *)(intptr_t)failed;
}

static int threads(void) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 64 << 10);
    int failed = 0;
    for (int round = 0; round < 10; round++) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) {
            if (pthread_create(&threads[i], &attributes, small, NULL) != 0) return 90;
        }
        for (int i = 0; i < 4; i++) {
            void *result;
            pthread_join(threads[i], &result);
            failed += (int)(intptr_t)result;
        }
    }
    return failed;
}

// ---- coroutines: several stacks take turns on one thread; some are unmapped in between

#define COROUTINES 4
static ucontext_t scheduler, coroutines[COROUTINES];
static int coroutine_failed;

ALONE static void coroutine_work(int index, int depth) {
    volatile char room[64];
    room[0] = (char)depth;
    if (depth > 0) {
        coroutine_work(index, depth - 1);
    } else {
        for (int i = 0; i < 5; i++) {
            coroutine_failed += allocate();
            swapcontext(&coroutines[index], &scheduler);
        }
    }
    coroutine_failed += room[0] != (char)depth;
}

static void coroutine_start(int index) { coroutine_work(index, 3 + index * 4); }

static int coroutine(void) {
    enum { BYTES = 64 << 10 };
    for (int round = 0; round < 3; round++) {
        void *stacks[COROUTINES];
        for (int i = 0; i < COROUTINES; i++) {
            stacks[i] = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            getcontext(&coroutines[i]);
            coroutines[i].uc_stack.ss_sp = stacks[i];
            coroutines[i].uc_stack.ss_size = BYTES;
            coroutines[i].uc_link = &scheduler;
            makecontext(&coroutines[i], (void (*)(void))coroutine_start, 1, i);
        }
        for (int turn = 0; turn < 6; turn++) {
            for (int i = 0; i < COROUTINES; i++) swapcontext(&scheduler, &coroutines[i]);
            coroutine_failed += allocate();
        }
        for (int i = 0; i < COROUTINES; i++) munmap(stacks[i], BYTES);
    }
    return coroutine_failed;
}

// ---- generated code without unwind information; it calls the function that it is given

static int generated(const unsigned char *code, size_t length) {
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, code, length);
    mprotect(page, 4096, PROT_READ | PROT_EXEC);
    int (*call)(int (*)(void)) = (int (*)(int (*)(void)))page;
    int failed = 0;
    for (int i = 0; i < 5; i++) failed += call(allocate);
    munmap(page, 4096);
    return failed;
}

static int with_frame_pointers(void) {
    // push rbp; mov rbp, rsp; sub rsp, 48; call rdi; leave; ret
    static const unsigned char code[] = {0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x30, 0xff, 0xd7, 0xc9, 0xc3};
    return generated(code, sizeof code);
}

static int without_frame_pointers(void) {
    // push rbp; push rbx; xor ebp, ebp; sub rsp, 56; call rdi; add rsp, 56; pop rbx; pop rbp; ret
    static const unsigned char code[] = {0x55, 0x53, 0x31, 0xed, 0x48, 0x83, 0xec, 0x38, 0xff,
                                         0xd7, 0x48, 0x83, 0xc4, 0x38, 0x5b, 0x5d, 0xc3};
    return generated(code, sizeof code);
}

static int with_nonsense_in_the_frame_pointer(void) {
    // push rbp; push rbx; lea rbp, [rsp - 3]; sub rsp, 56; call rdi; add rsp, 56; pop rbx; pop rbp; ret
    static const unsigned char code[] = {0x55, 0x53, 0x48, 0x8d, 0x6c, 0x24, 0xfd, 0x48, 0x83, 0xec, 0x38,
                                         0xff, 0xd7, 0x48, 0x83, 0xc4, 0x38, 0x5b, 0x5d, 0xc3};
    return generated(code, sizeof code);
}

// ---- a coroutine's stack on the heap, with a frame pointer that points far above it. With `ulimit -s unlimited` the C
// library reports that the main thread's stack reaches down to the heap's end at the time of the query.

static int heap_failed;

static void heap_coroutine(void) {
    // push rbp; push rbx; lea rbp, [rsp + 0x10000000]; sub rsp, 56; call rdi; add rsp, 56; pop rbx; pop rbp; ret
    static const unsigned char code[] = {0x55, 0x53, 0x48, 0x8d, 0xac, 0x24, 0, 0, 0, 0x10, 0x48, 0x83, 0xec, 0x38,
                                         0xff, 0xd7, 0x48, 0x83, 0xc4, 0x38, 0x5b, 0x5d, 0xc3};
    heap_failed += generated(code, sizeof code);
}

static int heap_stack(void) {
    enum { BYTES = 64 << 10 };
    int failed = allocate(); // the recorder asks for the stack's bounds
    char *stack = NULL;
    for (int i = 0; i < 40; i++) stack = malloc(BYTES); // the heap grows
    getcontext(&coroutines[0]);
    coroutines[0].uc_stack.ss_sp = stack;
    coroutines[0].uc_stack.ss_size = BYTES;
    coroutines[0].uc_link = &scheduler;
    makecontext(&coroutines[0], heap_coroutine, 0);
    swapcontext(&scheduler, &coroutines[0]);
    return failed + heap_failed;
}

// ---- overwritten stacks

enum { OVERWRITTEN = 8 << 10 };

static uint64_t garbage(int kind, uint64_t *at) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    switch (kind) {
    case 0: return state;                                             // numbers
    case 1: return 0;
    case 2: return ~(uint64_t)0;
    case 3: return (uintptr_t)at;                                     // pointers to themselves
    case 4: return (uintptr_t)allocate + state % 64;                  // code
    case 5: return (uintptr_t)(at + state % 64 - 32) & ~(uint64_t)7;  // pointers into the stack, up and down
    case 6: return state % 2 ? (uintptr_t)allocate + 30 : (uintptr_t)(at + state % 8);
    default: return state >> 17;                                      // random addresses, most of them unmapped
    }
}

static int spared;
static void (*volatile leave)(int) = _exit; // volatile: hides from the compiler that _exit does not return

ALONE static void overwrite(int kind) {
    uint64_t *at = __builtin_frame_address(0), *end = at + OVERWRITTEN / 8;
    for (at += spared; at < end; at++) *at = garbage(kind, at);
    allocate();
    allocate();
    char done[] = "allocated\n";
    leave(write(1, done, sizeof done - 1) < 0);
}

ALONE static void deeper(int depth, int kind) {
    volatile char room[100];
    room[0] = 1;
    if (depth > 0) {
        deeper(depth - 1, kind);
    } else {
        allocate(); // before the stack is overwritten, so that a recorder knows it
        overwrite(kind);
    }
    room[1] = room[0];
}

static void *doomed(void *kind) {
    // Space between the destroyed frames and the thread's own data, which is at the end of its stack.
    volatile char room[4 * OVERWRITTEN];
    room[0] = 1;
    deeper(8, (int)(intptr_t)kind);
    room[1] = room[0];
    return NULL;
}

static int overwritten(int kinds) {
    int failed = 0;
    for (int kind = 0; kind < kinds; kind++) {
        for (int time = 0; time < 5; time++) {
            pid_t child = fork();
            if (child == 0) {
                // Overwrite from this function's own return address on, or from its caller's frame on.
                spared = time % 2 * 2;
                pthread_t thread;
                if (pthread_create(&thread, NULL, doomed, (void *)(intptr_t)kind) != 0) _exit(1);
                pthread_join(thread, NULL);
                _exit(2);
            }
            int status = -1;
            waitpid(child, &status, 0);
            if (status != 0) printf("kind %d: status %#x\n", kind, status);
            failed += status != 0;
        }
    }
    return failed;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    int result = 99;
    if (!strcmp(mode, "threads")) result = threads();
    if (!strcmp(mode, "coroutines")) result = coroutine();
    if (!strcmp(mode, "jit-rbp")) result = with_frame_pointers();
    if (!strcmp(mode, "jit")) result = without_frame_pointers();
    if (!strcmp(mode, "jit-nonsense")) result = with_nonsense_in_the_frame_pointer();
    if (!strcmp(mode, "heap-stack")) result = heap_stack();
    if (!strcmp(mode, "overwritten")) result = overwritten(8);
    printf("%s: %d\n", mode, result);
    return result;
}
