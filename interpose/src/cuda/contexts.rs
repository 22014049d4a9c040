//! Readings of the memory in use when the program creates a CUDA context, of whatever kind.
//!
//! A context takes several hundred MiB, and no call says how much. The first one on a device is what is in use after
//! its creation. A later one is what has grown since a reading just before it.
//!
//! The event is written at once if the process is recorded already, else when it first allocates, on any device: a
//! program that does not allocate is not recorded.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use memtrace_trace::api::Api;
use memtrace_trace::event::{Event, UsageOccasion};
use memtrace_trace::ids::ModuleId;

use super::limit::visible_memory_info;
use super::location::current_device;
use super::reading::{Cause, MAX_DEVICES, MemoryInfo, event, has_primary, in_context};
use crate::recording::guard::Guard;
use crate::recording::paused::is_paused;
use crate::recording::process::Process;
use crate::recording::slot::Slot;

/// The contexts that the program has created on one device.
struct DeviceContexts {
    /// The memory that would be free with these contexts alone, in bytes.
    free: AtomicU64,
    /// The total bytes of the device. 0 before the first context.
    total: AtomicU64,
    /// The function that created the first one.
    api: AtomicU16,
}

static CREATED: [DeviceContexts; MAX_DEVICES] =
    [const { DeviceContexts { free: AtomicU64::new(0), total: AtomicU64::new(0), api: AtomicU16::new(0) } };
        MAX_DEVICES];

/// The devices for whose contexts this recording has an event, one bit each.
static WRITTEN: Slot<AtomicU64> = Slot::new();

/// Forgets which events were written, because a recording starts.
pub(super) fn start() {
    WRITTEN.set(AtomicU64::new(0));
}

/// Whether the recording has no event of the device's contexts. From now on it counts as having one.
fn is_unwritten(index: usize) -> bool {
    let bit = 1u64 << index;
    WRITTEN.get().is_some_and(|written| written.fetch_or(bit, Ordering::Relaxed) & bit == 0)
}

impl DeviceContexts {
    /// The driver's figures with these contexts alone. `None` before the first one.
    fn info(&self) -> Option<MemoryInfo> {
        let total = self.total.load(Ordering::Relaxed);
        (total > 0).then(|| MemoryInfo { free: self.free.load(Ordering::Relaxed), total })
    }

    /// Adds a context, after whose creation the driver has reported `after`. `before` is what it had reported before.
    /// `is_recorded` says whether the process may have allocated.
    fn add(&self, api: Api, before: Option<MemoryInfo>, after: MemoryInfo, is_recorded: bool) {
        match (self.info(), before) {
            (Some(known), Some(before)) => {
                let taken = before.free.saturating_sub(after.free);
                self.free.store(known.free.saturating_sub(taken), Ordering::Relaxed);
            }
            (Some(_), None) if is_recorded => {}
            (known, _) => {
                if known.is_none() {
                    self.api.store(api.0, Ordering::Relaxed);
                }
                self.free.store(after.free, Ordering::Relaxed);
                self.total.store(after.total, Ordering::Relaxed);
            }
        }
    }
}

/// The creation of a context, from before the call.
pub(super) struct Creation {
    api: Api,
    device: c_int,
    /// The driver's figures before the call. `None` unless the calling thread has another context of the device.
    before: Option<MemoryInfo>,
}

impl Creation {
    /// Starts before the call.
    pub(super) fn begin(api: Api, device: c_int) -> Creation {
        let has_context = c_int::from(current_device()) == device && device >= 0;
        Creation { api, device, before: if has_context { visible_memory_info() } else { None } }
    }

    /// Records the context that the call has created.
    pub(super) fn end(self, context: u64) {
        let Ok(index) = usize::try_from(self.device) else { return };
        let Some(contexts) = CREATED.get(index) else { return };
        let Some(after) = memory_info_in(context) else { return };
        let is_recorded = Process::if_started().is_some();
        let mut guard = if is_recorded && !is_paused() { Guard::enter() } else { None };
        if let Some(guard) = &mut guard {
            write_earlier(guard);
        }
        let is_first = contexts.info().is_none();
        contexts.add(self.api, self.before, after, is_recorded || is_paused());
        let Some(guard) = guard.as_mut().filter(|guard| guard.process().options.device_usage) else { return };
        let device = index as i16;
        is_unwritten(index);
        let cause = |occasion| Cause { occasion, api: self.api, module: ModuleId::NONE };
        if let Some(before) = self.before.filter(|_| !is_first) {
            guard.emit(event(device, cause(UsageOccasion::ContextRequested), before));
        }
        let (stack, context) = guard.stack_and_context();
        guard.emit(Event { stack, context, ..event(device, cause(UsageOccasion::ContextCreated), after) });
    }
}

/// Writes the event of the contexts of each device that were created before the process was recorded, unless that was
/// done.
#[cold]
pub(super) fn write_earlier(guard: &mut Guard) {
    if !guard.process().options.device_usage {
        return;
    }
    for (index, contexts) in CREATED.iter().enumerate() {
        let Some(info) = contexts.info() else { continue };
        if is_unwritten(index) {
            let api = Api(contexts.api.load(Ordering::Relaxed));
            let cause = Cause { occasion: UsageOccasion::ContextCreated, api, module: ModuleId::NONE };
            guard.emit(event(index as i16, cause, info));
        }
    }
}

/// Whether the device has no primary context yet. `false` if the driver does not answer.
pub(super) fn lacks_primary(device: c_int) -> bool {
    has_primary(device) == Some(false)
}

/// The driver's figures in a context that it has just returned, which may not be the calling thread's current one.
fn memory_info_in(context: u64) -> Option<MemoryInfo> {
    in_context(context, visible_memory_info)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn used(bytes: u64) -> MemoryInfo {
        MemoryInfo { free: 1000 * MIB - bytes, total: 1000 * MIB }
    }

    fn none() -> DeviceContexts {
        DeviceContexts { free: AtomicU64::new(0), total: AtomicU64::new(0), api: AtomicU16::new(0) }
    }

    #[test]
    fn a_later_context_is_what_has_grown_since_just_before_it() {
        let contexts = none();
        assert_eq!(contexts.info(), None);
        contexts.add(Api::cuCtxCreate_v4, None, used(300 * MIB), false);
        // 50 MiB of kernels were loaded between the two.
        contexts.add(Api::cuCtxCreate_v2, Some(used(350 * MIB)), used(650 * MIB), true);
        assert_eq!(contexts.info(), Some(used(600 * MIB)));
        assert_eq!(Api(contexts.api.load(Ordering::Relaxed)), Api::cuCtxCreate_v4);
    }

    #[test]
    fn without_a_reading_before_it_a_context_counts_while_nothing_was_allocated() {
        let contexts = none();
        contexts.add(Api::cuCtxCreate_v4, None, used(300 * MIB), false);
        contexts.add(Api::cuCtxCreate_v4, None, used(600 * MIB), false);
        assert_eq!(contexts.info(), Some(used(600 * MIB)));
        contexts.add(Api::cuCtxCreate_v4, None, used(990 * MIB), true);
        assert_eq!(contexts.info(), Some(used(600 * MIB)), "allocations since are no context");
    }
}
