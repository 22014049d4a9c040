//! What the HTML pages share: the frame of a page, and text of the recorded program in it.

use maud::{DOCTYPE, Markup, PreEscaped, Render, html};
use memtrace_input::printable;

/// Text that can come from the recorded program. maud escapes markup. It lets control characters and characters that
/// change the order of text pass, so this type replaces them.
pub(crate) struct Text<T>(pub(crate) T);

impl<T: AsRef<str>> Render for Text<T> {
    fn render_to(&self, out: &mut String) {
        printable::line(self.0.as_ref()).render_to(out);
    }
}

/// A page with a title, a style sheet and a body. Its policy lets the browser load nothing.
pub(crate) fn page(title: &str, style: &str, body: &Markup) -> Markup {
    html! {
        (DOCTYPE) "\n"
        html lang="en" {
            head {
                meta charset="utf-8"; "\n"
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"; "\n"
                title { (Text(title)) } "\n"
                style { (PreEscaped(style)) }
            }
            body { "\n" (body) }
        } "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_neither_markup_nor_control() {
        let hostile = "</title><script>x=\"&\x1b[2J\u{202e}\n\u{9b}";
        let shown = "&lt;/title&gt;&lt;script&gt;x=&quot;&amp;\u{fffd}[2J\u{fffd}\u{fffd}\u{fffd}";
        assert_eq!(
            html! { p title=(Text(hostile)) { (Text(hostile)) } }.0,
            format!("<p title=\"{shown}\">{shown}</p>")
        );
        let page = page(hostile, "p{}", &html! { p { "x" } }).0;
        assert!(page.contains(&format!("<title>{shown}</title>")), "{page}");
        assert!(page.ends_with("<style>p{}</style></head><body>\n<p>x</p></body></html>\n"), "{page}");
    }
}
