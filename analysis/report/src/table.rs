//! Tables in plain text. Each column is as wide as its widest cell; the last column is wrapped at the right edge.

use crate::fit::{columns, cut, wrap_code, wrap_list};
use crate::style::Style;

/// If less than this remains for the last column, its text stands below the row, indented by `BELOW`.
const NARROWEST: usize = 16;
const BELOW: usize = 6;
/// The columns between two columns of a table.
pub(crate) const GAP: usize = 2;

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
    is_of_code: bool,
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
            is_of_code: false,
        }
    }

    /// Makes a table whose last column is code. It never stands below its row, and keeps its indentation.
    pub(crate) fn of_code(head: &[(&str, Align)]) -> Table {
        Table { is_of_code: true, ..Table::new(head) }
    }

    /// Adds a row of cells.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(Row::Cells(cells));
    }

    /// Adds a line without columns between rows.
    pub(crate) fn caption(&mut self, text: impl Into<String>) {
        self.rows.push(Row::Caption(text.into()));
    }

    /// The width without indentation, if nothing is cut or wrapped.
    pub(crate) fn width(&self) -> usize {
        let widths = self.widths();
        widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths = vec![0; self.align.len()];
        for row in &self.rows {
            if let Row::Head(cells) | Row::Cells(cells) = row {
                for (width, cell) in widths.iter_mut().zip(cells) {
                    *width = (*width).max(columns(cell));
                }
            }
        }
        widths
    }

    /// The lines, each indented by `indent` and at most `width` columns wide. The last column can take several lines.
    pub(crate) fn lines(&self, indent: usize, width: usize, style: Style) -> Vec<String> {
        let widths = self.widths();
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
            let pad = " ".repeat(widths[i].saturating_sub(columns(cell)));
            match self.align[i] {
                Align::Left => line.extend([cell.as_str(), &pad]),
                Align::Right => line.extend([&pad, cell.as_str()]),
            }
            line.push_str(&" ".repeat(GAP));
        }
        let start = columns(&line);
        let mut lines = Vec::new();
        let left = width.saturating_sub(start);
        if left < NARROWEST && !self.is_of_code {
            lines.push(cut(line.trim_end(), width));
            let below = indent + BELOW;
            let texts =
                if last.is_empty() || is_head { Vec::new() } else { wrap_list(last, width.saturating_sub(below)) };
            lines.extend(texts.iter().map(|text| cut(&format!("{:below$}{text}", ""), width)));
            return lines;
        }
        for piece in if self.is_of_code { wrap_code(last, left) } else { wrap_list(last, left) } {
            let head = if lines.is_empty() { std::mem::take(&mut line) } else { " ".repeat(start) };
            lines.push(cut(format!("{head}{piece}").trim_end(), width));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn wide_and_combining_characters_line_up() {
        let mut table = Table::new(&[("Owner", Align::Left), ("Peak", Align::Right), ("Object", Align::Left)]);
        table.row(vec!["cuBLAS".into(), "8.00 MiB".into(), "libcublas.so".into()]);
        table.row(vec!["模型训练".into(), "1.00 GiB".into(), "模型.so".into()]);
        table.row(vec!["e\u{301}te\u{301}".into(), "0".into(), "x.so".into()]);
        let expected = [
            "  Owner         Peak  Object",
            "  cuBLAS    8.00 MiB  libcublas.so",
            // Four characters in eight columns.
            "  模型训练  1.00 GiB  模型.so",
            // Five characters in three columns.
            "  e\u{301}te\u{301}              0  x.so",
        ];
        assert_eq!(table.lines(2, 70, Style::PLAIN), expected);
    }
}
