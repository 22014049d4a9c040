//! Opening files that somebody else put there, or whose names somebody else wrote.
//!
//! A name in a recording, or in a folder that came from elsewhere, may be that of a pipe nobody writes to, of a device that does
//! something when it is opened, of a kernel's file that is never at its end. Only regular files of real file systems are opened,
//! opening never waits, and no more is read than the file has.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Flags with which opening never waits and has no effect on a terminal, whatever is there.
pub const OPEN_FLAGS: i32 = libc::O_NONBLOCK | libc::O_NOCTTY;

/// File systems whose files are doors into the kernel or a device: to read some is to do something.
const KERNEL_FILE_SYSTEMS: [libc::c_long; 7] = [
    libc::PROC_SUPER_MAGIC,
    libc::SYSFS_MAGIC,
    libc::DEBUGFS_MAGIC,
    libc::TRACEFS_MAGIC,
    libc::SECURITYFS_MAGIC,
    libc::CGROUP_SUPER_MAGIC,
    libc::CGROUP2_SUPER_MAGIC,
];

/// Opens the regular file at `path` for reading.
///
/// # Errors
///
/// When it cannot be opened, or is anything else than a regular file of a real file system.
pub fn open(path: &Path) -> io::Result<File> {
    // Asked before opening, since opening some devices has effects, and after, since it may be another file by then.
    check_kind(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(OPEN_FLAGS).open(path)?;
    check(&file)?;
    Ok(file)
}

/// Whether this may be read; gives its metadata.
///
/// # Errors
///
/// When it is anything else than a regular file of a real file system.
pub fn check(file: &File) -> io::Result<Metadata> {
    let metadata = file.metadata()?;
    check_kind(&metadata)?;
    // SAFETY: `statfs` is plain data that the call fills; the descriptor is open.
    let file_system = unsafe {
        let mut statfs: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(file.as_raw_fd(), &mut statfs) != 0 {
            return Err(io::Error::last_os_error());
        }
        statfs.f_type
    };
    if KERNEL_FILE_SYSTEMS.contains(&file_system) {
        return Err(io::Error::other("is a file of the kernel's"));
    }
    Ok(metadata)
}

fn check_kind(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if metadata.is_file() { Ok(()) } else { Err(io::Error::other("is no regular file")) }
}

/// All of an opened file.
///
/// # Errors
///
/// When it cannot be read, is not a regular file, or has more than `limit` bytes.
pub fn read(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    let len = check(file)?.len();
    if len > limit {
        return Err(io::Error::other(format!("has {len} bytes, more than any that memtrace writes")));
    }
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, b"abc").unwrap();
        assert_eq!(read(&open(&file).unwrap(), 3).unwrap(), b"abc");
        assert!(read(&open(&file).unwrap(), 2).unwrap_err().to_string().contains("3 bytes"));
        let pipe = dir.path().join("pipe");
        let name = std::ffi::CString::new(pipe.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: a valid string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for other in [&pipe, &link, dir.path(), Path::new("/proc/self/environ"), Path::new("/sys/kernel/uevent_seqnum")]
        {
            assert!(open(other).is_err(), "{}", other.display());
        }
    }
}
