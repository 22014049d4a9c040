//! Devices, their properties, versions and errors.

use crate::driver::{Driver, driver, version};
use crate::state::{call, current_device, last, make_current, ready, ret};
use simcuda::abi::{DeviceProp12, DeviceProp13, DevicePropHead, DevicePropTail, TextureLimits};
use simcuda::error::{Error, describe};
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_uint};
use std::mem::offset_of;

fn count() -> c_int {
    let mut count = 0;
    (driver().device_get_count)(Out::from(&mut count));
    count
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceCount(out: Out<c_int>) -> c_int {
    let count = count();
    out.put(count);
    ret(if count > 0 { 0 } else { Error::NoDevice.code() })
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDevice(device: Out<c_int>) -> c_int {
    if count() == 0 {
        return ret(Error::NoDevice.code());
    }
    device.put(current_device());
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(device: c_int) -> c_int {
    ret(make_current(driver(), device).err().unwrap_or(0))
}

#[unsafe(no_mangle)]
extern "C" fn cudaInitDevice(device: c_int, _device_flags: c_uint, _flags: c_uint) -> c_int {
    let mut context = 0;
    ret((driver().primary_ctx_retain)(Out::from(&mut context), device))
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDeviceFlags(_flags: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceFlags(flags: Out<c_uint>) -> c_int {
    flags.put(0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceReset() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceSynchronize() -> c_int {
    call(|d| (d.ctx_synchronize)())
}

#[unsafe(no_mangle)]
extern "C" fn cudaDriverGetVersion(out: Out<c_int>) -> c_int {
    ret((driver().driver_get_version)(out))
}

#[unsafe(no_mangle)]
extern "C" fn cudaRuntimeGetVersion(out: Out<c_int>) -> c_int {
    out.put(version());
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) -> c_int {
    ret((driver().device_get_attribute)(value, attribute, device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> c_int {
    // SAFETY: by CUDA's contract `text` is a buffer of `length` bytes.
    ret(unsafe { (driver().device_get_pci_bus_id)(text, length, device) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetByPCIBusId(device: Out<c_int>, text: *const c_char) -> c_int {
    // SAFETY: by CUDA's contract `text` is a NUL-terminated string.
    ret(unsafe { (driver().device_get_by_pci_bus_id)(device, text) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) -> c_int {
    ret((driver().device_can_access_peer)(can, device, peer))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceEnablePeerAccess(_peer: c_int, _flags: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceDisablePeerAccess(_peer: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) -> c_int {
    ret((driver().ctx_get_stream_priority_range)(least, greatest))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetLimit(value: Out<usize>, limit: c_int) -> c_int {
    call(|d| (d.ctx_get_limit)(value, limit))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceSetLimit(limit: c_int, value: usize) -> c_int {
    call(|d| (d.ctx_set_limit)(limit, value))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> c_int {
    last(true)
}

#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> c_int {
    last(false)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(error: c_int) -> *const c_char {
    describe(error).1.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(error: c_int) -> *const c_char {
    describe(error).2.as_ptr()
}

/// Reads the attributes of a device by their number.
struct Attributes<'a> {
    driver: &'a Driver,
    device: c_int,
}

impl Attributes<'_> {
    fn get(&self, attribute: c_int) -> c_int {
        let mut value = 0;
        (self.driver.device_get_attribute)(Out::from(&mut value), attribute, self.device);
        value
    }

    fn bytes(&self, attribute: c_int) -> usize {
        self.get(attribute) as usize
    }

    fn head(&self) -> DevicePropHead {
        let mut head = DevicePropHead {
            name: [0; 256],
            uuid: [0; 16],
            luid: [0; 8],
            luid_device_node_mask: 0,
            total_global_mem: 0,
            shared_mem_per_block: self.bytes(8),
            regs_per_block: self.get(12),
            warp_size: self.get(10),
            mem_pitch: self.bytes(11),
            max_threads_per_block: self.get(1),
            max_threads_dim: [self.get(2), self.get(3), self.get(4)],
            max_grid_size: [self.get(5), self.get(6), self.get(7)],
            clock_rate: self.get(13),
        };
        // SAFETY: `head.name` has the 256 bytes that are passed as its length. The other out-pointers refer to fields
        // of `head`.
        unsafe {
            (self.driver.device_get_name)(head.name.as_mut_ptr(), 256, self.device);
            (self.driver.device_get_uuid)(Out::from(&mut head.uuid), self.device);
            (self.driver.device_total_mem)(Out::from(&mut head.total_global_mem), self.device);
        }
        head
    }

    fn tail(&self) -> DevicePropTail {
        DevicePropTail {
            shared_mem_per_block_optin: self.bytes(97),
            pageable_memory_access_uses_host_page_tables: self.get(100),
            direct_managed_mem_access_from_host: self.get(101),
            max_blocks_per_multi_processor: self.get(106),
            access_policy_max_window_size: self.get(109),
            reserved_shared_mem_per_block: self.bytes(111),
            host_register_supported: self.get(99),
            sparse_cuda_array_supported: self.get(112),
            host_register_read_only_supported: self.get(113),
            timeline_semaphore_interop_supported: self.get(114),
            memory_pools_supported: self.get(115),
            gpu_direct_rdma_supported: self.get(116),
            gpu_direct_rdma_flush_writes_options: self.get(117) as c_uint,
            gpu_direct_rdma_writes_ordering: self.get(118),
            memory_pool_supported_handle_types: self.get(119) as c_uint,
            deferred_mapping_cuda_array_supported: self.get(121),
            ipc_event_supported: self.get(125),
            cluster_launch: self.get(120),
            unified_function_pointers: self.get(129),
            numa_config: 0,
        }
    }

    fn cuda_12(&self) -> DeviceProp12 {
        DeviceProp12 {
            head: self.head(),
            total_const_mem: self.bytes(9),
            major: self.get(75),
            minor: self.get(76),
            texture_alignment: self.bytes(14),
            texture_pitch_alignment: self.bytes(51),
            device_overlap: self.get(15),
            multi_processor_count: self.get(16),
            kernel_exec_timeout_enabled: self.get(17),
            integrated: self.get(18),
            can_map_host_memory: self.get(19),
            compute_mode: self.get(20),
            max_texture_1d: [0; 3],
            limits: TextureLimits { texture: [0; 23], surface: [0; 14] },
            surface_alignment: self.bytes(14),
            concurrent_kernels: self.get(31),
            ecc_enabled: self.get(32),
            pci_bus_id: self.get(33),
            pci_device_id: self.get(34),
            pci_domain_id: self.get(50),
            tcc_driver: self.get(35),
            async_engine_count: self.get(40),
            unified_addressing: self.get(41),
            memory_clock_rate: self.get(36),
            memory_bus_width: self.get(37),
            l2_cache_size: self.get(38),
            persisting_l2_cache_max_size: self.get(108),
            max_threads_per_multi_processor: self.get(39),
            stream_priorities_supported: self.get(78),
            global_l1_cache_supported: self.get(79),
            local_l1_cache_supported: self.get(80),
            shared_mem_per_multiprocessor: self.bytes(81),
            regs_per_multiprocessor: self.get(82),
            managed_memory: self.get(83),
            is_multi_gpu_board: self.get(84),
            multi_gpu_board_group_id: self.get(85),
            host_native_atomic_supported: self.get(86),
            single_to_double_precision_perf_ratio: self.get(87),
            pageable_memory_access: self.get(88),
            concurrent_managed_access: self.get(89),
            compute_preemption_supported: self.get(90),
            can_use_host_pointer_for_registered_mem: self.get(91),
            cooperative_launch: self.get(95),
            cooperative_multi_device_launch: self.get(96),
            tail: self.tail(),
            reserved: [0; 62],
        }
    }

    fn cuda_13(&self) -> DeviceProp13 {
        let p = self.cuda_12();
        DeviceProp13 {
            head: DevicePropHead { clock_rate: 0, ..p.head },
            total_const_mem: p.total_const_mem,
            major: p.major,
            minor: p.minor,
            texture_alignment: p.texture_alignment,
            texture_pitch_alignment: p.texture_pitch_alignment,
            multi_processor_count: p.multi_processor_count,
            integrated: p.integrated,
            can_map_host_memory: p.can_map_host_memory,
            max_texture_1d: [0; 2],
            limits: p.limits,
            surface_alignment: p.surface_alignment,
            concurrent_kernels: p.concurrent_kernels,
            ecc_enabled: p.ecc_enabled,
            pci_bus_id: p.pci_bus_id,
            pci_device_id: p.pci_device_id,
            pci_domain_id: p.pci_domain_id,
            tcc_driver: p.tcc_driver,
            async_engine_count: p.async_engine_count,
            unified_addressing: p.unified_addressing,
            memory_bus_width: p.memory_bus_width,
            l2_cache_size: p.l2_cache_size,
            persisting_l2_cache_max_size: p.persisting_l2_cache_max_size,
            max_threads_per_multi_processor: p.max_threads_per_multi_processor,
            stream_priorities_supported: p.stream_priorities_supported,
            global_l1_cache_supported: p.global_l1_cache_supported,
            local_l1_cache_supported: p.local_l1_cache_supported,
            shared_mem_per_multiprocessor: p.shared_mem_per_multiprocessor,
            regs_per_multiprocessor: p.regs_per_multiprocessor,
            managed_memory: p.managed_memory,
            is_multi_gpu_board: p.is_multi_gpu_board,
            multi_gpu_board_group_id: p.multi_gpu_board_group_id,
            host_native_atomic_supported: p.host_native_atomic_supported,
            pageable_memory_access: p.pageable_memory_access,
            concurrent_managed_access: p.concurrent_managed_access,
            compute_preemption_supported: p.compute_preemption_supported,
            can_use_host_pointer_for_registered_mem: p.can_use_host_pointer_for_registered_mem,
            cooperative_launch: p.cooperative_launch,
            tail: p.tail,
            numa_and_pci: [0; 6],
            reserved: [0; 56],
        }
    }
}

/// CUDA 12's function, which fills CUDA 12's structure.
#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceProperties_v2(out: Out<DeviceProp12>, device: c_int) -> c_int {
    if out.is_null() || device < 0 || device >= count() {
        return ret(Error::InvalidDevice.code());
    }
    out.put(Attributes { driver: driver(), device }.cuda_12());
    0
}

/// In CUDA 13 this fills CUDA 13's structure. In CUDA 12 it fills that of CUDA 11, which is a prefix of CUDA 12's.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceProperties(out: Out<DeviceProp13>, device: c_int) -> c_int {
    const CUDA_11_BYTES: usize = offset_of!(DeviceProp12, tail) + offset_of!(DevicePropTail, host_register_supported);
    if out.is_null() || device < 0 || device >= count() {
        return ret(Error::InvalidDevice.code());
    }
    let attributes = Attributes { driver: driver(), device };
    if version() >= 13000 {
        out.put(attributes.cuda_13());
    } else {
        let value = attributes.cuda_12();
        // SAFETY: `value` is longer than `CUDA_11_BYTES`. An array of bytes needs no alignment and accepts any bit
        // pattern.
        let bytes = unsafe { (&raw const value).cast::<[u8; CUDA_11_BYTES]>().read() };
        out.cast().put(bytes);
    }
    0
}

/// Creates a context if there is none, for calls that do nothing else.
#[unsafe(no_mangle)]
extern "C" fn cudaProfilerStart() -> c_int {
    ret(ready().err().unwrap_or(0))
}

#[unsafe(no_mangle)]
extern "C" fn cudaProfilerStop() -> c_int {
    0
}
