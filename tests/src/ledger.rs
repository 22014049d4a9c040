//! The simulated CUDA's ledger as the oracle of every driver and runtime call.

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_trace::api::{Api, Memory};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Reader;
use serde_json::Value;

use crate::victim::events;

/// A call as both sides have it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Call {
    /// The exported symbol.
    pub api: String,
    /// Address or handle; 0 where the call failed to obtain one.
    pub addr: u64,
    /// Bytes; 0 for releases, whose size the caller does not say.
    pub size: u64,
    /// The device of the memory.
    pub device: Option<i64>,
    /// Stream-ordered calls: the stream, as the program gave it.
    pub stream: u64,
    /// The result code.
    pub result: i64,
    /// Whether a runtime call made it.
    pub nested: bool,
}

/// Calls by thread: within a thread the order is certain on both sides.
pub type Calls = BTreeMap<u32, Vec<Call>>;

/// The ledger of one process.
#[track_caller]
pub fn read(path: &Path) -> Calls {
    let mut processes = read_all(path);
    assert!(processes.len() <= 1, "one process: {:?}", processes.keys());
    processes.pop_first().unwrap_or_default().1
}

/// The ledgers of several processes in one file, by process id. A line that a killed process did not finish is left out.
pub fn read_all(path: &Path) -> BTreeMap<u32, Calls> {
    let text = std::fs::read_to_string(path).expect("the ledger");
    let mut processes: BTreeMap<u32, Calls> = BTreeMap::new();
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        // Behind the beginning of a line that a killed process left, another process's line follows at once. Lines are flat objects.
        let whole = &line[line.rfind('{').unwrap_or(0)..];
        let entry: Value = serde_json::from_str(whole).expect("a line of the ledger");
        let number = |key: &str| entry[key].as_u64().unwrap_or(0);
        let name = entry["api"].as_str().expect("an api").to_owned();
        let Some(api) = Api::ALL.iter().find(|a| a.symbol() == Some(&name)) else { continue };
        let result = entry["result"].as_i64().unwrap_or(0);
        let addr = if number("addr") != 0 { number("addr") } else { number("handle") };
        let frees = api.frees();
        if frees && addr == 0 {
            continue; // cudaFree(NULL): no memory is concerned
        }
        if addr == 0 && result == 0 {
            continue; // cudaMalloc(0)
        }
        let calls = processes.entry(number("pid") as u32).or_default();
        let failed = result != 0 && !frees;
        // The ledger has the null stream of a function of the per-thread default stream as 2.
        let stream = match number("stream") {
            2 if api.symbol().is_some_and(|s| s.ends_with("_ptsz")) => 0,
            stream => stream,
        };
        let sized = !frees || api.memory() == Some(Memory::Address);
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

/// Our driver and runtime events, in the ledger's form, of a trace that must be whole.
#[track_caller]
pub fn ours(reader: &Reader) -> Calls {
    calls_of(reader, &events(reader))
}

/// Driver and runtime events of a trace, in the ledger's form.
pub fn calls_of(reader: &Reader, events: &[Event]) -> Calls {
    let mut failed: BTreeMap<u64, i64> = BTreeMap::new();
    for e in events {
        if e.action == Action::Retract {
            failed.insert(e.addr, e.result.into());
        }
    }
    let mut calls = Calls::new();
    for e in events {
        // What a pool says of itself is no call.
        let told = matches!(e.action, Action::Retract | Action::Totals);
        if matches!(e.source, Source::Driver | Source::Runtime) && !told {
            let tid = reader.definitions().thread(e.thread).expect("a thread").tid;
            let result = failed.get(&e.seq).copied().unwrap_or(e.result.into());
            calls.entry(tid).or_default().push(call(e, result));
        }
    }
    calls
}

/// Whether the function concerns memory of a device that both sides name: the runtime's lines about a pool or a free have the
/// current device, wherever the memory is; an array is known by a handle that does not tell.
fn is_on_device(api: Api) -> bool {
    match api.memory() {
        None | Some(Memory::Host | Memory::Registered) => false,
        Some(Memory::Address) => matches!(api, Api::cuMemMap | Api::cuMemUnmap),
        Some(Memory::Array) => !api.frees(),
        Some(Memory::Pool) => api.source() == Some(Source::Driver),
        Some(_) => !api.frees() || api.source() == Some(Source::Driver),
    }
}

fn call(e: &Event, result: i64) -> Call {
    Call {
        api: e.api.symbol().expect("a known function").to_owned(),
        addr: e.addr,
        size: e.size,
        device: Some(e.device.into()).filter(|_| result == 0 && is_on_device(e.api)),
        stream: if e.api.memory() == Some(Memory::Pool) { e.stream } else { 0 },
        result,
        nested: e.flags.contains(Flags::NESTED),
    }
}

/// Compares them call by call, and says at which thread and place they differ.
#[track_caller]
pub fn assert_equal(ours: &Calls, ledger: &Calls) {
    for (tid, theirs) in ledger {
        let ours = ours.get(tid).map(Vec::as_slice).unwrap_or_default();
        let theirs = outer_first(theirs);
        for (index, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            // The ledger does not tell what some failed calls wanted: a size that comes from a pitch or a format.
            let told = b.result == 0 || b.size != 0;
            let a = if told { a } else { &Call { size: 0, ..a.clone() } };
            assert_eq!(a, b, "call {index} of thread {tid} (left: ours, right: the ledger's)");
        }
        assert_eq!(ours.len(), theirs.len(), "calls of thread {tid}");
    }
    for tid in ours.keys() {
        assert!(ledger.contains_key(tid), "thread {tid} is not in the ledger");
    }
}

/// Compares them for a process that was killed in the middle of calls: each thread may have one call in the ledger that it
/// could not record any more, or have recorded a release (its own and the nested one) that it could not make any more.
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

/// Compares them for a trace whose end is missing: what is there is the beginning.
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

/// The ledger's calls in our order: a nested release comes before its runtime call there and after it in ours, since we record
/// a release before it is made.
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
