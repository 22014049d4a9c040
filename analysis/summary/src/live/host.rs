//! The main memory of a running recording.

use memtrace_input::RunFolder;
use memtrace_input::load::HostSamples;
use memtrace_trace::file::Budget;

use super::report::LiveHost;
use crate::build_host::of_samples;

/// The main memory of the processes of a recording that runs. `None` without samples.
pub fn live_host(folder: &RunFolder) -> Option<LiveHost> {
    let samples = HostSamples::read_within(folder, &Budget::default()).ok()?;
    let host = of_samples(&samples, &[], false, true)?;
    Some(LiveHost {
        bytes: host.end.bytes,
        peak_bytes: host.peak.bytes,
        limit: host.limit,
        limit_bytes: host.limit_bytes,
        growth: host.growth.map(|growth| growth.text),
    })
}
