//! Writes the initial inputs of the corpora in tests/fuzz: `cargo run -p memtrace-analysis --example fuzz_seeds`.
//! `tests/fuzz/seeds.py` makes the objects from the output of the C compiler.

use std::fs;
use std::path::Path;

use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::options::{Cpu, Limit, Options, Pools, Stacks};
use memtrace_trace::shm::handshake::Hello;

#[path = "../tests/small_trace/mod.rs"]
mod small_trace;

fn put(target: &str, name: &str, bytes: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus").join(target);
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join(name), bytes).expect("a file");
}

/// The frames of a trace in the format of the fuzz target `frames`.
fn frames(trace: &[u8]) -> Vec<u8> {
    let (mut out, mut at) = (Vec::new(), 16);
    while at < trace.len() {
        let word = |from: usize| u32::from_le_bytes(*trace[from..].first_chunk().expect("a header")) as usize;
        let (kind, stored, raw) = (trace[at + 4], word(at + 8), word(at + 12));
        let payload = &trace[at + 24..at + 24 + stored];
        let unpacked = |packed| zstd::bulk::decompress(packed, raw).expect("packed");
        let contents = match kind {
            1 => unpacked(payload),
            2 => [&payload[..32], &unpacked(&payload[32..])].concat(),
            _ => payload.to_vec(),
        };
        out.push(kind);
        out.extend_from_slice(&(contents.len() as u16).to_le_bytes());
        out.extend_from_slice(&contents);
        at += 24 + stored;
    }
    out
}

/// A shared-memory segment in the format of the fuzz target `ring`, with all slots in ring 1.
fn ring(slots: &[[u64; 8]]) -> Vec<u8> {
    let mut out = vec![2];
    for word in [1_000, 0, 0, slots.len() as u64, 0] {
        out.extend_from_slice(&u64::to_le_bytes(word));
    }
    let zeroes = vec![[0u64; 8]; slots.len()];
    for word in zeroes.iter().chain(slots).flatten() {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out
}

fn main() {
    for per_block in [4, 100] {
        let trace = small_trace::trace(per_block);
        put("trace", &format!("blocks-of-{per_block}"), &[&[1], &trace[..]].concat());
        put("frames", &format!("blocks-of-{per_block}"), &frames(&trace));
    }
    let events = small_trace::events();
    let mut slots: Vec<_> = events.iter().map(Event::to_slot).collect();
    put("ring", "events", &ring(&slots));
    slots.reverse();
    put("ring", "backwards", &ring(&slots));
    let definitions = small_trace::definitions();
    let mut slots = vec![[definitions.len() as u64, 0, 0, 0, 0, 0, 2, 0]];
    slots.extend(definitions.chunks(64).map(|chunk| {
        let mut bytes = [0; 64];
        bytes[..chunk.len()].copy_from_slice(chunk);
        std::array::from_fn(|i| u64::from_le_bytes(*bytes[i * 8..].first_chunk().expect("8 bytes")))
    }));
    put("ring", "definitions", &ring(&slots));
    let free = Event { seq: 5, addr: 64, source: Source::Torch, action: Action::FreeRequested, ..Event::EMPTY };
    let mut slot = free.to_slot();
    [slot[6], slot[7]] = Event::complete_free(&slot, 7, 9);
    put("ring", "at-once", &ring(&[slot]));

    put("session", "hello", &Hello::new(3).to_bytes());
    put("session", "definitions", &definitions);
    for (name, cpu, stacks, names) in [("a", Cpu::Auto, Stacks::Python, true), ("b", Cpu::Never, Stacks::Both, false)] {
        let options = Options {
            cpu,
            stacks,
            names,
            folder: (!names).then(|| "/tmp/run".into()),
            cycles: !names,
            holders: names,
            pools: if names { Pools::Read } else { Pools::Keep },
            device_usage: names,
            limit: Limit { bytes: if names { 24 << 30 } else { 0 }, others: vec![("00000000:1B:00.0".into(), 5)] },
            ..Options::new("0123456789abcdef".into())
        };
        put("session", name, options.encode().as_bytes());
    }
    let run = r#"{"memtrace":"0.1.0","command":["python","x.py"],"directory":"/tmp","host":"h","pid":7,
        "started_ns":1,"ended_ns":9,"exit":{"code":1},"processes":[{"pid":7,"ppid":1,"argv":["python"],
        "env":{"RANK":"1"},"exit":{"signal":9},"trace":"7.mtr"}],
        "losses":{"lost":3},"gpu":[{"name":"H200"}]}"#;
    put("manifest", "run", run.as_bytes());
    put("manifest", "with-info", &[run.as_bytes(), b"\0", small_trace::INFO.as_bytes()].concat());
    let symbols = r#"{"version":1,"objects":[{"path":"/nowhere/a.so","build_id":"0123",
        "symbols_from":"/nowhere/a.debug","notes":["cut off"],"strings":["_ZN1a1bEv","","a.cpp"],
        "places":{"10":[[0,2,7],[1,1,0]],"50":[]}},
        {"path":"/nowhere/b.so","strings":["main"],"places":{"20":[[0,9,4294967295]]}}]}"#;
    put("symbols", "two-objects", symbols.as_bytes());
    let names = [
        "_ZN2at6native3addERKNS_6TensorES3_RKN3c106ScalarE",
        "_ZNSt6vectorIN2at6TensorESaIS1_EE9push_backEOS1_.constprop.0",
        "_RNvCskwGfYPst2Cb_3foo16example_function",
        "_ZN4core3ptr42drop_in_place$LT$alloc..string..String$GT$17h0123456789abcdefE",
        "memcpy@@GLIBC_2.14",
        "__device_stub__Z6kernelIfEvPT_",
        "operator()(int, std::pair<a<b>, c>) const",
    ];
    for (index, name) in names.iter().enumerate() {
        put("names", &index.to_string(), name.as_bytes());
    }
    let lines: [&[u8]; 3] = [
        &[10, 0, 0, 0, 6, 0, 0, 0, 6, 1, 8, 254],
        &[10, 0, 0, 0, 4, 0, 0, 0, 4, 0, 2, 128, 6, 3, 2, 255],
        &[100, 0, 0, 0, 26, 0, 0, 0, 0x80, 0x12, 0xd9, 1, 2, 0xf8, 0xe8, 0x41, 1, 0xf7, 4, 0, 0, 0],
    ];
    for (index, table) in lines.iter().enumerate() {
        put("lines", &index.to_string(), table);
    }
}
