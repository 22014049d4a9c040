//! `--limit`: the program sees devices with less memory.
//!
//! What the driver reports is changed ([`super::visible`]). An allocation is made, and undone if the device's memory in
//! use then exceeds the limit. So the limit holds for all processes of the run together, for contexts and code too, and
//! rounding is the driver's own. A file lock of the run makes an allocation and its check one step.
//!
//! The memory that other programs used when the run started is not counted.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use memtrace_trace::options::Limit;

use super::call::driver_original;
use super::driver::call_driver;
use super::functions;
use super::location::{current_device, ordinal};
use super::memory::OUT_OF_MEMORY;
use super::pools;
use super::reading::{MAX_DEVICES, MemoryInfo, RelaxedCapture, device_memory, memory_info};
use crate::linker::original::OriginalFunction;
use crate::recording::errno::RestoreErrno;
use crate::recording::process::session_options;
use crate::recording::run_lock::RunLock;

/// The limit of the run. Null until it was read.
static OF_RUN: AtomicPtr<Limit> = AtomicPtr::new(std::ptr::null_mut());
/// The limit that the program has set for itself, in bytes. 0 if there is none.
static OF_PROGRAM: AtomicU64 = AtomicU64::new(0);

/// Sets this process's own limit for each device, in bytes; 0 removes it. It holds beside that of the run. Returns the one
/// before.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_set_limit(bytes: u64) -> u64 {
    OF_PROGRAM.swap(bytes, Ordering::Relaxed)
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

/// The limit of each device in bytes. `None` if there is none.
#[inline]
fn bytes() -> Option<u64> {
    let own = OF_PROGRAM.load(Ordering::Relaxed);
    let limits = [of_run().bytes, own];
    limits.into_iter().filter(|limit| *limit > 0).min()
}

/// What the program sees of a device with this PCI address.
pub(super) fn visible(info: MemoryInfo, pci: impl FnOnce() -> Option<String>) -> MemoryInfo {
    let Some(limit) = bytes().filter(|limit| *limit < info.total) else { return info };
    seen_with(limit, others_on(pci), info)
}

/// A device of `limit` bytes. Of the bytes in use, `others` do not count.
fn seen_with(limit: u64, others: u64, info: MemoryInfo) -> MemoryInfo {
    let used = info.total.saturating_sub(info.free).saturating_sub(others);
    MemoryInfo { free: info.free.min(limit.saturating_sub(used)), total: limit }
}

/// The size of a device as the program sees it. `total` is its size.
pub(super) fn visible_total(total: u64) -> u64 {
    bytes().map_or(total, |limit| limit.min(total))
}

/// What the program sees of a device that it knows by its ordinal.
pub(super) fn visible_on(device: impl FnOnce() -> i16, info: MemoryInfo) -> MemoryInfo {
    let Some(limit) = bytes().filter(|limit| *limit < info.total) else { return info };
    seen_with(limit, others_on_device(device()), info)
}

/// What the program sees of the calling thread's current device. `None` if the driver does not answer.
pub(super) fn visible_memory_info() -> Option<MemoryInfo> {
    memory_info().map(|info| visible_on(current_device, info))
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
    static KNOWN: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];
    let Some(known) = usize::try_from(device).ok().and_then(|index| KNOWN.get(index)) else { return 0 };
    if known.load(Ordering::Relaxed) == 0 {
        known.store(others_on(|| pci_address(device)).saturating_add(1), Ordering::Relaxed);
    }
    known.load(Ordering::Relaxed) - 1
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

/// Where a call takes memory.
#[derive(Clone, Copy)]
pub(super) enum Place {
    /// The calling thread's current device.
    Current,
    /// A location, encoded as [`super::memory::CallMemory::location`].
    Location(u64),
    /// A stream-ordered pool, 0 for that of the current device, for work of this stream.
    Pool {
        /// The handle.
        pool: u64,
        /// The stream.
        stream: u64,
    },
}

/// Makes a driver call that takes about `bytes` at `place`, and undoes it if the limit is exceeded. Returns the result
/// of the call, or that the device is out of memory.
#[inline]
pub(super) fn allocate(
    place: impl FnOnce() -> Place,
    bytes: impl FnOnce() -> u64,
    original: impl FnOnce() -> i32,
    undo: impl FnOnce(),
) -> i32 {
    if self::bytes().is_none() {
        return original();
    }
    let place = place();
    match device_of(place) {
        Some(device) if is_limited(device, place) => allocate_within(device, place, bytes(), original, undo),
        _ => original(),
    }
}

/// The device of a place. `None` for the host.
fn device_of(place: Place) -> Option<i16> {
    let device = match place {
        Place::Location(location) => ordinal(location, current_device),
        Place::Current | Place::Pool { .. } => current_device(),
    };
    (device >= 0).then_some(device)
}

/// Whether the limit is below the size of the device, and the call takes memory now.
fn is_limited(device: i16, place: Place) -> bool {
    // What a stream that is being captured allocates, its graph takes later.
    let is_captured = matches!(place, Place::Pool { stream, .. } if pools::is_capturing(stream));
    !is_captured && device_memory(device).is_some_and(|info| bytes().is_some_and(|limit| limit < info.total))
}

/// The bytes that are in use beyond the limit, and those that are free below it. One of them is 0.
fn beyond_and_free(device: i16) -> Option<(u64, u64)> {
    let (limit, info) = (bytes()?, device_memory(device)?);
    let used = info.total.saturating_sub(info.free).saturating_sub(others_on_device(device));
    Some((used.saturating_sub(limit), info.free.min(limit.saturating_sub(used))))
}

#[cold]
fn allocate_within(device: i16, place: Place, bytes: u64, original: impl FnOnce() -> i32, undo: impl FnOnce()) -> i32 {
    let _errno = RestoreErrno::new();
    let _lock = RunLock::take();
    let pool = match place {
        Place::Pool { pool: 0, .. } => pools::of_device(device),
        Place::Pool { pool, .. } => pool,
        Place::Current | Place::Location(_) => 0,
    };
    let has_room = || {
        let needed = bytes.saturating_sub(pools::unused_bytes(pool));
        needed == 0 || beyond_and_free(device).is_none_or(|(_, free)| needed <= free)
    };
    if !has_room() {
        // As the driver does before it fails: pools give back what they do not use.
        let _relaxed = RelaxedCapture::begin();
        if let Place::Pool { stream, .. } = place {
            pools::synchronize(stream);
        }
        if pool == 0 {
            pools::trim(pools::of_device(device), 0);
        }
        if !has_room() {
            return OUT_OF_MEMORY;
        }
    }
    let before = (beyond_and_free(device).map_or(0, |(beyond, _)| beyond), pools::reserved_bytes(pool));
    let result = original();
    let beyond = beyond_and_free(device).map_or(0, |(beyond, _)| beyond);
    if result != 0 || beyond <= before.0 {
        return result;
    }
    undo();
    if let Place::Pool { stream, .. } = place {
        let _relaxed = RelaxedCapture::begin();
        pools::synchronize(stream);
        pools::trim(pool, before.1);
    }
    OUT_OF_MEMORY
}

macro_rules! undoing {
    ($($(#[$doc:meta])* $name:ident => $function:ident($($arg:ident: $type:ty),*);)*) => {
        $(
            $(#[$doc])*
            pub(super) fn $name($($arg: $type),*) {
                let function = driver_original(&functions::$function::HOOK);
                if function.is_null() {
                    return;
                }
                // SAFETY: this is the signature of the function in cuda.h. The driver has just returned what is released.
                unsafe {
                    let function: unsafe extern "C-unwind" fn($($type),*) -> i32 = std::mem::transmute(function);
                    function($($arg),*);
                }
            }
        )*
    };
}

undoing! {
    /// Undoes `cuMemAlloc`.
    free => cuMemFree_v2(addr: u64);
    /// Undoes `cuMemAllocAsync`.
    free_async => cuMemFreeAsync(addr: u64, stream: u64);
    /// Undoes `cuMemAllocAsync` of a thread with its own default stream.
    free_async_ptsz => cuMemFreeAsync_ptsz(addr: u64, stream: u64);
    /// Undoes `cuMemCreate`.
    release => cuMemRelease(handle: u64);
    /// Undoes `cuArrayCreate`.
    destroy_array => cuArrayDestroy(handle: u64);
    /// Undoes `cuMipmappedArrayCreate`.
    destroy_mipmapped_array => cuMipmappedArrayDestroy(handle: u64);
    /// Undoes `cuGraphInstantiate`.
    destroy_graph => cuGraphExecDestroy(executable: u64);
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_smaller_device_has_what_the_limit_leaves() {
        let info = MemoryInfo { free: 70 * GIB, total: 80 * GIB };
        assert_eq!(seen_with(24 * GIB, 0, info), MemoryInfo { free: 14 * GIB, total: 24 * GIB });
        assert_eq!(seen_with(24 * GIB, 6 * GIB, info), MemoryInfo { free: 20 * GIB, total: 24 * GIB });
        assert_eq!(seen_with(24 * GIB, 20 * GIB, info), MemoryInfo { free: 24 * GIB, total: 24 * GIB });
        // Others have grown: no more than the device has.
        let full = MemoryInfo { free: GIB, total: 80 * GIB };
        assert_eq!(seen_with(24 * GIB, 70 * GIB, full), MemoryInfo { free: GIB, total: 24 * GIB });
        assert_eq!(seen_with(24 * GIB, 0, full), MemoryInfo { free: 0, total: 24 * GIB });
    }

    #[test]
    fn pci_addresses_of_nvml_and_cuda_are_compared() {
        assert!(same_pci("00000000:1B:00.0", "0000:1b:00.0"));
        assert!(!same_pci("00000001:1B:00.0", "0000:1b:00.0"));
    }
}
