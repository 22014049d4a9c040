//! Workspaces of cuBLAS. PyTorch allocates one per handle and stream and keeps it.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, Pass};
use crate::rules::RuleId;
use crate::units::size_text;

/// cuBLAS has many workspaces.
static CUBLAS_WORKSPACES: DiagnosticRule = DiagnosticRule {
    id: RuleId::CublasWorkspaces,
    meaning: "cuBLAS has a workspace for each pair of a handle and a stream, and the program uses many of them.",
    evidence: "At least four blocks of exactly the size of a cuBLAS workspace are allocated at once, on three streams \
               or more.",
    limits: "The rule misses workspaces of another size (CUBLAS_WORKSPACE_CONFIG). It counts other blocks of the same \
             size. PyTorch 2.15 keeps workspaces only with TORCH_CUBLAS_WORKSPACE_CACHE=1.",
    code: &[
        "# before the program starts: CUBLAS_WORKSPACE_CONFIG=:16:8",
        "side = torch.cuda.Stream()  # once, not in each step",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces",
    kept_by: KeptBy::Nothing,
};

/// The workspaces of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct CublasWorkspaces {
    /// The highest number of workspace-sized blocks at one point in time.
    peak: u64,
    /// Their bytes at that time.
    bytes: u64,
    /// By stream: the number of workspaces allocated on it.
    streams: BTreeMap<u64, u64>,
    /// The stacks that allocated any.
    stacks: BTreeSet<StackId>,
    /// The stack and context of the allocation that last raised the highest number.
    latest: (StackId, ContextId),
    current: u64,
    current_bytes: u64,
}

impl CublasWorkspaces {
    /// Whether there are so many that they are an issue.
    fn are_many(&self, device: &DeviceFacts<'_>) -> bool {
        self.peak >= 4 && self.streams.len() >= 3 && device.matters(self.bytes)
    }

    fn issue(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        if !self.are_many(device) {
            return None;
        }
        let one = self.bytes / self.peak;
        Some(Issue {
            headline: format!(
                "{} cuBLAS workspaces of {}, {} in all",
                self.peak,
                size_text(one),
                size_text(self.bytes)
            ),
            evidence: vec![format!(
                "on {} streams: PyTorch keeps one workspace per handle (thread) and stream for the life of the \
                 process; the location is that of the latest",
                self.streams.len()
            )],
            place: Some(self.latest),
            fix: "reuse a few streams and threads, or set CUBLAS_WORKSPACE_CONFIG=:16:8 for smaller workspaces"
                .to_owned(),
            saves: Some(self.bytes - one),
            ..device.issue(&CUBLAS_WORKSPACES, self.bytes)
        })
    }
}

impl Pass for CublasWorkspaces {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        if !allocated.mark.is(Mark::WORKSPACE) {
            return;
        }
        let block = allocated.block;
        self.current += 1;
        self.current_bytes += block.memory.size;
        self.stacks.insert(block.site.stack);
        *self.streams.entry(allocated.e.stream).or_default() += 1;
        if self.current > self.peak {
            (self.peak, self.bytes, self.latest) =
                (self.current, self.current_bytes, (block.site.stack, block.site.context));
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if freed.mark.is(Mark::WORKSPACE) {
            self.current = self.current.saturating_sub(1);
            self.current_bytes = self.current_bytes.saturating_sub(freed.block.memory.size);
        }
    }
}

impl Diagnostic for CublasWorkspaces {
    const RULES: &'static [&'static DiagnosticRule] = &[&CUBLAS_WORKSPACES];

    fn share(&self, device: &DeviceFacts<'_>, shared: &mut SharedFacts) {
        if self.are_many(device) {
            shared.workspace_stacks.clone_from(&self.stacks);
        }
    }

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(self.issue(device));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostics::test_program::TestProgram;

    /// The issues of a program that allocates a workspace on each of these streams, and frees it if `frees`.
    fn found(streams: &[u64], frees: bool) -> Vec<(&'static str, u64)> {
        let mut program = TestProgram::<CublasWorkspaces>::new();
        for stream in streams {
            program.e.stream = *stream;
            let workspace = program.allocate(32 << 20, Mark::WORKSPACE);
            if frees {
                program.free(&workspace, Mark::WORKSPACE);
            }
        }
        program.found()
    }

    #[test]
    fn many_workspaces_on_several_streams_are_an_issue() {
        assert_eq!(found(&[1, 2, 3, 4], false), [("cublas-workspaces", 128 << 20)]);
        assert_eq!(found(&[1, 2, 1, 2], false), [], "two streams");
        assert_eq!(found(&[1, 2, 3, 4], true), [], "one at a time");
    }
}
