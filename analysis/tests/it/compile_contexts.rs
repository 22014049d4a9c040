//! The compile contexts of PyTorch's snapshots: read from both formats, shown, and kept in exported snapshots.

use memtrace_analysis::export::{SnapshotOptions, Window, blocks_csv, snapshot};
use memtrace_analysis::{LinesOptions, Run, Summary, TextOptions, ToText, lines, open_run, summarize};
use memtrace_trace::event::Action;

use crate::snapshot_files::{self, Pickler, V, block, json, pickle, segment};

const MIB: i128 = 1 << 20;
const BASE: i128 = 1 << 40;
const REGIONS: [&str; 2] = ["Torch-Compiled Region: 0/0", "Torch-Compiled Region: 1/0"];

/// An event of line 7 or 8, in a compile context.
fn event(action: &str, addr: i128, size: i128, time: i128, context: Option<&str>) -> V {
    let V::Dict(mut event) = snapshot_files::event(action, BASE + addr, size, time, &[]) else { unreachable!() };
    event.retain(|(key, _)| !matches!(*key, "compile_context" | "frames"));
    let line = V::Int(7 + addr / MIB % 2);
    let frame = V::Dict(vec![("name", "step".into()), ("filename", "train.py".into()), ("line", line)]);
    event.push(("frames", V::List(vec![frame])));
    event.extend(context.map(|context| ("compile_context", context.into())));
    V::Dict(event)
}

/// Two devices. The events of the second lie between those of the first: a context belongs to an event of one device.
fn content() -> V {
    let blocks = |live: &[(i128, i128)]| {
        let (mut at, mut blocks) = (0, Vec::new());
        let mut add = |from: i128, to: i128, state: &str| {
            if from < to {
                blocks.push(block(BASE + from * MIB, (to - from) * MIB, (to - from) * MIB, state, &[]));
            }
        };
        for (from, size) in live {
            add(at, *from, "inactive");
            add(*from, from + size, "active_allocated");
            at = from + size;
        }
        add(at, 64, "inactive");
        blocks
    };
    let first = vec![
        event("segment_alloc", 0, 64 * MIB, 10, Some("N/A")),
        event("alloc", 0, MIB, 20, Some("N/A")),
        event("alloc", MIB, 2 * MIB, 30, Some(REGIONS[0])),
        event("alloc", 4 * MIB, 4 * MIB, 40, Some(REGIONS[0])),
        event("alloc", 8 * MIB, 8 * MIB, 50, Some(REGIONS[1])),
        event("free_requested", 8 * MIB, 8 * MIB, 60, Some("")),
        event("free_completed", 8 * MIB, 8 * MIB, 60, None),
        event("alloc", 32 * MIB, 16 * MIB, 70, None),
    ];
    let second = vec![
        event("segment_alloc", 0, 64 * MIB, 25, Some("N/A")),
        event("alloc", 0, MIB, 35, Some("N/A")),
        event("alloc", 2 * MIB, MIB, 45, Some(REGIONS[1])),
    ];
    let segments = vec![
        segment(0, BASE, 64 * MIB, false, blocks(&[(0, 1), (1, 2), (4, 4), (32, 16)])),
        segment(1, BASE, 64 * MIB, false, blocks(&[(0, 1), (2, 1)])),
    ];
    snapshot_files::snapshot(segments, vec![first, second])
}

fn open(bytes: &[u8]) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pickle");
    std::fs::write(&path, bytes).unwrap();
    open_run(&path).unwrap()
}

fn amounts(summary: &Summary, device: i16) -> Vec<(Option<&str>, u64, u64)> {
    let device = summary.processes[0].devices.iter().find(|d| d.device == device).unwrap();
    let peak = &device.peak.as_ref().unwrap().by_compile_context;
    peak.iter().map(|a| (a.compile_context.as_deref(), a.bytes / MIB as u64, a.blocks)).collect()
}

#[test]
fn contexts_are_read_from_every_format_and_shown() {
    for bytes in [
        pickle(&content(), Pickler::Python(4)),
        pickle(&content(), Pickler::Torch),
        pickle(&content(), Pickler::Odd),
        json(&content()).into_bytes(),
    ] {
        let run = open(&bytes);
        let summary = summarize(&run, &mut |_| {}).unwrap();
        // The peak of device 0 is its last allocation, after the block of the second region was freed.
        assert_eq!(amounts(&summary, 0), [(Some(REGIONS[0]), 6, 2), (None, 17, 2)]);
        assert_eq!(amounts(&summary, 1), [(Some(REGIONS[1]), 1, 1), (None, 1, 1)]);
        let text = summary.to_text(&TextOptions::default());
        let expected = "  In use by compile context of torch.compile (% of the 23.0 MiB allocated)
    6.00 MiB   26 %  Torch-Compiled Region: 0/0 in 2 blocks
    17.0 MiB   74 %  outside compiled regions in 2 blocks
";
        assert!(text.contains(expected), "{text}");
        let mut table = Vec::new();
        blocks_csv(&run.processes()[0], &Window::WHOLE, None, &mut table, &mut |_| {}).unwrap();
        let table = String::from_utf8(table).unwrap();
        assert_eq!(table.lines().filter(|line| line.ends_with(&format!(",{},", REGIONS[0]))).count(), 2, "{table}");
        assert_eq!(table.lines().filter(|line| line.ends_with(&format!(",{},", REGIONS[1]))).count(), 2, "{table}");
    }
}

#[test]
fn lines_have_a_column() {
    let run = open(&pickle(&content(), Pickler::Torch));
    let options = LinesOptions { top: 9, device: Some(0), ..LinesOptions::default() };
    let report = lines(&run, &options, &mut |_| {}).unwrap();
    let line = |line: u32| &report.functions[0].lines.iter().find(|l| l.line == line).unwrap().compile_contexts;
    let of = |at: u32| -> Vec<(Option<&str>, u64)> {
        line(at).iter().map(|a| (a.compile_context.as_deref(), a.bytes / MIB as u64)).collect()
    };
    assert_eq!(of(7), [(Some(REGIONS[1]), 8), (Some(REGIONS[0]), 4), (None, 17)]);
    assert_eq!(of(8), [(Some(REGIONS[0]), 2)]);
    let text = report.to_text(&TextOptions { width: 200, ..TextOptions::default() });
    assert!(text.contains("Compile contexts") && text.contains("outside compiled regions 17.0 MiB"), "{text}");
}

#[test]
fn exported_snapshots_keep_the_contexts() {
    let run = open(&pickle(&content(), Pickler::Torch));
    let mut bytes = Vec::new();
    snapshot(&run.processes()[0], &mut bytes, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    let again = open(&bytes);
    let contexts = |run: &Run| {
        let recording = run.processes()[0].recording();
        let mut all = Vec::new();
        recording.stream(&mut |events| {
            let contexts = recording.compile_contexts();
            all.extend(
                events
                    .iter()
                    .map(|e| (e.device, e.action, e.addr, contexts.text(contexts.of(e.seq)).map(str::to_owned))),
            );
        });
        // The blocks do not lie as PyTorch would place them, so the exported snapshot has more segments.
        all.retain(|(_, action, ..)| matches!(action, Action::Alloc | Action::FreeRequested | Action::FreeCompleted));
        all
    };
    assert_eq!(contexts(&again), contexts(&run));
    assert!(contexts(&run).iter().any(|(.., context)| context.as_deref() == Some(REGIONS[1])));
    let plain = open(&pickle(&snapshot_files::snapshot(Vec::new(), vec![Vec::new()]), Pickler::Torch));
    assert!(plain.processes()[0].recording().compile_contexts().is_empty());
}
