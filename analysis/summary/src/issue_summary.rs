//! Issues in the results of the analysis.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use memtrace_insight::StackSummary;
use memtrace_insight::diagnostics::{LoopTurn, OomForecast};
use memtrace_insight::rules::RuleId;
use memtrace_insight::units::{estimate_text, estimated_duration_text, size_text};

/// An issue: a diagnostic rule matched.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct IssueSummary {
    /// The diagnostic rule that matched. docs/reference/diagnostics.md explains each rule.
    pub rule: RuleId,
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The cost of the issue: the number of bytes that are held needlessly.
    pub bytes: u64,
    /// The issue in one line.
    pub headline: String,
    /// The measured facts on which the rule rests, one per entry.
    pub evidence: Vec<String>,
    /// The call stack of the line to change, or of the allocations that the issue is about. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stack: Option<StackSummary>,
    /// The suggested change to the program.
    pub fix: String,
    /// The number of bytes by which the fix would lower the peak. Absent if this run does not show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saves_bytes: Option<u64>,
    /// When the device's memory would be full at the rate at which it filled. Absent if nothing grows, or if the
    /// device's memory is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<OomForecastSummary>,
    /// The names of files in the run folder that show more, most informative first. For a reference cycle, these are
    /// the pages with its objects (`--cycles`).
    pub files: Vec<String>,
    /// The Python paths that held these tensors (`--holders`), by bytes in descending order, when they held most.
    /// Absent if none is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_by: Vec<HolderSummary>,
    /// How to record more about this issue. Absent if there is nothing more to record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

/// Tensors that Python paths of one pattern hold.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HolderSummary {
    /// The path, for example `__main__.history[*]`. `*` stands for keys and positions that differ.
    pub path: String,
    /// The number of tensors' storages.
    pub tensors: u64,
    /// Their size in bytes.
    pub bytes: u64,
    /// The data type and shape of the tensors, for example `int64[8, 1900]`. Absent if they differ or are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<String>,
}

/// When a device's memory would be full at the rate at which it filled.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OomForecastSummary {
    /// The kind of turn of the program's loop.
    pub turn: LoopTurn,
    /// The number of turns until no memory is left.
    pub turns: u64,
    /// The duration of these turns in nanoseconds, as fast as the turns of this run. 0 if it is unknown.
    pub duration_ns: u64,
    /// The device memory that was free at the peaks of the last turns.
    pub free_bytes: u64,
    /// The growth per turn.
    pub growth_bytes: u64,
    /// The same as text, for example `out of memory in about 310 steps (90 s) at this rate`.
    pub text: String,
}

impl OomForecastSummary {
    /// `ns_per_tick` is the rate of the clock; `None` if the run does not show how long the program takes.
    pub(crate) fn of(forecast: &OomForecast, ns_per_tick: Option<f64>) -> OomForecastSummary {
        let mut summary = OomForecastSummary {
            turn: forecast.turn,
            turns: forecast.turns,
            duration_ns: ns_per_tick.map_or(0, |ns| (forecast.ticks as f64 * ns) as u64),
            free_bytes: forecast.free,
            growth_bytes: forecast.growth,
            text: String::new(),
        };
        summary.text = summary.to_text();
        summary
    }

    /// The text of these figures.
    fn to_text(&self) -> String {
        let turn = self.turn.name();
        let after = match self.turns {
            0 => return format!("out of memory within the next {turn} at this rate"),
            1 => format!("one {turn}"),
            turns => format!("{} {turn}s", estimate_text(turns)),
        };
        let time = match self.duration_ns {
            0 => String::new(),
            ns => format!(" ({})", estimated_duration_text(ns)),
        };
        let rate = match (self.turn, self.duration_ns) {
            (LoopTurn::Request, ns) if ns > 0 => {
                let requests = self.turns as f64 * 60e9 / ns as f64;
                let bytes = requests * 60.0 * self.growth_bytes as f64;
                format!(": {requests:.0} requests a minute, {} an hour", size_text(bytes as u64))
            }
            _ => String::new(),
        };
        format!("out of memory in about {after}{time} at this rate{rate}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_of_a_dry_run_has_no_time() {
        let forecast = OomForecast { turn: LoopTurn::Step, turns: 310, free: 3100, growth: 10, ticks: 90_000_000_000 };
        let on_gpu = OomForecastSummary::of(&forecast, Some(1.0));
        assert_eq!(on_gpu.text, "out of memory in about 310 steps (90 s) at this rate");
        // 40 requests a minute.
        let ticks = 28_000 * 60_000_000_000 / 40;
        let forecast =
            OomForecast { turn: LoopTurn::Request, turns: 28_000, free: 28_000 << 19, growth: 1 << 19, ticks };
        let server = OomForecastSummary::of(&forecast, Some(1.0)).text;
        assert!(
            server.starts_with("out of memory in about 28,000 requests (")
                && server.ends_with(") at this rate: 40 requests a minute, 1.17 GiB an hour"),
            "{server}"
        );
        let forecast = OomForecast { turn: LoopTurn::Step, turns: 310, free: 3100, growth: 10, ticks: 90_000_000_000 };
        let simulated = OomForecastSummary::of(&forecast, None);
        assert_eq!((simulated.duration_ns, &*simulated.text), (0, "out of memory in about 310 steps at this rate"));
    }
}
