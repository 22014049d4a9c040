//! The simulated CUDA's ledger as the oracle of every driver and runtime call.

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_trace::api::{Api, MemoryKind};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Reader;
use serde_json::Value;

use crate::traced_program::events;

/// A call in the format that the trace and the ledger share.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Call {
    /// The exported symbol.
    pub api: String,
    /// Address or handle; 0 where the call failed to obtain one.
    pub addr: u64,
    /// Size in bytes; 0 for releases, because their caller does not pass a size.
    pub size: u64,
    /// The device of the memory; `None` where one of the two sides does not know it.
    pub device: Option<i64>,
    /// For stream-ordered calls: the stream handle that the program passed.
    pub stream: u64,
    /// The result code.
    pub result: i64,
    /// Whether a runtime call made this call.
    pub nested: bool,
}

/// Calls by thread id. Only within a thread do both sides have a defined order.
pub type Calls = BTreeMap<u32, Vec<Call>>;

/// The ledger of one process. Panics when the file holds several processes.
#[track_caller]
pub fn read(path: &Path) -> Calls {
    let mut processes = read_all(path);
    assert!(processes.len() <= 1, "one process: {:?}", processes.keys());
    processes.pop_first().unwrap_or_default().1
}

/// The ledgers of several processes in one file, by process id. Skips a line that a killed process did not finish.
pub fn read_all(path: &Path) -> BTreeMap<u32, Calls> {
    let text = std::fs::read_to_string(path).expect("the ledger");
    let mut processes: BTreeMap<u32, Calls> = BTreeMap::new();
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        // Another process's line may directly follow an unfinished one. Lines are flat JSON objects, so the last `{`
        // starts it.
        let whole = &line[line.rfind('{').unwrap_or(0)..];
        let entry: Value = serde_json::from_str(whole).expect("a line of the ledger");
        let number = |key: &str| entry[key].as_u64().unwrap_or(0);
        let name = entry["api"].as_str().expect("an api").to_owned();
        let Some(api) = Api::ALL.iter().find(|a| a.symbol() == Some(&name)) else { continue };
        if api.exports() {
            continue; // The driver's layer of the ledger has no such calls.
        }
        let result = entry["result"].as_i64().unwrap_or(0);
        let addr = if number("addr") != 0 { number("addr") } else { number("handle") };
        let frees = api.frees();
        if frees && addr == 0 {
            continue; // cudaFree(NULL) frees no memory.
        }
        if addr == 0 && result == 0 {
            continue; // cudaMalloc(0)
        }
        let calls = processes.entry(number("pid") as u32).or_default();
        let failed = result != 0 && !frees;
        // For per-thread default stream functions the ledger writes the null stream as 2.
        let stream = match number("stream") {
            2 if api.symbol().is_some_and(|s| s.ends_with("_ptsz")) => 0,
            stream => stream,
        };
        let sized = !frees || api.memory_kind() == Some(MemoryKind::Address);
        calls.entry(number("tid") as u32).or_default().push(Call {
            api: name,
            addr: if failed { 0 } else { addr },
            size: if sized { number("size") } else { 0 },
            device: entry["device"].as_i64().filter(|_| result == 0 && is_on_device(*api)),
            stream,
            result,
            nested: entry["nested"].as_bool().unwrap_or(false),
        });
    }
    processes
}

/// The process id of a trace.
pub fn pid(reader: &Reader) -> u32 {
    let info: Value = serde_json::from_str(reader.info()).expect("the trace's info");
    info["pid"].as_u64().expect("a process id") as u32
}

/// The driver and runtime calls of a trace in the ledger's format. Panics when the trace is damaged or incomplete.
#[track_caller]
pub fn ours(reader: &Reader) -> Calls {
    calls_of(reader, &events(reader))
}

/// The driver and runtime calls among these events of a trace, in the ledger's format.
pub fn calls_of(reader: &Reader, events: &[Event]) -> Calls {
    let mut failed: BTreeMap<u64, i64> = BTreeMap::new();
    for e in events {
        if e.action == Action::Retract {
            failed.insert(e.addr, e.result.into());
        }
    }
    let mut calls = Calls::new();
    for e in events {
        // Reports of a memory pool about itself and readings of a device are not calls. The ledger has no calls about
        // graphs.
        let is_report = matches!(e.action, Action::Retract | Action::Totals | Action::DeviceUsage | Action::Graph);
        if matches!(e.source, Source::Driver | Source::Runtime) && !is_report && !e.api.exports() {
            let tid = reader.definitions().thread(e.thread).expect("a thread").tid;
            let result = failed.get(&e.seq).copied().unwrap_or(e.result.into());
            calls.entry(tid).or_default().push(call(e, result));
        }
    }
    calls
}

/// Whether both sides know the device of the memory. For pools and frees, the runtime's ledger lines have the current
/// device instead of the memory's device. An array is known by a handle, which has no device.
fn is_on_device(api: Api) -> bool {
    match api.memory_kind() {
        None | Some(MemoryKind::Host | MemoryKind::Registered | MemoryKind::Driver) => false,
        Some(MemoryKind::Address) => matches!(api, Api::cuMemMap | Api::cuMemUnmap),
        Some(MemoryKind::Array) => !api.frees(),
        Some(MemoryKind::Pool) => api.source() == Some(Source::Driver),
        Some(_) => !api.frees() || api.source() == Some(Source::Driver),
    }
}

fn call(e: &Event, result: i64) -> Call {
    Call {
        api: e.api.symbol().expect("a known function").to_owned(),
        addr: e.addr,
        size: e.size,
        device: Some(e.device.into()).filter(|_| result == 0 && is_on_device(e.api)),
        stream: if e.api.memory_kind() == Some(MemoryKind::Pool) { e.stream } else { 0 },
        result,
        nested: e.flags.contains(Flags::NESTED),
    }
}

/// Compares all calls. Panics with the thread and the index of the first difference.
#[track_caller]
pub fn assert_equal(ours: &Calls, ledger: &Calls) {
    for (tid, theirs) in ledger {
        let ours = ours.get(tid).map(Vec::as_slice).unwrap_or_default();
        let theirs = outer_first(theirs);
        for (index, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            // The ledger lacks the requested size of some failed calls: it would result from a pitch or a format.
            let has_size = b.result == 0 || b.size != 0;
            let a = if has_size { a } else { &Call { size: 0, ..a.clone() } };
            assert_eq!(a, b, "call {index} of thread {tid} (left: ours, right: the ledger's)");
        }
        assert_eq!(ours.len(), theirs.len(), "calls of thread {tid}");
    }
    for tid in ours.keys() {
        assert!(ledger.contains_key(tid), "thread {tid} is not in the ledger");
    }
}

/// Compares the calls of a process that was killed. In each thread one of two differences is allowed. The ledger's last
/// call may be missing in the trace. Or the trace may have a release, with its nested one, that the process did not
/// make any more.
#[track_caller]
pub fn assert_whole_when_killed(ours: &Calls, ledger: &Calls) {
    for (tid, theirs) in ledger {
        let cut = theirs.last().is_some_and(|last| last.nested && frees(last));
        let theirs = outer_first(&theirs[..theirs.len() - usize::from(cut)]);
        let ours = ours.get(tid).map(Vec::as_slice).unwrap_or_default();
        for (index, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            assert_eq!(a, b, "call {index} of thread {tid} (left: ours, right: the ledger's)");
        }
        let (more, less) = (ours.len().saturating_sub(theirs.len()), theirs.len().saturating_sub(ours.len()));
        assert!(less <= 1, "thread {tid}: {less} calls of {} are missing", theirs.len());
        let tail = &ours[ours.len() - more..];
        assert!(
            more <= 2 && tail.iter().all(frees),
            "thread {tid}: too many calls: {tail:?} after {:?}",
            theirs.last()
        );
    }
    for (tid, calls) in ours {
        assert!(ledger.contains_key(tid) || calls.len() <= 2, "thread {tid} is not in the ledger");
    }
}

/// Requires that each thread's recorded calls are a prefix of its ledger: the end of the trace may be missing.
#[track_caller]
pub fn assert_beginning(ours: &Calls, ledger: &Calls) {
    for (tid, ours) in ours {
        let theirs = outer_first(&ledger[tid]);
        for (index, a) in ours.iter().enumerate() {
            assert_eq!(Some(a), theirs.get(index), "call {index} of thread {tid} (left: ours, right: the ledger's)");
        }
    }
}

fn frees(call: &Call) -> bool {
    Api::ALL.iter().any(|a| a.symbol() == Some(&call.api) && a.frees())
}

/// The ledger's calls in the trace's order. The ledger has a nested release before its runtime call. The trace has it
/// after, because memtrace records a release before making the call.
fn outer_first(calls: &[Call]) -> Vec<Call> {
    let mut calls = calls.to_vec();
    for index in 1..calls.len() {
        let (inner, outer) = (&calls[index - 1], &calls[index]);
        if inner.nested && !outer.nested && inner.addr == outer.addr && frees(inner) && frees(outer) {
            calls.swap(index - 1, index);
        }
    }
    calls
}
