// Allocations where a stack is not a plain chain of calls: threads, after and inside exception handlers, in a
// destructor while an exception unwinds the stack, callbacks of the C library, signal handlers on either stack.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

extern "C" int cudaMalloc(void **, size_t);
#define ALONE __attribute__((noinline, noclone))

static volatile int failed;

ALONE static void allocate(size_t size) {
    void *memory;
    if (cudaMalloc(&memory, size) != 0) failed = failed + 1;
}

struct AllocatesAtTheEnd {
    size_t size;
    ~AllocatesAtTheEnd() { allocate(size); }
};

ALONE static void throws(int depth, size_t size) {
    AllocatesAtTheEnd last{size + 100 + depth};
    if (depth == 0) throw std::runtime_error(std::string("thrown at ") + std::to_string(size));
    throws(depth - 1, size);
    failed = failed + 1;
}

ALONE static void catches(size_t size) {
    try {
        throws(5, size);
    } catch (const std::exception &error) {
        allocate(size + 200 + (error.what()[0] != 't'));
    }
    allocate(size + 300);
}

static size_t next_size;

static int compare(const void *a, const void *b) {
    allocate(next_size++);
    return *static_cast<const int *>(a) - *static_cast<const int *>(b);
}

ALONE static void sorts(size_t size) {
    int numbers[] = {5, 2, 8, 1, 9, 3};
    next_size = size + 400;
    qsort(numbers, 6, sizeof numbers[0], compare);
}

static volatile size_t signal_size;

static void handler(int) { allocate(signal_size); }

ALONE static void raises(int signal, size_t size) {
    signal_size = size;
    raise(signal);
    signal_size = size + 1;
    // The signal interrupts the instruction itself, not a call.
    if (signal == SIGILL) return;
    __asm__ volatile("" ::: "memory");
}

static void skipping_handler(int, siginfo_t *, void *context) {
    allocate(signal_size);
    static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP] += 2; // ud2
}

ALONE static int faults(size_t size) {
    signal_size = size;
    __asm__ volatile("ud2" ::: "memory");
    return failed;
}

template <typename F> ALONE static void through_templates(F function, int depth) {
    if (depth > 0) return through_templates<std::function<void()>>([=] { function(); failed = failed + 0; }, depth - 1);
    function();
    failed = failed + 0;
}

ALONE static void everything(size_t size) {
    catches(size);
    sorts(size);
    through_templates([=] { allocate(size + 500); }, 0);
    through_templates([=] { allocate(size + 501); }, 2);
}

static void install(int signal, int flags, bool skips = false) {
    struct sigaction action = {};
    if (skips) action.sa_sigaction = skipping_handler; else action.sa_handler = handler;
    action.sa_flags = flags | (skips ? SA_SIGINFO : 0);
    sigaction(signal, &action, nullptr);
}

ALONE static void signals(size_t size) {
    std::vector<char> memory(256 << 10);
    stack_t stack = {};
    stack.ss_sp = memory.data();
    stack.ss_size = memory.size();
    sigaltstack(&stack, nullptr);
    raises(SIGUSR1, size + 600);
    raises(SIGUSR2, size + 610);
    faults(size + 620);
    install(SIGILL, SA_ONSTACK, true);
    faults(size + 630);
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, nullptr);
}

int main() {
    install(SIGUSR1, 0);
    install(SIGUSR2, SA_ONSTACK);
    install(SIGILL, 0, true);
    everything(1 << 20);
    signals(1 << 20);
    std::thread first([] { everything(2 << 20); });
    first.join();
    std::vector<std::thread> threads;
    for (size_t i = 3; i < 6; i++) {
        threads.emplace_back([=] { catches(i << 20); });
    }
    for (auto &thread : threads) thread.join();
    std::printf("failed: %d\n", failed);
    return failed != 0;
}
