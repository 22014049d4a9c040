// libc10_cuda.so: the caching allocator's calls to its trackers and to the reporter, in PyTorch 2.11's order
// (c10/cuda/CUDACachingAllocator.cpp: alloc_found_block, free, free_block).
#include "c10.h"
#include "oracle.h"

#include <cstdio>
#include <cstdlib>
#include <vector>
#include <x86intrin.h>

extern "C" int cudaMalloc(void **pointer, size_t size);

namespace c10::cuda::CUDACachingAllocator {
namespace Native {

class NativeCachingAllocator : public CUDAAllocator {
    static constexpr size_t SEGMENT = 20 << 20, ROUND = 512;
    static constexpr Device device{DeviceType::CUDA, 0};
    std::vector<AllocatorTraceTracker> trackers;
    char *segment = nullptr;
    size_t requested = 0;

    void record_trace(TraceEntry::Action action, const char *name, void *ptr, size_t size, int64_t slack = -1) {
        if (trackers.empty())
            return;
        TraceEntry entry{action, device.index, reinterpret_cast<size_t>(ptr), nullptr, nullptr, size, {0, 0}, __rdtsc(), "", ""};
        for (const auto &tracker : trackers)
            tracker(entry);
        oracle_event("torch", name, entry.addr_, size, slack);
    }

    size_t rounded() const { return (requested + ROUND - 1) / ROUND * ROUND; }

  public:
    void *raw_alloc(size_t size) override {
        if (!segment) {
            void *fresh = nullptr;
            if (cudaMalloc(&fresh, SEGMENT) != 0) {
                std::fputs("c10_cuda: no segment\n", stderr);
                std::abort();
            }
            // memtrace records the driver's call before the runtime call that made it.
            oracle_event("driver", "alloc", reinterpret_cast<uint64_t>(fresh), SEGMENT, -1);
            oracle_event("runtime", "alloc", reinterpret_cast<uint64_t>(fresh), SEGMENT, -1);
            segment = static_cast<char *>(fresh);
            record_trace(TraceEntry::SEGMENT_ALLOC, "segment_alloc", segment, SEGMENT);
        }
        requested = size;
        record_trace(TraceEntry::ALLOC, "alloc", segment, size, static_cast<int64_t>(rounded() - size));
        reportMemoryUsageToProfiler(segment, static_cast<int64_t>(rounded()), rounded(), SEGMENT, device);
        return segment;
    }

    void raw_delete(void *ptr) override {
        record_trace(TraceEntry::FREE_REQUESTED, "free_requested", ptr, requested);
        record_trace(TraceEntry::FREE_COMPLETED, "free_completed", ptr, requested);
        reportMemoryUsageToProfiler(ptr, -static_cast<int64_t>(rounded()), 0, SEGMENT, device);
    }

    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override { trackers.push_back(std::move(tracker)); }
};

NativeCachingAllocator native;

} // namespace Native

std::atomic<CUDAAllocator *> allocator{&Native::native};

} // namespace c10::cuda::CUDACachingAllocator

using c10::cuda::CUDACachingAllocator::allocator;

static void *block;

// Allocates one tensor; frees it; allocates and frees `count` tensors.
extern "C" void cuda_alloc(int size) { block = allocator.load()->raw_alloc(static_cast<size_t>(size)); }
extern "C" void cuda_free() { allocator.load()->raw_delete(block); }
extern "C" void cuda_pairs(int count) {
    for (int i = 0; i < count; i++) {
        cuda_alloc(1000 + i % 5000);
        cuda_free();
    }
}
