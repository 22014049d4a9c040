//! Timestamps: one cheap read for each event, converted to the wall clock afterwards.
//!
//! The unit of a timestamp is one count of the processor's counter with a constant rate: the time-stamp
//! counter of x86-64, the virtual counter of AArch64. Without such a counter it is a
//! nanosecond of `CLOCK_MONOTONIC`. The launcher and the traced process run on one machine and read the same counter.
//! The launcher writes [`ClockPoint`]s into the trace, and [`Calibration`] converts with them.

// The standard library's atomics, not those of `crate::sync`, because the clock is in no loom model.
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::arch;

/// The counter that [`now`] reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TimeSource {
    Unknown = 0,
    Hardware = 1,
    Monotonic = 2,
}

static TIME_SOURCE: AtomicU32 = AtomicU32::new(TimeSource::Unknown as u32);

/// Whether [`now`] reads the processor's counter.
pub fn is_hardware() -> bool {
    now();
    TIME_SOURCE.load(Relaxed) == TimeSource::Hardware as u32
}

/// The current time in counts of the counter.
#[inline]
pub fn now() -> u64 {
    match TIME_SOURCE.load(Relaxed) {
        1 => arch::counter(),
        2 => monotonic_ns(),
        _ => {
            let source = if arch::counter_is_invariant() { TimeSource::Hardware } else { TimeSource::Monotonic };
            TIME_SOURCE.store(source as u32, Relaxed);
            now()
        }
    }
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec, and the call cannot fail for the two clocks used here.
    unsafe { libc::clock_gettime(clock, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// `CLOCK_MONOTONIC`, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// `CLOCK_REALTIME`, in nanoseconds since the epoch. For comparisons with what another program has read; see
/// [`epoch_ns`].
pub fn realtime_ns() -> u64 {
    clock_ns(libc::CLOCK_REALTIME)
}

/// `CLOCK_REALTIME` without later adjustments, in nanoseconds since the epoch. It is `CLOCK_MONOTONIC` plus an offset
/// read at the first call.
///
/// Everything that one launcher writes uses this clock. If the machine's clock is stepped during a run, order and
/// durations stay correct, also between processes whose recordings began before and after the step.
pub fn epoch_ns() -> u64 {
    static OFFSET: OnceLock<u64> = OnceLock::new();
    let offset = *OFFSET.get_or_init(|| realtime_ns().wrapping_sub(monotonic_ns()));
    monotonic_ns().wrapping_add(offset)
}

/// The latest time that a recording can claim, in nanoseconds since the epoch: in the year 2262. Files for other
/// programs have times as signed numbers.
pub const MAX_EPOCH_NS: u64 = i64::MAX as u64;

/// One point in time on three clocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ClockPoint {
    /// The result of [`now`], in counts.
    pub ticks: u64,
    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub monotonic_ns: u64,
    /// The result of [`epoch_ns`], in nanoseconds.
    pub realtime_ns: u64,
}

impl ClockPoint {
    /// Reads the three clocks as close together as possible: the best of five attempts.
    pub fn read() -> ClockPoint {
        let mut best: Option<(u64, ClockPoint)> = None;
        for _ in 0..5 {
            let before = now();
            let monotonic_ns = monotonic_ns();
            let realtime_ns = epoch_ns();
            let after = now();
            let spread = after.wrapping_sub(before);
            if best.is_none_or(|(s, _)| spread < s) {
                best = Some((spread, ClockPoint { ticks: before.wrapping_add(spread / 2), monotonic_ns, realtime_ns }));
            }
        }
        best.map(|(_, p)| p).unwrap_or_default()
    }
}

/// Converts counter values to nanoseconds since the epoch.
///
/// The rate comes from the first and the last [`ClockPoint`], the offset from the first. So time never runs backwards
/// in a trace, even if the wall clock is stepped during the run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Calibration {
    first: ClockPoint,
    ns_per_tick: f64,
}

impl Calibration {
    /// Makes a calibration from all points of a trace, in order. Without two distinct points, one count is taken as one
    /// nanosecond.
    pub fn new(points: &[ClockPoint]) -> Calibration {
        let first = points.first().copied().unwrap_or_default();
        let last = points.last().copied().unwrap_or_default();
        let ticks = last.ticks.saturating_sub(first.ticks);
        let ns = last.monotonic_ns.saturating_sub(first.monotonic_ns);
        let ns_per_tick = if ticks > 0 && ns > 0 { ns as f64 / ticks as f64 } else { 1.0 };
        Calibration { first, ns_per_tick }
    }

    /// Converts a counter value to nanoseconds since the epoch, at most [`MAX_EPOCH_NS`].
    pub fn epoch_ns(&self, ticks: u64) -> u64 {
        let delta = ticks.wrapping_sub(self.first.ticks) as i64;
        self.first.realtime_ns.saturating_add_signed((delta as f64 * self.ns_per_tick) as i64).min(MAX_EPOCH_NS)
    }

    /// The length of one count in nanoseconds.
    pub fn ns_per_tick(&self) -> f64 {
        self.ns_per_tick
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_convert_to_the_wall_clock() {
        let point = |ticks, ns| ClockPoint { ticks, monotonic_ns: ns, realtime_ns: 1_000_000_000 + ns };
        let c = Calibration::new(&[point(1_000, 0), point(2_000, 10_000), point(3_000, 1_000)]);
        assert_eq!(c.ns_per_tick(), 0.5);
        assert_eq!(c.epoch_ns(1_000), 1_000_000_000);
        assert_eq!(c.epoch_ns(3_000), 1_000_001_000);
        assert_eq!(c.epoch_ns(0), 999_999_500);
    }

    #[test]
    fn claimed_times_stay_in_range() {
        let point = |ticks, realtime_ns| ClockPoint { ticks, monotonic_ns: ticks, realtime_ns };
        for first in [u64::MAX, MAX_EPOCH_NS, 0] {
            let c = Calibration::new(&[point(0, first), point(1, 0)]);
            for ticks in [0, 1, u64::MAX / 2, u64::MAX] {
                assert!(c.epoch_ns(ticks) <= MAX_EPOCH_NS);
            }
        }
    }

    #[test]
    fn a_trace_without_points_still_converts() {
        assert_eq!(Calibration::new(&[]).epoch_ns(17), 17);
    }

    #[test]
    fn the_clock_never_runs_backward() {
        let a = now();
        let b = now();
        assert!(b >= a);
    }
}
