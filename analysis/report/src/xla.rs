//! Draws what XLA's dump says about compiled programs (`--xla-dump`).

use memtrace_input::xla::BufferKind;
use memtrace_summary::{Summary, XlaLineSummary, XlaProgramSummary, XlaSummary, count_text, size_text};

use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// How much the end-of-run summary shows.
const SUMMARY_PROGRAMS: usize = 4;
const SUMMARY_LINES: usize = 6;

impl TextReport {
    /// Adds the largest compiled programs, and the source lines at the peak of the largest. Nothing without
    /// `--xla-dump`.
    pub(crate) fn xla(&mut self, summary: &Summary) {
        let Some(xla) = summary.xla.as_ref().filter(|xla| !xla.programs.is_empty()) else { return };
        self.blank();
        self.heading("Programs that XLA compiled (memory that each needs while it runs)");
        self.xla_programs(xla, SUMMARY_PROGRAMS);
        if let Some(largest) = xla.programs.first() {
            self.xla_peak(largest, SUMMARY_LINES);
        }
        self.xla_notes(xla);
    }

    /// Adds the section of compiled programs.
    pub(crate) fn xla_section(&mut self, summary: &Summary) {
        let Some(xla) = &summary.xla else {
            return self.line("no compiled programs are recorded: record with memtrace --xla-dump".to_owned());
        };
        if xla.programs.is_empty() {
            self.line("XLA compiled no program, or its files cannot be read".to_owned());
        } else {
            self.xla_programs(xla, usize::MAX);
        }
        for program in &xla.programs {
            self.xla_peak(program, usize::MAX);
        }
        self.xla_notes(xla);
    }

    fn xla_programs(&mut self, xla: &XlaSummary, limit: usize) {
        let mut table = Table::new(&[
            ("Arguments", Align::Right),
            ("Donated", Align::Right),
            ("Outputs", Align::Right),
            ("Temporary", Align::Right),
            ("Total", Align::Right),
            ("Program", Align::Left),
        ]);
        for program in xla.programs.iter().take(limit) {
            let of = |kind| size_text(program.by_kind.iter().find(|one| one.kind == kind).map_or(0, |one| one.bytes));
            table.row(vec![
                of(BufferKind::Argument),
                of(BufferKind::DonatedArgument),
                of(BufferKind::Output),
                of(BufferKind::Temporary),
                size_text(program.total_bytes),
                program_text(program),
            ]);
        }
        let more = xla.program_count.saturating_sub(xla.programs.len().min(limit) as u64);
        if more > 0 {
            let rest = if limit < xla.programs.len() { ": memtrace report RUN --section xla" } else { "" };
            table.caption(format!("{} smaller programs{rest}", count_text(more)));
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }

    /// Adds the source lines at the peak of a program.
    fn xla_peak(&mut self, program: &XlaProgramSummary, limit: usize) {
        let Some(peak) = program.peak.as_ref().filter(|peak| peak.live_bytes > 0) else { return };
        let (live, name) = (size_text(peak.live_bytes), &program.name);
        self.list(&format!("Live at the peak of {name}, module {} (% of {live})", program.module));
        for line in peak.lines.iter().take(limit) {
            self.row(line.bytes, peak.live_bytes, &line_text(line));
        }
        let hidden = peak.lines.iter().skip(limit).fold(peak.left_out_bytes, |sum, line| sum + line.bytes);
        if hidden > 0 {
            self.row(hidden, peak.live_bytes, "other lines");
        }
        if !peak.is_sum_confirmed {
            self.note("the sum of these buffers differs from the sums that XLA states");
        }
    }

    fn xla_notes(&mut self, xla: &XlaSummary) {
        if xla.mismatched_programs > 0 {
            let text = "programs have allocations that do not add up to the total that XLA states";
            self.note(&format!("{} {text}", count_text(xla.mismatched_programs)));
        }
        if xla.unknown_lines > 0 {
            self.note(&format!("{} lines of XLA's files were not understood", count_text(xla.unknown_lines)));
        }
        if xla.unread_programs > 0 {
            self.note(&format!("{} programs were not read: there are too many", count_text(xla.unread_programs)));
        }
    }
}

fn program_text(program: &XlaProgramSummary) -> String {
    let on_cpu = if program.is_for_gpu { "" } else { ", for the CPU" };
    format!("{} (module {}{on_cpu})", program.name, program.module)
}

/// One row: `temporary  train.py:8 layer  jit(train_step)/tanh (2 buffers)`.
fn line_text(line: &XlaLineSummary) -> String {
    let kind = line.kind.map_or("unknown", BufferKind::name);
    let buffers = if line.buffers == 1 { String::new() } else { format!(" ({} buffers)", count_text(line.buffers)) };
    let parts = [kind, &line.location, &line.operation];
    let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    format!("{}{buffers}", parts.join("  "))
}
