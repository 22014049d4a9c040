//! The state that the analysis keeps of the events that a rotated trace has dropped: the file `<pid>.kept.jsonl` beside
//! `<pid>.mtr`.
//!
//! The trace recreates the state of the memory. The position in the program and the categories of older blocks follow
//! from events that are gone. Their meaning is the analysis's, so they are in a file with a version of its own, and a
//! report works without it.
//!
//! The file has lines of JSON: the first one has the version and the CRC-32 of the bytes after it, each other one the
//! state at one rotation. There are two, because the file replaces its predecessor shortly before the trace does: the
//! newest one, and that of the trace before.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memtrace_trace::file::budget::json_memory;
use memtrace_trace::file::{Budget, untrusted};
use memtrace_trace::rotation::Rotation;
use serde::{Deserialize, Serialize};

/// The version of the file. It increases when a field changes its meaning.
const VERSION: u32 = 1;
/// The maximum size of the file, in bytes.
const MAX_FILE_SIZE: u64 = 256 << 20;
/// The states in a file.
const MAX_STATES: usize = 2;
/// The end of the file's name, in the place of the trace's.
const EXTENSION: &str = "kept.jsonl";

/// A position in the program.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct KeptPosition {
    /// The step, counted from 0; `None` before the first one.
    pub step: Option<u32>,
    /// The phase, as in `summary.json`.
    pub phase: Box<str>,
    /// How often the phase has changed.
    pub phase_changes: u32,
    /// How many backward passes have begun.
    pub backward_passes: u32,
    /// How many optimizer steps have begun.
    pub optimizer_steps: u32,
}

/// Where the program was at the first kept event, and what else decides where steps and phases begin.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct KeptProgress {
    /// Where the program was.
    pub position: KeptPosition,
    /// How many steps had ended according to profiler ranges.
    pub ended_steps: u32,
    /// The id of the thread that calls the model.
    pub main_thread: u32,
    /// Whether a model has run.
    pub model_ran: bool,
    /// Whether the step is over.
    pub step_is_over: bool,
    /// Whether an optimizer has stepped since the last backward pass.
    pub optimizer_has_stepped: bool,
    /// Whether the data loader has not been called since the optimizer stepped.
    pub awaits_loader: bool,
    /// Whether the optimizer is stepping.
    pub optimizer_is_running: bool,
    /// Whether profiler ranges show the ends of steps.
    pub has_profiler_ranges: bool,
    /// The backward passes of the current step.
    pub backward_passes_in_step: u32,
    /// The backward passes of the first step; `None` before its end.
    pub backward_passes_of_first_step: Option<u32>,
    /// The number of optimizer steps with evidence of their own.
    pub optimizer_steps: u32,
}

/// A block that is older than the kept events.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
pub struct KeptBlock {
    /// The [`seq`](memtrace_trace::event::Event::seq) of its allocation.
    pub seq: u64,
    /// Where the program was when it was allocated.
    pub position: KeptPosition,
    /// The phase of the allocation itself. On other threads it can differ from the program's.
    pub phase: Box<str>,
    /// The category, as in `summary.json`, and the id of the rule that decided it. `None` if the events that follow
    /// decide.
    pub classification: Option<(Box<str>, Box<str>)>,
}

/// A [`KeptBlock`] in the file: without names of fields, since there can be many.
type Row = (u64, Option<u32>, Box<str>, u32, u32, u32, Box<str>, Option<(Box<str>, Box<str>)>);

impl From<Row> for KeptBlock {
    fn from(row: Row) -> KeptBlock {
        let (seq, step, program_phase, phase_changes, backward_passes, optimizer_steps, phase, classification) = row;
        let position = KeptPosition { step, phase: program_phase, phase_changes, backward_passes, optimizer_steps };
        KeptBlock { seq, position, phase, classification }
    }
}

impl From<KeptBlock> for Row {
    fn from(KeptBlock { seq, position, phase, classification }: KeptBlock) -> Row {
        let KeptPosition { step, phase: program_phase, phase_changes, backward_passes, optimizer_steps } = position;
        (seq, step, program_phase, phase_changes, backward_passes, optimizer_steps, phase, classification)
    }
}

/// The state at one rotation.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct KeptState {
    /// The rotation. A trace with another one has another state.
    #[serde(with = "RotationFields")]
    pub rotation: Rotation,
    /// Whether the state at an earlier rotation was not known, so that this one has only what came after it.
    pub is_partial: bool,
    /// Where the program was.
    pub progress: KeptProgress,
    /// The blocks in use.
    pub blocks: Vec<KeptBlock>,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Rotation")]
struct RotationFields {
    first_seq: u64,
    dropped: u64,
    recreating: u64,
    dropped_ticks: (u64, u64),
}

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    crc32: u32,
}

impl KeptState {
    /// The name of the file beside a trace with this name.
    pub fn file_name(trace: impl AsRef<Path>) -> PathBuf {
        trace.as_ref().with_extension(EXTENSION)
    }

    /// Reads the state of a trace with this rotation from the file beside it.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is damaged, has another version, or has no state of this rotation.
    pub fn read(file: &File, rotation: &Rotation, budget: &Budget) -> io::Result<KeptState> {
        budget.add_file(file)?;
        let text = untrusted::read(file, MAX_FILE_SIZE)?;
        budget.hold(json_memory(&text)).map_err(io::Error::other)?;
        let end = text.iter().position(|byte| *byte == b'\n').map_or(text.len(), |at| at + 1);
        let (header, states) = text.split_at(end);
        let Header { version, crc32 } = serde_json::from_slice(header)?;
        if version != VERSION {
            let reason = format!("format version {version} is not supported; this memtrace reads version {VERSION}");
            return Err(io::Error::other(reason));
        }
        if crc32fast::hash(states) != crc32 {
            return Err(io::Error::other("it is damaged"));
        }
        for line in states.split(|byte| *byte == b'\n').take(MAX_STATES).filter(|line| !line.is_empty()) {
            let state: KeptState = serde_json::from_slice(line)?;
            if state.rotation == *rotation {
                return Ok(state);
            }
        }
        Err(io::Error::other("it belongs to another trace, or to another state of this one"))
    }

    /// The content of the file. `before` is the state of the trace before this rotation.
    pub fn to_file(&self, before: Option<&KeptState>) -> Vec<u8> {
        let mut states = Vec::new();
        for state in [self].into_iter().chain(before) {
            // Serializing these plain structures cannot fail.
            states.extend(serde_json::to_vec(state).unwrap_or_default());
            states.push(b'\n');
        }
        let header = Header { version: VERSION, crc32: crc32fast::hash(&states) };
        let mut file = serde_json::to_vec(&header).unwrap_or_default();
        file.push(b'\n');
        file.extend(states);
        file
    }
}
