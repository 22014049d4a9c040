//! Checks how the recorder gets into a process: the library's file, and other users of the same mechanism.

use std::path::Path;

use memtrace_trace::options::ENV;

use super::diagnosis::Finding;
use crate::library;

/// Checks where the library's file is placed.
pub(super) fn library(folder: &Path) -> Finding {
    let what = "recorder's library";
    match library::library(folder) {
        Ok(library) if library.path.starts_with(folder) => Finding::off(
            what,
            "no folder that lasts: it is written anew into every run",
            "give it one: set XDG_CACHE_HOME or HOME to a folder of yours that code can be executed from",
        ),
        Ok(library) => Finding::ok(what, library.path.display().to_string()),
        Err(e) => Finding::off(
            what,
            format!("{e:#}"),
            "set XDG_CACHE_HOME to a folder of yours without spaces, not on a file system mounted noexec",
        ),
    }
}

/// Reports other preloaded libraries.
pub(super) fn others() -> Finding {
    let what = "LD_PRELOAD";
    let set = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    let set = set.to_string_lossy();
    let entries: Vec<&str> = set.split([':', ' ']).filter(|e| !e.is_empty()).collect();
    if entries.is_empty() {
        return Finding::ok(what, "not used by others");
    }
    if let Some(missing) = entries.iter().find(|e| e.contains('/') && !Path::new(e).exists()) {
        return Finding::note(
            what,
            format!("names {missing}, which does not exist: the loader complains in every process"),
        )
        .with_mend("take it out: unset LD_PRELOAD");
    }
    Finding::ok(what, format!("also used by {}: kept, after ours", entries.join(", ")))
}

/// Reports auditing libraries. They see, and may change, the function that each call is bound to.
pub(super) fn audit() -> Option<Finding> {
    let set = std::env::var_os("LD_AUDIT").filter(|v| !v.is_empty())?;
    let text = format!("{} may bind functions past the recorder", set.to_string_lossy());
    Some(Finding::note("LD_AUDIT", text).with_mend("unset LD_AUDIT where something is missing in the recording"))
}

/// Reports when memtrace records this very process.
pub(super) fn nested() -> Option<Finding> {
    std::env::var_os(ENV)?;
    let text = "memtrace records this very process: what doctor starts goes to its own recordings instead";
    Some(Finding::note("nested", text).with_mend("run memtrace doctor outside of memtrace"))
}
