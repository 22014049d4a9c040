//! The reference cycles that a trace shows (`--cycles`), and whose memory they held.

use memtrace_trace::file::Cycle;
use memtrace_trace::ids::{ContextId, StackId};

use super::located::locate;
use memtrace_input::Recording;

/// A cycle, and the allocation of a tensor that it held.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeldByCycle {
    /// The file in the run's folder that shows the objects; empty where there is none.
    pub file: Box<str>,
    /// The cycle in one line.
    pub text: Box<str>,
    /// The device, stack and autograd node or module call of the allocation; `None` where the recording has no such block.
    pub allocation: Option<(i16, StackId, ContextId)>,
}

/// All of a recording, in order of their moments. Streams it once more, if there are any.
pub fn held_by_cycles(recording: &dyn Recording) -> Vec<HeldByCycle> {
    let mut all = Vec::new();
    let cycles = recording.definitions().cycles.iter();
    locate(
        recording,
        cycles,
        |cycle: &Cycle| (cycle.seq, cycle.address),
        |cycle, found| {
            let allocation = found.map(|(device, block)| (device, block.stack, block.context));
            all.push(HeldByCycle { file: cycle.file.clone(), text: cycle.text.clone(), allocation });
        },
    );
    all
}
