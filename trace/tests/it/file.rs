//! The trace file as a whole: round trips, every prefix, flipped bytes.

use std::path::Path;

use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::{COUNTER_SLOTS, Counter};
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{End, Reader, Writer};
use memtrace_trace::ids::{FrameId, StackId, ThreadId};

fn event(seq: u64) -> Event {
    Event {
        seq,
        ticks: 1_000 * seq,
        addr: 0x7f00_0000_0000 + (seq % 7) * 512,
        size: 100 + seq % 3,
        stack: StackId((seq % 5) as u32),
        source: Source::Torch,
        action: if seq.is_multiple_of(2) { Action::Alloc } else { Action::FreeCompleted },
        device: 0,
        thread: ThreadId(1),
        ..Event::EMPTY
    }
}

fn sample(events: u64, flush_every: u64) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), r#"{"pid": 7}"#).unwrap();
    let mut bytes = Vec::new();
    Definition::Frame { id: FrameId(1), name: "f", qualname: "f", filename: "a.py", line: 3, first_line: 1 }
        .encode(&mut bytes);
    Definition::Stack { id: StackId(1), parent: StackId::NONE, frame: FrameId(1) }.encode(&mut bytes);
    writer.definition(&bytes).unwrap();
    writer.clock(ClockPoint { ticks: 0, monotonic_ns: 0, realtime_ns: 5 }).unwrap();
    for seq in 1..=events {
        writer.event(&event(seq)).unwrap();
        if seq % flush_every == 0 {
            writer.flush().unwrap();
        }
    }
    let mut counters = [0; COUNTER_SLOTS];
    counters[Counter::Panics as usize] = 300;
    writer.counters(&counters).unwrap();
    writer.clock(ClockPoint { ticks: 2_000, monotonic_ns: 1_000, realtime_ns: 1_005 }).unwrap();
    let end = End { wait_status: Some(9), lost: 2, late: 1, reason: "exited".into() };
    writer.finish(&end).unwrap()
}

fn open(bytes: &[u8], dir: &Path) -> memtrace_trace::error::Result<Reader> {
    let path = dir.join("t.mtr");
    std::fs::write(&path, bytes).unwrap();
    Reader::open(path)
}

#[test]
fn a_trace_round_trips() {
    let dir = tempfile::tempdir().unwrap();
    let reader = open(&sample(50_000, u64::MAX), dir.path()).unwrap();
    assert!(reader.damage().is_none());
    assert_eq!(reader.info(), r#"{"pid": 7}"#);
    assert_eq!(reader.event_count(), 50_000);
    let events: Vec<Event> = reader.events().flat_map(|b| b.unwrap()).collect();
    assert_eq!(events, (1..=50_000).map(event).collect::<Vec<_>>());
    assert_eq!(reader.counter(Counter::Panics), 300);
    assert_eq!(reader.end().unwrap().wait_status, Some(9));
    assert_eq!(reader.calibration().epoch_ns(2_000), 1_005);
    let frames: Vec<_> = reader.definitions().walk(StackId(1)).map(|(_, f)| f.unwrap().line).collect();
    assert_eq!(frames, [3]);
}

#[test]
fn every_prefix_is_readable_up_to_the_cut() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample(60, 10);
    let mut read = 0;
    for cut in 0..bytes.len() {
        let Ok(reader) = open(&bytes[..cut], dir.path()) else {
            assert!(cut < 16, "a trace truncated at {cut} does not open");
            continue;
        };
        assert!(reader.end().is_none());
        let events: Vec<Event> = reader.events().flat_map(|b| b.unwrap()).collect();
        assert_eq!(events, (1..=events.len() as u64).map(event).collect::<Vec<_>>());
        assert!(events.len() >= read, "more bytes, fewer events");
        read = events.len();
    }
    assert_eq!(read, 60);
}

#[test]
fn a_flipped_byte_loses_only_its_frame_and_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample(60, 10);
    for at in 16..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x40;
        let reader = open(&damaged, dir.path()).unwrap();
        let mut lost = 0;
        let mut events = Vec::new();
        for block in reader.events() {
            match block {
                Ok(block) => events.extend(block),
                Err(block) => lost += block.events,
            }
        }
        assert!(events.len() >= 50, "a flip at {at} cost {} events", 60 - events.len());
        assert!(events.iter().all(|e| *e == event(e.seq)), "a flip at {at} altered an event");
        assert!(!reader.damage().is_none() || lost > 0, "a flip at {at} went unnoticed");
    }
}

#[test]
fn files_that_are_no_trace_are_rejected_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let message = open(b"PK\x03\x04 a zip file, say", dir.path()).unwrap_err().to_string();
    assert!(message.contains("not a memtrace trace"), "{message}");
    let mut newer = sample(1, 1);
    newer[8] = 2;
    let message = open(&newer, dir.path()).unwrap_err().to_string();
    let version = format!("2.{} is newer", newer[10]);
    assert!(message.contains(&version), "{message}");
    assert!(open(b"", dir.path()).is_err());
}

#[test]
fn a_failed_write_is_reported_once_and_leaves_a_valid_trace() {
    struct Limited(Vec<u8>, usize);
    impl std::io::Write for Limited {
        fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
            let room = self.1 - self.0.len();
            if room == 0 {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            let take = room.min(b.len());
            self.0.extend_from_slice(&b[..take]);
            Ok(take)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut out = Limited(Vec::new(), 300);
    let mut writer = Writer::new(&mut out, "{}").unwrap();
    let failed = (1..100).find(|seq| writer.event(&event(*seq)).and_then(|()| writer.flush()).is_err());
    assert!(failed.is_some());
    drop(writer);
    let dir = tempfile::tempdir().unwrap();
    let reader = open(&out.0, dir.path()).unwrap();
    assert_eq!(reader.event_count(), failed.unwrap() - 1);
    assert!(reader.damage().is_tail_truncated);
}

#[test]
fn a_growing_file_is_followed_frame_by_frame() {
    let whole = sample(9, 3);
    // However the file grows, each event is read once, and none before its frame is complete.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("1.mtr");
    for step in [1, 7, whole.len()] {
        std::fs::write(&path, &whole[..16]).unwrap();
        let mut reader = Reader::following(&path).unwrap();
        let mut seen = 0;
        for len in (16..whole.len()).step_by(step).chain([whole.len()]) {
            std::fs::write(&path, &whole[..len]).unwrap();
            seen += reader.follow().unwrap();
            assert_eq!(seen, reader.blocks().len());
            assert_eq!(reader.end().is_some(), len == whole.len());
        }
        assert_eq!((seen, reader.follow().unwrap()), (3, 0));
        assert!(reader.damage().is_none());
        let mut read = Vec::new();
        for block in reader.events() {
            read.extend(block.unwrap().iter().map(|event| event.seq));
        }
        assert_eq!(read, (1..10).collect::<Vec<_>>());
    }
}
