//! `memtrace doctor --clean`: the folders that memtrace has written outside of run folders, and their removal.
//!
//! These are copies of the preloaded library with the simulated CUDA libraries beside them, and temporary folders that
//! a killed memtrace has left. Runs, and files that the user named, are not among them.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memtrace_analysis::report::size_text;
use rustix::process::geteuid;

use crate::library::{self, LibraryCopy};
use crate::output::{self, Printed};
use crate::private_folder::{ATTACH_PREFIX, BOUNDS_PREFIX, DOCTOR_PREFIX};
use crate::session;

/// The beginnings of the names of temporary folders, which [`PrivateFolder::temporary_in`] makes.
///
/// [`PrivateFolder::temporary_in`]: crate::private_folder::PrivateFolder::temporary_in
const TEMPORARY: [&str; 3] = [ATTACH_PREFIX, DOCTOR_PREFIX, BOUNDS_PREFIX];
/// The age from which on a temporary folder belongs to no running memtrace.
const LEFT: Duration = Duration::from_secs(24 * 3600);

/// A folder that memtrace has written.
enum Written {
    /// A copy of the library of one build.
    Copy(LibraryCopy),
    /// A temporary folder that nothing has removed.
    Temporary(PathBuf),
}

impl Written {
    fn path(&self) -> PathBuf {
        match self {
            Written::Copy(copy) => copy.path(),
            Written::Temporary(path) => path.clone(),
        }
    }

    fn is_in_use(&self) -> bool {
        matches!(self, Written::Copy(copy) if copy.is_in_use())
    }

    fn remove(&self) -> anyhow::Result<()> {
        match self {
            Written::Copy(copy) => copy.remove(),
            Written::Temporary(path) => Ok(fs::remove_dir_all(path)?),
        }
    }
}

/// Lists these folders, or removes them. A copy that a running memtrace uses stays. Returns whether each folder that
/// was to be removed is gone.
pub(crate) fn clean(removes: bool) -> anyhow::Result<bool> {
    let folders: Vec<Written> = library::copies()
        .into_iter()
        .map(Written::Copy)
        .chain(temporary_folders(&std::env::temp_dir()).into_iter().map(Written::Temporary))
        .collect();
    let mut text = String::new();
    let mut failed = 0;
    for folder in &folders {
        let path = folder.path();
        let size = size_text(size_of(&path));
        let state = match (folder.is_in_use(), removes) {
            (true, _) => "  in use".to_owned(),
            (false, false) => String::new(),
            (false, true) => match folder.remove() {
                Ok(()) => "  removed".to_owned(),
                Err(error) => {
                    failed += 1;
                    format!("  cannot remove it: {error:#}")
                }
            },
        };
        let _ = writeln!(text, "{size:>10}  {}{state}", path.display());
    }
    match (folders.is_empty(), removes) {
        (true, _) => text.push_str("memtrace has written nothing outside of run folders.\n"),
        (false, false) => text.push_str("memtrace doctor --clean --yes removes these folders.\n"),
        (false, true) => {}
    }
    text.push_str("Run folders and Jupyter kernels stay: delete a run folder, or run memtrace kernel remove.\n");
    output::print(Printed::Text(&text))?;
    Ok(failed == 0)
}

/// The temporary folders of this user that are older than [`LEFT`].
fn temporary_folders(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let is_left = |entry: &fs::DirEntry| {
        let is_named = entry.file_name().to_str().is_some_and(is_temporary_name);
        // The entry itself: a link is not followed.
        let metadata = entry.metadata().ok().filter(|_| is_named);
        metadata.is_some_and(|meta| {
            let age = meta.modified().ok().and_then(|modified| modified.elapsed().ok());
            meta.is_dir() && meta.uid() == geteuid().as_raw() && age.is_some_and(|age| age > LEFT)
        })
    };
    let mut found: Vec<PathBuf> = entries.filter(is_left).map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn is_temporary_name(name: &str) -> bool {
    let token = TEMPORARY.iter().find_map(|prefix| name.strip_prefix(prefix)?.strip_prefix('-'));
    token.is_some_and(session::is_token)
}

/// The bytes of the files in a folder. Links are not followed.
fn size_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size_of(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn only_old_folders_with_a_token_are_left_over() {
        let dir = tempfile::tempdir().unwrap();
        let token = "0123456789abcdef0123456789abcdef";
        let new = |name: &str, hours: u64| {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            let time = SystemTime::now() - Duration::from_secs(hours * 3600);
            fs::File::open(&path).unwrap().set_modified(time).unwrap();
            path
        };
        let old = new(&format!("memtrace-doctor-{token}"), 25);
        new(&format!("memtrace-attach-{token}"), 23);
        new("memtrace-doctor-mine", 25);
        new(&format!("memtrace-run-{token}"), 25);
        std::os::unix::fs::symlink(&old, dir.path().join(format!("memtrace-attach-{}", &token.replace('0', "f"))))
            .unwrap();
        assert_eq!(temporary_folders(dir.path()), [old]);
    }
}
