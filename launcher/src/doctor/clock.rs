//! Checks which clock provides the timestamps of events.

use std::time::Duration;

use memtrace_trace::clock::{self, Calibration, ClockPoint};

use super::report::Check;

/// The length of the measurement. It determines the rate to about one in a thousand.
const MEASUREMENT: Duration = Duration::from_millis(5);

/// Reports the clock and its rate relative to `CLOCK_MONOTONIC`.
pub(super) fn clock() -> Check {
    let name = "Clock";
    if !clock::is_hardware() {
        return Check::note(
            name,
            "the time stamp counter is not invariant, so CLOCK_MONOTONIC is read, which costs about 20 ns per event",
        );
    }
    let before = ClockPoint::read();
    std::thread::sleep(MEASUREMENT);
    let ns_per_tick = Calibration::new(&[before, ClockPoint::read()]).ns_per_tick();
    Check::ok(name, format!("invariant time stamp counter, {:.2} GHz", 1.0 / ns_per_tick))
}
