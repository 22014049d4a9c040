//! Checks the place where runs are stored: the current directory unless `-o` names another.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::report::Check;
use super::units::bytes;

/// The free space in bytes that suffices for a long run. Training takes 1 to 7 bytes per event
/// (docs/dev/performance.md).
const MIN_FREE: u64 = 1 << 30;

/// Checks whether a run can be written below `folder` and how much space is free.
pub(super) fn storage(folder: &Path) -> Check {
    let name = "Run folder";
    let shown = folder.display();
    let Ok(path) = CString::new(folder.as_os_str().as_bytes()) else {
        return Check::failed(name, format!("{shown}: not a valid folder name"), "choose another folder with -o DIR");
    };
    // SAFETY: `path` is a NUL-terminated string.
    if unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } != 0 {
        let e = std::io::Error::last_os_error();
        return Check::failed(
            name,
            format!("cannot write to {shown}: {e}"),
            "start memtrace in another folder, or name one: memtrace -o DIR -- COMMAND",
        );
    }
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: `path` is a NUL-terminated string. `stat` is zeroed plain data that is valid for writes, so `assume_init`
    // is sound.
    let free = unsafe {
        if libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) != 0 {
            return Check::note(name, format!("{shown}: free space unknown"));
        }
        let stat = stat.assume_init();
        stat.f_bavail * stat.f_frsize
    };
    if free < MIN_FREE {
        return Check::failed(
            name,
            format!("{shown}: {} free; a run takes 1 to 7 bytes per event", bytes(free)),
            "free disk space, or name a folder on another disk: memtrace -o DIR -- COMMAND",
        );
    }
    Check::ok(name, format!("{shown}: {} free", bytes(free)))
}
