// libc10.so: the profiler's reporter, the grad mode, the CPU allocator.
#include "c10.h"
#include "oracle.h"

namespace c10 {

static thread_local bool grad_mode = true;

bool GradMode::is_enabled() { return grad_mode; }

bool memoryProfilingEnabled() { return false; }

void reportMemoryUsageToProfiler(void *, int64_t, size_t, size_t, Device) {}

} // namespace c10

// Allocates and frees CPU tensors. The reports follow ProfiledCPUMemoryReporter in c10/core/CPUAllocator.cpp.
extern "C" void cpu_pairs(int count) {
    static char storage[4096];
    constexpr c10::Device cpu{c10::DeviceType::CPU, -1};
    for (int i = 0; i < count; i++) {
        auto size = static_cast<int64_t>(64 + i % 1024);
        if (c10::memoryProfilingEnabled()) {
            c10::reportMemoryUsageToProfiler(storage, size, size, 0, cpu);
            oracle_event("cpu", "alloc", reinterpret_cast<uint64_t>(storage), size, -1);
        }
        if (c10::memoryProfilingEnabled()) {
            c10::reportMemoryUsageToProfiler(storage, -size, 0, 0, cpu);
            oracle_event("cpu", "free_completed", reinterpret_cast<uint64_t>(storage), size, -1);
        }
    }
}
