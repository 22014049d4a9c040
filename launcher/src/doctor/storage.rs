//! Checks the place where runs are stored: the current directory unless `-o` names another.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::diagnosis::Finding;
use super::units::bytes;

/// The free space in bytes that suffices for a long run. Training takes 1 to 7 bytes an event (docs/dev/performance.md).
const PLENTY: u64 = 1 << 30;

/// Checks whether a run can be written below `folder` and how much space is free.
pub(super) fn storage(folder: &Path) -> Finding {
    let what = "runs go to";
    let shown = folder.display();
    let Ok(path) = CString::new(folder.as_os_str().as_bytes()) else {
        return Finding::off(what, format!("{shown}: no name for a folder"), "choose another folder with -o DIR");
    };
    // SAFETY: `path` is a NUL-terminated string.
    if unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } != 0 {
        let e = std::io::Error::last_os_error();
        return Finding::off(
            what,
            format!("{shown}: cannot be written to ({e})"),
            "record from another folder, or name one: memtrace -o DIR -- ...",
        );
    }
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: `path` is a NUL-terminated string. `stat` is zeroed plain data that is valid for writes, so `assume_init`
    // is sound.
    let free = unsafe {
        if libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) != 0 {
            return Finding::note(what, format!("{shown}: its free space is not known"));
        }
        let stat = stat.assume_init();
        stat.f_bavail * stat.f_frsize
    };
    if free < PLENTY {
        return Finding::off(
            what,
            format!("{shown}: {} free, and a run takes 1 to 7 bytes an event", bytes(free)),
            "make room, or choose another disk: memtrace -o DIR -- ...",
        );
    }
    Finding::ok(what, format!("{shown}: {} free", bytes(free)))
}
