//! The passes on a hand-made training program whose figures are all known.

use crate::training::{MIB, PARAMETERS, Program};
use memtrace_analysis::passes::{Category, Phase};
use memtrace_analysis::report::{DeviceSummary, PhaseSummary, Summary, TextOptions};
use memtrace_analysis::rules::PhaseRuleId;
use memtrace_analysis::{Run, ToText, summarize};
use memtrace_trace::event::Action;
use memtrace_trace::ids::{ContextId, StackId};

fn summary(steps: u32, oom: bool) -> Summary {
    summarize(&crate::training::run(steps, oom), &mut |_| {}).unwrap()
}

fn device(summary: &Summary) -> &DeviceSummary {
    &summary.processes[0].devices[0]
}

#[track_caller]
fn phase(rows: &[PhaseSummary], phase: Phase) -> &PhaseSummary {
    rows.iter().find(|row| row.phase == phase).unwrap_or_else(|| panic!("no {} in {rows:?}", phase.name()))
}

#[test]
fn phases_of_the_first_step_are_explained() {
    let summary = summary(3, false);
    let device = device(&summary);
    assert_eq!(device.steps, 3);
    let load = phase(&device.before_first_step, Phase::Load);
    assert_eq!((load.allocated_bytes, load.net_bytes), (PARAMETERS + MIB, (PARAMETERS + MIB) as i64));
    let forward = phase(&device.first_step, Phase::Forward);
    assert_eq!((forward.allocated_bytes, forward.freed_bytes, forward.net_bytes), (7 * MIB, 3 * MIB, 4 * MIB as i64));
    assert_eq!(forward.explanation, "activations 4.00 MiB");
    let backward = phase(&device.first_step, Phase::Backward);
    assert_eq!((backward.allocated_bytes, backward.net_bytes), (12 * MIB, 4 * MIB as i64));
    assert_eq!(backward.explanation, "gradients 8.00 MiB (one of each parameter), activations freed 4.00 MiB");
    let optimizer = phase(&device.first_step, Phase::Optimizer);
    // The program drops the batch after the optimizer's step.
    assert_eq!(optimizer.net_bytes, (16 - 8 - 1) * MIB as i64);
    let explanation =
        "two moments of each parameter (Adam or AdamW): 2 x 8.00 MiB, gradients freed 8.00 MiB, inputs freed 1.00 MiB";
    assert_eq!(optimizer.explanation, explanation);
    assert_eq!(phase(&device.later_steps, Phase::Data).explanation, "inputs 1.00 MiB");
    assert_eq!(device.later_steps_count, 2);
    // In the steady state nothing accumulates.
    assert_eq!(device.later_steps.iter().map(|row| row.net_bytes).sum::<i64>(), 0);
}

#[test]
fn blocks_at_the_peak_have_their_final_categories() {
    let summary = summary(3, false);
    let peak = device(&summary).peak.clone().unwrap();
    // Parameters, batch, gradients, both moments, and the temporary of the first optimizer step.
    assert_eq!(peak.totals.allocated_bytes, (8 + 1 + 8 + 16 + 8) * MIB);
    assert_eq!((peak.step, peak.phase), (Some(0), Phase::Optimizer));
    let bytes = |category| peak.by_category.iter().find(|a| a.category == category).map_or(0, |a| a.bytes);
    assert_eq!(bytes(Category::Parameter), PARAMETERS);
    assert_eq!(bytes(Category::Gradient), PARAMETERS);
    assert_eq!(bytes(Category::OptimizerState), 2 * PARAMETERS);
    assert_eq!(bytes(Category::Temporary), 8 * MIB);
    assert_eq!(peak.by_category.iter().map(|a| a.bytes).sum::<u64>(), peak.totals.allocated_bytes);
    assert_eq!(peak.largest_allocations[0].bytes, 16 * MIB);
    assert_eq!(peak.largest_allocations[0].stack.location, "train.py:22, optim/adam.py:178 _init_group");
}

#[test]
fn every_phase_has_a_rule_and_evidence() {
    let summary = summary(2, false);
    let device = device(&summary);
    let decided: u64 = device.phase_rules.iter().map(|r| r.allocations).sum();
    let allocations = |rows: &[PhaseSummary]| rows.iter().map(|r| r.allocations).sum::<u64>();
    assert_eq!(
        decided,
        allocations(&device.before_first_step) + allocations(&device.first_step) + allocations(&device.later_steps)
    );
    let state = device.phase_rules.iter().find(|r| r.rule == PhaseRuleId::OptimizerStateInitGroup).unwrap();
    assert_eq!(state.evidence.as_ref().unwrap().line, 178);
}

#[test]
fn an_oom_report_has_the_requested_bytes_and_the_memory_in_use() {
    let summary = summary(1, true);
    assert_eq!(summary.run.outcome, "ended by an out-of-memory error at step 0, optimizer");
    let oom = &device(&summary).ooms[0];
    assert_eq!((oom.requested_bytes, oom.fatal), (4 * MIB, Some(true)));
    assert_eq!(oom.optimizer_state_needed_bytes, Some(2 * PARAMETERS));
    let bytes = |category| oom.in_use.by_category.iter().find(|a| a.category == category).map_or(0, |a| a.bytes);
    assert_eq!(bytes(Category::OptimizerState), 12 * MIB);
    assert_eq!(bytes(Category::Gradient), PARAMETERS);
    let text = summary.to_text(&TextOptions::default());
    assert!(
        text.contains("at step 0, optimizer, train.py:22") && text.contains("Tried to allocate 4.00 MiB"),
        "{text}"
    );
    let state = text.lines().find(|line| line.contains("(16.0 MiB needed in all)")).unwrap();
    assert!(state.contains("12.0 MiB") && state.contains("optimizer state"), "{text}");
}

#[test]
fn a_caught_error_does_not_end_the_recording() {
    let mut program = crate::training::training(1, false);
    let s = crate::training::stacks(&mut program);
    program.event(Action::Oom, 0, 99 * MIB, s.forward, ContextId::NONE);
    program.alloc(MIB, s.step);
    let run = Run::from_processes("run".as_ref(), Default::default(), vec![program.process()]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    assert_eq!(device(&summary).ooms[0].fatal, Some(false));
    let text = summary.to_text(&TextOptions { width: 200, ..TextOptions::default() });
    assert!(text.starts_with("! CUDA out of memory") && text.contains("; the program continued"), "{text}");
}

#[test]
fn teardown_belongs_to_no_step() {
    let mut program = crate::training::training(2, false);
    let events = &program.recording.events;
    let parameters: Vec<u64> = events.iter().filter(|e| e.action == Action::Alloc).map(|e| e.addr).take(2).collect();
    for addr in parameters {
        program.free(addr, StackId::NONE);
    }
    let run = Run::from_processes("run".as_ref(), Default::default(), vec![program.process()]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    assert_eq!(device(&summary).freed_at_exit_bytes, PARAMETERS);
    assert!(device(&summary).later_steps.iter().all(|row| row.phase != Phase::Other));
}

#[test]
fn eval_recompute_and_accumulation_are_detected() {
    let mut p = Program::new();
    let s = crate::training::stacks(&mut p);
    let recompute =
        p.stack(&[("/site-packages/torch/utils/checkpoint.py", 1100, "unpack_hook"), ("model.py", 6, "forward")]);
    p.alloc(4 * MIB, s.load);
    for step in 0..2 {
        for _ in 0..3 {
            let kept = p.alloc(MIB, s.forward);
            let again = p.alloc_in(2 * MIB, recompute, s.node);
            p.free_in(again, recompute, s.node);
            let gradient = p.alloc_in(4 * MIB, StackId::NONE, s.node);
            p.free_in(gradient, StackId::NONE, s.node);
            p.free_in(kept, StackId::NONE, s.node);
        }
        p.with_grad(false);
        if step == 0 {
            p.alloc(8 * MIB, s.state);
        }
        let temporary = p.alloc(MIB, s.step);
        p.free(temporary, s.step);
        let out = p.alloc(MIB, s.forward);
        p.free(out, s.forward);
        p.with_grad(true);
    }
    let run = Run::from_processes("run".as_ref(), Default::default(), vec![p.process()]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let device = device(&summary);
    assert_eq!(device.steps, 2, "three micro-batches make one step");
    assert_eq!(phase(&device.first_step, Phase::Recompute).allocated_bytes, 6 * MIB);
    assert_eq!(phase(&device.first_step, Phase::Eval).allocated_bytes, MIB);
    assert_eq!(phase(&device.first_step, Phase::Forward).allocations, 3);
    assert_eq!((device.first_step_micro_batches, device.later_steps_micro_batches), (3, 3));
    let text = summary.to_text(&TextOptions { width: 100, verbose: true, ..TextOptions::default() });
    let cells = |name: &str| {
        let mut rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.rfind(|cells| cells.first() == Some(&name)).unwrap_or_else(|| panic!("no {name} in {text}"))[1..].join(" ")
    };
    assert!(text.contains("step 0: sum of 3 micro-batches"), "{text}");
    assert!(text.contains("each of the 3 micro-batches of step 1: mean"), "{text}");
    assert_eq!(cells("forward"), "1.00 MiB 0 +1.00 MiB", "{text}");
}

#[test]
fn means_are_over_the_steps_that_have_the_phase() {
    let mut p = Program::new();
    let s = crate::training::stacks(&mut p);
    p.alloc(4 * MIB, s.load);
    for step in 0..5 {
        let kept = p.alloc(MIB, s.forward);
        let gradient = p.alloc_in(4 * MIB, StackId::NONE, s.node);
        p.free_in(kept, StackId::NONE, s.node);
        p.with_grad(false);
        p.alloc(MIB, s.state);
        p.free(gradient, s.step);
        if step % 2 == 1 {
            let out = p.alloc(6 * MIB, s.forward);
            p.free(out, s.forward);
        }
        p.with_grad(true);
    }
    let run = Run::from_processes("run".as_ref(), Default::default(), vec![p.process()]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let device = device(&summary);
    let eval = phase(&device.later_steps, Phase::Eval);
    assert_eq!((eval.steps, eval.allocated_bytes, device.later_steps_count), (2, 12 * MIB, 4));
    let text = summary.to_text(&TextOptions { width: 100, verbose: true, ..TextOptions::default() });
    let row = text.lines().rfind(|line| line.trim_start().starts_with("eval")).unwrap();
    assert!(row.contains("6.00 MiB  6.00 MiB          0") && row.contains("in 2 of 4 steps"), "{text}");
    // The optimizer allocates one MiB of state in each step.
    let optimizer = &phase(&device.later_steps, Phase::Optimizer).explanation;
    assert!(optimizer.contains("optimizer state (Adam or AdamW) 1.00 MiB"), "{optimizer}");
}

#[test]
fn reports_fit_the_terminal_width() {
    for (steps, oom) in [(0, false), (1, true), (5, false)] {
        for width in [80, 100, 120] {
            let text = summary(steps, oom).to_text(&TextOptions { width, ..TextOptions::default() });
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}\n{text}");
            assert!(text.lines().count() <= if width < 100 { 70 } else { 60 }, "{text}");
        }
    }
}
