// Allocates and frees, and ends at once. `brief COUNT`: so many pairs. `brief wait COUNT`: when a line arrives on stdin.
// `brief signals COUNT`: and a pair in each of so many signal handlers, which interrupt the others at any place; prints
// the number of all pairs.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static volatile sig_atomic_t handled, failed;

static int pair(void) {
    void *memory = NULL;
    return cudaMalloc(&memory, 4096) == 0 && cudaFree(memory) == 0;
}

static void handler(int signal) {
    (void)signal;
    if (!pair()) failed = 1;
    handled++;
}

int main(int argc, char **argv) {
    const char *mode = argc > 2 ? argv[1] : "";
    long count = strtol(argv[argc - 1], NULL, 10), pairs = 0;
    if (strcmp(mode, "wait") == 0) {
        printf("ready\n");
        fflush(stdout);
        if (getchar() == EOF) return 70;
    }
    if (strcmp(mode, "signals") == 0) {
        struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
        struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
        if (sigaction(SIGALRM, &action, NULL) != 0 || setitimer(ITIMER_REAL, &often, NULL) != 0) return 71;
        while (handled < count) {
            if (!pair()) return 72;
            pairs++;
        }
        // A signal that is pending arrives before this call returns.
        setitimer(ITIMER_REAL, &never, NULL);
        printf("%ld\n", pairs + handled);
        return failed ? 73 : 0;
    }
    for (; pairs < count; pairs++) {
        if (!pair()) return 74;
    }
    printf("fine\n");
    return 0;
}
