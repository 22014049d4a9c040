//! Parses `*-live-range.txt`: the buffers that are live when the most bytes are in use.
//!
//! ```text
//!   Live ranges at 255 (peak):
//!     multiply_add_fusion.12{}: 67108864 bytes (cumulative: 67108864 bytes)
//! ```

use std::io;

use memtrace_trace::file::Budget;

use super::assignment::leading_number;
use super::instruction::instruction_name;
use super::lines::Lines;

/// A buffer that is live at the peak of a compiled program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LiveBuffer {
    /// The instruction that produces it.
    pub instruction: Box<str>,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct Peak {
    pub(super) buffers: Vec<LiveBuffer>,
    /// Whether each buffer's running total is that of the buffers before it. XLA writes it beside each.
    pub(super) is_sum_right: bool,
    pub(super) unknown_lines: u64,
}

/// Parses a file. `None` if it has no list of the buffers at the peak.
///
/// # Errors
///
/// If the file cannot be read or exceeds the budget.
pub(super) fn parse(mut lines: Lines<'_>, budget: &Budget) -> io::Result<Option<Peak>> {
    let mut peak: Option<Peak> = None;
    let mut sum = 0u64;
    while let Some(line) = lines.next()? {
        let line = line.trim();
        let Some(peak) = &mut peak else {
            if line.starts_with("Live ranges at ") && line.ends_with("(peak):") {
                peak = Some(Peak { is_sum_right: true, ..Peak::default() });
            }
            continue;
        };
        if line.is_empty() || line.ends_with(':') || line.starts_with("Stack trace breakdown") {
            break;
        }
        let Some((name, size_bytes, total)) = parse_buffer(line) else {
            peak.unknown_lines += 1;
            continue;
        };
        sum = sum.saturating_add(size_bytes);
        peak.is_sum_right &= total == Some(sum);
        budget.hold(name.len() as u64 + 2 * size_of::<LiveBuffer>() as u64).map_err(io::Error::other)?;
        peak.buffers.push(LiveBuffer { instruction: name.into(), size_bytes });
    }
    Ok(peak)
}

/// Parses `fusion.12{}: 67108864 bytes (cumulative: 67108864 bytes)`: the instruction, the size and the running total.
fn parse_buffer(line: &str) -> Option<(&str, u64, Option<u64>)> {
    let (name, rest) = line.split_once(": ")?;
    let (size, rest) = rest.split_once(" bytes")?;
    let name = instruction_name(name);
    let total = rest.trim_start().strip_prefix("(cumulative: ").and_then(leading_number);
    Some((name, size.parse().ok()?, total)).filter(|_| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_have_a_size_and_a_running_total() {
        let line = "fusion.12{1}: 64 bytes (cumulative: 100 bytes)";
        assert_eq!(parse_buffer(line), Some(("fusion.12", 64, Some(100))));
        assert_eq!(parse_buffer("x: 64 bytes"), Some(("x", 64, None)));
        for damaged in ["x", "x: y bytes", "{}: 4 bytes", "x: 4"] {
            assert_eq!(parse_buffer(damaged), None, "{damaged}");
        }
    }
}
