//! Reads any PyTorch memory snapshot as a recording: pickles of protocols 2 to 5 and JSON, gzipped or not. It reads
//! snapshots of PyTorch 2.0 and later, of any device's allocator, and our own.
//!
//! [`input`] decompresses. [`pickle`] and [`json`] read tokens. [`machine`] builds events, stacks and segments from
//! them. [`state`] reconstructs what existed before the first event. A file that ends early, or is damaged in the
//! middle, gives what came before the damage, and a problem reports it.
//!
//! No file can make the reader run code or recurse without bound. Memory use is proportional to the size of the file.

mod input;
mod json;
mod machine;
mod pickle;
mod recording;
mod remarks;
mod rows;
mod state;
mod tables;

use std::fs::File;
use std::io;
use std::path::Path;

use memtrace_trace::file::foreign;

use self::input::Input;
use self::machine::{Kind, Machine, Value};
pub use self::recording::{SNAPSHOT_END, SnapshotRecording};
pub use self::remarks::TOPIC as SNAPSHOT_TOPIC;
use super::Problem;
use crate::error::{Error, Result};

/// The memory limit of the reader, in bytes: a base and an allowance per file byte. gzip compresses a snapshot to a
/// thirtieth. Decompressed, it needs about as much memory as it has bytes.
const ROOM: usize = 256 << 20;
const ROOM_PER_BYTE: usize = 128;

/// Why reading ended before the snapshot did.
#[derive(Debug)]
enum Stop {
    /// The file ends.
    End,
    /// The gzip stream is damaged.
    Gzip,
    /// The operating system reported an error.
    Io(io::Error),
    /// The content is invalid. Says what is wrong, and what to do.
    Refused(String),
    /// The file needs more memory than its size allows.
    Memory,
}

/// The UTF-8 byte order mark, which some editors write at the beginning.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The format of a file according to its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Pickle,
    Json,
}

/// Reads a snapshot. `progress` receives the file bytes read so far and the total.
///
/// # Errors
///
/// If the file is not a snapshot, or is too damaged to read anything from it. The message says what is wrong, and what
/// to do.
pub(super) fn open(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<(SnapshotRecording, Vec<Problem>)> {
    let file = foreign::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
    read(path, file, progress)
}

fn read(path: &Path, file: File, progress: &mut dyn FnMut(u64, u64)) -> Result<(SnapshotRecording, Vec<Problem>)> {
    let refuse = |why: String| Error::Snapshot { path: path.to_owned(), why };
    let size = file.metadata().map_err(Error::io(format!("cannot read {}", path.display())))?.len();
    let mut heard = |done: u64| progress(done, size);
    let cannot = || Error::io(format!("cannot read {}", path.display()));
    let mut input = Input::new(file, &mut heard).map_err(cannot())?;
    // Damage can be anywhere. The bytes before it still identify the format.
    let began = input.refill();
    let form = match form(input.here()) {
        Ok(form) => form,
        Err(why) => {
            return Err(match began {
                Err(Stop::Io(cause)) => cannot()(cause),
                Err(_) => refuse("it is no gzip file, or damaged from its beginning: fetch it again".to_owned()),
                Ok(()) => refuse(why),
            });
        }
    };
    if input.here().starts_with(BYTE_ORDER_MARK) {
        input.skip_here(BYTE_ORDER_MARK.len());
    }
    let mut machine = Machine::new();
    let room = ROOM.saturating_add(usize::try_from(size).unwrap_or(usize::MAX).saturating_mul(ROOM_PER_BYTE));
    let value = match form {
        Form::Pickle => pickle::read(&mut input, &mut machine, room),
        Form::Json => json::read(&mut input, &mut machine, room),
    };
    let (value, stop) = match value {
        Ok(value) => (value, None),
        Err(stop) => {
            // The contents so far can be a snapshot without its end.
            let value = if machine.salvage() { machine.finish().unwrap_or(Value::None) } else { Value::None };
            (value, Some(stop))
        }
    };
    let is_snapshot = matches!(value, Value::Top) || segments_alone(&machine, value);
    let saved = machine.rows.len() > 0 || !machine.segments.is_empty();
    if let Some(stop) = &stop
        && !(is_snapshot && saved)
    {
        return Err(refuse(nothing_saved(stop, &input)));
    }
    if !is_snapshot {
        return Err(refuse(other_kind(&machine, value, form)));
    }
    let mut problems = Vec::new();
    if let Some(stop) = &stop {
        let text = format!(
            "{}; {} events and {} segments before that are reported, what came after is missing",
            where_it_stopped(stop, &input),
            machine.rows.len(),
            machine.segments.len()
        );
        problems.push(Problem { path: path.to_owned(), text });
    }
    let mut trailing = 0;
    if stop.is_none() {
        match input.pass_all() {
            Ok(bytes) => trailing = bytes,
            Err(Stop::Io(cause)) => {
                let text = format!("it cannot be read behind the snapshot's end: {cause}");
                problems.push(Problem { path: path.to_owned(), text });
            }
            Err(_) => {
                let text =
                    "its gzip checksum is missing or does not match: what is reported may be wrong; fetch it again";
                problems.push(Problem { path: path.to_owned(), text: text.to_owned() });
            }
        }
    }
    let (whole, cut_texts) = (stop.is_none(), input.cut_texts);
    let facts = remarks::Facts { whole, cut_texts, trailing, ..remarks::Facts::default() };
    drop(input);
    Ok((SnapshotRecording::of(machine, value, facts), problems))
}

/// `torch.cuda.memory_snapshot()` returns the bare list of segments.
fn segments_alone(machine: &Machine, value: Value) -> bool {
    match value {
        Value::Many(Kind::Segment, ..) => true,
        Value::List(id) => machine.lists[id as usize].iter().all(|item| matches!(item, Value::Run(Kind::Segment, ..))),
        _ => false,
    }
}

/// The format that the bytes begin with. The error says what the file is instead, and what to do.
fn form(bytes: &[u8]) -> Result<Form, String> {
    const GIVE: &str = "give the file that torch.cuda.memory._dump_snapshot wrote";
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    let first = text.iter().find(|byte| !byte.is_ascii_whitespace());
    match bytes {
        [] => Err("it is empty: the program that should have written it did not get that far".to_owned()),
        [0x80, ..] => Ok(Form::Pickle),
        [b'P', b'K', 3, 4, ..] => Err(format!("it is a zip archive, as torch.save writes them: {GIVE}")),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Err("it is packed with zstd: unpack it first (unzstd)".to_owned()),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Err("it is packed with xz: unpack it first (unxz)".to_owned()),
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => Err("it is packed with bzip2: unpack it first (bunzip2)".to_owned()),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            Err("it is text of UTF-16: save it as UTF-8 (iconv -f UTF-16 -t UTF-8)".to_owned())
        }
        [0x1f, 0x8b, ..] => Err("it is gzipped twice: unpack it once (gunzip)".to_owned()),
        [b'<', ..] => Err(format!("it is a web page; the page that _memory_viz made cannot be read back: {GIVE}")),
        _ if matches!(first, Some(b'{' | b'[')) => Ok(Form::Json),
        [b'(' | b'}' | b']', ..] => {
            Err("it may be a pickle of protocol 0 or 1, and 2 to 5 are read: save it anew with Python's pickle.dump"
                .to_owned())
        }
        _ => Err(format!("it is neither a pickle nor JSON: {GIVE}")),
    }
}

/// Why a readable file is not a snapshot.
fn other_kind(machine: &Machine, value: Value, form: Form) -> String {
    const GIVE: &str = "give the file that torch.cuda.memory._dump_snapshot wrote";
    let keys = machine.keys(value);
    let has = |key: &str| keys.contains(&key);
    if has("traceEvents") {
        return format!(
            "it is a trace of torch.profiler (or another Chrome trace), which holds no snapshot of memory: {GIVE}"
        );
    }
    if has("processes") && has("losses") {
        return "it is a memtrace summary: give the run folder, or the .mtr file beside it".to_owned();
    }
    if has("command") && has("processes") {
        return "it is the manifest of a memtrace run: give the run folder".to_owned();
    }
    // Files of torch.save before 1.6 begin with such a value, and so does a state_dict in one.
    if matches!(value, Value::Other | Value::Int(_)) && form == Form::Pickle {
        return format!("it is a pickle of something else (an old torch.save file begins so): {GIVE}");
    }
    let kind = if form == Form::Pickle { "a pickle" } else { "JSON" };
    if keys.is_empty() {
        return format!("it is {kind}, and no memory snapshot: {GIVE}");
    }
    let shown: Vec<String> =
        keys.iter().take(5).map(|key| crate::printable::line(key).chars().take(40).collect()).collect();
    format!(
        "it is {kind}, and no memory snapshot (which has the keys segments and device_traces; this has {}): {GIVE}",
        shown.join(", ")
    )
}

fn where_it_stopped(stop: &Stop, input: &Input<'_>) -> String {
    match stop {
        Stop::End => format!("it is cut off at byte {}{}", input.file_position(), unpacked(input)),
        Stop::Gzip => {
            format!("its gzip layer is damaged at byte {} or before{}", input.file_position(), unpacked(input))
        }
        Stop::Io(cause) => format!("it cannot be read beyond byte {}: {cause}", input.file_position()),
        Stop::Refused(why) => format!("it is damaged: {why}"),
        Stop::Memory => {
            format!("it asks for more memory than any snapshot of its size needs, after byte {}", input.file_position())
        }
    }
}

fn unpacked(input: &Input<'_>) -> String {
    if input.packed { format!(" ({} bytes unpacked)", input.position()) } else { String::new() }
}

fn nothing_saved(stop: &Stop, input: &Input<'_>) -> String {
    match stop {
        Stop::Refused(why) => why.clone(),
        Stop::Io(cause) => format!("it cannot be read: {cause}"),
        other => format!(
            "{}, before any event: fetch it again, or let the program write it anew",
            where_it_stopped(other, input)
        ),
    }
}
