//! The ring under a model checker. It tries every order in which two or three threads can access the ring, and every
//! value that the memory model lets them read. The code is that of the traced process and of the launcher.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p memtrace-trace --test loom --target-dir target/loom
//! ```
//!
//! Every part runs on its own thread. loom (0.7) does not try to switch away from a model's main thread in its first
//! steps, and then explores fewer executions.
//!
//! A killed thread stops before a chosen access to shared memory, and the models try all of them. The kernel's part is
//! modeled by [`Threads`]: a thread that learns of another's end sees everything that the other one wrote.

#![cfg(loom)]

use std::sync::atomic::{AtomicU64 as Plain, Ordering::SeqCst};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;
use loom::thread;
use memtrace_trace::event::{Action, Event, Flags, Slot, Source};
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::layout::RingHeader;
use memtrace_trace::shm::owner::{Owner, claim};
use memtrace_trace::shm::ring::{Consumer, Full, Producer, Record, Ring, SharedSlot};
use memtrace_trace::sync::killable::killed_before;
use memtrace_trace::sync::{AtomicU32, AtomicU64, Ordering};

/// Positions start two slots before they wrap around.
const START: u64 = u64::MAX - 1;

/// A segment with rings of `SLOTS` slots, and the producer that the traced process stores with each ring.
struct Segment<const RINGS: usize, const SLOTS: usize> {
    headers: [RingHeader; RINGS],
    slots: [[SharedSlot; SLOTS]; RINGS],
    producers: [UnsafeCell<Option<Producer<'static>>>; RINGS],
    used: AtomicU32,
    next_seq: AtomicU64,
}

// SAFETY: all data that is not atomic is in loom's cells, which detect concurrent access.
unsafe impl<const R: usize, const S: usize> Sync for Segment<R, S> {}
// SAFETY: all data that is not atomic is in loom's cells, which detect concurrent access.
unsafe impl<const R: usize, const S: usize> Send for Segment<R, S> {}

impl<const RINGS: usize, const SLOTS: usize> Segment<RINGS, SLOTS> {
    fn new() -> Arc<Self> {
        Arc::new(Segment {
            headers: std::array::from_fn(|_| RingHeader::at(START)),
            slots: std::array::from_fn(|_| std::array::from_fn(|_| SharedSlot::zeroed())),
            producers: std::array::from_fn(|_| UnsafeCell::new(None)),
            used: AtomicU32::new(0),
            next_seq: AtomicU64::new(1),
        })
    }

    fn ring(&self, index: usize) -> Ring<'static> {
        let (header, slots) = (&self.headers[index], &self.slots[index]);
        let ring = Ring::new(&header.tail.0, &header.head.0, slots);
        // SAFETY: every thread with a ring has an `Arc` of the segment, so the segment outlives the ring.
        unsafe { std::mem::transmute::<Ring<'_>, Ring<'static>>(ring) }
    }

    /// Calls `work` with the producer of a ring, which passes from owner to owner as in `interpose`.
    fn producer<T>(&self, index: usize, work: impl FnOnce(&mut Producer<'static>) -> T) -> T {
        self.producers[index].with_mut(|producers| {
            // SAFETY: loom has checked that no other thread accesses the cell.
            let producers = unsafe { &mut *producers };
            work(producers.get_or_insert_with(|| Producer::new(self.ring(index))))
        })
    }

    /// Assigns the next number to an event and writes it, as `interpose::emit` does.
    fn write(&self, producer: &mut Producer<'_>) -> Result<u64, Full> {
        let seq = self.next_seq.fetch_add(1, Ordering::Relaxed);
        producer.write(&slot(seq)).map(|()| seq)
    }

    /// Consumes all published records.
    fn drain(&self, consumer: &mut Consumer<'_>, into: &mut Vec<Received>) {
        consumer
            .drain(|record| {
                into.push(match record {
                    Record::Event(found) => {
                        let event = Event::from_slot(&found, ThreadId::NONE).expect("an event");
                        let whole = slot(event.seq);
                        assert_eq!(found, whole, "a slot is complete");
                        // The launcher recognizes a forged number by this.
                        assert!(
                            event.seq < self.next_seq.load(Ordering::Relaxed),
                            "a number arrives only after it was assigned"
                        );
                        Received::Event(event.seq)
                    }
                    Record::Definition(bytes) => Received::Definition(bytes.to_vec()),
                });
            })
            .expect("no record is torn");
    }
}

/// Starts a producer that writes three events if the ring has room. Returns the numbers of the written ones.
fn spawn_producer<const R: usize, const S: usize>(segment: &Arc<Segment<R, S>>) -> thread::JoinHandle<Vec<u64>> {
    let segment = segment.clone();
    thread::spawn(move || {
        segment.producer(0, |producer| {
            let mut written = Vec::new();
            for _ in 0..3 {
                written.extend(segment.write(producer));
                producer.publish();
            }
            written
        })
    })
}

/// Starts a consumer that drains twice beside the producer. Returns the consumer and the records.
fn spawn_consumer<const R: usize, const S: usize>(
    segment: &Arc<Segment<R, S>>,
) -> thread::JoinHandle<(Consumer<'static>, Vec<Received>)> {
    let segment = segment.clone();
    thread::spawn(move || {
        let (mut consumer, mut seen) = (Consumer::new(segment.ring(0)), Vec::new());
        segment.drain(&mut consumer, &mut seen);
        segment.drain(&mut consumer, &mut seen);
        (consumer, seen)
    })
}

#[derive(Clone, PartialEq, Debug)]
enum Received {
    Event(u64),
    Definition(Vec<u8>),
}

/// An event each of whose words contains its number.
fn slot(seq: u64) -> Slot {
    let word = |n: u64| seq << 8 | n;
    Event {
        seq,
        ticks: word(1),
        addr: word(2),
        size: word(3),
        stream: word(4),
        stack: memtrace_trace::ids::StackId(word(5) as u32),
        slack: word(6) as u32,
        ..Event::EMPTY
    }
    .to_slot()
}

fn numbers(seen: &[Received]) -> Vec<u64> {
    seen.iter().filter_map(|s| if let Received::Event(seq) = s { Some(*seq) } else { None }).collect()
}

/// Runs the model in all executions.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    let tried = std::sync::Arc::new(Plain::new(0));
    let count = tried.clone();
    builder.check(move || {
        count.fetch_add(1, SeqCst);
        model();
    });
    println!("{} executions", tried.load(SeqCst));
}

/// The kernel's knowledge of the thread ids in use. A thread's end happens before the answer that it has ended.
struct Threads([AtomicBool; 4]);

impl Threads {
    fn new() -> Arc<Threads> {
        Arc::new(Threads(std::array::from_fn(|_| AtomicBool::new(false))))
    }

    fn starts(&self, tid: u32) {
        self.0[tid as usize].store(true, Ordering::Release);
    }

    fn ends(&self, tid: u32) {
        self.0[tid as usize].store(false, Ordering::Release);
    }

    fn exists(&self, tid: u32) -> bool {
        self.0[tid as usize].load(Ordering::Acquire)
    }
}

/// A ring of two slots, three events, and positions that wrap around. Events that fit arrive complete and in order;
/// others are refused.
#[test]
fn a_full_ring_that_wraps_around_keeps_the_order() {
    check(|| {
        let segment = Segment::<1, 2>::new();
        let producing = spawn_producer(&segment);
        let watching = spawn_consumer(&segment);
        let written = producing.join().unwrap();
        let (mut consumer, mut seen) = watching.join().unwrap();
        segment.drain(&mut consumer, &mut seen);
        assert_eq!(numbers(&seen), written);
        assert!(written.len() >= 2);
        assert_eq!(consumer.pending(), 0);
    });
}

/// A consumer takes one record at a time. The records that it leaves keep their slots and are not overwritten.
#[test]
fn records_that_are_not_taken_stay_in_the_ring() {
    check(|| {
        let segment = Segment::<1, 2>::new();
        let producing = spawn_producer(&segment);
        let drain = |segment: &Segment<1, 2>, seen: &mut Vec<u64>| {
            let before = seen.len();
            let take = |record: Record<'_>| {
                let Record::Event(found) = record else { panic!("an event") };
                let is_first = seen.len() == before;
                if is_first {
                    assert_eq!(found, slot(found[0]), "a slot is complete");
                    seen.push(found[0]);
                }
                is_first
            };
            Consumer::new(segment.ring(0)).drain_while(take).expect("no record is torn")
        };
        let watching = {
            let segment = segment.clone();
            thread::spawn(move || {
                let mut seen = Vec::new();
                drain(&segment, &mut seen);
                drain(&segment, &mut seen);
                seen
            })
        };
        let written = producing.join().unwrap();
        let mut seen = watching.join().unwrap();
        while drain(&segment, &mut seen) > 0 {}
        assert_eq!(seen, written);
    });
}

/// A definition that wraps around the end of the ring, between two events.
#[test]
fn definitions_arrive_complete() {
    check(|| {
        let segment = Segment::<1, 4>::new();
        let producing = {
            let segment = segment.clone();
            thread::spawn(move || {
                segment.producer(0, |producer| {
                    segment.write(producer).unwrap();
                    producer.write_definition(&[7; 70]).unwrap();
                    let second = producer.write_definition(&[8; 5]).is_ok();
                    (second, segment.write(producer).inspect(|_| producer.publish()).is_ok())
                })
            })
        };
        let watching = spawn_consumer(&segment);
        let (second, third) = producing.join().unwrap();
        let (mut consumer, mut seen) = watching.join().unwrap();
        segment.drain(&mut consumer, &mut seen);
        let mut expected = vec![Received::Event(1), Received::Definition(vec![7; 70])];
        expected.extend(second.then(|| Received::Definition(vec![8; 5])));
        expected.extend(third.then_some(Received::Event(2)));
        assert_eq!(seen, expected);
    });
}

/// An unpublished event is not seen before it is complete: an allocation waits for its rounded size, a free for its
/// completion.
#[test]
fn unpublished_events_are_seen_only_once_amended() {
    check(|| {
        let segment = Segment::<1, 2>::new();
        let free =
            Event { seq: 1, addr: 64, size: 8, action: Action::FreeRequested, source: Source::Torch, ..Event::EMPTY };
        let done = Event { action: Action::FreeCompleted, ticks: 5, ..free };
        let producing = {
            let segment = segment.clone();
            thread::spawn(move || {
                segment.producer(0, |producer| {
                    segment.next_seq.fetch_add(1, Ordering::Relaxed);
                    producer.write(&free.to_slot()).unwrap();
                    let next = || segment.next_seq.fetch_add(1, Ordering::Relaxed);
                    let slot = producer.last_slot().unwrap();
                    assert!(done.completes(&slot));
                    producer.set_end(Event::complete_free(&slot, next(), done.ticks));
                    producer.publish();
                    let alloc = Event { seq: next(), size: 500, ..Event::EMPTY };
                    producer.write(&alloc.to_slot()).unwrap();
                    let slot = producer.last_slot().unwrap();
                    producer.set_end(Event::amend_slack(&slot, 12));
                    producer.publish();
                })
            })
        };
        let drain = move |segment: &Segment<1, 2>, seen: &mut Vec<_>| {
            let take = |record: Record<'_>| {
                let Record::Event(slot) = record else { panic!("an event") };
                let event = Event::from_slot(&slot, ThreadId::NONE).unwrap();
                seen.push((event, event.completion(&slot)));
            };
            Consumer::new(segment.ring(0)).drain(take).unwrap();
        };
        let watching = {
            let segment = segment.clone();
            thread::spawn(move || {
                let mut seen = Vec::new();
                drain(&segment, &mut seen);
                drain(&segment, &mut seen);
                seen
            })
        };
        producing.join().unwrap();
        let mut seen = watching.join().unwrap();
        drain(&segment, &mut seen);
        let alloc = Event { seq: 3, size: 500, slack: 12, flags: Flags::SLACK_KNOWN, ..Event::EMPTY };
        assert_eq!(seen, [(free, Some(Event { seq: 2, ..done })), (alloc, None)]);
    });
}

#[test]
fn a_producer_is_killed_anywhere() {
    static KILLED: Plain = Plain::new(0);
    // Two events take 31 accesses.
    for steps in 0..32 {
        check(move || {
            let (segment, threads) = (Segment::<1, 8>::new(), Threads::new());
            threads.starts(1);
            let producing = {
                let (segment, threads) = (segment.clone(), threads.clone());
                thread::spawn(move || {
                    let mut published = 0;
                    let killed = killed_before(steps, || {
                        segment.producer(0, |producer| {
                            for _ in 0..2 {
                                let seq = segment.write(producer).unwrap();
                                producer.publish();
                                published = seq;
                            }
                        });
                    });
                    KILLED.fetch_add(killed.into(), SeqCst);
                    threads.ends(1);
                    published
                })
            };
            let watching = spawn_consumer(&segment);
            let published = producing.join().unwrap();
            let (mut consumer, mut seen) = watching.join().unwrap();
            assert!(!threads.exists(1));
            segment.producer(0, |producer| {
                producer.write_definition(b"next").unwrap();
                segment.write(producer).unwrap();
                producer.publish();
            });
            segment.drain(&mut consumer, &mut seen);
            let issued = segment.next_seq.load(Ordering::Relaxed) - 1;
            let announced = seen.iter().position(|s| *s == Received::Definition(b"next".into())).unwrap();
            let (before, after) = (numbers(&seen[..announced]), numbers(&seen[announced..]));
            assert_eq!(after, [issued]);
            // Written but unpublished records are published with the next owner's first record.
            assert_eq!(before, (1..=before.len() as u64).collect::<Vec<_>>());
            assert!(before.len() as u64 >= published, "published events are never lost");
            let lost = issued - 1 - before.len() as u64;
            assert!(lost <= 1, "{lost} of {issued} lost");
        });
    }
    assert!(KILLED.load(SeqCst) > 0);
}

/// A consumer is killed anywhere. The producer never waits and never overwrites slots that were not freed. It knows
/// which events it could not write. A new consumer finds everything from the last head on.
#[test]
fn a_consumer_is_killed_anywhere() {
    static KILLED: Plain = Plain::new(0);
    // Two slots take 20 accesses.
    for steps in 0..22 {
        check(move || {
            let segment = Segment::<1, 2>::new();
            let consuming = {
                let segment = segment.clone();
                thread::spawn(move || {
                    let mut seen = Vec::new();
                    let killed = killed_before(steps, || {
                        let mut consumer = Consumer::new(segment.ring(0));
                        segment.drain(&mut consumer, &mut seen);
                    });
                    KILLED.fetch_add(killed.into(), SeqCst);
                    seen
                })
            };
            let producing = spawn_producer(&segment);
            let written = producing.join().unwrap();
            let seen = numbers(&consuming.join().unwrap());
            assert!(written.starts_with(&seen), "{seen:?} of {written:?}");
            let (mut consumer, mut rest) = (Consumer::new(segment.ring(0)), Vec::new());
            segment.drain(&mut consumer, &mut rest);
            let rest = numbers(&rest);
            assert!(written.ends_with(&rest), "{rest:?} of {written:?}");
            assert!(seen.len() + rest.len() >= written.len());
        });
    }
    assert!(KILLED.load(SeqCst) > 0);
}

/// Runs one thread: it claims a ring, or the common one with its lock, and writes one event. Returns whether it was
/// killed before its access number `killed_at`.
fn run_thread<const R: usize, const S: usize>(
    segment: &Segment<R, S>,
    threads: &Threads,
    tid: u32,
    killed_at: Option<u32>,
) -> bool {
    let exists = |tid| threads.exists(tid);
    threads.starts(tid);
    let killed = killed_before(killed_at.unwrap_or(u32::MAX), || {
        let index = claim(&segment.headers, &segment.used, tid, exists).unwrap_or(0);
        if index == 0 {
            segment.common().lock(tid, exists, thread::yield_now);
        }
        segment.producer(index, |producer| {
            segment.write(producer).unwrap();
            producer.publish();
        });
        if index == 0 {
            segment.common().release();
        }
    });
    threads.ends(tid);
    killed
}

impl<const R: usize, const S: usize> Segment<R, S> {
    /// The common ring's lock. Ring 0 has no owner, so its word is free.
    fn common(&self) -> &Owner {
        &self.headers[0].owner.0
    }

    /// Drains all rings that were ever claimed, as the launcher does at the end.
    fn drain_all(&self) -> Vec<u64> {
        let used = self.used.load(Ordering::Acquire).max(1) as usize;
        let mut seen = Vec::new();
        for index in 0..used {
            self.drain(&mut Consumer::new(self.ring(index)), &mut seen);
        }
        let mut numbers = numbers(&seen);
        numbers.sort_unstable();
        numbers
    }
}

/// [`run_thread`] on its own thread.
fn spawn_thread<const R: usize, const S: usize>(
    segment: &Arc<Segment<R, S>>,
    threads: &Arc<Threads>,
    tid: u32,
    killed_at: Option<u32>,
) -> thread::JoinHandle<bool> {
    let (segment, threads) = (segment.clone(), threads.clone());
    thread::spawn(move || run_thread(&segment, &threads, tid, killed_at))
}

/// Threads run one after the other and at once. No two write into one ring at the same time, which loom's cell would
/// detect. Nothing is lost, whether a ring is new, left by an ended thread, or the common one.
#[test]
fn every_thread_gets_a_ring_of_its_own() {
    check(|| {
        // One ring beside the common one.
        let (segment, threads) = (Segment::<2, 4>::new(), Threads::new());
        let others = [2, 3].map(|tid| spawn_thread(&segment, &threads, tid, None));
        for other in others {
            assert!(!other.join().unwrap());
        }
        assert!(!run_thread(&segment, &threads, 1, None));
        assert_eq!(segment.drain_all(), [1, 2, 3]);
    });
}

/// A thread is killed anywhere between its claim and its publication, while another one starts. The ring, or the common
/// ring's lock, passes to another thread. Only the event being written is lost.
#[test]
fn an_ended_threads_ring_is_taken_over() {
    static KILLED: Plain = Plain::new(0);
    for common in [false, true] {
        // Claim, event and publication take up to 24 accesses.
        for steps in 0..25 {
            check(move || {
                let (segment, threads) = (Segment::<2, 4>::new(), Threads::new());
                if common {
                    // Thread 3 has the only ring.
                    threads.starts(3);
                    assert_eq!(claim(&segment.headers, &segment.used, 3, |tid| threads.exists(tid)), Some(1));
                }
                let killed_thread = spawn_thread(&segment, &threads, 1, Some(steps));
                let other_thread = spawn_thread(&segment, &threads, 2, None);
                assert!(!other_thread.join().unwrap());
                let killed = killed_thread.join().unwrap();
                assert!(!run_thread(&segment, &threads, 2, None));
                KILLED.fetch_add(killed.into(), SeqCst);
                let issued = segment.next_seq.load(Ordering::Relaxed) - 1;
                let seen = segment.drain_all();
                assert!(seen.len() as u64 + u64::from(killed) >= issued, "{seen:?} of {issued}");
                assert!(seen.len() >= 2);
            });
        }
    }
    assert!(KILLED.load(SeqCst) > 0);
}

/// The kernel gives an ended thread's id to a new thread while a third one takes over its ring. Only one of them gets
/// the ring.
#[test]
fn a_reused_thread_id_gets_a_ring_of_its_own() {
    check(|| {
        let (segment, threads) = (Segment::<3, 4>::new(), Threads::new());
        assert!(!run_thread(&segment, &threads, 1, None));
        for thread in [1, 2].map(|tid| spawn_thread(&segment, &threads, tid, None)) {
            assert!(!thread.join().unwrap());
        }
        assert_eq!(segment.drain_all(), [1, 2, 3]);
    });
}
