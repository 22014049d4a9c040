//! Reports that this process cannot record, with a link in the run folder (`memtrace_trace::unrecorded`).
//!
//! Constraint: the report costs the program two system calls at its 1st, 2nd, 4th, 8th ... lost event, and no file
//! descriptor, mapping or wait. It fails silently where the folder cannot be reached. The launcher then finds the
//! process from outside, if it lives long enough.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_trace::clock;
use memtrace_trace::options::Options;
use memtrace_trace::unrecorded::{Reason, Unrecorded};

use super::seccomp;

/// The process that made the report, 0 for none. A forked child inherits the values of its parent.
static REPORTER: AtomicU32 = AtomicU32::new(0);
/// The id of the report.
static ID: AtomicU64 = AtomicU64::new(0);
/// How many lost events a forked child inherited from its parent, which reports them itself.
static INHERITED_EVENTS: AtomicU64 = AtomicU64::new(0);

/// Reports that an event is lost for this `reason`, after `events` earlier ones. Replaces the report before.
///
/// Only the thread that starts the recording may call this.
pub(super) fn report(options: &Options, reason: Reason, events: u64) {
    let Some(folder) = &options.folder else { return };
    if !seccomp::permits_links(options.filters) {
        return;
    }
    let pid = std::process::id();
    let is_first = REPORTER.load(Ordering::Relaxed) != pid;
    if is_first {
        ID.store(clock::now(), Ordering::Relaxed);
        INHERITED_EVENTS.store(events, Ordering::Relaxed);
        REPORTER.store(pid, Ordering::Relaxed);
    }
    let events = events.saturating_sub(INHERITED_EVENTS.load(Ordering::Relaxed)) + 1;
    let report = Unrecorded { pid, id: ID.load(Ordering::Relaxed), reason, events, program: program() };
    let (Some(path), Ok(target)) = (link_path(folder, &report.name()), CString::new(report.target())) else { return };
    // SAFETY: both are C strings. The name is a new one in the run folder. `symlinkat` never follows or replaces a
    // file.
    unsafe {
        if !is_first {
            libc::unlinkat(libc::AT_FDCWD, path.as_ptr(), 0);
        }
        libc::symlinkat(target.as_ptr(), libc::AT_FDCWD, path.as_ptr());
    }
}

/// Removes the report, because the recording has started after all and includes the lost events.
pub(super) fn withdraw(options: &Options) {
    let pid = std::process::id();
    let Some(folder) = options.folder.as_ref().filter(|_| REPORTER.load(Ordering::Relaxed) == pid) else { return };
    if !seccomp::permits_links(options.filters) {
        return;
    }
    let id = ID.load(Ordering::Relaxed);
    let report = Unrecorded { pid, id, reason: Reason::NoAnswer, events: 0, program: String::new() };
    if let Some(path) = link_path(folder, &report.name()) {
        // SAFETY: `path` is a C string, and the link is this process's own.
        unsafe { libc::unlinkat(libc::AT_FDCWD, path.as_ptr(), 0) };
    }
}

fn link_path(folder: &Path, name: &str) -> Option<CString> {
    CString::new(folder.join(name).as_os_str().as_bytes()).ok()
}

/// The path with which the kernel started this program.
fn program() -> String {
    // SAFETY: `getauxval` takes any number.
    let path = unsafe { libc::getauxval(libc::AT_EXECFN) };
    if path == 0 {
        return String::new();
    }
    // SAFETY: the kernel put this C string above the stack when it started the program. Only the program itself could
    // overwrite it there, for example to change its title, and the end of that area is a NUL that the kernel wrote.
    let path = unsafe { CStr::from_ptr(std::ptr::with_exposed_provenance(path as usize)) };
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_replaced_and_withdrawn() {
        let folder = std::env::temp_dir().join(format!("memtrace-unrecorded-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let mut options = Options::parse("token").unwrap();
        options.folder = Some(folder.clone());
        options.filters = u32::MAX;
        let links = || {
            let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            let read = |path: &std::path::PathBuf| {
                let (name, target) = (path.file_name().unwrap(), std::fs::read_link(path).unwrap());
                Unrecorded::parse(name.to_str().unwrap(), target.to_str().unwrap()).unwrap()
            };
            entries.map(|path| read(&path)).collect::<Vec<_>>()
        };
        for events in [0, 1, 2, 4] {
            report(&options, Reason::NoListener, events);
            let [only] = &links()[..] else { panic!("{:?}", links()) };
            assert_eq!((only.pid, only.events), (std::process::id(), events + 1));
            assert!(only.program.contains("memtrace"), "{}", only.program);
        }
        withdraw(&options);
        assert!(links().is_empty());
        std::fs::remove_dir(&folder).unwrap();
    }
}
