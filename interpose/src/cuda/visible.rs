//! The functions that report how much memory a device has: the program sees the limit of the run ([`super::limit`]).
//! Without one they return what the original returns.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_int, c_void};

use super::call::preloaded_function;
use super::driver::driver_symbol;
use super::entry::entry;
use super::limit;
use super::location::current_device;
use super::reading::MemoryInfo;
use crate::linker::original::OriginalFunction;
use crate::linker::shared_objects::exported_by_library;

/// The library of NVML.
const NVML: &CStr = c"libnvidia-ml.so.1";
/// `CUDA_ERROR_NOT_FOUND` of cuda.h.
const ERROR_NOT_FOUND: c_int = 500;
/// `NVML_ERROR_FUNCTION_NOT_FOUND` of nvml.h.
const NVML_FUNCTION_NOT_FOUND: c_int = 13;

/// A function with a changed answer.
pub(super) struct Answer {
    /// The exported name.
    pub(super) symbol: &'static CStr,
    /// The stub, by its own name.
    pub(super) own: unsafe extern "C" fn(),
    /// The stub, by its exported name.
    pub(super) exported: unsafe extern "C" fn(),
    pub(super) original: &'static OriginalFunction,
}

/// All such functions.
pub(super) static ANSWERS: [Answer; 4] = [
    Answer {
        symbol: c"cuMemGetInfo_v2",
        own: cuMemGetInfo_v2::own,
        exported: cuMemGetInfo_v2,
        original: &MEM_GET_INFO,
    },
    Answer {
        symbol: c"cuDeviceTotalMem_v2",
        own: cuDeviceTotalMem_v2::own,
        exported: cuDeviceTotalMem_v2,
        original: &DEVICE_TOTAL_MEM,
    },
    Answer {
        symbol: c"nvmlDeviceGetMemoryInfo",
        own: nvmlDeviceGetMemoryInfo::own,
        exported: nvmlDeviceGetMemoryInfo,
        original: &NVML_MEMORY_INFO,
    },
    Answer {
        symbol: c"nvmlDeviceGetMemoryInfo_v2",
        own: nvmlDeviceGetMemoryInfo_v2::own,
        exported: nvmlDeviceGetMemoryInfo_v2,
        original: &NVML_MEMORY_INFO_V2,
    },
];

static MEM_GET_INFO: OriginalFunction = OriginalFunction::new();
static DEVICE_TOTAL_MEM: OriginalFunction = OriginalFunction::new();
static NVML_MEMORY_INFO: OriginalFunction = OriginalFunction::new();
static NVML_MEMORY_INFO_V2: OriginalFunction = OriginalFunction::new();

/// The function that exports this name.
pub(super) fn by_symbol(name: &[u8]) -> Option<&'static Answer> {
    ANSWERS.iter().find(|answer| answer.symbol.to_bytes() == name)
}

/// The function of the driver for a name and a version, as `cuGetProcAddress` takes them. These names have no suffix.
/// CUDA 3.2 introduced the interfaces with 64 bits.
pub(super) fn by_entry_point(name: &[u8], version: i32) -> Option<&'static Answer> {
    let is_driver = |answer: &&Answer| answer.symbol.to_bytes().starts_with(b"cu");
    let base = |answer: &&Answer| answer.symbol.to_bytes().strip_suffix(b"_v2") == Some(name);
    (version >= 3020).then(|| ANSWERS.iter().filter(is_driver).find(base)).flatten()
}

/// The function that a program linked with this name would call without us. Null if there is none.
fn original(answer: &'static OriginalFunction, name: &CStr) -> *mut c_void {
    answer.get_or_find(|| {
        let own =
            || if name.to_bytes().starts_with(b"nvml") { exported_by_library(NVML, name) } else { driver_symbol(name) };
        preloaded_function(name).unwrap_or_else(own)
    })
}

entry!(cuMemGetInfo_v2 => mem_get_info);
entry!(cuDeviceTotalMem_v2 => device_total_mem);
entry!(nvmlDeviceGetMemoryInfo => nvml_memory_info);
entry!(nvmlDeviceGetMemoryInfo_v2 => nvml_memory_info_v2);

unsafe extern "C-unwind" fn mem_get_info(free: *mut usize, total: *mut usize) -> c_int {
    let original = original(&MEM_GET_INFO, c"cuMemGetInfo_v2");
    if original.is_null() {
        return ERROR_NOT_FOUND;
    }
    // SAFETY: cuda.h declares `CUresult cuMemGetInfo_v2(size_t *, size_t *)`. The program passes these arguments.
    let result = unsafe {
        let original: unsafe extern "C-unwind" fn(*mut usize, *mut usize) -> c_int = std::mem::transmute(original);
        original(free, total)
    };
    if result == 0 && !free.is_null() && !total.is_null() {
        // SAFETY: the original has just written both.
        unsafe {
            let info = MemoryInfo { free: free.read() as u64, total: total.read() as u64 };
            let seen = limit::visible_on(current_device, info);
            free.write(seen.free as usize);
            total.write(seen.total as usize);
        }
    }
    result
}

unsafe extern "C-unwind" fn device_total_mem(bytes: *mut usize, device: c_int) -> c_int {
    let original = original(&DEVICE_TOTAL_MEM, c"cuDeviceTotalMem_v2");
    if original.is_null() {
        return ERROR_NOT_FOUND;
    }
    // SAFETY: cuda.h declares `CUresult cuDeviceTotalMem_v2(size_t *, CUdevice)`. The program passes these arguments.
    let result = unsafe {
        let original: unsafe extern "C-unwind" fn(*mut usize, c_int) -> c_int = std::mem::transmute(original);
        original(bytes, device)
    };
    if result == 0 && !bytes.is_null() {
        // SAFETY: the original has just written it.
        unsafe { bytes.write(limit::visible_total(bytes.read() as u64) as usize) };
    }
    result
}

/// `nvmlMemory_t`, in bytes. Memory that the driver has reserved counts as used.
#[repr(C)]
#[derive(Clone, Copy)]
struct NvmlMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct NvmlMemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2` of nvml.h: the size of the structure, and 2.
const NVML_MEMORY_V2: u32 = size_of::<NvmlMemoryV2>() as u32 | 2 << 24;

type MemoryInfoV2 = unsafe extern "C-unwind" fn(*mut c_void, *mut NvmlMemoryV2) -> c_int;

unsafe extern "C-unwind" fn nvml_memory_info(device: *mut c_void, out: *mut NvmlMemory) -> c_int {
    let original_v1 = original(&NVML_MEMORY_INFO, c"nvmlDeviceGetMemoryInfo");
    if original_v1.is_null() {
        return NVML_FUNCTION_NOT_FOUND;
    }
    // SAFETY: nvml.h declares `nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t, nvmlMemory_t *)`. The program passes
    // these arguments.
    let result = unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void, *mut NvmlMemory) -> c_int =
            std::mem::transmute(original_v1);
        original(device, out)
    };
    if result == 0 && !out.is_null() && limit::is_set() {
        // Only the other interface says how much the driver has reserved.
        let reserved = detailed_memory(device).map_or(0, |memory| memory.reserved);
        // SAFETY: the original has just written it.
        unsafe {
            let memory = out.read();
            let total = memory.total.saturating_sub(reserved);
            let seen = limit::visible(MemoryInfo { free: memory.free, total }, || pci_address(device));
            if seen.total < total {
                out.write(NvmlMemory {
                    total: seen.total,
                    free: seen.free,
                    used: seen.total.saturating_sub(seen.free),
                });
            }
        }
    }
    result
}

/// The figures of the newer interface for a device. `None` if this NVML has none.
fn detailed_memory(device: *mut c_void) -> Option<NvmlMemoryV2> {
    let original = original(&NVML_MEMORY_INFO_V2, c"nvmlDeviceGetMemoryInfo_v2");
    if original.is_null() {
        return None;
    }
    let mut memory = NvmlMemoryV2 { version: NVML_MEMORY_V2, ..NvmlMemoryV2::default() };
    // SAFETY: nvml.h declares `nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *)`, with this
    // structure for this version. The program has just used the device.
    let result = unsafe { std::mem::transmute::<*mut c_void, MemoryInfoV2>(original)(device, &mut memory) };
    (result == 0).then_some(memory)
}

unsafe extern "C-unwind" fn nvml_memory_info_v2(device: *mut c_void, out: *mut NvmlMemoryV2) -> c_int {
    let original = original(&NVML_MEMORY_INFO_V2, c"nvmlDeviceGetMemoryInfo_v2");
    if original.is_null() {
        return NVML_FUNCTION_NOT_FOUND;
    }
    // SAFETY: nvml.h declares `nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *)`. The program
    // passes these arguments.
    let result = unsafe { std::mem::transmute::<*mut c_void, MemoryInfoV2>(original)(device, out) };
    // SAFETY: the original has succeeded, so it has read the version and written the rest.
    if result == 0 && !out.is_null() && unsafe { (*out).version } == NVML_MEMORY_V2 {
        // SAFETY: `out` is not null, and the original has read and written this version of the structure there.
        unsafe {
            let memory = out.read();
            let total = memory.total.saturating_sub(memory.reserved);
            let seen = limit::visible(MemoryInfo { free: memory.free, total }, || pci_address(device));
            if seen.total < total {
                let used = seen.total.saturating_sub(seen.free);
                out.write(NvmlMemoryV2 { total: seen.total, reserved: 0, free: seen.free, used, ..memory });
            }
        }
    }
    result
}

/// The PCI address of NVML's device. `None` if NVML does not say it.
fn pci_address(device: *mut c_void) -> Option<String> {
    /// `nvmlPciInfo_t`: the old address, five numbers, the address.
    #[repr(C)]
    struct PciInfo {
        legacy: [u8; 16],
        numbers: [u32; 5],
        address: [u8; 32],
    }
    static PCI_INFO: OriginalFunction = OriginalFunction::new();
    let function = original(&PCI_INFO, c"nvmlDeviceGetPciInfo_v3");
    if function.is_null() {
        return None;
    }
    let mut info = PciInfo { legacy: [0; 16], numbers: [0; 5], address: [0; 32] };
    // SAFETY: nvml.h declares `nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t, nvmlPciInfo_t *)`. The program has
    // just used the device.
    let result = unsafe {
        let function: unsafe extern "C-unwind" fn(*mut c_void, *mut PciInfo) -> c_int = std::mem::transmute(function);
        function(device, &mut info)
    };
    let text = CStr::from_bytes_until_nul(&info.address).ok()?.to_str().ok()?;
    (result == 0).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_points_have_no_suffix() {
        let symbol = |name: &[u8], version| by_entry_point(name, version).map(|answer| answer.symbol);
        assert_eq!(symbol(b"cuMemGetInfo", 12000), Some(c"cuMemGetInfo_v2"));
        assert_eq!(symbol(b"cuDeviceTotalMem", 3020), Some(c"cuDeviceTotalMem_v2"));
        assert_eq!(symbol(b"cuMemGetInfo", 3010), None);
        assert_eq!(symbol(b"nvmlDeviceGetMemoryInfo", 12000), None);
    }

    #[test]
    fn the_version_of_nvml_has_the_size_of_its_structure() {
        assert_eq!(NVML_MEMORY_V2, 0x0200_0028);
    }
}
