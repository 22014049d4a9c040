//! Finds the operations and the source lines of instructions in the text of a compiled program.
//!
//! ```text
//! HloModule jit_train_step, is_scheduled=true, ...
//! FileNames
//! 1 "/home/me/train.py"
//! ...
//!   %dot.3 = f32[8,2048]{1,0} dot(...), metadata={op_name="jit(train_step)/dot_general" stack_frame_id=12}
//! ```
//!
//! Older versions of XLA write `source_file="train.py" source_line=31` instead of the four tables of stack frames.

use std::collections::{HashMap, HashSet};
use std::io;

use memtrace_trace::file::Budget;

use super::assignment::{MAP_ENTRY_BYTES, leading_number};
use super::instruction::instruction_name;
use super::lines::Lines;

/// A Python frame that was running when JAX traced an instruction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SourceFrame {
    /// The path of the source file.
    pub filename: Box<str>,
    /// The function. Empty if it is unknown.
    pub function: Box<str>,
    /// The line number.
    pub line: u32,
}

/// The metadata of an instruction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Metadata {
    /// The operation, for example `jit(train_step)/dot_general`. For an argument, its name.
    pub(super) operation: Box<str>,
    /// The innermost frame, as a number in the tables.
    frame: Option<u32>,
    /// The source line in the metadata itself.
    source: Option<SourceFrame>,
}

/// The names in a program that were asked for.
#[derive(Debug, Default)]
pub(super) struct Program {
    /// The name of the module. Empty if the first line has none.
    pub(super) name: String,
    pub(super) metadata: HashMap<Box<str>, Metadata>,
    tables: Tables,
}

/// The tables of stack frames. Numbers begin with 1.
#[derive(Debug, Default)]
struct Tables {
    files: HashMap<u32, Box<str>>,
    functions: HashMap<u32, Box<str>>,
    /// File, function and line.
    locations: HashMap<u32, (u32, u32, u32)>,
    /// Location and parent.
    frames: HashMap<u32, (u32, u32)>,
}

/// The maximum number of frames of one instruction.
const MAX_FRAMES: usize = 64;
/// The longest text that is kept of an operation, in bytes.
const LONGEST_OPERATION: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    None,
    Files,
    Functions,
    Locations,
    Frames,
}

/// Reads the metadata of the instructions `requested`.
///
/// # Errors
///
/// If the file cannot be read or exceeds the budget.
pub(super) fn parse(mut lines: Lines<'_>, requested: &HashSet<&str>, budget: &Budget) -> io::Result<Program> {
    let mut program = Program::default();
    let mut table = Table::None;
    while let Some(line) = lines.next()? {
        let text = line.trim();
        match text {
            "FileNames" => table = Table::Files,
            "FunctionNames" => table = Table::Functions,
            "FileLocations" => table = Table::Locations,
            "StackFrames" => table = Table::Frames,
            "" => table = Table::None,
            _ if table != Table::None => program.tables.add(table, text, budget)?,
            _ => program.add_line(text, requested, budget)?,
        }
    }
    Ok(program)
}

impl Program {
    fn add_line(&mut self, line: &str, requested: &HashSet<&str>, budget: &Budget) -> io::Result<()> {
        if let Some(rest) = line.strip_prefix("HloModule ") {
            self.name = rest.split([',', ' ']).next().unwrap_or_default().to_owned();
            return Ok(());
        }
        let Some((name, rest)) = line.strip_prefix("ROOT ").unwrap_or(line).split_once(" = ") else { return Ok(()) };
        let name = instruction_name(name);
        if !requested.contains(name) {
            return Ok(());
        }
        let metadata = rest.split_once(", metadata={").map(|(_, metadata)| parse_metadata(metadata));
        let metadata = metadata.unwrap_or_default();
        let text = metadata.source.as_ref().map_or(0, |source| source.filename.len()) + metadata.operation.len();
        budget.hold((name.len() + text) as u64 + 2 * MAP_ENTRY_BYTES).map_err(io::Error::other)?;
        self.metadata.insert(name.into(), metadata);
        Ok(())
    }

    /// The frames of an instruction, innermost first.
    pub(super) fn frames(&self, metadata: &Metadata) -> Vec<SourceFrame> {
        let mut frames = Vec::new();
        let mut next = metadata.frame;
        while let Some(id) = next.filter(|_| frames.len() < MAX_FRAMES) {
            let Some(&(location, parent)) = self.tables.frames.get(&id) else { break };
            if let Some(frame) = self.tables.source(location) {
                frames.push(frame);
            }
            next = self.tables.parent(id, parent);
        }
        if frames.is_empty() {
            frames.extend(metadata.source.clone());
        }
        frames
    }
}

impl Tables {
    fn add(&mut self, table: Table, line: &str, budget: &Budget) -> io::Result<()> {
        let Some((number, rest)) = line.split_once(' ') else { return Ok(()) };
        let Ok(number) = number.parse::<u32>() else { return Ok(()) };
        budget.hold(rest.len() as u64 + MAP_ENTRY_BYTES).map_err(io::Error::other)?;
        let field = |name| number_field(rest, name).unwrap_or(0);
        match table {
            Table::Files | Table::Functions => {
                let text = quoted(rest).unwrap_or_default().into();
                let texts = if table == Table::Files { &mut self.files } else { &mut self.functions };
                texts.insert(number, text);
            }
            Table::Locations => {
                let location = (field("file_name_id="), field("function_name_id="), field("line="));
                self.locations.insert(number, location);
            }
            Table::Frames => {
                self.frames.insert(number, (field("file_location_id="), field("parent_frame_id=")));
            }
            Table::None => {}
        }
        Ok(())
    }

    fn source(&self, location: u32) -> Option<SourceFrame> {
        let (file, function, line) = self.locations.get(&location)?;
        let function = self.functions.get(function).cloned().unwrap_or_default();
        Some(SourceFrame { filename: self.files.get(file)?.clone(), function, line: *line })
    }

    /// The caller of a frame. Some versions of XLA write the parent's number plus one, so that 1 means none. A program
    /// whose first frame has itself as parent comes from such a version.
    fn parent(&self, id: u32, parent: u32) -> Option<u32> {
        let is_plus_one = self.frames.get(&1).is_some_and(|(_, parent)| *parent == 1);
        let parent = if is_plus_one { parent.checked_sub(1)? } else { parent };
        // Parents come first, so a damaged table gives no circle.
        (parent > 0 && parent < id).then_some(parent)
    }
}

/// Parses `op_name="jit(f)/add" source_file="a.py" source_line=3 stack_frame_id=4}, ...`.
fn parse_metadata(text: &str) -> Metadata {
    let operation = text.split_once("op_name=").and_then(|(_, rest)| quoted(rest)).unwrap_or_default();
    let end = text.find("\"}").or_else(|| text.find('}')).unwrap_or(text.len());
    let source = text.split_once("source_file=").and_then(|(_, rest)| quoted(rest)).map(|filename| SourceFrame {
        filename: filename.into(),
        function: "".into(),
        line: number_field(text, "source_line=").unwrap_or(0),
    });
    // The operation's name can contain braces, so the number is searched in the whole line if it is not before the
    // first.
    let frame = number_field(text.get(..end).unwrap_or(text), "stack_frame_id=");
    Metadata { operation: operation.into(), frame: frame.or_else(|| number_field(text, "stack_frame_id=")), source }
}

fn number_field(text: &str, name: &str) -> Option<u32> {
    // `line=` must not match in `end_line=`.
    let mut rest = text;
    loop {
        let at = rest.find(name)?;
        let is_whole = rest.get(..at).is_some_and(|before| before.ends_with([' ', '{', ',']) || before.is_empty());
        rest = rest.get(at + name.len()..)?;
        if is_whole {
            return u32::try_from(leading_number(rest)?).ok();
        }
    }
}

/// The text in quotes at the beginning, without its escapes, cut at [`LONGEST_OPERATION`].
fn quoted(text: &str) -> Option<String> {
    let mut characters = text.strip_prefix('"')?.chars();
    let mut out = String::new();
    loop {
        let c = match characters.next()? {
            '"' => return Some(out),
            '\\' => characters.next()?,
            c => c,
        };
        if out.len() < LONGEST_OPERATION {
            out.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_has_operation_and_source() {
        let metadata = parse_metadata(r#"op_name="p[\'a\']" stack_frame_id=7}, backend_config={"x":1}"#);
        assert_eq!((&*metadata.operation, metadata.frame), ("p['a']", Some(7)));
        let old = parse_metadata(r#"op_type="add" op_name="jit(f)/add" source_file="/a b.py" source_line=31}"#);
        let source = SourceFrame { filename: "/a b.py".into(), function: "".into(), line: 31 };
        assert_eq!((&*old.operation, old.source), ("jit(f)/add", Some(source)));
        assert_eq!(parse_metadata("op_name=\"open"), Metadata::default());
    }

    #[test]
    fn a_field_is_a_whole_word() {
        assert_eq!(number_field("{a=1 end_line=9 line=3}", "line="), Some(3));
        assert_eq!(number_field("{end_line=9}", "line="), None);
    }

    fn tables(frames: &[(u32, u32)]) -> Program {
        let mut program = Program::default();
        for (at, (location, parent)) in frames.iter().enumerate() {
            let id = at as u32 + 1;
            program.tables.frames.insert(id, (*location, *parent));
            program.tables.locations.insert(id, (1, 1, id * 10));
        }
        program.tables.files.insert(1, "a.py".into());
        program
    }

    #[test]
    fn parents_are_numbers_or_numbers_plus_one() {
        let lines = |program: &Program, frame| {
            let metadata = Metadata { frame: Some(frame), ..Metadata::default() };
            program.frames(&metadata).iter().map(|frame| frame.line).collect::<Vec<_>>()
        };
        assert_eq!(lines(&tables(&[(1, 1), (2, 2), (3, 3), (2, 2)]), 3), [30, 20, 10]);
        assert_eq!(lines(&tables(&[(1, 0), (2, 1), (3, 1)]), 3), [30, 10]);
        // Circles and unknown numbers end.
        assert_eq!(lines(&tables(&[(1, 0), (2, 3), (3, 3)]), 3), [30]);
        assert_eq!(lines(&tables(&[(9, 0)]), 1), [0u32; 0]);
    }
}
