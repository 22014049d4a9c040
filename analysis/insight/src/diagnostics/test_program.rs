//! Runs the events of a test program through one diagnostic.

use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::StackId;

use super::device_facts::{DeviceCapacity, DeviceFacts, IssueInputs, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use crate::locations::Locations;
use crate::passes::category::BlockAllocation;
use crate::passes::composition::Composition;
use crate::passes::growth::Growth;
use crate::passes::mark::Mark;
use crate::passes::oom::OomLog;
use crate::passes::pass::{BlockAllocated, BlockFreed};
use crate::passes::phase::{EventClassification, Phase, ProgramPosition};
use crate::passes::phase_table::PhaseTable;
use crate::passes::stacks::{StackFacts, StackTable};
use crate::rules::PhaseRuleId;
use memtrace_input::EventSource;
use memtrace_replay::{Allocator, BlockId, Names, PhysicalMemory, Usage};

/// A program on one device. Tests change the event, the phase and the position as they need, and then allocate or free.
pub(super) struct TestProgram<D> {
    pub(super) diagnostic: D,
    pub(super) e: Event,
    pub(super) phase: Phase,
    pub(super) rule: PhaseRuleId,
    pub(super) now: ProgramPosition,
    /// Whether the process computes on the device.
    pub(super) computes: bool,
    usage: Usage,
    peak: Usage,
}

impl<D: Diagnostic> TestProgram<D> {
    pub(super) fn new() -> TestProgram<D> {
        TestProgram {
            diagnostic: D::default(),
            e: Event::EMPTY,
            phase: Phase::Forward,
            rule: PhaseRuleId::NoPhaseRule,
            now: BlockAllocation::for_tests(0).position,
            computes: true,
            usage: Usage::default(),
            peak: Usage::default(),
        }
    }

    /// Allocates a block with these bits of a [`Mark`].
    pub(super) fn allocate(&mut self, size: u64, bits: u8) -> BlockAllocation {
        self.e.seq += 1;
        let mut block = BlockAllocation::of_forward(self.e.seq, size, StackId(1), self.now);
        block.phase = self.phase;
        self.usage.allocated += size;
        self.usage.active += size;
        if self.usage.allocated > self.peak.allocated {
            self.peak = self.usage;
        }
        self.diagnostic.allocated(&BlockAllocated {
            e: &self.e,
            id: BlockId::for_tests(block.seq as u32),
            block: &block,
            mark: Mark { bits, ..Mark::default() },
            classification: &EventClassification::for_tests(self.phase, self.rule),
            now: &self.now,
            usage: &self.usage,
            allocator: &Allocator::default(),
            physical: &PhysicalMemory::default(),
            is_earlier: false,
            micro_batches: 0,
        });
        block
    }

    /// Frees a block that was allocated with these bits of a [`Mark`].
    pub(super) fn free(&mut self, block: &BlockAllocation, bits: u8) {
        self.e.seq += 1;
        self.usage.allocated -= block.memory.size;
        self.usage.active -= block.memory.size;
        self.diagnostic.freed(&BlockFreed {
            e: &self.e,
            id: BlockId::for_tests(block.seq as u32),
            block,
            mark: Mark { bits, ..Mark::default() },
            classification: &EventClassification::for_tests(self.phase, self.rule),
            facts: &StackFacts::default(),
            now: &self.now,
            usage: &self.usage,
            is_truncated: false,
            may_be_teardown: false,
        });
    }

    /// The issues if other diagnostics share these facts.
    pub(super) fn issues(&self, shared: &SharedFacts) -> Vec<Issue> {
        let definitions = Definitions::default();
        let inputs = IssueInputs {
            locations: &Locations::new(&definitions, None),
            table: &StackTable::new(&definitions),
            ns_per_tick: 1.0,
            names: &Names::default(),
            cycles: &[],
        };
        let mut peak = Composition::default();
        peak.restart(&self.e, self.now, self.phase, self.peak);
        let device = DeviceFacts {
            inputs: &inputs,
            ordinal: 0,
            source: EventSource::Torch,
            peak: &peak,
            peaks: &self.peak,
            table: &PhaseTable::default(),
            growth: &Growth::default(),
            ooms: &OomLog::default(),
            serving: None,
            computes: self.computes,
            computes_elsewhere: (!self.computes).then_some(1),
            capacity: DeviceCapacity::default(),
        };
        let mut issues = Vec::new();
        self.diagnostic.issues(&device, shared, &mut issues);
        issues
    }

    /// The bytes of the issues, with the rules' ids.
    pub(super) fn found(&self) -> Vec<(&'static str, u64)> {
        self.issues(&SharedFacts::default()).iter().map(|issue| (issue.rule.id.as_str(), issue.bytes)).collect()
    }
}
