//! Summarizes XLA's dump: which programs need the most memory, and which source lines make their peaks.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

use memtrace_input::xla::{BufferKind, PeakBuffer, SourceFrame, XlaDump, XlaPeak, XlaProgram};

use crate::xla::{XlaKindBytes, XlaLineSummary, XlaPeakSummary, XlaProgramSummary, XlaSummary};
use memtrace_insight::locations::short_path;
use memtrace_insight::rules::is_library;

/// The maximum number of programs listed.
const PROGRAMS: usize = 20;
/// The maximum number of lines listed of a program's peak.
const LINES: usize = 20;

/// Summarizes a dump. `directory` is the program's working directory, for short paths.
pub(crate) fn xla_summary(dump: &XlaDump, directory: Option<&Path>) -> XlaSummary {
    let is_mismatched = |program: &&XlaProgram| is_total_confirmed(program) == Some(false);
    XlaSummary {
        program_count: dump.programs.len() as u64,
        programs: dump.programs.iter().take(PROGRAMS).map(|program| program_summary(program, directory)).collect(),
        unread_programs: dump.left_out,
        mismatched_programs: dump.programs.iter().filter(is_mismatched).count() as u64,
        unknown_lines: dump.programs.iter().fold(0, |sum, program| sum + program.unknown_lines),
    }
}

fn is_total_confirmed(program: &XlaProgram) -> Option<bool> {
    program.stated_bytes.map(|stated| stated == program.total_bytes())
}

fn program_summary(program: &XlaProgram, directory: Option<&Path>) -> XlaProgramSummary {
    let by_kind = BufferKind::ALL.iter().map(|kind| XlaKindBytes { kind: *kind, bytes: program.bytes_of(*kind) });
    XlaProgramSummary {
        module: program.module.0,
        name: program.name.clone(),
        is_for_gpu: program.is_for_gpu,
        total_bytes: program.total_bytes(),
        by_kind: by_kind.filter(|one| one.bytes > 0).collect(),
        is_total_confirmed: is_total_confirmed(program),
        peak: program.peak.as_ref().map(|peak| peak_summary(peak, directory)),
    }
}

fn peak_summary(peak: &XlaPeak, directory: Option<&Path>) -> XlaPeakSummary {
    /// The buffers of one line.
    #[derive(Default)]
    struct Line<'a> {
        bytes: u64,
        buffers: u64,
        largest: u64,
        operation: &'a str,
    }
    let mut lines: BTreeMap<(Option<BufferKind>, String, String), Line<'_>> = BTreeMap::new();
    for buffer in &peak.buffers {
        let name = if is_argument(buffer) { argument_name(&buffer.operation) } else { String::new() };
        let location = own_frame(&buffer.frames).map(|frame| location(frame, directory)).unwrap_or_default();
        // The operation distinguishes what has no line.
        let name = if name.is_empty() && location.is_empty() { buffer.operation.clone() } else { name };
        let line = lines.entry((buffer.kind, location, name)).or_default();
        line.bytes = line.bytes.saturating_add(buffer.live.size_bytes);
        line.buffers += 1;
        if buffer.live.size_bytes > line.largest {
            (line.largest, line.operation) = (buffer.live.size_bytes, &buffer.operation);
        }
    }
    let summary = |((kind, location, name), line): ((Option<BufferKind>, String, String), Line<'_>)| XlaLineSummary {
        kind,
        location,
        operation: if name.is_empty() { line.operation.to_owned() } else { name },
        bytes: line.bytes,
        buffers: line.buffers,
    };
    let mut lines: Vec<XlaLineSummary> = lines.into_iter().map(summary).collect();
    lines.sort_by_key(|line| Reverse(line.bytes));
    let live_bytes = lines.iter().fold(0u64, |sum, line| sum.saturating_add(line.bytes));
    let left_out = lines.split_off(lines.len().min(LINES));
    XlaPeakSummary {
        live_bytes,
        buffers: peak.buffers.len() as u64,
        is_sum_confirmed: peak.is_sum_right,
        lines,
        left_out_bytes: left_out.iter().fold(0, |sum, line| sum.saturating_add(line.bytes)),
    }
}

fn is_argument(buffer: &PeakBuffer) -> bool {
    matches!(buffer.kind, Some(BufferKind::Argument | BufferKind::DonatedArgument))
        && buffer.frames.is_empty()
        && !buffer.operation.is_empty()
}

/// The innermost frame of the user's own code, else the innermost one.
fn own_frame(frames: &[SourceFrame]) -> Option<&SourceFrame> {
    frames.iter().find(|frame| !is_library(&frame.filename)).or_else(|| frames.first())
}

fn location(frame: &SourceFrame, directory: Option<&Path>) -> String {
    let prefix = directory.map(|directory| format!("{}/", directory.display()));
    let file = short_path(prefix.as_deref(), &frame.filename);
    let named = !frame.function.is_empty() && &*frame.function != "<module>";
    let function = if named { format!(" {}", frame.function) } else { String::new() };
    format!("{file}:{}{function}", frame.line)
}

/// The common name of arguments: `params[3]` gives `params[*]`, `p['Dense_0']['kernel']` gives `p`.
fn argument_name(operation: &str) -> String {
    let root = operation.split("['").next().unwrap_or(operation);
    let mut name = String::new();
    let mut rest = root;
    while let Some((before, after)) = rest.split_once('[') {
        name.push_str(before);
        let Some((index, after)) = after.split_once(']') else { break };
        let is_number = !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit());
        name.push_str(&if is_number { "[*]".to_owned() } else { format!("[{index}]") });
        rest = after;
    }
    name + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::xla::LiveBuffer;

    #[test]
    fn arguments_have_a_common_name() {
        assert_eq!(argument_name("params[3]"), "params[*]");
        assert_eq!(argument_name("p['params']['Dense_0']['kernel']"), "p");
        assert_eq!(argument_name("s[0].mu['params']['x']"), "s[*].mu");
        assert_eq!(argument_name("x"), "x");
    }

    fn buffer(kind: BufferKind, size_bytes: u64, operation: &str, lines: &[(&str, u32)]) -> PeakBuffer {
        let frame =
            |(file, line): &(&str, u32)| SourceFrame { filename: (*file).into(), function: "f".into(), line: *line };
        PeakBuffer {
            live: LiveBuffer { instruction: "i".into(), size_bytes },
            kind: Some(kind),
            operation: operation.into(),
            frames: lines.iter().map(frame).collect(),
        }
    }

    #[test]
    fn buffers_of_one_line_are_added_up_and_nothing_gets_lost() {
        let library = "/x/site-packages/flax/linear.py";
        let mut buffers = vec![
            buffer(BufferKind::Temporary, 10, "jit(f)/tanh", &[(library, 3), ("/w/train.py", 8)]),
            buffer(BufferKind::Temporary, 30, "jit(f)/dot", &[("/w/train.py", 8)]),
            buffer(BufferKind::Output, 5, "jit(f)/dot", &[("/w/train.py", 8)]),
            buffer(BufferKind::Argument, 20, "p['a']['b']", &[]),
            buffer(BufferKind::Argument, 15, "p['a']['c']", &[]),
        ];
        buffers.extend((0..LINES as u32).map(|at| buffer(BufferKind::Temporary, 1, "", &[("/w/other.py", at)])));
        let total: u64 = buffers.iter().map(|buffer| buffer.live.size_bytes).sum();
        let summary = peak_summary(&XlaPeak { buffers, is_sum_right: true }, Some(Path::new("/w")));
        let rows: Vec<_> =
            summary.lines.iter().map(|l| (l.location.as_str(), l.operation.as_str(), l.bytes, l.buffers)).collect();
        let expected = [("train.py:8 f", "jit(f)/dot", 40, 2), ("", "p", 35, 2), ("train.py:8 f", "jit(f)/dot", 5, 1)];
        assert_eq!(rows[..3], expected);
        assert_eq!(summary.live_bytes, total);
        let listed: u64 = summary.lines.iter().map(|line| line.bytes).sum();
        assert_eq!((listed + summary.left_out_bytes, summary.left_out_bytes), (total, 3));
    }
}
