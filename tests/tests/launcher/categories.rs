//! `--categories FILE`: what a file of rules gives on the command line, and what is said about one that cannot be used.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::launcher_support::{memtrace, output, stderr};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/snapshots/resnet_leak.pickle.gz")
}

fn run(arguments: &[&str], rules: &Path) -> std::process::Output {
    output(Command::new(memtrace()).args(arguments).arg("--categories").arg(rules))
}

#[test]
fn rules_apply_to_every_reading_command() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("rules.json");
    std::fs::write(&rules, r#"{"categories": [{"name": "convolutions", "stack": "/conv\\.py:\\d+ "}]}"#).unwrap();
    let golden = golden();
    let golden = golden.to_str().unwrap();
    let table = folder.path().join("table.csv");
    let commands: [(&[&str], &str); 6] = [
        (&["report", golden], "In use by custom category"),
        (&["report", golden, "--json"], "\"by_custom_category\""),
        (&["lines", golden], "Custom categories"),
        (&["diff", golden, golden, "--json"], "\"by_custom_category\""),
        (&["check", golden, "--max-category", "convolutions=1TiB"], "convolutions "),
        (&["export", golden, "--to", "csv", "-o", table.to_str().unwrap()], ""),
    ];
    for (arguments, text) in commands {
        let ended = run(arguments, &rules);
        let printed = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert_eq!(ended.status.code(), Some(0), "{arguments:?}: {}", stderr(&ended));
        assert!(printed.contains(text), "{arguments:?}: {printed}");
    }
    assert!(std::fs::read_to_string(&table).unwrap().contains(",convolutions,"));
    let ended = run(&["check", golden, "--max-category", "convolutions=1"], &rules);
    assert_eq!(ended.status.code(), Some(1), "{}", stderr(&ended));
}

#[test]
fn a_file_that_cannot_be_used_is_one_error() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("rules.json");
    let golden = golden();
    let golden = golden.to_str().unwrap();
    let error = |arguments: &[&str], code: i32, begin: &str| {
        let ended = run(arguments, &rules);
        let text = stderr(&ended);
        assert_eq!(ended.status.code(), Some(code), "{text}");
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() == 2 && lines[0].starts_with(begin) && lines[1].contains("help: "), "{begin}: {text}");
    };
    error(&["report", golden], 2, &format!("error: cannot read {}: No such file", rules.display()));
    std::fs::write(&rules, "{\"categories\": [\n{\"name\": \"a\",\n\"stack\": \"(\"}]}").unwrap();
    let unusable = format!("error: cannot use {}: line 3: invalid regular expression: ", rules.display());
    for arguments in [&["report", golden][..], &["lines", golden], &["diff", golden, golden]] {
        error(arguments, 2, &unusable);
    }
    error(&["check", golden, "--max-peak", "1TiB"], 2, &unusable);
    error(&["export", golden, "--to", "json"], 2, &unusable);
    // The command does not start.
    let made = folder.path().join("made");
    let command = ["--", "touch", made.to_str().unwrap()];
    let ended = output(Command::new(memtrace()).arg("--categories").arg(&rules).args(command));
    assert_eq!(ended.status.code(), Some(125));
    assert!(stderr(&ended).starts_with(&format!("memtrace: {unusable}")) && !made.exists(), "{}", stderr(&ended));
    std::fs::write(&rules, b"{\n\xff}").unwrap();
    error(&["report", golden], 2, &format!("error: cannot use {}: line 2: it is not UTF-8", rules.display()));
    std::fs::write(&rules, "{\"categories\": [{\"name\": \"a\", \"stack\": \"x\"}]}").unwrap();
    error(&["export", golden, "--to", "folded"], 2, "error: --categories applies only to ");
    error(&["check", golden, "--max-category", "b=1MiB"], 2, "error: --max-category: no category is named b");
}
