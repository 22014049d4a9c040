//! Allocations under a limit ([`super::limit`]).
//!
//! An allocation is made, and undone if the device's memory in use then exceeds the limit. So the limit holds for all
//! processes of the run together, contexts and code count, and rounding is the driver's own. A file lock of the run makes
//! an allocation and its check one step.

use super::limit;
use super::location::{current_device, ordinal};
use super::memory::OUT_OF_MEMORY;
use super::pools;
use super::reading::{RelaxedCapture, device_memory};
use crate::recording::errno::RestoreErrno;
use crate::recording::run_lock::RunLock;

/// Where a call takes memory.
#[derive(Clone, Copy)]
pub(super) enum MemorySource {
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

/// Makes a driver call that takes about `bytes` from `source`, and undoes it if the limit is exceeded. Returns the result
/// of the call, or that the device is out of memory.
#[inline]
pub(super) fn allocate(
    source: impl FnOnce() -> MemorySource,
    bytes: impl FnOnce() -> u64,
    original: impl FnOnce() -> i32,
    undo: impl FnOnce(),
) -> i32 {
    if limit::bytes().is_none() {
        return original();
    }
    let source = source();
    match device_of(source) {
        Some(device) if is_limited(device, source) => allocate_within(device, source, bytes(), original, undo),
        _ => original(),
    }
}

/// The device of a source of memory. `None` for the host.
fn device_of(source: MemorySource) -> Option<i16> {
    let device = match source {
        MemorySource::Location(location) => ordinal(location, current_device),
        MemorySource::Current | MemorySource::Pool { .. } => current_device(),
    };
    (device >= 0).then_some(device)
}

/// Whether the limit is below the size of the device, and the call takes memory now.
fn is_limited(device: i16, source: MemorySource) -> bool {
    // What a stream that is being captured allocates, its graph takes later.
    let is_captured = matches!(source, MemorySource::Pool { stream, .. } if pools::is_capturing(stream));
    !is_captured && device_memory(device).is_some_and(|info| limit::bytes().is_some_and(|limit| limit < info.total))
}

/// The bytes that are in use beyond the limit, and those that are free below it. One of them is 0.
fn beyond_and_free(device: i16) -> Option<(u64, u64)> {
    let (limit, info) = (limit::bytes()?, device_memory(device)?);
    let used = info.total.saturating_sub(info.free).saturating_sub(limit::others_on_device(device));
    Some((used.saturating_sub(limit), info.free.min(limit.saturating_sub(used))))
}

#[cold]
fn allocate_within(
    device: i16,
    source: MemorySource,
    bytes: u64,
    original: impl FnOnce() -> i32,
    undo: impl FnOnce(),
) -> i32 {
    let _errno = RestoreErrno::new();
    let _lock = RunLock::take();
    let pool = match source {
        MemorySource::Pool { pool: 0, .. } => pools::of_device(device),
        MemorySource::Pool { pool, .. } => pool,
        MemorySource::Current | MemorySource::Location(_) => 0,
    };
    let has_room = || {
        let needed = bytes.saturating_sub(pools::unused_bytes(pool));
        needed == 0 || beyond_and_free(device).is_none_or(|(_, free)| needed <= free)
    };
    if !has_room() {
        // As the driver does before it fails: the device's pool gives back what it does not use.
        if pool == 0 {
            let _relaxed = RelaxedCapture::begin();
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
    if let MemorySource::Pool { stream, .. } = source {
        let _relaxed = RelaxedCapture::begin();
        pools::synchronize(stream);
        pools::trim(pool, before.1);
    }
    OUT_OF_MEMORY
}
