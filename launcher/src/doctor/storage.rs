//! Where runs go: the current folder, unless `-o` says otherwise.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::diagnosis::Finding;
use super::units::bytes;

/// Trainings take 1 to 7 bytes an event (docs/dev/performance.md): this holds a long one.
const PLENTY: u64 = 1 << 30;

/// Whether a run can be written below `folder`, and how large it may become.
pub(super) fn storage(folder: &Path) -> Finding {
    let what = "runs go to";
    let shown = folder.display();
    let Ok(path) = CString::new(folder.as_os_str().as_bytes()) else {
        return Finding::off(what, format!("{shown}: no name for a folder"), "choose another folder with -o DIR");
    };
    // SAFETY: a valid path.
    if unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } != 0 {
        let e = std::io::Error::last_os_error();
        return Finding::off(
            what,
            format!("{shown}: cannot be written to ({e})"),
            "record from another folder, or name one: memtrace -o DIR -- ...",
        );
    }
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a valid path, and plain data that the call fills.
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
