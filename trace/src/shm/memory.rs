//! Memory that the launcher shares with traced processes: a memfd that is sealed, so that nobody can shrink it while
//! it is mapped.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// Creates shared memory of `size` bytes, all zero, on the launcher's side. Only this user can open it.
pub(super) fn create(name: &CStr, size: usize) -> io::Result<OwnedFd> {
    let created = memfd(name, libc::MFD_NOEXEC_SEAL).or_else(|e| match e.raw_os_error() {
        // Linux before 6.3 does not know this flag. Later ones may be configured to require it.
        Some(libc::EINVAL) => memfd(name, 0),
        _ => Err(e),
    });
    let fd = created?;
    // SAFETY: these calls take plain arguments, and the descriptor is open.
    let is_prepared = unsafe {
        libc::fchmod(fd.as_raw_fd(), 0o600) == 0
            && libc::ftruncate(fd.as_raw_fd(), size as libc::off_t) == 0
            && libc::fcntl(
                fd.as_raw_fd(),
                libc::F_ADD_SEALS,
                libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
            ) == 0
    };
    if is_prepared { Ok(fd) } else { Err(io::Error::last_os_error()) }
}

/// Checks that shared memory has `size` bytes and is sealed. The error is `InvalidData` if not.
pub(super) fn check(fd: BorrowedFd<'_>, size: usize) -> io::Result<()> {
    // SAFETY: `stat` is plain data, for which zeros are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `stat` is writable.
    if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open. The call returns an error for files that do not support seals.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    // Without the seal, another process could shrink the file, and an access would kill this process.
    if stat.st_size != size as libc::off_t || seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(())
}

/// Maps shared memory of `size` bytes. The error is `InvalidData` if it has another size or is not sealed.
pub(super) fn map(fd: BorrowedFd<'_>, size: usize) -> io::Result<NonNull<u8>> {
    check(fd, size)?;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
    // SAFETY: creates a new mapping at an address that the kernel chooses. The file has `size` bytes and is sealed
    // against shrinking, so no access inside can fault.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, fd.as_raw_fd(), 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::Other.into())
}

pub(super) fn memfd(name: &CStr, flags: libc::c_uint) -> io::Result<OwnedFd> {
    let flags = flags | libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string and the flags are valid. The new descriptor belongs to this function alone.
    unsafe {
        let fd = libc::memfd_create(name.as_ptr(), flags);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}
