//! A flame graph as an SVG drawing. The outermost frames are on top, and each box is as wide as its bytes. A tooltip
//! shows the details of a box.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use memtrace_trace::file::Definitions;

use super::flame::{Place, Step, path};
use memtrace_input::printable;
use memtrace_replay::Contexts;

/// The width of the drawing, the height of a level and the width of a character, in CSS pixels.
const WIDTH: f64 = 1200.0;
const LEVEL: f64 = 18.0;
const LETTER: f64 = 6.7;
/// The maximum number of levels drawn.
const LEVELS: usize = 96;
/// Boxes narrower than this are not drawn, in CSS pixels.
const NARROWEST: f64 = 1.0;
/// The maximum length of a frame in the tooltip, in characters.
const LONGEST: usize = 400;

/// The style of the drawing's parts.
pub(super) const STYLE: &str = ".flame text { font: 11px ui-monospace, monospace; fill: #111; pointer-events: none; } \
    .flame rect { stroke: #fff; stroke-width: 0.5; } .flame g:hover rect { stroke: #000; }";

/// A frame below its callers.
#[derive(Debug)]
struct Node<'a> {
    step: Option<Step<'a>>,
    bytes: u64,
    level: usize,
    children: Vec<usize>,
}

/// All paths as one tree. The first node is the root.
fn tree<'a>(definitions: &'a Definitions, places: &[(Place, u64)]) -> Vec<Node<'a>> {
    let contexts = Contexts::of(definitions);
    let mut nodes = vec![Node { step: None, bytes: 0, level: 0, children: Vec::new() }];
    let mut known: HashMap<(usize, Step<'a>), usize> = HashMap::new();
    for (place, bytes) in places {
        let mut at = 0;
        nodes[at].bytes += bytes;
        for (level, step) in path(definitions, &contexts, *place).into_iter().enumerate() {
            let next = *known.entry((at, step)).or_insert_with(|| {
                nodes.push(Node { step: Some(step), bytes: 0, level: level + 1, children: Vec::new() });
                nodes.len() - 1
            });
            if nodes[next].bytes == 0 {
                nodes[at].children.push(next);
            }
            at = next;
            nodes[at].bytes += bytes;
        }
    }
    nodes
}

/// The drawing of one device's bytes. `size` formats bytes, `whole` is the label of the root.
pub(super) fn svg(
    definitions: &Definitions,
    places: &[(Place, u64)],
    whole: &str,
    size: impl Fn(u64) -> String,
) -> String {
    let mut nodes = tree(definitions, places);
    let total = nodes[0].bytes;
    if total == 0 {
        return "<p>no memory was allocated</p>\n".to_owned();
    }
    for at in 0..nodes.len() {
        let mut children = std::mem::take(&mut nodes[at].children);
        children.sort_by_key(|child| (std::cmp::Reverse(nodes[*child].bytes), *child));
        nodes[at].children = children;
    }
    let mut boxes = String::new();
    let (mut deepest, mut narrow, mut deep) = (0, 0u64, 0u64);
    let mut todo = vec![(0, 0.0)];
    while let Some((at, x)) = todo.pop() {
        let node = &nodes[at];
        let wide = node.bytes as f64 * WIDTH / total as f64;
        deepest = deepest.max(node.level);
        let text = match node.step {
            Some(step) => step.text(definitions),
            None => whole.to_owned(),
        };
        put(&mut boxes, node, (x, wide), &text, &format!("{} ({})", size(node.bytes), share(node.bytes, total)));
        let mut left = x;
        for child in &node.children {
            let wide = nodes[*child].bytes as f64 * WIDTH / total as f64;
            if nodes[*child].level >= LEVELS {
                deep += 1;
            } else if wide < NARROWEST {
                narrow += 1;
            } else {
                todo.push((*child, left));
            }
            left += wide;
        }
    }
    let high = (deepest + 1) as f64 * LEVEL;
    let mut out = format!(
        "<svg class=\"flame\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {high}\" width=\"{WIDTH}\" height=\"{high}\" role=\"img\">\n\
         {boxes}</svg>\n"
    );
    if narrow + deep > 0 {
        let _ = writeln!(
            out,
            "<p class=\"dim\">not drawn: {narrow} callees below 1/{WIDTH} of the width, {deep} below level {LEVELS}, and what they call; \
             memtrace export --to speedscope has all</p>"
        );
    }
    out
}

fn share(bytes: u64, total: u64) -> String {
    format!("{:.1} %", bytes as f64 * 100.0 / total as f64)
}

/// Adds one box, with as much of its text as fits.
fn put(out: &mut String, node: &Node<'_>, (x, wide): (f64, f64), text: &str, bytes: &str) {
    let y = node.level as f64 * LEVEL;
    let told: String = text.chars().take(LONGEST).collect();
    let _ = write!(
        out,
        "<g><title>{}\n{bytes}</title><rect x=\"{x:.2}\" y=\"{y}\" width=\"{wide:.2}\" height=\"{LEVEL}\" fill=\"{}\"/>",
        printable::html(&told),
        colour(node.step, text)
    );
    let room = ((wide - 6.0) / LETTER).max(0.0) as usize;
    if room >= 3 {
        let short = short(text);
        let cut: String = match short.chars().count() <= room {
            true => short,
            false => short.chars().take(room - 1).chain(['\u{2026}']).collect(),
        };
        let _ = write!(out, "<text x=\"{:.2}\" y=\"{:.1}\">{}</text>", x + 3.0, y + 13.0, printable::html(&cut));
    }
    out.push_str("</g>\n");
}

/// Formats a frame without the folders of its file: `forward (model.py:12)`.
fn short(text: &str) -> String {
    match text.strip_suffix(')').and_then(|text| text.rsplit_once(" (")) {
        Some((name, file)) => {
            let file = Path::new(file).file_name().map_or(file.into(), |name| name.to_string_lossy());
            format!("{name} ({file})")
        }
        None => text.to_owned(),
    }
}

/// The color of a box. Frames of one file have the same color, backward nodes are blue, and boxes without a frame are
/// gray.
fn colour(step: Option<Step<'_>>, text: &str) -> String {
    match step {
        None | Some(Step::Unknown) => "#d0d0d0".to_owned(),
        Some(Step::Node(_)) => "#9ec5f4".to_owned(),
        Some(Step::Frame(_)) => {
            let file = text.rsplit_once(" (").map_or(text, |(_, file)| file.split(':').next().unwrap_or(file));
            // The hash function is FNV-1a.
            let hash = file
                .bytes()
                .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
            format!("hsl({} 75% {}%)", 10 + hash % 45, 68 + (hash >> 8) % 12)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_are_named_by_what_fits() {
        assert_eq!(short("forward (/a/b/model.py:12)"), "forward (model.py:12)");
        assert_eq!(short("f(x) (<string>:1)"), "f(x) (<string>:1)");
        assert_eq!(short("[autograd] MmBackward0"), "[autograd] MmBackward0");
        assert_eq!(share(1, 3), "33.3 %");
    }
}
