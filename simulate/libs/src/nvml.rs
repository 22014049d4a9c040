//! NVML (`libnvidia-ml.so.1`): the devices, their memory, and the processes that use it.
//!
//! As in the real library, `CUDA_VISIBLE_DEVICES` hides no device here. PyTorch asks NVML for the processes on a device
//! when it is out of memory, and for the NVLink fabric. Inference servers ask it for everything that they must know of
//! the devices before they fork their workers, which a process that has initialized CUDA cannot do.

use crate::support::{NVML_FUNCTION_NOT_FOUND, bridge, nvlinks, takes_memory};
use simcuda::bridge::{ListedProcess, Processes};
use simcuda::library_memory::UNATTRIBUTED_BYTES;
use simcuda::out::Out;
use simcuda::uuid::uuid_text;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;
const DRIVER_NOT_LOADED: c_int = 9;

/// The attributes of a device that name its compute capability.
const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
const COMPUTE_CAPABILITY_MINOR: i32 = 76;

/// The number of devices, including hidden ones. `None` without the simulated driver.
fn device_count() -> Option<u32> {
    bridge().map(|b| (b.physical_devices)())
}

/// The physical ordinal of a handle. A handle is that ordinal plus one.
fn physical(handle: u64) -> Option<u32> {
    let ordinal = u32::try_from(handle.checked_sub(1)?).ok()?;
    (ordinal < device_count()?).then_some(ordinal)
}

/// The processes that use a device.
fn processes(handle: u64) -> Option<Processes> {
    let mut processes = Processes::new(&[]);
    (bridge()?.processes)(physical(handle)?, Out::from(&mut processes));
    Some(processes)
}

/// The memory of a device, in bytes.
struct Memory {
    /// The memory that programs can use.
    usable: u64,
    /// The memory that the driver and the firmware keep, in addition.
    reserved: u64,
    /// The memory that processes use.
    used: u64,
}

impl Memory {
    fn of(handle: u64) -> Option<Self> {
        let used: u64 = processes(handle)?.entries().iter().map(|process| process.bytes).sum();
        let bridge = bridge()?;
        let usable = (bridge.device_bytes)();
        // The rest is on the host.
        Some(Memory { usable, reserved: (bridge.reserved_bytes)(), used: used.min(usable) })
    }

    fn total(&self) -> u64 {
        self.usable + self.reserved
    }

    fn free(&self) -> u64 {
        self.usable.saturating_sub(self.used)
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_int {
    if device_count().is_some() { SUCCESS } else { DRIVER_NOT_LOADED }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> c_int {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_int {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(status: c_int) -> *const c_char {
    let text = match status {
        SUCCESS => c"Success",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        DRIVER_NOT_LOADED => c"Driver Not Loaded",
        NVML_FUNCTION_NOT_FOUND => c"Function Not Found",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) -> c_int {
    let Some(bridge) = bridge() else { return DRIVER_NOT_LOADED };
    version.put((bridge.driver_version)());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) -> c_int {
    nvmlSystemGetCudaDriverVersion_v2(version)
}

/// Writes a text into a caller's buffer if it fits.
///
/// # Safety
/// `buffer` is valid for writes of `length` bytes.
unsafe fn put_text(buffer: *mut c_char, length: c_uint, text: &str) -> c_int {
    if text.len() >= length as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the text and its NUL fit into `length` bytes, and the caller guarantees that `buffer` is valid for that
    // many.
    unsafe {
        buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        buffer.add(text.len()).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(buffer: *mut c_char, length: c_uint) -> c_int {
    // SAFETY: by NVML's contract the buffer has `length` bytes.
    unsafe { put_text(buffer, length, "580.0") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(buffer: *mut c_char, length: c_uint) -> c_int {
    // SAFETY: by NVML's contract the buffer has `length` bytes.
    unsafe { put_text(buffer, length, "13.580.0") }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: Out<c_uint>) -> c_int {
    count.put(device_count().unwrap_or(0));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount(count: Out<c_uint>) -> c_int {
    nvmlDeviceGetCount_v2(count)
}

/// Writes a device's handle.
fn put_device(out: Out<u64>, ordinal: Option<u32>) -> c_int {
    let Some(ordinal) = ordinal.filter(|&n| n < device_count().unwrap_or(0)) else { return NOT_FOUND };
    out.put(u64::from(ordinal) + 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<u64>) -> c_int {
    put_device(out, Some(index))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, out: Out<u64>) -> c_int {
    put_device(out, Some(index))
}

/// The id has the form `domain:bus:device.function`. The bus is the physical ordinal plus one.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, out: Out<u64>) -> c_int {
    // SAFETY: by NVML's contract `id` is a NUL-terminated string.
    let id = unsafe { CStr::from_ptr(id) }.to_string_lossy();
    let bus = id.rsplit(':').nth(1).and_then(|bus| u32::from_str_radix(bus, 16).ok());
    put_device(out, bus.and_then(|bus| bus.checked_sub(1)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(text: *const c_char, out: Out<u64>) -> c_int {
    // SAFETY: by NVML's contract `text` is a NUL-terminated string.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let found = (0..device_count().unwrap_or(0)).find(|&n| uuid_text(n) == text);
    put_device(out, found)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: u64, buffer: *mut c_char, length: c_uint) -> c_int {
    let Some(ordinal) = physical(device) else { return INVALID_ARGUMENT };
    // SAFETY: by NVML's contract the buffer has `length` bytes.
    unsafe { put_text(buffer, length, &uuid_text(ordinal)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: u64, buffer: *mut c_char, length: c_uint) -> c_int {
    let Some(bridge) = physical(device).and_then(|_| bridge()) else { return INVALID_ARGUMENT };
    // SAFETY: the driver's name is a NUL-terminated string that lives as long as the driver. By NVML's contract the
    // buffer has `length` bytes.
    unsafe { put_text(buffer, length, &CStr::from_ptr((bridge.name)()).to_string_lossy()) }
}

/// `nvmlMemory_t`: total, free, used, which includes what is reserved.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: u64, out: Out<[u64; 3]>) -> c_int {
    let Some(memory) = Memory::of(device) else { return INVALID_ARGUMENT };
    out.put([memory.total(), memory.free(), memory.total() - memory.free()]);
    SUCCESS
}

/// `nvmlMemory_v2_t`: version, total, reserved, free, used.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: u64, out: Out<[u64; 5]>) -> c_int {
    let Some(memory) = Memory::of(device) else { return INVALID_ARGUMENT };
    let version = out.cast().get().unwrap_or(0);
    out.put([version, memory.total(), memory.reserved, memory.free(), memory.used]);
    SUCCESS
}

/// Whether a process is part of the simulation.
fn is_simulated(pid: u32) -> bool {
    // SAFETY: the buffer has no bytes, so nothing is written.
    !bridge().is_some_and(|bridge| unsafe { (bridge.other_process_name)(pid, std::ptr::null_mut(), 0) })
}

/// Lists the processes that use a device: the clients of MPS, or the others.
///
/// An entry has the pid, the bytes, and the instance numbers that later versions of the structure add. `words` is its
/// length in 64-bit words.
fn put_processes(device: u64, count: Out<c_uint>, out: Out<u64>, words: usize, is_mps: bool) -> c_int {
    let Some(processes) = processes(device) else { return INVALID_ARGUMENT };
    let processes: Vec<_> = processes.entries().iter().filter(|process| process.is_mps == is_mps).collect();
    let room = count.get().unwrap_or(0) as usize;
    count.put(processes.len() as c_uint);
    if room < processes.len() {
        return INSUFFICIENT_SIZE;
    }
    for (index, &&ListedProcess { pid, bytes: used, instance, .. }) in processes.iter().enumerate() {
        // The real NVML attributes a part of what a process uses to none.
        let used = if is_simulated(pid) && takes_memory() { used.saturating_sub(UNATTRIBUTED_BYTES) } else { used };
        let at = index * words;
        out.nth(at).put(pid.into());
        out.nth(at + 1).put(used);
        if words > 2 {
            // A GPU instance has one compute instance here.
            let compute_instance = if instance == ListedProcess::NO_INSTANCE { ListedProcess::NO_INSTANCE } else { 0 };
            out.nth(at + 2).put(u64::from(instance) | u64::from(compute_instance) << 32);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses(device: u64, count: Out<c_uint>, out: Out<u64>) -> c_int {
    put_processes(device, count, out, 2, false)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(device: u64, count: Out<c_uint>, out: Out<u64>) -> c_int {
    put_processes(device, count, out, 3, false)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(device: u64, count: Out<c_uint>, out: Out<u64>) -> c_int {
    put_processes(device, count, out, 3, false)
}

/// Processes that draw: there are none.
fn no_processes(device: u64, count: Out<c_uint>) -> c_int {
    if physical(device).is_none() {
        return INVALID_ARGUMENT;
    }
    count.put(0);
    SUCCESS
}

macro_rules! processes_of_no_kind {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: u64, count: Out<c_uint>, _processes: *mut c_void) -> c_int {
            no_processes(device, count)
        }
    )*};
}

processes_of_no_kind! {
    nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v2
    nvmlDeviceGetGraphicsRunningProcesses_v3
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses(device: u64, count: Out<c_uint>, out: Out<u64>) -> c_int {
    put_processes(device, count, out, 2, true)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: u64, count: Out<c_uint>, out: Out<u64>) -> c_int {
    put_processes(device, count, out, 3, true)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: u64, count: Out<c_uint>, out: Out<u64>) -> c_int {
    put_processes(device, count, out, 3, true)
}

/// The path of the program of a process, as far as it fits. Programs of other users are known by their settings.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetProcessName(pid: c_uint, buffer: *mut c_char, length: c_uint) -> c_int {
    let Some(bridge) = bridge() else { return DRIVER_NOT_LOADED };
    // SAFETY: by NVML's contract the buffer has `length` bytes.
    if unsafe { (bridge.other_process_name)(pid, buffer, length as usize) } {
        return SUCCESS;
    }
    let Ok(command) = std::fs::read(format!("/proc/{pid}/cmdline")) else { return NOT_FOUND };
    let name = String::from_utf8_lossy(command.split(|byte| *byte == 0).next().unwrap_or_default());
    let room = (length as usize).saturating_sub(1);
    let kept = name.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= room).last().unwrap_or(0);
    // SAFETY: by NVML's contract the buffer has `length` bytes.
    unsafe { put_text(buffer, length, &name[..kept]) }
}

/// `nvmlPciInfo_t`: the old bus id, domain, bus, device, device id, subsystem id, bus id.
#[derive(Clone, Copy)]
#[repr(C)]
struct PciInfo {
    old_bus_id: [u8; 16],
    numbers: [u32; 5],
    bus_id: [u8; 32],
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(device: u64, out: Out<PciInfo>) -> c_int {
    fn text<const N: usize>(text: &str) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        bytes
    }
    let Some(ordinal) = physical(device) else { return INVALID_ARGUMENT };
    let bus = ordinal + 1;
    // The device and subsystem ids of an H100.
    out.put(PciInfo {
        old_bus_id: text(&format!("0000:{bus:02X}:00.0")),
        numbers: [0, bus, 0, 0x2330_10de, 0x16c1_10de],
        bus_id: text(&format!("00000000:{bus:02X}:00.0")),
    });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetIndex(device: u64, index: Out<c_uint>) -> c_int {
    let Some(ordinal) = physical(device) else { return INVALID_ARGUMENT };
    index.put(ordinal);
    SUCCESS
}

/// Without `SIMCUDA_MIG`, no device can be divided.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(_device: u64, current: Out<c_uint>, pending: Out<c_uint>) -> c_int {
    if !bridge().is_some_and(|bridge| (bridge.is_divided)()) {
        return NOT_SUPPORTED;
    }
    current.put(1);
    pending.put(1);
    SUCCESS
}

/// There is no fabric. The state keeps the caller's value, which is "not supported".
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfoV(_device: u64, _info: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(_device: u64, _link: c_uint, _kind: *mut c_int) -> c_int {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_device: u64, _link: c_uint, _info: *mut c_void) -> c_int {
    NOT_SUPPORTED
}

/// Each link of a device leads to a switch that connects all devices, so every link is active.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(device: u64, link: c_uint, state: Out<c_uint>) -> c_int {
    if physical(device).is_none() || link >= nvlinks() {
        return if nvlinks() == 0 { NOT_SUPPORTED } else { INVALID_ARGUMENT };
    }
    state.put(1);
    SUCCESS
}

/// Every pair of devices can read and write each other's memory, over NVLink where the model has it, unless the model
/// has no peer access.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetP2PStatus(a: u64, b: u64, kind: c_int, status: Out<c_int>) -> c_int {
    const OVER_NVLINK: c_int = 2;
    const UNSUPPORTED: c_int = 5;
    if physical(a).is_none() || physical(b).is_none() {
        return INVALID_ARGUMENT;
    }
    let has_access = bridge().is_none_or(|bridge| (bridge.has_peer_access)());
    status.put(if !has_access || kind == OVER_NVLINK && nvlinks() == 0 { UNSUPPORTED } else { 0 });
    SUCCESS
}

/// All devices are attached to one NUMA node.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTopologyCommonAncestor(a: u64, b: u64, level: Out<c_int>) -> c_int {
    const SAME_BOARD: c_int = 0;
    const NUMA_NODE: c_int = 40;
    let (Some(a), Some(b)) = (physical(a), physical(b)) else { return INVALID_ARGUMENT };
    level.put(if a == b { SAME_BOARD } else { NUMA_NODE });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCudaComputeCapability(device: u64, major: Out<c_int>, minor: Out<c_int>) -> c_int {
    let (Some(_), Some(bridge)) = (physical(device), bridge()) else { return INVALID_ARGUMENT };
    major.put((bridge.attribute)(COMPUTE_CAPABILITY_MAJOR));
    minor.put((bridge.attribute)(COMPUTE_CAPABILITY_MINOR));
    SUCCESS
}

/// `nvmlDeviceArchitecture_t`, by the compute capability.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetArchitecture(device: u64, architecture: Out<c_uint>) -> c_int {
    let (Some(_), Some(bridge)) = (physical(device), bridge()) else { return INVALID_ARGUMENT };
    let capability = [COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR].map(|code| (bridge.attribute)(code));
    architecture.put(match capability {
        [6, _] => 4,
        [7, minor] if minor < 5 => 5,
        [7, _] => 6,
        [8, minor] if minor < 9 => 7,
        [8, _] => 8,
        [9, _] => 9,
        [major, _] if major < 6 => 3,
        _ => 10,
    });
    SUCCESS
}

/// Declares functions that write one number about a device, the same for all.
macro_rules! numbers {
    ($($name:ident: $value:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: u64, number: Out<c_uint>) -> c_int {
            if physical(device).is_none() {
                return INVALID_ARGUMENT;
            }
            number.put($value);
            SUCCESS
        }
    )*};
}

numbers! {
    nvmlDeviceGetComputeMode: 0;
    nvmlDeviceGetMaxMigDeviceCount: 0;
    nvmlDeviceGetNumaNodeId: 0;
    nvmlDeviceGetPersistenceMode: 1;
    nvmlDeviceIsMigDeviceHandle: 0;
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMinorNumber(device: u64, number: Out<c_uint>) -> c_int {
    nvmlDeviceGetIndex(device, number)
}

/// `nvmlUtilization_t`: no kernel ran.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUtilizationRates(device: u64, out: Out<[c_uint; 2]>) -> c_int {
    if physical(device).is_none() {
        return INVALID_ARGUMENT;
    }
    out.put([0, 0]);
    SUCCESS
}

/// The processors near a device: those that this process can use. `count` is the length of the set in words.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCpuAffinity(device: u64, count: c_uint, set: Out<u64>) -> c_int {
    if physical(device).is_none() {
        return INVALID_ARGUMENT;
    }
    let mut own = [0u64; 16];
    // SAFETY: the buffer has that size.
    unsafe { libc::sched_getaffinity(0, size_of_val(&own), own.as_mut_ptr().cast()) };
    (0..count as usize).for_each(|n| set.nth(n).put(own.get(n).copied().unwrap_or(0)));
    SUCCESS
}

/// The memory near a device: that of the first node. `count` is the length of the set in words.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryAffinity(device: u64, count: c_uint, set: Out<u64>, _scope: c_uint) -> c_int {
    if physical(device).is_none() {
        return INVALID_ARGUMENT;
    }
    (0..count as usize).for_each(|n| set.nth(n).put(u64::from(n == 0)));
    SUCCESS
}

/// The process already runs on the processors near the device.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetCpuAffinity(device: u64) -> c_int {
    if physical(device).is_some() { SUCCESS } else { INVALID_ARGUMENT }
}
