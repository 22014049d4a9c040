//! Checks the dependency arrows of ARCHITECTURE.md against the manifests and the `use` lines.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use memtrace_tests::victim::root;

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in std::fs::read_dir(&at).unwrap().map(|e| e.unwrap().path()) {
            if entry.is_dir() {
                todo.push(entry);
            } else if entry.extension().is_some_and(|e| e == "rs") {
                found.push(entry);
            }
        }
    }
    assert!(!found.is_empty(), "no sources in {}", folder.display());
    found
}

/// Every word that follows `prefix` in the code of a file, outside comments.
fn words_after(text: &str, prefix: &str) -> BTreeSet<String> {
    let code = text.lines().filter(|l| !l.trim_start().starts_with("//"));
    code.flat_map(|line| {
        line.match_indices(prefix)
            // Skip matches at the end of a longer word, such as a file name in a string.
            .filter(|(at, _)| !line[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
            .map(|(at, _)| {
                line[at + prefix.len()..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
            })
            .collect::<Vec<_>>()
    })
    .filter(|w| !w.is_empty())
    .collect()
}

/// Our crates that the sources of a crate name.
fn crates_used(name: &str) -> BTreeSet<String> {
    let folder = root().join(name).join("src");
    let texts = sources(&folder).into_iter().map(|p| std::fs::read_to_string(p).unwrap());
    texts.flat_map(|t| words_after(&t, "memtrace_")).collect()
}

/// For each top-level module of a crate, the other top-level modules that its sources name.
fn modules_used(name: &str) -> BTreeMap<String, BTreeSet<String>> {
    let folder = root().join(name).join("src");
    let mut used: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in sources(&folder) {
        let first = path.strip_prefix(&folder).unwrap().components().next().unwrap();
        let module = first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let mut words = words_after(&text, "crate::");
        words.remove(&module);
        used.entry(module).or_default().extend(words);
    }
    used
}

/// Each crate's folder, its name after `memtrace_`, and the crates that it may use.
const CRATES: &[(&str, &str, &[&str])] = &[
    ("trace", "trace", &[]),
    ("interpose", "interpose", &["trace"]),
    ("launcher", "launcher", &["trace", "analysis"]),
    ("analysis/input", "input", &["trace"]),
    ("analysis/replay", "replay", &["trace", "input"]),
    ("analysis/insight", "insight", &["trace", "input", "replay"]),
    ("analysis/output", "output", &["trace", "input", "replay", "insight"]),
    ("analysis/report", "report", &["trace", "input", "replay", "insight", "output"]),
    ("analysis", "analysis", &["input", "replay", "insight", "output", "report"]),
    ("tests", "tests", &["trace", "analysis"]),
];

#[test]
fn crates_point_only_where_they_may() {
    for (folder, name, may) in CRATES {
        let used = crates_used(folder);
        for used in used.iter().filter(|u| CRATES.iter().any(|(_, ours, _)| ours == u) && u != name) {
            assert!(may.contains(&used.as_str()), "{name} may not use {used}");
        }
        let manifest = std::fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        assert!(
            !manifest.contains("memtrace-interpose.") && !manifest.contains("../interpose"),
            "{name} imports interpose"
        );
    }
}

#[test]
fn modules_point_only_where_they_may() {
    let forbidden: &[(&str, &str, &[&str])] = &[
        ("interpose", "stack", &["hooks", "guard", "emit", "process", "local"]),
        ("interpose", "emit", &["hooks", "guard"]),
        ("interpose", "real", &["hooks", "guard", "emit", "stack", "process"]),
        ("launcher", "drain", &["commands", "cli"]),
        ("analysis/input", "symbols", &["load", "recording", "survey"]),
        ("analysis/insight", "rules", &["passes"]),
    ];
    for (name, module, not) in forbidden {
        let used = modules_used(name);
        let used = used.get(*module).unwrap_or_else(|| panic!("{name} has no module {module}"));
        for other in *not {
            assert!(!used.contains(*other), "in {name}, {module} may not use {other}");
        }
    }
}
