//! Reads any PyTorch memory snapshot as a recording: pickles of protocols 2 to 5 and JSON, gzipped or not. It reads
//! snapshots of PyTorch 2.0 and later, of any device's allocator, and our own.
//!
//! [`reader`] decompresses. [`pickle`] and [`json`] read tokens. [`builder`] builds values from them, and [`contents`]
//! events, stacks and segments from those. [`prior_state`] reconstructs what existed before the first event. A file
//! that ends early, or is damaged in the middle, gives what came before the damage, and a problem reports it.
//!
//! No file can make the reader run code or recurse without bound. Memory and work are proportional to the size of the
//! file: a [`Budget`] is charged for every decompressed byte and for everything that is kept. A value that a file names
//! many times is processed once.

mod builder;
mod contents;
mod json;
mod notices;
mod pickle;
mod prior_state;
mod read_error;
mod reader;
mod recording;
mod rows;
mod tables;

use std::fs::File;
use std::path::Path;

use memtrace_trace::file::{Budget, Exceeded, untrusted};

use self::builder::SnapshotBuilder;
use self::contents::{ItemKind, SnapshotContents, Value};
pub use self::notices::TOPIC as SNAPSHOT_TOPIC;
use self::notices::{IgnoredParts, ReadStatistics};
use self::read_error::ReadError;
use self::reader::ByteReader;
pub use self::recording::{SNAPSHOT_END_REASON, SnapshotRecording};
use super::problem::Problem;
use crate::error::{Error, Result};

/// Why a file is not read, and what the user can do.
struct Refusal {
    reason: String,
    help: String,
}

impl Refusal {
    fn new(reason: impl Into<String>, help: impl Into<String>) -> Refusal {
        Refusal { reason: reason.into(), help: help.into() }
    }

    fn into_error(self, path: &Path) -> Error {
        Error::Snapshot { path: path.to_owned(), reason: self.reason, help: self.help }
    }
}

const PASS_A_SNAPSHOT: &str = "pass a file that torch.cuda.memory._dump_snapshot wrote";
const PASS_THE_RUN_FOLDER: &str = "pass the run folder";
const SAVE_AGAIN: &str = "save it again with Python's pickle.dump";
const COPY_AGAIN: &str = "copy the file again, or let the program write it again";

/// The UTF-8 byte order mark, which some editors write at the beginning.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The format of a file according to its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SnapshotFormat {
    Pickle,
    Json,
}

/// Reads a snapshot. `progress` receives the file bytes read so far and the total.
///
/// # Errors
///
/// If the file is not a snapshot, or is too damaged to read anything from it.
pub(super) fn open(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<(SnapshotRecording, Vec<Problem>)> {
    let file = untrusted::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
    read(path, file, progress)
}

/// [`open`] for a file that is open already. `path` is for messages.
pub(super) fn read(
    path: &Path,
    file: File,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(SnapshotRecording, Vec<Problem>)> {
    let size = file.metadata().map_err(Error::io(format!("cannot read {}", path.display())))?.len();
    let mut report_progress = |done: u64| progress(done, size);
    let cannot_read = || Error::io(format!("cannot read {}", path.display()));
    let budget = Budget::of_file(&file).map_err(cannot_read())?;
    let mut reader = ByteReader::new(file, &budget, &mut report_progress).map_err(cannot_read())?;
    // Damage can be anywhere. The bytes before it still identify the format.
    let first_read = reader.refill();
    let format = match detect_format(reader.buffer()) {
        Ok(format) => format,
        Err(refusal) => {
            return Err(match first_read {
                Err(ReadError::Io(cause)) => cannot_read()(cause),
                Err(_) => Refusal::new("its gzip data is damaged from the beginning", COPY_AGAIN).into_error(path),
                Ok(()) => refusal.into_error(path),
            });
        }
    };
    if reader.buffer().starts_with(BYTE_ORDER_MARK) {
        reader.consume(BYTE_ORDER_MARK.len());
    }
    let mut builder = SnapshotBuilder::new();
    let value = match format {
        SnapshotFormat::Pickle => pickle::read(&mut reader, &mut builder, &budget),
        SnapshotFormat::Json => json::read(&mut reader, &mut builder, &budget),
    };
    let (value, error) = match value {
        Ok(value) => (value, None),
        // The part read so far needs all available memory.
        Err(ReadError::Exceeded(exceeded)) => return Err(too_expensive(exceeded).into_error(path)),
        Err(error) => {
            // The contents so far can be a snapshot without its end.
            let value = if builder.salvage() { builder.finish().unwrap_or(Value::None) } else { Value::None };
            (value, Some(error))
        }
    };
    let contents = &builder.contents;
    let is_snapshot = matches!(value, Value::Snapshot) || is_segment_list(contents, value);
    let has_content = contents.events.rows.len() > 0 || !contents.state.segments.is_empty();
    if let Some(error) = &error
        && !(is_snapshot && has_content)
    {
        return Err(nothing_read(error, &reader).into_error(path));
    }
    if !is_snapshot {
        return Err(not_a_snapshot(contents, value, format).into_error(path));
    }
    let mut problems = Vec::new();
    if let Some(error) = &error {
        let text = format!(
            "{}; the report covers the {} events and {} segments before that",
            describe_damage(error, &reader),
            contents.events.rows.len(),
            contents.state.segments.len()
        );
        problems.push(Problem { path: path.to_owned(), text });
    }
    let mut trailing_bytes = 0;
    if error.is_none() {
        match reader.skip_to_end() {
            Ok(bytes) => trailing_bytes = bytes,
            Err(ReadError::Io(cause)) => {
                let text = format!("it cannot be read after the end of the snapshot: {cause}");
                problems.push(Problem { path: path.to_owned(), text });
            }
            Err(ReadError::Exceeded(exceeded)) => return Err(too_expensive(exceeded).into_error(path)),
            Err(_) => {
                let text =
                    "its gzip checksum is missing or does not match, so the report can be wrong; copy the file again";
                problems.push(Problem { path: path.to_owned(), text: text.to_owned() });
            }
        }
    }
    let (is_complete, cut_texts) = (error.is_none(), reader.cut_texts);
    let ignored = IgnoredParts { trailing_bytes, ..IgnoredParts::default() };
    let statistics = ReadStatistics { is_complete, cut_texts, ignored, ..ReadStatistics::default() };
    drop(reader);
    match SnapshotRecording::of(builder, value, statistics, &budget) {
        Ok(recording) => Ok((recording, problems)),
        Err(exceeded) => Err(too_expensive(exceeded).into_error(path)),
    }
}

/// The file needs more memory or work than any snapshot of its size.
fn too_expensive(exceeded: Exceeded) -> Refusal {
    Refusal::new(exceeded.to_string(), Exceeded::HELP)
}

/// Whether this is the bare list of segments that `torch.cuda.memory_snapshot()` returns.
fn is_segment_list(contents: &SnapshotContents, value: Value) -> bool {
    match value {
        Value::ItemList(ItemKind::Segment, ..) => true,
        Value::List(id) => contents.collections.lists[id as usize]
            .iter()
            .all(|item| matches!(item, Value::ItemRange(ItemKind::Segment, ..))),
        _ => false,
    }
}

/// The format that the bytes begin with. The error says what the file is instead.
fn detect_format(bytes: &[u8]) -> Result<SnapshotFormat, Refusal> {
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    let first = text.iter().find(|byte| !byte.is_ascii_whitespace());
    let (reason, help) = match bytes {
        [] => ("the file is empty", "run the program again: it ended before it wrote the snapshot"),
        [0x80, ..] => return Ok(SnapshotFormat::Pickle),
        [b'P', b'K', 3, 4, ..] => ("it is a zip archive, as torch.save writes", PASS_A_SNAPSHOT),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("it is compressed with zstd", "decompress it with unzstd"),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("it is compressed with xz", "decompress it with unxz"),
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => ("it is compressed with bzip2", "decompress it with bunzip2"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            ("it is UTF-16 text", "convert it to UTF-8 with iconv -f UTF-16 -t UTF-8")
        }
        [0x1f, 0x8b, ..] => ("it is gzipped twice", "decompress it once with gunzip"),
        [b'<', ..] => ("it is an HTML page, not a memory snapshot", PASS_A_SNAPSHOT),
        _ if matches!(first, Some(b'{' | b'[')) => return Ok(SnapshotFormat::Json),
        [b'(' | b'}' | b']', ..] => {
            ("it looks like a pickle of protocol 0 or 1; protocols 2 to 5 are supported", SAVE_AGAIN)
        }
        _ => ("it is neither a pickle nor JSON", PASS_A_SNAPSHOT),
    };
    Err(Refusal::new(reason, help))
}

/// Why a readable file is not a snapshot.
fn not_a_snapshot(contents: &SnapshotContents, value: Value, format: SnapshotFormat) -> Refusal {
    let keys = contents.keys(value);
    let has = |key: &str| keys.contains(&key);
    if has("traceEvents") {
        let reason = "it is a trace of torch.profiler or another Chrome trace, not a memory snapshot";
        return Refusal::new(reason, PASS_A_SNAPSHOT);
    }
    if has("processes") && has("losses") {
        return Refusal::new("it is a memtrace summary", PASS_THE_RUN_FOLDER);
    }
    if has("command") && has("processes") {
        return Refusal::new("it is the manifest of a memtrace run", PASS_THE_RUN_FOLDER);
    }
    // Files of torch.save before 1.6 begin with such a value, and so does a state_dict in one.
    if matches!(value, Value::Other | Value::Int(_)) && format == SnapshotFormat::Pickle {
        let reason = "it is a pickle, but not a memory snapshot (old torch.save files look like this)";
        return Refusal::new(reason, PASS_A_SNAPSHOT);
    }
    let kind = if format == SnapshotFormat::Pickle { "a pickle" } else { "JSON" };
    if keys.is_empty() {
        return Refusal::new(format!("it is {kind}, but not a memory snapshot"), PASS_A_SNAPSHOT);
    }
    let shown: Vec<String> =
        keys.iter().take(5).map(|key| memtrace_trace::printable::line(key).chars().take(40).collect()).collect();
    let reason = format!(
        "it is {kind}, but not a memory snapshot (it has the keys {}; a snapshot has segments and device_traces)",
        shown.join(", ")
    );
    Refusal::new(reason, PASS_A_SNAPSHOT)
}

/// Describes why reading ended, and where.
fn describe_damage(error: &ReadError, reader: &ByteReader<'_>) -> String {
    let position = reader.file_position();
    match error {
        ReadError::EndOfFile => format!("it is cut off at byte {position}{}", decompressed_position(reader)),
        ReadError::DamagedGzip => {
            format!("its gzip data is damaged at or before byte {position}{}", decompressed_position(reader))
        }
        ReadError::Io(cause) => format!("it cannot be read after byte {position}: {cause}"),
        ReadError::Invalid(reason) => format!("it is damaged: {reason}"),
        ReadError::Exceeded(exceeded) => exceeded.to_string(),
    }
}

fn decompressed_position(reader: &ByteReader<'_>) -> String {
    if reader.is_gzipped { format!(" ({} bytes decompressed)", reader.position()) } else { String::new() }
}

/// Why nothing could be read.
fn nothing_read(error: &ReadError, reader: &ByteReader<'_>) -> Refusal {
    match error {
        ReadError::Invalid(reason) => Refusal::new(reason.clone(), PASS_A_SNAPSHOT),
        ReadError::Io(cause) => Refusal::new(cause.to_string(), ""),
        other => Refusal::new(format!("{}, before any event", describe_damage(other, reader)), COPY_AGAIN),
    }
}
