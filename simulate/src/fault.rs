//! Failures on demand: `SIMCUDA_FAIL="cuMemAlloc_v2:5,cudaHostAlloc:1+"`.
//!
//! An entry is `NAME:N` (the N-th call, counted from 1) or `NAME:N+` (the N-th and all later calls). NAME is the exact
//! symbol name of an exported allocation function, or `any`. `any` counts all allocation calls that reach the driver. A
//! failed call returns "out of memory" and has no other effect.

use std::collections::HashMap;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    api: String,
    nth: u64,
    and_later: bool,
}

/// The requested failures and the number of calls so far.
#[derive(Debug, Default)]
pub struct Faults {
    rules: Vec<Rule>,
    calls: HashMap<String, u64>,
    driver_calls: u64,
}

impl Faults {
    /// Parses the setting. `None` when it is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        let rules = text
            .split(',')
            .map(|entry| {
                let (api, count) = entry.trim().split_once(':')?;
                let nth = count.trim_end_matches('+').parse().ok().filter(|&n| n > 0)?;
                Some(Rule { api: api.to_string(), nth, and_later: count.ends_with('+') })
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Faults { rules, ..Faults::default() })
    }

    /// Counts a call of `api` and returns whether it must fail. `driver` says whether it is a call of the driver.
    pub fn strikes(&mut self, api: &str, driver: bool) -> bool {
        if self.rules.is_empty() {
            return false;
        }
        let count = self.calls.entry(api.to_string()).or_default();
        *count += 1;
        let count = *count;
        self.driver_calls += u64::from(driver);
        self.rules.iter().any(|rule| {
            let n = match rule.api.as_str() {
                "any" if driver => self.driver_calls,
                name if name == api => count,
                _ => return false,
            };
            n == rule.nth || (rule.and_later && n > rule.nth)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails() {
        let mut faults = Faults::parse("cuMemAlloc_v2:2,cudaMalloc:3+").unwrap();
        let driver: Vec<_> = (0..4).map(|_| faults.strikes("cuMemAlloc_v2", true)).collect();
        assert_eq!(driver, [false, true, false, false]);
        let runtime: Vec<_> = (0..4).map(|_| faults.strikes("cudaMalloc", false)).collect();
        assert_eq!(runtime, [false, false, true, true]);
    }

    #[test]
    fn the_rule_any_counts_driver_calls_only() {
        let mut faults = Faults::parse("any:2").unwrap();
        assert!(!faults.strikes("cudaMalloc", false));
        assert!(!faults.strikes("cuMemAlloc_v2", true));
        assert!(!faults.strikes("cudaHostAlloc", false));
        assert!(faults.strikes("cuMemHostAlloc", true));
        assert!(!faults.strikes("cuMemCreate", true));
    }

    #[test]
    fn invalid_rules_are_refused() {
        for text in ["", "cuMemAlloc_v2", "any:0", "any:x", "any:1,,"] {
            assert!(Faults::parse(text).is_none(), "{text}");
        }
    }
}
