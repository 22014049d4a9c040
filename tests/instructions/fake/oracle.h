// What the stand-ins did, told to whoever compares it with the trace. Nothing of memtrace's is in here.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Notes one event that memtrace must have recorded: who told it, what happened, to which memory, and for a block how many
// bytes its rounded size has more (-1: not said).
void oracle_event(const char *source, const char *action, uint64_t addr, uint64_t size, int64_t slack);

#ifdef __cplusplus
}
#endif
