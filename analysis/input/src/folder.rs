//! The folder of a run. Everything in it is accessed through one descriptor, never again through the folder's path. If
//! someone moves the folder away and puts something else (such as a link) in its place, nothing is read from there or
//! written there.
//!
//! Every written file is new and readable only by its owner, and gets its final name when it is complete. Only regular
//! files are read, never links.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use memtrace_trace::file::untrusted;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};

/// An open run folder.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    dir: OwnedFd,
}

impl RunFolder {
    /// Opens an existing folder.
    pub fn open(path: &Path) -> io::Result<RunFolder> {
        let dir = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(RunFolder { path: path.to_owned(), dir })
    }

    /// Opens a folder in this one. Fails for links.
    pub fn subfolder(&self, name: impl AsRef<Path>) -> io::Result<RunFolder> {
        let name = entry_name(name.as_ref())?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
        Ok(RunFolder { path: self.path.join(name), dir })
    }

    /// The path by which it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The descriptor of the folder.
    pub fn descriptor(&self) -> impl AsFd {
        self.dir.as_fd()
    }

    /// The owner and the permissions of the folder.
    pub fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.dir)?)
    }

    /// The names of the files in the folder, sorted.
    pub fn file_names(&self) -> io::Result<Vec<OsString>> {
        let mut names = self.any_file_names(usize::MAX)?;
        names.sort();
        Ok(names)
    }

    /// The names of at most `limit` files in the folder, in any order. A folder that a program writes into can have any
    /// number of them.
    pub fn any_file_names(&self, limit: usize) -> io::Result<Vec<OsString>> {
        let names = Dir::read_from(&self.dir)?.map(|entry| Ok(entry?.file_name().to_bytes().to_owned()));
        let names = names.filter(|name| !name.as_ref().is_ok_and(|name| name == b"." || name == b".."));
        names.take(limit).map(|name| name.map(OsString::from_vec)).collect()
    }

    /// Opens a regular file in the folder for reading. Fails for links, devices and other special files.
    pub fn open_file(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let name = entry_name(name.as_ref())?;
        // The type is checked before opening, because opening some devices has side effects.
        match FileType::from_raw_mode(rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode) {
            FileType::RegularFile => {}
            FileType::Symlink => return Err(io::Error::other("it is a symbolic link")),
            _ => return Err(io::Error::other("it is not a regular file")),
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::from_bits_retain(untrusted::OPEN_FLAGS as u32);
        let file = File::from(rustix::fs::openat(&self.dir, name, flags, Mode::empty())?);
        untrusted::check(&file)?;
        Ok(file)
    }

    /// The content of a regular file in the folder. Fails for links, devices and other special files, and if the file
    /// has more than `limit` bytes.
    pub fn read_file(&self, name: impl AsRef<Path>, limit: u64) -> io::Result<Vec<u8>> {
        untrusted::read(&self.open_file(name)?, limit)
    }

    /// [`Self::open_file`] of a file that belongs to `owner`, a user id. Fails for a file of another user.
    pub fn open_file_of(&self, name: impl AsRef<Path>, owner: u32) -> io::Result<File> {
        let file = self.open_file(name)?;
        if rustix::fs::fstat(&file)?.st_uid == owner {
            Ok(file)
        } else {
            Err(io::Error::other("it belongs to another user"))
        }
    }

    /// The target of a link in the folder, without following it. Fails for anything else.
    pub fn read_link(&self, name: impl AsRef<Path>) -> io::Result<OsString> {
        let target = rustix::fs::readlinkat(&self.dir, entry_name(name.as_ref())?, Vec::new())?;
        Ok(OsString::from_vec(target.into_bytes()))
    }

    /// Creates a new file for writing. Fails if the name exists.
    pub fn create(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.dir, entry_name(name.as_ref())?, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Creates a new file for writing and removes any existing file of that name. That can be a leftover of a killed
    /// process, or a file placed there on purpose. A link is removed, not followed.
    pub fn create_replacing(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let name = name.as_ref();
        match self.create(name) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.remove(name)?;
                self.create(name)
            }
            created => created,
        }
    }

    /// Opens one of our own files for appending.
    pub fn open_append(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.dir, entry_name(name.as_ref())?, flags, Mode::empty())?);
        untrusted::check(&file)?;
        Ok(file)
    }

    /// Reserves disk space with an unnamed file. The space is released when the file is closed, also by the kernel.
    pub fn reserve(&self, bytes: u64) -> io::Result<File> {
        const NAME: &str = ".reserve";
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.dir, ".", flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => file.into(),
            // Not every file system supports `O_TMPFILE`.
            Err(_) => {
                let file = self.create_replacing(NAME)?;
                self.remove(NAME)?;
                file
            }
        };
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
        Ok(file)
    }

    /// Creates a file that gets the name `name` and replaces any file of that name when it is committed.
    pub fn create_atomic(&self, name: &str) -> io::Result<AtomicFile<'_>> {
        let partial = format!(".{name}.part");
        let file = self.create_replacing(&partial)?;
        Ok(AtomicFile { folder: self, partial, name: name.to_owned(), file, committed: false })
    }

    /// Gives a file another name, and replaces any file of that name.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        let (from, to) = (entry_name(from.as_ref())?, entry_name(to.as_ref())?);
        Ok(rustix::fs::renameat(&self.dir, from, &self.dir, to)?)
    }

    /// Removes a file, or a link itself.
    pub fn remove(&self, name: impl AsRef<Path>) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.dir, entry_name(name.as_ref())?, AtFlags::empty())?)
    }
}

/// Checks that this is the name of an entry of the folder itself, without any path.
fn entry_name(name: &Path) -> io::Result<&Path> {
    let mut components = name.components();
    match (components.next(), components.next()) {
        (Some(std::path::Component::Normal(only)), None) if only == name.as_os_str() => Ok(name),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file name in the run folder")),
    }
}

/// A file that is being written. It is removed unless [`Self::commit`] is called.
#[derive(Debug)]
pub struct AtomicFile<'a> {
    folder: &'a RunFolder,
    partial: String,
    name: String,
    file: File,
    committed: bool,
}

impl AtomicFile<'_> {
    /// The file to write to.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its final name.
    pub fn commit(mut self) -> io::Result<()> {
        rustix::fs::renameat(&self.folder.dir, &self.partial, &self.folder.dir, &self.name)?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for AtomicFile<'_> {
    fn drop(&mut self) {
        if !self.committed {
            // The next file can need the disk space. A failure changes nothing.
            let _ = self.folder.remove(&self.partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn paths_and_links_out_of_the_folder_are_refused() {
        let outside = tempfile::tempdir().unwrap();
        let victim = outside.path().join("victim");
        std::fs::write(&victim, b"mine").unwrap();
        let path = outside.path().join("run");
        std::fs::create_dir(&path).unwrap();
        let folder = RunFolder::open(&path).unwrap();
        for name in ["../victim", "/etc/passwd", "..", ".", "", "a/b", "a/"] {
            assert!(
                folder.create(name).is_err() && folder.open_file(name).is_err() && folder.remove(name).is_err(),
                "{name}"
            );
        }
        for name in ["1.mtr", "summary.json", ".summary.json.part"] {
            symlink(&victim, path.join(name)).unwrap();
        }
        assert!(folder.create("1.mtr").is_err() && folder.open_file("1.mtr").is_err());
        drop(folder.create_replacing("1.mtr").unwrap());
        let mut new = folder.create_atomic("summary.json").unwrap();
        new.file().write_all(b"ours").unwrap();
        new.commit().unwrap();
        // The folder is moved away, and a link takes its place.
        std::fs::rename(&path, outside.path().join("moved")).unwrap();
        std::fs::create_dir(outside.path().join("other")).unwrap();
        symlink(outside.path().join("other"), &path).unwrap();
        drop(folder.create("2.mtr").unwrap());
        drop(folder.create_atomic("never committed").unwrap());
        let summary = untrusted::read(&folder.open_file("summary.json").unwrap(), 100).unwrap();
        assert_eq!(summary, b"ours");
        assert_eq!(std::fs::read(&victim).unwrap(), b"mine");
        assert_eq!(folder.file_names().unwrap(), ["1.mtr", "2.mtr", "summary.json"]);
        assert_eq!(std::fs::read_dir(outside.path().join("other")).unwrap().count(), 0);
        let mode = std::fs::metadata(outside.path().join("moved/2.mtr")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
