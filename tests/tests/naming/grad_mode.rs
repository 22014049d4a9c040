//! Whether autograd was enabled at each allocation: the same as `torch.is_grad_enabled()`, on every thread and in every
//! mode.

use std::collections::BTreeMap;

use memtrace_tests::traced_program::{TracedProgram, events};
use memtrace_trace::event::{Action, Flags, Source};

#[test]
fn grad_mode_matches_pytorch() {
    let run = TracedProgram::python("torch/grad_mode.py", &[]).run();
    run.assert_ended_well();
    let truth: BTreeMap<u64, bool> =
        serde_json::from_slice::<Vec<(u64, bool)>>(&run.output.stdout).expect("pairs").into_iter().collect();
    assert_eq!(truth.len(), 1200, "allocations that the program made");
    let on = truth.values().filter(|enabled| **enabled).count();
    assert!((300..900).contains(&on), "{on} with grad mode on: no test of anything");
    let recorded: BTreeMap<u64, bool> = events(&run.trace())
        .iter()
        .filter(|e| e.source == Source::Torch && e.action == Action::Alloc && truth.contains_key(&e.size))
        .map(|e| {
            assert!(e.flags.contains(Flags::GRAD_KNOWN), "unknown at {} bytes", e.size);
            (e.size, e.flags.contains(Flags::GRAD_ENABLED))
        })
        .collect();
    assert_eq!(recorded, truth);
}
