//! Identifies the owner of memory by the shared object that called CUDA.

use memtrace_trace::file::Frame;
use memtrace_trace::generated::is_inductor_file;

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

/// The name of PyTorch's own libraries as owners, among them that of its host allocator.
pub const PYTORCH: &str = "PyTorch, outside its caching allocator";

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
    rule("libc10_cuda", PYTORCH),
    rule("libtorch", PYTORCH),
    rule("libffi", "ctypes"),
    rule("libcudart", "CUDA runtime"),
    rule("libcuda.so", "CUDA driver"),
];

/// The name of the library at this path: by rule, else the Python package of an extension module whose own name begins
/// with an underscore (`_C.abi3.so`), else the file name. `unknown caller` for an empty path.
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
        .map(|rule| rule.name)
        .or_else(|| package(path).filter(|_| file.starts_with('_')))
        .unwrap_or(file)
}

/// The installed Python package that a file belongs to.
fn package(path: &str) -> Option<&str> {
    let inside = ["/site-packages/", "/dist-packages/"]
        .iter()
        .find_map(|folder| path.rsplit_once(folder).map(|(_, inside)| inside))?;
    inside.split_once('/').map(|(package, _)| package)
}

/// The error that a program sees when CUDA refuses memory to a library, by the library's name. The sources are the
/// libraries' headers: `cublasStatus_t`, `cudnnStatus_t`, `cufftResult`, `cusolverStatus_t`, `cusparseStatus_t`,
/// `curandStatus`, `ncclResult_t`, and the exceptions of the others.
static ALLOCATION_ERRORS: &[(&str, &str)] = &[
    ("NCCL", "ncclUnhandledCudaError"),
    ("cuBLAS", "CUBLAS_STATUS_ALLOC_FAILED or CUBLAS_STATUS_NOT_INITIALIZED"),
    ("cuDNN", "CUDNN_STATUS_ALLOC_FAILED or CUDNN_STATUS_INTERNAL_ERROR"),
    ("cuFFT", "CUFFT_ALLOC_FAILED"),
    ("cuSOLVER", "CUSOLVER_STATUS_ALLOC_FAILED"),
    ("cuSPARSE", "CUSPARSE_STATUS_ALLOC_FAILED"),
    ("cuRAND", "CURAND_STATUS_ALLOCATION_FAILED"),
    ("RMM", "std::bad_alloc: out_of_memory"),
    ("JAX", "RESOURCE_EXHAUSTED"),
    ("TensorFlow", "ResourceExhaustedError"),
    ("CuPy", "cupy.cuda.memory.OutOfMemoryError"),
    ("Numba", "CUDA_ERROR_OUT_OF_MEMORY"),
];

/// The error that a program sees when CUDA refuses memory to the library with this name. `None` if it is not known.
pub fn allocation_error(library: &str) -> Option<&'static str> {
    ALLOCATION_ERRORS.iter().find(|(name, _)| *name == library).map(|(_, error)| *error)
}

/// How a program limits the memory that a library takes from CUDA in advance, by the library's name. The sources are
/// the libraries' manuals.
static SHARES: &[(&str, &str)] = &[
    ("JAX", "XLA_PYTHON_CLIENT_MEM_FRACTION=.40, or XLA_PYTHON_CLIENT_PREALLOCATE=false"),
    ("TensorFlow", "tf.config.experimental.set_memory_growth(gpu, True)"),
    ("CuPy", "cupy.get_default_memory_pool().set_limit(fraction=0.4)"),
    ("RMM", "a smaller initial_pool_size"),
];

/// How a program gives the library with this name a smaller share of the device. `None` if it is not known.
pub fn smaller_share(library: &str) -> Option<&'static str> {
    SHARES.iter().find(|(name, _)| *name == library).map(|(_, setting)| *setting)
}

/// Whether a Python file belongs to an installed package or to Python itself.
pub fn is_library(filename: &str) -> bool {
    ["site-packages/", "dist-packages/", "/lib/python3", "/lib64/python3"].iter().any(|part| filename.contains(part))
        || filename.starts_with('<')
        || is_inductor_file(filename)
        || filename.starts_with("torch/")
}

/// Whether a frame is of the modules that stand in for kernels in a dry run (`simulate/python`). It is nobody's code:
/// their caller is what a GPU would have seen.
pub fn stands_in_for_kernel(frame: &Frame) -> bool {
    frame.filename.contains("/site-packages/simcuda/")
}

/// Packages that serve models. They fill the device with a cache of keys and values, and divide requests into batches
/// themselves.
const SERVING_ENGINES: [&str; 4] = ["vllm", "sglang", "lmdeploy", "tensorrt_llm"];

/// Whether a Python file belongs to an engine that serves models.
pub fn is_serving_engine(filename: &str) -> bool {
    package(filename).is_some_and(|package| SERVING_ENGINES.contains(&package))
}

/// Whether a frame belongs to how `nn.DataParallel` gathers the results of all devices on one.
pub fn is_data_parallel_gather(frame: &Frame) -> bool {
    frame.name.starts_with("gather") && frame.filename.ends_with("torch/nn/parallel/scatter_gather.py")
}

/// Whether a Python file belongs to PyTorch's schedules of pipeline stages.
pub fn is_pipelining(filename: &str) -> bool {
    filename.contains("torch/distributed/pipelining/")
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

    #[test]
    fn errors_are_those_of_known_libraries() {
        let names: Vec<&str> = LIBRARIES.iter().map(|rule| rule.name).collect();
        assert!(ALLOCATION_ERRORS.iter().all(|(library, _)| names.contains(library)));
        assert_eq!(allocation_error("JAX"), Some("RESOURCE_EXHAUSTED"));
        assert_eq!(allocation_error("a.out"), None);
    }

    #[test]
    fn engines_are_installed_packages() {
        assert!(is_serving_engine("/x/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py"));
        assert!(!is_serving_engine("/home/me/vllm/serve.py") && !is_serving_engine("/x/site-packages/torch/vllm.py"));
    }

    #[test]
    fn extension_modules_without_a_name_of_their_own_are_their_package() {
        assert_eq!(library_name("/x/site-packages/kvcached/_C.cpython-311-x86_64-linux-gnu.so"), "kvcached");
        assert_eq!(library_name("/usr/lib/python3/dist-packages/vmm/ops/_ops.abi3.so"), "vmm");
        assert_eq!(library_name("/x/site-packages/vllm/cumem_allocator.abi3.so"), "cumem_allocator.abi3.so");
        assert_eq!(library_name("/x/site-packages/_alone.abi3.so"), "_alone.abi3.so");
        assert_eq!(library_name("/home/me/build/_C.so"), "_C.so");
    }
}
