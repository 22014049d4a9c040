//! The text formats of Prometheus and of OpenMetrics 1.0.
//!
//! Names follow Prometheus' conventions: base units, the unit as a suffix, `_total` for counters.

use std::fmt::Write as _;

use super::figures::{DeviceReading, PytorchReading, Reading};

/// A text format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    Prometheus,
    OpenMetrics,
}

impl Format {
    /// The format for a scraper that accepts these types.
    pub(super) fn accepted(accept: Option<&str>) -> Format {
        let is_open = accept.is_some_and(|accept| accept.contains("application/openmetrics-text"));
        if is_open { Format::OpenMetrics } else { Format::Prometheus }
    }

    /// The content type.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A metric of PyTorch's allocator.
struct PytorchMetric {
    /// Without the suffix `_total` of a counter.
    name: &'static str,
    is_counter: bool,
    help: &'static str,
    value: fn(&PytorchReading) -> u64,
}

const PYTORCH: [PytorchMetric; 5] = [
    PytorchMetric {
        name: "memtrace_allocated_bytes",
        is_counter: false,
        help: "Bytes of blocks in use, as torch.cuda.memory_allocated counts them.",
        value: |figures| figures.allocated_bytes,
    },
    PytorchMetric {
        name: "memtrace_reserved_bytes",
        is_counter: false,
        help: "Bytes of segments, as torch.cuda.memory_reserved counts them.",
        value: |figures| figures.reserved_bytes,
    },
    PytorchMetric {
        name: "memtrace_allocations",
        is_counter: true,
        help: "Blocks that PyTorch has allocated.",
        value: |figures| figures.allocations,
    },
    PytorchMetric {
        name: "memtrace_allocation_bytes",
        is_counter: true,
        help: "Bytes of the blocks that PyTorch has allocated.",
        value: |figures| figures.allocation_bytes,
    },
    PytorchMetric {
        name: "memtrace_out_of_memory_errors",
        is_counter: true,
        help: "Out-of-memory errors of PyTorch, caught or not.",
        value: |figures| figures.ooms,
    },
];

/// The metrics as text.
pub(super) fn text(readings: &[Reading], format: Format) -> String {
    let mut out = String::new();
    for metric in &PYTORCH {
        head(&mut out, metric.name, metric.is_counter, metric.help, format);
        let suffix = if metric.is_counter { "_total" } else { "" };
        for_each_device(readings, |reading, device, figures| {
            if let Some(pytorch) = &figures.pytorch {
                let (labels, value) = (labels(reading, device), (metric.value)(pytorch));
                _ = writeln!(out, "{}{suffix}{{{labels}}} {value}", metric.name);
            }
        });
    }
    let name = "memtrace_device_memory_bytes";
    head(&mut out, name, false, "Bytes that a library of the process has allocated from CUDA.", format);
    for_each_device(readings, |reading, device, figures| {
        for (owner, bytes) in &figures.by_owner {
            let owner = escaped(owner);
            _ = writeln!(out, "{name}{{{},owner=\"{owner}\"}} {bytes}", labels(reading, device));
        }
    });
    let over = readings.iter().filter(|reading| reading.is_over).count();
    for (name, help, value) in [
        ("memtrace_processes", "Processes that are being recorded.", readings.len()),
        ("memtrace_processes_without_figures", "Recorded processes whose figures are not followed any more.", over),
    ] {
        head(&mut out, name, false, help, format);
        _ = writeln!(out, "{name} {value}");
    }
    if format == Format::OpenMetrics {
        out.push_str("# EOF\n");
    }
    out
}

fn for_each_device(readings: &[Reading], mut each: impl FnMut(&Reading, i16, &DeviceReading)) {
    for reading in readings {
        reading.devices.iter().for_each(|(device, figures)| each(reading, *device, figures));
    }
}

fn head(out: &mut String, name: &str, is_counter: bool, help: &str, format: Format) {
    // Prometheus' own format names a counter with its suffix here, OpenMetrics without it.
    let suffix = if is_counter && format == Format::Prometheus { "_total" } else { "" };
    let kind = if is_counter { "counter" } else { "gauge" };
    _ = writeln!(out, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}");
    if format == Format::OpenMetrics && name.ends_with("_bytes") {
        _ = writeln!(out, "# UNIT {name} bytes");
    }
}

fn labels(reading: &Reading, device: i16) -> String {
    let rank = reading.rank.map(|rank| format!("rank=\"{rank}\",")).unwrap_or_default();
    format!("{rank}pid=\"{}\",device=\"{device}\"", reading.pid)
}

/// A label's value with its escapes.
fn escaped(text: &str) -> String {
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_counter_has_its_suffix_where_the_format_wants_it() {
        let pytorch = PytorchReading { allocated_bytes: 512, allocations: 3, ..PytorchReading::default() };
        let by_owner = BTreeMap::from([("NC\"CL\n".to_owned(), 64)]);
        let devices = BTreeMap::from([(1, DeviceReading { pytorch: Some(pytorch), by_owner })]);
        let readings = [Reading { pid: 7, rank: Some(2), is_over: false, devices }];
        let old = text(&readings, Format::accepted(Some("text/plain")));
        let new = text(&readings, Format::accepted(Some("application/openmetrics-text; version=1.0.0, */*;q=0.1")));
        for line in [
            "memtrace_allocated_bytes{rank=\"2\",pid=\"7\",device=\"1\"} 512\n",
            "memtrace_allocations_total{rank=\"2\",pid=\"7\",device=\"1\"} 3\n",
            "memtrace_device_memory_bytes{rank=\"2\",pid=\"7\",device=\"1\",owner=\"NC\\\"CL\"} 64\n",
            "memtrace_processes 1\n",
        ] {
            assert!(old.contains(line) && new.contains(line), "{line}\n{old}");
        }
        assert!(old.contains("# TYPE memtrace_allocations_total counter\n") && !old.contains("# EOF"), "{old}");
        assert!(new.contains("# TYPE memtrace_allocations counter\n") && new.ends_with("# EOF\n"), "{new}");
    }
}
