//! The end-of-run summary, with the verdict first. All figures come from the [`Summary`]; unknown figures
//! are omitted.
//!
//! The order is that in which a reader asks: what happened, where the memory is, what is wrong, what would help, and
//! then one step in time order.

use memtrace_summary::{
    DeviceSummary, ProcessSummary, RecordingGap, Summary, count_text, device_name, duration_text, not_recorded,
    process_name, size_text, when_peaked, when_refused,
};

use crate::fit::{wrap_list, wrap_words};
use crate::parts::{has_phases, run_title};
use crate::style::{TextOptions, ToText};
use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The maximum number of processes listed.
const LISTED_PROCESSES: usize = 12;
/// The maximum number of devices shown of a process.
const DEVICES: usize = 2;
/// The maximum number of allocations listed for the peak.
const LARGEST: usize = 4;
/// The maximum number of gaps of one kind that are printed.
const GAPS: usize = 4;
/// The maximum number of holders printed.
const HOLDERS: usize = 5;
/// The maximum number of issues printed.
const ISSUES: usize = 3;

impl ToText for Summary {
    /// The end-of-run summary.
    fn to_text(&self, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        let several = self.processes.len() > 1;
        let name = self.processes.first().filter(|_| several).map(process_name);
        report.verdict(&self.verdict);
        match &self.launch {
            Some(launch) if launch.table.ranks.len() > 1 => report.launch(launch),
            _ if several => {
                report.blank();
                report.processes(&self.processes);
            }
            _ => {}
        }
        if let Some(process) = self.processes.first() {
            report.process(process, name.as_deref());
        }
        report.launch_issues(self.launch.as_ref(), ISSUES);
        report.xla(self);
        report.host(self);
        report.foot(self);
        report.text()
    }
}

impl TextReport {
    /// Adds one line per process, the worst first.
    fn processes(&mut self, processes: &[ProcessSummary]) {
        let mut table = Table::new(&[
            ("Process", Align::Left),
            ("Device", Align::Left),
            ("Peak", Align::Right),
            ("Reserved", Align::Right),
            ("Outside PyTorch", Align::Right),
            ("Peak at", Align::Left),
        ]);
        for process in processes.iter().take(LISTED_PROCESSES) {
            for device in process.devices.iter().take(4) {
                let server = device.server_only();
                // A server has no steps.
                let peak = device.peak.as_ref().filter(|_| server.is_none());
                let mut at = peak.map(when_peaked).unwrap_or_default();
                if let Some(oom) = device.explained_oom.and_then(|at| device.ooms.get(at)) {
                    let failed = format!("out of memory{}", when_refused(device, oom));
                    at = format!("{at}; {failed}").trim_start_matches("; ").to_owned();
                }
                table.row(vec![
                    process_name(process),
                    device_name(device),
                    size_text(device.highest.allocated_bytes),
                    size_text(device.highest.reserved_bytes),
                    size_text(device.outside_pytorch.as_ref().map_or(0, |outside| outside.bytes)),
                    at.trim_start().trim_start_matches("at ").to_owned(),
                ]);
            }
        }
        if processes.len() > LISTED_PROCESSES {
            table.caption(format!("{} more: see summary.json", processes.len() - LISTED_PROCESSES));
        }
        self.lines.extend(table.lines(0, self.width, self.style));
    }

    /// Adds a process: where its memory is, its issues, what would lower its peaks, and one step.
    fn process(&mut self, process: &ProcessSummary, name: Option<&str>) {
        let devices = || process.devices.iter().take(DEVICES);
        let several = process.devices.len() > 1;
        for device in devices() {
            self.blank();
            if several {
                let title = self.device_title(device, name);
                self.heading(&title);
            }
            self.device(device);
        }
        if process.devices.len() > DEVICES {
            self.line(format!("  {} more devices: see summary.json", process.devices.len() - DEVICES));
        }
        self.pinned_host_memory(process);
        self.issues(&process.issues, ISSUES, None, None);
        let device_of = |device: &DeviceSummary| several.then(|| device_name(device));
        for device in devices() {
            let heading = device_of(device).map(|name| format!("What to try for {name}"));
            let heading = heading.as_deref().unwrap_or("What to try");
            let has_advice = device.server_only().is_some_and(|server| self.server_advice(server, heading));
            self.suggestions(device, if has_advice { "" } else { heading }, 0);
        }
        for device in devices() {
            // A server has stages, not steps.
            if let Some(server) = device.server_only() {
                self.stages(server);
                continue;
            }
            self.one_step(device, device_of(device).as_deref());
            self.growth_after_first_step(device);
        }
        let churn = devices()
            .filter(|device| has_phases(device) && device.server_only().is_none())
            .take(if self.verbose { DEVICES } else { 0 });
        for device in churn {
            self.blank();
            let on = device_of(device).map(|name| format!(" on {name}")).unwrap_or_default();
            self.heading(&format!("Memory by phase{on}"));
            self.phases(device);
        }
    }

    /// Adds where the memory of a device is.
    fn device(&mut self, device: &DeviceSummary) {
        if let Some(oom) = device.explained_oom() {
            self.totals(device, &oom.in_use, Some(oom));
            device.colocation.iter().for_each(|colocation| self.colocation(colocation));
            device.server.iter().for_each(|server| self.server(server));
            self.categories(&oom.in_use, true, oom.optimizer_state_needed_bytes);
            self.modules(&oom.in_use);
            self.largest_allocations(&oom.in_use, LARGEST);
            self.holders(device, HOLDERS);
            if let Some(estimate) = oom.step_estimate.as_ref().filter(|_| device.server_only().is_none()) {
                self.labelled_at(0, 0, "Still to come", &estimate.text(), wrap_words);
            }
        } else if let Some(peak) = &device.peak {
            self.totals(device, peak, None);
            device.colocation.iter().for_each(|colocation| self.colocation(colocation));
            device.server.iter().for_each(|server| self.server(server));
            if device.server_only().is_none() {
                self.categories(peak, true, None);
            }
            self.modules(peak);
            self.largest_allocations(peak, LARGEST);
            let location = peak.allocated_at.as_ref().map_or("", |stack| stack.location.as_str());
            self.labelled_at(2, 0, "The peak was reached at", location, wrap_list);
            self.holders(device, HOLDERS);
        }
        self.unmapped_segments(device);
        self.cuda_graphs(device);
        if device.server_only().is_none() {
            self.released(device);
            self.outlier_step(device);
            self.larger_inputs(device);
        }
        self.device_in_short(device);
        self.pools(device);
        self.imported(device);
    }

    fn pinned_host_memory(&mut self, process: &ProcessSummary) {
        let owners = &process.pinned_host_memory;
        let total: u64 = owners.iter().map(|o| o.peak_bytes).sum();
        if total >= 1 << 20 {
            let names: Vec<String> =
                owners.iter().take(3).map(|o| format!("{} {}", o.owner, size_text(o.peak_bytes))).collect();
            self.labelled_list("Pinned host memory", &format!("{} (peak of each owner)", names.join(", ")));
        }
        for text in process.pinned_host_lines.iter().filter_map(|line| line.text.clone()).take(3) {
            self.labelled_list("", &text);
        }
    }

    fn foot(&mut self, summary: &Summary) {
        self.gaps(&summary.gaps);
        self.blank();
        let run = &summary.run;
        let mut facts = vec![run_title(summary)];
        facts.extend(run.duration_ns.map(duration_text));
        facts.push(format!("{} events", count_text(run.events)));
        facts.push(format!("{} lost", count_text(summary.lost_events())));
        facts.extend(not_recorded(summary));
        for (at, line) in wrap_words(&facts.join(", "), self.width.saturating_sub(10)).iter().enumerate() {
            self.footer(if at == 0 { "Recorded" } else { "" }, line);
        }
        if !summary.files.is_empty() {
            let mut names = summary.files.clone();
            if let Some(pickle) = names.iter_mut().find(|name| name.ends_with(".pickle")) {
                pickle.push_str(" (for pytorch.org/memory_viz)");
            }
            if names.len() > 5 {
                let more = names.len() - 5;
                names.truncate(5);
                names.push(format!("{more} more"));
            }
            let folder = summary.run.path.trim_end_matches('/');
            self.footer("Files", &format!("{folder}/  {}", names.join("  ")));
            self.footer("Details", &format!("memtrace open {folder}   lines: memtrace lines {folder}"));
            self.footer("Guide", "memtrace docs reading-the-report");
        }
    }

    /// Adds what the recording lacks, `GAPS` of each kind at most.
    fn gaps(&mut self, gaps: &[RecordingGap]) {
        if !gaps.is_empty() {
            self.blank();
        }
        for kind in gaps.chunk_by(|one, next| one.label == next.label) {
            for (at, gap) in kind.iter().take(GAPS).enumerate() {
                let label = if at == 0 { gap.label.as_str() } else { "" };
                self.labelled(label, &gap.text);
            }
            if let Some(more) = kind.len().checked_sub(GAPS).filter(|more| *more > 0) {
                self.labelled("", &format!("{more} more: see summary.json"));
            }
        }
    }

    fn footer(&mut self, label: &str, text: &str) {
        let text = format!("{label:<8}  {text}");
        // Paths are meant to be copied, so the line is not cut.
        self.lines.push(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::style::Style;
    use memtrace_summary::{HolderSummary, IssueSummary, OomForecastSummary, StackSummary};

    #[test]
    fn an_issue_has_its_location_evidence_and_fix() {
        let issue = IssueSummary {
            rule: memtrace_insight::rules::RuleId::Leak,
            device: 0,
            bytes: 120 << 20,
            headline: "12.0 MiB more with each step, 120 MiB in 10 steps".into(),
            evidence: vec!["10 of 10 steps from step 2 on left a block more".into()],
            stack: Some(StackSummary { location: "train.py:9 step".into(), ..StackSummary::default() }),
            fix: "append loss.item()".into(),
            saves_bytes: Some(120 << 20),
            forecast: Some(OomForecastSummary {
                text: "out of memory in about 310 steps (90 s) at this rate".into(),
                ..OomForecastSummary::default()
            }),
            files: Vec::new(),
            held_by: vec![HolderSummary {
                path: "__main__.history[*]".into(),
                tensors: 10,
                bytes: 120 << 20,
                shape: None,
            }],
            help: None,
        };
        let process = ProcessSummary { issues: vec![issue; ISSUES + 2], ..ProcessSummary::default() };
        let text = Summary { processes: vec![process], ..Summary::default() }
            .to_text(&TextOptions { verbose: true, ..TextOptions::default() });
        let expected =
            "  leak: 12.0 MiB more with each step, 120 MiB in 10 steps; out of memory in about 310 steps (90 s)
    at this rate
    Location  train.py:9 step
    Evidence  10 of 10 steps from step 2 on left a block more
    Held by   __main__.history[*] (10 tensors, 120 MiB)
    Fix       append loss.item() (lowers the peak by 120 MiB)
";
        assert_eq!(text.matches(expected).count(), ISSUES, "{text}");
        assert!(text.contains("2 more issues"), "{text}");
    }

    #[test]
    fn labels_stand_beside_their_text_or_above_it() {
        let lines = |width: usize| {
            let mut report = TextReport::new(&TextOptions { width, ..TextOptions::default() });
            report.labelled("Free on the device", "550 MiB");
            report.labelled("In use before the program started", "520 MiB");
            report.labelled("Losses", "");
            report.lines
        };
        let wide = ["  Free on the device        550 MiB", "  In use before the program started  520 MiB"];
        assert_eq!(lines(100), wide);
        let narrow = ["  Free on the device", "    550 MiB", "  In use before the program started", "    520 MiB"];
        assert_eq!(lines(60), narrow);
    }

    #[test]
    fn only_own_control_sequences_are_kept() {
        let style = Style { color: true };
        let line = format!("{} \x1b]0;title\x07 \x1b[2J", style.bold("x"));
        assert_eq!(style.printable(&line), "\x1b[1mx\x1b[0m \u{fffd}]0;title\u{fffd} \u{fffd}[2J");
        assert_eq!(Style::PLAIN.printable("a\x1b[1mb"), "a\u{fffd}[1mb");
    }
}
