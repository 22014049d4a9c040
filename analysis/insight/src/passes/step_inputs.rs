//! The bytes of the batch that each step loads.
//!
//! A recording has the sizes of inputs, and no shapes: PyTorch's allocator does not know them. The sizes tell which
//! batch was larger than others. Only `--holders` reads shapes.

use std::collections::{HashMap, HashSet};

use memtrace_trace::ids::StackId;

use super::category::{BlockAllocation, Category};
use super::pass::{BlockAllocated, LifetimeEnded, Pass};
use super::phase::{Phase, ProgramPosition};

/// The first steps whose inputs are known, eight bytes each. Of a program with more steps, nothing is reported.
const MAX_STEPS: usize = 1 << 16;
/// A median needs at least this many other steps.
const MIN_OTHERS: usize = 3;
/// At most this many inputs of the latest step are known one by one.
const MAX_INPUTS: usize = 64;
/// The maximum number of stacks that load inputs.
const MAX_STACKS: usize = 256;
/// A stack loads no inputs if the program keeps this many of its blocks for several steps: the newest of them are kept
/// as well, which only the steps after the end of the recording would show.
const KEPT_BLOCKS: u32 = 2;

/// The inputs of a step beside those of the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ComparedInputs {
    /// The requested bytes of the inputs that the step allocated.
    pub bytes: u64,
    /// The median of the other steps.
    pub median: u64,
}

/// Collects the inputs of each step of one device.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// By stack and step.
    by_stack: HashMap<StackId, Vec<u64>>,
    /// The number of blocks of each stack that outlived their step by several steps.
    kept: HashMap<StackId, u32>,
    /// By step: how many optimizer steps there had been when it began.
    began: Vec<u32>,
    /// The latest step with inputs, and the stack and `seq` of each of them.
    latest: (usize, Vec<(StackId, u64)>),
    /// There are more steps or stacks, blocks without a stack, or inputs on other streams. Code that uses another
    /// stream loads batches in advance.
    is_unknown: bool,
}

impl Pass for StepInputs {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        self.at(allocated.now);
    }

    #[inline]
    fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        self.classified(ended.block, ended.classification.category);
    }
}

impl StepInputs {
    /// Something is allocated at this position.
    #[inline]
    fn at(&mut self, now: &ProgramPosition) {
        let Some(step) = now.step else { return };
        if self.began.len() <= step as usize && self.began.len() < MAX_STEPS {
            self.began.resize((step as usize + 1).min(MAX_STEPS), now.optimizer_steps);
        }
    }

    /// The category of a block is known.
    #[inline]
    fn classified(&mut self, block: &BlockAllocation, category: Category) {
        // Without its stack, a block may be an input or not.
        let is_open = category == Category::Unknown && block.phase == Phase::Data;
        self.is_unknown |= is_open && block.is_of_snapshot_without_stack();
        let stack = block.site.stack;
        if category == Category::KeptTensor {
            *self.kept.entry(stack).or_default() += 1;
        }
        if category != Category::Input || !matches!(block.phase, Phase::Data | Phase::Forward) {
            return;
        }
        let Some(step) = block.position.step else { return };
        let step = step as usize;
        // Batches after the optimizer belong to an evaluation.
        if self.began.get(step).is_some_and(|began| block.position.optimizer_steps > *began) {
            return;
        }
        let is_full = self.by_stack.len() >= MAX_STACKS && !self.by_stack.contains_key(&stack);
        if step >= MAX_STEPS || is_full || block.memory.stream != 0 {
            self.is_unknown = true;
            return;
        }
        let by_step = self.by_stack.entry(stack).or_default();
        if by_step.len() <= step {
            by_step.resize(step + 1, 0);
        }
        by_step[step] += block.memory.requested;
        if step > self.latest.0 {
            self.latest = (step, Vec::new());
        }
        if step == self.latest.0 && self.latest.1.len() < MAX_INPUTS {
            self.latest.1.push((stack, block.seq));
        }
    }

    /// Whether blocks of this stack are batches, not what the program keeps. `growing` are the stacks that grow from
    /// step to step.
    fn is_batch(&self, stack: StackId, growing: &HashSet<StackId>) -> bool {
        !growing.contains(&stack) && self.kept.get(&stack).is_none_or(|kept| *kept < KEPT_BLOCKS)
    }

    /// `seq` of each input of a step. Empty for a step that is not the latest one.
    pub fn of_step(&self, step: u32, growing: &HashSet<StackId>) -> Vec<u64> {
        let inputs = self.latest.1.iter().filter(|_| step as usize == self.latest.0);
        inputs.filter(|(stack, _)| self.is_batch(*stack, growing)).map(|(_, seq)| *seq).collect()
    }

    /// The inputs of a step beside those of the others. `None` if too few steps have inputs.
    pub fn compare(&self, step: u32, growing: &HashSet<StackId>) -> Option<ComparedInputs> {
        let step = step as usize;
        let mut by_step: Vec<u64> = Vec::new();
        for (_, inputs) in self.by_stack.iter().filter(|(stack, _)| self.is_batch(**stack, growing)) {
            by_step.resize(by_step.len().max(inputs.len()), 0);
            by_step.iter_mut().zip(inputs).for_each(|(sum, bytes)| *sum += bytes);
        }
        let bytes = *by_step.get(step).filter(|bytes| **bytes > 0 && !self.is_unknown)?;
        // The program can load the first batch before the first step, and its last step can be incomplete.
        let others = by_step.iter().enumerate().filter(|(at, bytes)| *at != step && **bytes > 0);
        let mut others: Vec<u64> = others.map(|(_, bytes)| *bytes).collect();
        if others.len() < MIN_OTHERS {
            return None;
        }
        others.sort_unstable();
        Some(ComparedInputs { bytes, median: others[others.len() / 2] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(phase: Phase, step: usize, requested: u64) -> BlockAllocation {
        let mut block = BlockAllocation::for_tests(1);
        (block.phase, block.position.step, block.memory.requested) = (phase, Some(step as u32), requested);
        block
    }

    /// Loads batches of these sizes, one in each step.
    fn load(sizes: &[u64]) -> StepInputs {
        let mut inputs = StepInputs::default();
        for (step, requested) in sizes.iter().enumerate() {
            let batch = block(Phase::Data, step, *requested);
            inputs.at(&batch.position);
            inputs.classified(&batch, Category::Input);
            inputs.classified(&block(Phase::Data, step, *requested), Category::Activation);
            inputs.classified(&block(Phase::Eval, step, *requested), Category::Input);
            let mut of_evaluation = block(Phase::Data, step, *requested);
            of_evaluation.position.optimizer_steps += 1;
            inputs.classified(&of_evaluation, Category::Input);
        }
        inputs
    }

    #[test]
    fn a_step_is_compared_with_the_median_of_the_others() {
        let inputs = load(&[10, 12, 90, 11, 13, 0]);
        let none = &HashSet::new();
        assert_eq!(inputs.compare(2, none), Some(ComparedInputs { bytes: 90, median: 12 }));
        assert_eq!(inputs.compare(0, none), Some(ComparedInputs { bytes: 10, median: 13 }));
        assert_eq!((inputs.compare(5, none), inputs.compare(9, none)), (None, None), "steps without inputs");
        assert_eq!(load(&[10, 90, 10]).compare(1, none), None, "too few steps");
        assert_eq!(
            (inputs.of_step(5, none).len(), inputs.of_step(2, none).len()),
            (1, 0),
            "one by one in the latest step"
        );
    }

    #[test]
    fn inputs_that_are_loaded_in_advance_belong_to_no_step() {
        let mut inputs = load(&[10, 10, 10, 90, 10]);
        assert!(inputs.compare(3, &HashSet::new()).is_some());
        let mut ahead = block(Phase::Data, 3, 10);
        ahead.memory.stream = 7;
        inputs.classified(&ahead, Category::Input);
        assert_eq!(inputs.compare(3, &HashSet::new()), None);
    }

    #[test]
    fn blocks_that_the_program_keeps_are_no_inputs() {
        let loads_and_keeps = |kept: usize| {
            let mut inputs = load(&[10; 8]);
            for step in 0..8 {
                let mut stored = block(Phase::Data, step, 20);
                stored.site.stack = StackId(7);
                let category = if step < kept { Category::KeptTensor } else { Category::Input };
                inputs.classified(&stored, category);
            }
            inputs
        };
        let none = HashSet::new();
        let growing = HashSet::from([StackId(7)]);
        let inputs = |kept, growing| loads_and_keeps(kept).compare(7, growing).map(|inputs| inputs.bytes);
        assert_eq!((inputs(6, &none), inputs(1, &none), inputs(0, &growing)), (Some(10), Some(30), Some(10)));
        let latest = loads_and_keeps(6);
        assert_eq!((latest.of_step(7, &none).len(), loads_and_keeps(0).of_step(7, &none).len()), (1, 2));
    }
}
