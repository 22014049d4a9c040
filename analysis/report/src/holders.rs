//! Draws what holds tensors (`--holders`).

use memtrace_summary::{DeviceSummary, HolderSummary, ScanSummary, count_text, size_text};

use crate::text_report::TextReport;

/// One holder: `__main__.history[*] (37 tensors, 37.0 MiB)`.
pub(crate) fn holder_text(holder: &HolderSummary) -> String {
    let HolderSummary { path, tensors, bytes, .. } = holder;
    format!("{path} ({} tensor{}, {})", count_text(*tensors), if *tensors == 1 { "" } else { "s" }, size_text(*bytes))
}

fn occasion_text(scan: &ScanSummary) -> &'static str {
    match scan.occasion.as_str() {
        "out_of_memory" => "after the out-of-memory error",
        "end" => "at the end",
        _ => "while the program ran",
    }
}

impl TextReport {
    /// Adds what holds the largest tensors, at most `limit`. Nothing without `--holders`.
    pub(crate) fn holders(&mut self, device: &DeviceSummary, limit: usize) {
        let Some(holders) = device.holders.as_ref().filter(|holders| !holders.largest.is_empty()) else { return };
        let held = size_text(holders.held_bytes);
        self.list(&format!("Held by Python objects {} (% of the {held} held)", occasion_text(&holders.scan)));
        // Holders of less than a percent are in the section of holders only.
        let is_shown =
            |holder: &&HolderSummary| limit == usize::MAX || holder.bytes.saturating_mul(100) >= holders.held_bytes;
        let shown: Vec<&HolderSummary> = holders.largest.iter().filter(is_shown).take(limit).collect();
        for holder in &shown {
            let tensors = match holder.tensors {
                1 => String::new(),
                tensors => format!(" ({} tensors)", count_text(tensors)),
            };
            let shape = holder.shape.as_ref().map(|shape| format!("  {shape}")).unwrap_or_default();
            self.row(holder.bytes, holders.held_bytes, &format!("{}{tensors}{shape}", holder.path));
        }
        let left_out = holders.left_out + (holders.largest.len() - shown.len()) as u64;
        if left_out > 0 {
            self.line(format!("    {} more: memtrace report RUN --section holders", count_text(left_out)));
        }
        if holders.scan.is_partial {
            self.note("the program has too many objects: some were not visited");
        }
    }

    /// Adds the section of what holds tensors.
    pub(crate) fn holders_section(&mut self, device: &DeviceSummary) {
        if device.holders.is_none() {
            return self.line("no holders are recorded: record with memtrace --holders".to_owned());
        }
        self.holders(device, usize::MAX);
    }
}
