//! Readings of how much of a device's memory is in use, by this process, other processes and the driver itself.
//!
//! The driver takes memory for contexts, modules and kernels, and no call says how much. A reading after each call that
//! makes it take memory, and at few other points in time, shows it: what has grown beyond the recorded allocations.
//!
//! A reading is one `cuMemGetInfo`. When it is taken depends on what the program does, never on time:
//! - when the program creates a context ([`super::contexts`]), and when it loads code;
//! - when it has allocated [`GROWTH_BYTES`] or [`GROWTH_SHARE`] beyond the highest reading;
//! - when an allocation fails for lack of memory, ever more rarely, and when PyTorch reports that without a failed
//!   call: a library that limits memory has refused one;
//! - when memtrace has scanned for tensor names.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use memtrace_trace::api::Api;
use memtrace_trace::event::UsageOccasion;
use memtrace_trace::ids::ModuleId;

use super::contexts;
use super::limit::visible_memory_info;
use super::location::current_device;
use super::reading::{Cause, MAX_DEVICES, event};
use crate::recording::guard::Guard;
use crate::recording::paused::is_paused;
use crate::recording::process::Process;
use crate::recording::slot::Slot;
use crate::torch::tracker;

/// A reading is due when the memory in use may have grown by this many bytes beyond the highest reading, or by this
/// part of it, whichever is more. So their number grows with the logarithm of the memory.
const GROWTH_BYTES: u64 = 32 << 20;
const GROWTH_SHARE: u64 = 100;
/// A program that frees and allocates the same memory again causes readings that find nothing new. Each one doubles the
/// distance to the next, at most this often.
const MAX_DOUBLINGS: u32 = 4;
/// All of the first failed allocations cause readings, then those whose number is a power of two.
const FIRST_FAILURES: u32 = 16;

/// The readings of one device in one recording.
#[derive(Default)]
struct DeviceReadings {
    /// Bytes that were allocated since the last reading.
    allocated: AtomicU64,
    /// How many bytes may be allocated until the next reading is due. 0 before the first one.
    allowance: AtomicU64,
    /// The most bytes in use at a reading.
    highest: AtomicU64,
    /// How often the distance to the next reading was doubled.
    doublings: AtomicU32,
    failures: AtomicU32,
    /// Whether an allocation has failed since PyTorch last reported that it is out of memory.
    has_failed: AtomicBool,
}

impl DeviceReadings {
    /// Counts allocated bytes. Returns whether a reading is due.
    #[inline]
    fn count(&self, bytes: u64) -> bool {
        let allocated = self.allocated.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        allocated > self.allowance.load(Ordering::Relaxed)
    }

    /// Notes the result of a reading; `is_due` says that allocations made it due. Returns whether it is the first one.
    fn take(&self, used: u64, is_due: bool) -> bool {
        let is_first = self.allowance.load(Ordering::Relaxed) == 0;
        let before = self.highest.fetch_max(used, Ordering::Relaxed);
        let doublings = match self.doublings.load(Ordering::Relaxed) {
            _ if used > before => 0,
            doublings if is_due => (doublings + 1).min(MAX_DOUBLINGS),
            doublings => doublings,
        };
        self.doublings.store(doublings, Ordering::Relaxed);
        let highest = before.max(used);
        let distance = GROWTH_BYTES.max(highest / GROWTH_SHARE) << doublings;
        self.allowance.store(highest - used + distance, Ordering::Relaxed);
        self.allocated.store(0, Ordering::Relaxed);
        is_first
    }
}

static READINGS: Slot<[DeviceReadings; MAX_DEVICES]> = Slot::new();

/// Forgets the readings, because a recording starts.
pub(super) fn start() {
    READINGS.set(std::array::from_fn(|_| DeviceReadings::default()));
    tracker::before_out_of_memory(out_of_memory_in_pytorch);
    contexts::start();
}

fn readings(device: i16) -> Option<&'static DeviceReadings> {
    READINGS.get()?.get(usize::try_from(device).ok()?)
}

/// Counts bytes that this process has allocated on a device, after their event, and takes a reading if one is due.
#[inline]
pub(super) fn allocated(guard: &mut Guard, device: i16, bytes: u64, api: Api, module: ModuleId) {
    let Some(readings) = readings(device) else { return };
    if readings.count(bytes) {
        read(guard, device, Cause { occasion: UsageOccasion::Allocated, api, module });
    }
}

/// Reads the memory in use after an allocation has failed for lack of memory.
#[cold]
pub(super) fn out_of_memory(guard: &mut Guard, device: i16, api: Api, module: ModuleId) {
    let Some(readings) = readings(device) else { return };
    readings.has_failed.store(true, Ordering::Relaxed);
    count_failure(guard, readings, device, Cause { occasion: UsageOccasion::OutOfMemory, api, module });
}

fn count_failure(guard: &mut Guard, readings: &DeviceReadings, device: i16, cause: Cause) {
    let failures = readings.failures.fetch_add(1, Ordering::Relaxed);
    if failures < FIRST_FAILURES || failures.is_power_of_two() {
        read(guard, device, cause);
    }
}

/// Reads the memory in use when PyTorch reports that it is out of memory, unless the call that failed has caused a
/// reading.
#[cold]
fn out_of_memory_in_pytorch(guard: &mut Guard, device: i16) {
    let Some(readings) = readings(device) else { return };
    if !readings.has_failed.swap(false, Ordering::Relaxed) {
        let cause = Cause { occasion: UsageOccasion::OutOfMemory, api: Api::NONE, module: ModuleId::NONE };
        count_failure(guard, readings, device, cause);
    }
}

/// Reads the memory in use on the calling thread's device if this process records events of it.
#[cold]
pub(super) fn code_loaded(api: Api, module: impl FnOnce(&mut Guard) -> ModuleId) {
    read_if_recorded(|guard| Cause { occasion: UsageOccasion::CodeLoaded, api, module: module(guard) });
}

/// Reads the memory in use on the calling thread's device after a scan of the program's objects.
pub(crate) fn scanned() {
    read_if_recorded(|_| Cause { occasion: UsageOccasion::Scan, api: Api::NONE, module: ModuleId::NONE });
}

/// Reads the memory in use if there is a reading of this device already. So a program that does not allocate is not
/// recorded.
fn read_if_recorded(cause: impl FnOnce(&mut Guard) -> Cause) {
    if is_paused() || Process::if_started().is_none() {
        return;
    }
    let device = current_device();
    if readings(device).is_none_or(|readings| readings.allowance.load(Ordering::Relaxed) == 0) {
        return;
    }
    if let Some(mut guard) = Guard::enter() {
        let cause = cause(&mut guard);
        read(&mut guard, device, cause);
    }
}

/// Reads the memory in use and writes its event. The first one of a device also writes those of all contexts that were
/// created before.
#[cold]
fn read(guard: &mut Guard, device: i16, cause: Cause) {
    if !guard.process().options.device_usage {
        return;
    }
    let Some(readings) = readings(device) else { return };
    // The driver answers for the current device only.
    if current_device() != device {
        return;
    }
    let Some(info) = visible_memory_info() else { return };
    let used = info.total.saturating_sub(info.free);
    let is_first = readings.take(used, cause.occasion == UsageOccasion::Allocated);
    if is_first {
        contexts::write_earlier(guard);
    }
    guard.emit(event(device, cause, info));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Allocates and frees as `changes` say, in bytes. Returns the bytes in use at each reading that was due.
    fn readings_of(readings: &DeviceReadings, used: &mut u64, changes: impl Iterator<Item = i64>) -> Vec<u64> {
        let mut found = Vec::new();
        for change in changes {
            *used = used.saturating_add_signed(change);
            if change > 0 && readings.count(change.unsigned_abs()) {
                readings.take(*used, true);
                found.push(*used);
            }
        }
        found
    }

    #[test]
    fn the_number_of_readings_grows_with_the_logarithm_of_the_memory() {
        let (readings, mut used) = (DeviceReadings::default(), 500 * MIB);
        let page = 2 * MIB as i64;
        let found = readings_of(&readings, &mut used, std::iter::repeat_n(page, 141 << 9));
        assert_eq!(found.first(), Some(&(502 * MIB)), "the first allocation is read");
        assert!((300..600).contains(&found.len()), "{}", found.len());
        // The last reading is within a hundredth of the most that was in use.
        assert!(used - found.last().unwrap() <= used / GROWTH_SHARE + 2 * MIB);
    }

    #[test]
    fn memory_that_comes_and_goes_is_read_rarely() {
        let (readings, mut used) = (DeviceReadings::default(), 500 * MIB);
        let block = 64 * MIB as i64;
        let turns = (0..3200).map(|turn| if turn % 2 == 0 { block } else { -block });
        let found = readings_of(&readings, &mut used, turns);
        // 1,600 allocations of 64 MiB: at the end a reading in 512 MiB.
        assert!((100..300).contains(&found.len()), "{}", found.len());
        // Growth is then noticed after as much, and the distance is short again.
        let found = readings_of(&readings, &mut used, std::iter::repeat_n(block, 20));
        assert!(found.len() >= 10 && found[0] <= (500 + 640) * MIB, "{found:?}");
    }
}
