// libtorch_cuda.so: the class from whose vtable memtrace learns the slot of `attachAllocatorTraceTracker`
// (torch/csrc/cuda/CUDAPluggableAllocator.h).
#include "c10.h"

namespace torch::cuda::CUDAPluggableAllocator {

struct CUDAPluggableAllocator : c10::cuda::CUDACachingAllocator::CUDAAllocator {
    void *raw_alloc(size_t size) override;
    void raw_delete(void *ptr) override;
    void attachAllocatorTraceTracker(c10::cuda::CUDACachingAllocator::AllocatorTraceTracker tracker) override;
};

void *CUDAPluggableAllocator::raw_alloc(size_t) { return nullptr; }
void CUDAPluggableAllocator::raw_delete(void *) {}
void CUDAPluggableAllocator::attachAllocatorTraceTracker(c10::cuda::CUDACachingAllocator::AllocatorTraceTracker) {}

} // namespace torch::cuda::CUDAPluggableAllocator
