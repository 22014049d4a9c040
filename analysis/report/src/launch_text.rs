//! The launch in plain text: its ranks, the issues that concern several processes, and the memory that they share.

use memtrace_summary::{
    IssueSummary, LaunchSummary, SharedMemorySummary, Summary, launch_sentences, number_text, size_text,
};

use crate::rank_table_text::Listing;
use crate::text_report::TextReport;

impl TextReport {
    /// Adds the ranks: the worst first, many of them in one line, and what the worst has more than the median.
    pub(crate) fn launch(&mut self, launch: &LaunchSummary) {
        self.blank();
        self.rank_rows(&launch.table, Listing::Short("memtrace report RUN --section ranks"));
        self.rank_facts(&launch.table);
    }

    /// Adds the issues that concern several processes.
    pub(crate) fn launch_issues(&mut self, launch: Option<&LaunchSummary>, count: usize) {
        let issues: Vec<IssueSummary> =
            launch.iter().flat_map(|one| &one.issues).map(|one| one.issue.clone()).collect();
        self.issues(&issues, count, Some("the launch"), None);
    }

    /// The ranks in full.
    pub(crate) fn ranks_section(&mut self, summary: &Summary) {
        self.blank();
        let Some(launch) = &summary.launch else {
            return self.line("one process recorded events: there is nothing to compare".to_owned());
        };
        if launch.table.ranks.is_empty() {
            self.line("no process has a rank".to_owned());
        } else {
            self.rank_rows(&launch.table, Listing::Full);
        }
        self.blank();
        self.rank_facts_in_full(&launch.table, &launch_sentences(launch));
        self.launch_issues(Some(launch), usize::MAX);
        self.shared_memory(&launch.shared_memory);
    }

    fn shared_memory(&mut self, shared: &[SharedMemorySummary]) {
        if shared.is_empty() {
            return;
        }
        self.blank();
        self.heading("Memory of other processes (CUDA IPC)");
        for one in shared {
            let importer = process(one.importer_rank, one.importer_pid);
            let exporter = one
                .exporter_pid
                .map_or_else(|| "a process that is not known".to_owned(), |pid| process(one.exporter_rank, pid));
            let kept = match one.kept_after_free_bytes {
                0 => String::new(),
                bytes => format!("; {} of it after {exporter} had freed it", size_text(bytes)),
            };
            let at_peak =
                one.at_exporter_peak_bytes.map(|bytes| format!("{} at the peak of {exporter}, ", size_text(bytes)));
            let text = format!(
                "{importer} opened up to {} of {exporter} ({}{} at the end, {}){kept}",
                size_text(one.peak_bytes),
                at_peak.unwrap_or_default(),
                size_text(one.end_bytes),
                number_text(one.imports, "import"),
            );
            self.item(2, &text);
        }
    }
}

fn process(rank: Option<u32>, pid: u32) -> String {
    rank.map_or_else(|| format!("pid {pid}"), |rank| format!("rank {rank} (pid {pid})"))
}
