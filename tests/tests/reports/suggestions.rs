//! Suggestions are right: the program with the suggested change has the announced peak.
//!
//! `docs/dev/suggestions/tables.md` has the table of all programs; `scripts/bench suggestions` makes it.

use memtrace_analysis::rules::RuleId;
use memtrace_analysis::suggestions::suggestion_rules;
use memtrace_tests::suggestions::{Changed, Outcome, measure, measure_code, programs};
use memtrace_tests::traced_program::root;

/// No announced peak may be further from the measured one, in percent of the measured one.
const MAXIMUM_ERROR: f64 = 10.0;
/// The outcomes that are not as announced: an error above the maximum, a change that does not lower the peak, or a
/// wrong answer whether the program fits.
fn wrong(outcomes: &[Outcome]) -> Vec<&Outcome> {
    let is_far = |outcome: &Outcome| outcome.error_percent().is_some_and(|error| error > MAXIMUM_ERROR);
    outcomes.iter().filter(|o| is_far(o) || o.is_useless() || o.is_wrong_about_fit()).collect()
}

/// The program's suggestions include those of `rules`, can all be done, and announce what happens.
#[track_caller]
fn are_right(program: &str, rules: &[&str]) {
    let outcomes = measure(program, None);
    for rule in rules {
        let suggested = outcomes.iter().any(|o| o.rule == *rule && matches!(o.changed, Changed::Peak(_)));
        assert!(suggested, "{program}: no {rule} in {outcomes:#?}");
    }
    let wrong = wrong(&outcomes);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_code_of_checkpointing_reaches_the_announced_peak() {
    for name in ["decoder", "resnet", "sharded"] {
        let (announced, measured) = measure_code(name, "checkpoint-layers");
        assert!(announced.abs_diff(measured) <= measured / 20, "{name}: {announced} announced, {measured} measured");
    }
}

#[test]
fn of_a_large_optimizer_state() {
    are_right("wide", &["eight-bit-moments"]);
}

#[test]
fn of_a_model_that_is_converted_after_it_was_built() {
    are_right("halved", &["final-data-type"]);
}

#[test]
fn of_a_model_whose_parameters_are_replaced() {
    are_right("assigned", &["build-on-meta"]);
}

#[test]
fn of_results_that_are_joined() {
    are_right("joined", &["results-to-cpu"]);
}

/// Each rule names programs that exist, and the programs know its change.
#[test]
fn have_a_program_each() {
    let names: Vec<String> = programs().into_iter().map(|(name, _)| name).collect();
    let changes = std::fs::read_to_string(root().join("tests/programs/suggestions/changes.py")).expect("changes.py");
    for rule in suggestion_rules() {
        assert!(!rule.programs.is_empty(), "{} has no program", rule.id);
        for program in rule.programs {
            assert!(names.iter().any(|name| name == program), "{}: there is no program {program}", rule.id);
        }
        let is_known = rule.id == RuleId::CombinedChanges || changes.contains(&format!("    \"{}\": ", rule.id));
        assert!(is_known, "changes.py has no change for {}", rule.id);
    }
}

mod exhaustive {
    use memtrace_tests::parallel::{cores, in_parallel};

    use super::*;

    /// The median error may not be larger, in percent.
    const MEDIAN_ERROR: f64 = 2.0;

    #[test]
    fn of_a_decoder() {
        are_right("decoder", &["checkpoint-layers", "smaller-batches", "scaled-dot-product-attention", "autocast"]);
    }

    #[test]
    fn of_compiled_blocks() {
        are_right("compiled", &["checkpoint-layers"]);
    }

    #[test]
    fn of_one_checkpoint_around_all_blocks() {
        are_right("nested", &["checkpoint-layers"]);
    }

    #[test]
    fn of_a_training_in_float32() {
        are_right("convnext", &["autocast"]);
    }

    #[test]
    fn of_fine_tuning_all_parameters() {
        are_right("finetune", &["adapters", "eight-bit-moments"]);
    }

    #[test]
    fn of_a_large_vocabulary() {
        are_right("vocabulary", &["chunked-cross-entropy", "smaller-batches"]);
    }

    #[test]
    fn of_an_evaluation_on_large_images() {
        are_right("validation", &["smaller-evaluation-batch"]);
    }

    #[test]
    fn of_an_evaluation_with_gradients() {
        are_right("evaluation", &["no-grad"]);
    }

    #[test]
    fn of_an_evaluation_whose_last_graph_stays() {
        are_right("layers", &["no-grad", "half-the-batch"]);
    }

    #[test]
    fn of_a_cache_that_an_evaluation_fills() {
        are_right("scoring", &["no-kv-cache"]);
    }

    #[test]
    fn of_a_cache_that_a_training_fills() {
        are_right("pretrain", &["no-kv-cache", "checkpoint-layers"]);
    }

    /// All programs, also with memory limits under which they run out of memory.
    #[test]
    fn of_all_programs() {
        let mut runs = Vec::new();
        for (name, limits) in programs() {
            runs.push((name.clone(), None));
            runs.extend(limits.into_iter().map(|limit| (name.clone(), Some(limit))));
        }
        assert!(runs.iter().filter(|(_, limit)| limit.is_none()).count() >= 20, "{runs:?}");
        let mut outcomes = in_parallel(&runs, cores(), |(name, limit)| measure(name, *limit)).concat();
        outcomes.sort_by(|a, b| (&a.program, a.limit, &a.action).cmp(&(&b.program, b.limit, &b.action)));
        println!("{outcomes:#?}");
        let mut errors: Vec<f64> = outcomes.iter().filter_map(Outcome::error_percent).collect();
        errors.sort_by(f64::total_cmp);
        let median = errors.get(errors.len() / 2).copied();
        assert!(median.is_some_and(|median| median <= MEDIAN_ERROR), "the median of {errors:?}");
        // The programs can make nearly every suggested change, so few suggestions remain unchecked.
        let unchecked = outcomes.iter().filter(|o| matches!(o.changed, Changed::Cannot(_))).count();
        assert!(unchecked * 10 <= outcomes.len(), "{unchecked} of {} suggestions cannot be done", outcomes.len());
        let wrong = wrong(&outcomes);
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
