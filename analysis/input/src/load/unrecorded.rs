//! The reports of processes that could not record: links in the run folder ([`memtrace_trace::unrecorded`]).
//!
//! When a run ends, the launcher moves them into `run.json`. In the folder of a launcher that was killed, they stay.

use memtrace_trace::unrecorded::{EXTENSION, Unrecorded};

use crate::folder::RunFolder;

/// The maximum number of reports that are read. A process makes at most one.
const MAX_REPORTS: usize = 65_536;

/// The reports in the folder, by name. Other files, and folders that cannot be listed, are ignored.
pub fn unrecorded(folder: &RunFolder) -> Vec<Unrecorded> {
    let names = folder.file_names().unwrap_or_default();
    let names = names.iter().filter_map(|name| name.to_str()).filter(|name| name.ends_with(EXTENSION));
    names.take(MAX_REPORTS).filter_map(|name| Unrecorded::parse(name, folder.read_link(name).ok()?.to_str()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::unrecorded::Reason;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_valid_reports_are_read() {
        let path = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(path.path()).unwrap();
        let program = "/bin/a".to_owned();
        let report = Unrecorded { pid: 7, id: 9, reason: Reason::Seccomp, events: 3, program };
        symlink(report.target(), path.path().join(report.name())).unwrap();
        symlink("/etc/passwd", path.path().join("8-1.unrecorded")).unwrap();
        std::fs::write(path.path().join("9-1.unrecorded"), report.target()).unwrap();
        assert_eq!(unrecorded(&folder), [report]);
    }
}
