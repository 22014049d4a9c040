//! The steps against the program's own count: their number, and every block of a loop iteration in that iteration's
//! step.

use memtrace_analysis::load::open_run;
use memtrace_analysis::passes::{Phase, PhaseTracker};
use memtrace_analysis::summarize;
use memtrace_tests::traced_program::{TracedProgram, events};
use memtrace_tests::versions::Versions;
use memtrace_trace::event::{Action, Source};
use serde_json::Value;

/// The result of one program.
struct Observed {
    /// For each iteration, the phases of its allocations in order, without consecutive repetitions.
    phases: Vec<Vec<Phase>>,
    summary: Value,
}

/// Runs a loop of `tests/programs/steps/loops.py` and compares the steps.
#[track_caller]
fn check(kind: &str) -> Observed {
    check_on(kind, Versions::DEFAULT)
}

#[track_caller]
fn check_on(kind: &str, versions: Versions) -> Observed {
    let run = TracedProgram::python("steps/loops.py", &[kind]).on(versions).run();
    run.assert_ended_well();
    let truth: Value = serde_json::from_slice(&run.output.stdout).expect("the program's count");
    let turns = truth["turns"].as_u64().expect("a number");
    let recorded = open_run(run.path()).expect("the run");
    let process = &recorded.processes()[0];
    let labels = &process.definitions().labels;
    let mut tracker = PhaseTracker::of(process.recording());
    let mut turn: Option<u32> = None;
    let mut phases: Vec<Vec<Phase>> = Vec::new();
    for e in events(&run.trace()) {
        if e.source == Source::Label {
            tracker.observe_label(&e);
            let number = labels.get(&(e.addr as u32)).and_then(|l| l.text.strip_prefix("turn ")?.parse().ok());
            if let Some(number) = number {
                turn = (e.action == Action::RangeStart).then_some(number);
                phases.resize_with(phases.len().max(number as usize + 1), Vec::new);
            }
        } else if e.source == Source::Torch && matches!(e.action, Action::Alloc | Action::FreeRequested) {
            let verdict = tracker.observe(&e);
            if let Some(turn) = turn.filter(|_| e.action == Action::Alloc) {
                let stack = process.definitions().frames_of(e.stack);
                let step = tracker.now().step;
                // Allocations before the first forward are loading. A program without gradients starts the next step at
                // its model's call.
                let early =
                    turn == 0 && step.is_none() || kind == "inference" && !verdict.rule.as_str().starts_with("compute");
                assert!(
                    step == Some(turn) || early,
                    "{kind}: turn {turn}, {:?}: {verdict:?} {e:?} {stack}",
                    tracker.now()
                );
                let seen = &mut phases[turn as usize];
                if seen.last() != Some(&verdict.phase) {
                    seen.push(verdict.phase);
                }
            }
        }
    }
    assert_eq!(phases.len() as u64, turns, "{kind}: turns with a range");
    let summary = summarize(&recorded, &mut |_| {}).expect("a summary");
    let summary: Value = serde_json::from_str(&summary.to_json()).expect("JSON");
    let device = &summary["processes"][0]["devices"][0];
    assert_eq!(device["steps"].as_u64(), Some(turns), "{kind}: steps, of {turns} turns");
    Observed { phases, summary: device.clone() }
}

/// Prints stacks in failure messages.
trait Words {
    fn frames_of(&self, stack: memtrace_trace::ids::StackId) -> String;
}

impl Words for memtrace_trace::file::Definitions {
    fn frames_of(&self, stack: memtrace_trace::ids::StackId) -> String {
        let words = |frame: &memtrace_trace::file::Frame| format!("{}:{} {}", frame.filename, frame.line, frame.name);
        self.walk_ids(stack).filter_map(|(_, id)| self.frame(id)).map(words).collect::<Vec<_>>().join(" < ")
    }
}

use Phase::{Backward, Data, Eval, Forward, Optimizer, Other};

/// The row of a phase.
fn row<'a>(rows: &'a Value, phase: &str) -> Option<&'a Value> {
    rows.as_array()?.iter().find(|row| row["phase"] == phase)
}

#[track_caller]
fn check_plain(versions: Versions) {
    let observed = check_on("plain", versions);
    assert_eq!(observed.phases[0], [Data, Forward, Backward, Optimizer]);
    assert_eq!(observed.phases[3], [Data, Forward, Backward, Optimizer]);
}

#[test]
fn plain() {
    check_plain(Versions::DEFAULT);
}

#[test]
fn an_optimizer_that_allocates_nothing() {
    let observed = check("allocates_nothing");
    assert_eq!(observed.phases[2], [Data, Forward, Backward]);
    // By the ranges that PyTorch marks, every iteration is a step.
    let labels = observed.summary["labels"].as_array().expect("labels");
    let steps = labels.iter().find(|l| l["name"] == "Optimizer.step#SGD.step").expect("the optimizer's range");
    assert_eq!((&steps["times"], &steps["allocated_bytes"]), (&Value::from(5), &Value::from(0)));
    assert_eq!(steps["rule"], "range-optimizer-step");
    let turns = labels.iter().find(|l| l["name"] == "turn *").expect("the program's range");
    assert_eq!((&turns["times"], &turns["rule"]), (&Value::from(5), &Value::Null));
}

#[test]
fn gradient_accumulation() {
    let observed = check("accumulation");
    let passes = observed.phases[2].iter().filter(|phase| **phase == Backward).count();
    assert_eq!(passes, 3, "{:?}", observed.phases[2]);
    let summary = &observed.summary;
    assert_eq!((&summary["first_step_micro_batches"], &summary["later_steps_micro_batches"]), (&3.into(), &9.into()));
}

#[test]
fn evaluations_between_epochs() {
    let observed = check("evaluation");
    assert!(observed.phases.iter().all(|phases| !phases.contains(&Eval)), "{:?}", observed.phases);
}

#[test]
fn inference_only() {
    let observed = check("inference");
    assert!(observed.phases[2].contains(&Eval), "{:?}", observed.phases);
}

#[test]
fn several_optimizers_after_one_backward() {
    check("several");
}

#[test]
fn closures() {
    let observed = check("closure");
    assert!(
        [Forward, Backward, Optimizer].iter().all(|phase| observed.phases[1].contains(phase)),
        "{:?}",
        observed.phases[1]
    );
}

#[test]
fn steps_that_are_skipped() {
    check("skipped");
}

#[test]
fn a_custom_optimizer() {
    let observed = check("own");
    assert_eq!(observed.phases[2], [Data, Forward, Backward, Optimizer]);
}

#[test]
fn optimizers_inside_the_backward_pass() {
    let observed = check("in_backward");
    let steps = row(&observed.summary["later_steps"], "optimizer").expect("an optimizer")["steps"].clone();
    assert_eq!(steps, 3, "{:?}", observed.phases);
    let sums: Vec<&Value> =
        ["first_step_micro_batches", "later_steps_micro_batches"].map(|k| &observed.summary[k]).into();
    assert_eq!(sums, [1, 3], "backward passes");
}

#[test]
fn one_optimizer_at_two_lines() {
    check("two_lines");
}

#[test]
fn gradients_cleared_between_forward_and_backward() {
    let observed = check("cleared_between");
    assert_eq!(observed.phases[2], [Data, Forward, Backward, Optimizer]);
    let later = &observed.summary["later_steps"];
    let order: Vec<&Value> = later.as_array().expect("rows").iter().map(|row| &row["phase"]).collect();
    assert_eq!(order, ["data", "forward", "backward", "optimizer"]);
    let freed = &row(later, "forward").expect("a forward pass")["freed_of_other_phases"];
    assert_eq!(freed[0]["category"], "gradient", "{later}");
}

#[test]
fn parts_of_a_forward_pass_without_gradients() {
    let observed = check("parts_without_gradients");
    assert!(observed.phases.iter().all(|phases| !phases.contains(&Eval)), "{:?}", observed.phases);
}

#[test]
fn evaluations_before_and_after_the_training() {
    let observed = check("evaluations_around");
    let summary = &observed.summary;
    assert!(row(&summary["before_first_step"], "eval").is_some(), "{}", summary["before_first_step"]);
    assert!(row(&summary["first_step"], "eval").is_none(), "{}", summary["first_step"]);
    let eval = row(&summary["later_steps"], "eval").expect("an evaluation");
    assert_eq!((&eval["steps"], &summary["later_steps_count"]), (&Value::from(1), &Value::from(3)));
}

#[test]
fn evaluations_with_gradients() {
    let observed = check("dropped_graphs");
    assert!(row(&observed.summary["later_steps"], "eval").is_some(), "{}", observed.summary["later_steps"]);
}

#[test]
fn experience_is_collected_before_each_part_of_the_training() {
    let observed = check("collected");
    let summary = &observed.summary;
    assert!(row(&summary["before_first_step"], "rollout").is_some(), "{}", summary["before_first_step"]);
    let rollout = row(&summary["later_steps"], "rollout").expect("rollouts");
    assert_eq!((&rollout["steps"], &summary["later_steps_count"]), (&Value::from(2), &Value::from(11)));
    assert_eq!(observed.phases[5], [Data, Eval, Forward, Backward, Optimizer], "the target is an evaluation");
}

#[test]
fn tokens_are_generated_after_the_training() {
    let observed = check("tokens");
    let later = &observed.summary["later_steps"];
    assert_eq!(row(later, "generate").expect("generation")["steps"], 1, "{later}");
    assert!(row(later, "eval").is_none(), "{later}");
}

#[test]
fn batches_made_without_gradients() {
    let observed = check("data_without_gradients");
    assert_eq!(observed.phases[2], [Forward, Backward, Optimizer, Other]);
}

#[test]
fn compiled_models() {
    check("compiled");
}

mod exhaustive {
    use super::*;

    memtrace_tests::for_each_version! { mod plain: check_plain }

    #[test]
    fn one_loop_after_another() {
        check("phases");
    }

    #[test]
    fn optimizers_group_by_group() {
        check("groups");
    }

    #[test]
    fn two_networks_in_turn() {
        let observed = check("alternating");
        let passes = observed.phases[2].iter().filter(|phase| **phase == Backward).count();
        assert_eq!(passes, 2, "{:?}", observed.phases[2]);
    }
}
