//! The text formats of Prometheus and of OpenMetrics 1.0.
//!
//! Names follow Prometheus' conventions: base units, the unit as a suffix, `_total` for counters.

use std::fmt::Write as _;

use super::figures::{Reading, for_each_device};
use super::metric::{BY_CATEGORY, DEVICE_MEMORY, EVENTS_WITHOUT_FIGURES, PROCESSES, PYTORCH, WITHOUT_FIGURES};

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

/// The metrics as text: the figures of the processes, and the number of events that are in none of them.
pub(super) fn text(readings: &[Reading], unfollowed_events: u64, format: Format) -> String {
    let mut out = String::new();
    for metric in &PYTORCH {
        let name = format!("memtrace_{}{}", metric.name, if metric.is_bytes { "_bytes" } else { "" });
        head(&mut out, &name, metric.is_counter, metric.help, format);
        let suffix = if metric.is_counter { "_total" } else { "" };
        for_each_device(readings, |reading, device, figures| {
            if let Some(pytorch) = &figures.pytorch {
                let (labels, value) = (labels(reading, device), (metric.value)(pytorch));
                _ = writeln!(out, "{name}{suffix}{{{labels}}} {value}");
            }
        });
    }
    let name = "memtrace_device_memory_bytes";
    head(&mut out, name, false, DEVICE_MEMORY, format);
    for_each_device(readings, |reading, device, figures| {
        for (owner, bytes) in &figures.by_owner {
            let owner = escaped(owner);
            _ = writeln!(out, "{name}{{{},owner=\"{owner}\"}} {bytes}", labels(reading, device));
        }
    });
    let name = "memtrace_allocated_by_category_bytes";
    head(&mut out, name, false, BY_CATEGORY, format);
    for_each_device(readings, |reading, device, figures| {
        for (category, bytes) in &figures.by_category {
            let category = category.name();
            _ = writeln!(out, "{name}{{{},category=\"{category}\"}} {bytes}", labels(reading, device));
        }
    });
    let over = readings.iter().filter(|reading| reading.is_over).count();
    for (name, help, value) in [
        ("memtrace_processes", PROCESSES, readings.len()),
        ("memtrace_processes_without_figures", WITHOUT_FIGURES, over),
    ] {
        head(&mut out, name, false, help, format);
        _ = writeln!(out, "{name} {value}");
    }
    let name = "memtrace_events_without_figures";
    head(&mut out, name, true, EVENTS_WITHOUT_FIGURES, format);
    _ = writeln!(out, "{name}_total {unfollowed_events}");
    if format == Format::OpenMetrics {
        out.push_str("# EOF\n");
    }
    out
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
    let workload: String =
        reading.labels.iter().map(|(name, value)| format!(",{name}=\"{}\"", escaped(value))).collect();
    format!("{rank}pid=\"{}\",device=\"{device}\"{workload}", reading.pid)
}

/// A label's value with its escapes.
fn escaped(text: &str) -> String {
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use memtrace_analysis::passes::Category;

    use super::super::figures::{DeviceReading, PytorchReading};
    use super::*;

    #[test]
    fn a_counter_has_its_suffix_where_the_format_wants_it() {
        let pytorch = PytorchReading { allocated_bytes: 512, allocations: 3, ..PytorchReading::default() };
        let by_owner = BTreeMap::from([("NC\"CL\n".to_owned(), 64)]);
        let by_category = BTreeMap::from([(Category::OptimizerState, 256)]);
        let devices = BTreeMap::from([(1, DeviceReading { pytorch: Some(pytorch), by_owner, by_category })]);
        let without_workload =
            Reading { pid: 8, rank: None, labels: Vec::new(), is_over: false, devices: devices.clone() };
        let labels = vec![("pod", "trainer-7f".to_owned()), ("user", "a\"\\b".to_owned())];
        let readings = [Reading { pid: 7, rank: Some(2), labels, is_over: false, devices }, without_workload];
        let old = text(&readings, 4, Format::accepted(Some("text/plain")));
        let accept = "application/openmetrics-text; version=1.0.0, */*;q=0.1";
        let new = text(&readings, 4, Format::accepted(Some(accept)));
        for line in [
            "memtrace_allocated_bytes{rank=\"2\",pid=\"7\",device=\"1\",pod=\"trainer-7f\",user=\"a\\\"\\\\b\"} 512\n",
            "memtrace_allocations_total{pid=\"8\",device=\"1\"} 3\n",
            "memtrace_device_memory_bytes{pid=\"8\",device=\"1\",owner=\"NC\\\"CL\"} 64\n",
            "memtrace_allocated_by_category_bytes{pid=\"8\",device=\"1\",category=\"optimizer_state\"} 256\n",
            "memtrace_processes 2\n",
            "memtrace_events_without_figures_total 4\n",
        ] {
            assert!(old.contains(line) && new.contains(line), "{line}\n{old}");
        }
        assert!(old.contains("# TYPE memtrace_allocations_total counter\n") && !old.contains("# EOF"), "{old}");
        assert!(new.contains("# TYPE memtrace_allocations counter\n") && new.ends_with("# EOF\n"), "{new}");
    }
}
