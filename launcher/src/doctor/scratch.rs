//! A temporary folder for doctor, which is removed with everything in it.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Owns the path of the temporary folder. Drop removes the folder.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    /// Creates a new folder in the system's temporary directory, or else in the current directory. Fails when neither
    /// works.
    pub(super) fn new() -> io::Result<Scratch> {
        let name = format!("memtrace-doctor-{}-{:x}", std::process::id(), crate::host::epoch_ns());
        let make = |base: PathBuf| {
            let path = std::path::absolute(base)?.join(&name);
            DirBuilder::new().mode(0o700).create(&path).map(|()| Scratch(path))
        };
        make(std::env::temp_dir()).or_else(|e| make(PathBuf::from(".")).map_err(|_| e))
    }

    /// The folder's path.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_removed() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().to_owned();
        std::fs::create_dir_all(path.join("a/b")).unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
