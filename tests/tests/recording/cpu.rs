//! CPU tensors: every one that PyTorch's profiler saw, in the right phase, and none where they are switched off.

use memtrace_tests::snapshots::{at_least, pickle, vizcheck};
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_trace::event::{Action, Event, Source};
use serde_json::Value;

/// `tests/programs/torch/cpu.py` separates its phases with tensors of this size in bytes, plus 0 to 16.
const MARK: i64 = 1_000_003;
const MARKS: usize = 17;

/// The program without a CUDA device.
fn program(cpu: &str) -> TracedProgram {
    TracedProgram::python("torch/cpu.py", &[]).env("SIMCUDA_DEVICES", "0").option("--cpu").option(cpu)
}

/// The recorded CPU tensors as (address, size in bytes); a free has a negative size.
fn blocks(run: &Run) -> Vec<(u64, i64)> {
    let signed = |e: &Event| if e.action == Action::Alloc { e.size as i64 } else { -(e.size as i64) };
    events(&run.trace()).iter().filter(|e| e.source == Source::TorchCpu).map(|e| (e.addr, signed(e))).collect()
}

/// The part from the first mark to the last.
fn between_marks(blocks: &[(u64, i64)]) -> &[(u64, i64)] {
    let is_mark = |(_, size): &(u64, i64)| (MARK..MARK + MARKS as i64).contains(size);
    assert_eq!(blocks.iter().filter(|b| is_mark(b)).count(), MARKS, "marks");
    let first = blocks.iter().position(is_mark).expect("the first mark");
    let last = blocks.iter().rposition(is_mark).expect("the last mark");
    &blocks[first..=last]
}

fn profiled(file: &std::path::Path) -> Vec<(u64, i64)> {
    let text = std::fs::read_to_string(file).expect("the profiler's allocations");
    let pairs: Vec<(u64, i64)> = serde_json::from_str(&text).expect("pairs");
    pairs
}

#[test]
fn every_cpu_tensor_of_the_profiler_is_recorded() {
    for cpu in ["always", "auto"] {
        let oracle = tempfile::NamedTempFile::new().expect("a temporary file");
        let run = program(cpu).env("MEMTRACE_TEST_ORACLE", oracle.path()).run();
        run.assert_ended_well();
        let (ours, theirs) = (blocks(&run), profiled(oracle.path()));
        let (ours, theirs) = (between_marks(&ours), between_marks(&theirs));
        for (index, (a, b)) in ours.iter().zip(theirs).enumerate() {
            assert_eq!(a, b, "event {index}, --cpu {cpu} (left: ours, right: the profiler's)");
        }
        assert_eq!(ours.len(), theirs.len(), "events");
        assert!(ours.len() > 400, "{} events", ours.len());
    }
}

#[test]
fn cpu_tensors_have_their_phase() {
    let run = program("always").run();
    run.assert_ended_well();
    let phases = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let found: Value = vizcheck("phases.py", [pickle(&run).as_os_str(), phases.trim().as_ref()]);
    at_least(&found, &[("load", 4), ("forward", 20), ("backward", 40), ("optimizer", 100)]);
}

#[test]
fn no_cpu_tensors_are_recorded_with_cpu_never() {
    let run = program("never").run();
    run.assert_ended_well();
    assert!(run.traces().is_empty(), "nothing was recorded");
}

#[test]
fn recording_of_cpu_tensors_ends_at_the_first_device_use() {
    // One device, which nothing uses before the CUDA tensor.
    let run = TracedProgram::python("torch/cpu_then_cuda.py", &[]).env("SIMCUDA_DEVICES", "1").run();
    run.assert_ended_well();
    let sizes: Vec<i64> = blocks(&run).into_iter().map(|(_, size)| size).collect();
    assert!(sizes.contains(&1_000_003), "the tensor before: {sizes:?}");
    assert!(!sizes.contains(&1_000_033), "the tensor after: {sizes:?}");
    let cuda = events(&run.trace()).iter().filter(|e| e.source == Source::Torch && e.size == 1_000_000).count();
    assert!(cuda > 0, "the CUDA tensor");
}
