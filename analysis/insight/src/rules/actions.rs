//! What can lower a peak: each action, the condition under which it helps, and the formula for its saving.
//!
//! A formula takes figures of this run and returns bytes. It returns `None` if its condition does not hold; then no
//! report mentions the action.

/// The figures of the point in time to improve, usually the peak. All are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MomentFacts {
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
    pub layer_here: u64,
    /// The activations of the module that has the most.
    pub largest_layer: u64,
}

/// An action that can lower the peak.
#[derive(Debug)]
pub struct ActionRule {
    /// The stable name in reports.
    pub name: &'static str,
    /// What to do, in the program's terms. `{layers}` stands for the modules of [`MomentFacts::layer_activations`].
    pub what: &'static str,
    /// When reports mention it.
    pub when: &'static str,
    /// How its saving is computed.
    pub saving: &'static str,
    /// Whether the saving is an upper bound, because the run does not show the exact value.
    pub at_most: bool,
    formula: fn(&MomentFacts) -> Option<u64>,
}

impl ActionRule {
    /// The saving in bytes; `None` if the action does not apply or saves less than one part in `WORTH_DOING`.
    pub fn saves(&self, facts: &MomentFacts) -> Option<u64> {
        (self.formula)(facts).filter(|bytes| *bytes > 0 && *bytes >= facts.allocated / WORTH_DOING)
    }
}

/// A saving below one part in this many of the allocated bytes is not worth changing a program.
const WORTH_DOING: u64 = 50;

/// The part of a saving that remains effective until the peak `elsewhere` becomes the new peak.
fn down_to(facts: &MomentFacts, saving: u64, elsewhere: u64) -> u64 {
    saving.min(facts.allocated.saturating_sub(elsewhere))
}

/// A saving below one part in this many of the allocated bytes is not worth computing every layer twice.
const WORTH_RECOMPUTING: u64 = 20;

fn checkpointing_saves(f: &MomentFacts) -> Option<u64> {
    let there = f.layer_activations.saturating_sub(f.layer_outputs).saturating_sub(f.layer_here);
    let beside = f.parameters + f.gradients + f.optimizer_state + f.buckets;
    let saving = down_to(f, there, f.peak_outside_model.max(beside + f.largest_layer));
    (saving >= f.allocated / WORTH_RECOMPUTING).then_some(saving)
}

static ACTIONS: &[ActionRule] = &[
    ActionRule {
        name: "checkpoint_layers",
        what: "activation checkpointing (torch.utils.checkpoint) of {layers}",
        when: "the moment is in forward or backward of a training, and two or more modules of one class, side by side and not checkpointed, have \
               activations of which a twentieth of the moment could go",
        saving: "these activations but for what each module hands to the next, where the recording tells, and those of the module whose \
                 backward the moment is in; down to the highest level outside forward and backward, and to the largest of these modules beside \
                 parameters, gradients, optimizer state and buckets, which its recomputation needs",
        at_most: true,
        formula: |f| (f.in_model && f.trains).then(|| checkpointing_saves(f)).flatten(),
    },
    ActionRule {
        name: "checkpoint_or_no_grad",
        what: "activation checkpointing (torch.utils.checkpoint) of {layers}; torch.no_grad(), if this is no training",
        when: "the moment is in a forward, no backward was seen in this run, and two or more modules of one class, side by side and not \
               checkpointed, keep activations of which a twentieth of the moment could go",
        saving: "as for checkpoint_layers; without gradients what each hands to the next goes, too",
        at_most: true,
        formula: |f| (f.in_forward && !f.trains).then(|| checkpointing_saves(f)).flatten(),
    },
    ActionRule {
        name: "smaller_batches",
        what: "half the batch, gradients accumulated over two",
        when: "the moment is in forward or backward, and what grows with the batch (activations, autograd's detail, inputs) is a tenth of it or more",
        saving: "half of that, down to the highest level outside forward and backward",
        at_most: false,
        formula: |f| {
            let scales = f.activations + f.autograd_detail + f.inputs;
            let holds = f.in_model && f.trains && scales >= f.allocated / 10;
            holds.then(|| down_to(f, scales / 2, f.peak_outside_model))
        },
    },
    ActionRule {
        name: "half_the_batch",
        what: "half the batch",
        when: "the moment is in a forward, no backward was seen in this run, and what grows with the batch (activations, inputs) is a tenth of it or \
               more",
        saving: "half of that, down to the highest level outside forward",
        at_most: false,
        formula: |f| {
            let scales = f.activations + f.inputs;
            let holds = f.in_forward && !f.trains && scales >= f.allocated / 10;
            holds.then(|| down_to(f, scales / 2, f.peak_outside_model))
        },
    },
    ActionRule {
        name: "single_tensor_step",
        what: "foreach=False for the optimizer: one parameter after the other",
        when: "the moment is in a step over all parameters at once, and its temporaries are alive",
        saving: "these temporaries but for three of the largest, down to the highest level outside the optimizer's step",
        at_most: false,
        formula: |f| {
            let saving = f.step_temporaries.saturating_sub(3 * f.largest_step_temporary);
            (f.in_optimizer && f.multi_tensor).then(|| down_to(f, saving, f.peak_outside_optimizer))
        },
    },
    ActionRule {
        name: "gradients_in_buckets",
        what: "gradient_as_bucket_view=True for DistributedDataParallel",
        when: "buckets are alive beside gradients that are as large (as views of them they would be the same memory)",
        saving: "the gradients there",
        at_most: false,
        formula: |f| (f.buckets > 0 && f.gradients.abs_diff(f.buckets) <= f.buckets / 10).then_some(f.gradients),
    },
    ActionRule {
        name: "eight_bit_moments",
        what: "8-bit moments (bitsandbytes, torchao)",
        when: "the optimizer keeps float32 moments of each parameter, a tenth of the moment or more",
        saving: "three quarters of the optimizer state there, down to the highest level before the state was made",
        at_most: false,
        formula: |f| {
            let holds = f.float32_moments && f.optimizer_state >= f.allocated / 10;
            holds.then(|| down_to(f, f.optimizer_state / 4 * 3, f.peak_before_state))
        },
    },
    ActionRule {
        name: "bfloat16_model",
        what: "parameters in bfloat16, and with them gradients and moments",
        when: "parameters are float32, and with gradients and optimizer state a third of the moment or more",
        saving: "half of parameters, gradients and optimizer state there",
        at_most: false,
        formula: |f| {
            let halved = f.parameters + f.gradients + f.optimizer_state;
            (f.float32_parameters && halved >= f.allocated / 3).then_some(halved / 2)
        },
    },
];

/// All actions.
pub fn action_rules() -> &'static [ActionRule] {
    ACTIONS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(facts: &MomentFacts) -> Vec<(&'static str, u64)> {
        action_rules().iter().filter_map(|rule| Some((rule.name, rule.saves(facts)?))).collect()
    }

    #[test]
    fn nothing_is_said_without_a_reason() {
        assert_eq!(said(&MomentFacts::default()), []);
        let unknown = MomentFacts { allocated: 1000, parameters: 500, optimizer_state: 400, ..MomentFacts::default() };
        assert_eq!(said(&unknown), [], "nobody knows that they are float32");
        let forward = MomentFacts { allocated: 1000, activations: 20, in_model: true, ..MomentFacts::default() };
        assert_eq!(said(&forward), [], "too little");
    }

    #[test]
    fn a_saving_ends_where_another_moment_becomes_the_peak() {
        let facts =
            MomentFacts { allocated: 1000, activations: 800, in_model: true, trains: true, ..MomentFacts::default() };
        assert_eq!(said(&facts), [("smaller_batches", 400)]);
        let only = MomentFacts { trains: false, in_forward: true, ..facts };
        assert_eq!(said(&only), [("half_the_batch", 400)], "nothing to accumulate");
        assert_eq!(said(&MomentFacts { peak_outside_model: 900, ..facts }), [("smaller_batches", 100)]);
        assert_eq!(said(&MomentFacts { peak_outside_model: 1000, ..facts }), []);
    }

    #[test]
    fn layers_are_checkpointed_down_to_what_one_needs() {
        let facts = MomentFacts {
            allocated: 1000,
            parameters: 100,
            in_model: true,
            trains: true,
            layer_activations: 800,
            layer_outputs: 80,
            largest_layer: 100,
            ..MomentFacts::default()
        };
        assert_eq!(said(&facts), [("checkpoint_layers", 720)]);
        assert_eq!(said(&MomentFacts { layer_here: 100, ..facts }), [("checkpoint_layers", 620)]);
        assert_eq!(said(&MomentFacts { largest_layer: 400, ..facts }), [("checkpoint_layers", 500)]);
        assert_eq!(said(&MomentFacts { peak_outside_model: 950, ..facts }), [("checkpoint_layers", 50)]);
        assert_eq!(said(&MomentFacts { peak_outside_model: 951, ..facts }), [], "less than a twentieth");
        let first = MomentFacts { trains: false, in_forward: true, ..facts };
        assert_eq!(said(&first), [("checkpoint_or_no_grad", 720)]);
        assert_eq!(said(&MomentFacts { in_forward: false, ..first }), []);
        assert_eq!(said(&MomentFacts { in_model: false, ..facts }), []);
    }

    #[test]
    fn buckets_beside_gradients_of_their_size() {
        let facts = MomentFacts { allocated: 1000, gradients: 200, buckets: 201, ..MomentFacts::default() };
        assert_eq!(said(&facts), [("gradients_in_buckets", 200)]);
        // Gradients that are views of the buckets are inside them. What remains beside the buckets is something else.
        assert_eq!(said(&MomentFacts { gradients: 40, ..facts }), []);
    }

    #[test]
    fn temporaries_of_the_step_but_for_those_of_one_parameter() {
        let facts = MomentFacts {
            allocated: 1000,
            step_temporaries: 300,
            largest_step_temporary: 50,
            in_optimizer: true,
            multi_tensor: true,
            peak_outside_optimizer: 100,
            ..MomentFacts::default()
        };
        assert_eq!(said(&facts), [("single_tensor_step", 150)]);
        assert_eq!(said(&MomentFacts { multi_tensor: false, ..facts }), []);
    }
}
