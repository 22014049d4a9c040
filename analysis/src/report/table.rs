//! Tables in plain text: columns as wide as their widest cell, the last one cut at the page's edge.

use super::text::Style;

/// How a column is aligned.
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

    /// The same with a last column of one line each, cut at the page's edge.
    pub(super) fn verbatim(head: &[(&str, Align)]) -> Table {
        Table { verbatim: true, ..Table::new(head) }
    }

    /// A row of cells.
    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(Row::Cells(cells));
    }

    /// A line of its own between rows.
    pub(super) fn caption(&mut self, text: impl Into<String>) {
        self.rows.push(Row::Caption(text.into()));
    }

    /// The lines, each indented by `indent`, none longer than `width`. The last column may take several lines.
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

/// Breaks text after commas, and at spaces where there are none.
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

/// At most `width` characters; what is cut ends in an ellipsis.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    short.truncate(short.trim_end().len());
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;

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
