//! Checks of programs that compile their graphs, and of programs with several processes.
//!
//! The latter are ranks of a job on two GPUs, and processes that pass memory to each other.

use std::path::Path;
use std::process::{Command, Stdio};

use memtrace_tests::distributed::{self, Ranks, Start, two_ranks};
use memtrace_tests::ledger::pid;
use memtrace_tests::oracle::{Oracle, assert_equal};
use memtrace_tests::traced_program::{Run, TracedProgram, python};
use memtrace_trace::file::Reader;
use serde_json::{Value, json};

use crate::{Check, by_module_of, notices};

/// The checks that need one GPU.
pub(crate) fn on_one() -> Vec<(&'static str, Check)> {
    vec![
        ("torch.compile: eager", Box::new(|| compiled("eager"))),
        ("torch.compile: aot_eager", Box::new(|| compiled("aot_eager"))),
        ("torch.compile: inductor", Box::new(inductor)),
        ("CUDA IPC: by handle", Box::new(|| shared("", 26 << 20))),
        ("CUDA IPC: expandable segments", Box::new(|| shared("expandable_segments:True", 42 << 20))),
    ]
}

/// The checks that need two GPUs.
pub(crate) fn on_two() -> Vec<(&'static str, Check)> {
    vec![
        ("ranks: DDP and FSDP2 by torchrun", Box::new(|| ranks(Start::Torchrun, &["ddp", "fsdp"]))),
        ("ranks: DDP and FSDP2 by spawn", Box::new(|| ranks(Start::Spawn, &["ddp", "fsdp"]))),
        ("ranks: DDP compiled by aot_eager", Box::new(|| ranks(Start::Torchrun, &["ddp", "--compile", "aot_eager"]))),
        ("ranks: DDP compiled by inductor", Box::new(compiled_ranks)),
        ("ranks: one runs out of memory", Box::new(out_of_memory)),
        ("CUDA IPC: by handle", Box::new(|| shared("", 26 << 20))),
        ("CUDA IPC: expandable segments", Box::new(|| shared("expandable_segments:True", 42 << 20))),
    ]
}

/// The reason why inductor cannot compile here; `None` where it can.
fn without_inductor() -> Option<&'static str> {
    let runs = |program: &str, arguments: &[&str]| {
        let quiet = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
        quiet.is_ok_and(|status| status.success())
    };
    if !runs(python(), &["-c", "import triton"]) {
        Some("there is no triton")
    } else if !["cc", "gcc", "clang"].iter().any(|compiler| runs(compiler, &["--version"])) {
        Some("there is no C compiler, which triton needs")
    } else {
        None
    }
}

fn summary(run: &Run) -> Value {
    let text = std::fs::read_to_string(run.path().join("summary.json")).expect("summary.json");
    serde_json::from_str(&text).expect("JSON")
}

/// The number of events in PyTorch's recorder.
fn count(oracle: &Oracle) -> usize {
    oracle.entries().values().map(Vec::len).sum()
}

fn trace_of(run: &Run, process: u64) -> Reader {
    run.traces().into_iter().find(|t| u64::from(pid(t)) == process).expect("the process's trace")
}

/// Runs the program of `tests/programs/compile`. The compilers' own processes may have traces too.
fn compiled(backend: &str) -> Value {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let cache = tempfile::tempdir().expect("a temporary folder");
    let run = TracedProgram::python("compile/train.py", &[backend])
        .env("MEMTRACE_TEST_ORACLE", file.path())
        .env("TORCHINDUCTOR_CACHE_DIR", cache.path())
        .env("TRITON_CACHE_DIR", cache.path().join("triton"))
        .run();
    run.assert_ended_well();
    let oracle = Oracle::read(file.path());
    let trace = trace_of(&run, run.manifest()["pid"].as_u64().expect("a pid"));
    assert_equal(&trace, &oracle);
    let entries = oracle.entries();
    let mut compiled = entries.values().flatten().flat_map(|e| &e.frames).filter(|(name, file, _)| {
        name.starts_with("torch_dynamo_resume") || file.starts_with(&*cache.path().to_string_lossy())
    });
    assert!(compiled.next().is_some(), "no event under compiled code");
    json!({ "events_equal": count(&oracle), "traces": run.traces().len(), "notices": notices(&run) })
}

fn inductor() -> Value {
    without_inductor().map_or_else(|| compiled("inductor"), |reason| json!({ "not_available": reason }))
}

fn compiled_ranks() -> Value {
    let compile = || ranks(Start::Torchrun, &["ddp", "--compile", "inductor"]);
    without_inductor().map_or_else(compile, |reason| json!({ "not_available": reason }))
}

/// Each rank's allocations and exit status.
fn reported(ranks: &Ranks) -> Value {
    let each = ranks.ranks.iter().map(|(rank, (entry, trace, oracle))| {
        let modules = by_module_of(std::slice::from_ref(trace));
        let equal = oracle.as_ref().map(count);
        (rank.to_string(), json!({ "events_equal": equal, "by_module": modules, "exit": entry["exit"] }))
    });
    Value::Object(each.collect())
}

fn ranks(start: Start, arguments: &[&str]) -> Value {
    let ranks = distributed::compare(two_ranks(start, arguments));
    for (rank, (entry, trace, _)) in &ranks.ranks {
        assert_eq!((&entry["rank"], &entry["world_size"]), (&json!(rank), &json!(2)), "{entry}");
        assert!(ranks.run.path().join(format!("rank{rank}.pickle")).exists(), "a snapshot named by the rank");
        let modules = by_module_of(std::slice::from_ref(trace));
        let nccl: u64 = modules.iter().filter(|(m, _)| m.contains("libnccl")).map(|(_, bytes)| *bytes).sum();
        assert!(nccl > 0, "NCCL's own memory of rank {rank} is seen: {modules:?}");
    }
    reported(&ranks)
}

fn out_of_memory() -> Value {
    let ranks = distributed::run(two_ranks(Start::Torchrun, &["ddp", "--oom", "1"]));
    assert_eq!(ranks.run.output.status.code(), Some(1));
    let summary = summary(&ranks.run);
    let outcome = summary["run"]["outcome"].as_str().expect("an outcome");
    assert!(outcome.starts_with("ended by an out-of-memory error in rank 1"), "{outcome}");
    let processes = summary["processes"].as_array().expect("processes").iter();
    let fatal = processes
        .flat_map(|p| p["devices"].as_array().into_iter().flatten())
        .flat_map(|d| d["ooms"].as_array().into_iter().flatten().map(|oom| oom["fatal"].clone()).collect::<Vec<_>>());
    // Before Linux 6.15 another process can read how a child ended only until its parent waits for it.
    json!({ "outcome": outcome, "fatal": fatal.collect::<Vec<_>>(), "ranks": reported(&ranks) })
}

/// Passes tensors to another process and requires that no byte is counted twice.
fn shared(settings: &str, imported: u64) -> Value {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let prefix = folder.path().join("oracle");
    let mut traced = TracedProgram::python("ipc/tensors.py", &[]).env("MEMTRACE_TEST_ORACLE", &prefix);
    if !settings.is_empty() {
        traced = traced.env("PYTORCH_CUDA_ALLOC_CONF", settings);
    }
    let run = traced.run();
    run.assert_ended_well();
    let summary = summary(&run);
    let stdout = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let side = |role: &str| side(&run, &summary, &stdout, role, folder.path());
    let (sender, receiver) = (side("sender"), side("receiver"));
    assert_eq!((&sender["imported"], &receiver["imported"]), (&json!(0), &json!(imported)));
    json!({ "sender": sender, "receiver": receiver, "losses": summary["losses"] })
}

/// Checks one of the two processes: its events equal PyTorch's, and its allocator's memory equals PyTorch's reserved
/// bytes.
fn side(run: &Run, summary: &Value, stdout: &str, role: &str, folder: &Path) -> Value {
    let process: u64 = stdout.lines().find_map(|l| l.strip_prefix(role)?.trim().parse().ok()).expect("a pid");
    let oracle = Oracle::read(&folder.join(format!("oracle.{role}")));
    assert_equal(&trace_of(run, process), &oracle);
    let mut processes = summary["processes"].as_array().expect("processes").iter();
    let device = &processes.find(|p| p["pid"] == process).expect("the process")["devices"][0];
    let peak = |key: &str, of: &dyn Fn(&Value) -> bool| -> u64 {
        let owners = device[key].as_array().expect("owners").iter().filter(|o| of(o));
        owners.map(|o| o["peak_bytes"].as_u64().expect("bytes")).sum()
    };
    let held = peak("owners", &|o| o["object"].is_null());
    let reserved = oracle.snapshot["statistics"][0]["reserved_bytes.all.peak"].as_u64().unwrap_or(0);
    assert_eq!(held, reserved, "{role}: what the allocator holds, and what PyTorch reserved");
    json!({ "events_equal": count(&oracle), "reserved": reserved, "imported": peak("imported", &|_| true) })
}
