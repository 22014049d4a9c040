//! A trace file of frames with valid envelopes and fuzzed contents, to reach definitions, columns and replay.
//!
//! The input has for each frame one byte of kind, two of length, and the contents. A block of events is its prefix and
//! then its columns, which this target packs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_fuzz::{Folder, analyse};

const PREFIX: usize = 32;

fn frame(file: &mut Vec<u8>, kind: u8, packed: bool, raw: usize, payload: &[u8]) {
    let mut head = [0; 24];
    head[..4].copy_from_slice(b"MTRF");
    (head[4], head[5]) = (kind, packed.into());
    head[8..12].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    head[12..16].copy_from_slice(&(raw as u32).to_le_bytes());
    head[16..20].copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
    let own = crc32fast::hash(&head[..20]);
    head[20..].copy_from_slice(&own.to_le_bytes());
    file.extend_from_slice(&head);
    file.extend_from_slice(payload);
}

fuzz_target!(|data: &[u8]| {
    let mut file = b"MEMTRACE\x01\0\0\0\0\0\0\0".to_vec();
    let mut rest = data;
    while let [kind, a, b, after @ ..] = rest {
        let (contents, next) = after.split_at(usize::from(u16::from_le_bytes([*a, *b])).min(after.len()));
        match kind {
            // Definitions and blocks are compressed.
            1 => {
                let packed = zstd::bulk::compress(contents, 1).expect("room");
                frame(&mut file, 1, true, contents.len(), &packed);
            }
            2 if contents.len() >= PREFIX => {
                let (prefix, columns) = contents.split_at(PREFIX);
                let mut payload = prefix.to_vec();
                payload.extend(zstd::bulk::compress(columns, 1).expect("room"));
                frame(&mut file, 2, true, columns.len(), &payload);
            }
            _ => frame(&mut file, *kind, false, contents.len(), contents),
        }
        rest = next;
    }
    let folder = Folder::here();
    folder.put("7.mtr", &file);
    analyse(folder.path());
});
