//! Checks how the recorder gets into a process: the library's file, and other users of the same mechanism.

use std::path::Path;

use memtrace_trace::options::ENV;

use super::report::Check;
use crate::library;

/// Checks where the library's file is placed.
pub(super) fn library(folder: &Path) -> Check {
    let name = "Preloaded library";
    match library::library(folder) {
        Ok(library) if library.path.starts_with(folder) => Check::failed(
            name,
            "no permanent folder can hold it, so it is written into every run folder",
            "set XDG_CACHE_HOME or HOME to a folder that belongs to you and is not mounted noexec",
        ),
        Ok(library) => Check::ok(name, library.path.display().to_string()),
        Err(e) => Check::failed(
            name,
            format!("{e:#}"),
            "set XDG_CACHE_HOME to a folder that belongs to you, without spaces in its path and not mounted noexec",
        ),
    }
}

/// Reports other preloaded libraries.
pub(super) fn others() -> Check {
    let name = "LD_PRELOAD";
    let value = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    let value = value.to_string_lossy();
    let entries: Vec<&str> = value.split([':', ' ']).filter(|e| !e.is_empty()).collect();
    if entries.is_empty() {
        return Check::ok(name, "not set");
    }
    if let Some(missing) = entries.iter().find(|e| e.contains('/') && !Path::new(e).exists()) {
        return Check::note(
            name,
            format!("names {missing}, which does not exist; the loader prints an error in every process"),
        )
        .with_fix("unset LD_PRELOAD");
    }
    Check::ok(name, format!("also names {}, which stay after memtrace's library", entries.join(", ")))
}

/// Reports auditing libraries. They see, and may change, the function that each call is bound to.
pub(super) fn audit() -> Option<Check> {
    let set = std::env::var_os("LD_AUDIT").filter(|v| !v.is_empty())?;
    let text = format!("{} may bind functions without memtrace's hooks", set.to_string_lossy());
    Some(Check::note("LD_AUDIT", text).with_fix("unset LD_AUDIT if events are missing in the recording"))
}

/// Reports when memtrace records this very process.
pub(super) fn nested() -> Option<Check> {
    std::env::var_os(ENV)?;
    let text = "memtrace records this process; the programs that doctor starts are recorded separately";
    Some(Check::note("Nested run", text).with_fix("run memtrace doctor outside of memtrace"))
}
