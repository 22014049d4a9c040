//! Text of the recorded program in HTML pages.

use maud::Render;
use memtrace_input::printable;

/// Text that can come from the recorded program. maud escapes markup. It lets control characters and characters that
/// change the order of text pass, so this type replaces them.
pub(crate) struct Text<T>(pub(crate) T);

impl<T: AsRef<str>> Render for Text<T> {
    fn render_to(&self, out: &mut String) {
        printable::line(self.0.as_ref()).render_to(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use maud::html;

    #[test]
    fn text_is_neither_markup_nor_control() {
        let hostile = "</title><script>x=\"&\x1b[2J\u{202e}\n\u{9b}";
        let shown = "&lt;/title&gt;&lt;script&gt;x=&quot;&amp;\u{fffd}[2J\u{fffd}\u{fffd}\u{fffd}";
        assert_eq!(
            html! { p title=(Text(hostile)) { (Text(hostile)) } }.0,
            format!("<p title=\"{shown}\">{shown}</p>")
        );
    }
}
