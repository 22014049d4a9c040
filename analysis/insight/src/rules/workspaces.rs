//! Scratch memory that libraries keep, identified by its size.

/// PyTorch allocates one workspace per cuBLAS handle and stream and never frees it. The sizes are those of
/// aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on compute capability 9, else `:4096:2:16:8` as in the cuBLAS
/// manual.
const CUBLAS_WORKSPACES: [u64; 2] = [32 << 20, (4096 * 2 + 16 * 8) << 10];

/// The size of the cuBLASLt workspace beside it, as seen with PyTorch 2.11. The same line allocates it right after the
/// cuBLAS workspace, and it is never freed.
const CUBLASLT_WORKSPACE: u64 = 1 << 20;

/// Whether a request is as large as a cuBLASLt workspace. Many other blocks have this size, so more evidence is
/// required.
pub fn is_lt_workspace_size(requested: u64) -> bool {
    requested == CUBLASLT_WORKSPACE
}

/// Whether a request is as large as a cuBLAS workspace. A workspace also outlives the step that allocated it.
pub fn is_workspace_size(requested: u64) -> bool {
    CUBLAS_WORKSPACES.contains(&requested)
}
