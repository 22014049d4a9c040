// A driver that has the checkpoint functions alone. The file CHECKPOINT_STATES/PID has the state of a process, a number of
// CUprocessState; a process without a file does not use CUDA. The file PID.FUNCTION has a CUresult with which that function
// fails once. Each call that changes something is added to the file `calls`.

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401 };

static char path[4096];

static const char *file(int pid, const char *suffix) {
    snprintf(path, sizeof path, "%s/%d%s", getenv("CHECKPOINT_STATES"), pid, suffix);
    return path;
}

static int read_number(const char *name, int otherwise) {
    FILE *stream = fopen(name, "r");
    int number = otherwise;
    if (stream && fscanf(stream, "%d", &number) != 1) {
        number = otherwise;
    }
    if (stream) {
        fclose(stream);
    }
    return number;
}

static int change(int pid, const char *function, int from, int to) {
    char suffix[64];
    snprintf(path, sizeof path, "%s/calls", getenv("CHECKPOINT_STATES"));
    FILE *calls = fopen(path, "a");
    fprintf(calls, "%s %d\n", function, pid);
    fclose(calls);
    snprintf(suffix, sizeof suffix, ".%s", function);
    int error = read_number(file(pid, suffix), SUCCESS);
    if (error != SUCCESS) {
        unlink(file(pid, suffix));
        return error;
    }
    if (read_number(file(pid, ""), -1) != from) {
        return ILLEGAL_STATE;
    }
    FILE *stream = fopen(file(pid, ""), "w");
    fprintf(stream, "%d\n", to);
    fclose(stream);
    return SUCCESS;
}

// The arguments' reserved words must be zero.
static int is_zero(const unsigned *words, int first) {
    for (int word = first; word < 16; word++) {
        if (words[word] != 0) {
            return 0;
        }
    }
    return 1;
}

EXPORTED int cuInit(unsigned flags) { return flags == 0 ? read_number(file(0, ".init"), SUCCESS) : INVALID_VALUE; }

EXPORTED int cuCheckpointProcessGetState(int pid, int *state) {
    *state = read_number(file(pid, ""), -1);
    return *state < 0 ? NOT_INITIALIZED : SUCCESS;
}

EXPORTED int cuCheckpointProcessLock(int pid, const unsigned *arguments) {
    return arguments[0] > 0 && is_zero(arguments, 1) ? change(pid, "lock", RUNNING, LOCKED) : INVALID_VALUE;
}

EXPORTED int cuCheckpointProcessCheckpoint(int pid, const unsigned *arguments) {
    return is_zero(arguments, 0) ? change(pid, "save", LOCKED, CHECKPOINTED) : INVALID_VALUE;
}

EXPORTED int cuCheckpointProcessRestore(int pid, const unsigned *arguments) {
    return is_zero(arguments, 0) ? change(pid, "restore", CHECKPOINTED, LOCKED) : INVALID_VALUE;
}

EXPORTED int cuCheckpointProcessUnlock(int pid, const unsigned *arguments) {
    return is_zero(arguments, 0) ? change(pid, "unlock", LOCKED, RUNNING) : INVALID_VALUE;
}
