//! Opens files that other programs have created or whose names they have chosen.
//!
//! A name in a recording, or in a folder from elsewhere, may be that of a pipe without a writer. It may be a device
//! that acts when it is opened, or a kernel file without an end. So only regular files of real file systems are opened.
//! Opening never blocks, and at most the file's size is read.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Flags with which opening never blocks and has no effect on a terminal, whatever the file is.
pub const OPEN_FLAGS: i32 = libc::O_NONBLOCK | libc::O_NOCTTY;

/// File systems whose files are interfaces of the kernel or a device. Reading some of them has side effects.
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
/// If it cannot be opened, or is not a regular file of a real file system.
pub fn open(path: &Path) -> io::Result<File> {
    // Checked before opening, because opening some devices has effects. Checked afterwards, because the file may have
    // been replaced.
    check_kind(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(OPEN_FLAGS).open(path)?;
    check(&file)?;
    Ok(file)
}

/// Checks whether this file may be read, and returns its metadata.
///
/// # Errors
///
/// If it is not a regular file of a real file system.
pub fn check(file: &File) -> io::Result<Metadata> {
    let metadata = file.metadata()?;
    check_kind(&metadata)?;
    // SAFETY: `statfs` is plain data, for which zeros are valid, and the descriptor is open.
    let file_system = unsafe {
        let mut statfs: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(file.as_raw_fd(), &mut statfs) != 0 {
            return Err(io::Error::last_os_error());
        }
        statfs.f_type
    };
    if KERNEL_FILE_SYSTEMS.contains(&file_system) {
        return Err(io::Error::other("is a kernel file"));
    }
    Ok(metadata)
}

fn check_kind(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if metadata.is_file() { Ok(()) } else { Err(io::Error::other("is not a regular file")) }
}

/// The whole content of an open file.
///
/// # Errors
///
/// If it cannot be read, is not a regular file, or has more than `limit` bytes.
pub fn read(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    let len = check(file)?.len();
    if len > limit {
        return Err(io::Error::other(format!("has {len} bytes, more than memtrace writes")));
    }
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, b"abc").unwrap();
        assert_eq!(read(&open(&file).unwrap(), 3).unwrap(), b"abc");
        assert!(read(&open(&file).unwrap(), 2).unwrap_err().to_string().contains("3 bytes"));
        let pipe = dir.path().join("pipe");
        let name = std::ffi::CString::new(pipe.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: `name` is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for other in [&pipe, &link, dir.path(), Path::new("/proc/self/environ"), Path::new("/sys/kernel/uevent_seqnum")]
        {
            assert!(open(other).is_err(), "{}", other.display());
        }
    }
}
