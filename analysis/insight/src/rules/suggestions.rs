//! What can lower a peak: each action, the condition under which it helps, and the formula for its saving.
//!
//! A formula takes figures of this run and returns bytes. It returns `None` if its condition does not hold; then no
//! report mentions the action.

use super::ids::RuleId;

/// The figures of the point in time to improve, usually the peak. All are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryFacts {
    /// Allocated.
    pub allocated: u64,
    /// Parameters and buffers.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer_state: u64,
    /// Buckets of DistributedDataParallel and similar wrappers.
    pub buckets: u64,
    /// Activations.
    pub activations: u64,
    /// Autograd temporaries: what backward nodes pass to each other.
    pub autograd_detail: u64,
    /// Input batches.
    pub inputs: u64,
    /// Temporaries of the optimizer phase that are allocated: what the optimizer's step works with and then frees.
    pub step_temporaries: u64,
    /// The largest of these temporaries.
    pub largest_step_temporary: u64,
    /// Whether the step processes all parameters at once (`_multi_tensor_*`).
    pub multi_tensor: bool,
    /// Whether the point in time is in the optimizer's step.
    pub in_optimizer: bool,
    /// Whether the point in time is in a forward or backward pass.
    pub in_model: bool,
    /// Whether the point in time is in a forward pass.
    pub in_forward: bool,
    /// Whether the parameters are known to be `float32`.
    pub float32_parameters: bool,
    /// Whether the optimizer keeps `float32` moments of each parameter.
    pub float32_moments: bool,
    /// The peak of all phases other than forward and backward; 0 if unknown.
    pub peak_outside_model: u64,
    /// The peak of all phases other than the optimizer's.
    pub peak_outside_optimizer: u64,
    /// The peak before the optimizer first allocated its state.
    pub peak_before_state: u64,
    /// Whether the run has a backward pass.
    pub trains: bool,
    /// Activations of sibling modules of one class that are not checkpointed, if there are at least two.
    pub layer_activations: u64,
    /// The part of `layer_activations` that each module passes to the next, if the recording shows it.
    pub layer_outputs: u64,
    /// The part of `layer_activations` of the module whose backward pass is running.
    pub running_layer: u64,
    /// The activations of the module that has the most.
    pub largest_layer: u64,
}

/// An action that can lower the peak.
#[derive(Debug)]
pub struct SuggestionRule {
    /// The stable id in reports.
    pub id: RuleId,
    /// What to do, in the program's terms. `{layers}` stands for the modules of [`MemoryFacts::layer_activations`].
    pub action: &'static str,
    /// When reports mention it.
    pub condition: &'static str,
    /// How its saving is computed.
    pub method: &'static str,
    /// Whether the saving is an upper bound, because the run does not show the exact value.
    pub at_most: bool,
    formula: fn(&MemoryFacts) -> Option<u64>,
}

impl SuggestionRule {
    /// The saving in bytes; `None` if the action does not apply or saves less than one part in `WORTH_DOING`.
    pub fn saves(&self, facts: &MemoryFacts) -> Option<u64> {
        (self.formula)(facts).filter(|bytes| *bytes > 0 && *bytes >= facts.allocated / WORTH_DOING)
    }
}

/// A saving below one part in this many of the allocated bytes is not worth changing a program.
const WORTH_DOING: u64 = 50;

/// The part of a saving that remains effective until the peak `elsewhere` becomes the new peak.
fn capped(facts: &MemoryFacts, saving: u64, elsewhere: u64) -> u64 {
    saving.min(facts.allocated.saturating_sub(elsewhere))
}

/// A saving below one part in this many of the allocated bytes is not worth computing every layer twice.
const WORTH_RECOMPUTING: u64 = 20;

fn checkpointing_saves(f: &MemoryFacts) -> Option<u64> {
    let freed = f.layer_activations.saturating_sub(f.layer_outputs).saturating_sub(f.running_layer);
    let beside = f.parameters + f.gradients + f.optimizer_state + f.buckets;
    let saving = capped(f, freed, f.peak_outside_model.max(beside + f.largest_layer));
    (saving >= f.allocated / WORTH_RECOMPUTING).then_some(saving)
}

static SUGGESTIONS: &[SuggestionRule] = &[
    SuggestionRule {
        id: RuleId::CheckpointLayers,
        action: "activation checkpointing (torch.utils.checkpoint) of {layers}",
        condition: "In forward or backward of a training run, at least two sibling modules of one class, not \
                    checkpointed, hold activations. Checkpointing them saves at least a twentieth of the allocated \
                    bytes.",
        method: "The activations of these modules, without those of the module whose backward pass is running. Their \
                 outputs stay, if the recording shows them. The saving ends at the highest peak outside forward and \
                 backward. It also ends where the largest of these modules, which is recomputed, fits beside \
                 parameters, gradients, optimizer state and buckets.",
        at_most: true,
        formula: |f| (f.in_model && f.trains).then(|| checkpointing_saves(f)).flatten(),
    },
    SuggestionRule {
        id: RuleId::CheckpointOrNoGrad,
        action: "activation checkpointing (torch.utils.checkpoint) of {layers}; torch.no_grad(), if this is not \
                 training",
        condition: "In a forward pass of a run without backward passes, at least two sibling modules of one class, not \
                    checkpointed, hold activations. Checkpointing them saves at least a twentieth of the allocated \
                    bytes.",
        method: "As for checkpoint-layers. Without gradients, the outputs of the modules do not stay either.",
        at_most: true,
        formula: |f| (f.in_forward && !f.trains).then(|| checkpointing_saves(f)).flatten(),
    },
    SuggestionRule {
        id: RuleId::SmallerBatches,
        action: "half the batch, gradients accumulated over two",
        condition: "In forward or backward, what grows with the batch (activations, autograd temporaries, inputs) is \
                    at least a tenth of the allocated bytes.",
        method: "Half of what grows with the batch. The saving ends at the highest peak outside forward and backward.",
        at_most: false,
        formula: |f| {
            let scales = f.activations + f.autograd_detail + f.inputs;
            let holds = f.in_model && f.trains && scales >= f.allocated / 10;
            holds.then(|| capped(f, scales / 2, f.peak_outside_model))
        },
    },
    SuggestionRule {
        id: RuleId::HalfTheBatch,
        action: "half the batch",
        condition: "In a forward pass of a run without backward passes, what grows with the batch (activations, \
                    inputs) is at least a tenth of the allocated bytes.",
        method: "Half of what grows with the batch. The saving ends at the highest peak outside forward.",
        at_most: false,
        formula: |f| {
            let scales = f.activations + f.inputs;
            let holds = f.in_forward && !f.trains && scales >= f.allocated / 10;
            holds.then(|| capped(f, scales / 2, f.peak_outside_model))
        },
    },
    SuggestionRule {
        id: RuleId::SingleTensorStep,
        action: "foreach=False for the optimizer: one parameter after the other",
        condition: "In an optimizer step that processes all parameters at once, temporaries of the step are allocated.",
        method: "These temporaries, without three of the largest. The saving ends at the highest peak outside the \
                 optimizer step.",
        at_most: false,
        formula: |f| {
            let saving = f.step_temporaries.saturating_sub(3 * f.largest_step_temporary);
            (f.in_optimizer && f.multi_tensor).then(|| capped(f, saving, f.peak_outside_optimizer))
        },
    },
    SuggestionRule {
        id: RuleId::GradientsInBuckets,
        action: "gradient_as_bucket_view=True for DistributedDataParallel",
        condition: "Buckets are allocated beside gradients of the same size. Gradients that are views of the buckets \
                    share their memory.",
        method: "The allocated gradients.",
        at_most: false,
        formula: |f| (f.buckets > 0 && f.gradients.abs_diff(f.buckets) <= f.buckets / 10).then_some(f.gradients),
    },
    SuggestionRule {
        id: RuleId::EightBitMoments,
        action: "8-bit moments (bitsandbytes, torchao)",
        condition: "The optimizer keeps float32 moments of each parameter. Its state is at least a tenth of the \
                    allocated bytes.",
        method: "Three quarters of the allocated optimizer state. The saving ends at the highest peak before the state \
                 was allocated.",
        at_most: false,
        formula: |f| {
            let holds = f.float32_moments && f.optimizer_state >= f.allocated / 10;
            holds.then(|| capped(f, f.optimizer_state / 4 * 3, f.peak_before_state))
        },
    },
    SuggestionRule {
        id: RuleId::Bfloat16Model,
        action: "parameters in bfloat16, and with them gradients and moments",
        condition: "Parameters are float32. With gradients and optimizer state they are at least a third of the \
                    allocated bytes.",
        method: "Half of the allocated parameters, gradients and optimizer state.",
        at_most: false,
        formula: |f| {
            let halved = f.parameters + f.gradients + f.optimizer_state;
            (f.float32_parameters && halved >= f.allocated / 3).then_some(halved / 2)
        },
    },
];

/// All suggestions.
pub fn suggestion_rules() -> &'static [SuggestionRule] {
    SUGGESTIONS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn savings(facts: &MemoryFacts) -> Vec<(RuleId, u64)> {
        suggestion_rules().iter().filter_map(|rule| Some((rule.id, rule.saves(facts)?))).collect()
    }

    #[test]
    fn no_suggestion_without_its_condition() {
        assert_eq!(savings(&MemoryFacts::default()), []);
        let unknown = MemoryFacts { allocated: 1000, parameters: 500, optimizer_state: 400, ..MemoryFacts::default() };
        assert_eq!(savings(&unknown), [], "the data type is unknown");
        let forward = MemoryFacts { allocated: 1000, activations: 20, in_model: true, ..MemoryFacts::default() };
        assert_eq!(savings(&forward), [], "too little");
    }

    #[test]
    fn a_saving_ends_at_the_highest_peak_of_other_phases() {
        let facts =
            MemoryFacts { allocated: 1000, activations: 800, in_model: true, trains: true, ..MemoryFacts::default() };
        assert_eq!(savings(&facts), [(RuleId::SmallerBatches, 400)]);
        let forward_only = MemoryFacts { trains: false, in_forward: true, ..facts };
        assert_eq!(savings(&forward_only), [(RuleId::HalfTheBatch, 400)], "nothing to accumulate");
        assert_eq!(savings(&MemoryFacts { peak_outside_model: 900, ..facts }), [(RuleId::SmallerBatches, 100)]);
        assert_eq!(savings(&MemoryFacts { peak_outside_model: 1000, ..facts }), []);
    }

    #[test]
    fn checkpointing_leaves_room_for_one_layer() {
        let facts = MemoryFacts {
            allocated: 1000,
            parameters: 100,
            in_model: true,
            trains: true,
            layer_activations: 800,
            layer_outputs: 80,
            largest_layer: 100,
            ..MemoryFacts::default()
        };
        assert_eq!(savings(&facts), [(RuleId::CheckpointLayers, 720)]);
        assert_eq!(savings(&MemoryFacts { running_layer: 100, ..facts }), [(RuleId::CheckpointLayers, 620)]);
        assert_eq!(savings(&MemoryFacts { largest_layer: 400, ..facts }), [(RuleId::CheckpointLayers, 500)]);
        assert_eq!(savings(&MemoryFacts { peak_outside_model: 950, ..facts }), [(RuleId::CheckpointLayers, 50)]);
        assert_eq!(savings(&MemoryFacts { peak_outside_model: 951, ..facts }), [], "less than a twentieth");
        let forward_only = MemoryFacts { trains: false, in_forward: true, ..facts };
        assert_eq!(savings(&forward_only), [(RuleId::CheckpointOrNoGrad, 720)]);
        assert_eq!(savings(&MemoryFacts { in_forward: false, ..forward_only }), []);
        assert_eq!(savings(&MemoryFacts { in_model: false, ..facts }), []);
    }

    #[test]
    fn buckets_beside_gradients_of_the_same_size() {
        let facts = MemoryFacts { allocated: 1000, gradients: 200, buckets: 201, ..MemoryFacts::default() };
        assert_eq!(savings(&facts), [(RuleId::GradientsInBuckets, 200)]);
        // Gradients that are views of the buckets are inside them. What remains beside the buckets is something else.
        assert_eq!(savings(&MemoryFacts { gradients: 40, ..facts }), []);
    }

    #[test]
    fn a_single_tensor_step_keeps_three_temporaries() {
        let facts = MemoryFacts {
            allocated: 1000,
            step_temporaries: 300,
            largest_step_temporary: 50,
            in_optimizer: true,
            multi_tensor: true,
            peak_outside_optimizer: 100,
            ..MemoryFacts::default()
        };
        assert_eq!(savings(&facts), [(RuleId::SingleTensorStep, 150)]);
        assert_eq!(savings(&MemoryFacts { multi_tensor: false, ..facts }), []);
    }
}
