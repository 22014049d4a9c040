//! The table of `torch.cuda.memory_summary`, computed from the recording.

use memtrace_insight::passes::Figure;
use memtrace_summary::{COLUMNS, DeviceSummary, POOLS, count_text, size_text};

use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The label of each pool's row; empty for the row of all.
const POOL_LABELS: [&str; POOLS.len()] = ["", "  from the large pool", "  from the small pool"];

/// The label of a figure in `torch.cuda.memory_summary`.
const fn title(figure: Figure) -> &'static str {
    match figure {
        Figure::AllocatedBytes => "Allocated memory",
        Figure::ActiveBytes => "Active memory",
        Figure::RequestedBytes => "Requested memory",
        Figure::ReservedBytes => "GPU reserved memory",
        Figure::InactiveSplitBytes => "Non-releasable memory",
        Figure::Allocation => "Allocations",
        Figure::Active => "Active allocs",
        Figure::Segment => "GPU reserved segments",
        Figure::InactiveSplit => "Non-releasable allocs",
    }
}

impl TextReport {
    /// The section `memory`.
    pub(crate) fn memory(&mut self, device: &DeviceSummary) {
        if device.statistics.is_empty() {
            return self.line("  no data: only PyTorch's caching allocator keeps these statistics".to_owned());
        }
        let mut table = Table::new(&[
            ("", Align::Left),
            ("At the end", Align::Right),
            ("Peak", Align::Right),
            ("Total allocated", Align::Right),
            ("Total freed", Align::Right),
        ]);
        let value = |key: String| device.statistics.get(&key).copied().unwrap_or(0);
        for figure in Figure::ALL {
            let text =
                |value: u64| if figure.name().ends_with("_bytes") { size_text(value) } else { count_text(value) };
            for (pool, of) in POOLS.iter().zip(POOL_LABELS) {
                let name = if of.is_empty() { title(figure) } else { of };
                let mut cells = vec![name.to_owned()];
                cells.extend(COLUMNS.iter().map(|column| text(value(format!("{}.{pool}.{column}", figure.name())))));
                table.row(cells);
            }
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
        self.line(format!("  CUDA OOMs: {}", count_text(value("num_ooms".to_owned()))));
    }
}
