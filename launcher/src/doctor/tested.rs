//! The releases that memtrace's own tests cover. `tested-versions.json` is the only list.
//!
//! Doctor and the documentation read the list, and a test compares it with what the suite runs. The list is advice, not
//! permission: the recorder verifies the layout of every release at run time.

use std::cmp::Ordering;
use std::sync::OnceLock;

use serde::Deserialize;

use super::diagnosis::Finding;

#[derive(Deserialize, Debug)]
struct Tested {
    cpython: Cpython,
    pytorch: Vec<Release>,
}

#[derive(Deserialize, Debug)]
struct Cpython {
    /// Versions that the test suite runs.
    tested: Vec<String>,
    /// Versions whose layout is known from their headers.
    known: Vec<String>,
}

#[derive(Deserialize, Debug)]
struct Release {
    version: String,
    /// Whether the recorder can track its allocator. Otherwise blocks come from PyTorch's profiler reporter.
    tracker: bool,
}

fn list() -> &'static Tested {
    static LIST: OnceLock<Tested> = OnceLock::new();
    LIST.get_or_init(|| {
        // A unit test parses the embedded file, so the fallback is never used.
        serde_json::from_str(include_str!("tested-versions.json"))
            .unwrap_or(Tested { cpython: Cpython { tested: Vec::new(), known: Vec::new() }, pytorch: Vec::new() })
    })
}

/// The numbers of a version: `2.11.0+cu130` gives 2, 11, 0.
fn numbers(version: &str) -> Vec<u32> {
    let release = version.split(['+', 'a', 'b', 'r', '-']).next().unwrap_or_default();
    release.split('.').map_while(|n| n.parse().ok()).collect()
}

fn compare(a: &str, b: &str) -> Ordering {
    numbers(a).cmp(&numbers(b))
}

/// The range of CPython versions whose layouts are known, such as `3.8 to 3.14`.
pub(super) fn pythons() -> String {
    let cpython = &list().cpython;
    let all: Vec<&String> = cpython.tested.iter().chain(&cpython.known).collect();
    match (all.first(), all.last()) {
        (Some(first), Some(last)) => format!("{first} to {last}"),
        _ => "3".to_owned(),
    }
}

/// Whether the tests cover this CPython. `version` is its full version.
pub(super) fn is_python_tested(version: &str) -> bool {
    let minor = numbers(version);
    list().cpython.tested.iter().any(|t| minor.starts_with(&numbers(t)))
}

/// The PyTorch releases that the tests cover and whose allocator can be tracked.
pub(super) fn pytorches() -> String {
    let releases: Vec<&str> = list().pytorch.iter().filter(|r| r.tracker).map(|r| r.version.as_str()).collect();
    releases.join(", ")
}

/// A finding on a PyTorch release, before it runs.
pub(super) fn pytorch(version: &str, cuda: Option<&str>) -> Finding {
    let what = "PyTorch";
    let releases = &list().pytorch;
    let exact = releases.iter().find(|r| compare(&r.version, version) == Ordering::Equal);
    if cuda.is_none() {
        return Finding::note(what, format!("{version}, built without CUDA: CPU tensors are recorded"));
    }
    let without = releases.iter().filter(|r| !r.tracker).max_by(|a, b| compare(&a.version, &b.version));
    if let Some(without) = without.filter(|w| compare(version, &w.version) != Ordering::Greater) {
        let known = if exact.is_some() { "is tested and" } else { "is older than those tested; it" };
        return Finding::off(
            what,
            format!(
                "{version} {known} has no door for its allocator's tracker (as {}): block sizes are rounded, no segments, no streams",
                without.version
            ),
            format!("use a later release: {} are tested", pytorches()),
        );
    }
    if exact.is_some() {
        return Finding::ok(what, format!("{version} is tested"));
    }
    Finding::note(what, format!("{version} is not among those tested ({}): verified when it runs", pytorches()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::diagnosis::State;

    #[test]
    fn the_list_is_sound_and_in_order() {
        let read: Tested = serde_json::from_str(include_str!("tested-versions.json")).unwrap();
        assert!(read.cpython.tested.is_sorted_by(|a, b| compare(a, b) == Ordering::Less));
        assert!(read.pytorch.is_sorted_by(|a, b| compare(&a.version, &b.version) == Ordering::Less));
        assert_eq!(pythons(), "3.8 to 3.14");
    }

    #[test]
    fn versions_are_judged() {
        let state = |version, cuda| pytorch(version, cuda).state;
        assert_eq!(state("2.11.0+cu130", Some("13.0")), State::Ok);
        assert_eq!(state("2.12.0+cu130", Some("13.0")), State::Note);
        assert_eq!(state("2.16.0a0+git1234", Some("13.0")), State::Note);
        assert_eq!(state("2.11.0+cpu", None), State::Note);
        assert_eq!(state("2.1.2+cu121", Some("12.1")), State::Off);
        assert_eq!(state("1.13.1", Some("11.7")), State::Off);
        assert!(is_python_tested("3.11.7") && !is_python_tested("3.14.0") && !is_python_tested("3.1.4"));
    }
}
