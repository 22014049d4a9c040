//! Finds the files of each compiled program in the folder of a dump, and reads them.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::path::Path;

use memtrace_trace::file::Budget;

use super::assignment::{self, Allocation, Assignment, BufferKind};
use super::hlo::{self, SourceFrame};
use super::lines::Lines;
use super::live_range::{self, LiveBuffer};
use crate::folder::RunFolder;

/// The folder of XLA's dump in a run folder.
pub const XLA_FOLDER: &str = "xla";
/// The number of programs, the largest, whose buffers and source lines are read.
pub const DETAILED_PROGRAMS: usize = 20;
/// The maximum number of programs that are read.
const MAX_PROGRAMS: usize = 20_000;
/// The maximum number of problems whose text is kept.
const MAX_PROBLEMS: usize = 20;
const ASSIGNMENT: &str = "-buffer-assignment.txt";
/// Help for the user about a damaged file.
const HELP: &str = "record again with memtrace --xla-dump, or remove the file";

/// The number of a compiled program in its process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct XlaModuleId(pub u32);

/// The programs that XLA compiled, as it described them.
#[derive(Debug, Default)]
pub struct XlaDump {
    /// The compiled programs, by total size in descending order.
    pub programs: Vec<XlaProgram>,
    /// The number of programs that were not read because there are too many.
    pub left_out: u64,
    /// Files that could not be read, as text with the reason and what to do.
    pub problems: Vec<String>,
    /// The number of further such files.
    pub further_problems: u64,
}

/// A compiled program.
#[derive(Debug)]
pub struct XlaProgram {
    /// Its number.
    pub module: XlaModuleId,
    /// Its name, for example `jit_train_step`.
    pub name: String,
    /// Whether it runs on a GPU. Programs for the CPU take no device memory.
    pub is_for_gpu: bool,
    /// Its allocations.
    pub allocations: Vec<Allocation>,
    /// The total that XLA states, in bytes. `None` if it states none.
    pub stated_bytes: Option<u64>,
    /// The number of lines of its files that were not understood.
    pub unknown_lines: u64,
    /// The buffers at its peak. `None` for smaller programs, and if XLA did not write them.
    pub peak: Option<XlaPeak>,
}

/// The buffers that are live at the peak of a program.
#[derive(Debug)]
pub struct XlaPeak {
    /// The buffers.
    pub buffers: Vec<PeakBuffer>,
    /// Whether XLA's own running totals equal the sums of the buffers.
    pub is_sum_right: bool,
}

/// A buffer that is live at the peak of a program.
#[derive(Debug)]
pub struct PeakBuffer {
    /// The buffer.
    pub live: LiveBuffer,
    /// The kind of its allocation. `None` if the buffer assignment does not have it.
    pub kind: Option<BufferKind>,
    /// The operation that produces it, or the name of the argument. Empty if it is unknown.
    pub operation: String,
    /// The Python frames that were running when JAX traced the operation, innermost first. Empty for arguments.
    pub frames: Vec<SourceFrame>,
}

impl XlaProgram {
    /// The bytes of its allocations of one kind.
    pub fn bytes_of(&self, kind: BufferKind) -> u64 {
        let of_kind = self.allocations.iter().filter(|allocation| allocation.kind == kind);
        of_kind.fold(0, |sum, allocation| sum.saturating_add(allocation.size_bytes))
    }

    /// The bytes of all its allocations.
    pub fn total_bytes(&self) -> u64 {
        self.allocations.iter().fold(0, |sum, allocation| sum.saturating_add(allocation.size_bytes))
    }
}

/// Reads the dump in a run folder. `None` if the run has none.
pub fn read_xla_dump(run: &Path) -> Option<XlaDump> {
    let folder = RunFolder::open(run).ok()?.subfolder(XLA_FOLDER).ok()?;
    let mut dump = XlaDump::default();
    let names = match folder.file_names() {
        Ok(names) => names,
        Err(e) => {
            dump.problem(XLA_FOLDER, &e);
            return Some(dump);
        }
    };
    let mut keys: Vec<String> = names.iter().filter_map(assignment_key).collect();
    dump.left_out = keys.len().saturating_sub(MAX_PROGRAMS) as u64;
    keys.truncate(MAX_PROGRAMS);
    let budget = Budget::default();
    let reader = DumpReader { folder, budget };
    let mut programs = Vec::new();
    for key in keys {
        match reader.program(&key) {
            Ok(program) => programs.push((key, program)),
            Err(e) => dump.problem(&format!("{XLA_FOLDER}/{key}{ASSIGNMENT}"), &e),
        }
    }
    programs.sort_by_key(|(_, program)| (!program.is_for_gpu, Reverse(program.total_bytes()), program.module));
    for (key, program) in programs.iter_mut().take(DETAILED_PROGRAMS) {
        if let Err((file, e)) = reader.add_peak(key, program) {
            dump.problem(&format!("{XLA_FOLDER}/{file}"), &e);
        }
    }
    dump.programs = programs.into_iter().map(|(_, program)| program).collect();
    Some(dump)
}

impl XlaDump {
    fn problem(&mut self, file: &str, error: &io::Error) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(format!("cannot read {file}: {error}; {HELP}"));
        } else {
            self.further_problems += 1;
        }
    }
}

/// The name of a program's files without their endings, from that of its buffer assignment.
fn assignment_key(name: &OsString) -> Option<String> {
    let key = name.to_str()?.strip_suffix(ASSIGNMENT)?;
    module_id(key).is_some().then(|| key.to_owned())
}

/// The number in `module_0078.jit_train_step.cpu_after_optimizations`.
fn module_id(key: &str) -> Option<XlaModuleId> {
    let (number, _) = key.strip_prefix("module_")?.split_once('.')?;
    number.parse().ok().map(XlaModuleId)
}

/// The name in `module_0078.jit_train_step.sm_9.0_gpu_after_optimizations`, for a text without a header.
fn name_in(key: &str) -> &str {
    key.split_once('.').map_or(key, |(_, rest)| rest.split('.').next().unwrap_or(rest))
}

struct DumpReader {
    folder: RunFolder,
    budget: Budget,
}

impl DumpReader {
    fn lines(&self, file: &str) -> io::Result<Lines<'_>> {
        Lines::of(self.folder.open_file(file)?, &self.budget)
    }

    /// The allocations of a program.
    fn program(&self, key: &str) -> io::Result<XlaProgram> {
        let Assignment { allocations, stated_bytes, unknown_lines, .. } =
            assignment::parse(self.lines(&format!("{key}{ASSIGNMENT}"))?, false, &self.budget)?;
        let reported = self.lines(&format!("{key}-memory-usage-report.txt")).ok().map(stated_total).transpose()?;
        Ok(XlaProgram {
            module: module_id(key).unwrap_or(XlaModuleId(0)),
            name: name_in(key).to_owned(),
            is_for_gpu: !key.contains(".cpu_"),
            allocations,
            stated_bytes: reported.flatten().or(stated_bytes),
            unknown_lines,
            peak: None,
        })
    }

    /// Adds the buffers at the peak. The error has the file.
    fn add_peak(&self, key: &str, program: &mut XlaProgram) -> Result<(), (String, io::Error)> {
        let file = format!("{key}-live-range.txt");
        let peak = match self.lines(&file) {
            Ok(lines) => live_range::parse(lines, &self.budget).map_err(|e| (file, e))?,
            // Without these files only the totals are known.
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err((file, e)),
        };
        let Some(peak) = peak else { return Ok(()) };
        program.unknown_lines += peak.unknown_lines;
        let file = format!("{key}{ASSIGNMENT}");
        let kinds = self.lines(&file).and_then(|lines| assignment::parse(lines, true, &self.budget));
        let kinds: HashMap<Box<str>, BufferKind> = kinds.map_err(|e| (file, e))?.kinds;
        let requested: HashSet<&str> = peak.buffers.iter().map(|buffer| &*buffer.instruction).collect();
        let file = format!("{key}.txt");
        let text = match self.lines(&file) {
            Ok(lines) => hlo::parse(lines, &requested, &self.budget).map_err(|e| (file, e))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => hlo::Program::default(),
            Err(e) => return Err((file, e)),
        };
        if !text.name.is_empty() {
            program.name.clone_from(&text.name);
        }
        let buffer = |live: LiveBuffer| {
            let metadata = text.metadata.get(&live.instruction);
            PeakBuffer {
                kind: kinds.get(&live.instruction).copied(),
                operation: metadata.map(|metadata| metadata.operation.to_string()).unwrap_or_default(),
                frames: metadata.map(|metadata| text.frames(metadata)).unwrap_or_default(),
                live,
            }
        };
        let is_sum_right = peak.is_sum_right;
        program.peak = Some(XlaPeak { buffers: peak.buffers.into_iter().map(buffer).collect(), is_sum_right });
        Ok(())
    }
}

/// Parses `*-memory-usage-report.txt` for the total of all memory spaces.
fn stated_total(mut lines: Lines<'_>) -> io::Result<Option<u64>> {
    let mut total: Option<u64> = None;
    while let Some(line) = lines.next()? {
        if let Some(bytes) = line.strip_prefix("Total bytes: ").and_then(assignment::leading_number) {
            total = Some(total.unwrap_or(0).saturating_add(bytes));
        }
    }
    Ok(total)
}
