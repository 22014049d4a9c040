//! Tables in plain text. Each column is as wide as its widest cell; the last column is cut at the right edge.

use super::text::Style;

/// The alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Align {
    Left,
    Right,
}

/// A table under construction.
#[derive(Clone, Debug)]
pub(super) struct Table {
    align: Vec<Align>,
    rows: Vec<Row>,
    verbatim: bool,
}

#[derive(Clone, Debug)]
enum Row {
    Head(Vec<String>),
    Cells(Vec<String>),
    Caption(String),
}

impl Table {
    pub(super) fn new(head: &[(&str, Align)]) -> Table {
        Table {
            align: head.iter().map(|(_, align)| *align).collect(),
            rows: vec![Row::Head(head.iter().map(|(name, _)| (*name).to_owned()).collect())],
            verbatim: false,
        }
    }

    /// Makes a table whose last column never wraps. Its cells are cut at the right edge.
    pub(super) fn verbatim(head: &[(&str, Align)]) -> Table {
        Table { verbatim: true, ..Table::new(head) }
    }

    /// Adds a row of cells.
    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(Row::Cells(cells));
    }

    /// Adds a line without columns between rows.
    pub(super) fn caption(&mut self, text: impl Into<String>) {
        self.rows.push(Row::Caption(text.into()));
    }

    /// The lines, each indented by `indent` and at most `width` characters long. The last column can take several
    /// lines.
    pub(super) fn lines(&self, indent: usize, width: usize, style: Style) -> Vec<String> {
        let mut widths = vec![0; self.align.len()];
        for row in &self.rows {
            if let Row::Head(cells) | Row::Cells(cells) = row {
                for (width, cell) in widths.iter_mut().zip(cells) {
                    *width = (*width).max(cell.chars().count());
                }
            }
        }
        let mut lines = Vec::new();
        for row in &self.rows {
            match row {
                Row::Caption(text) => lines.push(style.dim(&cut(&format!("{:indent$}{text}", ""), width))),
                Row::Head(cells) => {
                    lines.extend(self.row_lines(cells, &widths, indent, width).iter().map(|line| style.dim(line)));
                }
                Row::Cells(cells) => lines.extend(self.row_lines(cells, &widths, indent, width)),
            }
        }
        lines
    }

    fn row_lines(&self, cells: &[String], widths: &[usize], indent: usize, width: usize) -> Vec<String> {
        let mut line = " ".repeat(indent);
        let Some((last, others)) = cells.split_last() else { return Vec::new() };
        for (i, cell) in others.iter().enumerate() {
            let pad = " ".repeat(widths[i].saturating_sub(cell.chars().count()));
            match self.align[i] {
                Align::Left => line.extend([cell.as_str(), &pad]),
                Align::Right => line.extend([&pad, cell.as_str()]),
            }
            line.push_str("  ");
        }
        let start = line.chars().count();
        let mut lines = Vec::new();
        let room = width.saturating_sub(start).max(16);
        for piece in if self.verbatim { vec![last.clone()] } else { wrap(last, room) } {
            let head = if lines.is_empty() { std::mem::take(&mut line) } else { " ".repeat(start) };
            lines.push(cut(format!("{head}{piece}").trim_end(), width));
        }
        lines
    }
}

/// Breaks text after commas, or at spaces if there are no commas.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    wrap_after(if text.contains(", ") { ", " } else { " " }, text, width)
}

/// Breaks text at spaces.
pub(super) fn wrap_words(text: &str, width: usize) -> Vec<String> {
    wrap_after(" ", text, width)
}

fn wrap_after(separator: &str, text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for piece in text.split_inclusive(separator) {
        let used = line.chars().count();
        if used > 0 && used + piece.trim_end().chars().count() > width {
            lines.push(cut(std::mem::take(&mut line).trim_end(), width));
        }
        line.push_str(piece);
    }
    lines.push(cut(line.trim_end(), width));
    lines
}

/// Cuts text to at most `width` characters. A cut text ends with an ellipsis.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    short.truncate(short.trim_end().len());
    short.push('…');
    short
}

/// Cuts text to at most `width` characters in the middle, because both ends carry information.
pub(super) fn cut_middle(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let begin: String = text.chars().take(kept / 2).collect();
    let end: String = text.chars().skip(count - (kept - kept / 2)).collect();
    format!("{begin}\u{2026}{end}")
}

/// Shortens a place to at most `width` characters. It drops folders first, then functions, then cuts the middle, so
/// that the program's own line stays.
pub(super) fn place_in(place: &str, width: usize) -> String {
    let fits = |text: &str| text.chars().count() <= width;
    if fits(place) {
        return place.to_owned();
    }
    // A part has the form `tests/train.py:17 step` or `optim/adam.py:178 _init_group`, optionally with an autograd
    // node's `X of ` before it.
    let bare = |part: &str| {
        let (node, at) = part.rsplit_once(" of ").map_or(("", part), |(node, at)| (node, at));
        let file = at.split(' ').next().unwrap_or(at);
        let name = file.rsplit('/').next().unwrap_or(file);
        let of = if node.is_empty() { String::new() } else { format!("{node} of ") };
        (format!("{of}{name}{}", &at[file.len()..]), format!("{of}{name}"))
    };
    let parts: Vec<(String, String)> = place.split(", ").map(bare).collect();
    let join = |of: &dyn Fn(&(String, String)) -> String| parts.iter().map(of).collect::<Vec<_>>().join(", ");
    let named = join(&|part| part.0.clone());
    let bare = join(&|part| part.1.clone());
    [named, bare.clone()].into_iter().find(|text| fits(text)).unwrap_or_else(|| cut_middle(&bare, width.max(8)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_keep_their_lines() {
        let place = "tests/programs/train.py:17 step, optim/adam.py:178 _init_group";
        assert_eq!(place_in(place, 80), place);
        assert_eq!(place_in(place, 50), "train.py:17 step, adam.py:178 _init_group");
        assert_eq!(place_in(place, 30), "train.py:17, adam.py:178");
        assert_eq!(place_in(place, 15), "train.p….py:178");
        let node = "MmBackward0 of a/b/model.py:9 forward, modules/linear.py:134 forward";
        assert_eq!(place_in(node, 40), "MmBackward0 of model.py:9, linear.py:134");
        assert_eq!((cut_middle("abcdefghi", 5), cut_middle("abc", 5)), ("ab…hi".to_owned(), "abc".to_owned()));
    }

    #[test]
    fn columns_line_up_and_lines_end_at_the_edge() {
        let mut table = Table::new(&[("phase", Align::Left), ("bytes", Align::Right), ("why", Align::Left)]);
        table.caption("step 0");
        table.row(vec!["forward".into(), "1.00 GiB".into(), "activations, a good deal of them, and more".into()]);
        table.row(vec!["x".into(), "0".into(), String::new()]);
        let lines = table.lines(2, 40, Style::PLAIN);
        assert_eq!(lines[0], "  phase       bytes  why");
        assert_eq!(lines[1], "  step 0");
        assert_eq!(lines[2], "  forward  1.00 GiB  activations,");
        assert_eq!(lines[3], "                     a good deal of the…");
        assert_eq!(lines[5], "  x               0");
    }
}
