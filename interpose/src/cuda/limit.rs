//! `--limit`: how much memory of a device the program sees. [`super::visible`] changes what the driver reports,
//! [`super::limited`] lets allocations fail.
//!
//! The memory that other programs used when the run started is not counted.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use memtrace_trace::options::Limit;

use super::driver::call_driver;
use super::location::current_device;
use super::reading::{MAX_DEVICES, MemoryInfo, memory_info};
use crate::linker::original::OriginalFunction;
use crate::recording::paused::is_paused;
use crate::recording::process::{Process, session_options};
use crate::recording::wiped_on_fork::WipedOnFork;

/// The limit of the run. Null until it was read.
static OF_RUN: AtomicPtr<Limit> = AtomicPtr::new(std::ptr::null_mut());
/// The limit that the program has set for itself, in bytes. 0 if there is none.
static OF_PROGRAM: AtomicU64 = AtomicU64::new(0);

/// The smaller one, [`NONE`] or [`UNKNOWN`].
static BOTH: AtomicU64 = AtomicU64::new(UNKNOWN);
const UNKNOWN: u64 = 0;
const NONE: u64 = u64::MAX;

/// How an allocation begins: [`UNCHECKED`] if there is no limit. [`UNPREPARED`] in a process that has not allocated
/// yet, and after a change of the limit.
static BEGINNING: WipedOnFork = WipedOnFork::new();
const UNPREPARED: u8 = 0;
const UNCHECKED: u8 = 1;
const CHECKED: u8 = 2;

/// Sets this process's own limit for each device, in bytes; 0 removes it. It holds beside that of the run. Returns the
/// one before.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_set_limit(bytes: u64) -> u64 {
    let before = OF_PROGRAM.swap(bytes, Ordering::SeqCst);
    combine();
    // After the change, so that a thread that has read the limit before does not go on with that.
    BEGINNING.get().store(UNPREPARED, Ordering::SeqCst);
    before
}

/// Whether no limit is set and the process has allocated before.
#[inline(always)]
pub(super) fn is_known_to_be_none() -> bool {
    BEGINNING.get().load(Ordering::Relaxed) == UNCHECKED
}

/// Begins an allocation. Returns the limit of each device in bytes. The first allocation of a process starts the
/// recording, so that the launcher knows a process that is killed inside it.
#[cold]
pub(super) fn begin_allocation() -> Option<u64> {
    let beginning = BEGINNING.get();
    // Without a recording, a later allocation is the first one of it.
    if beginning.load(Ordering::Relaxed) != UNPREPARED || is_paused() {
        return bytes();
    }
    if Process::begin_first_allocation() {
        BEGINNING.wipe_in_children();
    }
    loop {
        let limit = bytes();
        beginning.store(if limit.is_some() { CHECKED } else { UNCHECKED }, Ordering::SeqCst);
        // The program may have set a limit meanwhile, and `UNPREPARED` before this store.
        if bytes() == limit {
            return limit;
        }
    }
}

fn of_run() -> &'static Limit {
    let known = OF_RUN.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: it was made below from a box that is never freed.
        return unsafe { &*known };
    }
    let read = session_options().map(|options| options.limit).unwrap_or_default();
    let read: &'static Limit = Box::leak(Box::new(read));
    // Another thread may have stored an equal one meanwhile.
    OF_RUN.store(std::ptr::from_ref(read).cast_mut(), Ordering::Release);
    read
}

/// The limit of the run in bytes. `None` if there is none.
fn of_run_bytes() -> Option<u64> {
    Some(of_run().bytes).filter(|limit| *limit > 0)
}

/// The limit of each device in bytes. `None` if there is none.
#[inline]
pub(super) fn bytes() -> Option<u64> {
    match BOTH.load(Ordering::SeqCst) {
        NONE => None,
        UNKNOWN => combine(),
        limit => Some(limit),
    }
}

/// Computes the limit from that of the run and that of the program.
#[cold]
fn combine() -> Option<u64> {
    loop {
        let of_program = OF_PROGRAM.load(Ordering::SeqCst);
        let limit = [of_run_bytes(), Some(of_program).filter(|limit| *limit > 0)].into_iter().flatten().min();
        BOTH.store(limit.unwrap_or(NONE), Ordering::SeqCst);
        // Another thread may have set a limit meanwhile, and stored its result before this one.
        if OF_PROGRAM.load(Ordering::SeqCst) == of_program {
            return limit;
        }
    }
}

/// The program's view of the memory of a device with this PCI address.
pub(super) fn visible(info: MemoryInfo, pci: impl FnOnce() -> Option<String>) -> MemoryInfo {
    seen_with(bytes(), info, || others_on(pci))
}

/// A device of `limit` bytes. Of the bytes in use, `others` do not count.
fn seen_with(limit: Option<u64>, info: MemoryInfo, others: impl FnOnce() -> u64) -> MemoryInfo {
    match limit.filter(|limit| *limit < info.total) {
        Some(limit) => {
            MemoryInfo { free: info.free.min(limit.saturating_sub(used_bytes(info, others()))), total: limit }
        }
        None => info,
    }
}

/// The bytes in use that count.
fn used_bytes(info: MemoryInfo, others: u64) -> u64 {
    info.total.saturating_sub(info.free).saturating_sub(others)
}

/// How much of a device is in use beyond the limit, and how much is free below it. One of them is 0.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) beyond: u64,
    pub(super) free: u64,
}

/// The room on a device of which the driver reports `info`. `None` if the limit is not below its size.
pub(super) fn room(device: i16, info: MemoryInfo) -> Option<Room> {
    let limit = bytes().filter(|limit| *limit < info.total)?;
    let used = used_bytes(info, others_on_device(device));
    Some(Room { beyond: used.saturating_sub(limit), free: info.free.min(limit.saturating_sub(used)) })
}

/// The size of a device as the program sees it. `total` is its size.
pub(super) fn visible_total(total: u64) -> u64 {
    bytes().map_or(total, |limit| limit.min(total))
}

/// The program's view of the memory of a device that it knows by its ordinal.
pub(super) fn visible_on(device: impl FnOnce() -> i16, info: MemoryInfo) -> MemoryInfo {
    seen_with(bytes(), info, || others_on_device(device()))
}

/// The common view of all programs of the run of the calling thread's current device, for the recording. `None` if the
/// driver does not answer.
pub(super) fn visible_memory_info() -> Option<MemoryInfo> {
    memory_info().map(|info| seen_with(of_run_bytes(), info, || others_on_device(current_device())))
}

/// The size of a device as all programs of the run see it, for the recording. `total` is its size.
pub(super) fn total_in_run(total: u64) -> u64 {
    of_run_bytes().map_or(total, |limit| limit.min(total))
}

/// Whether there is a limit.
pub(super) fn is_set() -> bool {
    bytes().is_some()
}

/// The bytes that other programs used on a device when the run started.
fn others_on(pci: impl FnOnce() -> Option<String>) -> u64 {
    let others = &of_run().others;
    if others.is_empty() {
        return 0;
    }
    let Some(pci) = pci() else { return 0 };
    others.iter().find(|(address, _)| same_pci(address, &pci)).map_or(0, |(_, bytes)| *bytes)
}

/// Whether two PCI addresses are the same. NVML writes the domain with eight digits, CUDA with four.
fn same_pci(one: &str, other: &str) -> bool {
    let short = |address: &str| address.trim_start_matches('0').to_ascii_lowercase();
    short(one) == short(other)
}

/// [`others_on`] for an ordinal. It does not change while the process lives.
fn others_on_device(device: i16) -> u64 {
    /// One more than the bytes, 0 if they are unknown yet.
    static STORED: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];
    let Some(stored) = usize::try_from(device).ok().and_then(|index| STORED.get(index)) else { return 0 };
    if stored.load(Ordering::Relaxed) == 0 {
        stored.store(others_on(|| pci_address(device)).saturating_add(1), Ordering::Relaxed);
    }
    stored.load(Ordering::Relaxed) - 1
}

fn pci_address(device: i16) -> Option<String> {
    static BUS: OriginalFunction = OriginalFunction::new();
    let mut bus = [0u8; 32];
    // SAFETY: cuda.h declares `CUresult cuDeviceGetPCIBusId(char *, int, CUdevice)`. The length is that of the buffer.
    let result = unsafe {
        call_driver(&BUS, c"cuDeviceGetPCIBusId", |get: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            get(bus.as_mut_ptr().cast(), bus.len() as c_int - 1, device.into())
        })
    };
    let text = std::ffi::CStr::from_bytes_until_nul(&bus).ok()?.to_str().ok()?;
    (result == Some(0)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_smaller_device_has_what_the_limit_leaves() {
        let info = MemoryInfo { free: 70 * GIB, total: 80 * GIB };
        assert_eq!(seen_with(Some(24 * GIB), info, || 0), MemoryInfo { free: 14 * GIB, total: 24 * GIB });
        assert_eq!(seen_with(Some(24 * GIB), info, || 6 * GIB), MemoryInfo { free: 20 * GIB, total: 24 * GIB });
        assert_eq!(seen_with(Some(24 * GIB), info, || 20 * GIB), MemoryInfo { free: 24 * GIB, total: 24 * GIB });
        // Others have grown: no more than the device has.
        let full = MemoryInfo { free: GIB, total: 80 * GIB };
        assert_eq!(seen_with(Some(24 * GIB), full, || 70 * GIB), MemoryInfo { free: GIB, total: 24 * GIB });
        assert_eq!(seen_with(Some(24 * GIB), full, || 0), MemoryInfo { free: 0, total: 24 * GIB });
    }

    #[test]
    fn pci_addresses_of_nvml_and_cuda_are_compared() {
        assert!(same_pci("00000000:1B:00.0", "0000:1b:00.0"));
        assert!(!same_pci("00000001:1B:00.0", "0000:1b:00.0"));
    }
}
