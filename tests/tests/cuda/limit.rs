//! `--limit`: programs behave as on a device of that size. The oracle is the simulated CUDA with such a device.

use std::io::Read;

use memtrace_tests::programs::{ProgramFolder, linked_with, simcuda, with_simcuda};
use memtrace_tests::snapshots::summary;
use memtrace_tests::traced_program::{Run, TracedProgram, memtrace};
use memtrace_trace::counters::Counter;

const MIB: u64 = 1 << 20;

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a program on a small device, then on a large one under a limit. Both print the same. Returns the limited run.
#[track_caller]
fn same_as_on_a_smaller_device(program: impl Fn() -> TracedProgram, bytes: u64) -> Run {
    let small = program().env("SIMCUDA_MEMORY", bytes.to_string()).run_alone();
    let limited = program().env("SIMCUDA_MEMORY", (20 * bytes).to_string()).option("--limit").option(bytes.to_string());
    let run = limited.with_device_usage().run();
    let errors = String::from_utf8_lossy(&run.output.stderr).into_owned();
    assert_eq!(stdout(&small), stdout(&run.output), "{errors}");
    assert_eq!(small.status, run.output.status, "{errors}");
    run
}

#[test]
fn every_way_to_allocate_ends_where_the_device_would() {
    let programs = ProgramFolder::new();
    let options = [linked_with("libcuda.so.1"), linked_with("libcudart.so.12")].concat();
    let program = programs.program("limit/paths.c", "paths", &options);
    // Chunks that divide the device, and such as do not.
    for (chunk, bytes) in [("64", 2048 * MIB), ("37", 3000 * MIB), ("8", 1027 * MIB)] {
        let traced =
            || with_simcuda(&[program.as_os_str(), chunk.as_ref()]).env("SIMCUDA_CONTEXT", (300 * MIB).to_string());
        let run = same_as_on_a_smaller_device(traced, bytes);
        let output = stdout(&run.output);
        assert!(output.contains(&format!("the device has {} KiB", bytes >> 10)), "{output}");
        let summary = summary(&run);
        assert_eq!(summary["devices"][0]["total_bytes"], bytes);
        assert_eq!(summary["devices"][0]["device_memory"]["total_bytes"], bytes);
    }
}

#[test]
fn processes_share_the_limit() {
    let programs = ProgramFolder::new();
    let program = programs.program("limit/processes.c", "processes", &linked_with("libcuda.so.1"));
    let shared = tempfile::tempdir().expect("a temporary folder");
    for turn in 0..5 {
        let folder = |kind: &str| {
            let folder = shared.path().join(format!("{kind}{turn}"));
            std::fs::create_dir(&folder).expect("a folder");
            folder
        };
        let traced = |kind: &str| {
            with_simcuda(&[program.as_os_str(), "4".as_ref(), "16".as_ref()])
                .env("SIMCUDA_CONTEXT", (100 * MIB).to_string())
                .env("SIMCUDA_SHARED", folder(kind))
        };
        let limited =
            traced("limited").env("SIMCUDA_MEMORY", (80_000 * MIB).to_string()).option("--limit").option("1GiB");
        let run = limited.run();
        run.assert_ended_well();
        // Four contexts, and what is left in chunks: exactly as many as fit.
        assert_eq!(stdout(&run.output), format!("{} chunks\n", (1024 - 4 * 100) / 16));
        let small = traced("small").env("SIMCUDA_MEMORY", (1024 * MIB).to_string()).run_alone();
        assert_eq!(stdout(&small), stdout(&run.output));
    }
}

/// Disturbs an allocation of limit/disturbed.c. `missed` is how many allocations do not get the lock of the run in
/// time, as the traces and the report count them.
#[track_caller]
fn allocations_go_on(disturbance: &str, missed: u64) {
    const NONE: &[&str] = &[];
    allocations_go_on_through(NONE, disturbance, missed);
}

/// [`allocations_go_on`] for a program that another command starts.
#[track_caller]
fn allocations_go_on_through(command: &[&str], disturbance: &str, missed: u64) {
    let programs = ProgramFolder::new();
    const NONE: &[&str] = &[];
    programs.library("limit/driver.c", "libcuda.so.1", NONE);
    let driver = [format!("-L{}", programs.path("").display()), "-l:libcuda.so.1".to_owned()];
    let program = programs.program("limit/disturbed.c", "disturbed", &driver);
    let run = TracedProgram::command(&[program.as_os_str(), disturbance.as_ref()])
        .through(command)
        .env("LD_LIBRARY_PATH", programs.path(""))
        .option("--quiet")
        .option("--limit=512MiB")
        .run();
    run.assert_ended_well();
    assert_eq!(stdout(&run.output), "512 of 512 MiB\n");
    let counted = run.traces().iter().map(|trace| trace.counter(Counter::LimitLockMissed)).sum::<u64>();
    assert_eq!(counted, missed);
    let report = std::process::Command::new(memtrace()).arg("report").arg(run.path()).output().expect("memtrace");
    let is_reported = stdout(&report).contains(&format!("The limit may not have been exact: {missed} allocation"));
    assert_eq!(is_reported, missed > 0, "{}", stdout(&report));
}

#[test]
fn children_that_are_forked_inside_an_allocation_live_on() {
    for create in ["fork", "vfork", "clone"] {
        allocations_go_on(create, 0);
    }
}

#[test]
fn processes_end_inside_an_allocation() {
    for end in ["kill", "exit", "exec"] {
        allocations_go_on(end, 0);
    }
}

/// Process and thread ids have another meaning there.
#[test]
fn processes_of_another_pid_namespace_end_or_leave_an_allocation() {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    let flags = if unsafe { libc::geteuid() } == 0 { "-pf" } else { "-Urpf" };
    for disturbance in ["kill", "leave", "end"] {
        allocations_go_on_through(&["unshare", flags, "--mount-proc"], disturbance, 0);
    }
}

#[test]
fn a_process_is_stopped_inside_an_allocation() {
    allocations_go_on("stop", 1);
}

#[test]
fn signal_handlers_leave_allocations_or_allocate() {
    allocations_go_on("leave", 0);
    // The allocation of the handler does not wait for the one that it has interrupted.
    allocations_go_on("nest", 1);
}

#[test]
fn a_thread_leaves_an_allocation_and_others_wait_once() {
    allocations_go_on("abandon", 1);
}

#[test]
fn a_thread_ends_inside_an_allocation() {
    allocations_go_on("end", 0);
}

#[test]
fn workers_of_data_loaders_do_not_hold_the_lock() {
    let run = TracedProgram::python("limit/loaders.py", &[]).option("--limit=2GiB").run();
    run.assert_ended_well();
    let expected: String = (0..6).map(|epoch| format!("{epoch} 64\n")).collect();
    assert_eq!(stdout(&run.output), expected);
    assert!(run.traces().iter().all(|trace| trace.counter(Counter::LimitLockMissed) == 0));
}

#[test]
fn what_others_used_at_the_start_does_not_count() {
    let programs = ProgramFolder::new();
    let program = programs.program("limit/processes.c", "processes", &linked_with("libcuda.so.1"));
    let holder = programs.program("limit/holder.c", "holder", &linked_with("libcuda.so.1"));
    let shared = tempfile::tempdir().expect("a temporary folder");
    let over_shared = |words: &[&std::ffi::OsStr]| {
        with_simcuda(words)
            .env("SIMCUDA_CONTEXT", (100 * MIB).to_string())
            .env("SIMCUDA_SHARED", shared.path())
            .env("SIMCUDA_MEMORY", (8192 * MIB).to_string())
    };
    let mut command = over_shared(&[holder.as_os_str(), "3000".as_ref()]).prepare(None);
    let mut holder =
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().expect("a program");
    let mut ready = [0];
    holder.stdout.as_mut().expect("its output").read_exact(&mut ready).expect("its first byte");
    let run = over_shared(&[program.as_os_str(), "1".as_ref(), "16".as_ref()])
        .env("MEMTRACE_NVML_LIBRARY", simcuda().join("libnvidia-ml.so.1"))
        .option("--limit")
        .option("1GiB")
        .run();
    run.assert_ended_well();
    assert_eq!(stdout(&run.output), format!("{} chunks\n", (1024 - 100) / 16));
    // Without an answer of NVML, all memory in use counts.
    let unknown = over_shared(&[program.as_os_str(), "1".as_ref(), "16".as_ref()])
        .env("MEMTRACE_NVML_LIBRARY", "/nonexistent/libnvidia-ml.so.1")
        .option("--limit=4GiB")
        .run();
    assert_eq!(stdout(&unknown.output), format!("{} chunks\n", (4096 - 100 - 3100) / 16));
    drop(holder.stdin.take());
    assert!(holder.wait().expect("its end").success());
}

#[test]
fn pytorch_runs_out_of_memory_as_on_a_smaller_device() {
    for setting in ["", "expandable_segments:True", "backend:cudaMallocAsync"] {
        let program = || TracedProgram::python("limit/training.py", &[]).env("PYTORCH_CUDA_ALLOC_CONF", setting);
        let run = same_as_on_a_smaller_device(program, 3000 * MIB);
        let output = stdout(&run.output);
        assert!(output.contains(": 2.93 GiB") || output.contains("total capacity of 2.93 GiB"), "{setting}: {output}");
        assert!(output.contains("full after"), "{setting}: {output}");
        let report = std::process::Command::new(memtrace()).arg("report").arg(run.path()).output().expect("memtrace");
        let report = stdout(&report);
        assert!(report.contains("Limited to 2.93 GiB of each GPU (--limit)"), "{setting}: {report}");
        assert!(report.contains("CUDA out of memory on GPU 0 (2.93 GiB)"), "{setting}: {report}");
        assert_eq!(summary(&run)["devices"][0]["total_bytes"], 3000 * MIB, "{setting}");
    }
}

#[test]
fn a_limit_above_the_device_changes_nothing() {
    let programs = ProgramFolder::new();
    let options = [linked_with("libcuda.so.1"), linked_with("libcudart.so.12")].concat();
    let program = programs.program("limit/paths.c", "paths", &options);
    let traced = || with_simcuda(&[program.as_os_str(), "64".as_ref()]).env("SIMCUDA_MEMORY", (1024 * MIB).to_string());
    let run = traced().option("--limit").option("2GiB").run();
    assert_eq!(stdout(&traced().run_alone()), stdout(&run.output));
}

#[test]
fn what_is_no_limit_is_refused() {
    for bad in ["0", "24G", "-1", "much"] {
        let output = std::process::Command::new(memtrace()).args(["run", "--limit", bad, "--", "true"]).output();
        let output = output.expect("memtrace");
        assert_eq!(output.status.code(), Some(125), "{bad}");
    }
}
