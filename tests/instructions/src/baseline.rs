//! The accepted instruction counts, and the comparison of a measurement with them.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The relative tolerance. A larger count fails; a smaller count asks for a new baseline.
pub(crate) const TOLERANCE: f64 = 0.03;

/// The content of `baseline.json`.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Baseline {
    /// The versions of the tools that the counts were measured with, by name.
    pub(crate) conditions: BTreeMap<String, String>,
    /// The counts by case name.
    pub(crate) cases: BTreeMap<String, Counts>,
}

/// The cost of one step of a case. A step is one allocation with its free, or one autograd node.
#[derive(Clone, Copy, Default, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Counts {
    /// Instructions executed in memtrace's library.
    pub(crate) instructions: f64,
    /// Calls from memtrace's library into the C library and the loader.
    pub(crate) c_library_calls: f64,
    /// Instructions executed in those calls. They depend on the machine's C library, so they are printed and not
    /// compared.
    pub(crate) c_library_instructions: f64,
}

/// The result of comparing one case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Comparison {
    /// Within the tolerance.
    Same,
    /// Cheaper by more than the tolerance: the baseline should be updated.
    Cheaper(String),
    /// More expensive by more than the tolerance, or missing in the baseline.
    Fails(String),
}

impl Baseline {
    /// Reads the file. Fails when it cannot be read or is not a baseline.
    pub(crate) fn read(path: &Path) -> Result<Baseline> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not a baseline", path.display()))
    }

    /// Writes the file. Fails when it cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// The Python release (such as `3.11`) of the baseline, if it is noted. Other releases lay out frames differently,
    /// which changes the counts by a few percent.
    pub(crate) fn python(&self) -> Option<&str> {
        self.conditions.get("python").map(|version| release(version))
    }

    /// Compares one case's counts with the baseline.
    pub(crate) fn compare(&self, case: &str, now: &Counts) -> Comparison {
        let Some(then) = self.cases.get(case) else { return Comparison::Fails("is not in the baseline".into()) };
        let (mut more, mut cheaper) = (Vec::new(), Vec::new());
        for (what, now, then) in [
            ("instructions", now.instructions, then.instructions),
            ("calls into the C library", regular(now.c_library_calls), regular(then.c_library_calls)),
        ] {
            let change = if now == then { 0.0 } else { (now - then) / then };
            let text = match then {
                0.0 => format!("{now:.1} {what}, where there were none"),
                _ => format!("{now:.1} {what}, {:+.1} % against {then:.1}", change * 100.0),
            };
            if change > TOLERANCE {
                more.push(text);
            } else if change < -TOLERANCE {
                cheaper.push(text);
            }
        }
        match (more.is_empty(), cheaper.is_empty()) {
            (false, _) => Comparison::Fails(more.join("; ")),
            (true, false) => Comparison::Cheaper(cheaper.join("; ")),
            (true, true) => Comparison::Same,
        }
    }
}

/// Treats fewer than one call in two steps as none. Such calls do not belong to the event: the rate-limited heap scan
/// reads the clock.
fn regular(calls: f64) -> f64 {
    if calls < 0.5 { 0.0 } else { calls }
}

/// The release of a version: `3.11` for `3.11.7`.
pub(crate) fn release(version: &str) -> &str {
    version.match_indices('.').nth(1).map_or(version, |(at, _)| &version[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_release_is_major_and_minor() {
        assert_eq!((release("3.11.7"), release("3.14.0rc1"), release("3.11")), ("3.11", "3.14", "3.11"));
    }

    fn counts(instructions: f64, c_library_calls: f64) -> Counts {
        Counts { instructions, c_library_calls, c_library_instructions: 0.0 }
    }

    #[test]
    fn cost_increases_over_three_percent_fail() {
        let baseline = Baseline { cases: [("a".into(), counts(1000.0, 10.0))].into(), conditions: BTreeMap::new() };
        let compared = |i, c| baseline.compare("a", &counts(i, c));
        assert_eq!(compared(1000.0, 10.0), Comparison::Same);
        assert_eq!(compared(1030.0, 10.0), Comparison::Same);
        assert_eq!(compared(1030.1, 10.0), Comparison::Fails("1030.1 instructions, +3.0 % against 1000.0".into()));
        assert!(matches!(compared(1000.0, 11.0), Comparison::Fails(_)));
        assert!(matches!(compared(969.0, 10.0), Comparison::Cheaper(_)));
        assert!(
            matches!(compared(900.0, 11.0), Comparison::Fails(_)),
            "cheaper here is no excuse for more expensive there"
        );
        assert!(matches!(baseline.compare("b", &counts(1.0, 0.0)), Comparison::Fails(_)));
        // The C library calls grow from none to some.
        let none = Baseline { cases: [("a".into(), counts(1000.0, 0.0))].into(), conditions: BTreeMap::new() };
        let some = Comparison::Fails("1.0 calls into the C library, where there were none".into());
        assert_eq!(none.compare("a", &counts(1000.0, 1.0)), some);
        assert_eq!(none.compare("a", &counts(1000.0, 0.1)), Comparison::Same, "now and then");
        assert_eq!(none.compare("a", &counts(1000.0, 0.0)), Comparison::Same);
    }
}
