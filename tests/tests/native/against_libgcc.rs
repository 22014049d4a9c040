//! Native stacks equal, frame by frame, those that libgcc's unwinder gives at the same moment: at every lock, and every
//! other call that `tests/unwindcheck` sees. PyTorch's caching allocator takes a lock for every block.
//! `scripts/gpu-check` does the same for JAX and NCCL.

use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::{TracedProgram, events};
use memtrace_tests::unwind_check::UnwindCheck;

/// Requires equal stacks, at least one for each event that memtrace records in the same run, on at least so many
/// threads.
#[track_caller]
fn check(traced: TracedProgram, least_events: usize, least_threads: u64) {
    let check = UnwindCheck::new();
    let run = check.preloaded(traced).option("--stacks").option("native").option("--no-snapshot").run();
    run.assert_ended_well();
    let events = events(&run.trace()).len();
    assert!(events >= least_events, "{events} events, no test of anything");
    let equal = check.equal_stacks();
    assert!(equal.compared >= events as u64, "{equal:?} beside {events} events");
    // An import of PyTorch alone has more.
    assert!(equal.distinct > 5000 && equal.threads >= least_threads, "{equal:?}");
}

#[test]
fn two_devices_and_threads() {
    // The program's own threads allocate.
    check(TracedProgram::python("torch/two_devices.py", &[]).env("SIMCUDA_DEVICES", "2"), 3000, 5);
}

/// The comparison compares: it finds stacks in all processes and threads, and a stack that differs.
#[test]
fn a_difference_is_found() {
    let programs = ProgramFolder::new();
    let program = programs.program::<&str>("native/locks.c", "locks", &[]);
    let run = |mode: &str| {
        let check = UnwindCheck::new();
        let output = check.preloaded(TracedProgram::command(&[program.as_os_str(), mode.as_ref()])).run_alone();
        assert!(output.status.success(), "{output:?}");
        check
    };
    let equal = run("all").equal_stacks();
    // The program starts 4 threads, as does its child.
    assert!(equal.threads == 9 && equal.distinct > 500 && equal.compared > 5000, "{equal:?}");
    let found = run("registered").compared_stacks();
    assert_eq!(found.different, 1, "{found:?}");
    assert!(found.first_difference.starts_with("frame 2 differs"), "{found:?}");
    assert!(found.first_difference.contains("memtrace found the end and libgcc 0x"), "{found:?}");
}

mod exhaustive {
    use super::*;

    #[test]
    fn expandable_segments_and_streams() {
        let traced = TracedProgram::python("torch/expandable.py", &[])
            .env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
        check(traced, 300, 1);
        check(TracedProgram::python("torch/streams.py", &[]), 500, 1);
    }

    #[test]
    fn a_training_with_backward_threads() {
        check(TracedProgram::python("torch/mlp.py", &[]), 300, 2);
    }
}
