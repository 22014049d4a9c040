//! Data that the program keeps on the device, and of which each step reads some rows: a data set, a replay buffer.
//!
//! No event shows which tensor an operation reads. Sizes do where two tensors have a row for each example: as many
//! rows of both are copied for a step, so the copies have the ratio of the tensors.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::StackId;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::DataToCpu,
    action: "keep the data of {place} on the CPU, and move the rows of each batch to the GPU; slower by their copies",
    condition: "Tensors made before the first step stay, and before the forward pass of at least two steps blocks are \
                allocated outside modules whose sizes have the ratio of two of these tensors, as copies of some rows \
                have. Rows that are views of the tensors (data[i:j]) show nothing.",
    method: "These tensors vanish. The copies of rows stay.",
    cost: Cost::Transfer,
    code: &[
        "data = data.cpu().pin_memory()  # {place}",
        r#"batch = data[index].to("cuda", non_blocking=True)  # in the loop"#,
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers",
    at_most: false,
    programs: &["replay_buffer"],
    find,
};

/// Two sizes of a ratio such as 1:2 can agree by chance: one of the sizes is at least this often the other.
const TELLING: u64 = 32;
/// The copied rows are at most 50 % (1/2) of the tensor.
const SOME_ROWS: u64 = 2;
/// So many steps copy rows in the same place.
const STEPS: usize = 2;

/// The indices of the tensors' blocks, the largest first.
#[derive(Debug)]
struct DataToCpu {
    data: Vec<u32>,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let recorded = &facts.recorded;
    let mut copies: BTreeMap<(StackId, u64), BTreeSet<u32>> = BTreeMap::new();
    for block in recorded.blocks.iter().filter(|block| is_batch(block)) {
        copies.entry((block.start.stack, block.requested())).or_default().insert(block.start.step);
    }
    let copied: BTreeSet<u64> =
        copies.into_iter().filter(|(_, steps)| steps.len() >= STEPS).map(|((_, bytes), _)| bytes).collect();
    let is_kept = |block: &BlockLifetime| {
        block.category == Category::KeptTensor && block.start.step == BEFORE_STEPS && block.includes(facts.peak_seq)
    };
    let kept = recorded.blocks.iter().enumerate().filter(|(_, block)| is_kept(block));
    let kept: Vec<(u32, u64)> = kept.map(|(index, block)| (index as u32, block.requested())).collect();
    let sizes: BTreeSet<u64> = kept.iter().map(|(_, bytes)| *bytes).collect();
    let is_read_by_rows = |bytes: &u64| {
        let of_rows = |rows: &&u64| **rows > 0 && **rows <= bytes / SOME_ROWS;
        copied.iter().filter(of_rows).any(|rows| copied.iter().any(|others| is_pair((*bytes, *rows), *others, &sizes)))
    };
    let read: BTreeSet<u64> = sizes.iter().copied().filter(is_read_by_rows).collect();
    let mut data: Vec<(u32, u64)> = kept.into_iter().filter(|(_, bytes)| read.contains(bytes)).collect();
    data.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let data: Vec<u32> = data.into_iter().map(|(index, _)| index).collect();
    if data.is_empty() { None } else { Some(Box::new(DataToCpu { data })) }
}

/// Whether the block can be a batch: made in a step by code outside modules before a module runs.
fn is_batch(block: &BlockLifetime) -> bool {
    block.start.step != BEFORE_STEPS && block.start.phase == Phase::Data && block.start.context.is_none()
}

/// Whether `others` bytes can be as many rows of another tensor as `rows` bytes are of one of `bytes`. `sizes` are
/// those of the tensors.
fn is_pair((bytes, rows): (u64, u64), others: u64, sizes: &BTreeSet<u64>) -> bool {
    let product = u128::from(bytes) * u128::from(others);
    let other = u64::try_from(product / u128::from(rows)).unwrap_or(0);
    let is_exact = product.is_multiple_of(u128::from(rows)) && sizes.contains(&other);
    is_exact && bytes.max(other) / bytes.min(other).max(1) >= TELLING
}

impl Change for DataToCpu {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        self.data.iter().for_each(|index| blocks.spans[*index as usize].vanish());
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase::Load, Phase::Data, Phase::Eval, Phase::Generate, Phase::Rollout, Phase::Optimizer, Phase::Other]
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let stack = |index: &u32| facts.recorded.blocks[*index as usize].start.stack;
        vec![("place", Value::Line(self.data.first().map_or(StackId::NONE, stack)))]
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::{MIB, NET, Program};

    /// Tensors of 800 and 8 MiB are kept. Two steps copy rows of them, for which modules compute.
    fn program(copies: &[u64], phase: Phase, module: ContextId) -> Program {
        let mut program = Program::default();
        for mib in [800, 8] {
            let kept = program.alloc(mib, Phase::Load, Category::KeptTensor, ContextId::NONE);
            program.blocks[kept].start.step = BEFORE_STEPS;
        }
        for step in 0..2 {
            program.step = step;
            let rows: Vec<usize> =
                copies.iter().map(|mib| program.alloc(*mib, phase, Category::Input, module)).collect();
            let result = program.activation(20, NET);
            program.free(result, ContextId::NONE);
            rows.into_iter().for_each(|block| program.free(block, ContextId::NONE));
        }
        program
    }

    #[test]
    fn tensors_whose_rows_are_copied_vanish_and_the_copies_stay() {
        let program = program(&[100, 1], Phase::Data, ContextId::NONE);
        assert_eq!(program.blocks[0].requested(), 800 * MIB);
        assert_eq!(program.peak(), 808 + 101 + 20);
        assert_eq!(program.peak_with(find), 101 + 20);
    }

    #[test]
    fn other_sizes_and_what_modules_computed_prove_nothing() {
        for program in [
            program(&[100, 2], Phase::Data, ContextId::NONE),
            program(&[100], Phase::Data, ContextId::NONE),
            program(&[800, 8], Phase::Data, ContextId::NONE),
            program(&[100, 1], Phase::Forward, ContextId::NONE),
            program(&[100, 1], Phase::Data, NET),
        ] {
            assert_eq!(program.peak_with(find), program.peak());
        }
    }
}
