//! The test suite that needs a real GPU; `scripts/gpu-check` runs it. It is one binary, so that it can be copied to a
//! machine without Rust, together with the library of `tests/unwindcheck`.
//!
//! Each check compares with something independent: PyTorch's recorder, the frameworks' own statistics, or the driver's
//! memory information. The last lines print the compared values as JSON, and the number of checks that passed.

mod processes;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use memtrace_tests::json_schema;
use memtrace_tests::oracle::compare;
use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::snapshots::{assert_peaks, json, pickle, record, summary, vizcheck};
use memtrace_tests::suggestions::{Changed, measure};
use memtrace_tests::traced_program::{Run, TracedProgram, events, memtrace, root};
use memtrace_tests::unwind_check::UnwindCheck;
use memtrace_trace::api::MemoryKind;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Flags, Source};
use memtrace_trace::file::Reader;
use serde_json::{Value, json};

/// A check: panics when it fails, else returns the values that it compared.
type Check = Box<dyn Fn() -> Value>;

/// Bytes of device memory obtained from the driver and not released, by calling library: each library's own peak.
fn by_module(run: &Run) -> BTreeMap<String, u64> {
    by_module_of(&run.traces())
}

/// Like [`by_module`], for some traces.
fn by_module_of(traces: &[Reader]) -> BTreeMap<String, u64> {
    let mut held: BTreeMap<(String, u64), u64> = BTreeMap::new();
    let mut most: BTreeMap<String, u64> = BTreeMap::new();
    let mut now: BTreeMap<String, i64> = BTreeMap::new();
    for trace in traces {
        for e in events(trace) {
            if e.source != Source::Driver || e.result != 0 {
                continue;
            }
            let physical = matches!(
                e.api.memory_kind(),
                Some(MemoryKind::Device | MemoryKind::Pool | MemoryKind::Managed | MemoryKind::Physical)
            );
            if !physical {
                continue;
            }
            let module = trace.definitions().module(e.module).unwrap_or("?");
            let module = module.rsplit('/').next().unwrap_or(module).to_owned();
            // `IN_ALLOCATOR` marks calls inside PyTorch's allocator. They belong to it, whichever library made them.
            let owner = if e.flags.contains(Flags::IN_ALLOCATOR) { "PyTorch's allocator".to_owned() } else { module };
            match e.action {
                Action::Alloc => {
                    held.insert((owner.clone(), e.addr), e.size);
                    *now.entry(owner.clone()).or_default() += e.size as i64;
                    let total = now[&owner].max(0) as u64;
                    let peak = most.entry(owner).or_default();
                    *peak = (*peak).max(total);
                }
                Action::FreeCompleted => {
                    let key = held.keys().find(|(_, addr)| *addr == e.addr).cloned();
                    if let Some(key) = key {
                        let size = held.remove(&key).unwrap_or(0);
                        *now.entry(key.0).or_default() -= size as i64;
                    }
                }
                _ => {}
            }
        }
    }
    most
}

/// The last line of stdout that is JSON, or null.
fn printed(run: &Run) -> Value {
    let text = String::from_utf8_lossy(&run.output.stdout).into_owned();
    text.lines().rev().find_map(|l| serde_json::from_str(l).ok()).unwrap_or(Value::Null)
}

fn notices(run: &Run) -> Value {
    let traces = run.traces();
    let texts = traces.iter().flat_map(|t| t.definitions().notices.iter().map(|n| format!("{}: {}", n.topic, n.text)));
    Value::Array(texts.map(Value::String).collect())
}

fn recorder(program: &str, args: &[&str], env: &[(&str, &str)]) -> Value {
    let traced = env.iter().fold(TracedProgram::python(program, args), |v, (name, value)| v.env(name, value));
    let (run, oracle) = compare(traced);
    let count: usize = oracle.entries().values().map(Vec::len).sum();
    let trace = run.trace();
    let bytes = std::fs::metadata(trace.path()).map(|m| m.len()).unwrap_or(0);
    let devices: Vec<String> = trace
        .definitions()
        .devices
        .values()
        .map(|d| format!("{} {} bytes, {} in use before, {}", d.name, d.total, d.used_before, d.pci))
        .collect();
    json!({
        "events_equal": count,
        "events_recorded": trace.event_count(),
        "trace_bytes_per_event": bytes as f64 / trace.event_count().max(1) as f64,
        "printed": String::from_utf8_lossy(&run.output.stdout).trim(),
        "devices": devices,
        "notices": notices(&run),
    })
}

fn hidden() -> Value {
    let run = TracedProgram::python("gpu/hidden.py", &[]).run();
    run.assert_ended_well();
    let modules = by_module(&run);
    let seen = |part: &str| modules.iter().filter(|(m, _)| m.contains(part)).map(|(_, b)| *b).sum::<u64>();
    let output = printed(&run);
    assert!(seen("libnccl") > 0, "NCCL's own memory is seen: {modules:?}");
    assert!(seen("PyTorch") >= output["reserved"].as_u64().unwrap_or(u64::MAX), "{modules:?} {output}");
    let recorded: u64 = modules.values().sum();
    let used = output["used"].as_u64().unwrap_or(0);
    assert!(recorded <= used, "recorded {recorded} is part of what the driver says is in use, {used}");
    json!({ "by_module": modules, "printed": output, "not_allocations": used - recorded })
}

fn jax() -> Value {
    let run = TracedProgram::python("gpu/jax_program.py", &[]).run();
    run.assert_ended_well();
    let (modules, smi) = (by_module(&run), printed(&run));
    let recorded: u64 = modules.values().sum();
    let in_use = smi["stats"]["peak_bytes_in_use"].as_u64().unwrap_or(0);
    assert!(recorded >= in_use && in_use > 0, "recorded {recorded}, JAX says {in_use} at its peak");
    json!({ "by_module": modules, "printed": smi })
}

fn cupy() -> Value {
    let run = TracedProgram::python("gpu/cupy_program.py", &[]).run();
    run.assert_ended_well();
    let (modules, smi) = (by_module(&run), printed(&run));
    let recorded: u64 = modules.values().sum();
    let pool = smi["pool"].as_u64().unwrap_or(u64::MAX);
    assert!(recorded >= pool, "recorded {recorded}, CuPy's pool holds {pool}");
    json!({ "by_module": modules, "printed": smi })
}

/// The pools that the report has, beside what the libraries print.
fn pool(program: &str, options: &[&str], library: &str) -> (Value, Value, Value) {
    let run = options.iter().fold(TracedProgram::python(program, &[]), |traced, option| traced.option(option)).run();
    run.assert_ended_well();
    let summary = json(&run.path().join("summary.json"));
    let pools = summary["processes"][0]["devices"][0]["pools"].as_array().cloned().unwrap_or_default();
    let pool = pools.into_iter().find(|pool| pool["library"] == library);
    (pool.unwrap_or_else(|| panic!("no pool of {library}")), printed(&run), summary["xla"].clone())
}

fn jax_pool() -> Value {
    let (read, printed, xla) = pool("gpu/jax_program.py", &["--pools", "read", "--xla-dump"], "JAX");
    assert_eq!(read["used_peak_bytes"], printed["stats"]["peak_bytes_in_use"], "{read} {printed}");
    assert_eq!(read["taken_peak_bytes"], printed["stats"]["peak_pool_bytes"], "{read} {printed}");
    assert_eq!((&read["allocation"], read.get("preallocated_bytes")), (&json!("on_demand"), None));
    let programs = xla["programs"].as_array().cloned().unwrap_or_default();
    assert!(programs.iter().any(|program| program["is_for_gpu"] == true), "{xla}");
    assert!(programs.iter().all(|program| program["is_total_confirmed"] == true), "{xla}");
    assert_eq!((&xla["unknown_lines"], &xla["mismatched_programs"]), (&json!(0), &json!(0)));
    let (off, printed, _) = pool("gpu/jax_program.py", &["--pools", "off"], "JAX");
    assert_eq!(off["allocation"], "each_buffer");
    assert_eq!(off["taken_peak_bytes"], printed["stats"]["peak_bytes_in_use"], "{off} {printed}");
    json!({ "read": read, "off": off, "printed": printed, "programs": programs.len() })
}

fn cupy_pool() -> Value {
    let (read, printed, _) = pool("gpu/cupy_program.py", &["--pools", "read"], "CuPy");
    assert_eq!((&read["used_end_bytes"], &read["pool_end_bytes"]), (&printed["used"], &printed["pool"]), "{read}");
    assert_eq!(read["allocation"], "on_demand");
    let (off, printed, _) = pool("gpu/cupy_program.py", &["--pools", "off"], "CuPy");
    assert_eq!(off["allocation"], "each_buffer");
    json!({ "read": read, "off": off, "printed": printed })
}

/// Records native stacks, and compares memtrace's stacks with those of libgcc's unwinder while the program runs.
fn native(program: &str, args: &[&str], stacks: &str) -> Value {
    let check = UnwindCheck::new();
    let run = check.preloaded(TracedProgram::python(program, args)).option("--stacks").option(stacks).run();
    run.assert_ended_well();
    let equal = check.equal_stacks();
    assert!(equal.distinct > 100, "too few stacks were compared: {equal:?}");
    let cut: u64 = run.traces().iter().map(|trace| trace.counter(Counter::StacksTruncated)).sum();
    json!({ "equal": equal.compared, "distinct": equal.distinct, "threads": equal.threads, "cut": cut })
}

/// The environment variable with the options of PyTorch's allocator.
const CONF: &str = "PYTORCH_CUDA_ALLOC_CONF";

/// A program of `tests/programs/allocators`, with the oracle module on its path.
fn allocator(name: &str, arguments: &[&str], settings: &str) -> TracedProgram {
    let traced = TracedProgram::python(&format!("allocators/{name}"), arguments);
    let traced = traced.env("PYTHONPATH", root().join("tests/programs/torch"));
    if settings.is_empty() { traced } else { traced.env(CONF, settings) }
}

/// Compares the snapshot with PyTorch's own of the same process: events, segments with their pools, and blocks.
/// Compares the peaks with PyTorch's statistics.
fn snapshots(traced: TracedProgram) -> Value {
    let recorded = record(traced);
    let found = recorded.same(false);
    let theirs = memtrace_tests::snapshots::json(recorded.oracle.path());
    assert_peaks(&recorded.run, &theirs, &["allocated", "active", "reserved", "requested"]);
    let printed = String::from_utf8_lossy(&recorded.run.output.stdout).trim().to_owned();
    let highest = summary(&recorded.run)["devices"][0]["highest"].take();
    json!({ "equal": found, "printed": printed, "highest": highest, "notices": notices(&recorded.run) })
}

/// Memory that libraries such as cuBLAS allocated for themselves, as `[address, size]`: neither PyTorch's allocator nor
/// the test's made it.
fn of_other_libraries(run: &Run) -> Value {
    let traces = run.traces();
    let obtained = traces.iter().flat_map(|trace| {
        events(trace).into_iter().filter(|e| {
            let module = trace.definitions().module(e.module).unwrap_or("?");
            let for_torch = e.flags.contains(Flags::IN_ALLOCATOR)
                || ["libc10_cuda", "liballocator", "libcudart"].iter().any(|name| module.contains(name));
            e.source == Source::Driver
                && e.action == Action::Alloc
                && e.result == 0
                && e.api.memory_kind() == Some(MemoryKind::Device)
                && !for_torch
        })
    });
    obtained.map(|e| json!([e.addr, e.size])).collect()
}

/// Runs a program under an allocator that PyTorch's recorder does not support. Requires the same requests from the same
/// Python frames, in the same order, as under PyTorch's own allocator. Returns the run, PyTorch's statistics and the
/// compared values.
fn refused(name: &str, arguments: &[&str], settings: &str) -> (Run, Value, Value) {
    let statistics = tempfile::NamedTempFile::new().expect("a file");
    let mut traced = allocator(name, arguments, settings).env("MEMTRACE_TEST_ORACLE_LAST", "1");
    // A pluggable allocator has no statistics.
    if arguments.is_empty() {
        traced = traced.env("MEMTRACE_TEST_STATISTICS", statistics.path());
    }
    let run = traced.run();
    run.assert_ended_well();
    let usual = record(allocator(name, &[], ""));
    let ours = pickle(&run);
    let besides = of_other_libraries(&run).to_string();
    let like: [&Path; 5] = [&ours, "--like".as_ref(), usual.oracle.path(), "--besides".as_ref(), besides.as_ref()];
    let found = vizcheck("calls.py", like);
    assert!(found["requests"].as_u64().is_some_and(|requests| requests > 5), "{found}");
    let statistics =
        if arguments.is_empty() { memtrace_tests::snapshots::json(statistics.path()) } else { Value::Null };
    (run, statistics, found)
}

fn stream_ordered() -> Value {
    const BACKEND: &str = "backend:cudaMallocAsync";
    // Tensor sizes are multiples of the pool's step, so the totals match to the byte.
    let (run, statistics, exact) = refused("pools_of_cuda.py", &[], BACKEND);
    assert_peaks(&run, &statistics, &["allocated", "reserved"]);
    let device = summary(&run)["devices"][0].take();
    for total in ["allocated", "reserved"] {
        let (ours, theirs) = (
            &device["end"]["totals"][format!("{total}_bytes")],
            &statistics["statistics"][0][format!("{total}_bytes.all.current")],
        );
        assert_eq!(ours, theirs, "{total} at the end (left: ours, right: PyTorch's)");
    }
    // Tensors of any size: the pool decides how it rounds them. The result prints the difference.
    let (loose, smi, found) = refused("stream_ordered.py", &[], BACKEND);
    let ours = summary(&loose)["devices"][0]["highest"].take();
    let theirs = &smi["statistics"][0];
    // Memory that cuBLAS allocated for itself is not in the pool, and cuBLAS keeps it to the end.
    let besides: u64 = of_other_libraries(&loose).as_array().into_iter().flatten().filter_map(|m| m[1].as_u64()).sum();
    let at_most = |total: &str| ours[total].as_u64().unwrap_or(0) - besides;
    let (allocated, used) = (at_most("allocated_bytes"), theirs["allocated_bytes.all.peak"].as_u64());
    assert!(allocated > 0 && Some(allocated) <= used, "{allocated} of {used:?}");
    assert_eq!(Some(at_most("reserved_bytes")), theirs["reserved_bytes.all.peak"].as_u64(), "reserved at most");
    json!({
        "exact": exact, "equal": found, "highest": ours, "used_at_most": used, "of_other_libraries": besides,
        "device": device["highest"],
    })
}

/// The allocator of `tests/programs/allocators`: a library file beside this program, for a machine without a compiler,
/// else compiled here. It finds CUDA in the process that loads it.
fn own_allocator(programs: &ProgramFolder) -> PathBuf {
    let ready = memtrace().with_file_name("liballocator.so");
    if ready.exists() { ready } else { programs.library::<&str>("allocators/allocator.c", "liballocator.so", &[]) }
}

fn pluggable() -> Value {
    let programs = ProgramFolder::new();
    let library = own_allocator(&programs);
    let library = library.to_string_lossy();
    let (run, _, found) = refused("stream_ordered.py", &[&library], "");
    let modules = by_module(&run);
    let device = summary(&run)["devices"][0].take();
    assert_eq!(device["source"], "cuda_calls");
    let pool = snapshots(allocator("own_pool.py", &[&library], ""));
    let first = snapshots(allocator("own_pool.py", &[&library, "FIRST"], ""));
    json!({ "equal": found, "by_module": modules, "highest": device["highest"], "pool": pool, "pool_first": first })
}

fn pinned() -> Value {
    let mut seen = serde_json::Map::new();
    for settings in ["pinned_use_cuda_host_register:False", "pinned_use_cuda_host_register:True"] {
        let recorded = record(allocator("pinned.py", &[], settings));
        let found = recorded.same(false);
        let pinned = summary(&recorded.run)["pinned_host_memory"].take();
        let held: u64 = pinned.as_array().into_iter().flatten().filter_map(|o| o["peak_bytes"].as_u64()).sum();
        let theirs =
            memtrace_tests::snapshots::json(recorded.oracle.path())["host_statistics"]["allocated_bytes.peak"].take();
        // The program registers 256 KiB itself. CUDA's libraries pin memory for themselves, which PyTorch does not
        // count.
        assert!(
            theirs.as_u64().is_some_and(|bytes| bytes > 0 && bytes <= held),
            "{settings}: {pinned}, PyTorch says {theirs}"
        );
        seen.insert(settings.into(), json!({ "equal": found, "pinned": pinned, "pytorch": theirs }));
    }
    Value::Object(seen)
}

/// Runs `memtrace doctor` on a real GPU. The driver's devices equal PyTorch's, and every layer of a training run is
/// seen and verified.
fn doctor() -> Value {
    let program = root().join("tests/programs/doctor/meaning.py");
    let mut command = std::process::Command::new(memtrace());
    let output = command.args(["doctor", "--json", "--", "python3"]).arg(program).output().expect("memtrace starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {stderr}"));
    let schema = std::fs::read_to_string(root().join("launcher/schema/doctor.schema.json")).expect("the schema");
    json_schema::assert_valid(&serde_json::from_str(&schema).expect("JSON"), &answer);
    assert_eq!(output.status.code(), Some(i32::from(answer["ok"] != true)), "{answer:#}");
    let asked = "import json, torch; print(json.dumps([torch.cuda.get_device_name(i) for i in \
                 range(torch.cuda.device_count())]))";
    let theirs = std::process::Command::new("python3").args(["-c", asked]).output().expect("python3");
    let theirs: Vec<String> = serde_json::from_slice(&theirs.stdout).expect("names");
    let ours: Vec<&str> =
        answer["machine"]["gpus"].as_array().into_iter().flatten().filter_map(|g| g["name"].as_str()).collect();
    assert_eq!(ours, theirs, "devices");
    let layers = answer["program"]["processes"][0]["layers"].as_array().cloned().unwrap_or_default();
    let may_be_unused = ["CPU tensors", "Native stacks"];
    for layer in &layers {
        // CPU tensors are not recorded where a GPU is used. Native stacks are unused where every event has a Python
        // stack.
        assert!(
            layer["status"] == "ok"
                || layer["status"] == "unused" && may_be_unused.contains(&layer["name"].as_str().unwrap_or_default()),
            "{layer}"
        );
    }
    assert_eq!(layers.len(), 15, "{answer:#}");
    json!({ "ok": answer["ok"], "machine": answer["machine"], "layers": layers })
}

/// Announced peaks and the measured ones of the program with each suggested change.
/// `limit` is what PyTorch may reserve in a second recording, in MiB: too little, so that the program fails.
fn suggestions(program: &str, limit: Option<u64>) -> Value {
    let mut outcomes = measure(program, None);
    if let Some(mebibytes) = limit {
        outcomes.extend(measure(program, Some(mebibytes << 20)));
    }
    let mut rows = Vec::new();
    for outcome in &outcomes {
        let row = json!({
            "suggestion": outcome.action,
            "limit": outcome.limit,
            "peak": outcome.peak,
            "announced": outcome.announced,
            "announced_fit": outcome.announced_fit,
            "changed": format!("{:?}", outcome.changed),
            "error_percent": outcome.error_percent(),
        });
        println!("        {program}: {row}");
        rows.push(row);
    }
    for outcome in &outcomes {
        assert!(outcome.error_percent().is_none_or(|error| error <= 10.0), "too far: {outcome:?}");
        assert!(!outcome.is_useless(), "does not lower the peak: {outcome:?}");
        assert!(!outcome.is_wrong_about_fit(), "wrong about the fit: {outcome:?}");
    }
    assert!(outcomes.iter().any(|o| matches!(o.changed, Changed::Peak(_))), "no suggestion was measured");
    json!({ "suggestions": rows })
}

fn overhead() -> Value {
    let run = TracedProgram::python("gpu/overhead.py", &[]).option("--no-snapshot").run();
    run.assert_ended_well();
    let text = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let result: Value = serde_json::from_str(&text).expect("the benchmark prints JSON");
    for row in result["results"].as_array().expect("results") {
        assert!(
            row["added_ratio_to_python"].as_f64().is_some_and(|r| r < 1.0),
            "cheaper than PyTorch's recorder: {row}"
        );
    }
    let lost: u64 = run.traces().iter().filter_map(|t| t.end()).map(|e| e.lost).sum();
    assert_eq!(lost, 0, "lost events");
    result
}

fn main() {
    let expandable = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
    let checks: Vec<(&str, Check)> = vec![
        ("recorder: MLP", Box::new(|| recorder("torch/mlp.py", &[], &[]))),
        ("recorder: ResNet-50, batch 32", Box::new(|| recorder("torch/resnet50.py", &["32"], &[]))),
        ("recorder: GPT-2, 124 M parameters", Box::new(|| recorder("torch/gpt2.py", &[], &[]))),
        ("recorder: transformer under autocast", Box::new(|| recorder("torch/transformer_amp.py", &[], &[]))),
        ("recorder: streams", Box::new(|| recorder("torch/streams.py", &[], &[]))),
        ("recorder: expandable segments", Box::new(move || recorder("torch/expandable.py", &[], &expandable))),
        (
            "allocators: expandable segments, unmapped in part",
            Box::new(|| snapshots(allocator("partial_unmap.py", &[], "expandable_segments:True"))),
        ),
        ("allocators: CUDA graphs and pools", Box::new(|| snapshots(allocator("graphs.py", &[], "")))),
        ("allocators: cudaMallocAsync", Box::new(stream_ordered)),
        ("allocators: pluggable", Box::new(pluggable)),
        ("allocators: pinned memory", Box::new(pinned)),
        ("hidden: cuBLAS and NCCL", Box::new(hidden)),
        ("JAX", Box::new(jax)),
        ("CuPy", Box::new(cupy)),
        ("JAX: pool, compiled programs", Box::new(jax_pool)),
        ("CuPy: pool", Box::new(cupy_pool)),
        ("native stacks: ResNet-50", Box::new(|| native("torch/resnet50.py", &["4"], "both"))),
        ("native stacks: GPT-2", Box::new(|| native("torch/gpt2.py", &[], "native"))),
        ("native stacks: cuBLAS and NCCL", Box::new(|| native("gpu/hidden.py", &[], "native"))),
        ("native stacks: JAX", Box::new(|| native("gpu/jax_program.py", &[], "native"))),
        ("native stacks: CuPy", Box::new(|| native("gpu/cupy_program.py", &[], "both"))),
        ("doctor", Box::new(doctor)),
        ("overhead", Box::new(overhead)),
        ("suggestions: decoder", Box::new(|| suggestions("decoder", Some(1500)))),
        ("suggestions: evaluation", Box::new(|| suggestions("evaluation", Some(1000)))),
        ("suggestions: ResNet", Box::new(|| suggestions("resnet", Some(1200)))),
        ("suggestions: float16 with GradScaler", Box::new(|| suggestions("scaler", None))),
        ("suggestions: large vocabulary", Box::new(|| suggestions("vocabulary", Some(2000)))),
        ("suggestions: large optimizer state", Box::new(|| suggestions("wide", None))),
    ];
    let mut only: Vec<String> = std::env::args().skip(1).collect();
    let mut checks = checks;
    if only.first().is_some_and(|o| o == "--gpus") {
        assert_eq!(only.get(1).map(String::as_str), Some("2"), "--gpus 2: the checks that need two GPUs");
        only.drain(..2);
        checks = processes::on_two();
    } else {
        checks.extend(processes::on_one());
    }
    let (mut passed, mut failed, mut missing, mut seen) = (0, 0, 0, serde_json::Map::new());
    for (name, check) in checks {
        if !only.is_empty() && !only.iter().any(|o| name.contains(o.as_str())) {
            continue;
        }
        match catch_unwind(AssertUnwindSafe(check)) {
            Ok(Value::Object(value)) if value.contains_key("not_available") => {
                println!("missing {name}: {}", value["not_available"]);
                missing += 1;
            }
            Ok(value) => {
                println!("ok      {name}");
                seen.insert(name.into(), value);
                passed += 1;
            }
            Err(_) => {
                println!("FAILED  {name}");
                failed += 1;
            }
        }
    }
    println!("{}", serde_json::to_string_pretty(&Value::Object(seen)).unwrap_or_default());
    println!("{passed} passed, {failed} failed, {missing} not available here");
    std::process::exit(i32::from(failed > 0));
}
