//! The JSON file that PyTorch's `export_memory_timeline` writes.

use std::io::{self, BufWriter, Write};

use super::curve::{Curve, Point};
use memtrace_insight::passes::Category;

/// The number of PyTorch's categories in these files, and the number of its category for unknown memory.
const CATEGORIES: usize = 8;
const UNKNOWN: usize = 7;

/// The number of a category in `torch.profiler._memory_profiler`. Categories that it does not have become unknown.
const fn number(category: Category) -> usize {
    match category {
        Category::Parameter => 0,
        Category::OptimizerState => 1,
        Category::Input => 2,
        Category::Temporary => 3,
        Category::Activation => 4,
        Category::Gradient => 5,
        Category::AutogradDetail => 6,
        _ => UNKNOWN,
    }
}

fn sizes(point: &Point) -> [i64; CATEGORIES] {
    let mut sizes = [0; CATEGORIES];
    for (category, bytes) in Category::ALL.into_iter().zip(point.bytes) {
        sizes[number(category)] += bytes;
    }
    sizes
}

/// Writes `[[times in us], [[0, bytes by category], ...]]`. All points of one microsecond become one entry.
pub(super) fn write(curve: &Curve, out: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(out);
    let mut entries: Vec<(u64, [i64; CATEGORIES])> = Vec::with_capacity(curve.points.len());
    for point in &curve.points {
        let entry = (point.time_ns / 1000, sizes(point));
        match entries.last_mut() {
            Some(last) if last.0 == entry.0 => {
                // As in PyTorch, the last point wins, unless the curve was reduced and its maximum would be lost.
                if curve.is_exact || entry.1.iter().sum::<i64>() > last.1.iter().sum() {
                    *last = entry;
                }
            }
            _ => entries.push(entry),
        }
    }
    out.write_all(b"[[")?;
    for (i, (time, _)) in entries.iter().enumerate() {
        write!(out, "{}{time}", if i > 0 { ", " } else { "" })?;
    }
    out.write_all(b"], [")?;
    for (i, (_, sizes)) in entries.iter().enumerate() {
        out.write_all(if i > 0 { b", [0" } else { b"[0" })?;
        for size in sizes {
            write!(out, ", {size}")?;
        }
        out.write_all(b"]")?;
    }
    out.write_all(b"]]")?;
    out.flush()
}
