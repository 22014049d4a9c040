//! The rings of one process: emptying them, and who wrote what is in them.
//!
//! A thread of the traced process claims a free ring by writing its kernel id into the ring's head, and never gives it back: a
//! later thread takes over the ring of one that is gone. Only the process itself may judge that: its thread ids mean
//! nothing to us where it has a pid namespace of its own. Who writes from where on stands in the ring, as a
//! [`Definition::Thread`] without an id; the word in the ring's head serves until the first one.

use memtrace_trace::definition::Definition;
use memtrace_trace::event::Event;
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::layout::RING_COUNT;
use memtrace_trace::shm::ring::{Consumer, Corrupt, Record};
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::sync::Ordering;
use memtrace_trace::wire::Cursor;

/// Takes what is found while draining.
pub(super) trait Intake {
    /// The thread that writes into a ring from here on (0: several that have not said which); the answer is the id for its events.
    fn writer(&mut self, tid: u32, name: Option<&str>) -> ThreadId;
    /// Whether more can be taken now. What is left stays in the rings.
    fn has_room(&mut self) -> bool;
    /// Whether the event with this number can be taken now. If not it stays in its ring, with all that came after it.
    fn has_place(&mut self, seq: u64) -> bool;
    /// An event.
    fn event(&mut self, event: Event);
    /// An encoded definition, not checked.
    fn definition(&mut self, bytes: &[u8]);
    /// A ring of this thread gave that many slots.
    fn ring_done(&mut self, thread: ThreadId, slots: u64);
}

/// What we remember about one ring.
#[derive(Clone, Default, Debug)]
struct RingState {
    owner: u32,
    thread: ThreadId,
    /// The ring itself has said who writes.
    announced: bool,
    /// The second event of a slot whose first has been taken, when there was no place for it yet.
    left: Option<Event>,
}

impl RingState {
    /// Hands on an event, or keeps it for the next time. False: it was kept, and nothing behind it may be taken.
    fn hand_on(&mut self, event: Event, intake: &mut impl Intake) -> bool {
        if intake.has_place(event.seq) {
            intake.event(event);
        } else {
            self.left = Some(event);
        }
        self.left.is_none()
    }
}

/// The launcher's view of all rings of a segment.
#[derive(Default, Debug)]
pub(super) struct Rings {
    states: Vec<RingState>,
    /// The ring at which there was no more room.
    resume_at: usize,
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
        // From where we stopped last time, or the last rings would starve while the writer is behind.
        let first = std::mem::take(&mut self.resume_at).min(used - 1);
        for index in (first..used).chain(0..first) {
            let (Some(ring), Some(header), Some(state)) =
                (segment.ring(index), segment.ring_header(index), self.states.get_mut(index))
            else {
                continue;
            };
            let mut consumer = Consumer::new(ring);
            if consumer.pending() == 0 && state.left.is_none() {
                continue;
            }
            if !intake.has_room() {
                self.resume_at = index;
                break;
            }
            if let Some(event) = state.left.take()
                && !state.hand_on(event, intake)
            {
                continue;
            }
            let owner = if index == 0 { 0 } else { header.owner.0.tid() };
            if !state.announced && (state.thread.is_none() || state.owner != owner) {
                *state = RingState { owner, thread: intake.writer(owner, None), announced: false, left: None };
            }
            let mut corrupt = 0;
            let mut issued = 0;
            // A number that was never handed out would push the true ones out of the reorder window.
            let mut is_issued = |seq: u64| {
                if seq >= issued {
                    issued = next_seq.load(Ordering::Relaxed);
                }
                seq != 0 && seq < issued
            };
            let result = consumer.drain_while(|record| match record {
                _ if state.left.is_some() => false,
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
                            state.hand_on(completion, intake);
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
