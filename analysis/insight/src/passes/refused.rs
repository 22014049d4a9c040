//! Requests for memory that CUDA has refused to callers other than PyTorch's caching allocator, whose errors are
//! [`super::Oom`].
//!
//! A request counts as served, and is left out, if its thread soon gets memory in its place: the same number of bytes
//! for the same library, or as its next allocation less at the same place. So XLA asks for ever smaller regions, and
//! programs try smaller batches.

use memtrace_trace::api::{Api, MemoryKind, OUT_OF_MEMORY};
use memtrace_trace::event::{Action, Event, Flags, UsageOccasion};
use memtrace_trace::ids::{ContextId, ModuleId, StackId, ThreadId};

use super::reserved::Reserved;
use memtrace_input::EventSource;
use memtrace_replay::{Owner, Replay};

/// The number of places kept in full.
const MAX_PLACES: usize = 32;

/// Requests of one place that were refused one after the other. Sizes are in bytes.
#[derive(Clone, PartialEq, Debug)]
pub struct RefusedRequest {
    /// `seq` of the last request's event.
    pub seq: u64,
    /// The device ordinal. -1 for host memory.
    pub device: i16,
    /// The smallest request.
    pub requested: u64,
    /// How many requests were refused.
    pub times: u64,
    /// The caller.
    pub caller: CudaCaller,
    /// The step, counted from 0. `None` before the first step.
    pub step: Option<u32>,
    /// Whether the process has allocated memory afterwards.
    pub continued: bool,
    /// The memory at that time.
    pub memory: MemoryAtRefusal,
    /// Whether the next allocation of the thread may still serve it.
    is_open: bool,
}

/// The free and the total bytes of a device.
pub type FreeAndTotal = (u64, u64);

/// Who has called CUDA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaCaller {
    /// The function.
    pub api: Api,
    /// The object that called it.
    pub module: ModuleId,
    /// The stack and the context.
    pub at: (StackId, ContextId),
    /// The thread.
    pub thread: ThreadId,
}

/// Where the memory of a device was when a request was refused. Sizes are in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryAtRefusal {
    /// Free and total memory of the device as the driver reported them. `None` if it was not asked.
    pub free_and_total: Option<FreeAndTotal>,
    /// The reserved memory of PyTorch's caching allocator. `None` without PyTorch.
    pub reserved: Option<Reserved>,
    /// By owner: the memory of this process outside the caching allocator.
    pub outside_pytorch: Vec<(Owner, u64)>,
    /// The unused memory of stream-ordered pools.
    pub unused_pools: u64,
}

/// The requests of all devices of a process that nothing has served.
#[derive(Clone, Debug, Default)]
pub struct RefusedRequestLog {
    /// The requests, in the order of their last events.
    pub requests: Vec<RefusedRequest>,
    /// The number of requests at further places.
    pub left_out: u64,
}

/// Collects [`RefusedRequestLog`].
#[derive(Clone, Debug, Default)]
pub(crate) struct RefusedRequests {
    log: RefusedRequestLog,
    /// The latest reading after a refusal, with its device and thread, until it is assigned.
    reading: Option<(i16, ThreadId, FreeAndTotal)>,
}

impl From<RefusedRequests> for RefusedRequestLog {
    fn from(collector: RefusedRequests) -> RefusedRequestLog {
        collector.log
    }
}

impl RefusedRequests {
    /// Observes a replayed event of the current step.
    #[inline]
    pub(super) fn observe(&mut self, replay: &Replay, step: Option<u32>, e: &Event) {
        if e.result == OUT_OF_MEMORY && is_request(e) {
            self.refused(replay, step, e);
        } else if e.action == Action::DeviceUsage && e.occasion() == UsageOccasion::OutOfMemory {
            self.read(e);
        } else if !self.log.requests.is_empty() {
            self.observe_later(e);
        }
    }

    #[cold]
    fn refused(&mut self, replay: &Replay, step: Option<u32>, e: &Event) {
        let caller = CudaCaller { api: e.api, module: e.module, at: (e.stack, e.context), thread: e.thread };
        let earlier = self.log.requests.iter().position(|one| one.device == e.device && one.caller == caller);
        if earlier.is_none() && self.log.requests.len() == MAX_PLACES {
            self.log.left_out += 1;
            return;
        }
        let (requested, times) = match earlier.map(|at| self.log.requests.remove(at)) {
            Some(one) => (one.requested.min(e.size), one.times + 1),
            None => (e.size, 1),
        };
        // Inside a runtime call, the refusal of the driver's call was the occasion of a reading.
        let is_inner = |(device, thread, _): &(i16, ThreadId, FreeAndTotal)| {
            e.flags.contains(Flags::HAS_NESTED) && (*device, *thread) == (e.device, e.thread)
        };
        let reading = self.reading.take().filter(is_inner);
        let pytorch = replay.devices().iter().find(|one| one.device == e.device && one.source == EventSource::Torch);
        self.log.requests.push(RefusedRequest {
            seq: e.seq,
            device: e.device,
            requested,
            times,
            caller,
            step,
            continued: false,
            memory: MemoryAtRefusal {
                free_and_total: reading.map(|(_, _, reading)| reading),
                reserved: pytorch.map(|device| Reserved::of(&device.allocator, 0)),
                outside_pytorch: replay.physical().owners_outside_allocator(e.device),
                unused_pools: replay.physical().unused_pool_bytes(e.device),
            },
            is_open: true,
        });
    }

    /// Observes a reading, which follows the event of the refused call.
    #[cold]
    fn read(&mut self, e: &Event) {
        let reading = (e.free_bytes(), e.size);
        let is_its = |one: &&mut RefusedRequest| {
            (one.device, one.caller.module, one.caller.thread) == (e.device, e.module, e.thread)
        };
        let last = self.log.requests.last_mut().filter(is_its).map(|one| &mut one.memory);
        match last.filter(|memory| memory.free_and_total.is_none()) {
            Some(memory) => memory.free_and_total = Some(reading),
            None => self.reading = Some((e.device, e.thread, reading)),
        }
    }

    /// Observes an event after a refusal.
    #[cold]
    fn observe_later(&mut self, e: &Event) {
        if e.action != Action::Alloc || e.result != 0 || e.flags.contains(Flags::NESTED) {
            return;
        }
        self.log.requests.retain(|one| !one.is_served_by(e));
        for one in &mut self.log.requests {
            one.continued = true;
            one.is_open &= one.caller.thread != e.thread;
        }
    }
}

impl RefusedRequest {
    fn is_served_by(&self, e: &Event) -> bool {
        if e.source.is_torch()
            || (self.device, self.caller.module, self.caller.thread) != (e.device, e.module, e.thread)
        {
            return false;
        }
        e.size == self.requested || self.is_open && self.caller.at.0 == e.stack
    }
}

/// Whether a CUDA call requests memory that the program is to use.
fn is_request(e: &Event) -> bool {
    let takes_memory = !matches!(
        e.api.memory_kind(),
        None | Some(MemoryKind::Address | MemoryKind::Imported | MemoryKind::Registered)
    );
    // Of a runtime call and the driver call inside it, the outer one counts.
    let is_inner = e.flags.contains(Flags::NESTED) || e.flags.contains(Flags::IN_ALLOCATOR);
    e.action == Action::Alloc && !e.source.is_torch() && takes_memory && !is_inner
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::event::Source;

    const GIB: u64 = 1 << 30;

    fn request(seq: u64, size: u64, result: i32, stack: u32) -> Event {
        let api = Api(1);
        Event { seq, size, result, api, stack: StackId(stack), device: 0, source: Source::Driver, ..Event::EMPTY }
    }

    /// The refused requests that nothing has served: their numbers, how often, and the bytes.
    fn unserved(events: &[Event]) -> Vec<(u64, u64, u64)> {
        let replay = Replay::default();
        let mut requests = RefusedRequests::default();
        for e in events {
            requests.observe(&replay, None, e);
        }
        requests.log.requests.iter().map(|one| (one.seq, one.times, one.requested)).collect()
    }

    #[test]
    fn refused_requests_are_kept_with_the_memory_that_was_free() {
        let occasion = UsageOccasion::OutOfMemory as u64;
        let reading = Event { addr: 3 * GIB, size: 80 * GIB, stream: occasion, ..request(2, 0, 0, 0) };
        let reading = Event { action: Action::DeviceUsage, ..reading };
        let mut requests = RefusedRequests::default();
        for e in [request(1, 4 * GIB, 2, 7), reading] {
            requests.observe(&Replay::default(), Some(3), &e);
        }
        let RefusedRequestLog { requests, left_out } = requests.into();
        let [one] = &requests[..] else { panic!("{requests:?}") };
        assert_eq!((one.memory.free_and_total, one.step, left_out), (Some((3 * GIB, 80 * GIB)), Some(3), 0));
        assert!(!one.continued);
    }

    #[test]
    fn a_reading_inside_a_runtime_call_precedes_the_refusal() {
        let occasion = UsageOccasion::OutOfMemory as u64;
        let inner = Event { flags: Flags::NESTED, ..request(1, 4 * GIB, 2, 7) };
        let reading =
            Event { addr: 3 * GIB, size: 80 * GIB, stream: occasion, module: ModuleId(9), ..request(2, 0, 0, 0) };
        let reading = Event { action: Action::DeviceUsage, ..reading };
        let mut requests = RefusedRequests::default();
        let outer = Event { flags: Flags::HAS_NESTED, ..request(3, 4 * GIB, 2, 7) };
        for e in [inner, reading, outer] {
            requests.observe(&Replay::default(), None, &e);
        }
        assert_eq!(requests.log.requests[0].memory.free_and_total, Some((3 * GIB, 80 * GIB)));
    }

    #[test]
    fn requests_that_were_served_later_are_left_out() {
        // The same bytes again, from another line.
        let freed = Event { action: Action::FreeCompleted, ..request(2, 9, 0, 1) };
        assert_eq!(unserved(&[request(1, 4 * GIB, 2, 7), freed, request(3, 4 * GIB, 0, 8)]), []);
        // Ever less, at the same place.
        let tries = [request(1, 4 * GIB, 2, 7), request(2, 3 * GIB, 2, 7), request(3, 2 * GIB, 0, 7)];
        assert_eq!(unserved(&tries), []);
        // In vain.
        assert_eq!(unserved(&tries[..2]), [(2, 2, 3 * GIB)]);
    }

    #[test]
    fn other_allocations_serve_no_request() {
        let other_thread = Event { thread: ThreadId(5), ..request(2, 4 * GIB, 0, 7) };
        let later = [request(2, GIB, 0, 8), request(3, 2 * GIB, 0, 7)];
        assert_eq!(unserved(&[request(1, 4 * GIB, 2, 7), other_thread]), [(1, 1, 4 * GIB)]);
        assert_eq!(unserved(&[request(1, 4 * GIB, 2, 7), later[0], later[1]]), [(1, 1, 4 * GIB)]);
    }

    #[test]
    fn calls_of_pytorchs_allocator_and_inner_calls_do_not_count() {
        for flag in [Flags::NESTED, Flags::IN_ALLOCATOR] {
            assert_eq!(unserved(&[Event { flags: flag, ..request(1, GIB, 2, 7) }]), []);
        }
        assert_eq!(unserved(&[Event { action: Action::Reserve, api: Api(15), ..request(1, GIB, 2, 7) }]), []);
    }
}
