//! Any PyTorch memory snapshot as a recording: pickles of protocols 2 to 5 and JSON, gzipped or not, of PyTorch 2.0 and later, of any
//! device's allocator, or of our own.
//!
//! [`input`] unpacks, [`pickle`] and [`json`] read tokens, [`machine`] makes them into events, stacks and segments as they come, and
//! [`state`] works out what was there before the first event. A file that ends too early, or is damaged in the middle, gives what came
//! before, and says so. Nothing in a file can make the reader run anything, follow itself, or take more memory than
//! in proportion to the file.

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

/// Memory that any file may take, and how much more for each of its bytes: a snapshot packs to a thirtieth, and takes as much as it has
/// bytes when it is not packed.
const ROOM: usize = 256 << 20;
const ROOM_PER_BYTE: usize = 128;

/// Why reading ended before the snapshot did.
#[derive(Debug)]
enum Stop {
    /// The file ends.
    End,
    /// The gzip layer is damaged.
    Gzip,
    /// The system's answer.
    Io(io::Error),
    /// It is not what it should be: what is wrong, and what to do.
    Refused(String),
    /// It wants more memory than a file of its size may have.
    Memory,
}

/// What some editors write before a text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What a file is by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Pickle,
    Json,
}

/// Reads a snapshot. `progress` hears how many of how many bytes of the file have been read.
///
/// # Errors
///
/// When it is no snapshot, or so damaged that nothing can be read of it: what is wrong, and what to do.
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
    // Damage may lie anywhere: what comes before it says what the file is.
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
            // What is there may be a snapshot without its end.
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

/// `torch.cuda.memory_snapshot()` is the list of segments without anything around.
fn segments_alone(machine: &Machine, value: Value) -> bool {
    match value {
        Value::Many(Kind::Segment, ..) => true,
        Value::List(id) => machine.lists[id as usize].iter().all(|item| matches!(item, Value::Run(Kind::Segment, ..))),
        _ => false,
    }
}

/// What the bytes begin as; else what they are, and what to do.
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

/// Why a file that can be read is no snapshot.
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
    // The first thing in a file of torch.save before 1.6, and a state_dict of it.
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
