//! A segment that a hostile traced process has overwritten, processed as the launcher does: rings, order, definitions,
//! trace file. The result must be a sound trace, with every event that the launcher accepted.
//!
//! The input has the number of rings, the next sequence number, tail and head of two rings, then slots, half of them
//! for each ring.
#![no_main]

use std::sync::OnceLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use memtrace_fuzz::Folder;
use memtrace_trace::event::{Event, Flags};
use memtrace_trace::file::{End, Reader, Writer};
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::layout::RING_SLOTS;
use memtrace_trace::shm::ring::Producer;
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::shm::validation;
use memtrace_trace::sync::Ordering::Relaxed;

#[path = "../../../launcher/src/drain/merge.rs"]
#[allow(dead_code, reason = "part of the launcher")]
mod merge;
#[path = "../../../launcher/src/drain/rings.rs"]
#[allow(dead_code, reason = "part of the launcher")]
mod rings;

/// Handles the ring contents as `launcher/src/drain/process.rs` does.
#[derive(Default)]
struct Intake {
    merge: merge::Merge,
    definitions: Vec<u8>,
    events: Vec<Event>,
    taken: usize,
}

impl rings::Intake for Intake {
    fn writer(&mut self, tid: u32, _name: Option<&str>) -> ThreadId {
        ThreadId(1 + tid % 7)
    }

    fn has_room(&mut self) -> bool {
        true
    }

    fn has_place(&mut self, seq: u64) -> bool {
        self.merge.has_place(seq)
    }

    fn event(&mut self, event: Event) {
        self.taken += 1;
        let Intake { merge, events, .. } = self;
        merge.insert(event, &mut |event| events.push(event));
    }

    fn definition(&mut self, bytes: &[u8]) {
        if validation::decode_definition(bytes).is_some() {
            self.definitions.extend_from_slice(bytes);
        }
    }

    fn ring_done(&mut self, _thread: ThreadId, _slots: u64) {}
}

fn segment() -> &'static Segment {
    static SEGMENT: OnceLock<Segment> = OnceLock::new();
    SEGMENT.get_or_init(|| Segment::create().expect("a segment").0)
}

fn write(ring: usize, slots: &[u8]) {
    let (header, ring) = segment().ring_header(ring).zip(segment().ring(ring)).expect("a ring");
    let at = header.head.0.load(Relaxed);
    header.tail.0.store(at, Relaxed);
    let mut producer = Producer::new(ring);
    for slot in slots.chunks(64).take(RING_SLOTS) {
        let mut bytes = [0; 64];
        bytes[..slot.len()].copy_from_slice(slot);
        let words = bytes.as_chunks::<8>().0;
        producer.write(&std::array::from_fn(|i| u64::from_le_bytes(words[i]))).expect("room");
    }
}

/// The file cannot express two things that no hook makes: a slack without its `SLACK_KNOWN` flag, and a size with all
/// bits set.
fn forget_what_no_hook_makes(read: &mut Event, event: &mut Event) {
    if !event.flags.contains(Flags::SLACK_KNOWN) {
        event.slack = 0;
    }
    if event.size == u64::MAX {
        event.size = read.size;
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((head, slots)) = data.split_at_checked(41) else { return };
    let word = |n: usize| u64::from_le_bytes(*head[1 + n * 8..].first_chunk().expect("41 bytes"));
    let (first, second) = slots.split_at(slots.len() / 128 * 64);
    let header = segment().header();
    header.rings_used.0.store(head[0].into(), Relaxed);
    header.next_seq.0.store(word(0), Relaxed);
    for (ring, slots) in [first, second].into_iter().enumerate() {
        let positions = segment().ring_header(ring).expect("a ring");
        positions.head.0.store(word(2 + 2 * ring), Relaxed);
        write(ring, slots);
        positions.tail.0.store(word(1 + 2 * ring), Relaxed);
    }

    let (mut rings, mut intake) = (rings::Rings::default(), Intake::default());
    rings.drain(segment(), &mut intake);
    rings.drain(segment(), &mut intake);
    let Intake { mut merge, definitions, mut events, taken } = intake;
    merge.tick(Duration::from_secs(1), &mut |event| events.push(event));
    merge.tick(Duration::from_secs(3), &mut |event| events.push(event));
    merge.finish(header.next_seq.0.load(Relaxed), &mut |event| events.push(event));
    assert_eq!(events.len(), taken, "every event that was taken comes out");

    let mut writer = Writer::new(Vec::new(), "{}").expect("memory");
    writer.definition(&definitions).expect("memory");
    for event in &events {
        writer.event(event).expect("memory");
    }
    let end = End { lost: merge.lost(), late: merge.late(), reason: "exited".into(), ..End::default() };
    let folder = Folder::here();
    folder.put("7.mtr", &writer.finish(&end).expect("memory"));
    let reader = Reader::open(folder.path().join("7.mtr")).expect("a trace");
    assert!(reader.damage().malformed_definitions == 0 || definitions.len() > 1 << 10, "{:?}", reader.damage());
    let mut read: Vec<Event> = reader.events().flat_map(|block| block.expect("a sound block")).collect();
    assert_eq!(read.len(), events.len());
    read.iter_mut().zip(&mut events).for_each(|(read, event)| forget_what_no_hook_makes(read, event));
    assert!(read == events);

    // The next input starts with zeroed memory.
    for (ring, slots) in [first, second].into_iter().enumerate() {
        segment().ring_header(ring).expect("a ring").head.0.store(word(2 + 2 * ring), Relaxed);
        write(ring, &vec![0; slots.len()]);
    }
});
