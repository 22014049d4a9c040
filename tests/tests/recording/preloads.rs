//! Libraries that replace or limit GPU memory, preloaded before and after memtrace: the program must not notice, and
//! each byte counts once.

use std::path::Path;

use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::snapshots::summary;
use memtrace_tests::traced_program::{Run, TracedProgram, events, packages};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
/// The limit of `limiter.c`, and what a context takes here, in bytes.
const LIMIT: u64 = 256 * MIB;
const CONTEXT: u64 = 527 * MIB;
const FIRST: &str = r#"export LD_PRELOAD="$0${LD_PRELOAD:+:$LD_PRELOAD}""#;
const LAST: &str = r#"export LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}$0""#;
/// The folder of the CUDA libraries that PyTorch loads, for libraries that are loaded before it.
const CUDA_LIBRARIES: &str = "export LD_LIBRARY_PATH=\"$(python -c 'import sysconfig; \
    print(sysconfig.get_paths()[\"purelib\"])')/nvidia/cu13/lib\"";

/// A program of `tests/programs/allocators` with `library` preloaded. `order` is [`FIRST`] or [`LAST`].
fn preloaded(order: &str, library: &Path, program: &str, arguments: &[&str]) -> TracedProgram {
    let python = TracedProgram::python(&format!("allocators/{program}"), arguments);
    let script = format!(r#"{CUDA_LIBRARIES}; {order}; exec "$@""#);
    python.through(&["sh".as_ref(), "-c".as_ref(), script.as_ref(), library.as_os_str()])
}

/// Runs the program with and without memtrace, and compares what it prints.
#[track_caller]
fn unnoticed(traced: &TracedProgram) -> Run {
    let alone = traced.run_alone();
    let run = traced.run();
    run.assert_ended_well();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(alone.status.success(), "without memtrace: {}", text(&alone.stderr));
    assert_eq!(text(&run.output.stdout), text(&alone.stdout));
    run
}

fn owners(run: &Run) -> Vec<(String, u64, u64)> {
    let device = summary(run)["devices"][0].take();
    let number = |owner: &Value, key: &str| owner[key].as_u64().unwrap_or(0);
    let of = |owner: &Value| {
        (owner["owner"].as_str().unwrap_or("").to_owned(), number(owner, "peak_bytes"), number(owner, "end_bytes"))
    };
    device["owners"].as_array().expect("owners").iter().map(of).collect()
}

#[test]
fn paused_memory_is_freed_device_memory_behind_unchanged_tensors() {
    let folder = packages(&["torch_memory_saver==0.0.10"]);
    let library = Path::new(&folder).join("torch_memory_saver_hook_mode_preload_cu13.abi3.so");
    let program = |order| preloaded(order, &library, "memory_saver.py", &["preload"]).env("PYTHONPATH", &folder);
    let in_torch = TracedProgram::python("allocators/memory_saver.py", &["torch"]).env("PYTHONPATH", &folder);
    for (traced, mode) in [(program(FIRST), "preload"), (program(LAST), "preload"), (in_torch, "torch")] {
        let run = unnoticed(&traced);
        let found = summary(&run);
        assert_eq!(found["losses"], json!({}), "{mode}");
        let device = &found["devices"][0];
        let by = format!("torch_memory_saver_hook_mode_{mode}_cu13.abi3.so");
        let expected = json!({
            "peak_bytes": 300 * MIB, "end_bytes": 200 * MIB, "times": 2, "unmapped_by": [by],
        });
        assert_eq!(device["unmapped_segments"], expected, "{mode}");
        // The segments of 300 MiB, and one of 2 MiB. The cache is paused at the end.
        assert_eq!(owners(&run), [("PyTorch's caching allocator".to_owned(), 302 * MIB, 102 * MIB)], "{mode}");
        let pinned = found["pinned_host_memory"].as_array().expect("owners");
        let backup = pinned.iter().find(|owner| owner["owner"] == by.as_str()).expect("the backup of the weights");
        assert_eq!(backup["peak_bytes"], 100 * MIB, "{mode}");
        let text = std::fs::read_to_string(run.path().join("summary.txt")).expect("summary.txt");
        assert!(text.contains("Paused") && !text.contains("outside PyTorch up to"), "{text}");
    }
}

#[test]
fn a_library_that_limits_memory_limits_it_in_any_order() {
    let programs = ProgramFolder::new();
    let library = programs.library("hostile/limiter.c", "limiter.so", &["-fvisibility=default"]);
    for settings in ["expandable_segments:False", "expandable_segments:True"] {
        for order in [FIRST, LAST] {
            let traced = preloaded(order, &library, "limited.py", &[])
                .env("LIMITER", &library)
                .env("SIMCUDA_CONTEXT", CONTEXT.to_string())
                .env("PYTORCH_CUDA_ALLOC_CONF", settings);
            let run = unnoticed(&traced);
            let printed = String::from_utf8_lossy(&run.output.stdout).into_owned();
            // Expandable segments grow by 20 MiB at a time.
            let failed = if settings.ends_with("True") { "failed after 7" } else { "failed after 8" };
            assert!(printed.contains(&format!("total 268435456\n{failed}\n")), "{settings}: {printed}");
            let [(owner, peak, _)] = &owners(&run)[..] else { panic!("{settings}: {:?}", owners(&run)) };
            assert_eq!(owner, "PyTorch's caching allocator", "{settings}");
            let is_full = if settings.ends_with("True") { 7 * 32 * MIB..=256 * MIB } else { 256 * MIB..=256 * MIB };
            assert!(is_full.contains(peak), "{settings}: {peak}");
            assert_eq!(summary(&run)["losses"], json!({}), "{settings}");
            let device = &summary(&run)["devices"][0];
            assert_eq!(device["oom_count"], 1, "{settings}");
            // The whole device without the context and what the limit leaves. The limiter does not count the context.
            let oom = &device["ooms"][0];
            let total = device["total_bytes"].as_u64().expect("the device's memory");
            let held_back = total - CONTEXT - LIMIT;
            assert_eq!(oom["held_back_bytes"], held_back, "{settings}: {oom}");
            assert_eq!(oom["contexts_and_other_processes_bytes"], CONTEXT, "{settings}: {oom}");
            let text = std::fs::read_to_string(run.path().join("summary.txt")).expect("summary.txt");
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.contains("free within a limit") && text.contains("a library (such as HAMi-core)"), "{text}");
        }
    }
}

/// The calls of the driver in a ledger, by name and with their results, as the injected library writes them.
fn driver_calls(ledger: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(ledger).expect("the ledger");
    let mut calls: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    calls.retain(|call| call["layer"] == "driver");
    calls.sort_by_key(|call| call["seq"].as_u64());
    calls.iter().map(|call| format!("{} {}", call["api"].as_str().expect("a name"), call["result"])).collect()
}

#[test]
fn beside_an_injected_library_that_traces_calls_both_see_every_call() {
    let programs = ProgramFolder::new();
    let library = programs.library("hostile/injection.c", "injection.so", &["-fvisibility=hidden"]);
    let (log, ledger) = (programs.path("injection.log"), programs.path("ledger.jsonl"));
    for settings in ["expandable_segments:False", "expandable_segments:True"] {
        let program = |is_injected: bool| {
            let script = format!(r#"{CUDA_LIBRARIES}; exec "$@""#);
            let python =
                TracedProgram::python("device_memory/parts.py", &[]).through(&["sh", "-c", script.as_str(), "sh"]);
            let python = python.env("PYTORCH_CUDA_ALLOC_CONF", settings).env("SIMCUDA_LEDGER", &ledger);
            match is_injected {
                true => python.env("CUDA_INJECTION64_PATH", &library).env("INJECTION_LOG", &log),
                false => python,
            }
        };
        // The calls that the injected library wrote and the ledger has, which are removed.
        let seen = || {
            let text = std::fs::read_to_string(&log).expect("the log of the injected library");
            let calls: Vec<String> =
                text.lines().map(|line| line.rsplit_once(' ').expect("a call").0.to_owned()).collect();
            assert_eq!(calls, driver_calls(&ledger), "{settings}");
            [&log, &ledger].into_iter().for_each(|file| std::fs::remove_file(file).expect("a file"));
            (calls, text)
        };
        let alone = program(true).run_alone();
        assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
        let (calls, text_alone) = seen();
        let is_called = |name: &str| calls.contains(&format!("{name} 0"));
        let allocation = if settings.ends_with("True") { "cuMemCreate" } else { "cuMemAlloc_v2" };
        assert!(is_called(allocation) && is_called("cuMemHostAlloc"), "{settings}: {calls:?}");

        let injected = program(true).run();
        injected.assert_ended_well();
        assert_eq!(injected.output.stdout, alone.stdout, "{settings}");
        let (_, text) = seen();
        assert_eq!(text, text_alone, "{settings}: the calls, and the memory in use after each");

        let plain = program(false).run();
        plain.assert_ended_well();
        std::fs::remove_file(&ledger).expect("the ledger");
        let recorded = |run: &Run| -> Vec<_> {
            let events = events(&run.trace());
            events.iter().map(|e| (e.source, e.action, e.api, e.size, e.device, e.flags)).collect()
        };
        assert_eq!(recorded(&injected), recorded(&plain), "{settings}");
        assert_eq!(owners(&injected), owners(&plain), "{settings}");
        assert_eq!(summary(&injected)["losses"], json!({}), "{settings}");
    }
}
