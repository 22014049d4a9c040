//! The page that shows the objects of a reference cycle: one HTML file that has no script and loads nothing.
//!
//! All texts come from the program (names of classes, functions and files, keys of dictionaries) and are escaped.

use std::fmt::Write as _;

use memtrace_trace::printable::html;

/// The maximum length of a text from the program, in characters.
const MAX_TEXT_CHARS: usize = 200;
/// The maximum length of a text in the picture, in characters.
const MAX_BOX_CHARS: usize = 80;
/// At most this many references of one object are listed.
const MAX_REFERENCES: usize = 40;
/// At most this many objects are in the picture.
const MAX_BOXES: usize = 24;

/// The picture's width, and the heights of a box and of the arrow below it, in CSS pixels.
const WIDTH: usize = 760;
const BOX_HEIGHT: usize = 34;
const ARROW_HEIGHT: usize = 40;

/// `default-src 'none'` makes a browser refuse scripts and everything from elsewhere.
const HEAD: &str = "<meta charset=\"utf-8\"><meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
                    style-src 'unsafe-inline'\">";
const STYLE: &str = "body{font:14px system-ui,sans-serif;margin:20px;max-width:1100px}h1{font-size:18px}\
                     h2{font-size:15px;margin-top:28px}code,svg text{font:12px ui-monospace,monospace}.dim{color:#666}\
                     .object{border-left:4px solid #ddd;margin:12px 0;padding-left:10px}.cycle{border-color:#c0392b}\
                     .tensor{border-color:#2874a6}ul{margin:4px 0}rect{fill:#fbeae8;stroke:#c0392b}\
                     path{fill:none;stroke:#444}polygon{fill:#444}";

/// One object on the page.
#[derive(Default)]
pub(super) struct ShownObject {
    /// Its class, and its name if it has one: `Node`, `Tensor float32[1024, 1024]`.
    pub(super) title: String,
    /// Further facts, such as the file and line of a frame.
    pub(super) details: String,
    /// Whether every object of the cycle can be reached from this one, and this one from them.
    pub(super) is_in_cycle: bool,
    pub(super) is_tensor: bool,
    /// Its references to other objects on the page: how (`.parent`, `[0]`, or empty if unknown) and to which index.
    pub(super) references: Vec<(String, usize)>,
}

/// Renders the page. `summary` describes the cycle in one line. `cycle` is a path around it and `to_tensor` a path from
/// its first object to a tensor, as indices of `objects`.
pub(super) fn page(summary: &str, cycle: &[usize], to_tensor: &[usize], objects: &[ShownObject]) -> String {
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head>{HEAD}<title>Reference cycle</title>\n<style>{STYLE}</style></head>\
         <body>\n<h1>Reference cycle that held a tensor</h1>\n<p><code>{}</code></p>\n",
        text(summary, 10 * MAX_TEXT_CHARS)
    );
    picture(&mut out, cycle, objects);
    if let [_, _, ..] = to_tensor {
        out += "<h2>From the cycle to the tensor</h2>\n<ol>\n";
        for (at, object) in to_tensor.iter().enumerate() {
            let label = to_tensor.get(at + 1).map(|next| label(objects, *object, *next)).unwrap_or_default();
            let _ = writeln!(out, "<li>{}<code>{}</code></li>", link(objects, *object), text(label, MAX_TEXT_CHARS));
        }
        out += "</ol>\n";
    }
    let _ = writeln!(
        out,
        "<h2>Objects</h2>\n<p class=\"dim\">The {} objects nearest to the cycle, each with its references to the \
         others. Red: part of the cycle. Blue: a tensor.</p>",
        objects.len()
    );
    for (index, object) in objects.iter().enumerate() {
        let class = match object {
            ShownObject { is_tensor: true, .. } => "object tensor",
            ShownObject { is_in_cycle: true, .. } => "object cycle",
            _ => "object",
        };
        let (title, details) = (text(&object.title, MAX_TEXT_CHARS), text(&object.details, MAX_TEXT_CHARS));
        let _ = writeln!(
            out,
            "<div class=\"{class}\" id=\"o{index}\"><b>{title}</b> <span class=\"dim\">{details}</span>\n<ul>"
        );
        for (label, to) in object.references.iter().take(MAX_REFERENCES) {
            let label = if label.is_empty() { "refers to" } else { label };
            let _ =
                writeln!(out, "<li><code>{}</code> &rarr; {}</li>", text(label, MAX_TEXT_CHARS), link(objects, *to));
        }
        let more = object.references.len().saturating_sub(MAX_REFERENCES);
        if more > 0 {
            let _ = writeln!(out, "<li class=\"dim\">{more} more references</li>");
        }
        out += "</ul></div>\n";
    }
    out + "</body></html>\n"
}

/// Draws the path around the cycle as boxes below each other, with an arrow from the last to the first.
fn picture(out: &mut String, cycle: &[usize], objects: &[ShownObject]) {
    let shown = cycle.get(..MAX_BOXES).unwrap_or(cycle);
    let step = BOX_HEIGHT + ARROW_HEIGHT;
    let height = shown.len() * step;
    let _ = write!(
        out,
        "<h2>Cycle</h2>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\">\n"
    );
    for (at, object) in shown.iter().enumerate() {
        let y = at * step + 1;
        let title = objects.get(*object).map_or("", |object| &object.title);
        let _ = writeln!(
            out,
            "<a href=\"#o{object}\"><rect x=\"40\" y=\"{y}\" width=\"{}\" height=\"{BOX_HEIGHT}\" rx=\"4\"/><text \
             x=\"52\" y=\"{}\">{}</text></a>",
            WIDTH - 41,
            y + 21,
            text(title, MAX_BOX_CHARS)
        );
        let next = cycle.get(at + 1).or(cycle.first());
        let label = text(next.map_or("", |next| label(objects, *object, *next)), MAX_BOX_CHARS);
        let below = y + BOX_HEIGHT;
        if at + 1 < shown.len() {
            let tip = below + ARROW_HEIGHT;
            let _ = writeln!(
                out,
                "<path d=\"M70 {below} V{}\"/><polygon points=\"70,{tip} 66,{} 74,{}\"/><text x=\"84\" y=\"{}\">{label}\
                 </text>",
                tip - 7,
                tip - 8,
                tip - 8,
                below + 24
            );
        } else {
            let more = cycle.len() - shown.len();
            let more = if more > 0 { format!(" ({more} more objects) ") } else { String::new() };
            let middle = 1 + BOX_HEIGHT / 2;
            let _ = writeln!(
                out,
                "<path d=\"M70 {below} V{0} H20 V{middle} H32\"/><polygon points=\"40,{middle} 32,{1} 32,{2}\"/><text \
                 x=\"84\" y=\"{3}\">{label}{more} back to the first</text>",
                below + 16,
                middle - 4,
                middle + 4,
                below + 21
            );
        }
    }
    *out += "</svg>\n";
}

/// How one object refers to another. Empty if that is unknown.
fn label(objects: &[ShownObject], from: usize, to: usize) -> &str {
    let references = objects.get(from).map_or(&[][..], |object| &object.references);
    references.iter().find(|(_, object)| *object == to).map_or("", |(label, _)| label)
}

/// A link to an object of the page.
fn link(objects: &[ShownObject], index: usize) -> String {
    let title = objects.get(index).map_or("", |object| &object.title);
    format!("<a href=\"#o{index}\">{}</a>", text(title, MAX_TEXT_CHARS))
}

/// A text of the program, escaped, with at most `limit` characters.
fn text(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((end, _)) => html(text.get(..end).unwrap_or_default()) + "...",
        None => html(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(title: &str, references: &[(&str, usize)]) -> ShownObject {
        let references = references.iter().map(|(label, to)| ((*label).to_owned(), *to)).collect();
        ShownObject { title: title.to_owned(), is_in_cycle: true, references, ..ShownObject::default() }
    }

    /// The tags of the page as (name, attributes). Requires that every tag is closed and that `<` occurs nowhere else.
    fn tags(page: &str) -> Vec<(String, String)> {
        let (mut found, mut open) = (Vec::new(), Vec::new());
        for piece in page.split('<').skip(1) {
            let (tag, text) = piece.split_once('>').unwrap();
            assert!(!text.contains('>'), "{text:?} is text");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            let (name, attributes) = tag.split_once([' ', '\n']).unwrap_or((tag, ""));
            if !["!DOCTYPE", "meta"].contains(&name) && !tag.ends_with('/') {
                open.push(name.to_owned());
            }
            found.push((name.to_owned(), attributes.to_owned()));
        }
        assert!(open.is_empty(), "{open:?}");
        found
    }

    #[test]
    fn the_page_shows_the_cycle_and_the_objects() {
        let objects = [
            object("Node", &[(".children", 1), (".value", 2)]),
            object("list", &[("[0]", 0)]),
            ShownObject {
                title: "Tensor float32[2]".into(),
                details: "8 bytes at 0x10".into(),
                is_tensor: true,
                ..ShownObject::default()
            },
        ];
        let page = page("Node.children -> list[0] -> Node", &[0, 1], &[0, 2], &objects);
        assert_eq!(tags(&page).iter().filter(|(name, _)| name == "rect").count(), 2);
        for part in [
            "Node.children -&gt; list[0] -&gt; Node",
            "<text x=\"84\" y=\"59\">.children</text>",
            ">[0] back to the first</text>",
            "<li><a href=\"#o0\">Node</a><code>.value</code></li>\n<li><a href=\"#o2\">Tensor float32[2]</a>",
            "<div class=\"object tensor\" id=\"o2\"><b>Tensor float32[2]</b> <span class=\"dim\">8 bytes at \
             0x10</span>",
            "<li><code>.children</code> &rarr; <a href=\"#o1\">list</a></li>",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }

    #[test]
    fn the_page_loads_and_runs_nothing_whatever_the_names_are() {
        const HOSTILE: &str = "\"'></title></style></script><script src=//x>alert(1)</script><img src=x onerror=a()>\
                               \u{202e}\u{9b}\x1b]0;x\x07&lt;";
        let plain = [object("A", &[("x", 0)])];
        let mut evil = [object(HOSTILE, &[(HOSTILE, 0)])];
        evil[0].details = HOSTILE.into();
        let (plain, evil) = (page("A", &[0], &[0, 0], &plain), page(HOSTILE, &[0], &[0, 0], &evil));
        assert_eq!(tags(&evil), tags(&plain), "the same tags and attributes as with plain names");
        assert!(!evil.contains(|c| c != '\n' && memtrace_trace::printable::is_unprintable(c)));
        for (name, attributes) in tags(&evil) {
            assert!(!["script", "img", "link", "iframe", "base"].contains(&&*name), "{name}");
            let urls = attributes.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
            assert!(!urls.contains("//") && !urls.contains("src="), "{attributes}");
        }
        assert!(evil.contains("default-src 'none'; style-src 'unsafe-inline'"));
        assert!(evil.matches("&lt;script").count() >= 6, "the names are there as text: {evil}");
    }

    #[test]
    fn the_page_is_bounded() {
        let long = "x".repeat(1_000_000);
        let objects: Vec<ShownObject> = (0..60)
            .map(|_| {
                let references = (0..60).map(|to| (long.clone(), to)).collect();
                ShownObject { title: long.clone(), details: long.clone(), references, ..ShownObject::default() }
            })
            .collect();
        let all: Vec<usize> = (0..60).collect();
        let page = page(&long, &all, &all, &objects);
        assert!(page.len() < 2 << 20, "{}", page.len());
        assert!(page.contains("20 more references") && page.contains("(36 more objects)"));
    }
}
