//! A folder that only this user can reach, for files that another process of the user reads.
//!
//! Whoever could replace the script in it would run code in the traced process. So the folder is made with mode 0700 and its
//! files with mode 0600, whatever the umask, and everything is checked and used through descriptors. The path leads through
//! folders that no other user can replace.

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rustix::fs::{AtFlags, Mode, OFlags, fchmod, openat, unlinkat};

use crate::{library, session};

/// The beginning of its name.
const PREFIX: &str = "memtrace-attach-";

/// The folder. Dropping it removes it with its files.
pub(super) struct PrivateFolder {
    path: PathBuf,
    folder: File,
    files: Vec<&'static str>,
    is_kept: bool,
}

impl PrivateFolder {
    /// Makes a folder in the first of these that is safe.
    pub(super) fn create(places: &[&Path]) -> anyhow::Result<PrivateFolder> {
        let mut result = Err(anyhow::anyhow!("there is no folder for it"));
        for place in places {
            result = PrivateFolder::create_in(place);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    fn create_in(place: &Path) -> anyhow::Result<PrivateFolder> {
        let path = place.join(format!("{PREFIX}{}", session::token()?));
        library::check_ancestors(&path)?;
        DirBuilder::new().mode(0o700).create(&path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&path, flags, Mode::empty());
        let made = folder.map_err(anyhow::Error::from).and_then(|folder| {
            let folder = File::from(folder);
            fchmod(&folder, Mode::RWXU)?;
            library::check_owner(&folder.metadata()?)?;
            Ok(folder)
        });
        match made {
            Ok(folder) => Ok(PrivateFolder { path, folder, files: Vec::new(), is_kept: false }),
            Err(error) => {
                let _ = std::fs::remove_dir(&path);
                Err(error)
            }
        }
    }

    /// The path of a file in it.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a new file.
    pub(super) fn write(&mut self, name: &'static str, content: &str) -> anyhow::Result<()> {
        let mode = Mode::RUSR | Mode::WUSR;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.folder, name, flags, mode)?);
        self.files.push(name);
        fchmod(&file, mode)?;
        library::check_owner(&file.metadata()?)?;
        file.write_all(content.as_bytes()).with_context(|| format!("cannot write {name}"))
    }

    /// The beginning of a file, up to `limit` bytes.
    pub(super) fn read(&self, name: &str, limit: u64) -> anyhow::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.folder, name, flags, Mode::empty())?);
        ensure!(file.metadata()?.is_file(), "{name} is no file");
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Whether a process has this folder at the same path, and not one of its own.
    pub(super) fn is_visible(&self, pid: u32) -> bool {
        let theirs = Path::new(&format!("/proc/{pid}/root")).join(self.path.strip_prefix("/").unwrap_or(&self.path));
        let seen = std::fs::symlink_metadata(theirs).map(|folder| (folder.dev(), folder.ino()));
        let ours = self.folder.metadata().map(|folder| (folder.dev(), folder.ino()));
        ours.is_ok_and(|ours| seen.is_ok_and(|seen| seen == ours))
    }

    /// Leaves the folder where it is, because a process may still read from it. Nobody else can take its place then.
    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        for name in &self.files {
            let _ = unlinkat(self.folder.as_fd(), *name, AtFlags::empty());
        }
        let _ = std::fs::remove_dir(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn only_this_user_can_reach_it_whatever_the_umask() {
        let place = tempfile::tempdir().unwrap();
        for umask in [0o000, 0o077, 0o277] {
            // SAFETY: takes an integer. Every test is a process of its own.
            unsafe { libc::umask(umask) };
            let mut folder = PrivateFolder::create(&[place.path()]).unwrap();
            folder.write("script.py", "text").unwrap();
            assert_eq!((mode(&folder.path), mode(&folder.path("script.py"))), (0o700, 0o600), "{umask:o}");
            assert!(folder.write("script.py", "other").is_err());
            assert_eq!(folder.read("script.py", 3).unwrap(), b"tex");
            assert!(folder.is_visible(std::process::id()));
            drop(folder);
            assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_place_where_others_can_exchange_it_is_refused() {
        let (open, closed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::set_permissions(open.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(PrivateFolder::create(&[open.path()]).is_err());
        assert!(PrivateFolder::create(&[&open.path().join("none")]).is_err());
        let folder = PrivateFolder::create(&[open.path(), closed.path()]).unwrap();
        assert!(folder.path.starts_with(closed.path()));
        std::fs::set_permissions(open.path(), Permissions::from_mode(0o1777)).unwrap();
        assert!(PrivateFolder::create(&[open.path()]).is_ok());
        // A link in the place of a file is not followed.
        std::os::unix::fs::symlink("/etc/passwd", folder.path("result")).unwrap();
        assert!(folder.read("result", 10).is_err());
    }
}
