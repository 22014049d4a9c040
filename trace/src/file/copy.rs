//! Copies parts of a trace that is still being written into another one: for rotation ([`crate::rotation`]).

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use super::frame::{FILE_HEADER, FRAME_HEADER, FrameHeader, Kind};
use crate::definition::Definition;
use crate::error::{Error, Result};
use crate::wire::Cursor;

/// A frame in a file: its offset, its header, and the offset after it.
struct Frame {
    at: u64,
    header: FrameHeader,
    end: u64,
}

/// The next complete frame from `at` on that ends at `to` or before. `None` if there is none. Damage is skipped.
fn next_frame(file: &File, mut at: u64, to: u64) -> Result<Option<Frame>> {
    while at + FRAME_HEADER as u64 <= to {
        let mut bytes = [0; FRAME_HEADER];
        file.read_exact_at(&mut bytes, at).map_err(Error::io("cannot read the trace"))?;
        if let Some(header) = FrameHeader::from_bytes(&bytes) {
            let end = at + FRAME_HEADER as u64 + u64::from(header.stored_len);
            return Ok((end <= to).then_some(Frame { at, header, end }));
        }
        at += 1;
    }
    Ok(None)
}

/// Copies the complete frames of `file` between the offsets `from`, where a frame begins, and `to`. Returns the offset
/// after the last one. Damaged parts are left out.
///
/// # Errors
///
/// If `file` cannot be read, or `out` cannot be written.
pub fn copy_frames(file: &File, from: u64, to: u64, out: &mut impl Write) -> Result<u64> {
    let (mut at, mut bytes) = (from, Vec::new());
    while let Some(frame) = next_frame(file, at, to)? {
        bytes.resize((frame.end - frame.at) as usize, 0);
        file.read_exact_at(&mut bytes, frame.at).map_err(Error::io("cannot read the trace"))?;
        out.write_all(&bytes).map_err(Error::io("cannot write the trace"))?;
        at = frame.end;
    }
    Ok(at)
}

/// The receiver of definitions with their encodings. `None` is a definition of an unknown kind.
pub type DefinitionSink<'s> = &'s mut dyn FnMut(Option<&Definition<'_>>, &[u8]) -> Result<()>;

/// Passes every definition before the offset `to` to `sink`, with its encoding. A definition of an unknown kind is
/// `None`.
///
/// # Errors
///
/// If `file` cannot be read, and the errors of `sink`.
pub fn definitions_before(file: &File, to: u64, sink: DefinitionSink<'_>) -> Result<()> {
    let mut at = FILE_HEADER as u64;
    while let Some(frame) = next_frame(file, at, to)? {
        at = frame.end;
        if frame.header.kind != Kind::Definitions {
            continue;
        }
        let mut payload = vec![0; frame.header.stored_len as usize];
        file.read_exact_at(&mut payload, frame.at + FRAME_HEADER as u64).map_err(Error::io("cannot read the trace"))?;
        let is_valid = crc32fast::hash(&payload) == frame.header.crc;
        let raw = match frame.header.compressed {
            true => zstd::bulk::decompress(&payload, frame.header.raw_len as usize).ok(),
            false => Some(payload),
        };
        let Some(raw) = raw.filter(|_| is_valid) else { continue };
        let mut cursor = Cursor::new(&raw);
        while !cursor.is_empty() {
            let rest = cursor.rest();
            let Ok(definition) = Definition::decode(&mut cursor) else { break };
            sink(definition.as_ref(), &rest[..rest.len() - cursor.rest().len()])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::event::Event;
    use crate::file::{End, Reader, Writer};
    use crate::ids::FrameId;

    fn trace() -> File {
        let mut writer = Writer::new(tempfile::tempfile().unwrap(), "{}").unwrap();
        for id in 1..200u32 {
            let mut encoded = Vec::new();
            let frame = Definition::Frame {
                id: FrameId(id),
                name: "f",
                qualname: "f",
                filename: "a.py",
                line: id,
                first_line: 0,
            };
            frame.encode(&mut encoded);
            writer.definition(&encoded).unwrap();
            writer.event(&Event { seq: id.into(), ticks: id.into(), ..Event::EMPTY }).unwrap();
            if id % 50 == 0 {
                writer.flush().unwrap();
            }
        }
        writer.finish(&End::default()).unwrap()
    }

    #[test]
    fn frames_are_copied_up_to_the_last_complete_one() {
        let file = trace();
        let reader = Reader::of("a.mtr".as_ref(), file.try_clone().unwrap()).unwrap();
        let [_, second, third, _] = reader.blocks() else { panic!("{:?}", reader.blocks()) };
        let mut out = Writer::new(tempfile::tempfile().unwrap(), "{}").unwrap();
        out.flush().unwrap();
        let mut new = out.continue_in(tempfile::tempfile().unwrap()).unwrap();
        // Into the third block.
        let copied = copy_frames(&file, second.offset, third.end() - 1, &mut new).unwrap();
        assert!(second.end() <= copied && copied <= third.offset);
        let new = Reader::of("b.mtr".as_ref(), new).unwrap();
        let seqs: Vec<u64> = new.events().flatten().flatten().map(|e| e.seq).collect();
        assert_eq!(seqs, (51..=100).collect::<Vec<_>>());
    }

    #[test]
    fn definitions_are_passed_on_with_their_bytes_and_damage_is_skipped() {
        let file = trace();
        let lines = |to: u64| {
            let mut lines = Vec::new();
            definitions_before(&file, to, &mut |definition, bytes| {
                let mut again = Vec::new();
                definition.unwrap().encode(&mut again);
                assert_eq!(again, bytes);
                lines.extend(match definition {
                    Some(Definition::Frame { line, .. }) => Some(*line),
                    _ => None,
                });
                Ok(())
            })
            .unwrap();
            lines
        };
        let len = file.metadata().unwrap().len();
        let reader = Reader::of("a.mtr".as_ref(), file.try_clone().unwrap()).unwrap();
        assert_eq!(lines(len), (1..200).collect::<Vec<_>>());
        assert_eq!(lines(reader.blocks()[1].offset), (1..=100).collect::<Vec<_>>());
        // A byte of the first definitions.
        file.write_all_at(&[0xff], FILE_HEADER as u64 + 2 * FRAME_HEADER as u64 + 9).unwrap();
        (&file).flush().unwrap();
        assert_eq!(lines(len), (51..200).collect::<Vec<_>>());
    }
}
