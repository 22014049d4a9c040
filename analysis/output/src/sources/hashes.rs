//! `sources.json` of a run folder: the hashes of the source files that the run names, as they were on the machine that
//! recorded it when the run ended.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use memtrace_trace::file::untrusted;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::content::{read, resolve};
use memtrace_input::load::Process;
use memtrace_input::{RunFolder, printable};

/// The name of the file in the run folder.
pub const SOURCES_FILE: &str = "sources.json";
/// The format version. It is raised when a field changes its name or meaning.
const VERSION: u32 = 1;
/// The largest file that is read, in bytes. [`MAX_HASHED_FILES`] with long paths take less.
const MAX_FILE_SIZE: u64 = 32 << 20;
/// At most this many files are hashed. A program of this size is unknown; a hostile one can name any number.
const MAX_HASHED_FILES: usize = 8192;
/// At most this many bytes are hashed: less than a second of work.
const MAX_HASHED_BYTES: u64 = 512 << 20;

/// The hashes of source files, by path.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SourceHashes {
    version: u32,
    /// The SHA-256 of each file's content in hexadecimal digits, by its absolute path.
    files: BTreeMap<String, String>,
    /// The number of files that were not hashed, because the run names too many or too large ones.
    #[serde(default)]
    left_out: u64,
}

impl SourceHashes {
    /// Hashes the source files that these processes' frames name, on the machine that recorded them. `is_unchanged`
    /// says whether a file is still the one that a process ran.
    pub(super) fn of_frames<'a>(
        processes: impl IntoIterator<Item = &'a Process>,
        is_unchanged: impl Fn(&Process, &std::fs::Metadata) -> bool,
    ) -> SourceHashes {
        let mut hashes = SourceHashes { version: VERSION, ..SourceHashes::default() };
        let mut seen: BTreeSet<PathBuf> = BTreeSet::new();
        let mut bytes = 0;
        for process in processes {
            let names: BTreeSet<&str> = process.definitions().frames.iter().map(|frame| &*frame.filename).collect();
            for path in names.into_iter().filter_map(|name| resolve(name, process.directory())) {
                if !seen.insert(path.clone()) {
                    continue;
                }
                if hashes.files.len() >= MAX_HASHED_FILES || bytes >= MAX_HASHED_BYTES {
                    hashes.left_out += 1;
                    continue;
                }
                let Ok((content, metadata)) = read(&path) else { continue };
                bytes += content.len() as u64;
                if let Some(path) = path.to_str().filter(|_| is_unchanged(process, &metadata)) {
                    hashes.files.insert(path.to_owned(), digest(&content));
                }
            }
        }
        hashes
    }

    /// Reads the file of a run folder. `Ok(None)` if there is none.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is of another version.
    pub fn read(folder: &RunFolder) -> io::Result<Option<SourceHashes>> {
        let text = match folder.open_file(SOURCES_FILE).and_then(|file| untrusted::read(&file, MAX_FILE_SIZE)) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let hashes: SourceHashes = serde_json::from_slice(&text)?;
        if hashes.version == VERSION { Ok(Some(hashes)) } else { Err(io::Error::other("its version is unknown")) }
    }

    /// Whether the run names no source file.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.left_out == 0
    }

    /// The content of the file.
    pub fn to_json(&self) -> String {
        printable::json(serde_json::to_string_pretty(self).unwrap_or_default() + "\n")
    }

    /// Whether the file at this path has a hash.
    pub(super) fn has(&self, path: &Path) -> bool {
        path.to_str().is_some_and(|path| self.files.contains_key(path))
    }

    /// Whether the file at this path had this content.
    pub(super) fn proves(&self, path: &Path, content: &[u8]) -> bool {
        path.to_str().and_then(|path| self.files.get(path)).is_some_and(|hash| *hash == digest(content))
    }
}

fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_sha_256() {
        // FIPS 180-2, appendix B.1.
        assert_eq!(digest(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn the_file_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path()).unwrap();
        assert!(SourceHashes::read(&folder).unwrap().is_none());
        let files = BTreeMap::from([("/a\u{9b}.py".to_owned(), digest(b"x"))]);
        let hashes = SourceHashes { version: VERSION, files, left_out: 2 };
        std::fs::write(dir.path().join(SOURCES_FILE), hashes.to_json()).unwrap();
        let read = SourceHashes::read(&folder).unwrap().unwrap();
        assert_eq!(read, hashes);
        let path = Path::new("/a\u{9b}.py");
        assert!(read.has(path) && read.proves(path, b"x") && !read.proves(path, b"y"));
        assert!(!read.has(Path::new("/b.py")) && !read.proves(Path::new("/b.py"), b"x"));
        for damaged in ["", "[]", "{\"version\": 2, \"files\": {}}", "{\"version\": 1}"] {
            std::fs::write(dir.path().join(SOURCES_FILE), damaged).unwrap();
            assert!(SourceHashes::read(&folder).is_err(), "{damaged}");
        }
    }
}
