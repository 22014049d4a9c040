//! The ring under a model checker: every order in which two or three threads can touch it, and every value that the memory model lets
//! them read, of the code that runs in the traced process and in the launcher.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p memtrace-trace --test loom --target-dir target/loom
//! ```
//!
//! Every part has a thread of its own: loom (0.7) does not go back to switch away from a model's own thread in its first steps, and then
//! finds less than there is.
//!
//! A killed thread stops before any access to shared memory that one likes, and the models try them all. What its death means to the others
//! is the kernel's part: who learns that a thread is gone sees all that it wrote ([`Threads`]).

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
use memtrace_trace::sync::mortal::killed_before;
use memtrace_trace::sync::{AtomicU32, AtomicU64, Ordering};

/// Positions begin two slots before they wrap around.
const START: u64 = u64::MAX - 1;

/// A segment with rings of `SLOTS` slots, and what the traced process keeps beside each ring.
struct Segment<const RINGS: usize, const SLOTS: usize> {
    headers: [RingHeader; RINGS],
    slots: [[SharedSlot; SLOTS]; RINGS],
    kept: [UnsafeCell<Option<Producer<'static>>>; RINGS],
    used: AtomicU32,
    next_seq: AtomicU64,
}

// SAFETY: what is not atomic is in loom's cells, which say so when two threads are in one.
unsafe impl<const R: usize, const S: usize> Sync for Segment<R, S> {}
// SAFETY: as above.
unsafe impl<const R: usize, const S: usize> Send for Segment<R, S> {}

impl<const RINGS: usize, const SLOTS: usize> Segment<RINGS, SLOTS> {
    fn new() -> Arc<Self> {
        Arc::new(Segment {
            headers: std::array::from_fn(|_| RingHeader::at(START)),
            slots: std::array::from_fn(|_| std::array::from_fn(|_| SharedSlot::zeroed())),
            kept: std::array::from_fn(|_| UnsafeCell::new(None)),
            used: AtomicU32::new(0),
            next_seq: AtomicU64::new(1),
        })
    }

    fn ring(&self, index: usize) -> Ring<'static> {
        let (header, slots) = (&self.headers[index], &self.slots[index]);
        let ring = Ring::new(&header.tail.0, &header.head.0, slots);
        // SAFETY: every thread that has a ring has an `Arc` of this.
        unsafe { std::mem::transmute::<Ring<'_>, Ring<'static>>(ring) }
    }

    /// The writing end of a ring, as `interpose` keeps it from owner to owner.
    fn producer<T>(&self, index: usize, work: impl FnOnce(&mut Producer<'static>) -> T) -> T {
        self.kept[index].with_mut(|kept| {
            // SAFETY: loom has checked that nobody else is here.
            let kept = unsafe { &mut *kept };
            work(kept.get_or_insert_with(|| Producer::new(self.ring(index))))
        })
    }

    /// Takes the next number and writes an event with it, as `interpose::emit` does.
    fn write(&self, producer: &mut Producer<'_>) -> Result<u64, Full> {
        let seq = self.next_seq.fetch_add(1, Ordering::Relaxed);
        producer.write(&slot(seq)).map(|()| seq)
    }

    /// Takes what is there.
    fn drain(&self, consumer: &mut Consumer<'_>, into: &mut Vec<Seen>) {
        consumer
            .drain(|record| {
                into.push(match record {
                    Record::Event(found) => {
                        let event = Event::from_slot(&found, ThreadId::NONE).expect("an event");
                        let whole = slot(event.seq);
                        assert_eq!(found, whole, "a slot is whole");
                        // By this the launcher tells a forged number.
                        assert!(
                            event.seq < self.next_seq.load(Ordering::Relaxed),
                            "a number comes after it was issued"
                        );
                        Seen::Event(event.seq)
                    }
                    Record::Definition(bytes) => Seen::Definition(bytes.to_vec()),
                });
            })
            .expect("no record is torn");
    }
}

/// A producer that writes three events, as far as there is room; gives the numbers of those written.
fn write_three<const R: usize, const S: usize>(segment: &Arc<Segment<R, S>>) -> thread::JoinHandle<Vec<u64>> {
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

/// The launcher's side, beside the producer: looks twice, and gives what it found and its end.
fn watch<const R: usize, const S: usize>(
    segment: &Arc<Segment<R, S>>,
) -> thread::JoinHandle<(Consumer<'static>, Vec<Seen>)> {
    let segment = segment.clone();
    thread::spawn(move || {
        let (mut consumer, mut seen) = (Consumer::new(segment.ring(0)), Vec::new());
        segment.drain(&mut consumer, &mut seen);
        segment.drain(&mut consumer, &mut seen);
        (consumer, seen)
    })
}

#[derive(Clone, PartialEq, Debug)]
enum Seen {
    Event(u64),
    Definition(Vec<u8>),
}

/// An event whose every word tells its number.
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

fn numbers(seen: &[Seen]) -> Vec<u64> {
    seen.iter().filter_map(|s| if let Seen::Event(seq) = s { Some(*seq) } else { None }).collect()
}

/// Tries everything.
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

/// What the kernel knows: which thread ids are in use. A thread's end comes before the answer that it is gone.
struct Threads([AtomicBool; 4]);

impl Threads {
    fn new() -> Arc<Threads> {
        Arc::new(Threads(std::array::from_fn(|_| AtomicBool::new(false))))
    }

    fn begins(&self, tid: u32) {
        self.0[tid as usize].store(true, Ordering::Release);
    }

    fn ends(&self, tid: u32) {
        self.0[tid as usize].store(false, Ordering::Release);
    }

    fn exists(&self, tid: u32) -> bool {
        self.0[tid as usize].load(Ordering::Acquire)
    }
}

/// A ring of two slots, three events, positions that wrap around: what fits arrives whole and in order; what does not is refused.
#[test]
fn wraps_and_fills() {
    check(|| {
        let segment = Segment::<1, 2>::new();
        let producing = write_three(&segment);
        let watching = watch(&segment);
        let written = producing.join().unwrap();
        let (mut consumer, mut seen) = watching.join().unwrap();
        segment.drain(&mut consumer, &mut seen);
        assert_eq!(numbers(&seen), written);
        assert!(written.len() >= 2);
        assert_eq!(consumer.pending(), 0);
    });
}

/// A consumer that takes one record at a look: what it leaves keeps its slot and is not written over.
#[test]
fn what_is_left_stays() {
    check(|| {
        let segment = Segment::<1, 2>::new();
        let producing = write_three(&segment);
        let look = |segment: &Segment<1, 2>, seen: &mut Vec<u64>| {
            let before = seen.len();
            let take = |record: Record<'_>| {
                let Record::Event(found) = record else { panic!("an event") };
                let wanted = seen.len() == before;
                if wanted {
                    assert_eq!(found, slot(found[0]), "a slot is whole");
                    seen.push(found[0]);
                }
                wanted
            };
            Consumer::new(segment.ring(0)).drain_while(take).expect("no record is torn")
        };
        let watching = {
            let segment = segment.clone();
            thread::spawn(move || {
                let mut seen = Vec::new();
                look(&segment, &mut seen);
                look(&segment, &mut seen);
                seen
            })
        };
        let written = producing.join().unwrap();
        let mut seen = watching.join().unwrap();
        while look(&segment, &mut seen) > 0 {}
        assert_eq!(seen, written);
    });
}

/// A definition that lies over the end of the ring, between two events.
#[test]
fn definitions_arrive_whole() {
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
        let watching = watch(&segment);
        let (second, third) = producing.join().unwrap();
        let (mut consumer, mut seen) = watching.join().unwrap();
        segment.drain(&mut consumer, &mut seen);
        let mut expected = vec![Seen::Event(1), Seen::Definition(vec![7; 70])];
        expected.extend(second.then(|| Seen::Definition(vec![8; 5])));
        expected.extend(third.then_some(Seen::Event(2)));
        assert_eq!(seen, expected);
    });
}

/// What is held back is not seen before it is complete: an allocation that waits for its rounded size, a free for its completion.
#[test]
fn what_is_held_is_seen_amended() {
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
                    assert!(producer.amend(|s| done.completes(s).then(|| Event::at_once(s, next(), done.ticks))));
                    producer.publish();
                    let alloc = Event { seq: next(), size: 500, ..Event::EMPTY };
                    producer.write(&alloc.to_slot()).unwrap();
                    assert!(producer.amend(|s| Some(Event::amend_slack(s, 12))));
                    producer.publish();
                })
            })
        };
        let look = move |segment: &Segment<1, 2>, seen: &mut Vec<_>| {
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
                look(&segment, &mut seen);
                look(&segment, &mut seen);
                seen
            })
        };
        producing.join().unwrap();
        let mut seen = watching.join().unwrap();
        look(&segment, &mut seen);
        let alloc = Event { seq: 3, size: 500, slack: 12, flags: Flags::SLACK_KNOWN, ..Event::EMPTY };
        assert_eq!(seen, [(free, Some(Event { seq: 2, ..done })), (alloc, None)]);
    });
}

#[test]
fn a_producer_dies_anywhere() {
    static KILLED: Plain = Plain::new(0);
    // Two events take 31 accesses.
    for steps in 0..32 {
        check(move || {
            let (segment, threads) = (Segment::<1, 8>::new(), Threads::new());
            threads.begins(1);
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
            let watching = watch(&segment);
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
            let announced = seen.iter().position(|s| *s == Seen::Definition(b"next".into())).unwrap();
            let (before, after) = (numbers(&seen[..announced]), numbers(&seen[announced..]));
            assert_eq!(after, [issued]);
            // What was written and not published comes with the next owner's first record.
            assert_eq!(before, (1..=before.len() as u64).collect::<Vec<_>>());
            assert!(before.len() as u64 >= published, "what was published is there");
            let lost = issued - 1 - before.len() as u64;
            assert!(lost <= 1, "{lost} of {issued} lost");
        });
    }
    assert!(KILLED.load(SeqCst) > 0);
}

/// A consumer that is killed anywhere: the producer never waits and never writes over what was not given back; what it could not write it
/// knows of. Whoever looked again would find everything from the last head on.
#[test]
fn a_consumer_dies_anywhere() {
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
            let producing = write_three(&segment);
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

/// One thread's life: it claims a ring, or the common one with its lock, and writes one event into it. Whether it was killed before its
/// access number `dies`.
fn life<const R: usize, const S: usize>(
    segment: &Segment<R, S>,
    threads: &Threads,
    tid: u32,
    dies: Option<u32>,
) -> bool {
    let exists = |tid| threads.exists(tid);
    threads.begins(tid);
    let killed = killed_before(dies.unwrap_or(u32::MAX), || {
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

    /// As the launcher does at the end: all rings that were ever claimed.
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

/// [`life`] on a thread of its own.
fn live<const R: usize, const S: usize>(
    segment: &Arc<Segment<R, S>>,
    threads: &Arc<Threads>,
    tid: u32,
    dies: Option<u32>,
) -> thread::JoinHandle<bool> {
    let (segment, threads) = (segment.clone(), threads.clone());
    thread::spawn(move || life(&segment, &threads, tid, dies))
}

/// Threads in turn and at once: no two write into one ring at the same time (loom's cell would say so), and nothing is lost, whether a
/// ring is fresh, left by a dead thread, or the common one.
#[test]
fn every_thread_gets_a_ring_of_its_own() {
    check(|| {
        // One ring beside the common one.
        let (segment, threads) = (Segment::<2, 4>::new(), Threads::new());
        let others = [2, 3].map(|tid| live(&segment, &threads, tid, None));
        for other in others {
            assert!(!other.join().unwrap());
        }
        assert!(!life(&segment, &threads, 1, None));
        assert_eq!(segment.drain_all(), [1, 2, 3]);
    });
}

/// A thread that is killed anywhere between its claim and its publication, with another that comes meanwhile: the ring, or the common
/// ring's lock, passes on, and nothing else is lost than the event under way.
#[test]
fn a_dead_threads_ring_is_taken_over() {
    static KILLED: Plain = Plain::new(0);
    for common in [false, true] {
        // Claim, event and publication take up to 24 accesses.
        for steps in 0..25 {
            check(move || {
                let (segment, threads) = (Segment::<2, 4>::new(), Threads::new());
                if common {
                    // Thread 3 has the only ring.
                    threads.begins(3);
                    assert_eq!(claim(&segment.headers, &segment.used, 3, |tid| threads.exists(tid)), Some(1));
                }
                let dying = live(&segment, &threads, 1, Some(steps));
                let living = live(&segment, &threads, 2, None);
                assert!(!living.join().unwrap());
                let killed = dying.join().unwrap();
                assert!(!life(&segment, &threads, 2, None));
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

/// The kernel gives a dead thread's id to a new thread while a third one is taking over the dead one's ring: only one gets it.
#[test]
fn a_thread_id_is_used_again() {
    check(|| {
        let (segment, threads) = (Segment::<3, 4>::new(), Threads::new());
        assert!(!life(&segment, &threads, 1, None));
        for thread in [1, 2].map(|tid| live(&segment, &threads, tid, None)) {
            assert!(!thread.join().unwrap());
        }
        assert_eq!(segment.drain_all(), [1, 2, 3]);
    });
}
