//! Shared by all charts of a curve: the shown categories, and readable axes.

use super::curve::{Curve, Point};
use memtrace_insight::passes::Category;

/// The categories above zero at any point, from the bottom of the stack to its top.
pub(super) fn shown_categories(points: &[Point]) -> Vec<Category> {
    let any = |category: &Category| points.iter().any(|point| point.bytes[*category as usize] > 0);
    Category::STACKED.into_iter().filter(any).collect()
}

/// The distance between axis labels: 1, 2 or 5 times a power of ten, so that at most `count` steps reach `most`.
pub(super) fn label_step(most: f64, count: f64) -> f64 {
    let rough = (most / count).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| *step >= rough).unwrap_or(10.0 * power)
}

/// A readable unit for a number of bytes.
fn byte_unit(bytes: f64) -> (f64, &'static str) {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fits = units.into_iter().find(|(_, power)| bytes >= f64::from(1u32 << power));
    fits.map_or((1.0, "bytes"), |(name, power)| (f64::from(1u32 << power), name))
}

fn time_unit(ns: f64) -> (f64, &'static str) {
    let units = [("s", 1e9), ("ms", 1e6), ("\u{b5}s", 1e3)];
    units.into_iter().find(|(_, unit)| ns >= 2.0 * unit).map_or((1.0, "ns"), |(name, unit)| (unit, name))
}

/// Formats a label with just enough decimals to distinguish labels.
pub(super) fn label(value: f64, step: f64) -> String {
    format!("{value:.*}", (-step.log10().floor()).max(0.0) as usize)
}

/// The scales of a chart: its axes and its peak.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales {
    /// The peak; of several, the first.
    pub(super) peak: Point,
    /// The time of the first point, in nanoseconds since 1970.
    pub(super) begin: u64,
    /// The time from the first to the last point in nanoseconds, at least 1.
    pub(super) span: f64,
    /// The unit of the time axis, in nanoseconds.
    pub(super) time_unit: (f64, &'static str),
    /// The distance between two labels of the time axis, in units.
    pub(super) time_step: f64,
    /// The unit of the memory axis, in bytes.
    pub(super) byte_unit: (f64, &'static str),
    /// The distance between two labels of the memory axis, in units.
    pub(super) byte_step: f64,
    /// The number of labels of the memory axis above zero.
    pub(super) byte_label_count: u32,
}

impl Scales {
    /// The scales of a curve; `None` if it has no points.
    pub(super) fn of(curve: &Curve) -> Option<Scales> {
        let points = &curve.points[..];
        let peak = *points.iter().rev().max_by_key(|point| point.total())?;
        let (begin, end) = (points.first()?.time_ns, points.last()?.time_ns);
        let span = end.saturating_sub(begin).max(1) as f64;
        let most = peak.total().max(1) as f64;
        let (byte_unit, time_unit) = (byte_unit(most), time_unit(span));
        let byte_step = label_step(most / byte_unit.0, 6.0);
        let byte_label_count = (most / byte_unit.0 / byte_step).ceil() as u32;
        Some(Scales {
            peak,
            begin,
            span,
            time_unit,
            time_step: label_step(span / time_unit.0, 10.0),
            byte_unit,
            byte_step,
            byte_label_count,
        })
    }

    /// The bytes at the top of the chart.
    pub(super) fn ceiling(&self) -> f64 {
        f64::from(self.byte_label_count) * self.byte_step * self.byte_unit.0
    }

    /// The horizontal position of a time: 0 at the first point, 1 at the last.
    pub(super) fn across(&self, time_ns: u64) -> f64 {
        time_ns.saturating_sub(self.begin) as f64 / self.span
    }

    /// The labels of the memory axis, with positions from 0 at the bottom to 1 at the top.
    pub(super) fn byte_labels(&self) -> impl Iterator<Item = (f64, String)> {
        let (count, step) = (self.byte_label_count, self.byte_step);
        (0..=count).map(move |i| (f64::from(i) / f64::from(count), label(f64::from(i) * step, step)))
    }

    /// The labels of the time axis, with positions as in [`Scales::across`].
    pub(super) fn time_labels(&self) -> impl Iterator<Item = (f64, String)> {
        let (whole, step) = (self.span / self.time_unit.0, self.time_step);
        (0..=(whole / step).floor() as u32)
            .map(move |i| (f64::from(i) * step / whole, label(f64::from(i) * step, step)))
    }

    /// Formats the peak: `peak 75.90 GiB at 12.34 s`.
    pub(super) fn peak(&self) -> String {
        let bytes = FourDigits(self.peak.total() as f64 / self.byte_unit.0);
        let time = FourDigits((self.peak.time_ns.saturating_sub(self.begin)) as f64 / self.time_unit.0);
        format!("peak {bytes} {} at {time} {}", self.byte_unit.1, self.time_unit.1)
    }

    /// The bytes of a category at the peak, for the legend.
    pub(super) fn at_peak(&self, category: Category) -> String {
        format!("{:.2} {}", self.peak.bytes[category as usize] as f64 / self.byte_unit.0, self.byte_unit.1)
    }
}

/// A number with four significant digits.
pub(super) struct FourDigits(pub(super) f64);

impl std::fmt::Display for FourDigits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = self.0.abs().max(1.0).log10().floor() as usize + 1;
        write!(f, "{:.*}", 4usize.saturating_sub(whole), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_labels_are_round_numbers() {
        assert_eq!((label_step(7.3, 6.0), label_step(0.5, 6.0), label_step(1100.0, 10.0)), (2.0, 0.1, 200.0));
        assert_eq!((label(0.30000000000000004, 0.1), label(200.0, 100.0)), ("0.3".to_owned(), "200".to_owned()));
        assert_eq!((byte_unit(3e9).1, byte_unit(100.0).1, time_unit(5e6).1), ("GiB", "bytes", "ms"));
        assert_eq!(format!("{} {}", FourDigits(12.3456), FourDigits(0.5)), "12.35 0.500");
    }

    #[test]
    fn the_first_of_equal_peaks_counts() {
        let point = |time_ns, bytes| {
            let mut point = Point { time_ns, bytes: [0; Category::ALL.len()] };
            point.bytes[0] = bytes;
            point
        };
        let points = vec![point(1, 5), point(2, 9), point(3, 9), point(4, 2)];
        let curve = Curve { points, is_exact: true };
        assert_eq!(Scales::of(&curve).unwrap().peak.time_ns, 2);
    }
}
