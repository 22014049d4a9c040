//! The structures of CUDA's C interface that the simulation reads or fills, written by hand.
//!
//! The names of fields that are not used are our own. Assertions at the end of the file fix the sizes.

use std::ffi::{c_char, c_void};

/// `dim3`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Dim3 {
    /// x, y, z
    pub xyz: [u32; 3],
}

/// `cudaExtent`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Extent3 {
    /// Elements, or bytes for `cudaMalloc3D`.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Slices.
    pub depth: usize,
}

/// `cudaPitchedPtr`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PitchedPtr {
    /// The memory.
    pub ptr: *mut c_void,
    /// The distance between rows in bytes.
    pub pitch: usize,
    /// The logical width.
    pub xsize: usize,
    /// The logical height.
    pub ysize: usize,
}

/// `cudaChannelFormatDesc`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ChannelDesc {
    /// The bits of each channel.
    pub bits: [i32; 4],
    /// 0 signed, 1 unsigned, 2 float.
    pub kind: i32,
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrayDescriptor {
    /// Elements in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `CUarray_format`
    pub format: u32,
    /// The number of channels.
    pub channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Array3dDescriptor {
    /// Elements in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Slices.
    pub depth: usize,
    /// `CUarray_format`
    pub format: u32,
    /// The number of channels.
    pub channels: u32,
    /// The creation flags.
    pub flags: u32,
}

/// `CUmemLocation`, `cudaMemLocation`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Location {
    /// 1 device, 2 host, 3 host NUMA node.
    pub kind: i32,
    /// The device ordinal or NUMA node.
    pub id: i32,
}

/// `CUmemAllocationProp`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AllocationProp {
    /// 1 pinned.
    pub kind: i32,
    /// Bit 0 file descriptor, bit 3 fabric.
    pub handle_types: u32,
    /// Where the memory is.
    pub location: Location,
    /// Used on Windows only.
    pub win32: *mut c_void,
    /// Compression and other flags.
    pub flags: [u8; 8],
}

/// `CUmemPoolProps`, `cudaMemPoolProps`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PoolProps {
    /// 1 pinned.
    pub kind: i32,
    /// The types of handles that can be exported.
    pub handle_types: i32,
    /// Where the memory is.
    pub location: Location,
    /// The other fields, which are not used.
    pub rest: [u64; 9],
}

/// `CUmemAccessDesc`, `cudaMemAccessDesc`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AccessDesc {
    /// The location that gets access.
    pub location: Location,
    /// 0 none, 1 read, 3 read and write.
    pub flags: u32,
}

/// `CUlaunchConfig`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DriverLaunchConfig {
    /// The dimensions of the grid and of the block.
    pub dims: [u32; 6],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// The stream of the launch.
    pub stream: u64,
    /// Not used.
    pub attributes: *const c_void,
    /// The number of attributes.
    pub attribute_count: u32,
}

/// `cudaLaunchConfig_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RuntimeLaunchConfig {
    /// The dimensions of the grid and of the block.
    pub dims: [Dim3; 2],
    /// Dynamic shared memory in bytes.
    pub shared: usize,
    /// The stream of the launch.
    pub stream: u64,
    /// Not used.
    pub attributes: *const c_void,
    /// The number of attributes.
    pub attribute_count: u32,
}

/// `cudaPointerAttributes`, the part that CUDA 12 and 13 share.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PointerAttributes {
    /// 0 unregistered, 1 host, 2 device, 3 managed.
    pub kind: i32,
    /// The device ordinal.
    pub device: i32,
    /// The address on the device.
    pub device_pointer: u64,
    /// The address on the host.
    pub host_pointer: u64,
}

/// `cudaFuncAttributes`, without the reserved tail.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct FuncAttributes {
    /// Static shared, constant and local memory in bytes.
    pub memory: [usize; 3],
    /// The maximum number of threads in a block.
    pub max_threads: i32,
    /// The number of registers of a thread.
    pub registers: i32,
    /// The PTX version times ten.
    pub ptx_version: i32,
    /// The binary version times ten.
    pub binary_version: i32,
    /// The cache mode.
    pub cache_mode: i32,
    /// The maximum dynamic shared memory in bytes.
    pub max_dynamic_shared: i32,
    /// The other fields, all 0.
    pub rest: [i32; 7],
}

/// `CUipcMemHandle`, `cudaIpcMemHandle_t`, `CUipcEventHandle`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IpcHandle {
    /// The opaque content.
    pub bytes: [u8; 64],
}

/// The part of `cudaDeviceProp` before the first difference in meaning between CUDA 12 and 13.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DevicePropHead {
    pub name: [c_char; 256],
    pub uuid: [u8; 16],
    pub luid: [u8; 8],
    pub luid_device_node_mask: u32,
    pub total_global_mem: usize,
    pub shared_mem_per_block: usize,
    pub regs_per_block: i32,
    pub warp_size: i32,
    pub mem_pitch: usize,
    pub max_threads_per_block: i32,
    pub max_threads_dim: [i32; 3],
    pub max_grid_size: [i32; 3],
    /// kHz in CUDA 12, padding in CUDA 13.
    pub clock_rate: i32,
}

/// The texture and surface limits from `maxTexture2D` on, which CUDA 12 and 13 share.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct TextureLimits {
    pub texture: [i32; 23],
    pub surface: [i32; 14],
}

/// `cudaDeviceProp` of CUDA 12 (`cudaGetDeviceProperties_v2`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DeviceProp12 {
    pub head: DevicePropHead,
    pub total_const_mem: usize,
    pub major: i32,
    pub minor: i32,
    pub texture_alignment: usize,
    pub texture_pitch_alignment: usize,
    pub device_overlap: i32,
    pub multi_processor_count: i32,
    pub kernel_exec_timeout_enabled: i32,
    pub integrated: i32,
    pub can_map_host_memory: i32,
    pub compute_mode: i32,
    pub max_texture_1d: [i32; 3],
    pub limits: TextureLimits,
    pub surface_alignment: usize,
    pub concurrent_kernels: i32,
    pub ecc_enabled: i32,
    pub pci_bus_id: i32,
    pub pci_device_id: i32,
    pub pci_domain_id: i32,
    pub tcc_driver: i32,
    pub async_engine_count: i32,
    pub unified_addressing: i32,
    pub memory_clock_rate: i32,
    pub memory_bus_width: i32,
    pub l2_cache_size: i32,
    pub persisting_l2_cache_max_size: i32,
    pub max_threads_per_multi_processor: i32,
    pub stream_priorities_supported: i32,
    pub global_l1_cache_supported: i32,
    pub local_l1_cache_supported: i32,
    pub shared_mem_per_multiprocessor: usize,
    pub regs_per_multiprocessor: i32,
    pub managed_memory: i32,
    pub is_multi_gpu_board: i32,
    pub multi_gpu_board_group_id: i32,
    pub host_native_atomic_supported: i32,
    pub single_to_double_precision_perf_ratio: i32,
    pub pageable_memory_access: i32,
    pub concurrent_managed_access: i32,
    pub compute_preemption_supported: i32,
    pub can_use_host_pointer_for_registered_mem: i32,
    pub cooperative_launch: i32,
    pub cooperative_multi_device_launch: i32,
    pub tail: DevicePropTail,
    pub reserved: [i32; 62],
}

/// `cudaDeviceProp` of CUDA 13.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DeviceProp13 {
    pub head: DevicePropHead,
    pub total_const_mem: usize,
    pub major: i32,
    pub minor: i32,
    pub texture_alignment: usize,
    pub texture_pitch_alignment: usize,
    pub multi_processor_count: i32,
    pub integrated: i32,
    pub can_map_host_memory: i32,
    pub max_texture_1d: [i32; 2],
    pub limits: TextureLimits,
    pub surface_alignment: usize,
    pub concurrent_kernels: i32,
    pub ecc_enabled: i32,
    pub pci_bus_id: i32,
    pub pci_device_id: i32,
    pub pci_domain_id: i32,
    pub tcc_driver: i32,
    pub async_engine_count: i32,
    pub unified_addressing: i32,
    pub memory_bus_width: i32,
    pub l2_cache_size: i32,
    pub persisting_l2_cache_max_size: i32,
    pub max_threads_per_multi_processor: i32,
    pub stream_priorities_supported: i32,
    pub global_l1_cache_supported: i32,
    pub local_l1_cache_supported: i32,
    pub shared_mem_per_multiprocessor: usize,
    pub regs_per_multiprocessor: i32,
    pub managed_memory: i32,
    pub is_multi_gpu_board: i32,
    pub multi_gpu_board_group_id: i32,
    pub host_native_atomic_supported: i32,
    pub pageable_memory_access: i32,
    pub concurrent_managed_access: i32,
    pub compute_preemption_supported: i32,
    pub can_use_host_pointer_for_registered_mem: i32,
    pub cooperative_launch: i32,
    pub tail: DevicePropTail,
    pub numa_and_pci: [i32; 6],
    pub reserved: [i32; 56],
}

/// The end of `cudaDeviceProp`, which CUDA 12 and 13 share.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DevicePropTail {
    pub shared_mem_per_block_optin: usize,
    pub pageable_memory_access_uses_host_page_tables: i32,
    pub direct_managed_mem_access_from_host: i32,
    pub max_blocks_per_multi_processor: i32,
    pub access_policy_max_window_size: i32,
    pub reserved_shared_mem_per_block: usize,
    pub host_register_supported: i32,
    pub sparse_cuda_array_supported: i32,
    pub host_register_read_only_supported: i32,
    pub timeline_semaphore_interop_supported: i32,
    pub memory_pools_supported: i32,
    pub gpu_direct_rdma_supported: i32,
    pub gpu_direct_rdma_flush_writes_options: u32,
    pub gpu_direct_rdma_writes_ordering: i32,
    pub memory_pool_supported_handle_types: u32,
    pub deferred_mapping_cuda_array_supported: i32,
    pub ipc_event_supported: i32,
    pub cluster_launch: i32,
    pub unified_function_pointers: i32,
    /// Reserved in CUDA 12, `deviceNumaConfig` in CUDA 13.
    pub numa_config: i32,
}

const _: () = {
    assert!(size_of::<DeviceProp12>() == 1032);
    assert!(size_of::<DeviceProp13>() == 1008);
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<PoolProps>() == 88);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<DriverLaunchConfig>() == 56);
    assert!(size_of::<RuntimeLaunchConfig>() == 56);
    assert!(size_of::<PointerAttributes>() == 24);
    assert!(size_of::<PitchedPtr>() == 32);
    assert!(size_of::<ArrayDescriptor>() == 24);
    assert!(size_of::<Array3dDescriptor>() == 40);
};
