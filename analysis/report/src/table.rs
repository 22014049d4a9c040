//! Tables in plain text. Each column is as wide as its widest cell; the last column is cut at the right edge.

use memtrace_summary::UNITS;

use crate::style::Style;

/// If less than this remains for the last column, its text stands below the row, indented by `BELOW`.
const NARROWEST: usize = 16;
const BELOW: usize = 6;

/// The alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table under construction.
#[derive(Clone, Debug)]
pub(crate) struct Table {
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
    pub(crate) fn new(head: &[(&str, Align)]) -> Table {
        Table {
            align: head.iter().map(|(_, align)| *align).collect(),
            rows: vec![Row::Head(head.iter().map(|(name, _)| (*name).to_owned()).collect())],
            verbatim: false,
        }
    }

    /// Makes a table whose last column never wraps. Its cells are cut at the right edge.
    pub(crate) fn verbatim(head: &[(&str, Align)]) -> Table {
        Table { verbatim: true, ..Table::new(head) }
    }

    /// Adds a row of cells.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(Row::Cells(cells));
    }

    /// Adds a line without columns between rows.
    pub(crate) fn caption(&mut self, text: impl Into<String>) {
        self.rows.push(Row::Caption(text.into()));
    }

    /// The lines, each indented by `indent` and at most `width` characters long. The last column can take several
    /// lines.
    pub(crate) fn lines(&self, indent: usize, width: usize, style: Style) -> Vec<String> {
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
                    lines
                        .extend(self.row_lines(cells, &widths, indent, width, true).iter().map(|line| style.dim(line)));
                }
                Row::Cells(cells) => lines.extend(self.row_lines(cells, &widths, indent, width, false)),
            }
        }
        lines
    }

    fn row_lines(&self, cells: &[String], widths: &[usize], indent: usize, width: usize, is_head: bool) -> Vec<String> {
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
        let left = width.saturating_sub(start);
        if left < NARROWEST && !self.verbatim {
            lines.push(cut(line.trim_end(), width));
            let below = indent + BELOW;
            let texts =
                if last.is_empty() || is_head { Vec::new() } else { wrap_list(last, width.saturating_sub(below)) };
            lines.extend(texts.iter().map(|text| cut(&format!("{:below$}{text}", ""), width)));
            return lines;
        }
        for piece in if self.verbatim { vec![last.clone()] } else { wrap_list(last, left) } {
            let head = if lines.is_empty() { std::mem::take(&mut line) } else { " ".repeat(start) };
            lines.push(cut(format!("{head}{piece}").trim_end(), width));
        }
        lines
    }
}

/// Breaks a list after its commas. A part that is longer than a line is broken at spaces.
pub(crate) fn wrap_list(text: &str, width: usize) -> Vec<String> {
    let parts = text
        .split_inclusive(", ")
        .flat_map(|part| if part.trim_end().chars().count() <= width { vec![part] } else { words(part) });
    wrap(parts, width)
}

/// Breaks text at spaces.
pub(crate) fn wrap_words(text: &str, width: usize) -> Vec<String> {
    wrap(words(text).into_iter(), width)
}

/// The words of a text, each with the space after it. A number and its unit are one word.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut start = 0;
    for (end, _) in text.match_indices(' ') {
        let next = text[end + 1..].split(|c: char| !c.is_ascii_alphabetic() && c != '%').next().unwrap_or_default();
        let is_number = text[start..end].ends_with(|c: char| c.is_ascii_digit());
        if !(is_number && (UNITS.contains(&next) || next == "%")) {
            words.push(&text[start..=end]);
            start = end + 1;
        }
    }
    words.push(&text[start..]);
    words
}

fn wrap<'a>(pieces: impl Iterator<Item = &'a str>, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for piece in pieces {
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
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    short.truncate(short.trim_end().len());
    short.push('…');
    short
}

/// Cuts text to at most `width` characters in the middle, because both ends carry information.
pub(crate) fn cut_middle(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let begin: String = text.chars().take(kept / 2).collect();
    let end: String = text.chars().skip(count - (kept - kept / 2)).collect();
    format!("{begin}\u{2026}{end}")
}

/// Shortens a location to at most `width` characters, as [`short_location`] does. If that is not enough, its middle is
/// cut.
pub(crate) fn location_in(location: &str, width: usize) -> String {
    short_location(location, width).unwrap_or_else(|| cut_middle(&without_functions(location), width.max(8)))
}

/// Shortens a location to at most `width` characters. It drops folders first, then functions, so that the program's own
/// line stays. `None` if that is not enough.
pub(crate) fn short_location(location: &str, width: usize) -> Option<String> {
    let fits = |text: &String| text.chars().count() <= width;
    [location.to_owned(), without_folders(location), without_functions(location)].into_iter().find(fits)
}

fn without_folders(location: &str) -> String {
    of_parts(location, |node, file, function| format!("{node}{file}{function}"))
}

fn without_functions(location: &str) -> String {
    of_parts(location, |node, file, _| format!("{node}{file}"))
}

/// Formats each part of a location anew. A part has the form `tests/train.py:17 step` or
/// `optim/adam.py:178 _init_group`, optionally with an autograd node's `X of ` before it. `format` gets the node with
/// ` of `, the file without its folders, and the function with the space before it.
fn of_parts(location: &str, format: fn(&str, &str, &str) -> String) -> String {
    let part = |part: &str| {
        let (node, at) = part.split_at(part.rfind(" of ").map_or(0, |at| at + " of ".len()));
        let (file, function) = at.split_at(at.find(' ').unwrap_or(at.len()));
        format(node, file.rsplit('/').next().unwrap_or(file), function)
    };
    location.split(", ").map(part).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_keep_their_lines() {
        let location = "tests/programs/train.py:17 step, optim/adam.py:178 _init_group";
        assert_eq!(location_in(location, 80), location);
        assert_eq!(location_in(location, 50), "train.py:17 step, adam.py:178 _init_group");
        assert_eq!(location_in(location, 30), "train.py:17, adam.py:178");
        assert_eq!((location_in(location, 15).as_str(), short_location(location, 15)), ("train.p….py:178", None));
        let node = "MmBackward0 of a/b/model.py:9 forward, modules/linear.py:134 forward";
        assert_eq!(location_in(node, 40), "MmBackward0 of model.py:9, linear.py:134");
        assert_eq!((cut_middle("abcdefghi", 5), cut_middle("abc", 5)), ("ab…hi".to_owned(), "abc".to_owned()));
    }

    #[test]
    fn a_number_and_its_unit_stay_on_one_line() {
        let text = "two moments: 2 x 97.5 MiB (30 %), freed 1 GiB";
        assert_eq!(wrap_words(text, 22), ["two moments: 2 x", "97.5 MiB (30 %), freed", "1 GiB"]);
        assert_eq!(wrap_list(text, 34), ["two moments: 2 x 97.5 MiB (30 %),", "freed 1 GiB"]);
        assert_eq!(wrap_list(text, 22), ["two moments: 2 x", "97.5 MiB (30 %),", "freed 1 GiB"]);
    }

    #[test]
    fn without_room_the_last_column_stands_below() {
        let mut table = Table::new(&[("Phase", Align::Left), ("Bytes", Align::Right), ("Changes", Align::Left)]);
        table.row(vec!["forward".into(), "1.00 GiB".into(), "activations 1.00 GiB".into()]);
        let expected = ["  Phase       Bytes", "  forward  1.00 GiB", "        activations 1.00 GiB"];
        assert_eq!(table.lines(2, 30, Style::PLAIN), expected);
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
        assert_eq!(lines[2], "  forward  1.00 GiB  activations, a good");
        assert_eq!(lines[3], "                     deal of them,");
        assert_eq!(lines[4], "                     and more");
        assert_eq!(lines[5], "  x               0");
    }
}
