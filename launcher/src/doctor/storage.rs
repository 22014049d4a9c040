//! Checks the place where runs are stored: the current directory unless `-o` names another.

use std::path::Path;

use rustix::fs::{Access, access, statvfs};

use super::report::Check;
use super::units::bytes;

/// The free space in bytes that suffices for a long run. Training takes 1 to 7 bytes per event
/// (docs/dev/performance.md).
const MIN_FREE: u64 = 1 << 30;

/// Checks whether a run can be written below `folder` and how much space is free.
pub(super) fn storage(folder: &Path) -> Check {
    let name = "Run folder";
    let shown = folder.display();
    if let Err(e) = access(folder, Access::WRITE_OK | Access::EXEC_OK) {
        let e = std::io::Error::from(e);
        return Check::failed(
            name,
            format!("cannot write to {shown}: {e}"),
            "start memtrace in another folder, or name one: memtrace -o DIR -- COMMAND",
        );
    }
    let Ok(stat) = statvfs(folder) else {
        return Check::note(name, format!("{shown}: free space unknown"));
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < MIN_FREE {
        return Check::failed(
            name,
            format!("{shown}: {} free; a run takes 1 to 7 bytes per event", bytes(free)),
            "free disk space, or name a folder on another disk: memtrace -o DIR -- COMMAND",
        );
    }
    Check::ok(name, format!("{shown}: {} free", bytes(free)))
}
