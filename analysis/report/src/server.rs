//! Draws an engine that serves models: where its memory is, its stages, and what it had expected.

use memtrace_summary::{ColocationSummary, DeviceSummary, ServerSummary, count_text, duration_text, size_text};

use crate::cuda_graphs::counted;
use crate::table::{Align, Table};
use crate::text_report::TextReport;

impl TextReport {
    /// The server in full.
    pub(crate) fn server_section(&mut self, device: &DeviceSummary) {
        let Some(server) = &device.server else {
            return self.line("  no engine that serves models (vLLM, SGLang) was recognized".to_owned());
        };
        self.server(server);
        device.colocation.iter().for_each(|colocation| self.colocation(colocation));
        self.server_advice(server, "What to try");
        self.stages(server);
        self.captured_sizes(server);
        if !server.attributes.is_empty() {
            self.list(&format!("Settings and figures of {}", server.engine));
            for (path, value) in &server.attributes {
                self.line(format!("    {path} = {value}"));
            }
        }
    }

    /// The parts of a server's memory, and what it had expected.
    pub(crate) fn server(&mut self, server: &ServerSummary) {
        self.list(&format!("{} {}, at the peak of {}", server.engine, server.when, size_text(server.allocated_bytes)));
        for part in server.parts.iter().filter(|part| part.bytes > 0) {
            self.row(part.bytes, server.allocated_bytes, part.kind.name());
        }
        if !server.weights_by_type.is_empty() {
            let types = server.weights_by_type.iter().map(|of| format!("{} {}", of.data_type, size_text(of.bytes)));
            let unnamed = Some(server.unnamed_weights_bytes).filter(|bytes| *bytes > 0);
            let unnamed = unnamed.map(|bytes| format!("no name {}", size_text(bytes)));
            self.labelled_list("Weights", &types.chain(unnamed).collect::<Vec<_>>().join(", "));
        }
        let cache = server.kv_cache.as_ref().map_or("", |cache| cache.text.as_str());
        self.labelled_list("KV cache", cache);
        let usage = server.kv_cache.as_ref().map_or("", |cache| cache.usage_text());
        self.labelled_list("KV cache use", usage);
        self.labelled_list("CUDA graphs by size", &server.captures_text);
        let expected = server.expectations.iter().map(|one| {
            let (expected, actual) = (size_text(one.expected_bytes), size_text(one.actual_bytes));
            format!("{} {expected}, took {actual}", one.part)
        });
        let label = format!("{} estimated", server.engine);
        for (at, text) in expected.enumerate() {
            self.labelled(if at == 0 { &label } else { "" }, &text);
        }
    }

    /// The activities of an engine and a trainer on the same device, and what would lower the highest.
    pub(crate) fn colocation(&mut self, colocation: &ColocationSummary) {
        let trainer = colocation.trainer.as_deref().unwrap_or("Trainer");
        let mut table = Table::new(&[
            ("Rollout and training", Align::Left),
            ("On the GPU", Align::Right),
            (&colocation.engine, Align::Right),
            (trainer, Align::Right),
            ("Most of it", Align::Left),
        ]);
        for one in &colocation.activities {
            let times = one.times.map(|times| format!(", {}", counted(times, "time"))).unwrap_or_default();
            table.row(vec![
                format!("{}{times}", one.activity.name()),
                size_text(one.bytes),
                size_text(one.engine_bytes),
                size_text(one.trainer_bytes),
                one.parts_text.clone(),
            ]);
        }
        let paused = colocation.activities.iter().map(|one| one.paused_bytes).max().unwrap_or(0);
        if paused > 0 {
            table.caption(format!(
                "PyTorch counts {} more that {} unmapped to sleep",
                size_text(paused),
                colocation.engine
            ));
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
        for text in &colocation.advice {
            self.item(4, text);
        }
    }

    /// The CUDA graphs of a server, by captured size.
    fn captured_sizes(&mut self, server: &ServerSummary) {
        if server.captured_sizes.is_empty() {
            return;
        }
        let is_named = server.captured_sizes.iter().any(|size| size.size.is_some());
        let mut table = Table::new(&[
            (if is_named { "Size" } else { "Captured" }, Align::Right),
            ("Graphs", Align::Right),
            ("Pool growth", Align::Right),
            ("Segments", Align::Right),
            ("Instantiated", Align::Right),
            ("Outputs", Align::Right),
            ("", Align::Left),
        ]);
        for (at, size) in server.captured_sizes.iter().enumerate() {
            let ordinal = || if is_named { String::new() } else { format!("{}.", at + 1) };
            table.row(vec![
                size.size.map_or_else(ordinal, count_text),
                count_text(size.graphs),
                size_text(size.pool_growth_bytes),
                count_text(size.segments),
                size_text(size.instantiated_bytes),
                size_text(size.kept_bytes),
                String::new(),
            ]);
        }
        self.blank();
        let lines = table.lines(0, self.width, self.style);
        self.lines.extend(lines);
    }

    /// Changes of a server's options, and what each brings. Returns `false` if there are none.
    pub(crate) fn server_advice(&mut self, server: &ServerSummary, heading: &str) -> bool {
        if server.advice.is_empty() {
            return false;
        }
        self.blank();
        self.heading(heading);
        server.advice.iter().for_each(|text| self.item(2, text));
        true
    }

    /// The stages of a server.
    pub(crate) fn stages(&mut self, server: &ServerSummary) {
        let mut table = Table::new(&[
            ("Stage", Align::Left),
            ("Start", Align::Right),
            ("Peak", Align::Right),
            ("End", Align::Right),
            ("Above start", Align::Right),
            ("Time", Align::Right),
            ("", Align::Left),
        ]);
        for stage in &server.stages {
            table.row(vec![
                stage.stage.name().to_owned(),
                size_text(stage.start_bytes),
                size_text(stage.peak_bytes),
                size_text(stage.end_bytes),
                size_text(stage.transient_bytes),
                duration_text(stage.duration_ns),
                String::new(),
            ]);
        }
        self.blank();
        let lines = table.lines(0, self.width, self.style);
        self.lines.extend(lines);
    }
}
