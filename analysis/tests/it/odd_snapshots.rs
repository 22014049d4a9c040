//! Unusual snapshots, as made by other programs, editors or damaged disks. Each is read as far as possible, and the
//! report counts what could not be used. Files that are not snapshots: `snapshots.rs`.

use crate::snapshot_files::*;
use memtrace_analysis::{Run, open_run, summarize};

const MIB: i128 = 1 << 20;
const BASE: i128 = 0x7f00_0000_0000;

/// A valid snapshot: 8 MiB are allocated and freed, 2 MiB stay.
fn sound() -> V {
    let trace = vec![
        event("segment_alloc", BASE, 20 * MIB, 1000, &["f", "main"]),
        event("alloc", BASE, 8 * MIB, 1001, &["f", "main"]),
        event("alloc", BASE + 8 * MIB, 2 * MIB, 1002, &["g", "main"]),
        event("free_requested", BASE, 8 * MIB, 1003, &["g", "main"]),
        event("free_completed", BASE, 8 * MIB, 1004, &["g", "main"]),
    ];
    let blocks = vec![
        block(BASE, 8 * MIB, 0, "inactive", &[]),
        block(BASE + 8 * MIB, 2 * MIB, 2 * MIB, "active_allocated", &["g", "main"]),
        block(BASE + 10 * MIB, 10 * MIB, 0, "inactive", &[]),
    ];
    snapshot(vec![segment(0, BASE, 20 * MIB, false, blocks)], vec![trace])
}

/// The value at a path such as `device_traces.0.1.size`.
fn at<'v>(value: &'v mut V, path: &str) -> &'v mut V {
    path.split('.').fold(value, |value, step| match value {
        V::List(items) => &mut items[step.parse::<usize>().unwrap()],
        V::Dict(pairs) => &mut pairs.iter_mut().find(|(key, _)| *key == step).unwrap().1,
        other => panic!("{step} of {other:?}"),
    })
}

/// The valid snapshot with the value at `path` replaced.
fn with(path: &str, new: V) -> V {
    let mut value = sound();
    *at(&mut value, path) = new;
    value
}

/// The valid snapshot without a key.
fn without(path: &str, key: &str) -> V {
    let mut value = sound();
    let place = if path.is_empty() { &mut value } else { at(&mut value, path) };
    let V::Dict(pairs) = place else { panic!("{path} has no keys") };
    let before = pairs.len();
    pairs.retain(|(k, _)| *k != key);
    assert!(pairs.len() < before);
    value
}

/// The valid snapshot with one more item in a list.
fn and(path: &str, place: usize, new: V) -> V {
    let mut value = sound();
    let V::List(items) = at(&mut value, path) else { panic!("{path} is no list") };
    items.insert(place, new);
    value
}

/// The results that a run reports: events, peak and messages (problems, losses, remarks).
fn results(run: &Run) -> (u64, u64, String) {
    let summary = summarize(run, &mut |_| {}).unwrap();
    let process = &summary.processes[0];
    let mut words = summary.problems.clone();
    words.extend(summary.losses.iter().map(|(what, count)| format!("{what}: {count}")));
    words.extend(process.notices.iter().filter(|n| n.topic == "snapshot").map(|n| n.text.clone()));
    let peak = process.devices.iter().map(|d| d.highest.allocated_bytes).max().unwrap_or(0);
    (process.events, peak >> 20, words.join("\n"))
}

fn int(n: i128) -> V {
    V::Int(n)
}

/// `context="state"` records stacks of the blocks that are in use at the end, and none with the events.
#[test]
fn blocks_of_the_state_have_the_stacks_that_events_lack() {
    let mut value = sound();
    let V::List(events) = at(&mut value, "device_traces.0") else { panic!("no events") };
    for event in events {
        let V::Dict(pairs) = event else { panic!("no event") };
        pairs.retain(|(key, _)| *key != "frames");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.pickle");
    std::fs::write(&path, pickle(&value, Pickler::Torch)).unwrap();
    let run = open_run(&path).unwrap();
    let remark = "1 of 2 allocations have no stack: only blocks in use at the end have one (context=\"state\"; \
                  \"alloc\" records all)";
    assert!(results(&run).2.starts_with(remark));
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let end = serde_json::to_string(&summary.processes[0].devices[0].end).unwrap();
    assert!(end.contains("g.py") || end.contains("\"name\":\"g\""), "{end}");
}

/// For each case: the number of events, the peak in MiB, and the remark. Each case is read as a pickle and as JSON.
#[test]
fn odd_values() {
    const NONE: &str = "";
    const EVENTS: &str = "1 events are invalid: no action, no address or an impossible size";
    const SEGMENTS: &str = "1 segments and blocks are invalid: no address or an impossible size";
    const TIME: &str = "1 events have an impossible time";
    let other_block = || block(BASE + 8 * MIB, 100 * MIB, 100 * MIB, "active_allocated", &["g"]);
    let long = "x".repeat(1 << 20);
    let deep: Vec<&str> = vec!["f"; 3000];
    let cases: Vec<(&str, V, u64, u64, &str)> = vec![
        ("sound", sound(), 5, 10, NONE),
        // The whole snapshot.
        ("segments are a dictionary", with("segments", V::Dict(vec![])), 5, 10, SEGMENTS),
        ("segments are none", with("segments", V::None), 5, 10, SEGMENTS),
        ("no segments", without("", "segments"), 5, 10, "the snapshot contains no segments"),
        ("segments are empty", with("segments", V::List(vec![])), 5, 10, "totals_mismatched: 1"),
        ("no events", without("", "device_traces"), 0, 2, "the snapshot contains no events"),
        ("events are none", with("device_traces", V::None), 0, 2, EVENTS),
        ("events are a dictionary", with("device_traces", V::Dict(vec![("0", int(1))])), 0, 2, EVENTS),
        ("a device's events are a number", with("device_traces.0", int(5)), 0, 2, EVENTS),
        ("no settings", with("allocator_settings", V::None), 5, 10, NONE),
        ("settings are a number", with("allocator_settings", int(1)), 5, 10, NONE),
        ("ranges are numbers", with("external_annotations", V::List(vec![int(1), V::None])), 5, 10, NONE),
        // Events.
        ("an event is none", and("device_traces.0", 1, V::None), 5, 10, EVENTS),
        ("an event is a list", and("device_traces.0", 1, V::List(vec![int(1), int(2), int(3)])), 5, 10, EVENTS),
        ("an event is a text", and("device_traces.0", 5, "alloc".into()), 5, 10, EVENTS),
        ("an event is empty", and("device_traces.0", 0, V::Dict(vec![("size", int(1))])), 5, 10, EVENTS),
        ("no action", without("device_traces.0.4", "action"), 4, 10, EVENTS),
        ("the action is a number", with("device_traces.0.4.action", int(3)), 4, 10, EVENTS),
        (
            "the action is unknown",
            with("device_traces.0.4.action", "teleport".into()),
            4,
            10,
            "1 events have an unknown action: teleport",
        ),
        ("no address", without("device_traces.0.4", "addr"), 4, 10, EVENTS),
        ("the address is none", with("device_traces.0.4.addr", V::None), 4, 10, EVENTS),
        ("the address is beyond all", with("device_traces.0.4.addr", int((1 << 64) - 1)), 4, 10, EVENTS),
        ("no size", without("device_traces.0.1", "size"), 4, 8, EVENTS),
        ("the size is a text", with("device_traces.0.1.size", "8388608".into()), 4, 8, EVENTS),
        ("the size is negative", with("device_traces.0.1.size", int(-5)), 4, 8, EVENTS),
        ("the size is 2 to the 70", with("device_traces.0.1.size", int(1 << 70)), 4, 8, EVENTS),
        ("the size is a float", with("device_traces.0.1.size", V::Float(8388608.0)), 5, 10, NONE),
        ("the size is none", with("device_traces.0.1.size", V::None), 4, 8, EVENTS),
        // Times.
        ("time goes back", with("device_traces.0.3.time_us", int(5)), 5, 10, NONE),
        ("time is negative", with("device_traces.0.0.time_us", int(-100)), 5, 10, TIME),
        ("time is far", with("device_traces.0.4.time_us", int(1 << 63)), 5, 10, TIME),
        ("time is a text", with("device_traces.0.4.time_us", "now".into()), 5, 10, TIME),
        // Stacks.
        ("no frames", without("device_traces.0.1", "frames"), 5, 10, "1 of 2 allocations have no stack"),
        ("frames are none", with("device_traces.0.1.frames", V::None), 5, 10, "1 of 2 allocations have no stack"),
        (
            "frames are numbers",
            with("device_traces.0.1.frames", V::List(vec![int(1)])),
            5,
            10,
            "1 of 2 allocations have no stack",
        ),
        ("a frame has no line", without("device_traces.0.1.frames.0", "line"), 5, 10, NONE),
        ("a line is negative", with("device_traces.0.1.frames.0.line", int(-1)), 5, 10, NONE),
        ("a line is far", with("device_traces.0.1.frames.0.line", int(1 << 40)), 5, 10, NONE),
        (
            "a name is a megabyte",
            with("device_traces.0.1.frames.0.name", long.as_str().into()),
            5,
            10,
            "1 texts of more than 64 KiB are cut",
        ),
        ("a name has escapes", with("device_traces.0.1.frames.0.name", "f\x1b[31m\r\n\0".into()), 5, 10, NONE),
        ("a stack is deep", with("device_traces.0.1.frames", frames(&deep)), 5, 10, NONE),
        // The state.
        ("a segment is none", and("segments", 0, V::None), 5, 10, SEGMENTS),
        ("a segment has no address", without("segments.0", "address"), 5, 10, SEGMENTS),
        ("a segment wraps", with("segments.0.address", int((1 << 64) - MIB)), 5, 10, SEGMENTS),
        ("a segment is of device 70000", with("segments.0.device", int(70_000)), 5, 10, SEGMENTS),
        ("a segment has no blocks", without("segments.0", "blocks"), 5, 10, "totals_mismatched: 1"),
        ("blocks are none", with("segments.0.blocks", V::None), 5, 10, SEGMENTS),
        ("a block is none", and("segments.0.blocks", 0, V::None), 5, 10, SEGMENTS),
        ("a block is negative", with("segments.0.blocks.0.size", int(-MIB)), 5, 10, SEGMENTS),
        ("a block is too long", with("segments.0.blocks.1", other_block()), 5, 10, "totals_mismatched: 1"),
        ("a block sleeps", with("segments.0.blocks.1.state", "sleeping".into()), 5, 10, "totals_mismatched: 1"),
        ("a pool is a text", with("segments.0.segment_pool_id", "x".into()), 5, 10, NONE),
        // The sequence of events.
        (
            "a free of nothing",
            and("device_traces.0", 0, event("free_completed", 4096, 512, 999, &["f"])),
            6,
            10,
            "1 blocks (512 bytes) and 0 segments are older",
        ),
        ("an allocation twice", and("device_traces.0", 2, event("alloc", BASE, 8 * MIB, 1001, &["f"])), 6, 10, ": 1"),
    ];
    assert!(cases.len() >= 50, "{}", cases.len());
    let folder = tempfile::tempdir().unwrap();
    let silent = {
        let path = folder.path().join("sound.json");
        std::fs::write(&path, json(&sound())).unwrap();
        results(&open_run(&path).unwrap()).2
    };
    for (number, (name, value, events, peak, expected)) in cases.iter().enumerate() {
        for (ending, bytes) in [("pickle", pickle(value, Pickler::Python(4))), ("json", json(value).into_bytes())] {
            let path = folder.path().join(format!("{number}.{ending}"));
            std::fs::write(&path, bytes).unwrap();
            let run = open_run(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
            let (found, most, words) = results(&run);
            assert_eq!((found, most), (*events, *peak), "{name}, {ending}: {words}");
            assert!(words.contains(expected), "{name}, {ending}: {words}");
            assert!(!expected.is_empty() || words == silent, "{name}, {ending}: {words}");
        }
    }
}

/// The bytes around a snapshot.
#[test]
fn odd_bytes() {
    let bytes = pickle(&sound(), Pickler::Python(4));
    let text = json(&sound());
    let mut checksum = gzip(&bytes);
    let end = checksum.len() - 8;
    checksum[end] ^= 0xff;
    let mut class = bytes[..bytes.len() - 2].to_vec();
    class.extend(b"\x8c\x05extra\x8c\x08builtins\x8c\x07complex\x93G\0\0\0\0\0\0\0\0\x85Rsu.");
    let utf16: Vec<u8> = [0xff, 0xfe].into_iter().chain(text.encode_utf16().flat_map(u16::to_le_bytes)).collect();
    let cases: Vec<(&str, Vec<u8>, Result<&str, &str>)> = vec![
        ("two members.gz", [gzip(&bytes[..100]), gzip(&bytes[100..])].concat(), Ok("")),
        ("behind.gz", [gzip(&bytes), b"xxxx".to_vec()].concat(), Ok("checksum is missing or does not match")),
        ("checksum.gz", checksum, Ok("checksum is missing or does not match")),
        ("behind.pickle", [&bytes[..], b"garbage"].concat(), Ok("7 bytes after the end of the snapshot are not read")),
        ("twice.json", [text.as_bytes(), b"\n{}"].concat(), Ok("2 bytes after the end of the snapshot are not read")),
        ("spaces.json", [text.as_bytes(), b"\r\n\n"].concat(), Ok("")),
        ("mark.json", [b"\xef\xbb\xbf", text.as_bytes()].concat(), Ok("")),
        ("lines.json", text.replace(", ", ",\r\n\t").into_bytes(), Ok("")),
        (
            "comma.json",
            text.replace("\"external_annotations\": []", "\"external_annotations\": [],").into_bytes(),
            Ok(""),
        ),
        ("nan.json", text.replacen('{', "{\"a\": NaN, \"b\": -Infinity, \"c\": 1e400,", 1).into_bytes(), Ok("")),
        ("class.pickle", class, Ok("loading it would call builtins.complex (at byte ")),
        ("utf16.json", utf16, Err("UTF-16 text")),
        ("a.pickle.bz2", b"BZh91AY&SY".to_vec(), Err("compressed with bzip2")),
        ("python.json", b"{'segments': []}".to_vec(), Err("not valid JSON at byte 2: expected a key")),
        ("comment.json", [b"// mine\n", text.as_bytes()].concat(), Err("neither a pickle nor JSON")),
        ("wrapped.json", format!("{{\"snapshot\": {text}}}").into_bytes(), Err("it has the keys snapshot;")),
        ("listed.json", format!("[{text}]").into_bytes(), Err("not a memory snapshot")),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, expected) in cases {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        match (open_run(&path), expected) {
            (Ok(run), Ok(expected)) => {
                let (events, peak, words) = results(&run);
                assert_eq!((events, peak), (5, 10), "{name}: {words}");
                assert!(words.contains(expected), "{name}: {words}");
            }
            (Err(e), Err(expected)) => {
                let e = e.to_string();
                assert!(e.contains(name) && e.contains(expected), "{name}: {e}");
            }
            (Ok(run), Err(_)) => panic!("{name} was read: {:?}", results(&run)),
            (Err(e), Ok(_)) => panic!("{name}: {e}"),
        }
    }
}

/// PyTorch 2.0: each block has a history, which contains the block's data.
#[test]
fn blocks_with_histories() {
    let with_history = |addr: i128, size: i128, name: &str| {
        let history = V::Dict(vec![("addr", int(addr)), ("real_size", int(size - 100)), ("frames", frames(&[name]))]);
        V::Dict(vec![("size", int(size)), ("state", "active_allocated".into()), ("history", V::List(vec![history]))])
    };
    let blocks = vec![
        with_history(BASE, MIB, "a"),
        with_history(BASE + MIB, MIB, "b"),
        with_history(BASE + 2 * MIB, 2 * MIB, "c"),
    ];
    let value = snapshot(vec![segment(0, BASE, 4 * MIB, false, blocks)], vec![]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.pickle");
    std::fs::write(&path, pickle(&value, Pickler::Python(4))).unwrap();
    let run = open_run(&path).unwrap();
    let summary = summarize(&run, &mut |_| {}).unwrap();
    assert_eq!(summary.losses, Default::default());
    let device = &summary.processes[0].devices[0];
    assert_eq!(device.highest.allocated_bytes as i128, 4 * MIB);
    let lines: Vec<_> =
        device.peak.as_ref().unwrap().largest_allocations.iter().map(|t| t.stack.location.as_str()).collect();
    assert_eq!(lines, ["train.py:1 c", "train.py:1 a", "train.py:1 b"]);
}
