//! Checks which clock provides the timestamps of events.

use std::time::Duration;

use memtrace_trace::clock::{self, Calibration, ClockPoint};

use super::diagnosis::Finding;

/// The length of the measurement. It determines the rate to about one in a thousand.
const WHILE: Duration = Duration::from_millis(5);

/// Reports the clock and its rate relative to `CLOCK_MONOTONIC`.
pub(super) fn clock() -> Finding {
    let what = "clock";
    if !clock::is_hardware() {
        return Finding::note(
            what,
            "the processor's time stamp counter is not invariant: CLOCK_MONOTONIC is read instead, some 20 ns more an event",
        );
    }
    let before = ClockPoint::read();
    std::thread::sleep(WHILE);
    let tick = Calibration::new(&[before, ClockPoint::read()]).ns_per_tick();
    Finding::ok(what, format!("the processor's invariant counter, {:.2} GHz", 1.0 / tick))
}
