//! The memory that cuDNN gets from its caller: the workspaces of operations, and the spaces of recurrent layers.
//!
//! cuDNN allocates next to nothing itself. It says how many bytes an operation needs, and PyTorch takes them from its
//! caching allocator. These sizes are no part of cuDNN's documentation. The models here are derived from measurements
//! on a GPU with compute capability 9.0 (`simulate/measurements`), and their tests compare them with all of these.

pub mod convolution;
pub mod recurrent;

#[cfg(test)]
mod measurements;

/// `cudnnDataType_t`: the size of an element in bytes. `None` for a type that the simulation does not know.
pub fn element_bytes(data_type: i32) -> Option<u64> {
    match data_type {
        1 | 10 => Some(8),
        0 | 4 => Some(4),
        2 | 9 => Some(2),
        3 | 7 | 11 | 12 | 13 => Some(1),
        _ => None,
    }
}

/// `CUDNN_DATA_BFLOAT16`
pub const BFLOAT16: i32 = 9;
