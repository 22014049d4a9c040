//! The reference cycles that a trace contains (`--cycles`), and the allocations that they held.

use memtrace_trace::file::Cycle;
use memtrace_trace::ids::{ContextId, StackId};

use super::locate::locate;
use memtrace_input::Process;

/// A cycle, and the allocation of a tensor that it held.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReferenceCycle {
    /// The file in the run's folder that shows the objects; empty if there is none.
    pub file: Box<str>,
    /// A one-line description of the cycle.
    pub text: Box<str>,
    /// The device, stack, and autograd node or module call of the allocation; `None` if the recording has no such
    /// block.
    pub allocation: Option<(i16, StackId, ContextId)>,
}

/// All cycles of a process, in the order of their time. Streams its recording if there are any.
pub fn reference_cycles(process: &Process) -> Vec<ReferenceCycle> {
    let mut all = Vec::new();
    let cycles = process.definitions().cycles.iter();
    locate(
        process.recording(),
        process.trace_index(),
        cycles,
        |cycle: &Cycle| (cycle.seq, cycle.address),
        |cycle, found| {
            let allocation = found.map(|(device, block)| (device, block.stack, block.context));
            all.push(ReferenceCycle { file: cycle.file.clone(), text: cycle.text.clone(), allocation });
        },
    );
    all
}
