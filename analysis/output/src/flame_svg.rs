//! A flame graph as an SVG drawing. The outermost frames are on top, and the width of each box shows its bytes. A tooltip
//! shows the details of a box.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use memtrace_trace::file::Definitions;

use super::flame_graph::{AllocationSite, PathElement, path};
use memtrace_input::printable;
use memtrace_replay::Contexts;

/// The width of the drawing, the height of a level and the width of a character, in CSS pixels.
const WIDTH: f64 = 1200.0;
const LEVEL_HEIGHT: f64 = 18.0;
const CHARACTER_WIDTH: f64 = 6.7;
/// The maximum number of levels drawn.
const MAX_LEVELS: usize = 96;
/// Boxes narrower than this are not drawn, in CSS pixels.
const MIN_BOX_WIDTH: f64 = 1.0;
/// The maximum length of a frame in the tooltip, in characters.
const MAX_TOOLTIP: usize = 400;

/// The style of the drawing's parts.
pub(super) const STYLE: &str = ".flame text { font: 11px ui-monospace, monospace; fill: #111; pointer-events: none; } \
    .flame rect { stroke: #fff; stroke-width: 0.5; } .flame g:hover rect { stroke: #000; }";

/// A frame below its callers.
#[derive(Debug)]
struct Node<'a> {
    element: Option<PathElement<'a>>,
    bytes: u64,
    level: usize,
    children: Vec<usize>,
}

/// All paths as one tree. The first node is the root.
fn tree<'a>(definitions: &'a Definitions, sites: &[(AllocationSite, u64)]) -> Vec<Node<'a>> {
    let contexts = Contexts::of(definitions);
    let mut nodes = vec![Node { element: None, bytes: 0, level: 0, children: Vec::new() }];
    let mut node_indices: HashMap<(usize, PathElement<'a>), usize> = HashMap::new();
    for (site, bytes) in sites {
        let mut at = 0;
        nodes[at].bytes += bytes;
        for (level, element) in path(definitions, &contexts, *site).into_iter().enumerate() {
            let next = *node_indices.entry((at, element)).or_insert_with(|| {
                nodes.push(Node { element: Some(element), bytes: 0, level: level + 1, children: Vec::new() });
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

/// The drawing of one device's bytes. `size` formats bytes, `root_label` is the label of the root.
pub(super) fn svg(
    definitions: &Definitions,
    sites: &[(AllocationSite, u64)],
    root_label: &str,
    size: impl Fn(u64) -> String,
) -> String {
    let mut nodes = tree(definitions, sites);
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
    let (mut max_level, mut narrow, mut deep) = (0, 0u64, 0u64);
    let mut pending = vec![(0, 0.0)];
    while let Some((at, x)) = pending.pop() {
        let node = &nodes[at];
        let width = node.bytes as f64 * WIDTH / total as f64;
        max_level = max_level.max(node.level);
        let text = match node.element {
            Some(element) => element.text(definitions),
            None => root_label.to_owned(),
        };
        draw_box(&mut boxes, node, (x, width), &text, &format!("{} ({})", size(node.bytes), share(node.bytes, total)));
        let mut left = x;
        for child in &node.children {
            let width = nodes[*child].bytes as f64 * WIDTH / total as f64;
            if nodes[*child].level >= MAX_LEVELS {
                deep += 1;
            } else if width < MIN_BOX_WIDTH {
                narrow += 1;
            } else {
                pending.push((*child, left));
            }
            left += width;
        }
    }
    let height = (max_level + 1) as f64 * LEVEL_HEIGHT;
    let mut out = format!(
        "<svg class=\"flame\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
         {boxes}</svg>\n"
    );
    if narrow + deep > 0 {
        let _ = writeln!(
            out,
            "<p class=\"dim\">Not drawn: {narrow} frames narrower than 1/{WIDTH} of the width, {deep} below level {MAX_LEVELS}, and their callees; \
             memtrace export --to speedscope shows all</p>"
        );
    }
    out
}

fn share(bytes: u64, total: u64) -> String {
    format!("{:.1} %", bytes as f64 * 100.0 / total as f64)
}

/// Adds one box, with as much of its text as fits.
fn draw_box(out: &mut String, node: &Node<'_>, (x, width): (f64, f64), text: &str, bytes: &str) {
    let y = node.level as f64 * LEVEL_HEIGHT;
    let tooltip: String = text.chars().take(MAX_TOOLTIP).collect();
    let _ = write!(
        out,
        "<g><title>{}\n{bytes}</title><rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{LEVEL_HEIGHT}\" fill=\"{}\"/>",
        printable::html(&tooltip),
        color(node.element, text)
    );
    let room = ((width - 6.0) / CHARACTER_WIDTH).max(0.0) as usize;
    if room >= 3 {
        let short = short_label(text);
        let cut: String = match short.chars().count() <= room {
            true => short,
            false => short.chars().take(room - 1).chain(['\u{2026}']).collect(),
        };
        let _ = write!(out, "<text x=\"{:.2}\" y=\"{:.1}\">{}</text>", x + 3.0, y + 13.0, printable::html(&cut));
    }
    out.push_str("</g>\n");
}

/// Formats a frame without the folders of its file: `forward (model.py:12)`.
fn short_label(text: &str) -> String {
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
fn color(element: Option<PathElement<'_>>, text: &str) -> String {
    match element {
        None | Some(PathElement::Unknown) => "#d0d0d0".to_owned(),
        Some(PathElement::Node(_)) => "#9ec5f4".to_owned(),
        Some(PathElement::Frame(_)) => {
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
    fn labels_leave_out_the_folders_of_files() {
        assert_eq!(short_label("forward (/a/b/model.py:12)"), "forward (model.py:12)");
        assert_eq!(short_label("f(x) (<string>:1)"), "f(x) (<string>:1)");
        assert_eq!(short_label("[autograd] MmBackward0"), "[autograd] MmBackward0");
        assert_eq!(share(1, 3), "33.3 %");
    }
}
