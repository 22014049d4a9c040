//! PyTorch snapshots: pickles and JSON, gzipped and not.

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use memtrace_input::load::SNAPSHOT_TOPIC;
use memtrace_input::{Error, Run};

use crate::measured::{Cost, allowed, measure, open_measured};

fn read(bytes: &[u8]) -> (Result<Run, Error>, Cost) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pickle");
    std::fs::write(&path, bytes).unwrap();
    open_measured(&path, bytes.len())
}

/// A gzip file of `start`, many copies of a mebibyte of `repeated`, and `end`.
fn gzipped(start: &[u8], repeated: &[u8], mebibytes: usize, end: &[u8]) -> Vec<u8> {
    let member = |bytes: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let block = repeated.repeat((1 << 20) / repeated.len());
    [member(start), member(&block).repeat(mebibytes), member(end)].concat()
}

/// The notices about what the snapshot omits and what is invalid.
fn notices(run: &Run) -> String {
    let notices = &run.processes()[0].definitions().notices;
    let texts = notices.iter().filter(|notice| &*notice.topic == SNAPSHOT_TOPIC).map(|notice| &*notice.text);
    texts.collect::<Vec<_>>().join("\n")
}

fn assert_too_large(run: Result<Run, Error>, what: &str) {
    let error = run.expect_err(what);
    assert!(error.to_string().contains("it needs more memory than "), "{what}: {error}");
    assert!(error.help().is_some_and(|help| help.contains("copy the file again")), "{what}: {error}");
}

/// Each opcode leaves something: a mark, a value, an open container, a memo, a text, a pair, a list.
#[test]
fn every_opcode_is_charged() {
    let cases: [(&str, &[u8]); 12] = [
        ("marks", b"("),
        ("values", b"N"),
        ("open dictionaries", b"}"),
        ("open lists", b"]"),
        ("open sets", b"\x8f"),
        ("memos", b"N\x94"),
        ("memos of a container", b"\x94"),
        ("marked containers", b"(}"),
        ("tuples", b"NNN\x87"),
        ("lists of texts", b"\x8c\x01a\x85"),
        ("duplicates", b"2"),
        ("dictionaries", b"}(\x8c\x01aNu"),
    ];
    for (what, opcodes) in cases {
        let file = gzipped(b"\x80\x04}\x94", opcodes, 48, b".");
        assert!(file.len() < 200_000, "{what}: {} bytes", file.len());
        assert_too_large(read(&file).0, what);
    }
}

/// Containers keep the memory of their lists for the next one.
#[test]
fn reused_containers_are_charged() {
    // Opens a container, fills it, and drops it, one level deeper each time.
    let mut opcodes = b"]](".to_vec();
    opcodes.extend(b"N".repeat(1000));
    opcodes.extend(b"e0");
    let file = gzipped(b"\x80\x04]", &opcodes, 40, b".");
    let (run, _) = read(&file);
    run.expect_err("no snapshot");
}

#[test]
fn json_is_charged() {
    let cases: [(&str, &[u8], &[u8]); 3] = [
        ("texts", b"{\"segments\":[", b"\"\","),
        ("lists", b"{\"segments\":[", b"[1],"),
        ("dictionaries", b"{\"segments\":[", b"{\"a\":1},"),
    ];
    for (what, start, repeated) in cases {
        let file = gzipped(start, repeated, 64, b"1]}");
        let (run, _) = read(&file);
        if let Err(error) = run {
            assert!(error.to_string().contains("it needs more memory than "), "{what}: {error}");
        }
    }
    let spaces = gzipped(b"{\"segments\":[", b" ", 4096, b"]}");
    let error = read(&spaces).0.expect_err("4 GiB of spaces").to_string();
    assert!(error.contains("it needs more work than the limit for "), "{error}");
    let deep = gzipped(b"", b"[", 64, b"");
    assert!(read(&deep).0.expect_err("no snapshot").to_string().contains("nested deeper"));
}

/// Writes pickles with memos.
#[derive(Default)]
struct Pickle {
    out: Vec<u8>,
    memos: u32,
}

impl Pickle {
    fn new() -> Pickle {
        Pickle { out: b"\x80\x04".to_vec(), memos: 0 }
    }

    fn raw(&mut self, bytes: &[u8]) -> &mut Pickle {
        self.out.extend_from_slice(bytes);
        self
    }

    /// Memoizes the topmost value, and returns its number.
    fn memoize(&mut self) -> u32 {
        self.out.push(0x94);
        self.memos += 1;
        self.memos - 1
    }

    fn get(&mut self, memo: u32) -> &mut Pickle {
        self.out.push(b'j');
        self.out.extend(memo.to_le_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Pickle {
        self.out.push(b'X');
        self.out.extend((text.len() as u32).to_le_bytes());
        self.out.extend(text.as_bytes());
        self
    }

    fn int(&mut self, n: u64) -> &mut Pickle {
        self.out.extend([0x8a, 9]);
        self.out.extend(n.to_le_bytes());
        self.out.push(0);
        self
    }

    /// Puts texts into the memo. They are pushed into a list that the caller drops.
    fn keys<const N: usize>(&mut self, texts: [&str; N]) -> [u32; N] {
        texts.map(|text| {
            self.text(text);
            let memo = self.memoize();
            self.raw(b"0");
            memo
        })
    }

    fn end(&mut self) -> Vec<u8> {
        self.out.push(b'.');
        std::mem::take(&mut self.out)
    }
}

const BASE: u64 = 0x7f00_0000_0000;

/// A snapshot whose only trace has `events` allocations with one more key and value each.
fn with_events(events: u64, key: &str, prepare: impl FnOnce(&mut Pickle) -> u32) -> Vec<u8> {
    let mut p = Pickle::new();
    let [action, alloc, addr, size, more, traces] = p.keys(["action", "alloc", "addr", "size", key, "device_traces"]);
    let value = prepare(&mut p);
    p.raw(b"}").get(traces).raw(b"](](");
    for n in 0..events {
        p.raw(b"}(").get(action).get(alloc).get(addr).int(BASE + 512 * n).get(size).int(512);
        p.get(more).get(value).raw(b"u");
    }
    p.raw(b"ees").end()
}

/// A list of texts that every event names is copied and hashed once.
#[test]
fn a_list_that_every_event_names_is_processed_once() {
    const EVENTS: u64 = 100_000;
    for lines in [10, 5000] {
        let file = with_events(EVENTS, "forward_frames", |p| {
            p.raw(b"](");
            for line in 0..lines {
                p.text(&format!("  File \"train.py\", line {line}, in step\n"));
            }
            p.raw(b"e");
            let list = p.memoize();
            p.raw(b"0");
            list
        });
        let (run, cost) = read(&file);
        let run = run.unwrap();
        assert_eq!(run.processes()[0].recording().event_count(), EVENTS);
        assert!(cost.total < 40 * file.len(), "{lines} lines, {} bytes: {cost:?}", file.len());
        let definitions = run.processes()[0].definitions();
        assert_eq!(definitions.walk(definitions.contexts[1].forward).count(), lines);
    }
}

/// One long text in every event, frame, range and autograd node.
#[test]
fn a_long_text_that_everything_names_is_charged() {
    let long = "x".repeat(64 << 10);
    let memo_of_long = |p: &mut Pickle| {
        p.text(&long);
        let memo = p.memoize();
        p.raw(b"0");
        memo
    };
    let names = with_events(20_000, "user_metadata", memo_of_long);
    assert_too_large(read(&names).0, "user_metadata");

    let mut p = Pickle::new();
    let [name, filename, line, traces] = p.keys(["name", "filename", "line", "device_traces"]);
    let text = memo_of_long(&mut p);
    p.raw(b"}").get(traces).raw(b"](](");
    for n in 0..20_000 {
        p.raw(b"}(").get(name).get(text).get(filename).get(text).get(line).int(n).raw(b"u");
    }
    assert_too_large(read(&p.raw(b"ees").end()).0, "frames");

    let mut p = Pickle::new();
    let [name, stage, start, time, list, traces] =
        p.keys(["name", "stage", "START", "time_us", "external_annotations", "device_traces"]);
    let text = memo_of_long(&mut p);
    p.raw(b"}(").get(traces).raw(b"]").get(list).raw(b"](");
    for n in 0..20_000 {
        p.raw(b"}(").get(name).get(text).get(stage).get(start).get(time).int(n).raw(b"u");
    }
    let file = p.raw(b"eu").end();
    let (run, cost) = read(&file);
    assert_eq!(run.unwrap().processes()[0].definitions().labels.len(), 1);
    assert!(cost.total < 40 * file.len(), "{} bytes: {cost:?}", file.len());
}

/// A file can name one line of a traceback any number of times.
#[test]
fn a_traceback_line_is_parsed_once() {
    let mut p = Pickle::new();
    let [action, alloc, addr, size, forward, traces] =
        p.keys(["action", "alloc", "addr", "size", "forward_frames", "device_traces"]);
    let line = format!("  File \"{}\", line 1, in f\n", "/x".repeat(30_000));
    let [line] = p.keys([&line]);
    p.raw(b"}").get(traces).raw(b"](](");
    p.raw(b"}(").get(action).get(alloc).get(addr).int(BASE).get(size).int(512).get(forward).raw(b"](");
    for _ in 0..200_000 {
        p.get(line);
    }
    let file = p.raw(b"euees").end();
    let (run, cost) = read(&file);
    let run = run.unwrap();
    let definitions = run.processes()[0].definitions();
    assert_eq!(definitions.walk(definitions.contexts[1].forward).count(), 200_000);
    assert!(cost.total < 64 * file.len(), "{} bytes: {cost:?}", file.len());
}

/// Lists and segments that occur again are counted, and their content is not.
#[test]
fn repeated_lists_are_processed_once() {
    const MANY: u32 = 30_000;
    let mut p = Pickle::new();
    let [device, address, total, blocks, state, size, inactive, segments] =
        p.keys(["device", "address", "total_size", "blocks", "state", "size", "inactive", "segments"]);
    p.raw(b"](");
    for n in 0..MANY {
        p.raw(b"}(").get(address).int(BASE + 512 * u64::from(n)).get(size).int(512).get(state).get(inactive).raw(b"u");
    }
    p.raw(b"e");
    let list = p.memoize();
    p.raw(b"0");
    p.raw(b"}(").get(device).int(0).get(address).int(BASE).get(total).int(1 << 30).get(blocks).get(list).raw(b"u");
    let segment = p.memoize();
    p.raw(b"0}").get(segments).raw(b"](");
    // The segment many times, and many segments with its list of blocks.
    for n in 0..MANY {
        p.get(segment);
        p.raw(b"}(").get(device).int(0).get(address).int(BASE + (u64::from(n) << 31)).get(total).int(1 << 20);
        p.get(blocks).get(list).raw(b"u");
    }
    let (run, _) = read(&p.raw(b"es").end());
    let text = notices(&run.unwrap());
    let expected = format!("{} segments and blocks are invalid", 2 * MANY - 1);
    assert!(text.contains(&expected), "{text}");

    // A list of events for every device, and lists of lists of host memory.
    let mut p = Pickle::new();
    let [action, alloc, addr, size, traces, host] =
        p.keys(["action", "alloc", "addr", "size", "device_traces", "host_segments"]);
    p.raw(b"](");
    for n in 0..MANY {
        // Between the events lie other values, so that each is a range of its own.
        p.raw(b"}(").get(action).get(alloc).get(addr).int(BASE + 512 * u64::from(n)).get(size).int(512).raw(b"uN");
    }
    p.raw(b"e");
    let list = p.memoize();
    p.raw(b"0](");
    for _ in 0..MANY {
        p.get(list);
    }
    p.raw(b"e");
    let lists = p.memoize();
    p.raw(b"0](");
    for _ in 0..MANY {
        p.get(lists);
    }
    p.raw(b"e");
    let lists_of_lists = p.memoize();
    p.raw(b"0}(").get(traces).get(lists).get(host).get(lists_of_lists);
    let (run, _) = read(&p.raw(b"u").end());
    let run = run.unwrap();
    assert_eq!(run.processes()[0].recording().event_count(), u64::from(MANY));
    let text = notices(&run);
    assert!(text.contains(&format!("{} lists of events occur again", MANY - 1)), "{text}");
}

/// Blocks that wait for their free are found without a search.
#[test]
fn pending_blocks_take_linear_time() {
    const MANY: u64 = 60_000;
    let mut p = Pickle::new();
    let [action, freed, addr, size, traces, segments] =
        p.keys(["action", "free_requested", "addr", "size", "device_traces", "segments"]);
    let [device, address, total, blocks, state, pending] =
        p.keys(["device", "address", "total_size", "blocks", "state", "active_pending_free"]);
    p.raw(b"}(").get(traces).raw(b"](](");
    for n in 0..MANY {
        p.raw(b"}(").get(action).get(freed).get(addr).int(BASE + 512 * n).get(size).int(500).raw(b"u");
    }
    p.raw(b"ee").get(segments).raw(b"](}(").get(device).int(0).get(address).int(BASE).get(total).int(1 << 30);
    p.get(blocks).raw(b"](");
    for n in 0..MANY {
        p.raw(b"}(").get(address).int(BASE + 512 * n).get(size).int(512).get(state).get(pending).raw(b"u");
    }
    let (run, _) = read(&p.raw(b"eueu").end());
    let text = notices(&run.unwrap());
    assert!(text.contains(&format!("{MANY} blocks ({} bytes)", MANY * 512)), "{text}");
}

/// Events that free what the recording does not have take more memory than their rows.
#[test]
fn derived_blocks_are_charged() {
    let mut p = Pickle::new();
    let [action, freed, addr, size, traces] = p.keys(["action", "free_completed", "addr", "size", "device_traces"]);
    p.raw(b"}").get(traces).raw(b"](](");
    p.raw(b"}(").get(action).get(freed).get(addr).int(BASE).get(size).int(512).raw(b"u");
    let event = p.memoize();
    let start = std::mem::take(&mut p.out);
    let mut again = Pickle::default();
    again.get(event);
    let file = gzipped(&start, &again.out, 16, b"ees.");
    assert!(file.len() < 100_000);
    assert_too_large(read(&file).0, "a free that is named many times");
}

#[test]
fn a_hole_is_not_a_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pickle");
    // A text of four tebibytes in a hole.
    let mut start = b"\x80\x04\x8d".to_vec();
    start.extend((4u64 << 40).to_le_bytes());
    std::fs::write(&path, &start).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5 << 40).unwrap();
    let (run, _) = open_measured(&path, start.len());
    let error = run.unwrap_err().to_string();
    assert!(error.contains("it needs more work than the limit for "), "{error}");
}

#[test]
fn real_snapshots_need_a_part_of_their_budget() {
    let golden = Path::new("../../tests/golden/snapshots");
    let path = golden.join("resnet_leak.pickle.gz");
    let size = std::fs::metadata(&path).unwrap().len() as usize;
    let (_, cost) = measure(|| memtrace_input::open_run(&path).unwrap());
    assert!(cost.peak < 128 * size && allowed(size) > cost.peak, "{cost:?}");
}
