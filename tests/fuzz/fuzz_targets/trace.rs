//! A trace file, byte for byte, through the reader and the whole analysis.
//!
//! Checksums of otherwise valid frames are corrected first. Otherwise the fuzzer would reach little beyond the checksum
//! test.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_fuzz::{Folder, analyse};

const HEADER: usize = 24;

/// A frame header in `trace/FORMAT.md`: sync, kind, flags, 2 bytes, stored and raw length, payload checksum, header
/// checksum.
fn fix_checksums(file: &mut [u8]) {
    let mut at = 16;
    while at + HEADER <= file.len() {
        if &file[at..at + 4] != b"MTRF" {
            at += 1;
            continue;
        }
        let length = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap()) as usize;
        let Some(payload) = file.get(at + HEADER..).and_then(|rest| rest.get(..length)) else {
            at += 4;
            continue;
        };
        let crc = crc32fast::hash(payload);
        file[at + 16..at + 20].copy_from_slice(&crc.to_le_bytes());
        let own = crc32fast::hash(&file[at..at + 20]);
        file[at + 20..at + 24].copy_from_slice(&own.to_le_bytes());
        at += HEADER + length;
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((has_fixed_checksums, file)) = data.split_first() else { return };
    let mut file = file.to_vec();
    if has_fixed_checksums & 1 != 0 {
        fix_checksums(&mut file);
    }
    let folder = Folder::here();
    folder.put("7.mtr", &file);
    analyse(folder.path());
});
