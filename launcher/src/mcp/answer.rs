//! Answers of bounded size. An answer that leaves something out says what, and how to get it.
//!
//! A tool builds its answer from a [`Shape`]: how many items each list may have, and how long each text may be. If the
//! answer is too large, it is built again in a smaller shape.

use std::cell::RefCell;

use memtrace_analysis::printable;
use memtrace_analysis::report::{share_text, signed_size_text, size_text};
use rmcp::model::{CallToolResult, ContentBlock};
use schemars::JsonSchema;
use serde::Serialize;

use crate::mcp::tool_error::ToolError;

/// The maximum size of an answer as JSON, in bytes: about 6000 tokens.
pub(crate) const MAX_ANSWER: usize = 16 << 10;
/// The number of items of a list by default.
pub(crate) const DEFAULT_LIMIT: usize = 10;
/// The highest number of items that a call may request.
pub(crate) const MAX_LIMIT: usize = 200;
/// The number of characters of a text, in shapes from the first to the last.
const TEXT_LENGTHS: [usize; 3] = [600, 200, 60];
/// The end of a program's output is so many times as long.
const TAIL: usize = 5;

/// A size in bytes, and as text.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub(crate) struct Size {
    /// The bytes.
    bytes: i64,
    /// The same in binary units, for example `1.51 GiB`.
    text: String,
}

impl Size {
    /// A size.
    pub(crate) fn of(bytes: u64) -> Size {
        Size { bytes: i64::try_from(bytes).unwrap_or(i64::MAX), text: size_text(bytes) }
    }

    /// A difference, with its sign.
    pub(crate) fn change(bytes: i64) -> Size {
        Size { bytes, text: signed_size_text(bytes) }
    }
}

/// A share as text, for example `17 %`.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    share_text(part, whole)
}

/// How much an answer may hold, and what was left out of it.
#[derive(Debug)]
pub(crate) struct Shape {
    /// The number of items that the call requests.
    requested: usize,
    limit: usize,
    offset: usize,
    text_length: usize,
    left_out: RefCell<Vec<String>>,
}

impl Shape {
    /// The items of a list that `offset` pages through, as many as fit.
    pub(crate) fn page<T, U>(&self, name: &str, items: &[T], show: impl FnMut(&T) -> U) -> Vec<U> {
        let first = self.offset.min(items.len());
        let shown: Vec<U> = items[first..].iter().take(self.limit).map(show).collect();
        let next = first + shown.len();
        if next < items.len() {
            let (before, all) = (first + 1, items.len());
            self.note(match shown.len() {
                0 => format!("`{name}`: all {all}"),
                _ => format!("`{name}` has {before} to {next} of {all}: call again with offset={next}"),
            });
        } else if first > 0 {
            self.note(format!("`{name}`: the first {first} of {}, which offset={} skips", items.len(), self.offset));
        }
        shown
    }

    /// The first items of a list, as many as fit.
    pub(crate) fn first<T, U>(&self, name: &str, items: &[T], show: impl FnMut(&T) -> U) -> Vec<U> {
        let shown: Vec<U> = items.iter().take(self.limit).map(show).collect();
        if shown.len() < items.len() {
            let (some, all) = (shown.len(), items.len());
            // A smaller shape than the requested one has no room for more.
            let how = if self.limit == self.requested && all <= MAX_LIMIT {
                format!(": call again with limit={all}")
            } else {
                String::new()
            };
            self.note(format!("`{name}` has {some} of {all}{how}"));
        }
        shown
    }

    /// A text, or its beginning.
    pub(crate) fn text(&self, text: &str) -> String {
        match text.char_indices().nth(self.text_length) {
            Some((end, _)) => {
                self.note("texts that end in `...`".to_owned());
                format!("{}...", &text[..end])
            }
            None => text.to_owned(),
        }
    }

    /// The end of a path, which says more than its beginning.
    pub(crate) fn path(&self, text: &str) -> String {
        let length = text.chars().count();
        if length <= self.text_length {
            return text.to_owned();
        }
        self.note("paths that begin with `...`".to_owned());
        format!("...{}", text.chars().skip(length - self.text_length).collect::<String>())
    }

    /// The end of a text of `total` bytes: of a program's output, what it wrote last.
    pub(crate) fn tail(&self, name: &str, text: &str, total: u64) -> String {
        let is_complete = text.len() as u64 >= total;
        // A progress bar goes back to the beginning of its line.
        let text = text.replace("\r\n", "\n").replace('\r', "\n").replace('\t', "    ");
        let skipped = text.chars().count().saturating_sub(self.text_length * TAIL);
        let shown: String = text.chars().skip(skipped).collect();
        if skipped > 0 || !is_complete {
            self.note(format!("`{name}` has the last {} of {total} bytes", shown.len()));
        }
        shown
    }

    /// Reports that something was left out. Each line appears once.
    pub(crate) fn note(&self, text: String) {
        let mut left_out = self.left_out.borrow_mut();
        if !left_out.contains(&text) {
            left_out.push(text);
        }
    }

    /// The lists that were cut.
    fn left_out(&self) -> Vec<String> {
        let mut left_out = self.left_out.borrow().clone();
        // One line for each list of each process would be as long as the lists.
        let more = left_out.len().saturating_sub(DEFAULT_LIMIT);
        if more > 0 {
            left_out.truncate(DEFAULT_LIMIT);
            left_out.push(format!("{more} further lists"));
        }
        left_out
    }
}

/// An answer with what it leaves out.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Answer<T> {
    #[serde(flatten)]
    content: T,
    /// The omitted parts, and how to get them. Absent if the answer is complete.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<String>,
    /// The command that prints everything. Absent if the answer is complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    everything: Option<String>,
}

/// Builds an answer that is as complete as its size allows. `everything` is the command that prints all of it.
///
/// # Errors
///
/// If it is too large in the smallest shape.
pub(crate) fn fit<T: Serialize>(
    (limit, offset): (Option<usize>, Option<usize>),
    everything: &str,
    build: impl Fn(&Shape) -> T,
) -> Result<CallToolResult, ToolError> {
    let first = limit.unwrap_or(DEFAULT_LIMIT).clamp(1, MAX_LIMIT);
    // Fewer items first: half a text says less than half a list.
    let limits = std::iter::successors(Some(first), |limit| (*limit > 1).then_some(limit / 2));
    let last = TEXT_LENGTHS.into_iter().skip(1).flat_map(|length| [(3, length), (1, length)]);
    for (limit, text_length) in limits.map(|limit| (limit, TEXT_LENGTHS[0])).chain(last) {
        let (offset, left_out) = (offset.unwrap_or(0), RefCell::default());
        let shape = Shape { requested: first, limit, offset, text_length, left_out };
        let content = build(&shape);
        let left_out = shape.left_out();
        let everything = (!left_out.is_empty()).then(|| everything.to_owned());
        let answer = Answer { content, left_out, everything };
        let fail = |e| ToolError::new(format!("cannot write the answer: {e}"), "report this");
        // Older clients read only the text. In the text the fields are in their order; `Value` sorts them by name.
        let text = serde_json::to_string(&answer).and_then(|text| with_printable_texts(&text)).map_err(fail)?;
        if text.len() <= MAX_ANSWER {
            let structured = serde_json::from_str(&text).map_err(fail)?;
            let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
            result.structured_content = Some(structured);
            return Ok(result);
        }
    }
    Err(ToolError::new("the answer is too large", format!("select a rank or a device, or run: {everything}")))
}

/// The same JSON with printable texts. Names and output come from the recorded program, and a client shows what they
/// are without JSON's escapes.
fn with_printable_texts(json: &str) -> serde_json::Result<String> {
    let (mut out, mut rest) = (String::with_capacity(json.len()), json);
    while let Some(start) = rest.find('"') {
        let mut is_escaped = false;
        let length = rest[start + 1..].find(|c| {
            let is_end = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            is_end
        });
        let end = length.map_or(rest.len(), |length| start + 1 + length + 1);
        let text: String = serde_json::from_str(&rest[start..end])?;
        out.push_str(&rest[..start]);
        out.push_str(&serde_json::to_string(&printable::output_text(&text))?);
        rest = &rest[end..];
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, JsonSchema)]
    struct Names {
        names: Vec<String>,
    }

    fn names(count: usize, length: usize, selection: (Option<usize>, Option<usize>)) -> serde_json::Value {
        let all: Vec<String> = (0..count).map(|i| format!("{i}{}", "x".repeat(length))).collect();
        let build = |shape: &Shape| Names { names: shape.page("names", &all, |name| shape.text(name)) };
        let result = fit(selection, "memtrace report r --json", build).unwrap();
        assert!(result.content[0].as_text().unwrap().text.len() <= MAX_ANSWER);
        result.structured_content.unwrap()
    }

    #[test]
    fn complete_answers_leave_nothing_out() {
        assert_eq!(names(3, 1, (None, None)), serde_json::json!({"names": ["0x", "1x", "2x"]}));
    }

    #[test]
    fn what_is_left_out_can_be_fetched() {
        let answer = names(25, 1, (None, None));
        assert_eq!(answer["names"].as_array().unwrap().len(), 10);
        assert_eq!(answer["left_out"], serde_json::json!(["`names` has 1 to 10 of 25: call again with offset=10"]));
        assert_eq!(answer["everything"], "memtrace report r --json");
        let last = names(25, 1, (Some(10), Some(20)));
        assert_eq!(last["names"][0], "20x");
        assert_eq!(last["left_out"], serde_json::json!(["`names`: the first 20 of 25, which offset=20 skips"]));
        assert_eq!(names(25, 1, (None, Some(usize::MAX)))["names"], serde_json::json!([]));
    }

    #[test]
    fn answers_are_bounded() {
        for (count, length, limit) in [(100_000, 3, Some(usize::MAX)), (1000, 100_000, None), (1, 1 << 20, Some(0))] {
            let answer = names(count, length, (limit, None));
            assert!(!answer["names"].as_array().unwrap().is_empty());
        }
    }

    #[test]
    fn texts_are_printable() {
        let hostile = "a\x1b[2J\u{9b}\u{202e}\\\" \u{7f}\n::error::b ##[c]\n\"";
        let shown = "a\u{fffd}[2J\u{fffd}\u{fffd}\\\" \u{fffd}\n\u{fffd}::error::b ##\u{fffd}[c]\n\"";
        let result = fit((None, None), hostile, |_| Names { names: vec![hostile.to_owned(), String::new()] }).unwrap();
        let expected = serde_json::json!({"names": [shown, ""]});
        assert_eq!(result.structured_content.unwrap(), expected);
        let text = &result.content[0].as_text().unwrap().text;
        assert_eq!(serde_json::from_str::<serde_json::Value>(text).unwrap(), expected);
        assert!(!text.contains(printable::is_unprintable), "{text:?}");
    }

    #[test]
    fn texts_are_cut_between_characters() {
        let shape = Shape { requested: 1, limit: 1, offset: 0, text_length: 3, left_out: RefCell::default() };
        assert_eq!((shape.text("äöü"), shape.text("äöüß")), ("äöü".to_owned(), "äöü...".to_owned()));
        assert_eq!((shape.path("äöü"), shape.path("äöüß")), ("äöü".to_owned(), "...öüß".to_owned()));
    }
}
