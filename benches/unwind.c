// unwind PROBE.so LIBUNWIND.so DEPTH FIRST ROUNDS: captures native stacks, DEPTH functions deep, with all unwinders in
// turn from the same call sites. First checks that they find the same stack. FIRST is "-", or selects first captures
// only: an unwinder's name for the first of the process, "thread" for the first of ROUNDS threads by memtrace. Prints
// JSON.
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 256, INNER = 15, LEAVES = 8, BATCH_NS = 100000, KINDS = 4 };

typedef int take(void **, int);

static int nothing(void **into, int size) {
    (void)into, (void)size;
    return 1;
}

static struct { const char *name; take *take; } kinds[KINDS] = {{"nothing", nothing}, {"memtrace", 0}, {"unw_backtrace", 0}, {"backtrace", backtrace}};
static take *addresses, *volatile now;
static void *buffer[MOST];
static int rounds, frames, inner;

static double clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

// Functions with frames of many sizes, as in real programs. Each calls the next one; the last one calls `last`.
typedef long function(long left, long argument);
static function *last;
#define FRAME(NAME, NEXT, ROOM) \
    __attribute__((noinline)) static long NAME(long left, long argument) { \
        volatile char room[ROOM]; \
        room[0] = (char)left; \
        return (left > 1 ? NEXT : last)(left - 1, argument) + room[0]; \
    }
#define RING(P, A, B, C, D, E) \
    static function P##0; \
    FRAME(P##4, P##0, E) FRAME(P##3, P##4, D) FRAME(P##2, P##3, C) FRAME(P##1, P##2, B) FRAME(P##0, P##1, A)
RING(outer, 8, 120, 24, 56, 400)
RING(alloc, 16, 200, 40, 8, 72)
RING(release, 24, 8, 152, 104, 16)

// The only place that captures stacks; `argument` selects the leaf function around it.
#define LEAF(N) __attribute__((noinline)) static long leaf##N(void) { return now(buffer, MOST) + N; }
LEAF(0) LEAF(1) LEAF(2) LEAF(3) LEAF(4) LEAF(5) LEAF(6) LEAF(7)
static long (*const leaves[LEAVES])(void) = {leaf0, leaf1, leaf2, leaf3, leaf4, leaf5, leaf6, leaf7};
static long at_leaf(long left, long argument) {
    (void)left;
    return leaves[argument]() + 1;
}

// One turn of each case; returns the number of captures.
static long unchanged(void) { return leaf0(), 1; }
static long paths(void) { return alloc0(inner, 0), release0(inner, 0), 2; }
// More alternating stacks than a thread remembers; the last one is the deepest.
static long many_paths(void) {
    for (int i = LEAVES - 1; i >= 0; i--) (i & 1 ? release0 : alloc0)(inner > i ? inner - i : 1, i);
    return LEAVES;
}
static long leaf_changed(void) {
    for (int i = 0; i < LEAVES; i++) at_leaf(0, i);
    return LEAVES;
}
static const struct { const char *name; long (*turn)(void); } cases[] = {
    {"unchanged", unchanged}, {"two call paths in turns", paths}, {"eight call paths in turns", many_paths}, {"another leaf each time", leaf_changed}};
enum { CASES = sizeof cases / sizeof *cases };

// Exits unless memtrace and libunwind (or the C library where libunwind is missing) give the same addresses here.
__attribute__((noinline)) static int check(void **into, int size) {
    void *ours[MOST], *theirs[MOST];
    int found = addresses(ours, MOST);
    frames = (kinds[2].take ? kinds[2].take : backtrace)(theirs, MOST);
    // The innermost frame is this function, at two different calls. The outermost may be the null that ends libunwind's
    // stack.
    if (frames > 0 && !theirs[frames - 1]) frames--;
    if (found != frames || memcmp(ours + 1, theirs + 1, (frames - 1) * sizeof *ours)) {
        fprintf(stderr, "memtrace finds %d frames, the peer %d\n", found, frames);
        for (int i = 0; i < found || i < frames; i++)
            fprintf(stderr, "  %p %p\n", i < found ? ours[i] : 0, i < frames ? theirs[i] : 0);
        exit(3);
    }
    // The measured stacks do not have this function's frame.
    frames--;
    return into != NULL && size;
}

static void measure(int which) {
    now = check;
    last = at_leaf;
    cases[which].turn();
    double *samples = calloc((size_t)KINDS * rounds, sizeof *samples);
    long batch[KINDS] = {0};
    for (int round = -1; round < rounds; round++)
        for (int turn = 0; turn < KINDS; turn++) {
            int kind = (round + 1 + turn) % KINDS;
            if (!kinds[kind].take) continue;
            now = kinds[kind].take;
            double start = clock_ns();
            long done = 0, turns = 0;
            // The first round determines the number of turns of a batch.
            while (round < 0 ? clock_ns() - start < BATCH_NS : turns < batch[kind]) done += cases[which].turn(), turns++;
            if (round < 0) batch[kind] = turns;
            else samples[kind * rounds + round] = (clock_ns() - start) / done;
        }
    printf("{\"case\": \"%s\", \"frames\": %d", cases[which].name, frames);
    for (int kind = 0; kind < KINDS; kind++) {
        if (!kinds[kind].take) continue;
        printf(", \"%s\": [", kinds[kind].name);
        for (int round = 0; round < rounds; round++) printf("%s%.1f", round ? ", " : "", samples[kind * rounds + round]);
        printf("]");
    }
    printf("}");
    free(samples);
}

static long at_case(long left, long which) {
    (void)left;
    measure((int)which);
    return 1;
}

static double once(take *kind) {
    now = kind;
    double start = clock_ns();
    leaf0();
    return clock_ns() - start;
}

static long at_first(long left, long kind) {
    (void)left;
    double first = once(kinds[kind].take);
    now = check;
    leaf0();
    double clock = once(nothing);
    printf("{\"frames\": %d, \"ns\": %.0f}", frames, first - clock);
    return 1;
}

static void *thread(void *depth) {
    last = at_first;
    outer0((long)depth, 1);
    return NULL;
}

static void *need(void *from, const char *name) {
    void *found = from ? dlsym(from, name) : NULL;
    if (!found) exit((fprintf(stderr, "%s: %s\n", name, dlerror()), 2));
    return found;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    void *probe = dlopen(argv[1], RTLD_NOW), *libunwind = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    kinds[1].take = (take *)need(probe, "probe_native");
    addresses = (take *)need(probe, "probe_native_addresses");
    if (libunwind) kinds[2].take = (take *)need(libunwind, "unw_backtrace");
    long depth = atol(argv[3]);
    rounds = atoi(argv[5]);
    inner = depth > INNER ? INNER : (int)depth - 1;
    for (long kind = 1; kind < KINDS; kind++)
        if (!strcmp(argv[4], kinds[kind].name)) {
            last = at_first;
            outer0(depth, kind);
            return 0;
        }
    if (!strcmp(argv[4], "thread")) {
        // The process has seen the code before; the thread is new.
        pthread_t started;
        printf("[");
        for (int i = 0; i < rounds; i++) {
            if (i) printf(", ");
            pthread_create(&started, NULL, thread, (void *)depth);
            pthread_join(started, NULL);
        }
        printf("]");
        return 0;
    }
    printf("[");
    for (int i = 0; i < CASES; i++) {
        if (i) printf(", ");
        last = at_case;
        outer0(cases[i].turn == paths || cases[i].turn == many_paths ? depth - inner : depth, i);
    }
    printf("]");
    return 0;
}
