//! The device memory that CUDA and its libraries use beyond the allocations of programs: the one place for these
//! figures.
//!
//! Sources, all with PyTorch 2.11 and CUDA 13.0:
//!
//! - H100: `measurements/outside_pytorch.jsonl`, and what a tracer saw of the same sequence. Figures without a name are
//!   from there.
//! - H100, programs: the used memory at the end of programs (docs/dev/dry-run/h100).
//! - H200: the used memory after each library's first use. It agrees, unless a comment says something else.
//!
//! The driver takes memory for kernels when the first kernel of a module is used (lazy loading, the default), or when
//! the module is loaded (`CUDA_MODULE_LOADING=EAGER`). No call allocates it, so only the used memory of the device
//! shows it. Libraries that allocate by calls of the driver use the same calls here.

use crate::config::MIB;

/// Kernels that take device memory at their first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Kernels {
    /// Of PyTorch itself (`libtorch_cuda.so`).
    Torch,
    /// Of any other object that launches kernels through the runtime.
    Other,
    /// Of cuBLAS.
    Cublas,
    /// Forward passes of convolutions of cuDNN.
    CudnnForward,
    /// Attention of cuDNN.
    CudnnAttention,
    /// Backward passes of convolutions of cuDNN.
    CudnnBackward,
    /// Forward passes of recurrent layers of cuDNN.
    CudnnRecurrent,
    /// Backward passes of recurrent layers of cuDNN.
    CudnnRecurrentBackward,
    /// Of cuFFT.
    Cufft,
    /// Of cuSOLVER.
    Cusolver,
    /// Of NCCL with one rank.
    Nccl,
    /// Of NCCL with several ranks, on all ranks but the first.
    NcclOtherRank,
    /// Of NCCL with several ranks, on the first rank.
    NcclFirstRank,
    /// Of NCCL with several ranks that PCI Express connects.
    NcclPciExpress,
}

impl Kernels {
    const ALL: [Kernels; 14] = [
        Kernels::Torch,
        Kernels::Other,
        Kernels::Cublas,
        Kernels::CudnnForward,
        Kernels::CudnnAttention,
        Kernels::CudnnBackward,
        Kernels::CudnnRecurrent,
        Kernels::CudnnRecurrentBackward,
        Kernels::Cufft,
        Kernels::Cusolver,
        Kernels::Nccl,
        Kernels::NcclOtherRank,
        Kernels::NcclFirstRank,
        Kernels::NcclPciExpress,
    ];

    /// The kernels with this number, as in [`crate::bridge::Bridge::load`].
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// The kernels that an object with this path launches through the runtime.
    pub fn of_object(path: &str) -> Self {
        if path.rsplit('/').next().is_some_and(|name| name.starts_with("libtorch_cuda")) {
            Kernels::Torch
        } else {
            Kernels::Other
        }
    }

    /// The kernels that a function of a library launches. `None` if it launches none.
    pub fn of_function(name: &str) -> Option<Self> {
        let computes = |words: &[&str]| words.iter().any(|word| name.contains(word));
        match name {
            _ if name.starts_with("cublas") => {
                computes(&["gemm", "Gemm", "Matmul", "gemv", "trsm", "getr", "geqrf", "dot", "Dot"])
                    .then_some(Kernels::Cublas)
            }
            _ if name.starts_with("cusolverDn") => {
                let prepares = computes(&["bufferSize", "Create", "Destroy", "Set", "Get"]);
                (!prepares).then_some(Kernels::Cusolver)
            }
            _ if name.starts_with("cudnnRNNBackward") => Some(Kernels::CudnnRecurrentBackward),
            _ => name.starts_with("cudnnRNN").then_some(Kernels::CudnnRecurrent),
        }
    }

    /// Whether these kernels share their memory with others: of several that are used, only those that take most count.
    /// The kernels of cuDNN do: whichever of convolution, attention and LSTM came first, the others then took 2 MiB at
    /// most.
    pub fn shares_with(self, other: Kernels) -> bool {
        self == other || self.is_cudnn() && other.is_cudnn() || self.is_nccl() && other.is_nccl()
    }

    /// The kernels of a rank of a communicator of NCCL. `version` is NCCL's.
    pub fn of_rank(rank: u32, size: u32, has_nvlink: bool, version: i32) -> Self {
        match (size, rank) {
            (0 | 1, _) => Kernels::Nccl,
            // With NCCL 2.21, logs of vLLM 0.8 on cards without NVLink have 0.20 to 0.43 GiB outside PyTorch in all.
            _ if !has_nvlink && version < 22200 => Kernels::Nccl,
            _ if !has_nvlink => Kernels::NcclPciExpress,
            (_, 0) => Kernels::NcclFirstRank,
            _ => Kernels::NcclOtherRank,
        }
    }

    fn is_nccl(self) -> bool {
        matches!(self, Kernels::Nccl | Kernels::NcclOtherRank | Kernels::NcclFirstRank | Kernels::NcclPciExpress)
    }

    fn is_cudnn(self) -> bool {
        matches!(
            self,
            Kernels::CudnnForward
                | Kernels::CudnnAttention
                | Kernels::CudnnBackward
                | Kernels::CudnnRecurrent
                | Kernels::CudnnRecurrentBackward
        )
    }

    /// The device memory that the kernels take at their first use with lazy loading, in bytes.
    pub fn lazy_bytes(self) -> u64 {
        match self {
            // 21 of 28 operators of PyTorch's own took 92 MiB as the first one, the others 2 MiB, and `add_` then 90.
            Kernels::Torch => 92 * MIB,
            // The least that a first kernel took.
            Kernels::Other => 2 * MIB,
            // The memory of the first product belongs to a handle.
            Kernels::Cublas => 0,
            Kernels::CudnnForward | Kernels::CudnnRecurrent => 10 * MIB,
            // With the backward passes. Programs with an LSTM or a GRU: as much.
            Kernels::CudnnAttention | Kernels::CudnnRecurrentBackward => 18 * MIB,
            Kernels::CudnnBackward => 20 * MIB,
            Kernels::Cufft => 8 * MIB,
            // The memory of the first decomposition belongs to a handle.
            Kernels::Cusolver => 0,
            // 494 MiB with the first communicator of one rank, of which 388 MiB are buffers.
            Kernels::Nccl => 106 * MIB,
            // Two programs with two ranks: what stays after they destroyed their communicators, 298 and 294 MiB, and
            // 586 and 582.
            Kernels::NcclOtherRank => 296 * MIB,
            Kernels::NcclFirstRank => 584 * MIB,
            // NCCL 2.28.9 on two H200 with NCCL_P2P_DISABLE=1: 384 MiB with the first communicator, of which 30 are
            // buffers.
            Kernels::NcclPciExpress => 354 * MIB,
        }
    }

    /// The device memory that the kernels take with `CUDA_MODULE_LOADING=EAGER`, in bytes: those of PyTorch with the
    /// context, those of libraries at their first use.
    pub fn eager_bytes(self) -> u64 {
        match self {
            // 1,258.8 MiB after the initialization, instead of 526.8.
            Kernels::Torch => 732 * MIB,
            // 482 MiB with the first product, of which 66 are a handle's. Products of other types then took 92 more in
            // all.
            Kernels::Cublas => 416 * MIB,
            // H200: 242 MiB.
            Kernels::CudnnForward | Kernels::CudnnAttention | Kernels::CudnnBackward => 204 * MIB,
            // 104 MiB more than those of convolutions.
            Kernels::CudnnRecurrent | Kernels::CudnnRecurrentBackward => 308 * MIB,
            // 206 MiB with the first decomposition, of which 96 MiB are a handle's.
            Kernels::Cusolver => 110 * MIB,
            // The same; NCCL on an H200: 6 MiB less.
            Kernels::Other
            | Kernels::Cufft
            | Kernels::Nccl
            | Kernels::NcclOtherRank
            | Kernels::NcclFirstRank
            | Kernels::NcclPciExpress => self.lazy_bytes(),
        }
    }
}

/// The allocations of a handle of cuBLAS by `cuMemAlloc`, in bytes. PyTorch makes one for each thread that multiplies
/// matrices, so training has two: its backward pass runs in a thread of its own.
pub const CUBLAS_HANDLE_BYTES: [u64; 3] = [64 * MIB, 128 << 10, 1 << 10];

/// The allocation of a handle of cuSOLVER by `cuMemAlloc`, in bytes, beside the handle of cuBLAS that it makes.
pub const CUSOLVER_HANDLE_BYTES: u64 = 32 * MIB;

/// The share of a stream in the memory that streams take, in bytes. PyTorch makes 128 streams with the first that a
/// program asks for, which took 70 MiB.
pub const STREAM_BYTES: u64 = 70 * MIB / 128;

/// The number of buffers of a communicator of NCCL, each of [`NCCL_BUFFER_BYTES`], by `cuMemCreate`. One rank made 194
/// on an H100, 195 on an H200. More ranks were not traced and are assumed to make as many.
pub const NCCL_BUFFERS: u64 = 194;

/// The number of buffers of a communicator of several ranks without NVLink. With NCCL_P2P_DISABLE=1 on two H200, a
/// second and a third communicator took 30 and 28 MiB.
pub const NCCL_BUFFERS_WITHOUT_NVLINK: u64 = 15;

/// The size of a buffer of NCCL in bytes.
pub const NCCL_BUFFER_BYTES: u64 = 2 * MIB;

/// The part of a process's memory that NVML attributes to no process, in bytes.
pub const UNATTRIBUTED_BYTES: u64 = 9_240_576;

/// The stack of a thread before a program sets a limit, in bytes. The memory for it is part of the context.
pub const DEFAULT_STACK_BYTES: u64 = 1024;

/// The local memory that a larger stack takes for all threads that a device can hold, in bytes. With 4 KiB on an H100,
/// the used memory grew by 792 MiB, with 16 KiB by 3,960 MiB: exactly this. Limits of the heap and of `printf` took
/// nothing.
pub fn local_memory_bytes(stack_bytes: u64, multiprocessors: u32, threads_of_multiprocessor: u32) -> u64 {
    let threads = u64::from(multiprocessors) * u64::from(threads_of_multiprocessor);
    stack_bytes.saturating_sub(DEFAULT_STACK_BYTES).saturating_mul(threads)
}

/// The size in bytes of a module's image: an ELF file, or NVIDIA's container of several. 0 for other images, as text.
///
/// # Safety
/// `image` is null or an image as `cuModuleLoadData` takes it: text with a NUL, or one of these with its whole header.
pub unsafe fn image_bytes(image: *const u8) -> u64 {
    /// Reads a little-endian number of `N` bytes.
    ///
    /// # Safety
    /// The bytes can be read.
    unsafe fn number<const N: usize>(image: *const u8, offset: usize) -> u64 {
        // SAFETY: the caller guarantees that the bytes can be read.
        let bytes = unsafe { image.add(offset).cast::<[u8; N]>().read() };
        bytes.iter().rfold(0, |number, byte| number << 8 | u64::from(*byte))
    }
    /// Whether an image begins so. Reads no byte after one that differs, which can be the last of a text.
    ///
    /// # Safety
    /// `image` is text with a NUL, or longer than `beginning`.
    unsafe fn begins(image: *const u8, beginning: &[u8]) -> bool {
        // SAFETY: the caller guarantees that the next byte can be read after one that is not NUL.
        beginning.iter().enumerate().all(|(n, byte)| unsafe { *image.add(n) } == *byte)
    }
    if image.is_null() {
        return 0;
    }
    // SAFETY: an image that begins like one of these has its whole header, and others are text with a NUL.
    unsafe {
        if begins(image, b"\x7fELF") {
            let end =
                |offset, size, count| number::<8>(image, offset) + number::<2>(image, size) * number::<2>(image, count);
            end(40, 58, 60).max(end(32, 54, 56))
        } else if begins(image, &0xba55_ed50_u32.to_le_bytes()) {
            number::<2>(image, 6) + number::<8>(image, 8)
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_kernels_are_their_places() {
        for (number, kernels) in Kernels::ALL.into_iter().enumerate() {
            assert_eq!(Kernels::from_number(number as u32), Some(kernels));
            assert_eq!(kernels as usize, number);
            assert!(kernels.eager_bytes() >= kernels.lazy_bytes(), "eager loading loads what lazy loading does");
        }
        assert_eq!(Kernels::from_number(Kernels::ALL.len() as u32), None);
    }

    #[test]
    fn kernels_of_ranks() {
        assert_eq!(Kernels::of_rank(0, 1, false, 22809), Kernels::Nccl);
        assert_eq!(Kernels::of_rank(0, 2, true, 22809), Kernels::NcclFirstRank);
        assert_eq!(Kernels::of_rank(1, 2, true, 22809), Kernels::NcclOtherRank);
        assert_eq!(Kernels::of_rank(0, 2, false, 22809), Kernels::NcclPciExpress);
        assert_eq!(Kernels::of_rank(0, 2, false, 22105), Kernels::Nccl);
    }

    #[test]
    fn kernels_of_functions_and_objects() {
        assert_eq!(Kernels::of_function("cublasGemmEx"), Some(Kernels::Cublas));
        assert_eq!(Kernels::of_function("cublasSgemm_v2"), Some(Kernels::Cublas));
        assert_eq!(Kernels::of_function("cublasLtMatmul"), Some(Kernels::Cublas));
        assert_eq!(Kernels::of_function("cublasSetWorkspace_v2"), None);
        assert_eq!(Kernels::of_function("cudnnRNNForward"), Some(Kernels::CudnnRecurrent));
        assert_eq!(Kernels::of_function("cudnnRNNBackwardWeights_v8"), Some(Kernels::CudnnRecurrentBackward));
        assert_eq!(Kernels::of_function("cusolverDnSgesvd"), Some(Kernels::Cusolver));
        assert_eq!(Kernels::of_function("cusolverDnSgesvd_bufferSize"), None);
        assert_eq!(Kernels::of_object("/venv/torch/lib/libtorch_cuda.so"), Kernels::Torch);
        assert_eq!(Kernels::of_object("/venv/torchvision/_C.so"), Kernels::Other);
    }

    #[test]
    fn local_memory_of_an_h200() {
        assert_eq!(local_memory_bytes(16 << 10, 132, 2048), 3960 * MIB);
        assert_eq!(local_memory_bytes(512, 132, 2048), 0);
    }

    #[test]
    fn sizes_of_images() {
        let mut elf = [0u8; 64];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[40..48].copy_from_slice(&5000u64.to_le_bytes());
        elf[58..60].copy_from_slice(&64u16.to_le_bytes());
        elf[60..62].copy_from_slice(&10u16.to_le_bytes());
        let mut container = [0u8; 16];
        container[..4].copy_from_slice(&0xba55_ed50_u32.to_le_bytes());
        container[6..8].copy_from_slice(&16u16.to_le_bytes());
        container[8..].copy_from_slice(&777u64.to_le_bytes());
        // SAFETY: each is an image with its whole header, or a text with a NUL.
        unsafe {
            assert_eq!(image_bytes(elf.as_ptr()), 5640);
            assert_eq!(image_bytes(container.as_ptr()), 793);
            assert_eq!(image_bytes(c".version 8.0".as_ptr().cast()), 0);
            assert_eq!(image_bytes(c"".as_ptr().cast()), 0);
            assert_eq!(image_bytes(std::ptr::null()), 0);
        }
    }
}
