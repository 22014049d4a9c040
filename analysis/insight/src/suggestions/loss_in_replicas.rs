//! The loss inside the module that `nn.DataParallel` wraps. Outside of it, the results of all devices are gathered on
//! the first one, and the loss is computed there.

use memtrace_trace::ids::StackId;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::{RuleId, is_data_parallel_gather};

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::LossInReplicas,
    action: "compute the loss inside the module that nn.DataParallel wraps: {place} gathers the results of {count} \
             GPUs on this one",
    condition: "nn.DataParallel gathers results that are at least a twentieth of the peak.",
    method: "The gathered results vanish. What code outside modules allocates from them, forward and backward, is \
             divided by the number of devices.",
    cost: Cost::Free,
    code: &[
        "class WithLoss(nn.Module):  # {place}",
        "    def __init__(self, model):",
        "        super().__init__()",
        "        self.model = model",
        "    def forward(self, inputs, labels):",
        "        return F.cross_entropy(self.model(inputs), labels).unsqueeze(0)",
        "loss = nn.DataParallel(WithLoss(model))(inputs, labels).mean()",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html",
    at_most: false,
    programs: &["parallel"],
    find,
};

/// Gathered results are worth a change if they are at least 5 % (1/20) of the peak.
const WORTH_CHANGING: u64 = 20;
/// The maximum number of devices of a host.
const MAX_DEVICES: u64 = 16;
/// The devices' parts of a batch differ by at most 12.5 % (1/8).
const UNEVEN: u64 = 8;

#[derive(Debug)]
struct LossInReplicas {
    devices: u64,
    /// The indices of the gathered results.
    gathered: Vec<u32>,
    /// The indices of what is computed from them.
    computed: Vec<u32>,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let recorded = &facts.recorded;
    let blocks = || recorded.blocks.iter().enumerate().map(|(index, block)| (index as u32, block));
    let gathers = |block: &BlockLifetime| {
        block.start.phase == Phase::Forward
            && block.size() >= facts.peak / WORTH_CHANGING
            && has_gather(recorded, block.start.stack)
    };
    let gathered: Vec<u32> = blocks().filter(|(_, block)| gathers(block)).map(|(index, _)| index).collect();
    let first = &recorded.blocks[*gathered.first()? as usize];
    let devices = devices(recorded, first)?;
    // Results of all devices in some data type, and never the part of one device.
    let sizes = [first.requested() / 2, first.requested(), first.requested() * 2];
    let is_outside = |block: &BlockLifetime| recorded.contexts().module(block.start.context).is_none();
    let is_computed = |index: u32, block: &BlockLifetime| {
        matches!(block.start.phase, Phase::Forward | Phase::Backward)
            && matches!(block.category, Category::Activation | Category::Temporary | Category::AutogradDetail)
            && block.allocated > first.allocated
            && is_outside(block)
            && sizes.contains(&block.requested())
            && !gathered.contains(&index)
    };
    let computed = blocks().filter(|(index, block)| is_computed(*index, block)).map(|(index, _)| index).collect();
    Some(Box::new(LossInReplicas { devices, gathered, computed }))
}

impl Change for LossInReplicas {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Operations
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        self.gathered.iter().for_each(|index| blocks.spans[*index as usize].vanish());
        for index in &self.computed {
            let span = &mut blocks.spans[*index as usize];
            span.requested = span.requested.div_ceil(self.devices);
        }
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        other == RuleId::ChunkedCrossEntropy
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let first = self.gathered.first().map(|index| facts.recorded.blocks[*index as usize].start.stack);
        let place = Value::Line(first.unwrap_or(StackId::NONE));
        vec![("place", place), ("count", Value::Text(self.devices.to_string()))]
    }
}

fn has_gather(recorded: &Recorded<'_>, stack: StackId) -> bool {
    recorded.definitions.walk(stack).any(|(_, frame)| frame.is_some_and(is_data_parallel_gather))
}

/// The number of devices whose results are gathered: how often this device's own result fits into them.
fn devices(recorded: &Recorded<'_>, gathered: &BlockLifetime) -> Option<u64> {
    let mut before = recorded.blocks.iter().filter(|block| {
        block.allocated < gathered.allocated
            && block.freed > gathered.allocated
            && block.start.step == gathered.start.step
            && block.start.phase == Phase::Forward
    });
    let last = before.rfind(|block| block.size() * MAX_DEVICES * 2 >= gathered.size())?;
    let devices = (gathered.requested() + last.requested() / 2) / last.requested().max(1);
    let is_even = (devices * last.requested()).abs_diff(gathered.requested()) <= gathered.requested() / UNEVEN;
    (is_even && (2..=MAX_DEVICES).contains(&devices)).then_some(devices)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::{GATHER, NET, NODE_OF_FIRST, Program};

    #[test]
    fn gathered_results_vanish_and_the_loss_is_divided() {
        let mut program = Program::default();
        let own = program.activation(100, NET);
        let gathered = program.activation(200, ContextId::NONE);
        program.blocks[gathered].start.stack = GATHER;
        let softmax = program.activation(200, ContextId::NONE);
        program.passes += 1;
        let gradient = program.alloc(200, Phase::Backward, Category::AutogradDetail, ContextId::NONE);
        for block in [softmax, gathered, own] {
            program.free(block, NODE_OF_FIRST);
        }
        program.free(gradient, NODE_OF_FIRST);
        assert_eq!(program.peak(), 700);
        assert_eq!(program.peak_with(find), 100 + 100 + 100);
    }
}
