// Frames that are hard to unwind without frame pointers: variable size, realigned, 200 deep. Each depth allocates.
#include <alloca.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int cuInit(unsigned), cuMemAlloc_v2(unsigned long long *, size_t), cudaMalloc(void **, size_t);

static volatile unsigned sink;
static size_t size = 1 << 20;

// Prevents the compiler from inlining or cloning the function.
#define ALONE __attribute__((noinline, noclone))

ALONE static int allocate(int n) {
    void *memory;
    unsigned long long address;
    int failed = n % 3 == 0 ? cuMemAlloc_v2(&address, ++size) : cudaMalloc(&memory, ++size);
    sink += (unsigned)failed;
    return failed;
}

static int go(int n);

ALONE static int plain(int n) { return go(n - 1) + (int)(sink & 0); }

ALONE static int variable(int n) {
    volatile char *some = alloca(16 + (size_t)n * 24 % 777);
    some[0] = (char)n;
    int result = go(n - 1);
    return result + (some[0] != (char)n);
}

// The stack is realigned for vectors: a register that the function saves locates the frame.
ALONE static int realigned(int n) {
    volatile char vector[96] __attribute__((aligned(64)));
    vector[n % 96] = (char)n;
    int result = go(n - 1);
    return result + (vector[n % 96] != (char)n) + (((uintptr_t)vector & 63) != 0);
}

// A realigned frame of variable size.
__attribute__((force_align_arg_pointer)) ALONE static int realigned_and_variable(int n) {
    volatile char vector[64] __attribute__((aligned(128)));
    volatile char *some = alloca(32 + (size_t)(n % 9) * 40);
    vector[0] = some[1] = (char)n;
    int result = go(n - 1);
    return result + (vector[0] != some[1]) + (((uintptr_t)vector & 127) != 0);
}

// Arguments on the stack, pushed around a call.
ALONE static int many_arguments(int a, int b, int c, int d, int e, int f, int g, int h, int i) {
    int result = go(a - 1);
    return result + (a + b + c + d + e + f + g + h != i);
}

ALONE static int go(int n) {
    int failed = n % 20 == 0 || n < 3 ? allocate(n) : 0;
    if (n == 0) return failed;
    switch (n % 5) {
    case 0: return failed + plain(n);
    case 1: return failed + variable(n);
    case 2: return failed + realigned(n);
    case 3: return failed + realigned_and_variable(n);
    default: return failed + many_arguments(n, 1, 2, 3, 4, 5, 6, 7, n + 28);
    }
}

int main(void) {
    cuInit(0);
    int failed = go(200);
    for (int depth = 1; depth < 60; depth += 7) failed += go(depth);
    failed += go(3) + go(199);
    printf("failed: %d, allocations: %zu\n", failed, size - (1 << 20));
    return failed != 0;
}
