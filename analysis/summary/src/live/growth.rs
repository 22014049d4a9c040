//! How the allocated memory of a device grows: per step, and per minute.

use std::collections::VecDeque;

/// The number of steps and of time ranges that are kept.
const MAX_POINTS: usize = 48;
/// The number of points that a slope needs.
const MIN_POINTS: usize = 3;
/// The number of time ranges that a slope needs, of which the later half is used.
const MIN_RANGES: usize = 8;
/// The length of a time range at the beginning, in clock ticks. It doubles when there are too many.
const FIRST_RANGE: u64 = 1 << 26;

/// The allocated bytes at one point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Point {
    step: u32,
    ticks: u64,
    bytes: u64,
}

/// The levels of one device.
#[derive(Clone, Debug, Default)]
pub(super) struct Growth {
    /// The levels at which the latest steps began. The first step allocates what later ones find, so it does not count.
    steps: VecDeque<Point>,
    /// The lowest level of each time range.
    lowest: Vec<Point>,
    /// The length of a time range, and the end of the current one, in clock ticks.
    range: u64,
    range_end: u64,
}

impl Growth {
    /// A step begins at this level.
    pub(super) fn step_began(&mut self, step: u32, ticks: u64, bytes: u64) {
        if step == 0 {
            return;
        }
        if self.steps.len() == MAX_POINTS {
            self.steps.pop_front();
        }
        self.steps.push_back(Point { step, ticks, bytes });
    }

    /// The allocated bytes have changed.
    pub(super) fn changed(&mut self, ticks: u64, bytes: u64) {
        if self.range == 0 {
            self.range = FIRST_RANGE;
        }
        match self.lowest.last_mut() {
            Some(point) if ticks < self.range_end => point.bytes = point.bytes.min(bytes),
            _ => {
                if self.lowest.len() == MAX_POINTS {
                    self.halve();
                }
                self.lowest.push(Point { step: 0, ticks, bytes });
                self.range_end = ticks.saturating_add(self.range);
            }
        }
    }

    /// Joins each two neighboring time ranges.
    fn halve(&mut self) {
        let join = |two: &[Point]| Point { bytes: two.iter().map(|p| p.bytes).min().unwrap_or(0), ..two[0] };
        self.lowest = self.lowest.chunks(2).map(join).collect();
        self.range *= 2;
    }

    /// The growth in a step. `None` until [`MIN_POINTS`] steps have begun.
    pub(super) fn per_step(&self) -> Option<i64> {
        let steps: Vec<(f64, f64)> = self.steps.iter().map(|p| (f64::from(p.step), p.bytes as f64)).collect();
        slope(&steps).map(|slope| slope.round() as i64)
    }

    /// The growth in a minute, by the starts of steps, or else by the lowest levels. `None` if there are too few.
    pub(super) fn per_minute(&self, ns_per_tick: f64) -> Option<i64> {
        let of = |p: &Point| (p.ticks as f64 * ns_per_tick / 60e9, p.bytes as f64);
        let steps: Vec<(f64, f64)> = self.steps.iter().map(of).collect();
        let slope = if steps.len() >= MIN_POINTS {
            slope(&steps)
        } else {
            // The current range is not complete.
            let complete = &self.lowest[..self.lowest.len().saturating_sub(1)];
            if complete.len() < MIN_RANGES {
                return None;
            }
            slope(&complete[complete.len() / 2..].iter().map(of).collect::<Vec<_>>())
        };
        slope.map(|slope| slope.round() as i64)
    }
}

/// The median of the slopes between all two points (Theil-Sen), which single outliers do not change.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    if points.len() < MIN_POINTS {
        return None;
    }
    let mut slopes = Vec::new();
    for (at, (x, y)) in points.iter().enumerate() {
        slopes.extend(
            points[at + 1..].iter().filter(|(later, _)| later > x).map(|(later, level)| (level - y) / (later - x)),
        );
    }
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leak_grows_by_step_and_by_minute() {
        let mut growth = Growth::default();
        assert_eq!((growth.per_step(), growth.per_minute(1.0)), (None, None));
        for step in 0..100u32 {
            // The first step allocates the optimizer state. One step is an outlier.
            let other = if step == 90 { 5000 } else { 0 };
            let before = if step == 0 { 0 } else { 1_000_000 };
            growth.step_began(step, u64::from(step) * 1_000_000_000, before + u64::from(step) * 300 + other);
        }
        assert_eq!((growth.per_step(), growth.per_minute(1.0)), (Some(300), Some(18_000)));
        assert_eq!(growth.steps.len(), MAX_POINTS);
    }

    #[test]
    fn without_steps_the_lowest_levels_count() {
        let mut growth = Growth::default();
        let second = 1_000_000_000;
        for tick in 0..40_000u64 {
            // A request every 10 ms takes memory and frees it. Every tenth second one keeps 100 bytes.
            let at = tick * second / 100;
            let level = 5000 + at / (10 * second) * 100 + tick % 7 * 1000;
            growth.changed(at, level);
        }
        assert!(growth.lowest.len() <= MAX_POINTS);
        assert_eq!(growth.per_step(), None);
        let per_minute = growth.per_minute(1.0).unwrap();
        assert!((550..=650).contains(&per_minute), "{per_minute}");
        let mut steady = Growth::default();
        (0..40_000u64).for_each(|tick| steady.changed(tick * second / 100, 5000 + tick % 7 * 1000));
        assert_eq!(steady.per_minute(1.0), Some(0));
    }
}
