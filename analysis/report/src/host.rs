//! Draws the main memory of the run's processes: the section `host`, and the lines of the end-of-run summary.

use memtrace_summary::{HostMemorySummary, Summary, count_text, duration_text, size_text};

use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The number of processes in the end-of-run summary.
const SUMMARY_PROCESSES: usize = 4;
/// The width of the chart, and its height in lines.
const CHART: (usize, usize) = (60, 6);

impl TextReport {
    /// Adds main memory if it may matter: most of it is in use, it grows, or the kernel killed a process.
    pub(crate) fn host(&mut self, summary: &Summary) {
        let Some(host) = summary.host.as_ref().filter(|host| host.is_notable()) else { return };
        self.blank();
        self.heading("Main memory of the host (sampled)");
        self.host_facts(host);
        self.host_processes(host, SUMMARY_PROCESSES);
    }

    /// Adds the section of main memory.
    pub(crate) fn host_section(&mut self, summary: &Summary) {
        self.blank();
        let Some(host) = &summary.host else {
            return self
                .line("main memory is not recorded: this is a dry run, a snapshot or an older recording".to_owned());
        };
        self.heading("Main memory of the host (sampled)");
        self.host_facts(host);
        let gap = host.longest_gap_ns.map(|ns| format!(", at most {} apart", duration_text(ns))).unwrap_or_default();
        self.labelled("Samples", &format!("{}{gap}", count_text(host.samples)));
        self.host_chart(host);
        self.host_processes(host, usize::MAX);
        self.host_shared_files(host);
        self.host_pinned(summary);
    }

    fn host_facts(&mut self, host: &HostMemorySummary) {
        self.labelled("Peak", &host.text);
        if let Some(bytes) = host.group_peak_bytes {
            let cache = host.peak.group_cache_bytes.filter(|cache| *cache > 0);
            let cache = cache.map(|cache| format!(", of it page cache at the peak: {}", size_text(cache)));
            let text = format!("at most {} at any time{}", size_text(bytes), cache.unwrap_or_default());
            self.labelled("Control group", &text);
        }
        if let Some(text) = host.shm_text() {
            self.labelled("/dev/shm", &text);
        }
        if let Some(growth) = &host.growth {
            self.labelled("Growth", &growth.text);
        }
    }

    fn host_processes(&mut self, host: &HostMemorySummary, limit: usize) {
        let mut table = Table::new(&[
            ("At the peak", Align::Right),
            ("Anonymous", Align::Right),
            ("Files", Align::Right),
            ("Shared", Align::Right),
            ("Highest", Align::Right),
            ("Process", Align::Left),
        ]);
        for process in host.processes.iter().take(limit) {
            table.row(vec![
                size_text(process.bytes),
                size_text(process.anonymous_bytes),
                size_text(process.file_bytes),
                size_text(process.shared_bytes),
                size_text(process.highest_bytes),
                process.name.clone(),
            ]);
        }
        let more = host.processes.len().saturating_sub(limit) as u64 + host.unlisted_processes;
        if more > 0 {
            table.caption(format!("{} more: see summary.json", count_text(more)));
        }
        self.lines.extend(table.lines(2, self.width, self.style));
    }

    fn host_shared_files(&mut self, host: &HostMemorySummary) {
        if host.shared_files.is_empty() {
            return;
        }
        let mut table = Table::new(&[
            ("Mapped", Align::Right),
            ("Files", Align::Right),
            ("Processes", Align::Right),
            ("Shared memory", Align::Left),
        ]);
        for file in &host.shared_files {
            table.row(vec![
                size_text(file.bytes),
                count_text(file.files),
                count_text(file.processes),
                file.name.clone(),
            ]);
        }
        self.blank();
        self.lines.extend(table.lines(2, self.width, self.style));
    }

    fn host_pinned(&mut self, summary: &Summary) {
        let lines: Vec<_> = summary.processes.iter().flat_map(|process| &process.pinned_host_lines).collect();
        if lines.is_empty() {
            return;
        }
        let mut table = Table::new(&[
            ("Pinned", Align::Right),
            ("Requested", Align::Right),
            ("Blocks", Align::Right),
            ("By", Align::Left),
            ("Line", Align::Left),
        ]);
        for line in lines {
            table.row(vec![
                size_text(line.bytes),
                line.requested_over_bytes.map(|over| format!("> {}", size_text(over))).unwrap_or_default(),
                count_text(line.blocks),
                line.owner.clone(),
                line.location.clone(),
            ]);
        }
        self.blank();
        self.lines.extend(table.lines(2, self.width, self.style));
    }

    /// A chart of the history: each column is the highest sample of its part of the time.
    fn host_chart(&mut self, host: &HostMemorySummary) {
        let (width, height) = CHART;
        let (Some(first), Some(last)) = (host.history.first(), host.history.last()) else { return };
        let span = last.time_ns.saturating_sub(first.time_ns);
        if span == 0 || host.peak.bytes == 0 {
            return;
        }
        let mut columns = vec![None; width];
        for state in &host.history {
            let at = u128::from(state.time_ns.saturating_sub(first.time_ns)) * (width as u128 - 1) / u128::from(span);
            if let Some(column) = columns.get_mut(at as usize) {
                *column = Some(state.bytes.max(column.unwrap_or(0)));
            }
        }
        let mut before = 0;
        let heights: Vec<usize> = columns
            .into_iter()
            .map(|bytes| {
                before = bytes.unwrap_or(before);
                (u128::from(before) * height as u128).div_ceil(u128::from(host.peak.bytes)) as usize
            })
            .collect();
        self.blank();
        for line in (1..=height).rev() {
            let label = if line == height { size_text(host.peak.bytes) } else { String::new() };
            let bars: String = heights.iter().map(|tall| if *tall >= line { '#' } else { ' ' }).collect();
            self.line(format!("  {label:>9} |{bars}").trim_end().to_owned());
        }
        self.line(format!("            {}", "-".repeat(width)));
        self.line(format!("            0{:>1$}", duration_text(span), width - 1));
        self.blank();
    }
}
