//! Identifies the owner of memory by the shared object that called CUDA.

/// One rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LibraryRule {
    /// The start of the file's name, a part of it, or a folder in the path.
    pattern: &'static str,
    /// The library's name in reports.
    pub name: &'static str,
}

const fn rule(pattern: &'static str, name: &'static str) -> LibraryRule {
    LibraryRule { pattern, name }
}

/// The first rule that matches decides. Specific rules come before general ones.
static LIBRARIES: &[LibraryRule] = &[
    rule("libnccl", "NCCL"),
    rule("libnvshmem", "NVSHMEM"),
    rule("libcublas", "cuBLAS"),
    rule("libcudnn", "cuDNN"),
    rule("libcufft", "cuFFT"),
    rule("libcusolver", "cuSOLVER"),
    rule("libcusparse", "cuSPARSE"),
    rule("libcurand", "cuRAND"),
    rule("libnvinfer", "TensorRT"),
    rule("libcupti", "CUPTI"),
    rule("librmm", "RMM"),
    rule("libcudf", "cuDF"),
    rule("xla_extension", "JAX"),
    rule("xla_cuda", "JAX"),
    rule("jaxlib", "JAX"),
    rule("jax_plugins", "JAX"),
    rule("jax_cuda", "JAX"),
    rule("tensorflow", "TensorFlow"),
    rule("cupy", "CuPy"),
    rule("cupy_backends", "CuPy"),
    rule("numba", "Numba"),
    rule("triton", "Triton"),
    rule("deep_ep", "DeepEP"),
    rule("flash_attn", "flash-attn"),
    rule("libggml", "ggml"),
    rule("libllama", "llama.cpp"),
    rule("libc10_cuda", "PyTorch, outside its caching allocator"),
    rule("libtorch", "PyTorch, outside its caching allocator"),
    rule("libcudart", "CUDA runtime"),
    rule("libcuda.so", "CUDA driver"),
];

/// The name of the library at this path: by rule, else the file name. `unknown caller` for an empty path.
pub fn library_name(path: &str) -> &str {
    if path.is_empty() {
        return "unknown caller";
    }
    let file = path.rsplit('/').next().unwrap_or(path);
    LIBRARIES
        .iter()
        .find(|rule| {
            file.starts_with(rule.pattern)
                || path.contains(&format!("{}/", rule.pattern))
                || file.contains(rule.pattern)
        })
        .map_or(file, |rule| rule.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_recognized_by_their_files() {
        assert_eq!(library_name("/x/nvidia/nccl/lib/libnccl.so.2"), "NCCL");
        assert_eq!(library_name("/x/site-packages/cupy/_core/core.cpython-312-x86_64-linux-gnu.so"), "CuPy");
        assert_eq!(library_name("/x/cupy_backends/cuda/api/runtime.cpython-312-x86_64-linux-gnu.so"), "CuPy");
        assert_eq!(library_name("/x/torch/lib/libtorch_cuda.so"), "PyTorch, outside its caching allocator");
        assert_eq!(library_name("/home/me/a.out"), "a.out");
    }
}
