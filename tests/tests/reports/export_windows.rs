//! Windows of a recording. A snapshot of any window is one from which viewers can replay backward. It holds the blocks
//! that a full replay from the start has in use.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use memtrace_analysis::export::{Selection, SnapshotOptions, Window, blocks_csv, snapshot};
use memtrace_analysis::load::{Manifest, MemoryRecording, Process};
use memtrace_analysis::model::Recording;
use memtrace_tests::golden::load;
use memtrace_tests::traced_program::root;
use memtrace_trace::event::{Action, Event};
use serde_json::{Value, json};

const RECORDINGS: [&str; 3] = ["resnet_leak.json", "oom.json", "expandable.json"];

fn process(recording: MemoryRecording) -> Process {
    Process::new(Path::new("7.mtr"), Box::new(recording), &Manifest::default())
}

/// A deterministic random generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n.max(1)
    }
}

/// The blocks in use after the first `n` events, by address. A block is in use until its free completes.
fn alive(events: &[Event], n: usize, rounded: &dyn Fn(u64) -> u64, least: u64) -> Value {
    let mut there: BTreeMap<u64, u64> = BTreeMap::new();
    for e in &events[..n] {
        match e.action {
            Action::Alloc => _ = there.insert(e.addr, e.size),
            Action::FreeCompleted => _ = there.remove(&e.addr),
            _ => {}
        }
    }
    there.into_iter().filter(|(_, size)| rounded(*size) >= least).map(|(addr, size)| json!([addr, size])).collect()
}

/// Writes a snapshot of each selection and returns the content that a reader finds.
fn read_back(process: &Process, selections: &[Selection]) -> Vec<(Window, Value)> {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    command.arg(root().join("tests/vizcheck/window.py"));
    let mut windows = Vec::new();
    for (i, selection) in selections.iter().enumerate() {
        let window = Window::of(process, selection, &mut |_| {}).unwrap_or_else(|e| panic!("{selection:?}: {e}"));
        let path = folder.path().join(format!("{i}.pickle"));
        let options = SnapshotOptions { window: window.clone(), ..SnapshotOptions::default() };
        snapshot(process, &mut std::fs::File::create(&path).unwrap(), &options, &mut |_| {}).unwrap();
        command.arg(path);
        windows.push(window);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    windows.into_iter().zip(found).collect()
}

/// PyTorch's rounding of a request, in bytes. A larger block from the allocator has a size that the request does not
/// determine.
fn rounded(size: u64) -> u64 {
    size.max(1).div_ceil(512) * 512
}

#[test]
fn a_snapshot_of_any_window_begins_and_ends_with_the_live_blocks() {
    for name in RECORDINGS {
        let recording = load(name);
        let events = recording.events.clone();
        let calibration = recording.calibration();
        let process = process(recording);
        let mut chance = Random(42);
        let (mut selections, mut bounds) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            let (a, b) = (chance.below(events.len() as u64) as usize, chance.below(events.len() as u64) as usize);
            let at = |i: usize| calibration.epoch_ns(events[i].ticks);
            let (from, to) = (at(a.min(b)), at(a.max(b)));
            // Events with equal timestamps belong together.
            let first = events.iter().position(|e| calibration.epoch_ns(e.ticks) >= from).unwrap();
            let end = events.iter().position(|e| calibration.epoch_ns(e.ticks) > to).unwrap_or(events.len());
            selections.push(Selection { epoch_ns: Some((from, to)), ..Selection::default() });
            bounds.push((first, end));
        }
        for ((window, found), (first, end)) in read_back(&process, &selections).into_iter().zip(bounds) {
            let what = format!("{name}: events {first} to {end}");
            assert_eq!(found[0]["start"], alive(&events, first, &rounded, 0), "{what}: at its beginning");
            assert_eq!(found[0]["end"], alive(&events, end, &rounded, 0), "{what}: at its end");
            assert_eq!(found[0]["events"], (end - first) as u64, "{what}");
            let left = window.left_out();
            assert_eq!((left.before, left.after), (first as u64, (events.len() - end) as u64), "{what}");
        }
    }
}

#[test]
fn max_events_keeps_the_last_events() {
    for name in RECORDINGS {
        let recording = load(name);
        let events = recording.events.clone();
        let process = process(recording);
        let counts: Vec<u64> = vec![1, 2, 7, events.len() as u64 / 2, events.len() as u64, u64::MAX];
        let asked = counts.iter().map(|n| Selection { max_events: Some(*n), ..Selection::default() });
        for ((window, found), n) in read_back(&process, &asked.collect::<Vec<_>>()).into_iter().zip(&counts) {
            let kept = events.len().min(usize::try_from(*n).unwrap());
            assert_eq!(found[0]["events"], kept as u64, "{name}: {n}");
            assert_eq!(found[0]["start"], alive(&events, events.len() - kept, &rounded, 0), "{name}: {n}");
            assert_eq!(found[0]["end"], alive(&events, events.len(), &rounded, 0), "{name}: {n}");
            assert_eq!(window.left_out().older, (events.len() - kept) as u64);
        }
    }
}

#[test]
fn blocks_below_the_minimum_size_are_left_out() {
    let recording = load("resnet_leak.json");
    let events = recording.events.clone();
    let process = process(recording);
    let least = [1, 513, 64 << 10, 1 << 20, 1 << 40];
    let asked = least.map(|min_size| Selection { min_size, max_events: Some(900), ..Selection::default() });
    let found = read_back(&process, &asked);
    let all = found[0].1[0]["events"].as_u64().unwrap();
    for ((window, found), least) in found.iter().zip(least) {
        let (start, left) = (&found[0]["start"], window.left_out());
        for list in ["start", "end"] {
            let sizes = found[0][list].as_array().unwrap().iter().map(|block| block[1].as_u64().unwrap());
            assert!(sizes.into_iter().all(|size| rounded(size) >= least || least <= 513), "{least}: {list}");
        }
        assert_eq!(found[0]["end"], alive(&events, events.len(), &rounded, least), "{least}: at its end");
        assert!(start.as_array().is_some());
        assert!(all >= found[0]["events"].as_u64().unwrap().min(900));
        assert_eq!(left.small_blocks == 0, least <= 1, "{least}: {left:?}");
        // At least the segment events remain.
        assert!(found[0]["events"].as_u64() > Some(0), "{least}");
    }
    // The blocks that are left out and those that are included add up to all blocks.
    let rows = |window: &Window| {
        let mut table = Vec::new();
        blocks_csv(&process, window, None, &mut table, &mut |_| {}).unwrap();
        String::from_utf8(table).unwrap().lines().count() as u64 - 1
    };
    let allocs = events.iter().filter(|e| e.action == Action::Alloc).count() as u64;
    for min_size in least {
        let window = Window::of(&process, &Selection { min_size, ..Selection::default() }, &mut |_| {}).unwrap();
        assert_eq!(rows(&window) + window.left_out().small_blocks, allocs, "{min_size}");
    }
}

#[test]
fn an_empty_selection_is_refused_with_the_available_values() {
    let process = process(load("resnet_leak.json"));
    // The text, and the help line.
    let error_of = |selection: Selection| {
        let error = Window::of(&process, &selection, &mut |_| {}).unwrap_err();
        format!("{error}; {}", error.help().unwrap_or_default())
    };
    let steps = error_of(Selection { steps: Some((1000, 2000)), ..Selection::default() });
    assert!(steps.contains("has no events in steps 1000-2000; its steps are "), "{steps}");
    let device = error_of(Selection { device: Some(9), ..Selection::default() });
    assert!(device.contains("no events of device 9; its devices are 0"), "{device}");
    let time = error_of(Selection { epoch_ns: Some((u64::MAX - 1, u64::MAX)), ..Selection::default() });
    assert!(time.contains("its events span ") && time.contains(" after the first one"), "{time}");
}

#[test]
fn windows_of_steps_cover_the_recording_without_gaps() {
    let recording = load("resnet_leak.json");
    let events = recording.events.len() as u64;
    let process = process(recording);
    let of = |steps| Window::of(&process, &Selection { steps: Some(steps), ..Selection::default() }, &mut |_| {});
    let whole = of((0, u32::MAX)).unwrap();
    let (mut step, mut inside) = (0, 0);
    while let Ok(window) = of((step, step)) {
        let left = window.left_out();
        assert_eq!(left.before, whole.left_out().before + inside, "step {step} begins where the last one ended");
        inside += events - left.before - left.after;
        step += 1;
    }
    assert!(step >= 2, "{step} steps");
    assert_eq!(inside + whole.left_out().before, events);
}
