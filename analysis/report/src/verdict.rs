//! Draws the verdict, and the totals of the point in time that it is about.

use memtrace_summary::{DeviceSummary, MemoryState, OomSummary, VerdictStatus, VerdictSummary, size_text};

use crate::fit::{columns, wrap_words};
use crate::parts::{largest_owners, outside};
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
            Some(oom) => outside_at(device, oom),
            None => outside_at_peak(device),
        };
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

/// The memory outside the caching allocator at an error, with its largest owners.
fn outside_at(device: &DeviceSummary, oom: &OomSummary) -> Option<String> {
    let others = oom.contexts_and_other_processes_bytes.unwrap_or(0);
    let owners = oom.outside_pytorch.iter().take(4).map(|owner| format!("{} {}", owner.owner, size_text(owner.bytes)));
    let mut owners: Vec<String> = owners.collect();
    if others > 0 {
        let before = device.in_use_before_bytes.filter(|bytes| *bytes > 0);
        let before = before.map(|bytes| format!(", {} of it before the program started", size_text(bytes)));
        owners.push(format!("CUDA contexts and other processes {}{}", size_text(others), before.unwrap_or_default()));
    }
    let total = oom.outside_pytorch_bytes.saturating_add(others);
    (total > 0).then(|| format!("{} ({})", size_text(total), owners.join(", ")))
}

/// The memory outside the caching allocator: what was in use before the program, and each owner's peak.
fn outside_at_peak(device: &DeviceSummary) -> Option<String> {
    let owners = outside(device);
    let before = device.in_use_before_bytes.unwrap_or(0);
    let total: u64 = owners.iter().map(|(_, bytes)| bytes).sum::<u64>() + before;
    let mut parts = largest_owners(&owners, 3);
    if before > 0 {
        parts.push(format!("before the program started {}", size_text(before)));
    }
    (total > 0 && device.source.starts_with("torch"))
        .then(|| format!("up to {} ({})", size_text(total), parts.join(", ")))
}
