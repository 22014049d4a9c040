//! Parses `*-buffer-assignment.txt`: the allocations of a compiled program, and the buffers that XLA placed in them.
//!
//! ```text
//! BufferAssignment:
//! allocation 3: size 65536, page 0, parameter 1, shape |f32[128,128]| at ShapeIndex {}:
//!  value: <12 x.1 @0> (size=65536,offset=0): f32[128,128]{1,0}
//! ```

use std::collections::HashMap;
use std::io;

use memtrace_trace::file::Budget;
use memtrace_trace::named;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::instruction::instruction_name;
use super::lines::Lines;

named! {
    /// The purpose of an allocation of a compiled program.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum BufferKind {
        /// An argument: the caller allocated it.
        Argument => "argument",
        /// An argument whose memory becomes an output (a donated argument).
        DonatedArgument => "donated argument",
        /// An output: it stays after the program.
        Output => "output",
        /// Temporary memory, which is needed only while the program runs.
        Temporary => "temporary",
        /// A constant, which stays as long as the compiled program.
        Constant => "constant",
        /// Small values inside a called computation. They take no device memory on a GPU.
        ThreadLocal => "thread-local",
        /// None of these.
        Other => "other",
    }
}

/// An allocation of a compiled program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocation {
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The use of the buffer.
    pub kind: BufferKind,
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct Assignment {
    pub(super) allocations: Vec<Allocation>,
    /// The kind of the allocation of each instruction's buffer. Empty unless requested.
    pub(super) kinds: HashMap<Box<str>, BufferKind>,
    /// The total that the file itself states, in bytes. Older versions of XLA write it here.
    pub(super) stated_bytes: Option<u64>,
    /// The number of lines that were not understood.
    pub(super) unknown_lines: u64,
}

/// The memory of a vector's entry for an allocation, in bytes. A growing vector has up to twice its length.
const ALLOCATION_BYTES: u64 = 2 * size_of::<Allocation>() as u64;
/// The memory of a map's entry besides the text, in bytes.
pub(super) const MAP_ENTRY_BYTES: u64 = 96;

/// Parses a file. `with_buffers` adds the kinds of the instructions.
///
/// # Errors
///
/// If the file cannot be read, is no buffer assignment, or exceeds the budget.
pub(super) fn parse(mut lines: Lines<'_>, with_buffers: bool, budget: &Budget) -> io::Result<Assignment> {
    let mut assignment = Assignment::default();
    let mut is_assignment = false;
    while let Some(line) = lines.next()? {
        if let Some(rest) = line.strip_prefix("allocation ") {
            let Some(allocation) = parse_allocation(rest) else {
                assignment.unknown_lines += 1;
                continue;
            };
            budget.hold(ALLOCATION_BYTES).map_err(io::Error::other)?;
            assignment.allocations.push(allocation);
        } else if let Some(rest) = line.strip_prefix(" value: <") {
            let (Some(name), Some(last)) = (parse_value(rest), assignment.allocations.last()) else {
                assignment.unknown_lines += 1;
                continue;
            };
            if with_buffers {
                budget.hold(name.len() as u64 + MAP_ENTRY_BYTES).map_err(io::Error::other)?;
                // A tuple's buffers lie in several allocations. The first one stands for them.
                assignment.kinds.entry(name.into()).or_insert(last.kind);
            }
        } else if line.starts_with("BufferAssignment") {
            is_assignment = true;
        } else if let Some(total) = line.strip_prefix("Total bytes used: ") {
            assignment.stated_bytes = leading_number(total);
        } else if !line.trim().is_empty() {
            assignment.unknown_lines += 1;
        }
    }
    assignment.unknown_lines += lines.cut;
    if is_assignment {
        return Ok(assignment);
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "it is no buffer assignment of XLA"))
}

/// Parses `3: size 65536, page 0, parameter 1, shape |f32[128]| at ShapeIndex {}:`.
fn parse_allocation(rest: &str) -> Option<Allocation> {
    let (index, rest) = rest.split_once(": size ")?;
    index.parse::<u64>().ok()?;
    let size_bytes = leading_number(rest)?;
    let attributes = rest.split_once(", ").map_or("", |(_, attributes)| attributes).trim_end_matches(':');
    // A shape stands between bars, and has commas of its own.
    let plain: String = attributes.split('|').step_by(2).collect();
    let (mut is_argument, mut is_output, mut other) = (false, false, None);
    for attribute in plain.split(", ").map(str::trim) {
        match attribute {
            "maybe-live-out" => is_output = true,
            "constant" => other = Some(BufferKind::Constant),
            "thread-local" => other = Some(BufferKind::ThreadLocal),
            "preallocated-temp" => other = Some(BufferKind::Temporary),
            _ if attribute.starts_with("parameter ") => is_argument = true,
            _ => {}
        }
    }
    let kind = match (is_argument, is_output, other) {
        (true, true, _) => BufferKind::DonatedArgument,
        (true, false, _) => BufferKind::Argument,
        (false, _, Some(BufferKind::Constant)) => BufferKind::Constant,
        (false, true, _) => BufferKind::Output,
        (false, false, other) => other.unwrap_or(BufferKind::Other),
    };
    Some(Allocation { size_bytes, kind })
}

/// Parses `12 x.1 @0> (size=65536,offset=0): f32[128,128]{1,0}` and returns the instruction's name.
fn parse_value(rest: &str) -> Option<&str> {
    let (value, rest) = rest.split_once("> (size=")?;
    leading_number(rest)?;
    let (number, name) = value.split_once(' ')?;
    number.parse::<u64>().ok()?;
    let name = instruction_name(name.split(" @").next()?);
    (!name.is_empty()).then_some(name)
}

/// The number at the beginning of a text.
pub(super) fn leading_number(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.get(..end)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(attributes: &str) -> BufferKind {
        parse_allocation(&format!("7: size 4096{attributes}:")).unwrap().kind
    }

    #[test]
    fn allocations_have_size_and_kind() {
        let shape = "shape |(f32[4,8]{1,0}, constant, f32[])| at ShapeIndex {}";
        assert_eq!(kind(&format!(", page 0, parameter 3, {shape}")), BufferKind::Argument);
        assert_eq!(kind(&format!(", color 1, parameter 0, {shape}, maybe-live-out")), BufferKind::DonatedArgument);
        assert_eq!(kind(", page 0, output shape is |(f32[2], f32[])|, maybe-live-out"), BufferKind::Output);
        assert_eq!(kind(", page 0, constant"), BufferKind::Constant);
        assert_eq!(kind(", thread-local"), BufferKind::ThreadLocal);
        assert_eq!(kind(", preallocated-temp"), BufferKind::Temporary);
        assert_eq!(kind(""), BufferKind::Other);
        for damaged in ["x: size 4", "1: size", "1: size -4", "1 size 4", "1: size 99999999999999999999999"] {
            assert_eq!(parse_allocation(damaged), None, "{damaged}");
        }
    }

    #[test]
    fn values_name_their_instruction() {
        assert_eq!(parse_value("12 x.1 @0> (size=64,offset=0): f32[16]"), Some("x.1"));
        assert_eq!(parse_value("12 fusion.3{0} @0> (size=64,offset=128): f32[16]"), Some("fusion.3"));
        for damaged in ["12 x.1 @0", "12x @0> (size=1", "12  @0> (size=1,", "a x @0> (size=1,"] {
            assert_eq!(parse_value(damaged), None, "{damaged}");
        }
    }
}
