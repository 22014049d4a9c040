//! Compares the clocks of hosts by the steps that they have in common.
//!
//! Each run has the wall clock of its host, read once. Two hosts' clocks differ by an unknown offset, usually that of
//! NTP. If each step of a job waits for all ranks, no host is more than a step ahead. Where a step begins in a program
//! is not the same on all ranks: it can be before or after the wait. So a step cannot begin on one host after the
//! second next one has begun on another. Where the clocks say so, they differ by at least that much. More is not known,
//! so the report shifts no times.

use std::collections::BTreeMap;

use super::report::HostClock;
use crate::summary::StepSummary;

/// The steps of a host: of each step, the earliest start of its ranks.
#[derive(Default)]
pub(super) struct HostSteps(BTreeMap<u32, u64>);

impl HostSteps {
    pub(super) fn add(&mut self, steps: &[StepSummary]) {
        for step in steps.iter().filter(|step| step.time_ns > 0) {
            let start = self.0.entry(step.step).or_insert(step.time_ns);
            *start = (*start).min(step.time_ns);
        }
    }
}

/// The clocks of all hosts but the reference. Hosts without a common step are left out.
pub(super) fn clocks(reference: &str, hosts: &BTreeMap<String, HostSteps>) -> Vec<HostClock> {
    let Some(base) = hosts.get(reference) else { return Vec::new() };
    let others = hosts.iter().filter(|(host, _)| *host != reference);
    others.filter_map(|(host, steps)| clock(host, base, steps)).collect()
}

fn clock(host: &str, base: &HostSteps, steps: &HostSteps) -> Option<HostClock> {
    let minus = |a: u64, b: u64| (a as i64).wrapping_sub(b as i64);
    let common = steps.0.iter().filter_map(|(step, own)| Some(minus(*own, *base.0.get(step)?)));
    let mut later: Vec<i64> = common.collect();
    later.sort_unstable();
    let median = *later.get(later.len().checked_sub(1)? / 2)?;
    // By how much a step began on `a` after the second next one had begun on `b`.
    let apart = |a: &HostSteps, b: &HostSteps| {
        let steps = a.0.iter().filter_map(|(step, start)| Some(minus(*start, *b.0.get(&step.checked_add(2)?)?)));
        steps.max().unwrap_or_default()
    };
    let apart = apart(steps, base).max(apart(base, steps));
    Some(HostClock {
        host: host.to_owned(),
        common_steps: later.len() as u64,
        later_ns: median,
        lowest_ns: later.first().copied().unwrap_or_default(),
        highest_ns: later.last().copied().unwrap_or_default(),
        differs_at_least_ns: apart.max(0).cast_unsigned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(times: &[(u32, u64)]) -> HostSteps {
        let mut steps = HostSteps::default();
        let times = times.iter().map(|(step, time_ns)| StepSummary {
            step: *step,
            time_ns: *time_ns,
            ..StepSummary::default()
        });
        steps.add(&times.collect::<Vec<_>>());
        steps
    }

    #[test]
    fn only_impossible_times_prove_that_clocks_differ() {
        let hosts = BTreeMap::from([
            ("a".to_owned(), steps(&[(0, 1_000), (1, 1_100), (2, 1_200), (9, 2_000)])),
            ("close".to_owned(), steps(&[(0, 1_030), (1, 1_120), (2, 1_220), (1, 1_190)])),
            // It begins each step after the next one has begun: it can be slow.
            ("slow".to_owned(), steps(&[(0, 1_150), (1, 1_190), (2, 1_250)])),
            ("ahead".to_owned(), steps(&[(0, 1_250), (1, 1_340), (2, 1_440)])),
            ("behind".to_owned(), steps(&[(0, 700), (1, 800), (2, 900)])),
            ("none".to_owned(), steps(&[(5, 700)])),
        ]);
        let found = clocks("a", &hosts);
        let figures = |clock: &HostClock| {
            (clock.common_steps, clock.later_ns, clock.lowest_ns, clock.highest_ns, clock.differs_at_least_ns)
        };
        let found: Vec<_> = found.iter().map(|clock| (clock.host.as_str(), figures(clock))).collect();
        assert_eq!(
            found,
            [
                ("ahead", (3, 240, 240, 250, 50)),
                ("behind", (3, -300, -300, -300, 100)),
                ("close", (3, 20, 20, 30, 0)),
                ("slow", (3, 90, 50, 150, 0)),
            ]
        );
        assert!(clocks("unknown", &hosts).is_empty());
    }
}
