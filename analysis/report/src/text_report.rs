//! A report in plain text while it is written: headings, labelled facts and lists, wrapped to the width.

use memtrace_summary::{share_text, size_text};

use crate::fit::{columns, cut, wrap_list, wrap_words};
use crate::style::{Style, TextOptions};

/// The width of the label column: that of `Reserved but unallocated`. Longer labels move their own text to the right.
const LABEL_WIDTH: usize = 24;
/// The width of the labels in an issue.
pub(crate) const ISSUE_LABEL_WIDTH: usize = 8;
/// The column in which the text of a list's row begins: after bytes and percentage.
pub(crate) const ROW_TEXT: usize = 21;
/// If less than this remains beside a label, the text stands below it.
const NARROWEST_TEXT: usize = 40;

/// A report in plain text while its lines are collected.
pub(crate) struct TextReport {
    pub(crate) lines: Vec<String>,
    pub(crate) width: usize,
    pub(crate) style: Style,
}

impl TextReport {
    pub(crate) fn new(options: &TextOptions) -> TextReport {
        TextReport { lines: Vec::new(), width: options.width.max(40), style: Style { color: options.color } }
    }

    pub(crate) fn text(&self) -> String {
        self.lines.iter().map(|line| self.style.printable(line) + "\n").collect()
    }

    pub(crate) fn heading(&mut self, text: &str) {
        let text = self.style.bold(&cut(text, self.width));
        self.lines.push(text);
    }

    pub(crate) fn line(&mut self, text: String) {
        let text = cut(&text, self.width);
        self.lines.push(text);
    }

    pub(crate) fn blank(&mut self) {
        self.lines.push(String::new());
    }

    /// Adds a device's title and its verdict, on one line if they fit.
    pub(crate) fn title(&mut self, title: &str, verdict: &str, paint: fn(Style, &str) -> String) {
        if columns(title) + 4 + columns(verdict) <= self.width {
            self.lines.push(format!("{}    {}", self.style.bold(title), paint(self.style, verdict)));
        } else {
            self.heading(title);
            let lines = wrap_words(verdict, self.width.saturating_sub(2));
            self.lines.extend(lines.iter().map(|line| format!("  {}", paint(self.style, line))));
        }
    }

    /// Adds a labelled fact. Text that does not fit continues below its beginning. An empty text adds nothing.
    pub(crate) fn labelled(&mut self, label: &str, text: &str) {
        self.labelled_at(2, LABEL_WIDTH, label, text, wrap_words);
    }

    /// Adds a labelled list whose parts end with commas.
    pub(crate) fn labelled_list(&mut self, label: &str, text: &str) {
        self.labelled_at(2, LABEL_WIDTH, label, text, wrap_list);
    }

    pub(crate) fn labelled_at(
        &mut self,
        indent: usize,
        label_width: usize,
        label: &str,
        text: &str,
        wrap: fn(&str, usize) -> Vec<String>,
    ) {
        if text.is_empty() {
            return;
        }
        let label_width = label_width.max(columns(label));
        let mut start = indent + label_width + 2;
        let mut head = format!("{:indent$}{label:<label_width$}  ", "");
        if self.width < start + NARROWEST_TEXT {
            if !label.is_empty() {
                self.lines.push(self.style.dim(head.trim_end()));
            }
            start = indent + 2;
            head = " ".repeat(start);
        }
        for line in wrap(text, self.width.saturating_sub(start)) {
            self.lines.push(format!("{}{line}", self.style.dim(&head)));
            head = " ".repeat(start);
        }
    }

    /// Adds the heading of a list. Each row is a [`Self::row`].
    pub(crate) fn list(&mut self, heading: &str) {
        let heading = cut(&format!("  {heading}"), self.width);
        self.lines.push(self.style.dim(&heading));
    }

    /// Adds a row of a list: bytes, their share of `whole`, and what they are.
    pub(crate) fn row(&mut self, bytes: u64, whole: u64, text: &str) {
        let text = format!("    {:>8}  {:>5}  {text}", size_text(bytes), share_text(bytes, whole));
        self.line(text.trim_end().to_owned());
    }

    /// Adds an item of a list of sentences.
    pub(crate) fn item(&mut self, indent: usize, text: &str) {
        let mut head = format!("{:indent$}- ", "");
        for line in wrap_words(text, self.width.saturating_sub(indent + 2)) {
            self.lines.push(format!("{head}{line}"));
            head = " ".repeat(indent + 2);
        }
    }

    /// Adds a note below tables.
    pub(crate) fn note(&mut self, text: &str) {
        for (i, line) in wrap_words(text, self.width.saturating_sub(8)).iter().enumerate() {
            self.line(format!("{}{line}", if i == 0 { "  note: " } else { "        " }));
        }
    }
}
