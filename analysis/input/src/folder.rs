//! The folder of a run. Everything in it is reached through one descriptor, never through the folder's path again: who moves the folder
//! away and puts something else in its place, a link say, finds that nothing is read from there or written to there.
//!
//! What is written is readable by its owner only, is always a new file, and gets its good name when it is whole. What is read is a
//! regular file and no link.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use memtrace_trace::file::foreign;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};

/// A run folder, open.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    dir: OwnedFd,
}

impl RunFolder {
    /// Opens a folder that is there.
    pub fn open(path: &Path) -> io::Result<RunFolder> {
        let dir = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(RunFolder { path: path.to_owned(), dir })
    }

    /// The path it was opened by: for people.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder itself.
    pub fn descriptor(&self) -> impl AsFd {
        self.dir.as_fd()
    }

    /// Who owns it and who may do what.
    pub fn status(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.dir)?)
    }

    /// The names in it, in order.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.dir)? {
            let name = entry?.file_name().to_bytes().to_owned();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Opens a regular file in it for reading.
    pub fn read(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let name = entry(name.as_ref())?;
        // Asked before opening, since opening some devices has effects.
        match FileType::from_raw_mode(rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode) {
            FileType::RegularFile => {}
            FileType::Symlink => return Err(io::Error::other("is a symbolic link, and those are not followed")),
            _ => return Err(io::Error::other("is no regular file")),
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::from_bits_retain(foreign::OPEN_FLAGS as u32);
        let file = File::from(rustix::fs::openat(&self.dir, name, flags, Mode::empty())?);
        foreign::check(&file)?;
        Ok(file)
    }

    /// Makes a file in it that was not there, for writing.
    pub fn create(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.dir, entry(name.as_ref())?, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// The same, whatever has that name already: left by somebody who was killed, or put there on purpose. A link is removed, not
    /// followed.
    pub fn create_in_place(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let name = name.as_ref();
        match self.create(name) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                self.remove(name)?;
                self.create(name)
            }
            made => made,
        }
    }

    /// Opens a file of ours in it, for adding to its end.
    pub fn append(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.dir, entry(name.as_ref())?, flags, Mode::empty())?);
        foreign::check(&file)?;
        Ok(file)
    }

    /// Takes so much space in it, by a file without a name: it is given back when the file is closed, also by the kernel.
    pub fn reserve(&self, bytes: u64) -> io::Result<File> {
        const NAME: &str = ".reserve";
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.dir, ".", flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => file.into(),
            // Not every file system has files without a name from the start.
            Err(_) => {
                let file = self.create_in_place(NAME)?;
                self.remove(NAME)?;
                file
            }
        };
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
        Ok(file)
    }

    /// Begins a file that shall be called `name`, whatever was called so before.
    pub fn begin(&self, name: &str) -> io::Result<NewFile<'_>> {
        let partial = format!(".{name}.part");
        let file = self.create_in_place(&partial)?;
        Ok(NewFile { folder: self, partial, name: name.to_owned(), file, placed: false })
    }

    /// Removes a file, or a link itself.
    pub fn remove(&self, name: impl AsRef<Path>) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.dir, entry(name.as_ref())?, AtFlags::empty())?)
    }
}

/// A name of something in the folder itself.
fn entry(name: &Path) -> io::Result<&Path> {
    let mut components = name.components();
    match (components.next(), components.next()) {
        (Some(std::path::Component::Normal(only)), None) if only == name.as_os_str() => Ok(name),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "is no name of a file in the run folder")),
    }
}

/// A file that is being written. Without [`Self::place`] nothing of it stays.
#[derive(Debug)]
pub struct NewFile<'a> {
    folder: &'a RunFolder,
    partial: String,
    name: String,
    file: File,
    placed: bool,
}

impl NewFile<'_> {
    /// What to write to.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its name.
    pub fn place(mut self) -> io::Result<()> {
        rustix::fs::renameat(&self.folder.dir, &self.partial, &self.folder.dir, &self.name)?;
        self.placed = true;
        Ok(())
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if !self.placed {
            // The space may be what the next file needs.
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
    fn nothing_leaves_the_folder() {
        let outside = tempfile::tempdir().unwrap();
        let victim = outside.path().join("victim");
        std::fs::write(&victim, b"mine").unwrap();
        let path = outside.path().join("run");
        std::fs::create_dir(&path).unwrap();
        let folder = RunFolder::open(&path).unwrap();
        for name in ["../victim", "/etc/passwd", "..", ".", "", "a/b", "a/"] {
            assert!(
                folder.create(name).is_err() && folder.read(name).is_err() && folder.remove(name).is_err(),
                "{name}"
            );
        }
        for name in ["1.mtr", "summary.json", ".summary.json.part"] {
            symlink(&victim, path.join(name)).unwrap();
        }
        assert!(folder.create("1.mtr").is_err() && folder.read("1.mtr").is_err());
        drop(folder.create_in_place("1.mtr").unwrap());
        let mut new = folder.begin("summary.json").unwrap();
        new.file().write_all(b"ours").unwrap();
        new.place().unwrap();
        // The folder is moved away, and a link put in its place.
        std::fs::rename(&path, outside.path().join("moved")).unwrap();
        std::fs::create_dir(outside.path().join("other")).unwrap();
        symlink(outside.path().join("other"), &path).unwrap();
        drop(folder.create("2.mtr").unwrap());
        drop(folder.begin("never placed").unwrap());
        let summary = foreign::read(&folder.read("summary.json").unwrap(), 100).unwrap();
        assert_eq!(summary, b"ours");
        assert_eq!(std::fs::read(&victim).unwrap(), b"mine");
        assert_eq!(folder.names().unwrap(), ["1.mtr", "2.mtr", "summary.json"]);
        assert_eq!(std::fs::read_dir(outside.path().join("other")).unwrap().count(), 0);
        let mode = std::fs::metadata(outside.path().join("moved/2.mtr")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
