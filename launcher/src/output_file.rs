//! A file that the user named. It gets its name when it is complete, so neither a full disk nor an error leaves a part
//! of it there, and an older file of that name stays until then.
//!
//! Three kinds of names have no file beside them and are written directly: pipes and devices (`-o /dev/stdout`), files
//! that another process has open for this one (`/proc/self/fd/3`), and files in a folder into which this user may not
//! write.

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::{Builder, NamedTempFile, TempPath};

/// The most links that lead from a name to its file, as Linux has it.
const MAX_LINKS: usize = 40;
/// The permissions of a new file, as of all that memtrace creates (`inherited`).
const NEW_MODE: u32 = 0o600;
/// The permissions that a file keeps when it is replaced.
const KEPT_MODE: u32 = 0o777;

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
    file: File,
    /// The file beside, and the place that it gets. `None` if the place itself is written.
    beside: Option<(TempPath, PathBuf)>,
}

impl OutputFile {
    /// Begins to write the file that `path` names.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, or an older one may not be written.
    pub(crate) fn create(path: &Path) -> anyhow::Result<OutputFile> {
        let created = create(path).with_context(|| format!("cannot create {}", path.display()));
        created.map(|(file, beside)| OutputFile { path: path.to_owned(), file, beside })
    }

    /// Writes the file that `path` names.
    ///
    /// # Errors
    ///
    /// If it cannot be created or written.
    pub(crate) fn write(path: &Path, content: &[u8]) -> anyhow::Result<()> {
        let mut new = OutputFile::create(path)?;
        new.file.write_all(content).with_context(|| cannot_write(path))?;
        new.commit()
    }

    /// The file to write to.
    pub(crate) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    ///
    /// If the file system did not store it, which some say only when the file is closed, or refuses the name.
    pub(crate) fn commit(self) -> anyhow::Result<()> {
        close(self.file).with_context(|| cannot_write(&self.path))?;
        if let Some((file, place)) = self.beside {
            file.persist(place).map_err(|e| e.error).with_context(|| cannot_write(&self.path))?;
        }
        Ok(())
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

type Beside = Option<(TempPath, PathBuf)>;

fn create(path: &Path) -> io::Result<(File, Beside)> {
    let older = match std::fs::metadata(path) {
        Ok(older) => Some(older),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    if older.as_ref().is_some_and(|older| !older.is_file()) {
        return Ok((File::create(path)?, None));
    }
    let Some(place) = place(path)? else { return Ok((File::create(path)?, None)) };
    if older.is_some() {
        // A file that may not be written may not be replaced either.
        OpenOptions::new().write(true).open(&place)?;
    }
    match beside(&place, older.as_ref()) {
        Ok(new) => {
            let (file, temporary) = new.into_parts();
            Ok((file, Some((temporary, place))))
        }
        Err(e)
            if older.is_some() && matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) =>
        {
            Ok((File::create(path)?, None))
        }
        Err(e) => Err(e),
    }
}

/// The place of the file that a name leads to through links. `None` if that is not the place of a file: the kernel's
/// links to open files lead nowhere else.
fn place(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..=MAX_LINKS {
        let Some(name) = path.file_name() else { return Err(ErrorKind::IsADirectory.into()) };
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let folder = folder.canonicalize()?;
        if folder.starts_with("/proc") {
            return Ok(None);
        }
        let place = folder.join(name);
        match std::fs::read_link(&place) {
            Ok(target) => path = folder.join(target),
            Err(_) => return Ok(Some(place)),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// A new file beside the place of a file, with the owner and the permissions of the older file.
fn beside(place: &Path, older: Option<&Metadata>) -> io::Result<NamedTempFile> {
    let folder = place.parent().unwrap_or(Path::new("/"));
    let mut builder = Builder::new();
    builder.prefix(".memtrace-").suffix(".part").permissions(Permissions::from_mode(NEW_MODE));
    let new = builder.tempfile_in(folder)?;
    if let Some(older) = older {
        let ours = new.as_file().metadata()?;
        if (ours.uid(), ours.gid()) != (older.uid(), older.gid()) {
            fchown(new.as_file(), Some(older.uid()), Some(older.gid()))?;
        }
        new.as_file().set_permissions(Permissions::from_mode(older.mode() & KEPT_MODE))?;
    }
    Ok(new)
}

/// Closes a file, and returns what the file system says then: a network file system may write it only now.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and this function owns it.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()).or_else(|e| match e.kind() {
            // Linux has closed it nevertheless.
            ErrorKind::Interrupted => Ok(()),
            _ => Err(e),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_gets_its_name_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut new = OutputFile::create(&path).unwrap();
        new.file().write_all(b"a part").unwrap();
        assert!(!path.exists());
        drop(new);
        assert_eq!(names(folder.path()), [""; 0], "an error leaves nothing");
        OutputFile::write(&path, b"old").unwrap();
        let mut new = OutputFile::create(&path).unwrap();
        new.file().write_all(b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        new.commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["file"]);
        assert_eq!(path.metadata().unwrap().mode() & 0o077, 0, "it is this user's alone");
    }

    #[test]
    fn an_older_file_keeps_its_permissions_and_links_lead_to_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("elsewhere")).unwrap();
        std::fs::write(path("elsewhere/file"), b"old").unwrap();
        std::fs::set_permissions(path("elsewhere/file"), Permissions::from_mode(0o640)).unwrap();
        symlink("elsewhere", path("folder")).unwrap();
        symlink("folder/file", path("link")).unwrap();
        OutputFile::write(&path("link"), b"new").unwrap();
        assert_eq!(std::fs::read(path("elsewhere/file")).unwrap(), b"new");
        assert_eq!(path("elsewhere/file").metadata().unwrap().mode() & 0o777, 0o640);
        assert!(path("link").symlink_metadata().unwrap().is_symlink());
        symlink("folder/absent", path("dangling")).unwrap();
        OutputFile::write(&path("dangling"), b"new").unwrap();
        assert_eq!(std::fs::read(path("elsewhere/absent")).unwrap(), b"new");
        symlink("circle", path("circle")).unwrap();
        assert!(OutputFile::create(&path("circle")).is_err());
        assert!(OutputFile::create(&path("folder")).is_err());
        assert!(OutputFile::create(&path("no/such/folder")).is_err());
    }

    #[test]
    fn what_another_process_reads_is_written_directly() {
        OutputFile::write(Path::new("/dev/null"), b"new").unwrap();
        let full = OutputFile::write(Path::new("/dev/full"), b"new").unwrap_err();
        assert!(format!("{full:#}").starts_with("cannot write /dev/full: "), "{full:#}");
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("file")).unwrap();
        for path in [format!("/proc/self/fd/{}", file.as_raw_fd()), format!("/dev/fd/{}", file.as_raw_fd())] {
            OutputFile::write(Path::new(&path), path.as_bytes()).unwrap();
            assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), path.as_bytes());
            assert_eq!(file.metadata().unwrap().len(), path.len() as u64, "the same file");
        }
    }
}
