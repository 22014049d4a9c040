// The part of PyTorch 2.11 that memtrace uses: the symbols it looks up, the layouts it reads, the functions it
// interposes. The declarations follow c10/core/Device.h, c10/core/CachingDeviceAllocator.h and
// c10/cuda/CUDACachingAllocator.h. The allocator has a few virtual functions before the tested one, because memtrace
// must search for its vtable slot.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace c10 {

enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };

struct Device {
    DeviceType type;
    int8_t index;
};

struct GradMode {
    static bool is_enabled();
};

bool memoryProfilingEnabled();
void reportMemoryUsageToProfiler(void *ptr, int64_t size, size_t allocated, size_t reserved, Device device);

struct GatheredContext;

namespace cuda::CUDACachingAllocator {

struct TraceEntry {
    enum Action { ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC };
    Action action_;
    int8_t device_;
    size_t addr_;
    std::shared_ptr<GatheredContext> context_;
    void *stream_;
    size_t size_;
    std::pair<uint64_t, uint64_t> mempool_;
    uint64_t time_;
    std::string compile_context_;
    std::string user_metadata_;
};

using AllocatorTraceTracker = std::function<void(const TraceEntry &)>;

class CUDAAllocator {
  public:
    virtual ~CUDAAllocator() = default;
    virtual void *raw_alloc(size_t size) = 0;
    virtual void raw_delete(void *ptr) = 0;
    virtual void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) = 0;
};

extern std::atomic<CUDAAllocator *> allocator;

} // namespace cuda::CUDACachingAllocator
} // namespace c10
