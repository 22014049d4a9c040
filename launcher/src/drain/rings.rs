//! Empties the rings of one process and tracks which thread wrote each event.
//!
//! A thread of the traced process claims a free ring: it writes its kernel thread id into the ring's header. It never
//! releases the ring. A later thread takes over the ring of a thread that has ended. Only the traced process may decide
//! that. In a pid namespace of its own, its thread ids mean nothing to the launcher. A ring announces its writer with a
//! [`Definition::Thread`] that has no id. The word in the ring's header is used until the first announcement.

use memtrace_trace::definition::Definition;
use memtrace_trace::event::Event;
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::layout::RING_COUNT;
use memtrace_trace::shm::ring::{Consumer, Corrupt, Record};
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::sync::Ordering;
use memtrace_trace::wire::Cursor;

/// Receives the records that a pass over the rings finds.
pub(super) trait Intake {
    /// A new thread writes into the ring from here on. Returns the id for its events.
    ///
    /// `tid` is 0 when several threads share the ring and have not announced themselves.
    fn writer(&mut self, tid: u32, name: Option<&str>) -> ThreadId;
    /// Whether more records can be taken now. Records that are not taken stay in the rings.
    fn has_room(&mut self) -> bool;
    /// Whether the event with this number can be taken now. Otherwise it stays in its ring, with all later records.
    fn has_place(&mut self, seq: u64) -> bool;
    /// Receives an event.
    fn event(&mut self, event: Event);
    /// Receives an encoded definition that was not checked.
    fn definition(&mut self, bytes: &[u8]);
    /// Reports that a ring of this thread yielded this many slots.
    fn ring_done(&mut self, thread: ThreadId, slots: u64);
}

/// The drain loop's state for one ring.
#[derive(Clone, Default, Debug)]
struct RingState {
    owner: u32,
    thread: ThreadId,
    /// Whether the ring itself announced its writer.
    announced: bool,
    /// The second event of a slot whose first event was taken, while there is no place for the second.
    deferred: Option<Event>,
}

impl RingState {
    /// Passes an event on, or keeps it for the next pass. Returns false when it was kept: no later record may be taken
    /// then.
    fn pass_on(&mut self, event: Event, intake: &mut impl Intake) -> bool {
        if intake.has_place(event.seq) {
            intake.event(event);
        } else {
            self.deferred = Some(event);
        }
        self.deferred.is_none()
    }
}

/// The launcher's view of all rings of a segment.
#[derive(Default, Debug)]
pub(super) struct Rings {
    states: Vec<RingState>,
    /// The ring at which the last pass stopped because no more records could be taken.
    resume_at: usize,
    corrupt: u64,
}

impl Rings {
    /// The number of malformed records and slots found so far. The memtrace library writes none.
    pub(super) fn corrupt(&self) -> u64 {
        self.corrupt
    }

    fn used(segment: &Segment) -> usize {
        // No thread claims ring 0, the shared one, so it is always in use.
        (segment.header().rings_used.0.load(Ordering::Acquire) as usize).clamp(1, RING_COUNT)
    }

    /// Empties every ring once and passes the records to `intake`.
    pub(super) fn drain(&mut self, segment: &Segment, intake: &mut impl Intake) {
        let used = Rings::used(segment);
        if self.states.len() < used {
            self.states.resize(used, RingState::default());
        }
        let next_seq = &segment.header().next_seq.0;
        // Start where the last pass stopped. Otherwise the last rings would starve while the writer is behind.
        let first = std::mem::take(&mut self.resume_at).min(used - 1);
        for index in (first..used).chain(0..first) {
            let (Some(ring), Some(header), Some(state)) =
                (segment.ring(index), segment.ring_header(index), self.states.get_mut(index))
            else {
                continue;
            };
            let mut consumer = Consumer::new(ring);
            if consumer.pending() == 0 && state.deferred.is_none() {
                continue;
            }
            if !intake.has_room() {
                self.resume_at = index;
                break;
            }
            if let Some(event) = state.deferred.take()
                && !state.pass_on(event, intake)
            {
                continue;
            }
            let owner = if index == 0 { 0 } else { header.owner.0.tid() };
            if !state.announced && (state.thread.is_none() || state.owner != owner) {
                *state = RingState { owner, thread: intake.writer(owner, None), announced: false, deferred: None };
            }
            let mut corrupt = 0;
            let mut issued = 0;
            // A number that was never handed out would push valid events out of the reorder window.
            let mut is_issued = |seq: u64| {
                if seq >= issued {
                    issued = next_seq.load(Ordering::Relaxed);
                }
                seq != 0 && seq < issued
            };
            let result = consumer.drain_while(|record| match record {
                _ if state.deferred.is_some() => false,
                Record::Event(slot) => {
                    let Some(event) = Event::from_slot(&slot, state.thread) else {
                        corrupt += 1;
                        return true;
                    };
                    if !is_issued(event.seq) {
                        corrupt += 1;
                    } else if intake.has_place(event.seq) {
                        intake.event(event);
                    } else {
                        return false;
                    }
                    match event.completion(&slot) {
                        Some(completion) if is_issued(completion.seq) => {
                            state.pass_on(completion, intake);
                        }
                        Some(_) => corrupt += 1,
                        None => {}
                    }
                    true
                }
                Record::Definition(bytes) => {
                    match Definition::decode(&mut Cursor::new(bytes)) {
                        Ok(Some(Definition::Thread { id: ThreadId::NONE, tid, name })) => {
                            state.thread = intake.writer(tid, Some(name));
                            state.announced = true;
                        }
                        _ => intake.definition(bytes),
                    }
                    true
                }
            });
            self.corrupt += corrupt;
            match result {
                Ok(slots) => intake.ring_done(state.thread, slots),
                Err(Corrupt) => self.corrupt += 1,
            }
        }
    }
}
