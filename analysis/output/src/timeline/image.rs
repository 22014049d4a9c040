//! The timeline as a pixel image: areas by category over time, for chats, tickets and pages that do not accept HTML.

use std::io::{self, Write};

use super::axes::{Scales, shown_categories};
use super::canvas::{Anchor, Canvas, TEXT, text_width};
use super::curve::{Bytes, Curve, Point};
use memtrace_insight::passes::Category;

/// The size of the chart and the margins of the plot, in pixels.
const WIDTH: i32 = 1600;
const HEIGHT: i32 = 800;
const LEFT: i32 = 110;
const RIGHT: i32 = 420;
const TOP: i32 = 90;
const BOTTOM: i32 = 80;
const PLOT_WIDTH: i32 = WIDTH - LEFT - RIGHT;
const PLOT_HEIGHT: i32 = HEIGHT - TOP - BOTTOM;

const GRID: u32 = 0xdddddd;
const AXIS: u32 = 0x444444;
const PEAK: u32 = 0x000000;

/// Writes a PNG file.
pub(super) fn write(curve: &Curve, title: &str, out: impl Write) -> io::Result<()> {
    let mut canvas = Canvas::new(WIDTH, HEIGHT);
    draw(curve, title, &mut canvas);
    canvas.png(out)
}

fn draw(curve: &Curve, title: &str, canvas: &mut Canvas) {
    canvas.text(LEFT, 12, Anchor::Start, true, &format!("Allocated memory by category, {title}"));
    let Some(scales) = Scales::of(curve) else {
        canvas.text(LEFT, TOP, Anchor::Start, false, "no memory was allocated");
        return;
    };
    canvas.text(LEFT, 12 + TEXT + 6, Anchor::Start, false, &scales.peak());
    let (bottom, right) = (TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH);
    for (up, label) in scales.byte_labels() {
        let y = bottom - (f64::from(PLOT_HEIGHT) * up).round() as i32;
        canvas.fill(LEFT, y, PLOT_WIDTH, 1, GRID);
        canvas.text(LEFT - 10, y - TEXT / 2, Anchor::End, false, &label);
    }
    canvas.text(LEFT - 10, TOP - TEXT - 12, Anchor::End, false, scales.byte_unit.1);
    let mut free_from = i32::MIN;
    for (across, label) in scales.time_labels() {
        let x = LEFT + (f64::from(PLOT_WIDTH) * across).round() as i32;
        canvas.fill(x, bottom, 1, 6, AXIS);
        // Labels keep a distance of one letter.
        if x - text_width(&label) / 2 >= free_from {
            canvas.text(x, bottom + 10, Anchor::Middle, false, &label);
            free_from = x + text_width(&label) / 2 + text_width(" ");
        }
    }
    canvas.text(LEFT + PLOT_WIDTH / 2, bottom + 40, Anchor::Middle, false, &format!("time, {}", scales.time_unit.1));
    let shown = shown_categories(&curve.points);
    areas(curve, &scales, &shown, canvas);
    let peak = LEFT + column_of(&scales, scales.peak.time_ns) as i32;
    canvas.dashes(peak, TOP - 12, bottom, PEAK);
    canvas.fill(LEFT - 1, TOP, 1, PLOT_HEIGHT + 1, AXIS);
    canvas.fill(LEFT - 1, bottom, PLOT_WIDTH + 1, 1, AXIS);
    // The legend, from the top of the stack down, with each category's bytes at the peak.
    canvas.text(WIDTH - 20, TOP - TEXT - 12, Anchor::End, false, "at the peak");
    for (place, (category, color)) in shown.iter().rev().enumerate() {
        let y = TOP + place as i32 * (TEXT + 14);
        canvas.fill(right + 20, y, TEXT, TEXT, *color);
        canvas.text(right + 20 + TEXT + 10, y, Anchor::Start, false, category.plural());
        canvas.text(WIDTH - 20, y, Anchor::End, false, &scales.at_peak(*category));
    }
}

/// The pixel column of a time.
fn column_of(scales: &Scales, time_ns: u64) -> usize {
    ((scales.across(time_ns) * f64::from(PLOT_WIDTH)) as usize).min(PLOT_WIDTH as usize - 1)
}

/// Each column shows the peak of its time range, so that no peak between two columns is lost.
fn columns(points: &[Point], scales: &Scales) -> Vec<Bytes> {
    let mut columns: Vec<Bytes> = Vec::with_capacity(PLOT_WIDTH as usize);
    let mut now = [0; Category::ALL.len()];
    for point in points {
        let at = column_of(scales, point.time_ns);
        // Bytes stay constant until the next point.
        while columns.len() <= at {
            columns.push(now);
        }
        let total = |bytes: &Bytes| bytes.iter().sum::<i64>();
        if total(&point.bytes) > total(&columns[at]) {
            columns[at] = point.bytes;
        }
        now = point.bytes;
    }
    columns
}

fn areas(curve: &Curve, scales: &Scales, shown: &[(Category, u32)], canvas: &mut Canvas) {
    let row = |bytes: i64| (f64::from(PLOT_HEIGHT) * bytes.max(0) as f64 / scales.ceiling()).round() as i32;
    for (x, bytes) in columns(&curve.points, scales).iter().enumerate() {
        let mut under = 0;
        for (category, color) in shown {
            let over = under + bytes[*category as usize];
            let (from, to) = (row(under), row(over));
            canvas.fill(LEFT + x as i32, TOP + PLOT_HEIGHT - to, 1, to - from, *color);
            under = over;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_shows_the_peak_of_its_time_range() {
        let mut points = Vec::new();
        for (time_ns, bytes) in [(0, 100), (2_000, 10), (2_001, 900), (2_002, 20), (1_000_000, 30)] {
            let mut point = Point { time_ns, bytes: [0; Category::ALL.len()] };
            point.bytes[0] = bytes;
            points.push(point);
        }
        let scales = Scales::of(&Curve { points: points.clone(), is_exact: true }).unwrap();
        let drawn: Vec<i64> = columns(&points, &scales).iter().map(|bytes| bytes[0]).collect();
        assert_eq!(drawn.len(), PLOT_WIDTH as usize);
        assert_eq!((drawn[0], drawn[1], drawn[2], drawn[3]), (100, 100, 900, 20));
        assert_eq!(drawn[PLOT_WIDTH as usize - 1], 30);
    }
}
