//! The facts from which diagnostics find issues.

use std::collections::{BTreeSet, HashMap};

use memtrace_trace::ids::{ContextId, StackId};

use super::graphs::unconsumed::GraphFacts;
use super::issue::Issue;
use super::rule::DiagnosticRule;
use crate::locations::Locations;
use crate::passes::composition::Composition;
use crate::passes::device_memory::DeviceMemory;
use crate::passes::growth::Growth;
use crate::passes::oom::OomLog;
use crate::passes::pass::{BlockAllocated, Pass};
use crate::passes::phase::Phase;
use crate::passes::phase_table::PhaseTable;
use crate::passes::serving::Serving;
use crate::passes::stacks::StackTable;
use crate::units::size_text;
use memtrace_input::EventSource;
use memtrace_replay::{Names, Peak, ReferenceCycle};

/// The minimum size of an issue in bytes.
pub(super) const MIN_BYTES: u64 = 1 << 20;
/// The minimum size of an issue: 2 % (1/50) of the peak.
const MIN_SHARE: u64 = 50;
/// The minimum size of an issue about reserved memory: 1 % (1/100) of the memory that PyTorch can have.
const MIN_PART_OF_DEVICE: u64 = 100;
/// The number of segments can be large. They are measured again only when free memory exceeds the last maximum by this
/// factor, in hundredths.
pub(super) const MIN_INCREASE: u64 = 105;
/// The maximum number of lines listed for one issue.
pub(super) const MAX_LINES: usize = 3;

/// The source of an allocation: its stack, and the autograd node or other context.
pub(super) type Site = (StackId, ContextId);

/// The inputs for finding the issues of a process.
pub struct IssueInputs<'a> {
    /// Formats stacks.
    pub locations: &'a Locations<'a>,
    /// The facts about stacks.
    pub table: &'a StackTable,
    /// The duration of a clock tick.
    pub ns_per_tick: f64,
    /// The tensor names.
    pub names: &'a Names,
    /// The reference cycles that `memtrace --cycles` recorded.
    pub cycles: &'a [ReferenceCycle],
}

/// A device whose issues are to be found: the results of other passes for it.
pub(crate) struct DeviceFacts<'a> {
    pub(crate) inputs: &'a IssueInputs<'a>,
    /// The device ordinal; -1 for the CPU.
    pub(crate) ordinal: i16,
    pub(crate) source: EventSource,
    /// The blocks that were allocated at the peak of allocated bytes.
    pub(crate) peak: &'a Composition,
    /// The highest totals, each at its own point in time.
    pub(crate) peaks: &'a Peak,
    pub(crate) table: &'a PhaseTable,
    pub(crate) growth: &'a Growth,
    pub(crate) ooms: &'a OomLog,
    /// The stages of an engine; `None` in a program that trains.
    pub(crate) serving: Option<&'a Serving>,
    /// Whether the process computes on the device.
    pub(crate) computes: bool,
    /// Another GPU on which the process computes.
    pub(crate) computes_elsewhere: Option<i16>,
    /// The memory that there is.
    pub(crate) capacity: DeviceCapacity<'a>,
}

/// The memory of a device.
#[derive(Clone, Copy, Default)]
pub(crate) struct DeviceCapacity<'a> {
    /// The memory that the caching allocator can have on the device, in bytes; `None` if it is unknown.
    pub(crate) limit: Option<u64>,
    /// The memory of the device as its readings show it; `None` without one.
    pub(crate) readings: Option<&'a DeviceMemory>,
}

impl DeviceFacts<'_> {
    /// The highest number of allocated bytes.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak.usage.allocated
    }

    /// Whether this many bytes are worth an issue.
    pub(super) fn matters(&self, bytes: u64) -> bool {
        bytes >= MIN_BYTES && bytes.saturating_mul(MIN_SHARE) >= self.peak_bytes()
    }

    /// Whether reserved bytes that serve no request are worth an issue: all if a request `failed`, else 1 % of the
    /// memory that PyTorch can have. With less, no larger model or batch fits if they are avoided.
    pub(super) fn matters_for_device(&self, bytes: u64, failed: bool) -> bool {
        let limit = self.capacity.limit.filter(|_| !failed);
        limit.is_none_or(|limit| bytes.saturating_mul(MIN_PART_OF_DEVICE) >= limit)
    }

    /// Whether the peak is at or after the event with `seq` `from`, so that a block allocated there and kept counts for
    /// it.
    pub(super) fn at_peak(&self, from: u64) -> bool {
        self.peak.seq >= from
    }

    /// An issue of this device without texts.
    pub(super) fn issue(&self, rule: &'static DiagnosticRule, bytes: u64) -> Issue {
        Issue {
            rule,
            device: self.ordinal,
            bytes,
            headline: String::new(),
            evidence: Vec::new(),
            place: None,
            sites: Vec::new(),
            fix: String::new(),
            saves: None,
            suggestion: None,
            forecast: None,
            files: Vec::new(),
        }
    }

    /// The location of a site, as evidence names it.
    pub(super) fn line(&self, (stack, context): Site) -> String {
        let location = self.inputs.locations.stack(stack, context).location;
        if location.is_empty() { "an unknown location".to_owned() } else { location }
    }

    /// Formats bytes times clock ticks as `3.20 GiB·s`.
    pub(super) fn gib_seconds(&self, byte_ticks: u128) -> String {
        let seconds = byte_ticks as f64 * self.inputs.ns_per_tick / 1e9;
        format!("{}·s", size_text(seconds as u64))
    }
}

/// Finds out whether the process computes on the device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Computing {
    is_proven: bool,
}

impl Computing {
    pub(super) fn computes(&self) -> bool {
        self.is_proven
    }
}

impl Pass for Computing {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let phase = allocated.block.phase;
        let computes = matches!(phase, Phase::Forward | Phase::Backward | Phase::Optimizer | Phase::Recompute);
        self.is_proven |= computes || phase.is_forward_only();
    }
}

/// The facts that the diagnostics of a device share.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedFacts {
    pub(super) graphs: GraphFacts,
    /// The places where the program calls a model and a backward pass followed.
    pub(super) consumed_calls: BTreeSet<StackId>,
    /// The highest number of gradient bytes at an optimizer's step.
    pub(super) gradient_bytes: u64,
    /// The stacks that allocate cuBLAS workspaces, if these are an issue.
    pub(super) workspace_stacks: BTreeSet<StackId>,
    /// The bytes that the garbage collector freed of each source, before the program's end.
    pub(super) collected: HashMap<(StackId, ContextId), u64>,
}
