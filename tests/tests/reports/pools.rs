//! Memory pools of JAX and CuPy, and what XLA writes about compiled programs. Stand-ins for both libraries run here;
//! the files of XLA are real ones. `scripts/gpu-check` has the real libraries.

use memtrace_tests::snapshots::json;
use memtrace_tests::traced_program::{Run, TracedProgram, root};

fn run(options: &[&str]) -> Run {
    let dump = root().join("tests/golden/xla/jax-0.12-cpu/xla");
    let program = TracedProgram::python("pools/program.py", &[dump.to_str().unwrap()]);
    let run = options.iter().fold(program, |program, option| program.option(option)).run();
    run.assert_ended_well();
    run
}

fn printed(run: &Run) -> String {
    String::from_utf8_lossy(&run.output.stdout).trim().to_owned()
}

fn figures(run: &Run) -> Vec<String> {
    let files = std::fs::read_dir(run.path()).unwrap().map(|entry| entry.unwrap());
    let is_figures = |name: &str| name.starts_with("pools-");
    let files = files.filter(|entry| is_figures(&entry.file_name().to_string_lossy()));
    files.map(|entry| std::fs::read_to_string(entry.path()).unwrap()).collect()
}

#[test]
fn pools_are_left_alone_unless_asked() {
    let run = run(&[]);
    assert_eq!(printed(&run), "MemoryPool None None");
    assert!(figures(&run).is_empty());
    assert!(json(&run.path().join("summary.json")).get("xla").is_none());
}

#[test]
fn pools_are_read_when_the_program_ends() {
    let run = run(&["--pools", "read"]);
    assert_eq!(printed(&run), "MemoryPool None None");
    let [text] = &figures(&run)[..] else { panic!("one file") };
    let figures: serde_json::Value = serde_json::from_str(text).unwrap();
    let mib = |bytes: &serde_json::Value| bytes.as_u64().map(|bytes| bytes >> 20);
    let [jax, cupy] = &figures["pools"].as_array().unwrap()[..] else { panic!("{figures}") };
    assert_eq!(
        (mib(&jax["used_bytes"]), mib(&jax["used_peak_bytes"]), mib(&jax["pool_bytes"])),
        (Some(2), Some(7), Some(9))
    );
    assert_eq!((mib(&cupy["used_bytes"]), mib(&cupy["pool_bytes"])), (Some(3), Some(5)));
    assert_eq!(figures["errors"], serde_json::json!([]));
}

#[test]
fn pools_are_switched_off_on_request() {
    let run = run(&["--pools", "off"]);
    assert_eq!(printed(&run), "MemoryAsyncPool cuda_async false");
}

#[test]
fn the_report_has_the_programs_that_xla_compiled() {
    let run = run(&["--xla-dump"]);
    let summary = json(&run.path().join("summary.json"));
    let program = &summary["xla"]["programs"][0];
    assert_eq!((program["name"].as_str(), program["total_bytes"].as_u64()), (Some("jit_train_step"), Some(6_815_796)));
    assert_eq!(program["is_total_confirmed"], true);
    let peak = &program["peak"];
    let lines = peak["lines"].as_array().unwrap();
    let sum: u64 = lines.iter().map(|line| line["bytes"].as_u64().unwrap()).sum();
    assert_eq!(
        (sum + peak["left_out_bytes"].as_u64().unwrap(), peak["live_bytes"].as_u64()),
        (6_029_320, Some(6_029_320))
    );
    assert_eq!(lines[0]["location"], "me/train.py:8 layer");
    let report = String::from_utf8_lossy(&run.output.stderr).into_owned();
    assert!(report.contains("Programs that XLA compiled"), "{report}");
    assert!(report.contains("temporary  me/train.py:8 layer  jit(train_step)/"), "{report}");
}
