//! A damaged trace through everything that reads it: reader, summary, text, JSON, snapshot. The input is every prefix
//! of a small, complete trace, and the trace with each byte altered. The result is an error or a partial result with
//! correct counts. Whatever is read was recorded.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::{TextOptions, ToText, open_run, summarize};
use memtrace_trace::event::Event;

/// The result of reading a file.
struct Outcome {
    events: Vec<Event>,
    /// Whether something is reported missing.
    is_reported: bool,
    /// Whether it is known how the recording ended.
    ended: bool,
}

/// Reads a folder with one trace in every available way; `None` if it is refused.
fn read(folder: &Path, bytes: &[u8]) -> Option<Outcome> {
    std::fs::write(folder.join("7.mtr"), bytes).unwrap();
    let run = match open_run(folder) {
        Ok(run) => run,
        Err(e) => {
            assert!(e.to_string().contains("7.mtr"), "an error names the file: {e}");
            return None;
        }
    };
    let [process] = run.processes() else { panic!("one process") };
    let recording = process.recording();
    let mut events = Vec::new();
    let lost = recording.stream(&mut |part| events.extend_from_slice(part));
    assert_eq!(events.len() as u64 + lost.events, recording.event_count());
    let damage = recording.damage();
    assert!(damage.bytes_skipped <= bytes.len() as u64);

    let summary = summarize(&run, &mut |_| {}).unwrap();
    let process_summary = &summary.processes[0];
    assert_eq!(process_summary.events, events.len() as u64);
    let count = |name: &str| process_summary.losses.get(name).copied().unwrap_or(0);
    assert_eq!((count("undecodable_blocks"), count("undecodable_events")), (lost.blocks, lost.events));
    assert_eq!(count("bytes_skipped"), damage.bytes_skipped);
    let text = summary.to_text(&TextOptions::default());
    assert!(!text.is_empty() && !summary.to_json().is_empty());
    let report = snapshot(process, &mut io::sink(), &SnapshotOptions::default(), &mut |_| {}).unwrap();
    assert!(report.bytes > 0);
    let is_reported = lost.blocks > 0 || damage.bytes_skipped > 0 || damage.unknown_frames > 0;
    assert!(!is_reported || !process_summary.losses.is_empty(), "what is missing is in the summary");
    Some(Outcome { events, is_reported, ended: process_summary.recording_end_reason.is_some() })
}

/// Calls `case` with every number below `count`, on a few threads. Each thread has a folder of its own.
fn for_all(count: usize, case: impl Fn(&Path, usize) + Sync) {
    const THREADS: usize = 2;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let case = &case;
            scope.spawn(move || {
                let folder = tempfile::tempdir().unwrap();
                (thread..count).step_by(THREADS).for_each(|n| case(folder.path(), n));
            });
        }
    });
}

fn is_part_of(events: &[Event], all: &[Event]) -> bool {
    let all: HashSet<&Event> = all.iter().collect();
    events.iter().all(|event| all.contains(event))
}

#[test]
fn the_undamaged_trace_is_read_completely() {
    let folder = tempfile::tempdir().unwrap();
    let whole = read(folder.path(), &crate::small_trace::trace(5)).unwrap();
    assert!(whole.events == crate::small_trace::events());
    assert!(!whole.is_reported && whole.ended);
    let actions: HashSet<_> = whole.events.iter().map(|e| e.action).collect();
    assert!(actions.len() >= 15, "{actions:?}");
}

#[test]
fn every_prefix_gives_its_complete_frames() {
    let (bytes, all) = (crate::small_trace::trace(5), crate::small_trace::events());
    for_all(bytes.len(), |folder, cut| match read(folder, &bytes[..cut]) {
        None => assert!(cut < 16, "a trace cut at {cut} is refused"),
        Some(found) => {
            assert!(!found.ended, "a trace cut at {cut} seems whole");
            assert!(found.events == all[..found.events.len()], "cut at {cut}: other events");
            // All complete blocks are read; the tolerance is one block.
            let complete = all.len().saturating_sub(5) * cut / bytes.len();
            assert!(found.events.len() + 25 >= complete, "cut at {cut}: {} events", found.events.len());
        }
    });
}

/// One bit of each byte, a different one from byte to byte. `exhaustive` alters each byte in several ways.
#[test]
fn every_altered_byte_is_detected_and_loses_only_its_frame() {
    alter_bytes(1, |at, _| [0x01, 0x80, 0x10][at % 3]);
}

/// Alters each byte `ways` times by the mask that `mask(byte, way)` gives, and reads the trace.
fn alter_bytes(ways: usize, mask: impl Fn(usize, usize) -> u8 + Sync) {
    let (bytes, all) = (crate::small_trace::trace(5), crate::small_trace::events());
    for_all(bytes.len() * ways, |folder, n| {
        let at = n / ways;
        let mask = mask(at, n % ways);
        let mut damaged = bytes.clone();
        damaged[at] ^= mask;
        let Some(found) = read(folder, &damaged) else {
            assert!(at < 12, "byte {at} ^ {mask:#x}: refused");
            return;
        };
        assert!(is_part_of(&found.events, &all), "byte {at} ^ {mask:#x} altered an event");
        assert!(found.events.len() + 5 >= all.len(), "byte {at} ^ {mask:#x} cost more than its block");
        assert!(at < 16 || found.is_reported, "byte {at} ^ {mask:#x} went unnoticed");
    });
}

/// The checksums are right and the contents are wrong, as from a faulty or malicious writer.
#[test]
fn no_altered_byte_under_a_valid_checksum_causes_a_panic() {
    const HEADER: usize = 24;
    let bytes = crate::small_trace::trace(40);
    let mut frames = Vec::new();
    let mut at = 16;
    while at < bytes.len() {
        let len = u32::from_le_bytes(*bytes[at + 8..].first_chunk().unwrap()) as usize;
        frames.push((at, at + HEADER + len));
        at += HEADER + len;
    }
    const MASKS: [u8; 2] = [0x01, 0xff];
    for_all(bytes.len() * MASKS.len(), |folder, n| {
        let (at, mask) = (n / MASKS.len(), MASKS[n % MASKS.len()]);
        let Some((start, end)) = frames.iter().find(|(start, end)| (*start..*end).contains(&at)) else { return };
        let mut altered = bytes.clone();
        altered[at] ^= mask;
        let payload = crc32fast::hash(&altered[start + HEADER..*end]);
        altered[start + 16..start + 20].copy_from_slice(&payload.to_le_bytes());
        let header = crc32fast::hash(&altered[*start..start + 20]);
        altered[start + 20..start + 24].copy_from_slice(&header.to_le_bytes());
        read(folder, &altered).expect("the file's header is sound");
    });
}

mod exhaustive {
    #[test]
    fn every_byte_is_altered_in_several_ways() {
        const MASKS: [u8; 3] = [0x01, 0x80, 0xff];
        super::alter_bytes(MASKS.len(), |_, way| MASKS[way]);
    }
}
