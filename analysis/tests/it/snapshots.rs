//! PyTorch snapshots as recordings. Every format of the same snapshot gives the same result, and what existed before
//! the first event is found. Damaged, foreign and malicious files give an error message or a part of the result, never
//! more.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::snapshot_files::*;
use memtrace_analysis::export::{SnapshotOptions, snapshot as export};
use memtrace_analysis::load::Process;
use memtrace_analysis::passes::{Phase, PhaseTracker};
use memtrace_analysis::report::StepSummary;
use memtrace_analysis::{Run, Summary, TextOptions, ToText, open_run, summarize};
use memtrace_trace::event::{Action, Event, Flags};

const PICKLERS: [Pickler; 6] =
    [Pickler::Python(2), Pickler::Python(3), Pickler::Python(4), Pickler::Python(5), Pickler::Torch, Pickler::Odd];
const MIB: i128 = 1 << 20;
const BASE: i128 = 0x7f00_0000_0000;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn open(&self, name: &str, bytes: &[u8]) -> Result<Run, String> {
        let path = self.put(name, bytes);
        open_run(&path).map_err(|e| e.to_string())
    }
}

fn events(process: &Process) -> Vec<Event> {
    let mut found = Vec::new();
    let lost = process.recording().stream(&mut |part| found.extend_from_slice(part));
    assert_eq!((found.len() as u64, lost.events), (process.recording().event_count(), 0));
    let (event_counts, _) = process.recording().event_counts();
    assert_eq!(event_counts.events(), found.len() as u64);
    assert!(found.iter().enumerate().all(|(i, e)| e.seq == i as u64 + 1), "numbered without gaps");
    found
}

/// Every event as text, with its stack by name.
fn contents(process: &Process) -> Vec<String> {
    let definitions = process.definitions();
    let line = |e: &Event| {
        let frames: Vec<_> = definitions
            .walk(e.stack)
            .map(|(_, f)| f.map_or("?".to_owned(), |f| format!("{}:{}", f.name, f.line)))
            .collect();
        let node = definitions.context(e.context).map(|c| {
            let forward: Vec<_> = definitions.walk(c.forward).map(|(_, f)| f.map_or("?", |f| &f.name)).collect();
            format!("{} of {}", c.node, forward.join("<"))
        });
        format!(
            "{} {} {:#x} {} {} {} {:?} {:?} {:?} {}",
            e.action.name(),
            e.device,
            e.addr,
            e.size,
            e.stream,
            e.ticks,
            e.flags,
            e.pool,
            node,
            frames.join("<")
        )
    };
    events(process).iter().map(line).collect()
}

fn summary(run: &Run) -> Summary {
    let summary = summarize(run, &mut |_| {}).unwrap();
    let text = summary.to_text(&TextOptions::default());
    assert!(!text.is_empty() && !summary.to_json().is_empty());
    summary
}

fn remarks(summary: &Summary) -> String {
    let message: Vec<_> =
        summary.processes[0].notices.iter().filter(|n| n.topic == "snapshot").map(|n| n.text.as_str()).collect();
    message.join("\n")
}

/// A program that was recorded from its first allocation. It has two devices, a recursive stack, an address in the
/// upper half and an out-of-memory error.
fn whole() -> V {
    let high = 0xffff_8000_0000_0000_u64 as i128;
    let first = vec![
        event("segment_alloc", BASE, 20 * MIB, 1000, &["f", "main"]),
        event("alloc", BASE, 8 * MIB, 1001, &["f", "f", "main"]),
        event("alloc", BASE + 8 * MIB, 2 * MIB, 1002, &["g", "main"]),
        event("free_requested", BASE, 8 * MIB, 1003, &["g", "main"]),
        event("free_completed", BASE, 8 * MIB, 1004, &["g", "main"]),
        event("oom", 5 * MIB, 100 * MIB, 1005, &["h", "main"]),
    ];
    let second =
        vec![event("segment_alloc", high, 2 * MIB, 999, &["main"]), event("alloc", high, 1000, 1003, &["h", "main"])];
    let state = vec![
        segment(
            0,
            BASE,
            20 * MIB,
            false,
            vec![
                block(BASE, 8 * MIB, 0, "inactive", &[]),
                block(BASE + 8 * MIB, 2 * MIB, 2 * MIB, "active_allocated", &["g", "main"]),
                block(BASE + 10 * MIB, 10 * MIB, 0, "inactive", &[]),
            ],
        ),
        segment(
            1,
            high,
            2 * MIB,
            false,
            vec![
                block(high, 1024, 1000, "active_allocated", &["h", "main"]),
                block(high + 1024, 2 * MIB - 1024, 0, "inactive", &[]),
            ],
        ),
    ];
    snapshot(state, vec![first, second])
}

#[test]
fn every_pickler_and_format_gives_the_same_recording() {
    let folder = Folder::new();
    let value = whole();
    let mut files: Vec<(String, Vec<u8>)> = vec![("a.json".to_owned(), json(&value).into_bytes())];
    files.extend(PICKLERS.iter().map(|pickler| (format!("{pickler:?}.pickle"), pickle(&value, *pickler))));
    for (name, bytes) in files.clone() {
        files.push((format!("{name}.gz"), gzip(&bytes)));
    }
    let mut first: Option<Vec<String>> = None;
    for (name, bytes) in &files {
        let run = folder.open(name, bytes).unwrap();
        assert!(run.problems().is_empty(), "{name}: {:?}", run.problems());
        let contents = contents(&run.processes()[0]);
        assert_eq!(first.get_or_insert_with(|| contents.clone()), &contents, "{name}");
        let summary = summary(&run);
        assert_eq!(
            summary.losses,
            Default::default(),
            "{name}: what the state at the end says is what the events add up to"
        );
        assert_eq!(summary.processes[0].events, 8, "{name}");
        let peaks: Vec<_> =
            summary.processes[0].devices.iter().map(|d| (d.device, d.highest.allocated_bytes)).collect();
        assert_eq!(peaks, [(0, 10 << 20), (1, 1024)], "{name}");
        assert_eq!(summary.processes[0].devices[0].oom_count, 1);
        // The file does not say whose the GPU is: those of torch.xpu and torch.mtia have the same form.
        let statements: Vec<_> = summary.verdict.statements.iter().map(|s| s.text.as_str()).collect();
        assert!(statements.iter().any(|text| text.starts_with("Out of memory on GPU 0")), "{name}: {statements:?}");
    }
    // The events of both devices by time: 999 of the second device comes first. At 1003 the first device comes first.
    let first = first.unwrap();
    let order: Vec<_> = first.iter().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(
        order,
        [
            "segment_alloc 1",
            "segment_alloc 0",
            "alloc 0",
            "alloc 0",
            "free_requested 0",
            "alloc 1",
            "free_completed 0",
            "oom 0",
            "totals 0",
            "totals 1"
        ]
    );
    assert!(first[2].ends_with("f:1<f:2<main:3"), "{}", first[2]);
    assert!(first[0].contains("0xffff800000000000"), "{}", first[0]);
}

/// The rest of [`whole`] if its ring buffer has overwritten the beginning, or if it was started late.
#[test]
fn blocks_older_than_the_recording_are_reconstructed() {
    let trace = vec![
        // An older block is freed, and the free of another, requested before, is completed. An expandable range grows,
        // then shrinks.
        event("free_requested", BASE, 8 * MIB, 2000, &["main"]),
        event("free_completed", BASE, 8 * MIB, 2001, &["main"]),
        event("free_completed", BASE + 10 * MIB, MIB, 2002, &["main"]),
        event("segment_map", BASE + 102 * MIB, 2 * MIB, 2003, &["main"]),
        event("alloc", BASE + 100 * MIB, 3 * MIB, 2004, &["g", "main"]),
        event("free_requested", BASE + 100 * MIB, 3 * MIB, 2005, &["g", "main"]),
        event("free_completed", BASE + 100 * MIB, 3 * MIB, 2006, &["g", "main"]),
        event("segment_unmap", BASE + 102 * MIB, 2 * MIB, 2007, &["main"]),
        event("segment_free", BASE + 200 * MIB, 20 * MIB, 2008, &["main"]),
    ];
    let state = vec![
        segment(
            0,
            BASE,
            20 * MIB,
            false,
            vec![
                block(BASE, 8 * MIB, 0, "inactive", &[]),
                block(BASE + 8 * MIB, 2 * MIB, 2 * MIB - 7, "active_allocated", &["g", "main"]),
                block(BASE + 10 * MIB, 10 * MIB, 0, "inactive", &[]),
            ],
        ),
        segment(0, BASE + 100 * MIB, 2 * MIB, true, vec![block(BASE + 100 * MIB, 2 * MIB, 0, "inactive", &[])]),
    ];
    let folder = Folder::new();
    let run = folder.open("late.pickle", &pickle(&snapshot(state, vec![trace]), Pickler::Python(4))).unwrap();
    let process = &run.processes()[0];
    let before: Vec<Event> = events(process).into_iter().filter(|e| e.flags.contains(Flags::PREEXISTING)).collect();
    let found: Vec<_> = before.iter().map(|e| (e.action, e.addr as i128 - BASE, e.size as i128)).collect();
    assert_eq!(
        found,
        [
            (Action::SegmentAlloc, 0, 20 * MIB),
            (Action::Alloc, 0, 8 * MIB),
            (Action::Alloc, 8 * MIB, 2 * MIB - 7),
            (Action::Alloc, 10 * MIB, MIB),
            (Action::FreeRequested, 10 * MIB, MIB),
            (Action::SegmentMap, 100 * MIB, 2 * MIB),
            (Action::SegmentAlloc, 200 * MIB, 20 * MIB),
        ]
    );
    let summary = summary(&run);
    assert_eq!(summary.losses, Default::default());
    let device = &summary.processes[0].devices[0];
    // 8 + 2 MiB, and 1 MiB that only waited for a stream. Reserved: 20 + 2 + 20 MiB, and 2 MiB more that were mapped.
    assert_eq!(device.highest.allocated_bytes, 11 << 20, "before its free was requested");
    assert_eq!(device.highest.reserved_bytes, 44 << 20);
    assert_eq!(device.end.as_ref().unwrap().totals.allocated_bytes, 2 << 20);
    assert_eq!(summary.processes[0].events, 9);
    let message = remarks(&summary);
    assert!(
        message.contains("3 blocks (11534336 bytes) and 3 segments are older")
            && message.contains("2 of these blocks are known only by their free"),
        "{message}"
    );

    // None of it becomes an event of an exported snapshot, and the exported snapshot reads the same.
    let mut bytes = Vec::new();
    export(process, &mut bytes, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    let again = folder.open("again.pickle", &bytes).unwrap();
    assert_eq!(contents(&again.processes()[0]), contents(process));
    let mut twice = Vec::new();
    export(&again.processes()[0], &mut twice, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    assert!(bytes == twice, "exporting what was exported changes nothing");
}

/// A memtrace recording that is exported and read back has the same blocks, stacks, nodes and verdicts.
#[test]
fn an_exported_snapshot_reads_back() {
    let recorded = crate::training::run(3, true);
    let process = &recorded.processes()[0];
    let mut bytes = Vec::new();
    export(process, &mut bytes, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    let folder = Folder::new();
    let run = folder.open("7.pickle.gz", &gzip(&bytes)).unwrap();
    let (ours, theirs) = (summary(&recorded), summary(&run));
    let [a, b] = [&ours, &theirs].map(|s| &s.processes[0].devices[0]);
    assert_eq!(a.highest, b.highest);
    let by_category = |d: &memtrace_analysis::report::DeviceSummary| {
        d.peak.as_ref().unwrap().by_category.iter().map(|c| (c.category, c.bytes)).collect::<Vec<_>>()
    };
    assert_eq!(by_category(a), by_category(b));
    assert_eq!(a.oom_count, b.oom_count);
    let rows = |d: &memtrace_analysis::report::DeviceSummary| {
        let rows = d.before_first_step.iter().chain(&d.first_step).chain(&d.later_steps);
        rows.map(|r| (r.phase, r.allocations, r.allocated_bytes, r.freed_bytes, r.peak_bytes)).collect::<Vec<_>>()
    };
    assert_eq!(rows(a), rows(b));
    let mut twice = Vec::new();
    export(&run.processes()[0], &mut twice, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    assert!(bytes == twice, "reading and writing changes nothing");
}

/// The events of a truncated snapshot, without those that its missing state would add.
fn recorded(process: &Process) -> Vec<(Action, u64, u64, u64)> {
    let events =
        events(process).into_iter().filter(|e| !e.flags.contains(Flags::PREEXISTING) && e.action != Action::Totals);
    events.map(|e| (e.action, e.addr, e.size, e.ticks)).collect()
}

#[test]
fn a_file_that_was_cut_gives_its_first_events() {
    let folder = Folder::new();
    let value = whole();
    for (name, bytes) in [
        ("a.pickle", pickle(&value, Pickler::Python(4))),
        ("b.pickle", pickle(&value, Pickler::Torch)),
        ("c.json", json(&value).into_bytes()),
        ("d.pickle.gz", gzip(&pickle(&value, Pickler::Python(2)))),
    ] {
        let complete = folder.open(name, &bytes).unwrap();
        let all = recorded(&complete.processes()[0]);
        let mut most = 0;
        for len in 0..bytes.len() {
            match folder.open(name, &bytes[..len]) {
                Ok(run) => {
                    let found = recorded(&run.processes()[0]);
                    // Only the first device's list is complete before the second begins.
                    assert!(found.iter().all(|e| all.contains(e)), "{name} cut at {len}: {found:?}");
                    let message = summary(&run).problems.join(" ");
                    let count = format!("{} events", found.len());
                    // Only white space can be missing from JSON, and only the last checksum from a gzip file.
                    let whole = message.contains("checksum is missing") && found.len() == all.len();
                    assert!(
                        whole || message.contains(&count) && message.contains("cut off"),
                        "{name} cut at {len}: {message}"
                    );
                    most = most.max(found.len());
                }
                Err(e) => {
                    assert!(
                        e.contains(name)
                            && (len == 1 || e.contains("cut off") || e.contains("empty") || e.contains("gzip")),
                        "{len}: {e}"
                    );
                }
            }
        }
        assert_eq!(most, all.len(), "{name}");
    }
}

/// Every third byte; `exhaustive` changes all of them.
#[test]
fn a_changed_byte_gives_a_partial_recording_or_an_error() {
    let (parts, refused) = change_bytes(3);
    assert!(parts > 150 && refused > 150, "{parts} read, {refused} refused");
}

/// Changes one byte in `step`, and counts the files that are read and those that are refused.
fn change_bytes(step: usize) -> (usize, usize) {
    let folder = Folder::new();
    let value = whole();
    let (mut parts, mut refused) = (0, 0);
    for (name, bytes) in [
        ("a.pickle", pickle(&value, Pickler::Python(4))),
        ("b.pickle", pickle(&value, Pickler::Odd)),
        ("c.json", json(&value).into_bytes()),
        ("d.pickle.gz", gzip(&pickle(&value, Pickler::Torch))),
    ] {
        for at in (0..bytes.len()).step_by(step) {
            let mut changed = bytes.clone();
            changed[at] ^= [0x01, 0x80, 0xff, 0x04][at % 4];
            match folder.open(name, &changed) {
                Ok(run) => {
                    let found = events(&run.processes()[0]);
                    assert!(found.len() <= 40, "{name} {at}");
                    summary(&run);
                    let mut out = Vec::new();
                    export(&run.processes()[0], &mut out, &SnapshotOptions::default(), &mut |_| {}).unwrap();
                    parts += 1;
                }
                Err(e) => {
                    assert!(e.len() > name.len() + 20, "{e}");
                    refused += 1;
                }
            }
        }
    }
    (parts, refused)
}

mod exhaustive {
    #[test]
    fn every_changed_byte_gives_a_partial_recording_or_an_error() {
        let (parts, refused) = super::change_bytes(1);
        assert!(parts > 500 && refused > 500, "{parts} read, {refused} refused");
    }
}

/// The error for another kind of file says what the file is, and what to do.
#[test]
fn errors_name_the_kind_of_other_files() {
    let folder = Folder::new();
    let global = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x0becho hacked\x94\x85\x94R\x94.";
    let old_torch_save = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
    let state_dict = pickle(&V::Dict(vec![("model", V::List(vec![])), ("epoch", V::Int(3))]), Pickler::Python(4));
    let cases: [(&str, &[u8], &str); 19] = [
        ("empty.pickle", b"", "is empty"),
        ("zip.pickle", b"PK\x03\x04and so on", "torch.save"),
        ("old.pickle", old_torch_save, "torch.save"),
        ("other.pkl", &state_dict, "it has the keys model, epoch;"),
        ("number.pkl", b"\x80\x04K\x07.", "a pickle, but not a memory snapshot"),
        ("profile.json", br#"{"schemaVersion": 1, "traceEvents": [{"ph": "X"}]}"#, "torch.profiler"),
        (
            "other.json",
            br#"{"a": 1}"#,
            "not a memory snapshot (it has the keys a; a snapshot has segments and device_traces)",
        ),
        ("array.json", b"[1, 2, 3]", "it is JSON, but not a memory snapshot"),
        ("summary.json", br#"{"run": {}, "processes": [], "losses": {}}"#, "memtrace summary"),
        ("run.json", br#"{"command": [], "processes": []}"#, "manifest of a memtrace run"),
        ("packed.pickle.zst", b"\x28\xb5\x2f\xfd123", "compressed with zstd"),
        ("page.html", b"<!DOCTYPE html>", "HTML page"),
        ("twice.pickle.gz", &gzip(&gzip(b"\x80\x04}.")), "gzipped twice"),
        ("broken.pickle.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff", "damaged"),
        ("text.pickle", b"hello", "neither a pickle nor JSON"),
        ("zero.pickle", b"(dp0\n.", "protocol 0 or 1"),
        ("evil.pickle", global, "call posix.system"),
        ("evil2.pickle", b"\x80\x02cos\nsystem\n.", "call os.system"),
        ("new.pickle", b"\x80\x09}.", "protocol 9"),
    ];
    for (name, bytes, expected) in cases {
        let message = folder.open(name, bytes).map(|_| ()).unwrap_err();
        assert!(message.contains(expected) && message.contains(name), "{name}: {message}");
    }
    assert!(open_run(Path::new("/nowhere/a.pickle")).unwrap_err().to_string().contains("No such file or directory"));
}

/// Pickles that no pickler writes.
#[test]
fn hostile_pickles_are_refused_or_harmless() {
    let folder = Folder::new();
    let head = b"\x80\x04";
    let with = |body: &[u8]| [head, body].concat();
    // Nested lists that share memos: 2^30 items if they were expanded.
    let mut laughs = with(b"]\x94");
    for level in 0..30u8 {
        laughs.extend([b']', 0x94, b'(', b'h', level, b'h', level, b'e']);
    }
    laughs.extend(b".");
    // The same list of events for each of many devices.
    let mut many = with(b"}\x8c\x0ddevice_traces]\x94(");
    many.extend(b"]\x94(");
    let one = pickle(&event("alloc", 512, 512, 1, &["f"]), Pickler::Python(4));
    many.extend(&one[11..one.len() - 1]);
    many.extend(b"e");
    let memo = 1u8;
    for _ in 0..1000 {
        many.extend([b'h', memo]);
    }
    many.extend(b"es.");
    let deep = [&with(b"")[..], &b"](".repeat(100_000), b"."].concat();
    let deep_json = b"[".repeat(100_000);
    let cases: [(&str, Vec<u8>, &str); 13] = [
        ("itself", with(b"]\x94(h\x00e."), "open container"),
        ("in itself", with(b"}\x94(\x8c\x01ah\x00u."), "open container"),
        ("after", with(b"]\x94h\x00K\x01a."), "open container"),
        ("no memo", with(b"h\x07."), "a memo is not defined"),
        ("far memo", with(b"]r\xff\xff\xff\xff."), "memo numbers are out of order"),
        ("nothing", with(b"."), "a value is missing"),
        ("append to a number", with(b"K\x01K\x02a."), "not an open container"),
        ("no mark", with(b"]K\x01e."), "a batch has no mark"),
        ("half a pair", with(b"}(K\x01u."), "a key has no value"),
        ("four exabytes", with(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fab"), "cut off"),
        ("no opcode", with(b"\xfe."), "not a pickle opcode"),
        ("outside", with(b"\x97."), "data outside the file"),
        ("deep.json", deep_json, "nested deeper"),
    ];
    for (name, bytes, expected) in cases {
        let message = folder.open(name, &bytes).map(|_| ()).unwrap_err();
        assert!(message.contains(expected), "{name}: {message}");
    }
    assert!(folder.open("laughs", &laughs).unwrap_err().contains("not a memory snapshot"));
    assert!(folder.open("deep", &deep).is_err());
    let run = folder.open("many", &many);
    let run = run.unwrap();
    assert_eq!(recorded(&run.processes()[0]).len(), 1);
    assert!(remarks(&summary(&run)).contains("1000 lists of events occur again"), "{}", remarks(&summary(&run)));
    // A small file that decompresses to 200 MiB of memo opcodes.
    let mut bomb = with(b"N");
    bomb.resize(200 << 20, 0x94);
    let message = folder.open("bomb.gz", &gzip(&bomb)).map(|_| ()).unwrap_err();
    assert!(message.contains("it needs more memory than "), "{message}");
}

/// PyTorch 2.0 and 2.1 have fewer keys, PyTorch 2.14 has more.
#[test]
fn old_and_new_keys_are_read() {
    let folder = Folder::new();
    let old_event = |action: &str, addr: i128, size: i128| {
        V::Dict(vec![
            ("action", action.into()),
            ("addr", V::Int(addr)),
            ("size", V::Int(size)),
            ("stream", V::Int(0)),
            ("frames", frames(&["main"])),
        ])
    };
    let history = V::List(vec![V::Dict(vec![
        ("addr", V::Int(BASE)),
        ("real_size", V::Int(700)),
        ("frames", frames(&["old", "main"])),
    ])]);
    let old_block = V::Dict(vec![("size", V::Int(1024)), ("state", "active_allocated".into()), ("history", history)]);
    let rest = V::Dict(vec![("size", V::Int(2 * MIB - 1024)), ("state", "inactive".into())]);
    let old_segment = V::Dict(vec![
        ("device", V::Int(0)),
        ("address", V::Int(BASE)),
        ("total_size", V::Int(2 * MIB)),
        ("stream", V::Int(0)),
        ("segment_type", "small".into()),
        ("blocks", V::List(vec![old_block, rest])),
    ]);
    let old = snapshot(
        vec![old_segment],
        vec![vec![
            old_event("alloc", BASE + 1024, 100),
            old_event("free_requested", BASE + 1024, 100),
            old_event("free_completed", BASE + 1024, 100),
        ]],
    );
    let run = folder.open("old.pickle", &pickle(&old, Pickler::Python(4))).unwrap();
    let summary_of_old = summary(&run);
    assert_eq!(summary_of_old.losses, Default::default());
    let device = &summary_of_old.processes[0].devices[0];
    assert_eq!((device.highest.allocated_bytes, device.highest.reserved_bytes), (1024 + 512, 2 << 20));
    assert_eq!(summary_of_old.run.started_ns, None);
    let message = remarks(&summary_of_old);
    assert!(
        message.contains("no timestamps") && message.contains("all 1 frees have the stack of their allocation"),
        "{message}"
    );
    let older = events(&run.processes()[0]).into_iter().find(|e| e.action == Action::Alloc).unwrap();
    assert_eq!((older.addr as i128, older.size, older.slack), (BASE, 700, 324));

    let mut new = whole();
    let V::Dict(pairs) = &mut new else { unreachable!() };
    pairs.push(("host_traces", V::List(vec![event("alloc", 4096, 10, 5, &[]), event("alloc", 8192, 10, 5, &[])])));
    pairs.push(("host_segments", V::List(vec![segment(-1, 4096, 8192, false, vec![])])));
    let annotation = |stage: &str, name: &str, device: i128, time: i128| {
        V::Dict(vec![
            ("stage", stage.into()),
            ("name", name.into()),
            ("device", V::Int(device)),
            ("time_us", V::Int(time)),
        ])
    };
    let ranges = [("START", "step", 1001), ("START", "inner", 1002), ("END", "inner", 1003), ("END", "step", 1004)];
    // Each range is recorded once, for the device that was current.
    let both =
        ranges.iter().zip([0, 1, 1, 0]).map(|((stage, name, time), device)| annotation(stage, name, device, *time));
    pairs.iter_mut().find(|(key, _)| *key == "external_annotations").unwrap().1 = V::List(both.collect());
    let V::List(traces) = &mut pairs.iter_mut().find(|(key, _)| *key == "device_traces").unwrap().1 else {
        unreachable!()
    };
    let V::List(trace) = &mut traces[0] else { unreachable!() };
    let mut named = event("annotate", BASE + 8 * MIB, 2 * MIB, 1006, &[]);
    let V::Dict(fields) = &mut named else { unreachable!() };
    fields.iter_mut().find(|(key, _)| *key == "user_metadata").unwrap().1 = "weights".into();
    trace.push(named);
    trace.push(event("teleport", BASE, 1, 1007, &[]));
    let run = folder.open("new.pickle", &pickle(&new, Pickler::Torch)).unwrap();
    let process = &run.processes()[0];
    let found = events(process);
    let labels: Vec<_> = found.iter().filter(|e| matches!(e.action, Action::RangeStart | Action::RangeEnd)).collect();
    let texts: Vec<_> =
        labels.iter().map(|e| (e.action, e.size, &*process.definitions().labels[&(e.addr as u32)].text)).collect();
    assert_eq!(
        texts,
        [
            (Action::RangeStart, 0, "step"),
            (Action::RangeStart, 0, "inner"),
            (Action::RangeEnd, 0, "inner"),
            (Action::RangeEnd, 0, "step")
        ]
    );
    // A range includes the events in the microseconds of its start and its end.
    let place = |action: Action, ticks: u64| found.iter().position(|e| e.action == action && e.ticks == ticks).unwrap();
    assert!(place(Action::RangeStart, 1_001_000) < place(Action::Alloc, 1_001_000));
    assert!(place(Action::RangeEnd, 1_004_000) > place(Action::FreeCompleted, 1_004_000));
    let names: Vec<_> = process.definitions().tensor_names.iter().map(|n| (n.address as i128, &*n.name)).collect();
    assert_eq!(names, [(BASE + 8 * MIB, "weights")]);
    let message = remarks(&summary(&run));
    assert!(message.contains("1 events have an unknown action: teleport"), "{message}");
    assert!(message.contains("1 segments and 2 events of pinned host memory"), "{message}");
}

/// A list of segments without events, as `torch.cuda.memory_snapshot()` returns it.
#[test]
fn a_list_of_segments_without_events_is_read() {
    let folder = Folder::new();
    let state = V::List(vec![segment(
        2,
        BASE,
        2 * MIB,
        false,
        vec![
            block(BASE, 1024, 1000, "active_allocated", &["f", "main"]),
            block(BASE + 1024, 2 * MIB - 1024, 0, "inactive", &[]),
        ],
    )]);
    for (name, bytes) in [("s.json", json(&state).into_bytes()), ("s.pickle", pickle(&state, Pickler::Python(4)))] {
        let run = folder.open(name, &bytes).unwrap();
        let summary = summary(&run);
        let device = &summary.processes[0].devices[0];
        assert_eq!((device.device, device.highest.allocated_bytes, device.highest.reserved_bytes), (2, 1024, 2 << 20));
        assert!(remarks(&summary).contains("no events"), "{}", remarks(&summary));
        assert_eq!(summary.processes[0].events, 0);
    }
}

/// A snapshot that PyTorch 2.11 wrote on an H200 with its default `stacks="all"`: three training steps with
/// checkpointing, reentrant in one of them, and an `autograd.Function`. Its C++ frames show what runs in the autograd
/// engine.
#[test]
fn cpp_frames_show_the_backward_pass_and_its_nodes() {
    let run = open_run(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/snapshots/native_stacks.pickle.gz"))
        .unwrap();
    let process = &run.processes()[0];
    let definitions = process.definitions();
    let mut tracker = PhaseTracker::of(process.recording());
    let mut nodes = BTreeSet::new();
    let (mut inside, mut outside) = (0, 0);
    for e in events(process) {
        let phase = match e.action {
            Action::Alloc | Action::FreeRequested | Action::Oom => tracker.observe(&e).phase,
            _ => continue,
        };
        let frames: Vec<&str> = definitions.walk(e.stack).filter_map(|(_, f)| f.map(|f| &*f.name)).collect();
        let recorder = ["torch::unwind", "CapturedTraceback", "gather_with_cpp"];
        assert!(!frames.iter().any(|name| recorder.iter().any(|part| name.contains(part))), "{frames:#?}");
        let node = definitions.context(e.context).map(|context| &*context.node);
        nodes.extend(node);
        if e.action == Action::Alloc {
            let in_engine = frames.iter().any(|name| name.contains("torch::autograd::Engine::evaluate_function"));
            // The gradient of the loss is made before the engine starts.
            let in_backward = in_engine || frames.contains(&"_make_grads");
            assert_eq!(
                matches!(phase, Phase::Backward | Phase::Recompute),
                in_backward,
                "{phase:?} {node:?} {frames:#?}"
            );
            *(if in_engine { &mut inside } else { &mut outside }) += 1;
        }
    }
    assert_eq!((inside, outside), (75, 80));
    let expected = [
        "AddmmBackward0",
        "ConvolutionBackward0",
        "CudnnBatchNormBackward0",
        "MeanBackward0",
        "PowBackward0",
        "ReluBackward0",
        "torch::autograd::PyNode",
    ];
    assert!(expected.iter().all(|name| nodes.contains(name)), "{nodes:?}");
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let device = &summary.processes[0].devices[0];
    let has = |step: &&StepSummary, phase| step.phases.iter().any(|row| row.phase == phase);
    assert_eq!(device.by_step.iter().filter(|step| has(step, Phase::Optimizer)).count(), 3);
    assert!(device.first_step.iter().any(|row| row.phase == Phase::Recompute && row.allocations > 0));
}
