//! Keeps out the allocator's events of a device until its state is known, when memtrace attaches to a running process.
//!
//! PyTorch's snapshot function records an event under the device's lock. The events of the device before it belong to
//! the snapshot, and those after it are recorded.
//!
//! # Order
//!
//! Whoever asks [`admits`] for a device holds that device's lock of PyTorch's allocator, and so does the thread in
//! whose snapshot event [`admit_next`] is called. The lock orders the two: an event that comes after the snapshot's
//! sees the device's bit and its bytes. [`close`] comes before the tracker is attached, which takes the lock of each
//! device, so every event sees it. Its Release, with the Acquire of [`is_open`], is for events of a tracker that was
//! attached before. Only the thread of the snapshot compares its own number with [`SNAPSHOT_THREAD`], and it reads what
//! it has written.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

use memtrace_trace::clock;

use crate::recording::process::thread_id;

/// Devices beyond this number share a bit with others.
const DEVICES: usize = 64;

/// Whether the state of some device is not known.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);
/// The devices whose state is known, one bit each.
static ADMITTED: AtomicU64 = AtomicU64::new(0);
/// The thread that takes the snapshot. 0 if none does.
static SNAPSHOT_THREAD: AtomicU32 = AtomicU32::new(0);
/// The device whose state it takes next. It takes those of all devices in their order.
static NEXT_DEVICE: AtomicU32 = AtomicU32::new(0);
/// When it began.
static SNAPSHOT_BEGAN: AtomicU64 = AtomicU64::new(0);
/// The active bytes of each device, as the event of its snapshot has them. -1 without such an event.
static ACTIVE: [AtomicI64; DEVICES] = [const { AtomicI64::new(-1) }; DEVICES];

fn index(device: i16) -> usize {
    usize::from(device.unsigned_abs()) % DEVICES
}

/// Whether the events of all devices are recorded.
#[inline(always)]
pub(super) fn is_open() -> bool {
    !IS_CLOSED.load(Ordering::Acquire)
}

/// Whether the events of this device are recorded.
pub(super) fn admits(device: i16) -> bool {
    ADMITTED.load(Ordering::Relaxed) >> index(device) & 1 != 0
}

/// Keeps out the events of all devices.
pub(crate) fn close() {
    ADMITTED.store(0, Ordering::Relaxed);
    ACTIVE.iter().for_each(|active| active.store(-1, Ordering::Relaxed));
    IS_CLOSED.store(true, Ordering::Release);
}

/// Records the events of all devices.
pub(crate) fn open() {
    IS_CLOSED.store(false, Ordering::Release);
}

/// Calls `take`, which takes the snapshot on this thread.
pub(crate) fn while_taking_snapshot<T>(take: impl FnOnce() -> T) -> T {
    SNAPSHOT_BEGAN.store(clock::now(), Ordering::Relaxed);
    NEXT_DEVICE.store(0, Ordering::Relaxed);
    SNAPSHOT_THREAD.store(thread_id(), Ordering::Relaxed);
    let result = take();
    SNAPSHOT_THREAD.store(0, Ordering::Relaxed);
    result
}

/// Whether this thread takes the snapshot.
pub(super) fn is_taking_snapshot() -> bool {
    SNAPSHOT_THREAD.load(Ordering::Relaxed) == thread_id()
}

/// When the snapshot began.
pub(crate) fn snapshot_began() -> u64 {
    SNAPSHOT_BEGAN.load(Ordering::Relaxed)
}

/// Records the events of the next device from now on. `active` is the active bytes in its snapshot, whose event has no
/// device (it is always 0).
pub(super) fn admit_next(active: u64) {
    let device = NEXT_DEVICE.fetch_add(1, Ordering::Relaxed) as i16;
    if let Some(known) = ACTIVE.get(index(device)) {
        known.store(active as i64, Ordering::Relaxed);
    }
    ADMITTED.fetch_or(1 << index(device), Ordering::Relaxed);
}

/// The active bytes of a device, as PyTorch counted them in the snapshot. `None` without an event of it.
pub(crate) fn active(device: i16) -> Option<u64> {
    u64::try_from(ACTIVE.get(index(device))?.load(Ordering::Relaxed)).ok()
}
