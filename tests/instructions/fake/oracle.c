// Counting, and the list of events that memtrace must have recorded: see oracle.h.
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

// Where Python calls from: how many frames there are, and the line of the innermost.
void oracle_at(int frames, int innermost) {
    depth = frames;
    line = innermost;
}

// Where the node that is being run was made; 0 frames: no node is.
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

// What runs between these two is counted, and written under this name.
void count_begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void count_end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
