//! What the recorded program says (names of threads, files and functions, its command line) may hold anything, and a terminal does what
//! it is told: moves the cursor, changes its title, answers as if somebody had typed. Nothing of that reaches a terminal raw.

use std::borrow::Cow;

/// Whether this must not reach a terminal: control characters (C1 ones too, which some terminals obey), line separators, and what
/// changes the order in which text is shown.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// One line of text for people: what cannot be printed is shown as the replacement character.
pub fn line(text: &str) -> Cow<'_, str> {
    if text.contains(is_unprintable) { text.replace(is_unprintable, "\u{fffd}").into() } else { text.into() }
}

/// One line of text in HTML or XML, between tags or inside a quoted attribute: nothing of it is a tag, and what cannot be printed is
/// shown as the replacement character.
pub fn html(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for c in line(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // No XML 1.0 document may hold these.
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A JSON text with the same meaning: what cannot be printed can only stand inside strings, and is escaped there.
pub fn json(text: String) -> String {
    if !text.contains(|c| is_unprintable(c) && c != '\n') {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        if is_unprintable(c) && c != '\n' {
            // All of them lie in the basic plane.
            out.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVIL: &str = "a\x1b]0;x\x07\u{9b}2J\u{7f}\u{202e}\r\nü";

    #[test]
    fn no_control_reaches_a_line() {
        assert_eq!(line("attention.py:12 forward, ü"), "attention.py:12 forward, ü");
        assert_eq!(line(EVIL), "a\u{fffd}]0;x\u{fffd}\u{fffd}2J\u{fffd}\u{fffd}\u{fffd}\u{fffd}ü");
    }

    #[test]
    fn no_tag_reaches_a_page() {
        assert_eq!(html("a.py:1 <lambda>"), "a.py:1 &lt;lambda&gt;");
        assert_eq!(
            html("</title><script>x=\"&'\u{ffff}\u{202e}"),
            "&lt;/title&gt;&lt;script&gt;x=&quot;&amp;&#39;\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn json_means_the_same() {
        let value = serde_json::json!({ "name": EVIL, "list": [1, 2] });
        let text = json(serde_json::to_string_pretty(&value).unwrap());
        assert!(text.chars().all(|c| c == '\n' || !is_unprintable(c)), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
