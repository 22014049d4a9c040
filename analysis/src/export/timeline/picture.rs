//! The picture: areas by category over time, on a page that needs nothing else.

use std::fmt::Write as _;
use std::io::{self, Write};

use super::curve::{Curve, Point};
use crate::passes::Category;

/// The picture's size and the room around the plot, in CSS pixels.
const WIDTH: f64 = 1200.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;

/// From the bottom of the stack to its top: what stays longest first, as PyTorch's picture has it.
const ORDER: [(Category, &str); Category::ALL.len()] = [
    (Category::Parameter, "#1b7837"),
    (Category::OptimizerState, "#dfa11b"),
    (Category::Checkpoint, "#8c510a"),
    (Category::CommunicationBucket, "#01665e"),
    (Category::Workspace, "#878787"),
    (Category::KvCache, "#35978f"),
    (Category::GraphPool, "#bf812d"),
    (Category::AutocastCache, "#a6dba0"),
    (Category::Input, "#222222"),
    (Category::Temporary, "#9970ab"),
    (Category::Activation, "#d6321f"),
    (Category::Gradient, "#2b4fb8"),
    (Category::AutogradDetail, "#74a9f0"),
    (Category::Unknown, "#bdbdbd"),
];

/// What is above zero at any moment.
fn shown(points: &[Point]) -> Vec<(Category, &'static str)> {
    let any = |category: Category| points.iter().any(|point| point.bytes[category as usize] > 0);
    ORDER.into_iter().filter(|(category, _)| any(*category)).collect()
}

/// Steps of an axis that are easy to read: at most `count` up to `most`, each 1, 2 or 5 times a power of ten.
fn step(most: f64, count: f64) -> f64 {
    let rough = (most / count).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| *step >= rough).unwrap_or(10.0 * power)
}

/// The unit in which a number of bytes is easy to read.
fn byte_unit(bytes: f64) -> (f64, &'static str) {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fits = units.into_iter().find(|(_, power)| bytes >= f64::from(1u32 << power));
    fits.map_or((1.0, "bytes"), |(name, power)| (f64::from(1u32 << power), name))
}

fn time_unit(ns: f64) -> (f64, &'static str) {
    let units = [("s", 1e9), ("ms", 1e6), ("\u{b5}s", 1e3)];
    units.into_iter().find(|(_, unit)| ns >= 2.0 * unit).map_or((1.0, "ns"), |(name, unit)| (unit, name))
}

/// As few digits after the point as tell ticks apart.
fn tick(value: f64, step: f64) -> String {
    format!("{value:.*}", (-step.log10().floor()).max(0.0) as usize)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A page with the picture.
pub(super) fn html(curve: &Curve, title: &str, mut out: impl Write) -> io::Result<()> {
    let title = escaped(title);
    write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Memory timeline, {title}</title>\n\
         <style>body {{ font: 14px system-ui, sans-serif; margin: 20px; }} svg {{ max-width: 100%; height: auto; }} \
         svg text {{ font: 13px system-ui, sans-serif; fill: #222; }} .grid {{ stroke: #ddd; }} .axis {{ stroke: #444; }} \
         .peak {{ stroke: #000; stroke-dasharray: 5 4; }} .end {{ text-anchor: end; }} .mid {{ text-anchor: middle; }}</style></head>\n\
         <body>{}</body></html>\n",
        svg(curve, &title)
    )?;
    out.flush()
}

/// The picture; `title` is XML already.
fn svg(curve: &Curve, title: &str) -> String {
    let points = &curve.points[..];
    let Some(peak) = points.iter().rev().max_by_key(|point| point.total()) else {
        return format!("<p>{title}: no memory was allocated.</p>");
    };
    let begin = points[0].time_ns;
    let span = (points[points.len() - 1].time_ns - begin).max(1) as f64;
    let most = peak.total().max(1) as f64;
    let (byte, byte_name) = byte_unit(most);
    let (second, second_name) = time_unit(span);
    let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let byte_step = step(most / byte, 6.0);
    let ceiling = (most / byte / byte_step).ceil() * byte_step * byte;
    let x = |time_ns: u64| LEFT + wide * (time_ns - begin) as f64 / span;
    let y = |bytes: f64| TOP + high * (1.0 - bytes / ceiling);
    let mut svg = String::new();
    // Writing to a string cannot fail.
    let mut put = |args: std::fmt::Arguments<'_>| {
        let _ = svg.write_fmt(args);
    };
    put(format_args!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\">\n"
    ));
    let bottom = HEIGHT - BOTTOM;
    for i in 0..=(ceiling / byte / byte_step).round() as u32 {
        let value = f64::from(i) * byte_step;
        let at = y(value * byte);
        let (right, label, text) = (WIDTH - RIGHT, LEFT - 8.0, tick(value, byte_step));
        put(format_args!("<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"));
        put(format_args!("<text class=\"end\" x=\"{label}\" y=\"{:.1}\">{text}</text>\n", at + 4.0));
    }
    let time_step = step(span / second, 10.0);
    for i in 0..=(span / second / time_step).floor() as u32 {
        let value = f64::from(i) * time_step;
        let at = LEFT + wide * value * second / span;
        put(format_args!(
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{}\"/>",
            bottom + 5.0
        ));
        put(format_args!(
            "<text class=\"mid\" x=\"{at:.1}\" y=\"{}\">{}</text>\n",
            bottom + 20.0,
            tick(value, time_step)
        ));
    }
    let shown = shown(points);
    let mut under = vec![0i64; points.len()];
    for (category, colour) in &shown {
        let over: Vec<i64> = under.iter().zip(points).map(|(u, p)| u + p.bytes[*category as usize]).collect();
        let name = category.plural();
        put(format_args!(
            "<path fill=\"{colour}\" d=\"{}\"><title>{name}</title></path>\n",
            area(points, &under, &over, x, y)
        ));
        under = over;
    }
    put(format_args!("<line class=\"axis\" x1=\"{LEFT}\" x2=\"{LEFT}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"));
    put(format_args!(
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\n",
        WIDTH - RIGHT
    ));
    let (at, middle) = (x(peak.time_ns), LEFT + wide / 2.0);
    put(format_args!("<line class=\"peak\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"));
    let (anchor, beside) = if at > middle { ("end", at - 6.0) } else { ("start", at + 6.0) };
    put(format_args!(
        "<text x=\"{beside:.1}\" y=\"{}\" text-anchor=\"{anchor}\" style=\"text-anchor:{anchor}\">peak {} {byte_name} at {} {second_name}</text>\n",
        TOP - 6.0,
        Digits(most / byte),
        Digits((peak.time_ns - begin) as f64 / second),
    ));
    put(format_args!(
        "<text x=\"{LEFT}\" y=\"18\" style=\"font-weight:bold\">Allocated memory by category, {title}</text>\n"
    ));
    put(format_args!("<text class=\"mid\" x=\"{middle}\" y=\"{}\">time, {second_name}</text>\n", HEIGHT - 18.0));
    let centre = TOP + high / 2.0;
    put(format_args!(
        "<text class=\"mid\" transform=\"translate(22 {centre}) rotate(-90)\">memory, {byte_name}</text>\n</svg>\n"
    ));
    // The legend, from the top of the stack down, with what each has at the peak.
    put(format_args!("<table><tr><th></th><th></th><th>at the peak</th></tr>\n"));
    for (category, colour) in shown.iter().rev() {
        let bytes = peak.bytes[*category as usize] as f64 / byte;
        put(format_args!(
            "<tr><td style=\"background:{colour};width:1.2em\"></td><td>{}</td><td style=\"text-align:right\">{bytes:.2} {byte_name}</td></tr>\n",
            category.plural()
        ));
    }
    put(format_args!("</table>\n"));
    svg
}

/// Four digits that count.
struct Digits(f64);

impl std::fmt::Display for Digits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = self.0.abs().max(1.0).log10().floor() as usize + 1;
        write!(f, "{:.*}", 4usize.saturating_sub(whole), self.0)
    }
}

/// The outline of what lies between two stacks: bytes stay what they are until the next moment.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_category_has_a_colour() {
        for category in Category::ALL {
            assert_eq!(ORDER.iter().filter(|(c, _)| *c == category).count(), 1, "{}", category.name());
        }
    }

    #[test]
    fn axes_are_easy_to_read() {
        assert_eq!((step(7.3, 6.0), step(0.5, 6.0), step(1100.0, 10.0)), (2.0, 0.1, 200.0));
        assert_eq!((tick(0.30000000000000004, 0.1), tick(200.0, 100.0)), ("0.3".to_owned(), "200".to_owned()));
        assert_eq!((byte_unit(3e9).1, byte_unit(100.0).1, time_unit(5e6).1), ("GiB", "bytes", "ms"));
        assert_eq!(format!("{} {}", Digits(12.3456), Digits(0.5)), "12.35 0.500");
    }
}
