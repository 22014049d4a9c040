//! The rings of one process: who owns them, emptying them, and giving those of dead threads back.
//!
//! A thread of the traced process claims a free ring by writing its kernel id into the ring's head; it never gives the ring
//! back. We do, when the thread no longer exists and the ring is empty: only then can there be no second producer.

use std::time::Duration;

use memtrace_trace::event::Event;
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::layout::RING_COUNT;
use memtrace_trace::shm::ring::{Consumer, Corrupt, Record};
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::sync::Ordering;

/// Below this many rings, dead ones are left alone: there is no shortage.
const FEW: usize = 8;
/// How often dead rings are looked for.
const SCAN_EVERY: Duration = Duration::from_millis(100);
/// The same when more than half of the rings are taken.
const SCAN_EVERY_WHEN_SHORT: Duration = Duration::from_millis(10);

/// Takes what is found while draining.
pub(super) trait Intake {
    /// A ring has a new owner (0: several threads share it); the answer is the id for its events.
    fn new_owner(&mut self, tid: u32) -> ThreadId;
    /// An event.
    fn event(&mut self, event: Event);
    /// An encoded definition, not checked.
    fn definition(&mut self, bytes: &[u8]);
    /// A ring of this thread gave that many slots.
    fn ring_done(&mut self, thread: ThreadId, slots: u64);
}

/// What we remember about one ring.
#[derive(Clone, Copy, Default, Debug)]
struct RingState {
    owner: u32,
    thread: ThreadId,
}

/// The launcher's view of all rings of a segment.
#[derive(Default, Debug)]
pub(super) struct Rings {
    states: Vec<RingState>,
    scanned_at: Duration,
    corrupt: u64,
}

impl Rings {
    /// How often something was found that no producer of ours writes.
    pub(super) fn corrupt(&self) -> u64 {
        self.corrupt
    }

    fn used(segment: &Segment) -> usize {
        // Ring 0, the shared one, is never claimed.
        (segment.header().rings_used.0.load(Ordering::Acquire) as usize).clamp(1, RING_COUNT)
    }

    /// Empties every ring once, handing what it finds to `intake`.
    pub(super) fn drain(&mut self, segment: &Segment, intake: &mut impl Intake) {
        let used = Rings::used(segment);
        if self.states.len() < used {
            self.states.resize(used, RingState::default());
        }
        let next_seq = &segment.header().next_seq.0;
        for index in 0..used {
            let (Some(ring), Some(header), Some(state)) =
                (segment.ring(index), segment.ring_header(index), self.states.get_mut(index))
            else {
                continue;
            };
            let mut consumer = Consumer::new(ring);
            if consumer.pending() == 0 {
                continue;
            }
            let owner = if index == 0 { 0 } else { header.owner.0.load(Ordering::Acquire) };
            if state.thread.is_none() || state.owner != owner {
                *state = RingState { owner, thread: intake.new_owner(owner) };
            }
            let thread = state.thread;
            let mut corrupt = 0;
            let mut issued = 0;
            let result = consumer.drain(|record| match record {
                Record::Event(slot) => match Event::from_slot(&slot, thread) {
                    Some(event) => {
                        if event.seq >= issued {
                            issued = next_seq.load(Ordering::Relaxed);
                        }
                        // A number that was never handed out would push the true ones out of the reorder window.
                        if event.seq == 0 || event.seq >= issued {
                            corrupt += 1;
                        } else {
                            intake.event(event);
                        }
                    }
                    None => corrupt += 1,
                },
                Record::Definition(bytes) => intake.definition(bytes),
            });
            self.corrupt += corrupt;
            match result {
                Ok(slots) => intake.ring_done(thread, slots),
                Err(Corrupt) => self.corrupt += 1,
            }
        }
    }

    /// Gives rings of dead threads back, now and then, when there are many.
    pub(super) fn free_dead(&mut self, segment: &Segment, dir: &crate::proc::ProcessDir, now: Duration) {
        let used = Rings::used(segment);
        let pause = if used > RING_COUNT / 2 { SCAN_EVERY_WHEN_SHORT } else { SCAN_EVERY };
        if used <= FEW || now.saturating_sub(self.scanned_at) < pause {
            return;
        }
        self.scanned_at = now;
        let Some(mut alive) = dir.threads() else { return };
        alive.sort_unstable();
        for index in 1..used {
            let (Some(ring), Some(header)) = (segment.ring(index), segment.ring_header(index)) else { continue };
            let owner = header.owner.0.load(Ordering::Acquire);
            if owner == 0 || alive.binary_search(&owner).is_ok() {
                continue;
            }
            // A thread born after the list was made is not dead: ask again. Then look into the ring, in this order: a dead
            // thread writes no more.
            if dir.has_thread(owner) == Some(false) && Consumer::new(ring).pending() == 0 {
                let _ = header.owner.0.compare_exchange(owner, 0, Ordering::AcqRel, Ordering::Relaxed);
                if let Some(state) = self.states.get_mut(index) {
                    *state = RingState::default();
                }
            }
        }
    }
}
