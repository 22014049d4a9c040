//! The releases that memtrace's own tests cover. `tested-versions.json` is the only list.
//!
//! `scripts/versions` writes the list and the documentation from what the suite ran, and a test compares them. The list
//! is advice, not permission: the recorder verifies the layout of every release at run time.

use std::cmp::Ordering;
use std::sync::OnceLock;

use serde::Deserialize;

use super::report::Check;

#[derive(Deserialize, Debug, Default)]
struct Tested {
    /// The versions of CPython whose stacks the test suite compares.
    stacks: Vec<String>,
    /// In ascending order.
    pairs: Vec<Pair>,
}

/// A release of PyTorch on a version of CPython.
#[derive(Deserialize, Debug)]
struct Pair {
    pytorch: String,
    off: Vec<Off>,
}

/// A feature that the recorder switches off.
#[derive(Deserialize, Debug)]
struct Off {
    /// The name that doctor shows.
    feature: String,
}

impl Pair {
    /// Whether the recorder can track the allocator. Otherwise blocks come from PyTorch's profiler reporter.
    fn has_tracker(&self) -> bool {
        !self.off.iter().any(|off| off.feature == "Allocator tracker")
    }
}

fn list() -> &'static Tested {
    static LIST: OnceLock<Tested> = OnceLock::new();
    LIST.get_or_init(|| {
        // A unit test parses the embedded file, so the fallback is never used.
        serde_json::from_str(include_str!("tested-versions.json")).unwrap_or_default()
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

/// The range of CPython versions that the tests cover, such as `3.8 to 3.15`.
pub(super) fn pythons() -> String {
    let stacks = &list().stacks;
    match (stacks.first(), stacks.last()) {
        (Some(first), Some(last)) => format!("{first} to {last}"),
        _ => "3".to_owned(),
    }
}

/// Whether the tests cover this CPython. `version` is its full version.
pub(super) fn is_python_tested(version: &str) -> bool {
    let minor = numbers(version);
    list().stacks.iter().any(|t| minor.starts_with(&numbers(t)))
}

/// The PyTorch releases that the tests cover and whose allocator can be tracked.
pub(super) fn pytorches() -> String {
    let tracked = list().pairs.iter().filter(|pair| pair.has_tracker());
    let mut releases: Vec<&str> = tracked.map(|pair| pair.pytorch.as_str()).collect();
    releases.dedup();
    releases.join(", ")
}

/// Checks a PyTorch release, before it runs.
pub(super) fn pytorch(version: &str, cuda: Option<&str>) -> Check {
    let name = "PyTorch";
    let pairs = &list().pairs;
    let exact = pairs.iter().find(|pair| compare(&pair.pytorch, version) == Ordering::Equal);
    if cuda.is_none() {
        return Check::note(name, format!("{version}, built without CUDA; CPU tensors are recorded"));
    }
    let without = pairs.iter().rfind(|pair| !pair.has_tracker());
    if let Some(without) = without.filter(|w| compare(version, &w.pytorch) != Ordering::Greater) {
        let coverage = if exact.is_some() { "is tested, but" } else { "is older than the tested releases, and" };
        return Check::failed(
            name,
            format!(
                "{version} {coverage} its allocator has no tracker interface (as {}); sizes are rounded, segments and \
                 streams are missing",
                without.pytorch
            ),
            format!("use a later release; tested releases: {}", pytorches()),
        );
    }
    if exact.is_some() {
        return Check::ok(name, format!("{version} is tested"));
    }
    Check::note(name, format!("{version} is not tested (tested: {}); memtrace verifies it when it runs", pytorches()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::CheckStatus;

    #[test]
    fn the_list_is_valid_and_in_order() {
        let read: Tested = serde_json::from_str(include_str!("tested-versions.json")).unwrap();
        assert!(read.stacks.is_sorted_by(|a, b| compare(a, b) == Ordering::Less));
        assert!(read.pairs.is_sorted_by(|a, b| compare(&a.pytorch, &b.pytorch) != Ordering::Greater));
        assert_eq!(pythons(), "3.8 to 3.15");
    }

    #[test]
    fn versions_are_classified() {
        let status = |version, cuda| pytorch(version, cuda).status;
        assert_eq!(status("2.11.0+cu130", Some("13.0")), CheckStatus::Ok);
        assert_eq!(status("2.10.0+cu130", Some("13.0")), CheckStatus::Note);
        assert_eq!(status("2.16.0a0+git1234", Some("13.0")), CheckStatus::Note);
        assert_eq!(status("2.11.0+cpu", None), CheckStatus::Note);
        assert_eq!(status("2.1.2+cu121", Some("12.1")), CheckStatus::Failed);
        assert_eq!(status("1.13.1", Some("11.7")), CheckStatus::Failed);
        assert!(is_python_tested("3.11.7") && is_python_tested("3.14.0"));
        assert!(!is_python_tested("3.16.0") && !is_python_tested("3.1.4"));
    }
}
