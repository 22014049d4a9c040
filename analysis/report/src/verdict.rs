//! Draws the verdict, and the totals of the point in time that it is about.

use memtrace_summary::{DeviceSummary, MemoryState, OomSummary, VerdictStatus, VerdictSummary, size_text};

use crate::fit::{columns, wrap_words};
use crate::style::Style;
use crate::text_report::TextReport;

impl TextReport {
    /// Adds the verdict of the run.
    pub(crate) fn verdict(&mut self, verdict: &VerdictSummary) {
        for remark in &verdict.remarks {
            self.lines.extend(wrap_words(remark, self.width));
        }
        for statement in &verdict.statements {
            let (mut mark, paint): (_, fn(Style, &str) -> String) = match statement.status {
                VerdictStatus::Good => ("+", Style::good),
                VerdictStatus::Warning => ("!", Style::warning),
                VerdictStatus::Failed => ("x", Style::alarm),
            };
            for line in wrap_words(&statement.text, self.width.saturating_sub(2)) {
                let line = paint(self.style, &format!("{mark} {line}"));
                self.lines.push(line);
                mark = " ";
            }
            for detail in &statement.details {
                let lines = wrap_words(detail, self.width.saturating_sub(2));
                self.lines.extend(lines.iter().map(|line| format!("  {line}")));
            }
        }
    }

    /// Adds the totals of a point in time on one line, or below each other where they do not fit.
    pub(crate) fn totals(&mut self, device: &DeviceSummary, state: &MemoryState, oom: Option<&OomSummary>) {
        let totals = &state.totals;
        let mut parts = vec![format!("Allocated {}", size_text(totals.allocated_bytes))];
        if totals.reserved_bytes > 0 {
            let unallocated = match oom {
                Some(oom) => oom.reserved_but_unallocated_bytes,
                None => totals.reserved_bytes.saturating_sub(totals.allocated_bytes),
            };
            let largest = oom.filter(|oom| oom.reserved_but_unallocated_bytes > 0);
            let largest = largest.map(|oom| format!(" (largest free block {})", size_text(oom.largest_free_bytes)));
            let highest = device.highest.reserved_bytes;
            let highest = (oom.is_none() && highest > totals.reserved_bytes)
                .then(|| format!(" (peak of reserved memory {})", size_text(highest)));
            let notes = largest.or(highest).unwrap_or_default();
            parts.push(format!("reserved but unallocated {}{notes}", size_text(unallocated)));
        }
        let outside = match oom {
            Some(oom) => oom.outside_text.as_deref(),
            None => device.outside_pytorch.as_ref().map(|outside| outside.text.as_str()),
        };
        let outside = outside.filter(|text| !text.is_empty());
        parts.extend(outside.map(|text| format!("outside PyTorch {text}")));
        let mut line = String::new();
        for part in parts {
            if !line.is_empty() && columns(&line) + 3 + columns(&part) > self.width {
                self.heading(&std::mem::take(&mut line));
            }
            let gap = if line.is_empty() { "" } else { "   " };
            line.push_str(&format!("{gap}{part}"));
        }
        let text = wrap_words(&line, self.width);
        text.iter().for_each(|line| self.heading(line));
    }
}
