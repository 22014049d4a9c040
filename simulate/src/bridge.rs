//! What the simulated driver offers the other stand-ins beside its public functions.
//!
//! It is asked for as NVIDIA's own libraries ask for their private tables: `cuGetExportTable` with an identifier.

use crate::out::Out;
use std::ffi::c_char;

/// The identifier of the table.
pub const ID: [u8; 16] = *b"simcuda-bridge-1";

/// The table. The library that asks and the one that answers are built together.
#[repr(C)]
pub struct Bridge {
    /// Whether a ledger is kept.
    pub ledger_on: extern "C" fn() -> bool,
    /// Takes the next number in the order of service.
    pub number: extern "C" fn() -> u64,
    /// Appends a ledger line under a number: UTF-8 text and its length.
    pub append: unsafe extern "C" fn(u64, *const u8, usize),
    /// Counts a call of a runtime allocation function and says whether it is to fail: name and length.
    pub strikes: unsafe extern "C" fn(*const u8, usize) -> bool,
    /// Says that this thread enters (true) or leaves a runtime call: driver calls meanwhile are nested ones.
    pub nest: extern "C" fn(bool),
    /// One unit of work for a stream.
    pub launch: extern "C" fn(u64) -> i32,
    /// Storage of a `__device__` variable, found by its host address; bytes.
    pub symbol: extern "C" fn(u64, u64) -> u64,
    /// Bytes of the allocation that begins at an address; 0 where none does.
    pub size_at: extern "C" fn(u64) -> u64,
    /// Number of devices on the host, hidden ones included.
    pub physical_devices: extern "C" fn() -> u32,
    /// Capacity and use of a device, by its physical ordinal, bytes.
    pub memory_of: extern "C" fn(u32, Out<u64>, Out<u64>),
    /// Counts a call of a stub, by its C-string name.
    pub stub: unsafe extern "C" fn(*const c_char),
}
