//! Fits text into the columns of a terminal: its width, cutting, wrapping, and shorter forms of a location.
//!
//! A width counts columns, not characters: most East Asian characters and emoji take two, combining marks none.

use memtrace_input::printable::is_unprintable;
use memtrace_summary::UNITS;
use unicode_width::UnicodeWidthChar;

/// The maximum number of bytes for each column. It allows a letter several marks, and keeps a text of nothing but marks
/// short.
const COLUMN_BYTES: usize = 16;

/// The maximum number of lines into which a text without spaces is broken, before it is cut.
const MAX_BREAKS: usize = 4;

/// The maximum number of lines into which a line of code is broken, before it is cut.
const MAX_CODE_LINES: usize = 12;

/// The number of columns that a text takes.
pub(crate) fn columns(text: &str) -> usize {
    if text.is_ascii() { text.len() } else { text.chars().map(char_columns).sum() }
}

/// The number of columns that a character takes: that of `wcwidth`, by which terminals decide. An unprintable character
/// counts as the replacement character that is displayed instead.
fn char_columns(c: char) -> usize {
    if is_unprintable(c) { 1 } else { c.width().unwrap_or(1) }
}

/// Whether a text takes at most `width` columns.
fn fits(text: &str, width: usize) -> bool {
    text.len() <= width.saturating_mul(COLUMN_BYTES) && columns(text) <= width
}

/// The longest beginning that fits into `width` columns.
fn beginning(text: &str, width: usize) -> &str {
    let mut used = 0;
    let mut ends = text.char_indices().map(|(at, c)| (at, at + c.len_utf8(), char_columns(c)));
    let beyond = ends.find(|(_, end, columns)| {
        used += columns;
        used > width || *end > width.saturating_mul(COLUMN_BYTES)
    });
    beyond.map_or(text, |(at, _, _)| &text[..at])
}

/// The longest end that fits into `width` columns.
fn ending(text: &str, width: usize) -> &str {
    let mut used = 0;
    let mut starts = text.char_indices().rev().map(|(at, c)| (at, at + c.len_utf8(), char_columns(c)));
    let beyond = starts.find(|(at, _, columns)| {
        used += columns;
        used > width || text.len() - at > width.saturating_mul(COLUMN_BYTES)
    });
    let end = beyond.map_or(text, |(_, end, _)| &text[end..]);
    // A mark without its letter would combine with the character before the ending.
    end.trim_start_matches(|c| char_columns(c) == 0)
}

/// Breaks a list after its commas. A part that is longer than a line is broken at spaces.
pub(crate) fn wrap_list(text: &str, width: usize) -> Vec<String> {
    let parts =
        text.split_inclusive(", ").flat_map(|part| if fits(part.trim_end(), width) { vec![part] } else { words(part) });
    wrap(parts, width)
}

/// Breaks text at spaces.
pub(crate) fn wrap_words(text: &str, width: usize) -> Vec<String> {
    wrap(words(text).into_iter(), width)
}

/// Breaks a line of code at spaces. Continuation lines are indented by four columns more. Only a line of many lines is
/// cut.
pub(crate) fn wrap_code(code: &str, width: usize) -> Vec<String> {
    if fits(code, width) {
        return vec![code.to_owned()];
    }
    let text = code.trim_start();
    let indentation = columns(&code[..code.len() - text.len()]).min(width / 2);
    let mut lines = wrap_words(text, width.saturating_sub(indentation + 4));
    if lines.len() > MAX_CODE_LINES {
        lines.truncate(MAX_CODE_LINES);
        lines.push("…".to_owned());
    }
    let indented = |(i, line)| format!("{:indent$}{line}", "", indent = indentation + if i == 0 { 0 } else { 4 });
    lines.into_iter().enumerate().map(indented).collect()
}

/// The words of a text, each with the space after it. A number and its unit are one word.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut start = 0;
    for (end, _) in text.match_indices(' ') {
        let next = text[end + 1..].split(|c: char| !c.is_ascii_alphabetic() && c != '%').next().unwrap_or_default();
        let is_number = text[start..end].ends_with(|c: char| c.is_ascii_digit());
        if !(is_number && (UNITS.contains(&next) || next == "%")) {
            words.push(&text[start..=end]);
            start = end + 1;
        }
    }
    words.push(&text[start..]);
    words
}

fn wrap<'a>(pieces: impl Iterator<Item = &'a str>, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let (mut line, mut used) = (String::new(), 0);
    for piece in pieces {
        if used > 0 && used + columns(piece.trim_end()) > width {
            broken(std::mem::take(&mut line).trim_end(), width, &mut lines);
            used = 0;
        }
        line.push_str(piece);
        used += columns(piece);
    }
    broken(line.trim_end(), width, &mut lines);
    lines
}

/// Adds a text without a place to wrap. If it is wider than a line, it is broken anywhere; only a text of many lines is
/// cut.
fn broken(text: &str, width: usize, lines: &mut Vec<String>) {
    let mut left = text;
    for _ in 0..MAX_BREAKS {
        if fits(left, width) {
            break;
        }
        let piece = beginning(left, width.max(1));
        left = &left[piece.len()..];
        lines.extend((!piece.is_empty()).then(|| piece.to_owned()));
    }
    lines.push(cut(left, width));
}

/// Cuts text to at most `width` columns. A cut text ends with an ellipsis.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if fits(text, width) {
        return text.to_owned();
    }
    format!("{}…", beginning(text, width.saturating_sub(1)).trim_end())
}

/// Cuts text to at most `width` columns in the middle, because both ends carry information.
pub(crate) fn cut_middle(text: &str, width: usize) -> String {
    if fits(text, width) {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    format!("{}…{}", beginning(text, kept / 2), ending(text, kept - kept / 2))
}

/// Shortens a location to at most `width` columns, as [`short_location`] does. If that is not enough, its middle is
/// cut.
pub(crate) fn location_in(location: &str, width: usize) -> String {
    short_location(location, width).unwrap_or_else(|| cut_middle(&without_functions(location), width.max(8)))
}

/// Shortens a location to lines of `width` columns: without folders and functions if it takes more than one line.
pub(crate) fn wrap_location(location: &str, width: usize) -> Vec<String> {
    match short_location(location, width) {
        Some(text) => vec![text],
        None => wrap_list(&without_functions(location), width.max(8)),
    }
}

/// Shortens a location to at most `width` columns. It drops folders first, then functions, so that the program's own
/// line stays. `None` if that is not enough.
pub(crate) fn short_location(location: &str, width: usize) -> Option<String> {
    [location.to_owned(), without_folders(location), without_functions(location)]
        .into_iter()
        .find(|text| fits(text, width))
}

fn without_folders(location: &str) -> String {
    of_parts(location, |node, file, function| format!("{node}{file}{function}"))
}

fn without_functions(location: &str) -> String {
    of_parts(location, |node, file, _| format!("{node}{file}"))
}

/// Formats each part of a location anew. A part has the form `tests/train.py:17 step` or
/// `optim/adam.py:178 _init_group`, optionally with an autograd node's `X of ` before it. `format` gets the node with
/// ` of `, the file without its folders, and the function with the space before it.
fn of_parts(location: &str, format: fn(&str, &str, &str) -> String) -> String {
    let part = |part: &str| {
        let (node, at) = part.split_at(part.rfind(" of ").map_or(0, |at| at + " of ".len()));
        let (file, function) = at.split_at(at.find(' ').unwrap_or(at.len()));
        format(node, file.rsplit('/').next().unwrap_or(file), function)
    };
    location.split(", ").map(part).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_keep_their_lines() {
        let location = "tests/programs/train.py:17 step, optim/adam.py:178 _init_group";
        assert_eq!(location_in(location, 80), location);
        assert_eq!(location_in(location, 50), "train.py:17 step, adam.py:178 _init_group");
        assert_eq!(location_in(location, 30), "train.py:17, adam.py:178");
        assert_eq!((location_in(location, 15).as_str(), short_location(location, 15)), ("train.p….py:178", None));
        let node = "MmBackward0 of a/b/model.py:9 forward, modules/linear.py:134 forward";
        assert_eq!(location_in(node, 40), "MmBackward0 of model.py:9, linear.py:134");
        assert_eq!((cut_middle("abcdefghi", 5), cut_middle("abc", 5)), ("ab…hi".to_owned(), "abc".to_owned()));
    }

    #[test]
    fn a_number_and_its_unit_stay_on_one_line() {
        let text = "two moments: 2 x 97.5 MiB (30 %), freed 1 GiB";
        assert_eq!(wrap_words(text, 22), ["two moments: 2 x", "97.5 MiB (30 %), freed", "1 GiB"]);
        assert_eq!(wrap_list(text, 34), ["two moments: 2 x 97.5 MiB (30 %),", "freed 1 GiB"]);
        assert_eq!(wrap_list(text, 22), ["two moments: 2 x", "97.5 MiB (30 %),", "freed 1 GiB"]);
    }

    #[test]
    fn widths_are_columns() {
        // Two ideographs, an emoji, a letter with a combining mark, and an ideograph of half width.
        let texts = [("a.py", 4), ("模型", 4), ("🔥", 2), ("e\u{301}", 1), ("\u{ff76}", 1), ("", 0)];
        for (text, width) in texts {
            assert_eq!(columns(text), width, "{text}");
        }
        // Each becomes a replacement character of one column.
        assert_eq!((columns("\x1b\r\n"), columns("\u{202e}模")), (3, 3));
    }

    #[test]
    fn a_cut_text_is_no_wider_than_requested() {
        let path = "模型/训练.py";
        assert_eq!(cut(path, 12), path);
        assert_eq!(cut(path, 11), "模型/训练.…");
        // The third ideograph would need a seventh column.
        assert_eq!(cut(path, 7), "模型/…");
        assert_eq!(cut_middle(path, 9), "模型….py");
        assert_eq!(cut_middle("abcde\u{301}", 4), "a…de\u{301}");
        assert_eq!(cut_middle("abcde\u{301}f", 3), "a…f", "no mark without its letter");
        assert_eq!(wrap_words("模型 训练", 8), ["模型", "训练"]);
        let marks = "\u{301}".repeat(1 << 20);
        for text in [cut(&marks, 20), cut_middle(&marks, 20), location_in(&marks, 20)] {
            assert!(text.len() < 20 * COLUMN_BYTES + "…".len(), "{}", text.len());
        }
        let wrapped = wrap_words(&marks, 20);
        assert!(wrapped.len() <= MAX_BREAKS + 1 && wrapped.join("").len() < (MAX_BREAKS + 1) * 20 * COLUMN_BYTES + 3);
        let long = "expandable_segments:True,max_split_size_mb:128";
        assert_eq!(wrap_words(long, 20), ["expandable_segments:", "True,max_split_size_", "mb:128"]);
        for width in 0..14 {
            for text in [cut(path, width), cut_middle(path, width)] {
                assert!(columns(&text) <= width.max(1), "{width}: {text}");
            }
        }
    }
}
