//! Makes text safe to display, with one function for each format. Names of threads, files and functions and the command
//! line come from the recorded program and can contain anything:
//!
//! - A terminal obeys control sequences: it moves the cursor, changes its title, or answers as if the user had typed.
//! - A CI service obeys commands in the log of a job. GitHub's runner takes a line that begins with `::`, and
//!   `##[command]` anywhere in a line; Azure Pipelines takes `##vso[command]`.
//! - A spreadsheet evaluates cells of a CSV file that begin as a formula does.
//! - A browser obeys markup.
//!
//! Everything that memtrace prints or writes as text goes through this module.

use std::borrow::Cow;

/// Stands for a character that must not be displayed, and separates characters that must not stand together.
const REPLACEMENT: char = '\u{fffd}';

/// Whether this character must not reach a terminal. These are control characters (including C1, which some terminals
/// obey), line separators, and characters that change the order of text.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Makes a part of a line of text for a terminal. Unprintable characters become the replacement character.
pub fn line(text: &str) -> Cow<'_, str> {
    if text.contains(is_unprintable) { text.replace(is_unprintable, "\u{fffd}").into() } else { text.into() }
}

/// The control sequences with which memtrace styles text.
pub const STYLES: [&str; 14] = [
    "\x1b[0m",
    "\x1b[1m",
    "\x1b[2m",
    "\x1b[4m",
    "\x1b[1;31m",
    "\x1b[1;32m",
    "\x1b[1;33m",
    "\x1b[31m",
    "\x1b[32m",
    "\x1b[33m",
    "\x1b[34m",
    "\x1b[35m",
    "\x1b[36m",
    "\x1b[37m",
];

/// Makes a whole line of output. It is printable, and no CI service takes it for a command.
pub fn output_line(text: &str) -> String {
    without_commands(&line(text)).into_owned()
}

/// Makes lines of output: each as [`output_line`] makes one.
pub fn output_text(text: &str) -> String {
    styled_text(text, &[])
}

/// Makes lines of output: each as [`styled_line`] makes one.
pub fn styled_text(text: &str, own: &[&str]) -> String {
    let mut out = String::with_capacity(text.len());
    for part in text.split_inclusive('\n') {
        let (line, end) = part.strip_suffix('\n').map_or((part, ""), |line| (line, "\n"));
        out.push_str(&styled_line(line, own));
        out.push_str(end);
    }
    out
}

/// Makes a whole line of output that keeps the control sequences `own`, with which the caller has styled it.
pub fn styled_line(text: &str, own: &[&str]) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some((before, _)) = rest.split_once('\x1b') {
        out.push_str(&line(before));
        let sequence = &rest[before.len()..];
        let kept = own.iter().find(|own| sequence.starts_with(**own));
        out.push_str(kept.map_or("\u{fffd}", |own| own));
        rest = &sequence[kept.map_or(1, |own| own.len())..];
    }
    out.push_str(&line(rest));
    without_commands(&out).into_owned()
}

/// Separates the characters by which a CI service recognizes a command in this line.
fn without_commands(line: &str) -> Cow<'_, str> {
    let code = line.trim_start();
    let is_command = code.starts_with("::");
    if !is_command && !line.contains("##") {
        return line.into();
    }
    let mut out = line[..line.len() - code.len()].to_owned();
    out.extend(is_command.then_some(REPLACEMENT));
    replace_brackets(code, "\u{fffd}[", &mut out);
    out.into()
}

/// Copies `text` to `out`. Each `[` that ends the prefix of a CI command (`##[`, `##vso[`) becomes `bracket`.
fn replace_brackets(text: &str, bracket: &str, out: &mut String) {
    let (mut hashes, mut is_prefix) = (0, false);
    for c in text.chars() {
        if is_prefix && c == '[' {
            out.push_str(bracket);
        } else {
            out.push(c);
        }
        hashes = if c == '#' { hashes + 1 } else { 0 };
        is_prefix = hashes >= 2 || is_prefix && c.is_ascii_alphabetic();
    }
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
            '\u{fffe}' | '\u{ffff}' => out.push(REPLACEMENT),
            c => out.push(c),
        }
    }
    out
}

/// Makes a JSON text with the same value. Unprintable characters and the prefixes of CI commands can occur only inside
/// strings and are escaped there.
pub fn json(text: String) -> String {
    let is_escaped = |c| is_unprintable(c) && c != '\n';
    if !text.contains(is_escaped) && !text.contains("##") {
        return text;
    }
    let mut printable = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        if is_escaped(c) {
            // All of them are in the Basic Multilingual Plane, so four digits suffice.
            printable.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            printable.push(c);
        }
    }
    let mut out = String::with_capacity(printable.len());
    replace_brackets(&printable, "\\u005b", &mut out);
    out
}

/// Makes a text cell of a CSV file (RFC 4180), quoted if necessary.
///
/// A cell that begins as a formula does gets a `'` before that, as [OWASP] recommends. So does a part after a
/// semicolon, because many spreadsheets take that as a separator.
///
/// [OWASP]: https://owasp.org/www-community/attacks/CSV_Injection
pub fn csv(text: &str) -> String {
    // The wide forms count in East Asian versions of spreadsheets. Tabs and line ends are unprintable, so none remains.
    const FORMULA: [char; 8] = ['=', '+', '-', '@', '＝', '＋', '－', '＠'];
    const SEPARATORS: [char; 2] = [',', ';'];
    let text = line(text);
    let mut out = String::with_capacity(text.len());
    let mut is_at_start = true;
    for c in text.chars() {
        if is_at_start && FORMULA.contains(&c) {
            out.push('\'');
        }
        out.push(c);
        if c == '"' {
            out.push('"');
        }
        is_at_start = SEPARATORS.contains(&c) || is_at_start && (c.is_whitespace() || c == '"');
    }
    if text.contains(['"', ',', ';']) { format!("\"{out}\"") } else { out }
}

/// Makes a frame of a folded stack. Semicolons separate frames, so they become colons.
pub fn folded_frame(text: &str) -> String {
    line(text).replace(';', ":")
}

/// Makes the message of a workflow command of GitHub Actions, with the escapes that GitHub's runner resolves.
pub fn github_message(text: &str) -> String {
    let escaped = text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let mut out = String::with_capacity(escaped.len());
    replace_brackets(&line(&escaped), "\u{fffd}[", &mut out);
    out
}

/// Makes a property of a workflow command of GitHub Actions, with the escapes that GitHub's runner resolves.
pub fn github_property(text: &str) -> String {
    github_message(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\x1b]0;x\x07\u{9b}2J\u{7f}\u{202e}\r\nü";
    /// All characters that must not reach a terminal, by Unicode's own names: Cc, Bidi_Control, Zl and Zp.
    const UNPRINTABLE: [std::ops::RangeInclusive<char>; 7] = [
        '\0'..='\x1f',
        '\x7f'..='\u{9f}',
        '\u{61c}'..='\u{61c}',
        '\u{200e}'..='\u{200f}',
        '\u{2028}'..='\u{2029}',
        '\u{202a}'..='\u{202e}',
        '\u{2066}'..='\u{2069}',
    ];

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(line("attention.py:12 forward, ü"), "attention.py:12 forward, ü");
        assert_eq!(line(HOSTILE), "a\u{fffd}]0;x\u{fffd}\u{fffd}2J\u{fffd}\u{fffd}\u{fffd}\u{fffd}ü");
    }

    #[test]
    fn no_format_has_an_unprintable_character() {
        for c in UNPRINTABLE.into_iter().flatten() {
            let text = format!("x{c}y");
            let all = [
                line(&text).into_owned(),
                output_line(&text),
                html(&text),
                csv(&text),
                folded_frame(&text),
                github_message(&text),
                github_property(&text),
                json(format!("\"{text}\"")),
            ];
            // In JSON, a line end is between values and stays.
            let is_allowed = |c: char| c == '\n' && text == "x\ny";
            for (format, out) in all.iter().enumerate() {
                assert!(!out.contains(|c| is_unprintable(c) && !is_allowed(c)), "{format}: {out:?}");
                assert!(out.contains('x') && out.contains('y'), "{format}: {out:?}");
            }
        }
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
    fn json_has_escapes() {
        let escaped = json("{\n  \"a\": \"\u{9b}\u{7f}\u{202e}ü ##[x] ##vso[y] #[z] ##\"\n}".to_owned());
        assert_eq!(escaped, "{\n  \"a\": \"\\u009b\\u007f\\u202eü ##\\u005bx] ##vso\\u005by] #[z] ##\"\n}");
        assert_eq!(json("{\"a\": [1, \"#[\"]}".to_owned()), "{\"a\": [1, \"#[\"]}");
    }

    #[test]
    fn ci_services_find_no_command() {
        for (text, expected) in [
            ("::stop-commands::x", "\u{fffd}::stop-commands::x"),
            (" \u{a0} ::error::x", " \u{a0} \u{fffd}::error::x"),
            ("a ##[stop-commands]x", "a ##\u{fffd}[stop-commands]x"),
            ("##vso[task.setvariable variable=x]y", "##vso\u{fffd}[task.setvariable variable=x]y"),
            ("\x1b###[x] ##a-b[c] a::b a[0] #[d]", "\u{fffd}###\u{fffd}[x] ##a-b[c] a::b a[0] #[d]"),
        ] {
            assert_eq!(output_line(text), expected);
        }
    }

    #[test]
    fn styled_lines_keep_their_own_sequences_only() {
        const OWN: [&str; 2] = ["\x1b[1m", "\x1b[0m"];
        let text = "\x1b[1mx\x1b[0m ##[y]\x1b[2J\x1b]0;z\x07";
        assert_eq!(styled_line(text, &OWN), "\x1b[1mx\x1b[0m ##\u{fffd}[y]\u{fffd}[2J\u{fffd}]0;z\u{fffd}");
        assert_eq!(styled_line("\x1b[1mx", &[]), "\u{fffd}[1mx");
    }

    #[test]
    fn lines_of_output_are_made_one_by_one() {
        let text = "\x1b[1ma\x1b[0m\n ::error::b\r\n\n\u{202e}##[c]";
        assert_eq!(output_text(text), "\u{fffd}[1ma\u{fffd}[0m\n \u{fffd}::error::b\u{fffd}\n\n\u{fffd}##\u{fffd}[c]");
        assert!(styled_text(text, &STYLES).starts_with("\x1b[1ma\x1b[0m\n \u{fffd}::error::b"));
        // Printable text stays, so text may be made twice.
        for text in [output_text(text), "a\nb".to_owned(), "\n".to_owned(), String::new()] {
            assert_eq!(output_text(&text), text);
        }
    }

    #[test]
    fn workflow_commands_are_escaped() {
        assert_eq!(github_message("5 % too\r\nhigh::x, y"), "5 %25 too%0D%0Ahigh::x, y");
        assert_eq!(github_message("\n##[stop-commands]x"), "%0A##\u{fffd}[stop-commands]x");
        assert_eq!(github_property("a, b:c%\n.py,title=x"), "a%2C b%3Ac%25%0A.py%2Ctitle=x");
    }

    #[test]
    fn cells_are_quoted_and_are_no_formulas() {
        for (text, expected) in [
            ("a.py:1 f", "a.py:1 f"),
            ("a, \"b\"", "\"a, \"\"b\"\"\""),
            ("=1+cmd|'/c calc'!A0", "'=1+cmd|'/c calc'!A0"),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("@SUM(1)", "'@SUM(1)"),
            ("＝1", "'＝1"),
            ("\t=1", "\u{fffd}=1"),
            ("\r=1", "\u{fffd}=1"),
            (" \"=1", "\" \"\"'=1\""),
            ("a;=1;b;-c", "\"a;'=1;b;'-c\""),
            ("a,@b", "\"a,'@b\""),
            ("a\n=1", "a\u{fffd}=1"),
            ("a-b=c", "a-b=c"),
        ] {
            assert_eq!(csv(text), expected, "{text:?}");
        }
    }

    #[test]
    fn frames_have_no_separators() {
        assert_eq!(folded_frame("a;b\nc 7"), "a:b\u{fffd}c 7");
    }
}
