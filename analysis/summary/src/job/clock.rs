//! Compares the clocks of hosts by the steps that they have in common.
//!
//! Each run has the wall clock of its host, read once. Two hosts' clocks differ by an unknown offset, usually that of
//! NTP. A step of a synchronous job waits for all ranks. So it cannot end on one host before it began on another: where
//! the clocks say so, they differ by at least that much. More is not known, so the report shifts no times.

use std::collections::BTreeMap;

use super::report::HostClock;
use super::stored_summary::StepTime;

/// The steps of a host: of each step, the earliest start and the latest end of its ranks.
#[derive(Default)]
pub(super) struct HostSteps(BTreeMap<u32, (u64, u64)>);

impl HostSteps {
    pub(super) fn add(&mut self, steps: &[StepTime]) {
        for step in steps.iter().filter(|step| step.time_ns > 0) {
            let end = step.time_ns.saturating_add(step.duration_ns);
            let times = self.0.entry(step.step).or_insert((step.time_ns, end));
            *times = (times.0.min(step.time_ns), times.1.max(end));
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
    let common = || steps.0.iter().filter_map(|(step, times)| Some((base.0.get(step)?, times)));
    let minus = |a: u64, b: u64| (a as i64).wrapping_sub(b as i64);
    let mut later: Vec<i64> = common().map(|(base, own)| minus(own.0, base.0)).collect();
    later.sort_unstable();
    let median = *later.get(later.len().checked_sub(1)? / 2)?;
    // By how much a step began on one host after it had ended on the other.
    let apart = common().map(|(base, own)| minus(own.0, base.1).max(minus(base.0, own.1)));
    Some(HostClock {
        host: host.to_owned(),
        common_steps: later.len() as u64,
        later_ns: median,
        lowest_ns: later.first().copied().unwrap_or_default(),
        highest_ns: later.last().copied().unwrap_or_default(),
        differs_at_least_ns: apart.max().unwrap_or_default().max(0).cast_unsigned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(times: &[(u32, u64, u64)]) -> HostSteps {
        let mut steps = HostSteps::default();
        let times = times.iter().map(|(step, time_ns, duration_ns)| StepTime {
            step: *step,
            time_ns: *time_ns,
            duration_ns: *duration_ns,
        });
        steps.add(&times.collect::<Vec<_>>());
        steps
    }

    #[test]
    fn only_impossible_times_prove_that_clocks_differ() {
        let base = steps(&[(0, 1_000, 100), (1, 1_100, 100), (9, 2_000, 100)]);
        let hosts = BTreeMap::from([
            ("a".to_owned(), base),
            ("close".to_owned(), steps(&[(0, 1_030, 100), (1, 1_120, 100), (2, 1_220, 100)])),
            ("ahead".to_owned(), steps(&[(0, 1_250, 100), (1, 1_340, 100)])),
            ("behind".to_owned(), steps(&[(1, 700, 100)])),
            ("none".to_owned(), steps(&[(5, 700, 100)])),
        ]);
        let found = clocks("a", &hosts);
        let figures = |clock: &HostClock| {
            (clock.common_steps, clock.later_ns, clock.lowest_ns, clock.highest_ns, clock.differs_at_least_ns)
        };
        let found: Vec<_> = found.iter().map(|clock| (clock.host.as_str(), figures(clock))).collect();
        assert_eq!(
            found,
            [("ahead", (2, 240, 240, 250, 150)), ("behind", (1, -400, -400, -400, 300)), ("close", (2, 20, 20, 30, 0)),]
        );
        assert!(clocks("unknown", &hosts).is_empty());
    }
}
