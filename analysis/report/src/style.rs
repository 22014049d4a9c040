//! How text looks: its width and its colors.

use memtrace_input::printable;
use memtrace_insight::passes::Category;

/// Layout options for text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextOptions {
    /// The width in columns. 80 to 120 looks best; the minimum is 40.
    pub width: usize,
    /// Whether to use ANSI colors.
    pub color: bool,
    /// Whether to draw bars with block characters, instead of `#`.
    pub blocks: bool,
    /// Whether to print evidence, replay details and churn too.
    pub verbose: bool,
}

impl Default for TextOptions {
    fn default() -> TextOptions {
        TextOptions { width: 100, color: false, blocks: false, verbose: false }
    }
}

/// Has a text for the terminal.
pub trait ToText {
    /// The text. Each line ends with a newline.
    fn to_text(&self, options: &TextOptions) -> String;
}

/// Paints text with ANSI colors, or leaves it plain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Style {
    pub(crate) color: bool,
}

impl Style {
    #[cfg(test)]
    pub(crate) const PLAIN: Style = Style { color: false };

    pub(crate) fn paint(self, code: &str, text: &str) -> String {
        if self.color && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub(crate) fn alarm(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub(crate) fn good(self, text: &str) -> String {
        self.paint("1;32", text)
    }

    pub(crate) fn warning(self, text: &str) -> String {
        self.paint("1;33", text)
    }

    /// Paints a bar in the color of its category.
    pub(crate) fn bar(self, category: Category, text: &str) -> String {
        self.paint(category.terminal_color(), text)
    }

    /// The line, safe for a terminal and for the log of a CI job. It keeps only the control sequences that
    /// [`Self::paint`] makes.
    pub(crate) fn printable(self, line: &str) -> String {
        printable::styled_line(line, if self.color { &printable::STYLES } else { &[] })
    }
}
