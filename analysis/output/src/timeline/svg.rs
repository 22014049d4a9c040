//! The timeline as an SVG picture: areas by category over time, for tickets, chats and documents. It loads nothing.

use std::fmt::Write as _;
use std::io::{self, Write};

use super::axes::{Scales, shown_categories};
use super::curve::{Curve, Point};
use memtrace_input::printable;

/// The size of the picture and the margins of the plot, in CSS pixels. The legend stands on the right.
const WIDTH: f64 = 1200.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 310.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;

/// The height of one line of the legend, in CSS pixels.
const LEGEND_LINE: f64 = 22.0;

const STYLE: &str = "text { font: 13px system-ui, sans-serif; fill: #222; } .title { font-weight: bold; } \
    .grid { stroke: #ddd; } .axis { stroke: #444; } .peak { stroke: #000; stroke-dasharray: 5 4; } \
    .end { text-anchor: end; } .mid { text-anchor: middle; }";

/// Writes the picture.
pub(super) fn write(curve: &Curve, title: &str, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(svg(curve, &printable::html(title)).as_bytes())?;
    out.flush()
}

/// `title` must be escaped already.
fn svg(curve: &Curve, title: &str) -> String {
    let points = &curve.points[..];
    let head = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\">\n\
         <title>Allocated memory by category, {title}</title>\n<style>{STYLE}</style>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <text class=\"title\" x=\"{LEFT}\" y=\"18\">Allocated memory by category, {title}</text>\n"
    );
    let Some(scales) = Scales::of(curve) else {
        return format!("{head}<text x=\"{LEFT}\" y=\"{TOP}\">no memory was allocated</text>\n</svg>\n");
    };
    let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let ceiling = scales.ceiling();
    let x = |time_ns: u64| LEFT + wide * scales.across(time_ns);
    let y = |bytes: f64| TOP + high * (1.0 - bytes / ceiling);
    let mut svg = head;
    // Writing to a string cannot fail.
    let mut put = |args: std::fmt::Arguments<'_>| {
        let _ = svg.write_fmt(args);
    };
    let bottom = HEIGHT - BOTTOM;
    for (up, text) in scales.byte_labels() {
        let at = y(up * ceiling);
        let (right, label) = (WIDTH - RIGHT, LEFT - 8.0);
        put(format_args!("<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"));
        put(format_args!("<text class=\"end\" x=\"{label}\" y=\"{:.1}\">{text}</text>\n", at + 4.0));
    }
    for (across, text) in scales.time_labels() {
        let at = LEFT + wide * across;
        put(format_args!(
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{}\"/>",
            bottom + 5.0
        ));
        put(format_args!("<text class=\"mid\" x=\"{at:.1}\" y=\"{}\">{text}</text>\n", bottom + 20.0));
    }
    let shown = shown_categories(points);
    let mut under = vec![0i64; points.len()];
    for category in &shown {
        let over: Vec<i64> = under.iter().zip(points).map(|(u, p)| u + p.bytes[*category as usize]).collect();
        let (name, color) = (category.plural(), category.light_color());
        put(format_args!(
            "<path fill=\"#{color:06x}\" d=\"{}\"><title>{name}</title></path>\n",
            area(points, &under, &over, x, y)
        ));
        under = over;
    }
    put(format_args!("<line class=\"axis\" x1=\"{LEFT}\" x2=\"{LEFT}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"));
    put(format_args!(
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\n",
        WIDTH - RIGHT
    ));
    let (at, middle) = (x(scales.peak.time_ns), LEFT + wide / 2.0);
    put(format_args!("<line class=\"peak\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"));
    let (anchor, beside) = if at > middle { ("end", at - 6.0) } else { ("start", at + 6.0) };
    put(format_args!(
        "<text x=\"{beside:.1}\" y=\"{}\" text-anchor=\"{anchor}\" style=\"text-anchor:{anchor}\">{}</text>\n",
        TOP - 6.0,
        scales.peak(),
    ));
    put(format_args!(
        "<text class=\"mid\" x=\"{middle}\" y=\"{}\">time, {}</text>\n",
        HEIGHT - 18.0,
        scales.time_unit.1
    ));
    let center = TOP + high / 2.0;
    put(format_args!(
        "<text class=\"mid\" transform=\"translate(22 {center}) rotate(-90)\">memory, {}</text>\n",
        scales.byte_unit.1
    ));
    // The legend, from the top of the stack down, with each category's bytes at the peak.
    let (from, to) = (WIDTH - RIGHT + 20.0, WIDTH - 20.0);
    put(format_args!("<text class=\"end\" x=\"{to}\" y=\"{}\">at the peak</text>\n", TOP - 6.0));
    for (place, category) in shown.iter().rev().enumerate() {
        let color = category.light_color();
        let at = TOP + place as f64 * LEGEND_LINE;
        put(format_args!(
            "<rect x=\"{from}\" y=\"{at}\" width=\"14\" height=\"14\" fill=\"#{color:06x}\"/>\
             <text x=\"{}\" y=\"{}\">{}</text><text class=\"end\" x=\"{to}\" y=\"{}\">{}</text>\n",
            from + 22.0,
            at + 12.0,
            category.plural(),
            at + 12.0,
            scales.at_peak(*category)
        ));
    }
    put(format_args!("</svg>\n"));
    svg
}

/// The outline between two stacks. Bytes stay constant until the next point.
fn area(points: &[Point], under: &[i64], over: &[i64], x: impl Fn(u64) -> f64, y: impl Fn(f64) -> f64) -> String {
    let mut path = String::new();
    let mut edge = |levels: &[i64], reverse: bool| {
        let mut corners: Vec<(f64, f64)> = Vec::with_capacity(2 * levels.len());
        for (i, level) in levels.iter().enumerate() {
            let at = y(*level as f64);
            corners.push((x(points[i].time_ns), at));
            if let Some(next) = points.get(i + 1) {
                corners.push((x(next.time_ns), at));
            }
        }
        if reverse {
            corners.reverse();
        }
        for (x, y) in corners {
            let letter = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{letter}{x:.1} {y:.1}");
        }
    };
    edge(over, false);
    edge(under, true);
    path.push('Z');
    path
}
