//! The section about CUDA graphs and private memory pools.

use memtrace_summary::{CudaGraphSummary, CudaGraphsSummary, DeviceSummary, count_text, size_text};

use crate::fit::location_in;
use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The width of a location in the table.
const LOCATION: usize = 28;

impl TextReport {
    /// The CUDA graphs and private pools in full.
    pub(crate) fn cuda_graphs_section(&mut self, device: &DeviceSummary) {
        let Some(graphs) = &device.cuda_graphs else {
            return self.line("  no CUDA graph and no private memory pool".to_owned());
        };
        self.graph_table(graphs);
        self.pool_table(graphs);
        if graphs.failed_calls > 0 {
            self.labelled("Failed calls", &format!("{} captures or instantiations", count_text(graphs.failed_calls)));
        }
    }

    fn graph_table(&mut self, graphs: &CudaGraphsSummary) {
        if graphs.graphs.is_empty() {
            return;
        }
        let any = |test: fn(&CudaGraphSummary) -> bool| graphs.graphs.iter().any(test);
        let optional = |name: &'static str, is_shown: bool| if is_shown { name } else { "" };
        let mut table = Table::new(&[
            ("Graph", Align::Right),
            (optional("Batch", any(|graph| graph.first_dimension.is_some())), Align::Right),
            ("Pool growth", Align::Right),
            ("Kept", Align::Right),
            (optional("Instantiated", any(|graph| graph.instantiated_bytes > 0)), Align::Right),
            ("Nodes", Align::Right),
            ("Pool", Align::Left),
            (optional("In pool", any(|graph| graph.graphs_in_pool > 1)), Align::Right),
            ("Captured at", Align::Left),
        ]);
        for graph in &graphs.graphs {
            table.row(vec![
                graph.index.to_string(),
                graph.first_dimension.map(|size| size.to_string()).unwrap_or_default(),
                size_text(graph.pool_growth_bytes),
                size_text(graph.kept_bytes),
                if graph.instantiated_bytes > 0 { size_text(graph.instantiated_bytes) } else { String::new() },
                if graph.nodes > 0 { count_text(graph.nodes) } else { String::new() },
                graph.pool.clone().unwrap_or_default(),
                if graph.pool.is_some() { counted(graph.graphs_in_pool, "graph") } else { String::new() },
                place(graph),
            ]);
        }
        if graphs.graphs_left_out > 0 {
            table.caption(format!("{} more: see summary.json", count_text(graphs.graphs_left_out)));
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
        self.note("Pool growth: segments that the capture added. Kept: its blocks that were allocated when it ended.");
        if any(|graph| graph.instantiated_bytes > 0) {
            self.note("Instantiated: by how much the free memory of the device fell meanwhile.");
        }
        if any(|graph| graph.first_dimension.is_some()) {
            self.note("Batch: the first dimension of all outputs whose shapes are known.");
        }
    }

    fn pool_table(&mut self, graphs: &CudaGraphsSummary) {
        if graphs.pools.is_empty() {
            return;
        }
        self.blank();
        let mut table = Table::new(&[
            ("Private pool", Align::Left),
            ("Peak reserved", Align::Right),
            ("Peak allocated", Align::Right),
            ("Captures", Align::Right),
        ]);
        for pool in &graphs.pools {
            let kind = if pool.is_cuda_graph_pool { "CUDA graph pool" } else { "memory pool" };
            table.row(vec![
                format!("{kind} {}", pool.id),
                size_text(pool.peak_reserved_bytes),
                size_text(pool.peak_allocated_bytes),
                count_text(pool.captures),
            ]);
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }

    /// Adds one line about the graphs of a device, with a reference to the section.
    pub(crate) fn cuda_graphs(&mut self, device: &DeviceSummary) {
        let Some(graphs) = device.cuda_graphs.as_ref().filter(|graphs| graphs.count > 0) else { return };
        let growth: u64 = graphs.graphs.iter().map(|graph| graph.pool_growth_bytes).sum();
        let instantiated: u64 = graphs.graphs.iter().map(|graph| graph.instantiated_bytes).sum();
        let mut text = format!("{}, {} added to private pools", counted(graphs.count, "graph"), size_text(growth));
        if instantiated > 0 {
            text.push_str(&format!(", {} taken by instantiation", size_text(instantiated)));
        }
        text.push_str(" (--section graphs)");
        self.labelled("CUDA graphs", &text);
    }

    /// Adds the memory of segments that a library had unmapped.
    pub(crate) fn unmapped_segments(&mut self, device: &DeviceSummary) {
        let Some(unmapped) = &device.unmapped_segments else { return };
        let end = match unmapped.end_bytes {
            0 => String::new(),
            bytes => format!("; {} at the end", size_text(bytes)),
        };
        let text = format!(
            "up to {} of the reserved memory was unmapped, {} ({}){end}",
            size_text(unmapped.peak_bytes),
            counted(unmapped.times, "time"),
            unmapped.unmapped_by.join(", ")
        );
        self.labelled_list("Paused", &text);
    }
}

/// A number of things: `1 graph`, `3 graphs`.
pub(crate) fn counted(count: u64, what: &str) -> String {
    format!("{} {what}{}", count_text(count), if count == 1 { "" } else { "s" })
}

fn place(graph: &CudaGraphSummary) -> String {
    let location = location_in(&graph.location, LOCATION);
    let label = graph.label.as_ref().map(|label| format!("[{label}]"));
    let built = (!graph.is_captured).then(|| "built from nodes".to_owned());
    let destroyed = graph.is_destroyed.then(|| "(destroyed)".to_owned());
    let parts = [Some(location).filter(|place| !place.is_empty()), label, built, destroyed];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}
