//! The content of the trace of one process: the counts and notices on which the checks are based.

use std::collections::BTreeMap;

use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Definitions, Reader};

use super::report::StackCounts;

/// Flags for the kinds of frames in a stack, one bit each.
const PYTHON: u8 = 1;
const NATIVE: u8 = 2;
const UNDEFINED: u8 = 4;

/// Counts over the events of one process.
#[derive(Default, Debug)]
pub(super) struct EventCounts {
    pub(super) events: u64,
    sources: BTreeMap<Source, u64>,
    /// The number of blocks that PyTorch's allocator returned, and of those whose rounded size is known.
    pub(super) blocks: u64,
    pub(super) rounded: u64,
    pub(super) torch: TorchCounts,
    pub(super) stacks: StackCounts,
    /// The number of event blocks in the file that could not be decoded.
    pub(super) damaged: u64,
}

/// Counts over the events of PyTorch's allocators.
#[derive(Default, Debug)]
pub(super) struct TorchCounts {
    pub(super) events: u64,
    /// The events whose grad mode is known.
    pub(super) grad_known: u64,
    pub(super) in_backward: u64,
    pub(super) with_node: u64,
    pub(super) with_forward: u64,
    /// The number of frees by PyTorch, and of those that CPython's cyclic garbage collector caused.
    pub(super) frees: u64,
    pub(super) collected: u64,
}

impl EventCounts {
    /// Counts the events of a trace in one pass.
    pub(super) fn of(trace: &Reader) -> EventCounts {
        let definitions = trace.definitions();
        let kinds = stack_kinds(definitions);
        let mut counts = EventCounts::default();
        for block in trace.events() {
            match block {
                Ok(events) => events.iter().for_each(|e| counts.add(e, definitions, &kinds)),
                Err(_) => counts.damaged += 1,
            }
        }
        counts
    }

    fn add(&mut self, e: &Event, definitions: &Definitions, kinds: &[u8]) {
        self.events += 1;
        *self.sources.entry(e.source).or_default() += 1;
        if e.source == Source::Torch && e.action == Action::Alloc {
            self.blocks += 1;
            self.rounded += u64::from(e.flags.contains(Flags::SLACK_KNOWN));
        }
        // Totals come from the allocator itself and belong to no point in time of the program, so they have no grad
        // mode.
        if e.source.is_torch() && e.action != Action::Totals {
            self.torch.events += 1;
            self.torch.grad_known += u64::from(e.flags.contains(Flags::GRAD_KNOWN));
        }
        if e.source.is_torch() && matches!(e.action, Action::FreeRequested | Action::FreeCompleted) {
            // A request and its completion concern the same block. Sources without the allocator tracker have
            // completions only.
            let counts = e.action == Action::FreeRequested || e.source != Source::Torch;
            self.torch.frees += u64::from(counts);
            self.torch.collected += u64::from(counts && e.flags.contains(Flags::IN_GC));
        }
        if e.source.is_torch() && e.flags.contains(Flags::IN_BACKWARD) && e.action != Action::Totals {
            self.torch.in_backward += 1;
            let node = definitions.context(e.context);
            self.torch.with_node += u64::from(node.is_some());
            self.torch.with_forward += u64::from(node.is_some_and(|n| !n.forward.is_none()));
        }
        // Ranges that the program named and readings of a device are not allocations and have no stack.
        if matches!(e.action, Action::Totals | Action::DeviceUsage) || e.source == Source::Label {
            return;
        }
        let kind = if e.stack.is_none() { 0 } else { kinds.get(e.stack.index()).copied().unwrap_or(UNDEFINED) };
        let place = match kind & (PYTHON | NATIVE) {
            PYTHON => &mut self.stacks.python,
            NATIVE => &mut self.stacks.native,
            0 if !e.context.is_none() && !definitions.nn_calls.contains_key(&e.context) => &mut self.stacks.autograd,
            0 => &mut self.stacks.none,
            _ => &mut self.stacks.merged,
        };
        *place += 1;
        self.stacks.truncated += u64::from(e.flags.contains(Flags::STACK_TRUNCATED));
        self.stacks.undefined += u64::from(kind & UNDEFINED != 0);
    }

    /// The number of events from this source.
    pub(super) fn from(&self, source: Source) -> u64 {
        self.sources.get(&source).copied().unwrap_or(0)
    }
}

/// The kinds of frames in each stack, by stack id. A parent has a smaller id than its children.
fn stack_kinds(definitions: &Definitions) -> Vec<u8> {
    let mut kinds = vec![0u8; definitions.stacks.len()];
    for (id, node) in definitions.stacks.iter().enumerate().skip(1) {
        let own = if definitions.native_frames.contains_key(&node.frame) {
            NATIVE
        } else if definitions.frame(node.frame).is_some() {
            PYTHON
        } else {
            UNDEFINED
        };
        let parents =
            if node.parent.is_none() { 0 } else { kinds.get(node.parent.index()).copied().unwrap_or(UNDEFINED) };
        if let Some(kind) = kinds.get_mut(id) {
            *kind = own | parents;
        }
    }
    kinds
}

/// The last notice of the recorder about this topic, apart from remarks. `None` when there is none.
pub(super) fn notice_status<'a>(trace: &'a Reader, topic: &str) -> Option<(NoticeStatus, &'a str)> {
    let notices = trace.definitions().notices.iter().rev();
    notices.filter(|n| n.status != NoticeStatus::Remark).find(|n| &*n.topic == topic).map(|n| (n.status, &*n.text))
}
