//! A report in plain text while it is written: headings, labelled facts and lists, wrapped to the width.

use memtrace_insight::passes::Category;
use memtrace_summary::{share_text, size_text};

use crate::fit::{columns, cut, wrap_list, wrap_words};
use crate::style::{Style, TextOptions};

/// The width of the label column: that of `Reserved but unallocated`. Longer labels move their own text to the right.
const LABEL_WIDTH: usize = 24;
/// The width of the labels in an issue.
pub(crate) const ISSUE_LABEL_WIDTH: usize = 8;
/// The column in which the text of a list's row begins: after bytes and percentage.
pub(crate) const ROW_TEXT: usize = 21;
/// The narrowest text of a row.
const NARROWEST_ROW: usize = 16;
/// The maximum length of a bar in columns.
const WIDEST_BAR: usize = 24;
/// If less than this remains beside a label, the text stands below it.
const NARROWEST_TEXT: usize = 40;

/// A report in plain text while its lines are collected.
pub(crate) struct TextReport {
    pub(crate) lines: Vec<String>,
    pub(crate) width: usize,
    pub(crate) style: Style,
    pub(crate) blocks: bool,
    pub(crate) verbose: bool,
}

impl TextReport {
    pub(crate) fn new(options: &TextOptions) -> TextReport {
        TextReport {
            lines: Vec::new(),
            width: options.width.max(40),
            style: Style { color: options.color },
            blocks: options.blocks,
            verbose: options.verbose,
        }
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
        let mut head = format!("    {:>8}  {:>5}  ", size_text(bytes), share_text(bytes, whole));
        for line in wrap_words(text, self.width.saturating_sub(ROW_TEXT).max(NARROWEST_ROW)) {
            self.line(format!("{head}{line}").trim_end().to_owned());
            head = " ".repeat(ROW_TEXT);
        }
    }

    /// Adds a bar: a category, its bytes and their share of `whole`. `label` is the width of the longest label.
    pub(crate) fn bar(
        &mut self,
        label: usize,
        (category, text): (Category, &str),
        (bytes, whole): (u64, u64),
        note: &str,
    ) {
        let full = (self.width / 4).clamp(8, WIDEST_BAR);
        let length = (bytes as u128 * full as u128).div_ceil(whole.max(1) as u128).min(full as u128) as usize;
        let drawn = if self.blocks { "█" } else { "#" }.repeat(length);
        let bar = self.style.bar(category, &drawn);
        let figures = format!("{:>8}  {:>5}", size_text(bytes), share_text(bytes, whole));
        let pad = " ".repeat(full - length);
        let gap = " ".repeat(label.saturating_sub(columns(text)));
        let line = format!("  {text}{gap}  {bar}{pad}  {figures}");
        let used = 2 + label + 2 + full + 2 + columns(&figures);
        if !note.is_empty() && used + 2 + columns(note) <= self.width {
            self.lines.push(format!("{line}  {note}"));
        } else {
            self.lines.push(line);
        }
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
