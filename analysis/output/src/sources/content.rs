//! Reads files that look like source code, and no others.

use std::fs::Metadata;
use std::path::{Path, PathBuf};

use memtrace_trace::file::untrusted;

/// The maximum size of a source file, in bytes. Real Python sources are smaller.
const MAX_FILE: u64 = 16 << 20;
/// The extensions of source files in languages that stacks have frames of.
const EXTENSIONS: [&str; 28] = [
    "c", "c++", "cc", "cpp", "cu", "cuh", "cxx", "f", "f90", "go", "h", "hh", "hip", "hpp", "hxx", "inc", "inl", "ipp",
    "jl", "mojo", "pxd", "pxi", "py", "pyi", "pyw", "pyx", "rs", "zig",
];

/// Why a file is not quoted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum NoSource {
    /// The file cannot be read, or it is not the file that the program ran.
    MissingOrChanged,
    /// The run does not have the hash of the file, so it may come from somebody who does not know the content.
    Unproven,
    /// The file does not look like source code.
    NotSource,
}

/// The path of a file that a frame names. `None` for code without a file, such as `<string>`.
pub(super) fn resolve(filename: &str, directory: Option<&Path>) -> Option<PathBuf> {
    if filename.is_empty() || filename.starts_with('<') {
        return None;
    }
    let path = Path::new(filename);
    if path.is_relative() { Some(directory?.join(path)) } else { Some(path.to_owned()) }
}

/// Reads a regular file that looks like source code: by its name, by the name of the file that a link leads to, and by
/// its content.
pub(super) fn read(path: &Path) -> Result<(Vec<u8>, Metadata), NoSource> {
    if !may_be_source(path) {
        return Err(NoSource::NotSource);
    }
    let unreadable = |_| NoSource::MissingOrChanged;
    let real = path.canonicalize().map_err(unreadable)?;
    if !may_be_source(&real) {
        return Err(NoSource::NotSource);
    }
    let file = untrusted::open(&real).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    let content = untrusted::read(&file, MAX_FILE).map_err(unreadable)?;
    let is_source = is_text(&content) && (real.extension().is_some() || is_python_script(&content));
    if is_source { Ok((content, metadata)) } else { Err(NoSource::NotSource) }
}

/// Whether a file of this name may be source code. A script has no extension.
fn may_be_source(path: &Path) -> bool {
    match path.extension() {
        Some(extension) => {
            extension.to_str().is_some_and(|extension| EXTENSIONS.contains(&&*extension.to_ascii_lowercase()))
        }
        None => true,
    }
}

/// Whether there are no control characters except those that source code has: tab, line feed, form feed and carriage
/// return.
fn is_text(content: &[u8]) -> bool {
    content.iter().all(|byte| !byte.is_ascii_control() || matches!(byte, b'\t' | b'\n' | 0x0c | b'\r'))
}

fn is_python_script(content: &[u8]) -> bool {
    let first = content.split(|byte| *byte == b'\n').next().unwrap_or_default();
    first.starts_with(b"#!") && first.windows(6).any(|word| word == b"python")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_source_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let key = b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n";
        let read_as = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            read(&path).map(|(content, _)| content)
        };
        for (name, content) in [
            ("model.py", &b"x = 1\n\x0c\tdef f():\r\n"[..]),
            ("kernel.CU", b"__global__ void k();\n"),
            ("latin.py", b"# \xe9\n"),
            ("train", b"#!/usr/bin/env python3\nimport torch\n"),
        ] {
            assert_eq!(read_as(name, content).as_deref(), Ok(content), "{name}");
        }
        for (name, content) in [
            ("id_rsa", &key[..]),
            (".env", b"TOKEN=1\n"),
            ("notes.txt", b"x = 1\n"),
            ("server.pem", key),
            ("script", b"#!/bin/sh\npython\n"),
            ("binary.py", b"x\0y\n"),
            ("escape.py", b"x\x1b[2J\n"),
        ] {
            assert_eq!(read_as(name, content), Err(NoSource::NotSource), "{name}");
        }
        // The name of a link says nothing about the file.
        std::os::unix::fs::symlink(dir.path().join("server.pem"), dir.path().join("link.py")).unwrap();
        assert_eq!(read(&dir.path().join("link.py")).unwrap_err(), NoSource::NotSource);
        std::os::unix::fs::symlink(dir.path().join("model.py"), dir.path().join("good.py")).unwrap();
        assert!(read(&dir.path().join("good.py")).is_ok());
        assert_eq!(read(&dir.path().join("missing.py")).unwrap_err(), NoSource::MissingOrChanged);
        std::fs::create_dir(dir.path().join("folder.py")).unwrap();
        assert_eq!(read(&dir.path().join("folder.py")).unwrap_err(), NoSource::MissingOrChanged);
    }

    #[test]
    fn names_are_resolved() {
        let directory = Some(Path::new("/work"));
        assert_eq!(resolve("a/b.py", directory), Some("/work/a/b.py".into()));
        assert_eq!(resolve("/a/b.py", None), Some("/a/b.py".into()));
        assert_eq!((resolve("b.py", None), resolve("<string>", directory), resolve("", directory)), (None, None, None));
    }
}
