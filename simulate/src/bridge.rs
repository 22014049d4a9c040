//! The private interface of the simulated driver for the other simulated libraries.
//!
//! They request it as NVIDIA's own libraries request their private tables: `cuGetExportTable` with an identifier.

use crate::out::Out;
use std::ffi::c_char;

/// The identifier of the table.
pub const ID: [u8; 16] = *b"simcuda-bridge-1";

/// The table. One build produces the library that requests it and the library that provides it.
#[repr(C)]
pub struct Bridge {
    /// Whether calls are recorded in a ledger.
    pub ledger_on: extern "C" fn() -> bool,
    /// Issues the next number in the order of service.
    pub number: extern "C" fn() -> u64,
    /// Appends a ledger line under a number. Takes UTF-8 text and its length in bytes.
    pub append: unsafe extern "C" fn(u64, *const u8, usize),
    /// Counts a call of a runtime allocation function and returns whether it must fail. Takes the name and its length
    /// in bytes.
    pub strikes: unsafe extern "C" fn(*const u8, usize) -> bool,
    /// Reports that this thread enters (true) or leaves a runtime call. Driver calls in between are marked as nested.
    pub nest: extern "C" fn(bool),
    /// Adds one unit of work to a stream.
    pub launch: extern "C" fn(u64) -> i32,
    /// The storage of a `__device__` variable. Takes its host address and its size in bytes.
    pub symbol: extern "C" fn(u64, u64) -> u64,
    /// The size in bytes of the allocation that begins at an address, or 0.
    pub size_at: extern "C" fn(u64) -> u64,
    /// The number of devices on the host, including hidden ones.
    pub physical_devices: extern "C" fn() -> u32,
    /// The capacity and usage of a device in bytes, by its physical ordinal.
    pub memory_of: extern "C" fn(u32, Out<u64>, Out<u64>),
    /// The name of the devices, which lives as long as the driver.
    pub name: extern "C" fn() -> *const c_char,
    /// An attribute of the devices, by its `CUdevice_attribute`.
    pub attribute: extern "C" fn(i32) -> i32,
    /// Counts a call of a stub. Takes its name as a C string.
    pub stub: unsafe extern "C" fn(*const c_char),
}
