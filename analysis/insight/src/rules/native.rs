//! Native code that allocates on behalf of others: memory allocators, the CUDA libraries, functions that make empty
//! tensors, and their callers. Valgrind's massif calls them allocation functions (`--alloc-fn`). If no Python frame
//! shows who is responsible, the innermost frame outside this code is.

use memtrace_trace::file::Frame;

/// One rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AllocFnRule {
    /// The kind of code.
    pub name: &'static str,
    what: What,
}

/// The frames that a rule is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    /// Functions whose qualified name begins with this.
    Function(&'static str),
    /// Functions without a known source line, in an object whose file name begins with this.
    Object(&'static str),
}

use What::{Function, Object};

const fn rule(name: &'static str, what: What) -> AllocFnRule {
    AllocFnRule { name, what }
}

static ALLOC_FNS: &[AllocFnRule] = &[
    rule("CUDA driver", Object("libcuda.so")),
    rule("CUDA driver", Function("cuMem")),
    rule("CUDA runtime", Object("libcudart")),
    rule("CUDA runtime", Function("cudaMalloc")),
    rule("CUDA runtime", Function("cudaFree")),
    rule("CUDA runtime", Function("cudaHostAlloc")),
    rule("cudarc", Function("cudarc::")),
    rule("cudarc", Function("<cudarc::")),
    rule("memtrace", Object("libmemtrace")),
    rule("C library", Object("libc.so")),
    rule("C library", Object("ld-linux")),
    rule("C++ library", Object("libstdc++.so")),
    rule("C++ library", Function("operator new")),
    rule("C++ library", Function("operator delete")),
    rule("C++ library", Function("std::")),
    rule("C++ library", Function("__gnu_cxx::")),
    rule("PyTorch's caching allocator", Function("c10::cuda::CUDACachingAllocator")),
    rule("PyTorch's caching allocator", Function("c10::cuda::CUDAMallocAsync")),
    rule("PyTorch's caching allocator", Function("torch::cuda::CUDAPluggableAllocator")),
    rule("PyTorch's CPU allocator", Function("c10::alloc_cpu")),
    rule("PyTorch's CPU allocator", Function("c10::free_cpu")),
    rule("PyTorch's CPU allocator", Function("c10::DefaultCPUAllocator")),
    rule("PyTorch's pinned allocator", Function("at::CachingHostAllocator")),
    rule("PyTorch's pinned allocator", Function("at::cuda::CUDACachingHostAllocator")),
    rule("PyTorch's allocators", Function("c10::Allocator")),
    rule("PyTorch's allocators", Function("c10::DataPtr")),
    rule("PyTorch's storages", Function("c10::StorageImpl")),
    rule("PyTorch's storages", Function("c10::Storage")),
    rule("PyTorch's storages", Function("c10::make_storage_impl")),
    rule("PyTorch's tensors", Function("c10::TensorImpl")),
    rule("PyTorch's tensors", Function("c10::intrusive_ptr")),
    rule("PyTorch's tensors", Function("c10::make_intrusive")),
    rule("PyTorch's tensors", Function("at::TensorBase")),
    rule("PyTorch's tensors", Function("at::Tensor::~")),
    rule("empty tensors", Function("at::detail::empty")),
    rule("empty tensors", Function("at::detail::_empty")),
    rule("empty tensors", Function("at::native::empty")),
    rule("empty tensors", Function("at::native::resize_")),
    rule("empty tensors", Function("at::native::maybe_resize_storage")),
    rule("empty tensors", Function("at::empty")),
    rule("empty tensors", Function("at::_ops::empty")),
    rule("empty tensors", Function("at::_ops::resize_")),
    rule("empty tensors", Function("at::wrapper_CUDA__empty")),
    rule("empty tensors", Function("at::wrapper_CUDA_memory_format_empty")),
    rule("empty tensors", Function("at::wrapper_CPU__empty")),
    rule("empty tensors", Function("at::wrapper_CPU_memory_format_empty")),
    rule("outputs of operators", Function("at::create_out")),
    rule("outputs of operators", Function("at::TensorIteratorBase")),
    rule("outputs of operators", Function("at::meta::")),
    rule("outputs of operators", Function("at::structured_")),
    rule("PyTorch's dispatcher", Function("c10::Dispatcher")),
    rule("PyTorch's dispatcher", Function("c10::impl::")),
    rule("PyTorch's dispatcher", Function("c10::KernelFunction")),
    rule("PyTorch's dispatcher", Function("c10::OperatorHandle")),
    rule("PyTorch's dispatcher", Function("c10::TypedOperatorHandle")),
];

/// The rule by which a native frame only passes on an allocation. `None` for frames that can be responsible, and for
/// Python frames.
pub fn alloc_fn_rule(frame: &Frame) -> Option<&'static AllocFnRule> {
    if !frame.native {
        return None;
    }
    ALLOC_FNS.iter().find(|rule| match rule.what {
        Function(start) => frame.qualname.starts_with(start),
        Object(start) => {
            frame.line == 0 && frame.filename.rsplit('/').next().is_some_and(|file| file.starts_with(start))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule_of(qualname: &str, filename: &str) -> Option<&'static str> {
        let frame = Frame { qualname: qualname.into(), filename: filename.into(), native: true, ..Frame::default() };
        alloc_fn_rule(&frame).map(|rule| rule.name)
    }

    #[test]
    fn allocators_are_not_responsible() {
        let torch = "/x/torch/lib/libtorch_cuda.so";
        assert_eq!(
            rule_of("c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc", torch),
            rule_of("c10::cuda::CUDACachingAllocator::raw_alloc", "")
        );
        assert_eq!(rule_of("at::detail::empty_cuda", torch), Some("empty tensors"));
        assert_eq!(rule_of("at::native::mm_out_cuda", torch), None);
        assert_eq!(rule_of("libcuda.so.580.1+0x1234", "/usr/lib/libcuda.so.580.1"), Some("CUDA driver"));
        assert_eq!(rule_of("cudarc::driver::safe::core::CudaStream::alloc_zeros", "/x/core.rs"), Some("cudarc"));
        assert_eq!(rule_of("driver::weights", "/x/driver.rs"), None);
        assert_eq!(rule_of("ncclCommInitRank", "/x/nccl/lib/libnccl.so.2"), None);
        let python = Frame { qualname: "std::".into(), ..Frame::default() };
        assert_eq!(alloc_fn_rule(&python), None);
    }
}
