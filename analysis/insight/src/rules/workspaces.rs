//! Blocks that libraries keep as scratch memory, known by their size.

/// PyTorch gives each cuBLAS handle and stream one workspace and never takes it back. Sizes as in
/// aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on compute capability 9, else the `:4096:2:16:8` of cuBLAS's manual.
const CUBLAS_WORKSPACES: [u64; 2] = [32 << 20, (4096 * 2 + 16 * 8) << 10];

/// What cuBLASLt is given beside it, as seen with PyTorch 2.11: the same line allocates it right after, and it stays.
const CUBLASLT_WORKSPACE: u64 = 1 << 20;

/// Whether a request is as large as a workspace of cuBLASLt. Much else is: that it is one takes more.
pub fn is_lt_workspace_size(requested: u64) -> bool {
    requested == CUBLASLT_WORKSPACE
}

/// Whether a request is as large as a workspace. That it is one also takes outliving the step that allocated it.
pub fn is_workspace_size(requested: u64) -> bool {
    CUBLAS_WORKSPACES.contains(&requested)
}
