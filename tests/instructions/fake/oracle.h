// The events that the stand-ins make, for comparison with the trace. Contains no code of memtrace.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Notes one event that memtrace must record: its source, action, address and size. For a block, `slack` is the number
// of bytes that rounding added to its size, or -1 where the source does not report it.
void oracle_event(const char *source, const char *action, uint64_t addr, uint64_t size, int64_t slack);

#ifdef __cplusplus
}
#endif
