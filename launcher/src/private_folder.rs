//! Folders that only this user can change, and their files: everything that memtrace writes outside of run folders and
//! of the files that a user names.
//!
//! Code is loaded from some of them, also by root. So each is entered by descriptor, name by name from a folder that no
//! other user can replace, and no link is followed. A folder that is created has an explicit mode, whatever the umask.
//! An existing one is used only if it belongs to this user and no other user can write to it.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use memtrace_trace::file::untrusted;
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::process::geteuid;

use crate::session;

/// The permission bits that let other users write.
const OTHERS_WRITE: u32 = 0o022;

/// The prefixes of memtrace's temporary folders: of the script of an attach, of what `memtrace doctor` runs, and of the
/// first runs of `memtrace dry-run --bounds`.
pub(crate) const ATTACH_PREFIX: &str = "memtrace-attach";
pub(crate) const DOCTOR_PREFIX: &str = "memtrace-doctor";
pub(crate) const BOUNDS_PREFIX: &str = "memtrace-bounds";

/// Who may read a folder and its files. Only this user and root can write to them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Readers {
    /// This user.
    Owner,
    /// Every user.
    All,
}

impl Readers {
    /// Who must be able to read code that the command loads: all users for root, because the command may change its
    /// user.
    pub(crate) fn of_code() -> Readers {
        if geteuid().is_root() { Readers::All } else { Readers::Owner }
    }

    fn folder_mode(self) -> Mode {
        Mode::from_raw_mode(if self == Readers::All { 0o755 } else { 0o700 })
    }

    fn file_mode(self) -> Mode {
        Mode::from_raw_mode(if self == Readers::All { 0o644 } else { 0o600 })
    }
}

/// An open folder that only this user can change.
#[derive(Debug)]
pub(crate) struct PrivateFolder {
    path: PathBuf,
    dir: OwnedFd,
    readers: Readers,
}

impl PrivateFolder {
    /// Enters the folder `names`, one in the other, below `parent`. Creates what is missing of both.
    ///
    /// # Errors
    ///
    /// If other users can replace a folder on the way to it or write to it, or if it cannot be created.
    pub(crate) fn enter(parent: &Path, names: &[&str], readers: Readers) -> anyhow::Result<PrivateFolder> {
        check_path(parent)?;
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        check_path(parent)?;
        let dir = rustix::fs::open(parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let parent = PrivateFolder { path: parent.to_owned(), dir, readers };
        names.iter().try_fold(parent, |folder, name| folder.subfolder(name))
    }

    /// A new folder in the system's folder for temporary files, or else in the current folder.
    ///
    /// # Errors
    ///
    /// If it can be created in neither.
    pub(crate) fn temporary(prefix: &str) -> anyhow::Result<TemporaryFolder> {
        PrivateFolder::temporary_in(&[&std::env::temp_dir(), Path::new(".")], prefix)
    }

    /// A new folder in the first of `parents` that is safe. It is removed with everything in it when the value is
    /// dropped.
    ///
    /// # Errors
    ///
    /// Those of the first one, if it can be created in none.
    pub(crate) fn temporary_in(parents: &[&Path], prefix: &str) -> anyhow::Result<TemporaryFolder> {
        let name = format!("{prefix}-{}", session::token()?);
        let new = |parent: &Path| {
            let folder = PrivateFolder::enter(&std::path::absolute(parent)?, &[&name], Readers::Owner)?;
            Ok(TemporaryFolder { folder, is_kept: false })
        };
        let mut first_error = None;
        for parent in parents {
            match new(parent) {
                Ok(folder) => return Ok(folder),
                Err(error) => _ = first_error.get_or_insert(error),
            }
        }
        Err(first_error.unwrap_or_else(|| anyhow!("there is no folder for it")))
    }

    /// Enters a folder in this one. Creates it if it is missing.
    ///
    /// # Errors
    ///
    /// If it belongs to another user, if others can write to it, or if it cannot be created.
    pub(crate) fn subfolder(&self, name: &str) -> anyhow::Result<PrivateFolder> {
        let path = self.path.join(name);
        let mode = self.readers.folder_mode();
        let is_new = match rustix::fs::mkdirat(&self.dir, name, mode) {
            Ok(()) => true,
            Err(rustix::io::Errno::EXIST) => false,
            Err(error) => {
                return Err(io::Error::from(error)).with_context(|| format!("cannot create {}", path.display()));
            }
        };
        let (folder, metadata) = self.open_folder(name).with_context(|| format!("cannot use {}", path.display()))?;
        // The umask may have removed bits of a new folder. Older versions created folders of root that only root reads.
        if is_new || metadata.mode() & mode.as_raw_mode() != mode.as_raw_mode() {
            rustix::fs::fchmod(&folder.dir, mode).map_err(io::Error::from)?;
        }
        Ok(folder)
    }

    /// A folder in this one that exists and that only this user can change.
    pub(crate) fn existing(&self, name: &str) -> Option<PrivateFolder> {
        self.open_folder(name).ok().map(|(folder, _)| folder)
    }

    /// Opens a folder in this one, and checks who can change it.
    fn open_folder(&self, name: &str) -> anyhow::Result<(PrivateFolder, Metadata)> {
        let dir = File::from(self.open_entry(name, OFlags::DIRECTORY)?);
        let metadata = dir.metadata()?;
        check_owner(&metadata)?;
        Ok((PrivateFolder { path: self.path.join(name), dir: dir.into(), readers: self.readers }, metadata))
    }

    /// Whether a process has this folder at the same path, and not one of its own.
    pub(crate) fn is_visible(&self, pid: u32) -> bool {
        let theirs = Path::new(&format!("/proc/{pid}/root")).join(self.path.strip_prefix("/").unwrap_or(&self.path));
        let seen = std::fs::symlink_metadata(theirs).map(|folder| (folder.dev(), folder.ino()));
        let ours = rustix::fs::fstat(&self.dir).map(|folder| (folder.st_dev, folder.st_ino));
        ours.is_ok_and(|ours| seen.is_ok_and(|seen| seen == ours))
    }

    /// The path of the folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file in the folder for reading.
    ///
    /// # Errors
    ///
    /// If it is not a regular file of this user that only this user can change, or cannot be opened.
    pub(crate) fn open(&self, name: &str) -> anyhow::Result<File> {
        let file = File::from(self.open_entry(name, OFlags::from_bits_retain(untrusted::OPEN_FLAGS as u32))?);
        check_owner(&untrusted::check(&file)?)?;
        Ok(file)
    }

    /// The content of a file in the folder.
    ///
    /// # Errors
    ///
    /// As for [`PrivateFolder::open`], or if it has more than `limit` bytes.
    pub(crate) fn read(&self, name: &str, limit: u64) -> anyhow::Result<Vec<u8>> {
        Ok(untrusted::read(&self.open(name)?, limit)?)
    }

    /// Whether a file in the folder has this content.
    pub(crate) fn holds(&self, name: &str, content: &[u8]) -> bool {
        self.read(name, content.len() as u64).is_ok_and(|bytes| bytes == content)
    }

    /// Creates a new file for writing.
    ///
    /// # Errors
    ///
    /// If the name exists, or the file cannot be created.
    pub(crate) fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = self.readers.file_mode();
        let file = rustix::fs::openat(&self.dir, name, flags, mode)?;
        // The umask may have removed bits.
        rustix::fs::fchmod(&file, mode)?;
        Ok(file.into())
    }

    /// Writes a file beside its name and then renames it, so a program that has it open or mapped keeps the old one.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub(crate) fn replace(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let partial = format!(".{}", session::token().map_err(io::Error::other)?);
        let mut file = self.create(&partial)?;
        let written =
            file.write_all(content).and_then(|()| Ok(rustix::fs::renameat(&self.dir, &partial, &self.dir, name)?));
        if written.is_err() {
            rustix::fs::unlinkat(&self.dir, &partial, AtFlags::empty()).ok();
        }
        written
    }

    /// Creates a link in the folder, unless its name exists.
    ///
    /// # Errors
    ///
    /// If it cannot be created.
    pub(crate) fn link(&self, name: &str, target: &str) -> io::Result<()> {
        match rustix::fs::symlinkat(target, &self.dir, name) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The names of what is in the folder, as far as they are UTF-8.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = Dir::read_from(&self.dir).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| Some(entry.file_name().to_str().ok()?.to_owned()));
        names.filter(|name| name != "." && name != "..").collect()
    }

    /// Removes a folder in this one with everything in it. No link is followed.
    ///
    /// # Errors
    ///
    /// If it cannot be removed.
    pub(crate) fn remove_folder(&self, name: &str) -> io::Result<()> {
        // Nobody but this user can replace what the path names.
        std::fs::remove_dir_all(self.path.join(name))
    }

    /// Opens an entry for reading, without following a link.
    fn open_entry(&self, name: impl AsRef<OsStr>, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | flags;
        let opened = rustix::fs::openat(self.dir.as_fd(), name.as_ref(), flags, Mode::empty());
        opened.map_err(|error| match error {
            rustix::io::Errno::LOOP => io::Error::other("it is a symbolic link"),
            error => error.into(),
        })
    }
}

/// A folder that is removed with everything in it when this value is dropped.
#[derive(Debug)]
pub(crate) struct TemporaryFolder {
    folder: PrivateFolder,
    is_kept: bool,
}

impl TemporaryFolder {
    /// Leaves the folder where it is, because a process may still read from it. Nobody else can take its place then.
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl std::ops::Deref for TemporaryFolder {
    type Target = PrivateFolder;

    fn deref(&self) -> &PrivateFolder {
        &self.folder
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if !self.is_kept {
            // The folder that it is in is sticky, or nobody else can write to it.
            std::fs::remove_dir_all(self.folder.path()).ok();
        }
    }
}

/// Checks that a file or folder belongs to this user and that other users cannot write to it.
fn check_owner(metadata: &Metadata) -> anyhow::Result<()> {
    ensure!(metadata.uid() == geteuid().as_raw(), "it belongs to another user");
    ensure!(metadata.mode() & OTHERS_WRITE == 0, "other users can write to it");
    Ok(())
}

/// Checks that only this user and root can replace what is in `folder`, and each folder on the way to it. The targets
/// of symbolic links on the way are checked too.
fn check_path(folder: &Path) -> anyhow::Result<()> {
    let uid = geteuid().as_raw();
    let real = folder.ancestors().find_map(|ancestor| ancestor.canonicalize().ok());
    for ancestor in folder.ancestors().chain(real.iter().flat_map(|real| real.ancestors())) {
        let Ok(metadata) = std::fs::metadata(ancestor) else { continue };
        let is_trusted = metadata.uid() == uid || metadata.uid() == 0;
        let is_closed = metadata.mode() & OTHERS_WRITE == 0 || metadata.mode() & libc::S_ISVTX != 0;
        ensure!(is_trusted && is_closed, "other users can write to {}", ancestor.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, create_dir, metadata, read_to_string, set_permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn mode(path: &Path) -> u32 {
        metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn folders_and_files_have_explicit_modes() {
        let dir = tempfile::tempdir().unwrap();
        let folder = PrivateFolder::enter(&dir.path().join("cache"), &["a", "b"], Readers::Owner).unwrap();
        folder.replace("file", b"1").unwrap();
        folder.replace("file", b"12").unwrap();
        assert_eq!(folder.read("file", 2).unwrap(), b"12");
        assert!(folder.read("file", 1).is_err());
        assert!(folder.holds("file", b"12") && !folder.holds("file", b"1") && !folder.holds("file", b"123"));
        assert_eq!((mode(folder.path()), mode(&folder.path().join("file"))), (0o700, 0o600));
        assert_eq!(mode(&dir.path().join("cache")), 0o700);
        let open = PrivateFolder::enter(dir.path(), &["open"], Readers::All).unwrap();
        open.replace("file", b"1").unwrap();
        assert_eq!((mode(open.path()), mode(&open.path().join("file"))), (0o755, 0o644));
        assert!(folder.create("file").is_err(), "it exists");
    }

    #[test]
    fn what_other_users_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let enter = |parent: &Path, name: &str| PrivateFolder::enter(parent, &[name], Readers::Owner);
        let text = |result: anyhow::Result<PrivateFolder>| format!("{:#}", result.unwrap_err());
        let open = dir.path().join("open");
        create_dir(&open).unwrap();
        set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        assert!(text(enter(dir.path(), "open")).contains("other users can write to it"));
        assert!(text(enter(&open, "new")).contains("other users can write to"));
        assert!(!open.join("new").exists());
        // A link of this user leads into a folder that other users can replace.
        create_dir(open.join("inside")).unwrap();
        symlink(open.join("inside"), dir.path().join("way")).unwrap();
        assert!(enter(&dir.path().join("way"), "new").is_err());
        // No link is followed.
        create_dir(dir.path().join("real")).unwrap();
        symlink(dir.path().join("real"), dir.path().join("link")).unwrap();
        assert!(enter(dir.path(), "link").is_err());
        let folder = enter(dir.path(), "folder").unwrap();
        std::fs::write(dir.path().join("other"), "x").unwrap();
        symlink(dir.path().join("other"), folder.path().join("file")).unwrap();
        assert!(folder.open("file").unwrap_err().to_string().contains("symbolic link"));
        folder.replace("file", b"y").unwrap();
        assert_eq!(read_to_string(dir.path().join("other")).unwrap(), "x");
        set_permissions(folder.path().join("file"), Permissions::from_mode(0o666)).unwrap();
        assert!(folder.open("file").unwrap_err().to_string().contains("other users can write"));
        rustix::fs::mknodat(&folder.dir, "pipe", rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(folder.open("pipe").is_err());
        // A sticky folder of root is one where nobody replaces the files of others.
        assert!(check_path(Path::new("/tmp")).is_ok());
    }

    #[test]
    fn a_temporary_folder_is_removed() {
        let folder = PrivateFolder::temporary("memtrace-test").unwrap();
        let path = folder.path().to_owned();
        folder.replace("file", b"1").unwrap();
        assert_eq!(mode(&path), 0o700);
        assert!(folder.is_visible(std::process::id()));
        drop(folder);
        assert!(!path.exists());
        let open = tempfile::tempdir().unwrap();
        set_permissions(open.path(), Permissions::from_mode(0o777)).unwrap();
        let closed = tempfile::tempdir().unwrap();
        let folder = PrivateFolder::temporary_in(&[open.path(), closed.path()], "x").unwrap();
        assert!(folder.path().starts_with(closed.path()));
        folder.keep();
        assert_eq!(std::fs::read_dir(closed.path()).unwrap().count(), 1);
    }
}
