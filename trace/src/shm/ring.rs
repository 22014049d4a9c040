//! The queue between one thread of the traced process and the launcher: single producer, single consumer, slots of
//! fixed size.
//!
//! Invariant: the producer writes slots in `[tail, head + RING_SLOTS)` and then publishes them with one release store
//! of `tail`. The consumer reads slots in `[head, tail)` and then frees them with one release store of `head`. Neither
//! waits for the other here; the caller decides what to do if a ring is full.
//!
//! A producer that is killed between a write and its publication loses only what it has not published.

use crate::event::{SLOT_WORDS, Slot, SlotKind};
use crate::sync::{AtomicU64, Ordering};

/// A slot in shared memory. Its words are atomic, so that a race is never undefined behavior, whatever the other
/// process does. Relaxed accesses compile to plain moves.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SharedSlot {
    words: [AtomicU64; SLOT_WORDS],
    /// Shows the model checker each access to the slot: two accesses must be ordered by `head` or `tail`. loom does not
    /// model a load that reads a later store, which the atomic words alone would permit.
    #[cfg(loom)]
    accesses: loom::cell::UnsafeCell<()>,
}

impl SharedSlot {
    /// A zeroed slot.
    #[cfg(any(test, loom))]
    pub fn zeroed() -> SharedSlot {
        SharedSlot {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            #[cfg(loom)]
            accesses: loom::cell::UnsafeCell::new(()),
        }
    }

    #[inline]
    fn store(&self, slot: &Slot) {
        #[cfg(loom)]
        self.accesses.with_mut(|_| ());
        for (shared, word) in self.words.iter().zip(slot) {
            shared.store(*word, Ordering::Relaxed);
        }
    }

    #[inline]
    fn load(&self) -> Slot {
        #[cfg(loom)]
        self.accesses.with(|_| ());
        std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed))
    }

    /// Stores the last two words.
    #[inline(always)]
    fn store_end(&self, [new_a, new_b]: [u64; 2]) {
        #[cfg(loom)]
        self.accesses.with_mut(|_| ());
        let [.., a, b] = &self.words;
        a.store(new_a, Ordering::Relaxed);
        b.store(new_b, Ordering::Relaxed);
    }
}

/// Prefetches a slot for writing. The consumer read it last, on another core. Without the prefetch the next event's
/// stores would wait for the cache line. Its numbering, which is a barrier, would wait for the stores.
#[inline(always)]
fn prefetch_for_write(slot: &SharedSlot) {
    #[cfg(not(loom))]
    crate::arch::prefetch_for_write(slot);
    #[cfg(loom)]
    let _ = slot;
}

/// The memory of one ring.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a> {
    tail: &'a AtomicU64,
    head: &'a AtomicU64,
    slots: &'a [SharedSlot],
}

/// The ring has no space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

impl<'a> Ring<'a> {
    /// A ring in this memory. `slots.len()` must be a power of two.
    pub fn new(tail: &'a AtomicU64, head: &'a AtomicU64, slots: &'a [SharedSlot]) -> Ring<'a> {
        debug_assert!(slots.len().is_power_of_two());
        Ring { tail, head, slots }
    }

    #[inline]
    fn slot(&self, position: u64) -> Option<&'a SharedSlot> {
        // The mask keeps the index in range. `get` avoids compiling in a panic.
        self.slots.get(position as usize & (self.slots.len().wrapping_sub(1)))
    }
}

/// The writing side. The ring's owner has the only one.
#[derive(Debug)]
pub struct Producer<'a> {
    ring: Ring<'a>,
    /// The next position to write. It is ahead of the shared tail while a record is unpublished.
    next: u64,
    /// The last head that was read. It is read again only if the ring seems full.
    head: u64,
}

impl<'a> Producer<'a> {
    /// Continues where the ring's last owner stopped.
    pub fn new(ring: Ring<'a>) -> Producer<'a> {
        let next = ring.tail.load(Ordering::Acquire);
        let head = ring.head.load(Ordering::Acquire);
        Producer { ring, next, head }
    }

    /// Whether `count` slots can be written now.
    #[inline]
    fn has_room_for(&mut self, count: u64) -> bool {
        let capacity = self.ring.slots.len() as u64;
        if self.next.wrapping_sub(self.head).wrapping_add(count) <= capacity {
            return true;
        }
        self.head = self.ring.head.load(Ordering::Acquire);
        self.next.wrapping_sub(self.head).wrapping_add(count) <= capacity
    }

    /// Whether [`Self::write`] will succeed. Only the producer itself uses up space.
    #[inline]
    pub fn has_room(&mut self) -> bool {
        self.has_room_for(1)
    }

    /// Writes one slot without publishing it. [`Self::set_end`] may change it until [`Self::publish`]. The error is
    /// [`Full`].
    #[inline]
    pub fn write(&mut self, slot: &Slot) -> Result<(), Full> {
        if !self.has_room_for(1) {
            return Err(Full);
        }
        if let Some(shared) = self.ring.slot(self.next) {
            shared.store(slot);
        }
        self.next = self.next.wrapping_add(1);
        if let Some(shared) = self.ring.slot(self.next) {
            prefetch_for_write(shared);
        }
        Ok(())
    }

    /// The last slot, which must be unpublished.
    #[inline(always)]
    pub fn last_slot(&self) -> Option<Slot> {
        Some(self.ring.slot(self.next.wrapping_sub(1))?.load())
    }

    /// Replaces the last two words of the last slot, which must be unpublished.
    #[inline(always)]
    pub fn set_end(&mut self, end: [u64; 2]) {
        if let Some(shared) = self.ring.slot(self.next.wrapping_sub(1)) {
            shared.store_end(end);
        }
    }

    /// Publishes everything written so far.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.tail.store(self.next, Ordering::Release);
    }

    /// Writes and publishes an encoded definition: a slot with its length, then the bytes. The error is [`Full`].
    pub fn write_definition(&mut self, bytes: &[u8]) -> Result<(), Full> {
        let body = bytes.len().div_ceil(size_of::<Slot>()) as u64;
        if !self.has_room_for(body + 1) {
            return Err(Full);
        }
        let mut head = [0; SLOT_WORDS];
        head[0] = bytes.len() as u64;
        head[6] = SlotKind::Definition as u64;
        if let Some(shared) = self.ring.slot(self.next) {
            shared.store(&head);
        }
        for (i, chunk) in bytes.chunks(size_of::<Slot>()).enumerate() {
            let mut slot = [0; SLOT_WORDS];
            for (word, bytes) in slot.iter_mut().zip(chunk.chunks(8)) {
                let mut padded = [0; 8];
                for (to, from) in padded.iter_mut().zip(bytes) {
                    *to = *from;
                }
                *word = u64::from_le_bytes(padded);
            }
            if let Some(shared) = self.ring.slot(self.next.wrapping_add(1 + i as u64)) {
                shared.store(&slot);
            }
        }
        self.next = self.next.wrapping_add(body + 1);
        self.publish();
        Ok(())
    }
}

/// A record that the consumer takes from a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// One slot that contains an event, or a free request with its completion.
    Event(Slot),
    /// An encoded definition.
    Definition(&'a [u8]),
}

/// Content that no producer writes. The ring was emptied, because its record boundaries are lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrupt;

/// The reading side.
#[derive(Debug)]
pub struct Consumer<'a> {
    ring: Ring<'a>,
    buffer: Vec<u8>,
}

impl<'a> Consumer<'a> {
    /// Starts at the shared head.
    pub fn new(ring: Ring<'a>) -> Consumer<'a> {
        Consumer { ring, buffer: Vec::new() }
    }

    /// The number of published slots that are not consumed. A value beyond the capacity means that the ring is corrupt.
    pub fn pending(&self) -> u64 {
        self.ring.tail.load(Ordering::Acquire).wrapping_sub(self.ring.head.load(Ordering::Relaxed))
    }

    /// Passes every published record to `take` and frees the slots. Returns the number of slots.
    ///
    /// It trusts nothing in the ring: positions and lengths may have any value. The worst result is `Err(Corrupt)` with
    /// an empty ring.
    pub fn drain(&mut self, mut take: impl FnMut(Record<'_>)) -> Result<u64, Corrupt> {
        self.drain_while(|record| {
            take(record);
            true
        })
    }

    /// [`Self::drain`] up to the first record for which `take` returns `false`. That record and all later ones stay in
    /// the ring for the next call.
    pub fn drain_while(&mut self, mut take: impl FnMut(Record<'_>) -> bool) -> Result<u64, Corrupt> {
        let head = self.ring.head.load(Ordering::Relaxed);
        let tail = self.ring.tail.load(Ordering::Acquire);
        let available = tail.wrapping_sub(head);
        let result =
            if available > self.ring.slots.len() as u64 { Err(Corrupt) } else { self.read(head, available, &mut take) };
        let new_head = result.map_or(tail, |taken| head.wrapping_add(taken));
        self.ring.head.store(new_head, Ordering::Release);
        result
    }

    /// Passes records to `take`. Returns the number of slots that were taken.
    fn read(&mut self, head: u64, available: u64, take: &mut impl FnMut(Record<'_>) -> bool) -> Result<u64, Corrupt> {
        let mut at = 0;
        while at < available {
            let slot = self.ring.slot(head.wrapping_add(at)).ok_or(Corrupt)?.load();
            let mut next = at + 1;
            let taken = match SlotKind::of(&slot) {
                Some(SlotKind::Event | SlotKind::CompletedFree) => take(Record::Event(slot)),
                Some(SlotKind::Definition) => {
                    let len = slot[0];
                    let body = len.div_ceil(size_of::<Slot>() as u64);
                    // A definition is published as a whole, so it must be complete in the available slots.
                    if body > available - next {
                        return Err(Corrupt);
                    }
                    self.buffer.clear();
                    for i in 0..body {
                        let slot = self.ring.slot(head.wrapping_add(next + i)).ok_or(Corrupt)?.load();
                        self.buffer.extend(slot.iter().flat_map(|w| w.to_le_bytes()));
                    }
                    self.buffer.truncate(len as usize);
                    next += body;
                    take(Record::Definition(&self.buffer))
                }
                None => return Err(Corrupt),
            };
            if !taken {
                break;
            }
            at = next;
        }
        Ok(at)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::event::{Event, Flags};
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn event(seq: u64) -> Slot {
        Event { seq, ..Event::EMPTY }.to_slot()
    }

    #[derive(Clone, Debug)]
    enum Step {
        Event,
        Definition(Vec<u8>),
        WriteUnpublished,
        Drain,
        DrainSome(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => Just(Step::Event),
            2 => prop::collection::vec(any::<u8>(), 0..300).prop_map(Step::Definition),
            1 => Just(Step::WriteUnpublished),
            2 => Just(Step::Drain),
            2 => (0usize..6).prop_map(Step::DrainSome),
        ]
    }

    #[derive(Clone, Debug, PartialEq)]
    enum Owned {
        Event(u64),
        Definition(Vec<u8>),
    }

    proptest! {
        /// Compares the ring with a plain queue.
        #[test]
        fn behaves_like_a_queue(steps in prop::collection::vec(step(), 0..200)) {
            let (tail, head) = (AtomicU64::new(u64::MAX - 5), AtomicU64::new(u64::MAX - 5));
            let slots: Vec<_> = (0..16).map(|_| SharedSlot::zeroed()).collect();
            let ring = Ring::new(&tail, &head, &slots);
            let (mut producer, mut consumer) = (Producer::new(ring), Consumer::new(ring));
            let (mut model, mut unpublished) = (VecDeque::new(), Vec::new());
            let mut used = 0;
            for (seq, s) in steps.into_iter().enumerate() {
                let seq = seq as u64 + 1;
                match s {
                    Step::Event | Step::WriteUnpublished => {
                        prop_assert_eq!(producer.has_room(), used < 16);
                        let ok = producer.write(&event(seq)).is_ok();
                        prop_assert_eq!(ok, used < 16);
                        if ok {
                            used += 1;
                            unpublished.push(Owned::Event(seq));
                            if matches!(s, Step::Event) {
                                producer.publish();
                                model.extend(unpublished.drain(..));
                            }
                        }
                    }
                    Step::Definition(bytes) => {
                        let need = 1 + bytes.len().div_ceil(64);
                        let ok = producer.write_definition(&bytes).is_ok();
                        prop_assert_eq!(ok, used + need <= 16);
                        if ok {
                            used += need;
                            model.extend(unpublished.drain(..));
                            model.push_back(Owned::Definition(bytes));
                        }
                    }
                    Step::Drain => {
                        let mut seen = Vec::new();
                        let taken = consumer.drain(|r| seen.push(match r {
                            Record::Event(slot) => Owned::Event(slot[0]),
                            Record::Definition(bytes) => Owned::Definition(bytes.to_vec()),
                        }));
                        prop_assert!(taken.is_ok());
                        used -= taken.unwrap_or(0) as usize;
                        prop_assert_eq!(seen, model.drain(..).collect::<Vec<_>>());
                    }
                    Step::DrainSome(limit) => {
                        let (mut seen, mut refused) = (Vec::new(), Vec::new());
                        let taken = consumer.drain_while(|r| {
                            let record = match r {
                                Record::Event(slot) => Owned::Event(slot[0]),
                                Record::Definition(bytes) => Owned::Definition(bytes.to_vec()),
                            };
                            let is_taken = seen.len() < limit;
                            if is_taken { seen.push(record) } else { refused.push(record) }
                            is_taken
                        });
                        prop_assert!(taken.is_ok());
                        used -= taken.unwrap_or(0) as usize;
                        prop_assert_eq!(refused.as_slice(), model.get(limit).map_or(&[][..], std::slice::from_ref));
                        let first = limit.min(model.len());
                        prop_assert_eq!(seen, model.drain(..first).collect::<Vec<_>>());
                    }
                }
            }
        }

        /// A hostile producer can cause an error, never a panic or an endless loop.
        #[test]
        fn arbitrary_memory_is_drained_or_rejected(words: [u64; 64], tail: u64, head: u64) {
            let (tail, head) = (AtomicU64::new(tail), AtomicU64::new(head));
            let slots: Vec<_> = (0..8).map(|_| SharedSlot::zeroed()).collect();
            for (slot, words) in slots.iter().zip(words.chunks(8)) {
                slot.store(&words.try_into().unwrap());
            }
            let mut consumer = Consumer::new(Ring::new(&tail, &head, &slots));
            let _ = consumer.drain(|_| {});
            prop_assert_eq!(consumer.pending(), 0);
        }
    }

    #[test]
    fn an_unpublished_slot_can_be_amended() {
        let (tail, head) = (AtomicU64::new(0), AtomicU64::new(0));
        let slots: Vec<_> = (0..4).map(|_| SharedSlot::zeroed()).collect();
        let ring = Ring::new(&tail, &head, &slots);
        let (mut producer, mut consumer) = (Producer::new(ring), Consumer::new(ring));
        let unpublished = Event { seq: 1, size: 500, stream: 7, ..Event::EMPTY };
        producer.write(&unpublished.to_slot()).unwrap();
        assert_eq!(consumer.drain(|_| panic!("not published")), Ok(0));
        let slot = producer.last_slot().unwrap();
        producer.set_end(Event::amend_slack(&slot, 12));
        producer.publish();
        let amended = Event { slack: 12, flags: Flags::SLACK_KNOWN, ..unpublished };
        assert_eq!(consumer.drain(|r| assert_eq!(r, Record::Event(amended.to_slot()))), Ok(1));
    }

    #[test]
    fn two_threads_transfer_all_events() {
        let (tail, head) = (AtomicU64::new(0), AtomicU64::new(0));
        let slots: Vec<_> = (0..64).map(|_| SharedSlot::zeroed()).collect();
        let ring = Ring::new(&tail, &head, &slots);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut producer = Producer::new(ring);
                for seq in 1..=100_000 {
                    while producer.write(&event(seq)).is_err() {
                        std::thread::yield_now();
                    }
                    producer.publish();
                }
            });
            let mut consumer = Consumer::new(ring);
            let mut expected = 1;
            while expected <= 100_000 {
                consumer
                    .drain(|r| {
                        assert_eq!(r, Record::Event(event(expected)));
                        expected += 1;
                    })
                    .unwrap();
            }
        });
    }
}
