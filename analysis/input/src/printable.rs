//! Makes text safe to display. Names of threads, files and functions and the command line come from the recorded
//! program and can contain anything. A terminal obeys control sequences: it moves the cursor, changes its title, or
//! answers as if the user had typed. None of them reaches a terminal unescaped.

use std::borrow::Cow;

/// Whether this character must not reach a terminal. These are control characters (including C1, which some terminals
/// obey), line separators, and characters that change the order of text.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Makes one line of text for a terminal. Unprintable characters become the replacement character.
pub fn line(text: &str) -> Cow<'_, str> {
    if text.contains(is_unprintable) { text.replace(is_unprintable, "\u{fffd}").into() } else { text.into() }
}

/// Makes one line of text for HTML or XML, between tags or inside a quoted attribute. Markup is escaped, and
/// unprintable characters become the replacement character.
pub fn html(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for c in line(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML 1.0 does not allow these characters.
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Makes a JSON text with the same meaning. Unprintable characters can occur only inside strings and are escaped there.
pub fn json(text: String) -> String {
    if !text.contains(|c| is_unprintable(c) && c != '\n') {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        if is_unprintable(c) && c != '\n' {
            // All of them are in the Basic Multilingual Plane, so four digits suffice.
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

    const HOSTILE: &str = "a\x1b]0;x\x07\u{9b}2J\u{7f}\u{202e}\r\nü";

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(line("attention.py:12 forward, ü"), "attention.py:12 forward, ü");
        assert_eq!(line(HOSTILE), "a\u{fffd}]0;x\u{fffd}\u{fffd}2J\u{fffd}\u{fffd}\u{fffd}\u{fffd}ü");
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(html("a.py:1 <lambda>"), "a.py:1 &lt;lambda&gt;");
        assert_eq!(
            html("</title><script>x=\"&'\u{ffff}\u{202e}"),
            "&lt;/title&gt;&lt;script&gt;x=&quot;&amp;&#39;\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let value = serde_json::json!({ "name": HOSTILE, "list": [1, 2] });
        let text = json(serde_json::to_string_pretty(&value).unwrap());
        assert!(text.chars().all(|c| c == '\n' || !is_unprintable(c)), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
