//! The documents of promises name a test for each promise, and every test that they name exists.

use std::collections::BTreeSet;
use std::path::Path;

use memtrace_tests::traced_program::root;

const DOCUMENTS: [&str; 2] = ["docs/reference/reliability.md", "docs/reference/safety.md"];
/// The heading of the column that names tests.
const COLUMN: &str = "Test";

/// The cells of a row of a Markdown table.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inside = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    // `\|` is a character of the text. No cell that is compared here has one.
    Some(inside.split('|').map(str::trim).collect())
}

/// The texts in backticks.
fn names(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// The names of all functions below these folders, and those of all source files.
fn known(folder: &Path, functions: &mut BTreeSet<String>, modules: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        let path = entry.path();
        if path.is_dir() {
            modules.insert(entry.file_name().into_string().unwrap());
            if entry.file_name() != "target" {
                known(&path, functions, modules);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            modules.insert(path.file_stem().unwrap().to_str().unwrap().to_owned());
            let text = std::fs::read_to_string(&path).unwrap();
            let declared = text.lines().filter_map(|line| line.trim_start().strip_prefix("fn "));
            let name = |rest: &str| rest.split(['(', '<']).next().unwrap_or_default().to_owned();
            functions.extend(declared.map(name));
        }
    }
}

#[test]
fn each_promise_has_a_test_that_exists() {
    let (mut functions, mut modules) = (BTreeSet::new(), BTreeSet::new());
    for folder in ["tests/tests", "trace", "analysis", "launcher/src", "interpose"] {
        known(&root().join(folder), &mut functions, &mut modules);
    }
    let mut promises = 0;
    for document in DOCUMENTS {
        let text = std::fs::read_to_string(root().join(document)).unwrap();
        let mut has_column = false;
        for line in text.lines() {
            let Some(cells) = cells(line) else {
                has_column = false;
                continue;
            };
            let last = *cells.last().unwrap();
            if last == COLUMN {
                has_column = true;
            } else if has_column && !last.starts_with("---") {
                let named = names(last);
                assert!(!named.is_empty(), "{document}: no test for this promise: {line}");
                for name in named {
                    if name.contains('/') {
                        assert!(root().join(name).exists(), "{document}: {name} does not exist");
                        continue;
                    }
                    let mut path: Vec<&str> = name.split("::").collect();
                    let function = path.pop().unwrap();
                    assert!(functions.contains(function), "{document}: no function {function}: {line}");
                    let missing = path.iter().find(|module| !modules.contains(**module) && **module != "exhaustive");
                    assert_eq!(missing, None, "{document}: {name}");
                }
                promises += 1;
            }
        }
    }
    assert!(promises > 40, "{promises}");
}
