//! Compares two hand-made training programs: the report of a known change, to the byte; golden text and JSON.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it diff` rewrites the golden files.

use std::path::Path;

use crate::training::{MIB, Program};
use memtrace_analysis::load::{Manifest, Process, Run};
use memtrace_analysis::report::{Change, DevicePair, DiffResult};
use memtrace_analysis::{DiffOptions, DiffReport, TextOptions, ToText, diff};
use memtrace_trace::ids::ContextId;

/// One step with parameters and with activations by two lines of the model. The edited version also has a tensor that
/// line 9 keeps, and two more lines at the beginning. `root` is the folder of the program.
fn version(root: &str, edited: bool) -> Program {
    let mut p = Program::new();
    let down = if edited { 2 } else { 0 };
    let file = |name: &str| format!("{root}/{name}");
    let linear = format!("{root}/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py");
    let module = format!("{root}/venv/lib/python3.11/site-packages/torch/nn/modules/module.py");
    let (train, model) = (file("train.py"), file("model.py"));
    let load = p.stack(&[(&train, 10, "<module>"), (&module, 1370, "to")]);
    let first = p.stack(&[
        (&train, 20, "<module>"),
        (&module, 1790, "_call_impl"),
        (&model, 6 + down, "forward"),
        (&linear, 134, "forward"),
    ]);
    let second = p.stack(&[
        (&train, 20, "<module>"),
        (&module, 1790, "_call_impl"),
        (&model, 8 + down, "forward"),
        (&module, 99, "relu"),
    ]);
    let node = p.node("AddmmBackward0", first);
    p.alloc(4 * MIB, load);
    let mut live = vec![p.alloc(2 * MIB, first), p.alloc(3 * MIB, second)];
    if edited {
        let kept = p.stack(&[(&train, 20, "<module>"), (&module, 1790, "_call_impl"), (&model, 9, "forward")]);
        p.alloc(5 * MIB, kept);
    }
    p.on_thread(2);
    live.push(p.alloc_in(MIB, memtrace_trace::ids::StackId::NONE, node));
    for addr in live {
        p.free_in(addr, memtrace_trace::ids::StackId::NONE, ContextId(node.0));
    }
    p
}

fn run(name: &str, program: Program) -> Run {
    Run::from_processes(Path::new(name), Manifest::default(), vec![program.process()])
}

fn compare(a: &Run, b: &Run) -> DiffReport {
    diff(a, b, &DiffOptions::default(), &mut |_| {})
}

/// Checks that every table adds up to the difference of the peaks.
fn adds_up(pair: &DevicePair) {
    let sums: [(&str, Vec<&Change>); 5] = [
        ("category", pair.by_category.iter().map(|row| &row.change).collect()),
        ("phase", pair.by_phase.iter().map(|row| &row.change).collect()),
        ("line", pair.by_line.iter().map(|row| &row.change).collect()),
        ("stack", pair.by_stack.iter().map(|row| &row.change).collect()),
        ("module", pair.by_module.iter().map(|row| &row.change).collect()),
    ];
    for (name, rows) in sums {
        if name == "module" && rows.is_empty() {
            continue;
        }
        assert_eq!(rows.iter().map(|row| row.difference_bytes).sum::<i64>(), pair.difference_bytes, "{name}");
        if name != "stack" {
            assert_eq!(rows.iter().map(|row| row.a_bytes).sum::<u64>(), pair.a.totals.allocated_bytes, "{name}");
            assert_eq!(rows.iter().map(|row| row.b_bytes).sum::<u64>(), pair.b.totals.allocated_bytes, "{name}");
        }
    }
}

#[test]
fn a_leaking_line_is_named_after_an_edit_and_on_another_machine() {
    let (a, b) = (run("before", version("/home/me/job", false)), run("after", version("/srv/other", true)));
    let report = compare(&a, &b);
    let [pair] = &report.pairs[..] else { panic!("{report:#?}") };
    adds_up(pair);
    assert_eq!((pair.difference_bytes, pair.result), (5 * MIB as i64, DiffResult::Grew));
    let line = &pair.by_line[0];
    let frame = line.b_frame.as_ref().unwrap();
    assert_eq!(
        (line.change.difference_bytes, frame.line, &*frame.filename),
        (5 * MIB as i64, 9, "/srv/other/model.py")
    );
    assert!(line.a_frame.is_none());
    assert!(pair.by_line[1..].iter().all(|row| row.change.difference_bytes == 0), "{:#?}", pair.by_line);
    assert_eq!(pair.moved_lines, 2);
    assert_eq!(pair.by_stack.len(), 1);
    crate::golden::assert_matches("diff.txt", &report.to_text(&TextOptions::default()));
    crate::golden::assert_matches("diff.json", &report.to_json());
    crate::schemas::assert_valid("diff", &report.to_json());
    // With the runs swapped, the same line shrinks.
    let back = compare(&b, &a);
    adds_up(&back.pairs[0]);
    assert_eq!((back.pairs[0].difference_bytes, back.pairs[0].result), (-5 * MIB as i64, DiffResult::Shrank));
    assert!(back.pairs[0].headline.contains("-5.00 MiB"), "{}", back.pairs[0].headline);
}

#[test]
fn equal_runs_have_no_differences() {
    let (a, b) = (run("a", version("/x", false)), run("b", version("/x", false)));
    let report = compare(&a, &b);
    let pair = &report.pairs[0];
    adds_up(pair);
    assert_eq!((pair.result, pair.difference_bytes, pair.by_stack.len()), (DiffResult::Same, 0, 0));
    assert!(pair.headline.ends_with("no difference"), "{}", pair.headline);
    let text = report.to_text(&TextOptions::default());
    assert_eq!(text.lines().count(), 4, "{text}");
}

#[test]
fn small_growth_is_within_noise() {
    let mut more = version("/x", false);
    let stack = more.stack(&[("/x/train.py", 10, "<module>")]);
    more.recording.events.clear();
    let mut less = version("/x", false);
    less.recording.events.clear();
    let other = less.stack(&[("/x/train.py", 10, "<module>")]);
    less.alloc(8 * MIB, other);
    more.alloc(8 * MIB, stack);
    more.alloc(4096, stack);
    let report = compare(&run("a", less), &run("b", more));
    let pair = &report.pairs[0];
    assert_eq!((pair.difference_bytes, pair.result), (4096, DiffResult::Same));
    assert!(pair.headline.contains("the difference is within noise (+4.00 KiB"), "{}", pair.headline);
}

#[test]
fn two_steps_of_a_run_are_compared() {
    let run = crate::training::run(3, false);
    let options = DiffOptions { steps: Some((0, 2)), ..DiffOptions::default() };
    let report = diff(&run, &run, &options, &mut |_| {});
    let pair = &report.pairs[0];
    adds_up(pair);
    assert_eq!((pair.a.step, pair.b.step), (Some(0), Some(2)));
    // Adam allocates its state in the first step, and the state is part of that step's peak. Both peaks are in the
    // optimizer.
    let summary = memtrace_analysis::summarize(&run, &mut |_| {}).unwrap();
    let steps = &summary.processes[0].devices[0].by_step;
    let peak = |step: usize| steps[step].phases.iter().map(|phase| phase.peak_bytes).max().unwrap();
    assert_eq!((pair.a.totals.allocated_bytes, pair.b.totals.allocated_bytes), (peak(0), peak(2)));
    let missing = diff(&run, &run, &DiffOptions { steps: Some((0, 7)), ..options }, &mut |_| {});
    assert!(missing.pairs.is_empty());
    assert_eq!(missing.notes, ["B has no step 7: its steps are 0 to 2"]);
}

fn ranked(ranks: &[(u32, bool)]) -> Run {
    let process = |(rank, edited): &(u32, bool)| {
        let mut program = version("/x", *edited);
        program.recording.info = format!(r#"{{"pid": {}, "argv": [], "env": {{"RANK": "{rank}"}}}}"#, 100 - rank);
        Process::new(Path::new("x.mtr"), Box::new(program.recording), &Manifest::default())
    };
    Run::from_processes(Path::new("job"), Manifest::default(), ranks.iter().map(process).collect())
}

#[test]
fn equal_ranks_are_compared() {
    let report = compare(&ranked(&[(0, false), (1, false), (2, false)]), &ranked(&[(1, true), (0, false), (5, false)]));
    let pairs: Vec<_> = report.pairs.iter().map(|p| (p.a.rank, p.b.rank, p.difference_bytes)).collect();
    assert_eq!(pairs, [(Some(1), Some(1), 5 * MIB as i64), (Some(0), Some(0), 0)]);
    let alone: Vec<_> = report.unpaired.iter().map(|one| (&*one.run, one.rank)).collect();
    assert_eq!(alone, [("a", Some(2)), ("b", Some(5))]);
    let text = report.to_text(&TextOptions::default());
    assert!(text.contains("only in A: rank 2, GPU 0") && text.contains("only in B: rank 5"), "{text}");
}
