//! Opens files that other programs have created or whose names they have chosen.
//!
//! A name in a recording, or in a folder from elsewhere, may be that of a pipe without a writer. It may be a device
//! that acts when it is opened, or a kernel file without an end. So only regular files of real file systems are opened.
//! Opening never blocks, and at most the file's size is read.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
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

/// The bytes of holes in a file that is read at once, at most. Reading a hole takes memory that the file does not
/// store.
const MAX_HOLES: u64 = 1 << 20;

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

/// The number of bytes that a file stores: its length without the holes of a sparse file, which read as zeros and can
/// be of any length. Moves the position of the file to its beginning.
///
/// # Errors
///
/// If the file cannot be examined.
pub fn stored_len(file: &File) -> io::Result<u64> {
    /// More ranges than real files have. The ranges after them are not counted.
    const MAX_RANGES: usize = 1 << 16;
    let len = file.metadata()?.len();
    let (mut at, mut stored) = (0, 0u64);
    for _ in 0..MAX_RANGES {
        let Some((start, end)) = next_data(file, at, len) else { break };
        stored += end - start;
        at = end;
    }
    let mut file = file;
    file.seek(SeekFrom::Start(0))?;
    Ok(stored)
}

/// The next range at or after `from` that stores data: its start and its exclusive end. `None` if only a hole follows.
/// Moves the position of the file. Without support of the file system, the rest of the file is one range.
pub fn next_data(file: &File, from: u64, len: u64) -> Option<(u64, u64)> {
    if from >= len {
        return None;
    }
    let seek = |at: u64, whence| {
        // SAFETY: `lseek` takes integers; the descriptor is open. It changes only the position, which positional reads
        // do not use and other readers set themselves.
        let found =
            unsafe { libc::lseek(file.as_raw_fd(), libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX), whence) };
        u64::try_from(found).map_err(|_| io::Error::last_os_error().raw_os_error())
    };
    let start = match seek(from, libc::SEEK_DATA) {
        Ok(start) => start.clamp(from, len),
        Err(Some(libc::ENXIO)) => return None,
        Err(_) => return Some((from, len)),
    };
    let end = seek(start, libc::SEEK_HOLE).map_or(len, |end| end.clamp(start, len));
    (start < end).then_some((start, end))
}

/// The whole content of an open file.
///
/// # Errors
///
/// If it cannot be read, is not a regular file, has more than `limit` bytes, or has large holes.
pub fn read(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    let len = check(file)?.len();
    if len > limit {
        return Err(io::Error::other(format!("has {len} bytes, more than memtrace writes")));
    }
    if len - stored_len(file)?.min(len) > MAX_HOLES {
        return Err(io::Error::other("is a sparse file"));
    }
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_not_stored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).unwrap();
        assert_eq!((stored_len(&file).unwrap(), next_data(&file, 0, 0)), (0, None));
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 10_000], 0).unwrap();
        assert_eq!(stored_len(&file).unwrap(), 10_000);
        assert_eq!(read(&file, 1 << 40).unwrap().len(), 10_000);
        assert_eq!(next_data(&file, 100, 10_000), Some((100, 10_000)));
        file.set_len(200 << 20).unwrap();
        assert!(stored_len(&file).unwrap() < 1 << 20);
        assert_eq!(read(&file, 1 << 40).unwrap_err().to_string(), "is a sparse file");
        assert_eq!(next_data(&file, 100 << 20, 200 << 20), None);
        std::os::unix::fs::FileExt::write_all_at(&file, &[1], 150 << 20).unwrap();
        let (start, end) = next_data(&file, 100 << 20, 200 << 20).unwrap();
        assert!(start > 149 << 20 && start <= 150 << 20 && end > 150 << 20 && end < 151 << 20, "{start} {end}");
    }

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
