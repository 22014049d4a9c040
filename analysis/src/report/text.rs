//! The closing page.

/// How text is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextOptions {
    /// Columns to fill; 80 to 120 look best.
    pub width: usize,
    /// Whether to use ANSI colours.
    pub colour: bool,
}

impl Default for TextOptions {
    fn default() -> TextOptions {
        TextOptions { width: 120, colour: false }
    }
}
