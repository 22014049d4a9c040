// Marks the instructions that callgrind counts, and writes the list of events that memtrace must record. oracle.h has
// the interface.
#include "oracle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <valgrind/callgrind.h>

enum { MOST = 1 << 14 };

static struct {
    const char *source, *action;
    uint64_t addr, size;
    int64_t slack;
    int depth, line, forward_depth, forward_line;
} events[MOST];
static int count, depth, line, forward_depth, forward_line;

// Sets the Python stack of the next events: the number of frames and the line of the innermost one.
void oracle_at(int frames, int innermost) {
    depth = frames;
    line = innermost;
}

// Sets the forward stack of the autograd node that runs: the number of frames and the innermost line. 0 frames mean no
// node.
void oracle_node(int frames, int innermost) {
    forward_depth = frames;
    forward_line = innermost;
}

void oracle_event(const char *source, const char *action, uint64_t addr, uint64_t size, int64_t slack) {
    if (count == MOST) {
        fputs("oracle: more events than there is room for\n", stderr);
        abort();
    }
    events[count].source = source, events[count].action = action;
    events[count].addr = addr, events[count].size = size, events[count].slack = slack;
    events[count].depth = depth, events[count].line = line;
    events[count].forward_depth = forward_depth, events[count].forward_line = forward_line;
    count++;
}

int oracle_write(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file)
        return -1;
    for (int i = 0; i < count; i++)
        fprintf(file, "%s %s %llu %llu %lld %d %d %d %d\n", events[i].source, events[i].action,
                (unsigned long long)events[i].addr, (unsigned long long)events[i].size, (long long)events[i].slack,
                events[i].depth, events[i].line, events[i].forward_depth, events[i].forward_line);
    return fclose(file);
}

// Callgrind counts the code between count_begin and count_end, and writes the counts under the given name.
void count_begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void count_end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
