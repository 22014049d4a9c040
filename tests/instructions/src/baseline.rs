//! The counts that were accepted, and how a measurement compares with them.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// How much more than the baseline fails, and how much less asks for a new one.
pub(crate) const TOLERANCE: f64 = 0.03;

/// `baseline.json`.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Baseline {
    /// What the counts were taken with.
    pub(crate) conditions: BTreeMap<String, String>,
    /// By case.
    pub(crate) cases: BTreeMap<String, Counts>,
}

/// What one step of a case costs: one pair of an allocation and its free, or one node.
#[derive(Clone, Copy, Default, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Counts {
    /// Instructions in memtrace's library.
    pub(crate) instructions: f64,
    /// Its calls into the C library and the loader.
    pub(crate) c_library_calls: f64,
    /// Instructions in those. Shown and not compared: they are the machine's C library's.
    pub(crate) c_library_instructions: f64,
}

/// What a comparison says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Within the tolerance.
    Same,
    /// Cheaper by more than the tolerance: the baseline should follow.
    Cheaper(String),
    /// Dearer by more than the tolerance, or not in the baseline.
    Fails(String),
}

impl Baseline {
    /// Reads the file.
    pub(crate) fn read(path: &Path) -> Result<Baseline> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not a baseline", path.display()))
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// The release of Python (3.11) whose frames were walked: another's lie differently, and cost a few per cent more or less.
    pub(crate) fn python(&self) -> Option<&str> {
        self.conditions.get("python").map(|version| release(version))
    }

    /// Compares one case.
    pub(crate) fn compare(&self, case: &str, now: &Counts) -> Verdict {
        let Some(then) = self.cases.get(case) else { return Verdict::Fails("is not in the baseline".into()) };
        let (mut dearer, mut cheaper) = (Vec::new(), Vec::new());
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
                dearer.push(text);
            } else if change < -TOLERANCE {
                cheaper.push(text);
            }
        }
        match (dearer.is_empty(), cheaper.is_empty()) {
            (false, _) => Verdict::Fails(dearer.join("; ")),
            (true, false) => Verdict::Cheaper(cheaper.join("; ")),
            (true, true) => Verdict::Same,
        }
    }
}

/// Calls of fewer steps than every second are not the event's: a look at the program's objects, which time rations, asks the clock.
fn regular(calls: f64) -> f64 {
    if calls < 0.5 { 0.0 } else { calls }
}

/// `3.11.7`: `3.11`.
pub(crate) fn release(version: &str) -> &str {
    version.match_indices('.').nth(1).map_or(version, |(at, _)| &version[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_of_python_is_two_numbers() {
        assert_eq!((release("3.11.7"), release("3.14.0rc1"), release("3.11")), ("3.11", "3.14", "3.11"));
    }

    fn counts(instructions: f64, c_library_calls: f64) -> Counts {
        Counts { instructions, c_library_calls, c_library_instructions: 0.0 }
    }

    #[test]
    fn three_percent_either_way() {
        let baseline = Baseline { cases: [("a".into(), counts(1000.0, 10.0))].into(), conditions: BTreeMap::new() };
        let verdict = |i, c| baseline.compare("a", &counts(i, c));
        assert_eq!(verdict(1000.0, 10.0), Verdict::Same);
        assert_eq!(verdict(1030.0, 10.0), Verdict::Same);
        assert_eq!(verdict(1030.1, 10.0), Verdict::Fails("1030.1 instructions, +3.0 % against 1000.0".into()));
        assert!(matches!(verdict(1000.0, 11.0), Verdict::Fails(_)));
        assert!(matches!(verdict(969.0, 10.0), Verdict::Cheaper(_)));
        assert!(matches!(verdict(900.0, 11.0), Verdict::Fails(_)), "cheaper here is no excuse for dearer there");
        assert!(matches!(baseline.compare("b", &counts(1.0, 0.0)), Verdict::Fails(_)));
        // From nothing to something.
        let none = Baseline { cases: [("a".into(), counts(1000.0, 0.0))].into(), conditions: BTreeMap::new() };
        let some = Verdict::Fails("1.0 calls into the C library, where there were none".into());
        assert_eq!(none.compare("a", &counts(1000.0, 1.0)), some);
        assert_eq!(none.compare("a", &counts(1000.0, 0.1)), Verdict::Same, "now and then");
        assert_eq!(none.compare("a", &counts(1000.0, 0.0)), Verdict::Same);
    }
}
