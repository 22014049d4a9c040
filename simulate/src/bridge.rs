//! The private interface of the simulated driver for the other simulated libraries.
//!
//! They request it as NVIDIA's own libraries request their private tables: `cuGetExportTable` with an identifier.

use crate::cupti::CallbackFunction;
use crate::out::Out;
use std::ffi::{c_char, c_void};

/// The identifier of the table.
pub const ID: [u8; 16] = *b"simcuda-bridge-1";

/// A process that uses a device, as NVML lists it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ListedProcess {
    /// Its process id.
    pub pid: u32,
    /// Whether it is a client of MPS.
    pub is_mps: bool,
    /// The memory that it uses, in bytes.
    pub bytes: u64,
    /// The GPU instance in which it runs, or [`ListedProcess::NO_INSTANCE`].
    pub instance: u32,
}

impl ListedProcess {
    /// NVML's number of no instance.
    pub const NO_INSTANCE: u32 = u32::MAX;
}

/// The processes that use a device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Processes {
    count: usize,
    /// Entries beyond `count` are 0.
    entries: [ListedProcess; Processes::MAX],
}

impl Processes {
    /// The maximum number of processes. Others are left out.
    const MAX: usize = 256;

    /// The list of these processes.
    pub fn new(processes: &[ListedProcess]) -> Self {
        let mut entries = [ListedProcess::default(); Self::MAX];
        entries.iter_mut().zip(processes).for_each(|(to, process)| *to = *process);
        Processes { count: processes.len().min(Self::MAX), entries }
    }

    /// The processes.
    pub fn entries(&self) -> &[ListedProcess] {
        &self.entries[..self.count]
    }
}

/// The table. One build produces the library that requests it and the library that provides it.
#[repr(C)]
pub struct Bridge {
    /// Whether calls are recorded in a ledger.
    pub ledger_on: extern "C" fn() -> bool,
    /// Issues the next number in the order of service.
    pub number: extern "C" fn() -> u64,
    /// Appends a ledger line under a number. Arguments: UTF-8 text and its length in bytes.
    pub append: unsafe extern "C" fn(u64, *const u8, usize),
    /// Counts a call of a runtime allocation function and returns whether it must fail. Arguments: the name and its
    /// length in bytes.
    pub strikes: unsafe extern "C" fn(*const u8, usize) -> bool,
    /// Reports that this thread enters (true) or leaves a runtime call. Driver calls in between are marked as nested.
    pub nest: extern "C" fn(bool),
    /// Adds one unit of work to a stream.
    pub launch: extern "C" fn(u64) -> i32,
    /// Copies bytes as work of a stream. Arguments: the destination, the source, the size and the stream. The caller
    /// guarantees that both ranges can be accessed.
    pub copy: unsafe extern "C" fn(u64, u64, usize, u64) -> i32,
    /// The storage of a `__device__` variable. Arguments: its host address and its size in bytes.
    pub symbol: extern "C" fn(u64, u64) -> u64,
    /// The size in bytes of the allocation that begins at an address, or 0.
    pub size_at: extern "C" fn(u64) -> u64,
    /// The number of devices on the host, including hidden ones.
    pub physical_devices: extern "C" fn() -> u32,
    /// The capacity of each device in bytes.
    pub device_bytes: extern "C" fn() -> u64,
    /// The processes that use a device, by its physical ordinal.
    pub processes: extern "C" fn(u32, Out<Processes>),
    /// The name of the devices, which lives as long as the driver.
    pub name: extern "C" fn() -> *const c_char,
    /// An attribute of the devices, by its `CUdevice_attribute`.
    pub attribute: extern "C" fn(i32) -> i32,
    /// The number of NVLink links of each device.
    pub nvlinks: extern "C" fn() -> u32,
    /// Whether a device can access the memory of another one.
    pub has_peer_access: extern "C" fn() -> bool,
    /// The version of the driver: 1000 * major + 10 * minor.
    pub driver_version: extern "C" fn() -> i32,
    /// Whether kernels and libraries take device memory as on a GPU.
    pub library_memory: extern "C" fn() -> bool,
    /// Loads kernels onto the current device, by their number in [`crate::library_memory::Kernels`]. Returns a
    /// `CUresult`.
    pub load: extern "C" fn(u32) -> i32,
    /// Writes the path of the program of a process that is no part of the simulation, with a NUL, into a buffer of so
    /// many bytes. Returns whether it knows the process.
    pub other_process_name: unsafe extern "C" fn(u32, *mut c_char, usize) -> bool,
    /// Whether the devices are divided into instances (MIG).
    pub is_divided: extern "C" fn() -> bool,
    /// The memory of each device that only NVML reports, in bytes.
    pub reserved_bytes: extern "C" fn() -> u64,
    /// Counts a call of a stub. Argument: its name as a C string.
    pub stub: unsafe extern "C" fn(*const c_char),
    /// Adds the one subscriber to calls of the driver, with its data, or removes it. Returns false if there is one
    /// already.
    pub subscribe: extern "C" fn(Option<CallbackFunction>, *mut c_void) -> bool,
    /// Switches the reports of driver calls to the subscriber on or off.
    pub enable_callbacks: extern "C" fn(bool),
}
