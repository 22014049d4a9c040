//! Allocations under a limit ([`super::limit`]).
//!
//! An allocation is made, and undone if the device's memory in use then exceeds the limit. So the limit holds for all
//! processes of the run together, contexts and code count, and rounding is the driver's own. A lock of the run makes an
//! allocation and its check one step.

use memtrace_trace::api::OUT_OF_MEMORY;

use super::limit::{self, Room};
use super::location::{current_device, ordinal};
use super::pools;
use super::reading::{RelaxedCapture, device_memory};
use crate::recording::errno::RestoreErrno;
use crate::recording::run_lock::HeldRunLock;

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

/// Makes a driver call that takes about `bytes` from `source`, and undoes it if the limit is exceeded. Returns the
/// result of the call, or that the device is out of memory.
#[inline]
pub(super) fn allocate(
    source: impl FnOnce() -> MemorySource,
    bytes: impl FnOnce() -> u64,
    original: impl FnOnce() -> i32,
    undo: impl FnOnce(),
) -> i32 {
    if limit::is_known_to_be_none() {
        return original();
    }
    allocate_with_checks(source, bytes, original, undo)
}

/// [`allocate`] for the first allocation of a process, and under a limit.
#[cold]
fn allocate_with_checks(
    source: impl FnOnce() -> MemorySource,
    bytes: impl FnOnce() -> u64,
    original: impl FnOnce() -> i32,
    undo: impl FnOnce(),
) -> i32 {
    if limit::begin_allocation().is_none() {
        return original();
    }
    let source = source();
    // Memory that a stream allocates during a capture is used later by its graph.
    let is_captured = matches!(source, MemorySource::Pool { stream, .. } if pools::is_capturing(stream));
    match device_of(source) {
        Some(device) if !is_captured => allocate_within(device, source, bytes(), original, undo),
        _ => original(),
    }
}

/// Begins an allocation that no limit concerns.
#[inline(always)]
pub(super) fn begin() {
    if !limit::is_known_to_be_none() {
        limit::begin_allocation();
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

/// The room on a device. `None` if it has no limit, or if this process has no context there.
fn room(device: i16) -> Option<Room> {
    limit::room(device, device_memory(device)?)
}

fn allocate_within(
    device: i16,
    source: MemorySource,
    bytes: u64,
    original: impl FnOnce() -> i32,
    undo: impl FnOnce(),
) -> i32 {
    let _errno = RestoreErrno::new();
    let _lock = HeldRunLock::take();
    let pool = match source {
        MemorySource::Pool { pool: 0, .. } => pools::of_device(device),
        MemorySource::Pool { pool, .. } => pool,
        MemorySource::Current | MemorySource::Location(_) => 0,
    };
    let Some(mut before) = room(device) else { return original() };
    let has_room = |room: Room| bytes.saturating_sub(pools::unused_bytes(pool)) <= room.free;
    if !has_room(before) {
        // As the driver does before it fails: the device's pool gives back what it does not use.
        if pool == 0 {
            let _relaxed = RelaxedCapture::begin();
            pools::trim(pools::of_device(device), 0);
            before = room(device).unwrap_or(before);
        }
        if !has_room(before) {
            return OUT_OF_MEMORY;
        }
    }
    let reserved = pools::reserved_bytes(pool);
    let result = original();
    if result != 0 || room(device).is_none_or(|after| after.beyond <= before.beyond) {
        return result;
    }
    undo();
    if let MemorySource::Pool { stream, .. } = source {
        let _relaxed = RelaxedCapture::begin();
        pools::synchronize(stream);
        pools::trim(pool, reserved);
    }
    OUT_OF_MEMORY
}
