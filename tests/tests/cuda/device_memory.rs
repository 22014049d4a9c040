//! The whole memory of a device, divided by what uses it, beside what the simulated driver and PyTorch report.

use memtrace_tests::traced_program::{TracedProgram, root};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// The memory that a context uses here, in bytes.
const CONTEXT: u64 = 527 * MIB;
/// The memory that another process uses, in bytes.
const OTHER: u64 = 1 << 30;

/// Runs the program over a simulated CUDA that takes memory as a real one, with these settings. Returns the device of
/// `summary.json`, and what the program has printed.
fn run(with_nvml: bool, settings: &[(&str, &str)]) -> (Value, Value, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run");
    let shared = folder.path().join("devices");
    std::fs::create_dir(&shared).expect("a folder");
    let mut program = TracedProgram::python("device_memory/parts.py", &[])
        .env("SIMCUDA_LIBRARY_MEMORY", "1")
        .env("SIMCUDA_CONTEXT", CONTEXT.to_string())
        .env("SIMCUDA_PROCESSES", "4242:/usr/bin/vllm:1G")
        .env("SIMCUDA_RESERVED", "615M")
        .env("SIMCUDA_SHARED", &shared);
    for (name, value) in settings {
        program = program.env(name, value);
    }
    if with_nvml {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
        program =
            program.env("MEMTRACE_NVML_LIBRARY", target.join("simcuda/lib/libnvidia-ml.so.1")).env("RUN_FOLDER", &path);
    }
    let output = program.prepare(Some(&path)).output().expect("the launcher starts");
    assert!(output.status.success(), "{output:?}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let printed = serde_json::from_str(stdout.lines().next().expect("a line")).expect("JSON");
    let summary = std::fs::read(path.join("summary.json")).expect("summary.json");
    let summary: Value = serde_json::from_slice(&summary).expect("JSON");
    assert_eq!(summary["losses"], serde_json::json!({}));
    (summary["processes"][0]["devices"][0].clone(), printed, String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The sum of the parts of one kind, in bytes.
fn part(state: &Value, kind: &str) -> u64 {
    let parts = state["parts"].as_array().expect("parts").iter().filter(|part| part["kind"] == kind);
    parts.map(|part| part["bytes"].as_u64().expect("bytes")).sum()
}

#[track_caller]
fn assert_sum(state: &Value) {
    let parts = state["parts"].as_array().expect("parts").iter();
    let sum: u64 = parts.map(|part| part["bytes"].as_u64().expect("bytes")).sum();
    assert_eq!(Some(sum), state["used_bytes"].as_u64(), "{state}");
}

#[test]
fn the_parts_are_what_the_driver_and_pytorch_report() {
    let (device, printed, stderr) = run(true, &[]);
    let memory = &device["device_memory"];
    let number = |name: &str| printed[name].as_u64().expect("a number");
    let end = &memory["at_end"];
    [end, &memory["at_peak"], &memory["at_allocated_peak"]].into_iter().for_each(assert_sum);
    assert_eq!(end["used_bytes"], printed["used"], "{end}");
    assert_eq!(memory["other_processes"], "steady");
    let allocated = part(end, "pytorch_allocated");
    assert_eq!(allocated, number("allocated"), "{end}");
    assert_eq!(allocated + part(end, "pytorch_cached"), number("reserved"), "{end}");
    assert_eq!((part(end, "context"), part(end, "other_process")), (CONTEXT, OTHER), "{end}");
    // cuBLAS allocates 64 MiB and two small blocks, which share a page.
    assert_eq!(part(end, "library"), (64 << 20) + (129 << 10), "{end}");
    assert_eq!(part(end, "rounding"), (2 << 20) - (129 << 10), "{end}");
    assert_eq!(part(end, "unattributed"), 0, "{end}");
    // The rest are the kernels. The first one of PyTorch alone takes 92 MiB.
    let kernels = part(end, "kernels");
    let beside = CONTEXT + OTHER + 66 * MIB;
    assert_eq!(kernels, number("used") - number("reserved") - beside, "{end}");
    assert!(kernels >= 92 * MIB, "{end}");
    assert_eq!(number("after_first_allocation"), CONTEXT + OTHER + 2 * MIB);
    let other = end["parts"].as_array().unwrap().iter().find(|part| part["kind"] == "other_process").unwrap();
    assert_eq!((&other["name"], &other["pid"]), (&"vllm".into(), &4242.into()));
    assert!(end["pinned_host_bytes"].as_u64() >= Some(3 * MIB), "{end}");
    assert!(stderr.contains("As nvidia-smi shows it"), "{stderr}");
}

/// The kernel says whose the other process is: its environment claims to be another pod.
#[test]
fn other_processes_have_their_user_and_are_clients_of_mps() {
    let mut other = std::process::Command::new("sleep").arg("600").env("POD_NAME", "innocent").spawn().expect("sleep");
    let processes = format!("{}:/usr/bin/vllm:1G/mps", other.id());
    let (device, _, stderr) = run(true, &[("SIMCUDA_PROCESSES", &processes)]);
    other.kill().expect("it runs");
    other.wait().expect("it has ended");
    let parts = device["device_memory"]["at_end"]["parts"].as_array().expect("parts");
    let part = parts.iter().find(|part| part["kind"] == "other_process").expect("the other process");
    let user = std::process::Command::new("id").arg("-un").output().expect("id").stdout;
    let user = String::from_utf8(user).expect("a name").trim().to_owned();
    assert_eq!((&part["workload"]["user"], &part["is_mps"]), (&user.into(), &true.into()), "{part}");
    let label = part["label"].as_str().expect("a label");
    assert!(
        label.starts_with(&format!("vllm (process {}, ", other.id())) && label.ends_with(", MPS client)"),
        "{label}"
    );
    assert!(!label.contains("innocent") && !stderr.contains("innocent"), "{label}");
}

/// A process of another instance of a divided device uses other memory, and NVML may not know the instances.
#[test]
fn instances_of_a_divided_device_are_apart_or_unknown() {
    let other = ("SIMCUDA_PROCESSES", "4242:/usr/bin/vllm:1G/mig2");
    let (device, printed, _) = run(true, &[other, ("SIMCUDA_MIG", "1")]);
    let memory = &device["device_memory"];
    let end = &memory["at_end"];
    assert_sum(end);
    assert_eq!((&memory["other_processes"], &end["used_bytes"]), (&"steady".into(), &printed["used"]), "{end}");
    assert_eq!((part(end, "context"), part(end, "other_process")), (CONTEXT, 0), "{end}");
    let same = ("SIMCUDA_PROCESSES", "4242:/usr/bin/vllm:1G/mig1");
    let (device, ..) = run(true, &[same, ("SIMCUDA_MIG", "1")]);
    let end = &device["device_memory"]["at_end"];
    assert_eq!((part(end, "context"), part(end, "other_process")), (CONTEXT, OTHER), "{end}");
    let (device, ..) = run(true, &[other, ("SIMCUDA_MIG", "unknown")]);
    let memory = &device["device_memory"];
    assert_eq!(memory["other_processes"], "unknown_instance", "{memory}");
    assert_eq!(part(&memory["at_end"], "other_process"), 0, "{memory}");
}

#[test]
fn without_nvml_nothing_is_attributed_by_guess() {
    let (device, printed, _) = run(false, &[]);
    let memory = &device["device_memory"];
    let end = &memory["at_end"];
    assert_sum(end);
    assert_eq!((&memory["other_processes"], &end["used_bytes"]), (&"unknown".into(), &printed["used"]));
    assert_eq!(part(end, "context_and_other_processes"), CONTEXT + OTHER, "{end}");
    assert_eq!((part(end, "context"), part(end, "other_process"), part(end, "kernels")), (0, 0, 0), "{end}");
    assert!(part(end, "unattributed") >= 92 * MIB, "{end}");
}
