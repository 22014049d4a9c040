//! The Parquet table `phases` has the phases of the summary: both say the same of every phase.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use memtrace_analysis::export::{TableLayout, Window, tables};
use memtrace_analysis::load::{Manifest, Run};
use memtrace_analysis::report::PhaseSummary;
use memtrace_analysis::summarize;
use memtrace_trace::event::Action;
use memtrace_trace::ids::StackId;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};

use crate::training::{MIB, Program, stacks, training};

/// Counts and bytes of allocations and frees, and the peak.
type Figures = [u64; 5];
/// The phases before the first step, of the first step and of all later ones.
type Parts = BTreeMap<(&'static str, String), Figures>;

/// A training. Then a batch is loaded that nothing computes with, and the interpreter frees what is left.
fn with_teardown(steps: u32, oom: bool) -> Program {
    let mut program = training(steps, oom);
    let stacks = stacks(&mut program);
    if !oom {
        program.alloc(MIB, stacks.batch);
    }
    let events = &program.recording.events;
    let is_freed = |addr: u64| events.iter().any(|e| e.action == Action::FreeRequested && e.addr == addr);
    let left = events.iter().filter(|e| e.action == Action::Alloc && !is_freed(e.addr)).map(|e| e.addr);
    for addr in left.collect::<Vec<_>>() {
        program.free(addr, StackId::NONE);
    }
    program
}

fn rows_of(program: Program) -> Vec<Row> {
    let mut files = [const { Vec::new() }; 4];
    let outputs = files.each_mut().map(|file| file as &mut (dyn Write + Send));
    tables(&program.process(), "run", TableLayout::Whole, &Window::WHOLE, None, outputs, &mut |_| {}).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&files[3]).unwrap();
    SerializedFileReader::new(file).unwrap().get_row_iter(None).unwrap().map(Result::unwrap).collect()
}

fn of_table(program: Program) -> Parts {
    let mut parts = Parts::new();
    for row in rows_of(program) {
        let field = |name: &str| row.get_column_iter().find(|(column, _)| *column == name).unwrap().1.clone();
        let number = |name: &str| match field(name) {
            Field::Long(number) => number.cast_unsigned(),
            other => panic!("{name}: {other:?}"),
        };
        let part = match field("step") {
            Field::Null => "before",
            Field::Int(0) => "first",
            _ => "later",
        };
        let Field::Str(phase) = field("phase") else { panic!("{row}") };
        let sums = parts.entry((part, phase)).or_default();
        for (sum, name) in sums.iter_mut().zip(["allocations", "allocated", "frees", "freed"]) {
            *sum += number(name);
        }
        sums[4] = sums[4].max(number("peak"));
    }
    parts
}

/// The phases of the summary, and the bytes that no phase freed.
fn of_summary(program: Program) -> (Parts, u64) {
    let run = Run::from_processes(Path::new("run"), Manifest::default(), vec![program.process()]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let device = &summary.processes[0].devices[0];
    let figures =
        |row: &PhaseSummary| [row.allocations, row.allocated_bytes, row.frees, row.freed_bytes, row.peak_bytes];
    let all = [("before", &device.before_first_step), ("first", &device.first_step), ("later", &device.later_steps)];
    let of_part = |(part, rows): (&'static str, &Vec<PhaseSummary>)| {
        rows.iter().map(|row| ((part, row.phase.name().to_owned()), figures(row))).collect::<Vec<_>>()
    };
    (all.into_iter().flat_map(of_part).collect(), device.freed_at_exit_bytes)
}

#[test]
fn the_teardown_belongs_to_no_phase_in_the_table_either() {
    for (steps, oom) in [(4, false), (1, true)] {
        let (expected, freed_at_exit) = of_summary(with_teardown(steps, oom));
        assert_eq!(of_table(with_teardown(steps, oom)), expected, "{steps} steps, error: {oom}");
        assert!(freed_at_exit > 0 && expected.len() >= 4, "{expected:?}");
        // Work after the last step that computes nothing is the only part outside all phases.
        let others: Vec<_> =
            expected.iter().filter(|((_, phase), _)| phase == "other").map(|(_, row)| row[1]).collect();
        assert_eq!(others, if oom { vec![] } else { vec![MIB] });
    }
}
