//! Blocks that only CPython's cyclic garbage collector freed: memory that unreachable reference cycles held.

use std::collections::HashMap;

use memtrace_trace::event::Flags;
use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, MAX_LINES, SharedFacts};
use super::diagnostic::Diagnostic;
use super::growing::is_in_function;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::category::BlockAllocation;
use crate::passes::pass::{BlockAllocated, BlockFreed, Pass};
use crate::rules::RuleId;
use crate::units::{number_text, size_text};
use memtrace_replay::ReferenceCycle;

/// Reference cycles held memory until the garbage collector ran.
static REFERENCE_CYCLE: DiagnosticRule = DiagnosticRule {
    id: RuleId::ReferenceCycle,
    meaning: "Python objects that refer to each other hold tensors until CPython's garbage collector runs.",
    evidence: "CPython's cyclic garbage collector frees the blocks, before the program's end.",
    limits: "The rule does not know when the blocks became garbage. It knows the objects of a cycle only with \
             `memtrace --cycles`.",
    code: &[
        "child.parent = weakref.ref(parent)  # not: child.parent = parent",
        "del traceback, error                # a stored exception holds the frames and their tensors",
    ],
    link: "https://docs.python.org/3/library/weakref.html",
    kept_by: KeptBy::Nothing,
};

/// The fix for a result that is stored on `ctx`.
const SAVE_FOR_BACKWARD: &str = "a result that an autograd.Function stores on ctx (ctx.y = y) makes a cycle through \
     C++, which only the garbage collector breaks: ctx.save_for_backward(y)";

/// The blocks of one source that the collector freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct CollectedBlocks {
    /// The number of bytes.
    bytes: u64,
    /// The number of blocks.
    blocks: u64,
    /// The highest number of bytes in one collection.
    largest_collection: u64,
    /// The sum over the blocks of bytes times clock ticks from allocation to collection. When a block became garbage in
    /// between is unknown.
    byte_ticks: u128,
    /// The number of the latest collection that freed any, and the bytes that it freed.
    collection: u64,
    collection_bytes: u64,
}

/// The blocks that the collector freed on one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReferenceCycles {
    by_source: HashMap<(StackId, ContextId), CollectedBlocks>,
    /// The blocks that the collection since the latest allocation freed, and when.
    pending: Vec<(BlockAllocation, u64)>,
    /// The number of collections that freed device memory.
    collections: u64,
    /// The highest number of bytes in one collection.
    largest_collection: u64,
}

impl ReferenceCycles {
    fn count_collection(&mut self) {
        self.collections += 1;
        let mut sum = 0;
        for (block, ticks) in self.pending.drain(..) {
            let collected = self.by_source.entry((block.site.stack, block.site.context)).or_default();
            if collected.collection != self.collections {
                (collected.collection, collected.collection_bytes) = (self.collections, 0);
            }
            collected.bytes += block.memory.size;
            collected.blocks += 1;
            collected.collection_bytes += block.memory.size;
            collected.largest_collection = collected.largest_collection.max(collected.collection_bytes);
            collected.byte_ticks += u128::from(block.memory.size) * u128::from(ticks.saturating_sub(block.ticks));
            sum += block.memory.size;
        }
        self.largest_collection = self.largest_collection.max(sum);
    }

    /// The freed blocks by source, largest collection first.
    fn collected(&self) -> Vec<((StackId, ContextId), CollectedBlocks)> {
        let mut all: Vec<_> = self.by_source.iter().map(|(source, c)| (*source, *c)).collect();
        all.sort_by_key(|(source, c)| (std::cmp::Reverse((c.largest_collection, c.bytes)), *source));
        all
    }

    fn issue(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        let collected = self.collected();
        let (source, _) = collected.first()?;
        if !device.matters(self.largest_collection) {
            return None;
        }
        let mut evidence = vec![format!(
            "{} freed {} in {}",
            number_text(self.collections, "collection"),
            size_text(collected.iter().map(|(_, c)| c.bytes).sum()),
            number_text(collected.iter().map(|(_, c)| c.blocks).sum(), "block")
        )];
        for (site, c) in collected.iter().take(MAX_LINES) {
            let seconds = device.gib_seconds(c.byte_ticks);
            evidence.push(format!(
                "{} in {}, {seconds} from allocation to collection: {}",
                size_text(c.bytes),
                number_text(c.blocks, "block"),
                device.line(*site)
            ));
        }
        // The cycles of the sources named in the evidence come first, in the same order.
        let rank = |held: &ReferenceCycle| {
            let (ordinal, stack, context) = held.allocation?;
            let position = collected.iter().position(|(of, _)| *of == (stack, context))?;
            (ordinal == device.ordinal).then_some(position)
        };
        let mut cycles: Vec<_> = device.inputs.cycles.iter().filter_map(|held| Some((rank(held)?, held))).collect();
        cycles.sort_by_key(|(rank, _)| *rank);
        let mut files: Vec<String> = Vec::new();
        let mut shown_texts: Vec<&str> = Vec::new();
        for (_, ReferenceCycle { file, text, .. }) in cycles {
            if !shown_texts.contains(&&**text) {
                if shown_texts.len() < MAX_LINES {
                    let shown = if file.is_empty() { String::new() } else { format!("{file}: ") };
                    evidence.push(format!("objects of the cycle: {shown}{text}"));
                }
                shown_texts.push(text);
            }
            if !file.is_empty() && !files.iter().any(|known| **known == **file) {
                files.push(file.to_string());
            }
        }
        let is_on_context = is_in_function(device.inputs.locations.definitions(), source.0);
        let fix = "break the cycle (weakref, del, no frame or exception in a local variable)";
        let how = match files.first() {
            Some(file) => format!("; {file} shows its objects"),
            None if shown_texts.is_empty() => "; memtrace --cycles shows its objects".to_owned(),
            None => String::new(),
        };
        Some(Issue {
            headline: format!("{} were freed only by the garbage collector", size_text(self.largest_collection)),
            evidence,
            place: Some(*source),
            fix: if is_on_context { SAVE_FOR_BACKWARD.to_owned() } else { format!("{fix}{how}") },
            files,
            ..device.issue(&REFERENCE_CYCLE, self.largest_collection)
        })
    }
}

impl Pass for ReferenceCycles {
    /// Counts the collection before the allocation. A collection without an allocation after it belongs to the
    /// program's end.
    #[inline]
    fn allocated(&mut self, _: &BlockAllocated<'_>) {
        if !self.pending.is_empty() {
            self.count_collection();
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if freed.e.flags.contains(Flags::IN_GC) {
            self.pending.push((*freed.block, freed.e.ticks));
        }
    }
}

impl Diagnostic for ReferenceCycles {
    const RULES: &'static [&'static DiagnosticRule] = &[&REFERENCE_CYCLE];

    fn share(&self, _: &DeviceFacts<'_>, shared: &mut SharedFacts) {
        shared.collected = self.by_source.iter().map(|(source, collected)| (*source, collected.bytes)).collect();
    }

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        let issue = self.issue(device);
        // A leak of the same blocks has this fix too.
        let is_known =
            |issue: &Issue| issue.fix == SAVE_FOR_BACKWARD && issues.iter().any(|other| other.place == issue.place);
        issues.extend(issue.filter(|issue| !is_known(issue)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostics::test_program::TestProgram;

    /// The issues of a program that frees a block in this way, and then allocates another one if `goes_on`.
    fn found(flags: Flags, goes_on: bool) -> Vec<(&'static str, u64)> {
        let mut program = TestProgram::<ReferenceCycles>::new();
        let block = program.allocate(8 << 20, 0);
        program.e.flags = flags;
        program.free(&block, 0);
        program.e.flags = Flags::default();
        if goes_on {
            program.allocate(512, 0);
        }
        program.found()
    }

    #[test]
    fn blocks_that_the_collector_frees_are_reported() {
        assert_eq!(found(Flags::IN_GC, true), [("reference-cycle", 8 << 20)]);
        assert_eq!(found(Flags::IN_GC, false), [], "at the end of the program");
        assert_eq!(found(Flags::default(), true), [], "freed by the program");
    }
}
