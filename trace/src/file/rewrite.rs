//! Rewrites a trace with other texts: its info and its definitions pass through functions of the caller, everything
//! else stays as it is, byte for byte.
//!
//! Unreadable ranges hold texts that nobody has seen, so they are not copied: damaged ranges become zeros of the same
//! length, frames and definitions of unknown kinds lose their content. A reader counts the same losses as before.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use super::frame::{FILE_HEADER, FRAME_HEADER, FrameHeader, Kind, MAX_PAYLOAD, check_file_header};
use super::untrusted;
use crate::definition::Definition;
use crate::error::Error;
use crate::wire::Cursor;

/// The zstd level: that of the writer.
const LEVEL: i32 = 1;
/// A kind of definitions that no version has.
const UNKNOWN_DEFINITION: u8 = u8::MAX;
/// A frame gets no more definitions beyond this size, in bytes.
const FRAME_BYTES: usize = MAX_PAYLOAD as usize / 2;
const ZEROS: [u8; 4096] = [0; 4096];

/// The texts of a rewritten trace.
pub trait NewTexts {
    /// The info of the process, one JSON object.
    fn info(&mut self, info: &str) -> String;
    /// Appends a definition to `out`, encoded, with other texts.
    fn definition(&mut self, definition: &Definition<'_>, out: &mut Vec<u8>);
}

/// Why a trace was not rewritten. The two files have different names.
#[derive(Debug)]
pub enum RewriteError {
    /// The file is no trace, or cannot be read.
    Read(Error),
    /// The new trace cannot be written.
    Write(io::Error),
}

impl From<Error> for RewriteError {
    fn from(error: Error) -> RewriteError {
        RewriteError::Read(error)
    }
}

type Result<T, E = RewriteError> = std::result::Result<T, E>;

/// Writes the trace in `file` to `out`, with other texts.
///
/// # Errors
///
/// If `file` is no trace, or cannot be read, or `out` cannot be written.
pub fn rewrite(file: &File, out: &mut impl Write, texts: &mut dyn NewTexts) -> Result<()> {
    let cannot_read = || Error::io("cannot read the trace");
    let len = untrusted::check(file).map_err(cannot_read())?.len();
    let mut start = vec![0; FILE_HEADER.min(len as usize)];
    file.read_exact_at(&mut start, 0).map_err(cannot_read())?;
    check_file_header(&start)?;
    put(out, &start)?;
    let mut at = FILE_HEADER as u64;
    while at < len {
        let mut bytes = [0; FRAME_HEADER];
        let take = FRAME_HEADER.min((len - at) as usize);
        file.read_exact_at(&mut bytes[..take], at).map_err(cannot_read())?;
        let header = FrameHeader::from_bytes(&bytes).filter(|_| take == FRAME_HEADER);
        let end = at + FRAME_HEADER as u64 + header.map_or(0, |header| u64::from(header.stored_len));
        let Some(header) = header.filter(|_| end <= len) else {
            // Damage, or a cut end of the file. One byte more is skipped at a time until a frame follows.
            put(out, &[0])?;
            at += 1;
            continue;
        };
        let mut payload = vec![0; header.stored_len as usize];
        file.read_exact_at(&mut payload, at + FRAME_HEADER as u64).map_err(cannot_read())?;
        at = end;
        // A block of events has no text. It is damaged to readers as before.
        if header.kind != Kind::Events && crc32fast::hash(&payload) != header.crc {
            put_damaged(out, &header)?;
            continue;
        }
        match header.kind {
            Kind::Events | Kind::Clock | Kind::Counters | Kind::End => {
                put(out, &header.to_bytes())?;
                put(out, &payload)?;
            }
            Kind::Unknown(_) => put_frame(out, header.kind, &[])?,
            Kind::Info | Kind::Definitions => {
                let raw = match header.compressed {
                    true => zstd::bulk::decompress(&payload, header.raw_len as usize).ok(),
                    false => Some(payload),
                };
                let new = raw.and_then(|raw| match header.kind {
                    Kind::Info => Some(vec![texts.info(std::str::from_utf8(&raw).ok()?).into_bytes()]),
                    _ => definitions(&raw, texts),
                });
                match new {
                    Some(new) => new.iter().try_for_each(|new| put_frame(out, header.kind, new))?,
                    None => put_damaged(out, &header)?,
                }
            }
        }
    }
    Ok(())
}

/// The definitions of one frame, with other texts. They can be longer and need several frames. `None` if a definition
/// is malformed: where the next one begins is unknown.
fn definitions(raw: &[u8], texts: &mut dyn NewTexts) -> Option<Vec<Vec<u8>>> {
    let (mut cursor, mut frames) = (Cursor::new(raw), vec![Vec::with_capacity(raw.len())]);
    while !cursor.is_empty() {
        let definition = Definition::decode(&mut cursor).ok()?;
        if frames.last().is_some_and(|out| out.len() > FRAME_BYTES) {
            frames.push(Vec::new());
        }
        let out = frames.last_mut()?;
        match definition {
            Some(definition) => texts.definition(&definition, out),
            None => out.extend_from_slice(&[UNKNOWN_DEFINITION, 0]),
        }
    }
    Some(frames)
}

fn put_frame(out: &mut impl Write, kind: Kind, raw: &[u8]) -> Result<()> {
    let compressed = kind == Kind::Definitions;
    let stored = if compressed { zstd::bulk::compress(raw, LEVEL).map_err(RewriteError::Write)? } else { raw.to_vec() };
    let (stored_len, raw_len) = (stored.len() as u32, raw.len() as u32);
    let header = FrameHeader { kind, compressed, stored_len, raw_len, crc: crc32fast::hash(&stored) };
    put(out, &header.to_bytes())?;
    put(out, &stored)
}

/// Writes a frame without its content. Its checksum does not match.
fn put_damaged(out: &mut impl Write, header: &FrameHeader) -> Result<()> {
    put(out, &header.to_bytes())?;
    put_zeros(out, header.stored_len.into())
}

fn put_zeros(out: &mut impl Write, mut count: u64) -> Result<()> {
    while count > 0 {
        let take = count.min(ZEROS.len() as u64);
        put(out, &ZEROS[..take as usize])?;
        count -= take;
    }
    Ok(())
}

fn put(out: &mut impl Write, bytes: &[u8]) -> Result<()> {
    out.write_all(bytes).map_err(RewriteError::Write)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;
    use crate::event::Event;
    use crate::file::{End, Reader, Writer};
    use crate::ids::FrameId;

    /// Reverses file names, and replaces the info.
    struct Reversed;

    impl NewTexts for Reversed {
        fn info(&mut self, info: &str) -> String {
            assert_eq!(info, "{\"pid\":7}");
            "{}".to_owned()
        }

        fn definition(&mut self, definition: &Definition<'_>, out: &mut Vec<u8>) {
            let Definition::Frame { id, name, qualname, filename, line, first_line } = *definition else {
                return definition.encode(out);
            };
            let reversed: String = filename.chars().rev().collect();
            Definition::Frame { id, name, qualname, filename: &reversed, line, first_line }.encode(out);
        }
    }

    fn trace() -> Vec<u8> {
        let mut writer = Writer::new(Vec::new(), "{\"pid\":7}").unwrap();
        for id in 1..2000u32 {
            let mut encoded = Vec::new();
            let filename = format!("/secret/{id}.py");
            let (line, first_line) = (id, 1);
            Definition::Frame { id: FrameId(id), name: "f", qualname: "f", filename: &filename, line, first_line }
                .encode(&mut encoded);
            writer.definition(&encoded).unwrap();
            writer.event(&Event { seq: id.into(), ticks: id.into(), ..Event::EMPTY }).unwrap();
        }
        writer.finish(&End { lost: 3, reason: "exited".into(), ..End::default() }).unwrap()
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        file
    }

    fn rewritten(bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        rewrite(&file(bytes), &mut out, &mut Reversed).unwrap();
        out
    }

    fn read(bytes: &[u8]) -> Reader {
        Reader::of(std::path::Path::new("a.mtr"), file(bytes)).unwrap()
    }

    fn events(reader: &Reader) -> Vec<u64> {
        reader.events().flatten().flatten().map(|e| e.seq).collect()
    }

    #[test]
    fn only_texts_change() {
        let (before, after) = (trace(), rewritten(&trace()));
        let (before, after) = (read(&before), read(&after));
        assert_eq!((after.info(), after.end(), after.damage()), ("{}", before.end(), before.damage()));
        assert_eq!(events(&after), events(&before));
        assert_eq!(after.definitions().frames.len(), 2000);
        for (old, new) in before.definitions().frames.iter().zip(&after.definitions().frames).skip(1) {
            let reversed: String = old.filename.chars().rev().collect();
            assert_eq!((&*new.filename, new.line), (&*reversed, old.line));
        }
    }

    #[test]
    fn what_is_damaged_is_not_copied_and_counts_as_before() {
        let whole = trace();
        for (at, cut) in [(whole.len() / 3, 0), (whole.len() / 2, 17), (40, 5), (whole.len() - 1, 1)] {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            bytes.truncate(bytes.len() - cut);
            let text = b"a secret at the end";
            bytes.extend_from_slice(text);
            let new = rewritten(&bytes);
            assert!(!new.windows(text.len()).any(|window| window == text));
            let (before, after) = (read(&bytes), read(&new));
            assert_eq!(after.damage(), before.damage(), "damaged at byte {at}");
            assert_eq!(events(&after), events(&before));
        }
    }
}
