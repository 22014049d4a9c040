//! Places in source code, as `FILE:LINE FUNCTION`.

use memtrace_analysis::report::{FrameSummary, StackSummary};
use schemars::JsonSchema;
use serde::Serialize;

use crate::mcp::answer::Shape;

/// A place in source code.
#[derive(Serialize, JsonSchema, Debug, PartialEq)]
#[schemars(rename = "Place")]
pub(super) struct SourceLocation {
    /// `FILE:LINE FUNCTION` of the program's own code. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    /// `FILE:LINE FUNCTION` of the innermost frame, if that is in a library.
    #[serde(skip_serializing_if = "Option::is_none")]
    calls: Option<String>,
    /// The autograd node that was running, in the backward pass. The place is that of the forward call.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// The call stack, innermost first. Only with the argument `frames`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stack: Vec<String>,
}

impl SourceLocation {
    /// The place of a stack, with this number of its frames.
    pub(super) fn of(stack: &StackSummary, frames: usize, shape: &Shape) -> SourceLocation {
        let own = own_frame(stack);
        let at = own.map(|frame| frame_text(frame, shape));
        let innermost = stack.frames.first().filter(|frame| own.is_some_and(|own| !std::ptr::eq(*frame, own)));
        let mut shown: Vec<String> = stack.frames.iter().take(frames).map(|frame| frame_text(frame, shape)).collect();
        if frames > 0 && shown.len() < stack.frames.len() {
            shown.push(format!("... {} more", stack.frames.len() - shown.len()));
        }
        SourceLocation {
            at,
            calls: innermost.map(|frame| frame_text(frame, shape)),
            node: stack.node.as_deref().map(|node| shape.text(node)),
            stack: shown,
        }
    }
}

/// A frame as `FILE:LINE FUNCTION`. The line is left out if it is unknown.
pub(super) fn frame_text(frame: &FrameSummary, shape: &Shape) -> String {
    let (file, name) = (shape.path(&frame.filename), shape.text(&frame.name));
    if frame.line == 0 { format!("{file} {name}") } else { format!("{file}:{} {name}", frame.line) }
}

/// The frame of the program's own code. The location names it first, by the end of its path:
/// `models/gpt.py:88 forward`.
fn own_frame(stack: &StackSummary) -> Option<&FrameSummary> {
    let location = match &stack.node {
        Some(node) => stack.location.strip_prefix(node.as_str()).unwrap_or(&stack.location).trim_start_matches(" of "),
        None => &stack.location,
    };
    let is_named = |frame: &&FrameSummary| {
        let place = format!("{}:{} {}", frame.filename, frame.line, frame.name);
        // The whole location, or its part before the innermost line.
        location
            .match_indices(", ")
            .map(|(end, _)| &location[..end])
            .chain([location])
            .any(|part| !part.is_empty() && place.ends_with(part))
    };
    stack.frames.iter().find(is_named).or_else(|| stack.frames.first())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(filename: &str, line: u32, name: &str) -> FrameSummary {
        FrameSummary { filename: filename.into(), line, name: name.into(), ..FrameSummary::default() }
    }

    fn own(location: &str, node: Option<&str>) -> u32 {
        let frames = vec![
            frame("/lib/torch/nn/modules/linear.py", 134, "forward"),
            frame("/home/a, b/models/gpt.py", 88, "forward"),
            frame("/home/a, b/train.py", 5, "<module>"),
        ];
        own_frame(&StackSummary { location: location.into(), node: node.map(str::to_owned), frames }).unwrap().line
    }

    #[test]
    fn the_programs_own_line_is_cited() {
        assert_eq!(own("models/gpt.py:88 forward, modules/linear.py:134 forward", None), 88);
        assert_eq!(own("AddmmBackward0 of models/gpt.py:88 forward", Some("AddmmBackward0")), 88);
        assert_eq!(own("a, b/train.py:5 <module>, modules/linear.py:134 forward", None), 5);
        assert_eq!(own("modules/linear.py:134 forward", None), 134);
        assert_eq!(own("", None), 134, "the innermost frame, if the location is unknown");
        assert!(own_frame(&StackSummary::default()).is_none());
    }
}
