//! The table of `torch.cuda.memory_summary`, computed from the recording.

use std::collections::BTreeMap;

use super::summary::DeviceSummary;
use super::table::{Align, Table};
use super::text::TextReport;
use super::units::{count_text, size_text};
use memtrace_insight::passes::{Figure, Statistics};

const POOLS: [(&str, &str); 3] =
    [("all", ""), ("large_pool", "  from the large pool"), ("small_pool", "  from the small pool")];
const COLUMNS: [&str; 4] = ["current", "peak", "allocated", "freed"];

/// The figures by their keys in `torch.cuda.memory_stats`.
pub(super) fn by_key(statistics: &Statistics, ooms: u64) -> BTreeMap<String, u64> {
    let mut keys = BTreeMap::from([("num_ooms".to_owned(), ooms)]);
    for ((pool, _), stats) in POOLS.iter().zip([&statistics.all, &statistics.large, &statistics.small]) {
        for (figure, stat) in Figure::ALL.iter().zip(stats) {
            for (column, value) in COLUMNS.iter().zip([stat.current, stat.peak, stat.allocated, stat.freed]) {
                keys.insert(format!("{}.{pool}.{column}", figure.name()), value);
            }
        }
    }
    keys
}

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
    pub(super) fn memory(&mut self, device: &DeviceSummary) {
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
            for (pool, of) in POOLS {
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
