//! Data types and shapes of named tensors, in the report, the line table and the tables of blocks.

use std::path::Path;

use memtrace_analysis::export::{Window, blocks_csv};
use memtrace_analysis::load::{Manifest, Run};
use memtrace_analysis::{LinesOptions, TextOptions, ToText, lines, summarize};
use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::TensorName;

use crate::training::training;

/// A program with two named parameters of these shapes.
fn run(shapes: [&str; 2]) -> Run {
    let mut program = training(2, false);
    let seq = program.recording.events.len() as u64;
    for (at, shape) in (0..).zip(shapes) {
        // The first two blocks of the program, each in a segment of its own.
        let address = (1u64 << 32) + at * (1 << 30);
        let (kind, name) = (TensorKind::Parameter, format!("fc.{at}.weight").into());
        program.recording.definitions.tensor_names.push(TensorName { address, seq, kind, name, shape: shape.into() });
    }
    Run::from_processes(Path::new("run"), Manifest::default(), vec![program.process()])
}

fn parameters(shapes: [&str; 2]) -> (Option<String>, Option<String>, String) {
    let summary = summarize(&run(shapes), &mut |_| {}).unwrap();
    let peak = summary.processes[0].devices[0].peak.as_ref().unwrap();
    let group = peak.largest_allocations.iter().find(|group| group.tensor_name_pattern.is_some()).unwrap();
    assert_eq!(group.tensor_name_pattern.as_deref(), Some("fc.*.weight"));
    (group.tensor_shape.clone(), group.common_tensor_shape.clone(), summary.to_text(&TextOptions::default()))
}

#[test]
fn a_group_has_the_shape_that_all_its_tensors_have() {
    let same = "float32[1024, 1024]";
    let (shape, common, text) = parameters([same; 2]);
    assert_eq!((shape.as_deref(), common.as_deref()), (Some(same), Some(same)));
    assert!(text.contains("parameters in 2 blocks  fc.*.weight float32[1024, 1024]"), "{text}");
    let (shape, common, text) = parameters([same, "float32[512, 2048]"]);
    assert_eq!((shape.as_deref(), common), (Some(same), None));
    assert!(text.contains("parameters in 2 blocks  fc.*.weight  "), "{text}");
    let (shape, common, _) = parameters(["", ""]);
    assert_eq!((shape, common), (None, None));
}

#[test]
fn lines_and_tables_have_shapes() {
    let run = run(["float32[1024, 1024]", "bfloat16[2048, 1024]"]);
    let report = lines(&run, &LinesOptions { top: 9, ..LinesOptions::default() }, &mut |_| {}).unwrap();
    let module = report.functions.iter().find(|f| f.function == "<module>").unwrap();
    let tensor = module.lines.iter().find(|l| l.line == 10).unwrap().largest_tensor.as_ref().unwrap();
    assert_eq!((&*tensor.name, tensor.shape.as_deref()), ("fc.0.weight", Some("float32[1024, 1024]")));
    assert_eq!((tensor.bytes, tensor.named_blocks), (4 << 20, 2));
    assert!(module.lines.iter().all(|line| line.line == 10 || line.largest_tensor.is_none()));
    let text = report.to_text(&TextOptions { width: 200, ..TextOptions::default() });
    assert!(text.contains("Largest tensor") && text.contains("fc.0.weight float32[1024, 1024], 1 more"), "{text}");
    let mut table = Vec::new();
    blocks_csv(&run.processes()[0], &Window::WHOLE, None, &mut table, &mut |_| {}).unwrap();
    let table = String::from_utf8(table).unwrap();
    assert!(table.lines().next().unwrap().ends_with(",shape"));
    assert_eq!(table.lines().filter(|line| line.ends_with("\"bfloat16[2048, 1024]\"")).count(), 1, "{table}");
}
