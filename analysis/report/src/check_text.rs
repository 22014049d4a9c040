//! The result of `memtrace check` as text.

use memtrace_input::printable::{self, github_message, github_property};
use memtrace_summary::CheckReport;

/// The result as text: the headline, then one line for each further failure and each note.
pub fn check_text(report: &CheckReport) -> String {
    let mut lines = vec![format!("memtrace check: {}", report.headline)];
    let failed = report.results.iter().filter(|result| !result.passed);
    lines.extend(failed.skip(1).map(|result| format!("  FAIL  {}", result.text)));
    lines.extend(report.notes.iter().map(|note| format!("  note: {note}")));
    lines.iter().map(|line| printable::output_line(line) + "\n").collect()
}

/// The result as workflow commands of GitHub Actions: one annotation per failure and per note. Files below `root`
/// are named relative to it; other absolute paths are omitted.
pub fn github_annotations(report: &CheckReport, root: &str) -> String {
    let root = format!("{}/", root.trim_end_matches('/'));
    let mut out = String::new();
    for result in report.results.iter().filter(|result| !result.passed) {
        let file = result.file.as_deref().and_then(|file| match file.strip_prefix(&root) {
            None if file.starts_with('/') => None,
            None => Some(file),
            below => below,
        });
        let place = match (file, result.line) {
            (Some(file), Some(line)) => format!("file={},line={line},", github_property(file)),
            _ => String::new(),
        };
        out += &format!("::error {place}title=memtrace check::{}\n", github_message(&result.text));
    }
    for note in &report.notes {
        out += &format!("::notice title=memtrace check::{}\n", github_message(note));
    }
    out
}

#[cfg(test)]
mod tests {
    use memtrace_summary::CheckResult;

    use super::*;

    #[test]
    fn ci_services_find_no_command_in_the_text() {
        let hostile = CheckResult { text: "x ##[stop-commands]y\n::error::z".into(), ..CheckResult::default() };
        let report = CheckReport {
            headline: "FAIL  a\n::error::b".into(),
            results: vec![CheckResult::default(), hostile],
            notes: vec!["##vso[task.setvariable variable=x]y".into()],
            ..CheckReport::default()
        };
        for line in check_text(&report).lines() {
            assert!(
                !line.trim_start().starts_with("::") && !line.contains("##[") && !line.contains("##vso["),
                "{line}"
            );
        }
        // The only commands are those of the annotations themselves.
        let annotations = github_annotations(&report, "/repo");
        assert_eq!(annotations.lines().count(), 3, "{annotations}");
        assert!(
            annotations.lines().all(|line| line.starts_with("::error title=") || line.starts_with("::notice title="))
        );
        assert!(!annotations.contains("##[") && !annotations.contains("##vso["), "{annotations}");
    }

    #[test]
    fn annotations_are_escaped() {
        let result = CheckResult {
            file: Some("/repo/a, b:c%.py".into()),
            line: Some(3),
            text: "peak 5 % too\r\nhigh::x".into(),
            ..CheckResult::default()
        };
        let outside = CheckResult {
            file: Some("/elsewhere/x.py".into()),
            line: Some(1),
            text: "y".into(),
            ..CheckResult::default()
        };
        let fine = CheckResult { passed: true, ..outside.clone() };
        let report =
            CheckReport { results: vec![result, outside, fine], notes: vec!["n".into()], ..CheckReport::default() };
        assert_eq!(
            github_annotations(&report, "/repo"),
            "::error file=a%2C b%3Ac%25.py,line=3,title=memtrace check::peak 5 %25 too%0D%0Ahigh::x\n\
             ::error title=memtrace check::y\n::notice title=memtrace check::n\n"
        );
    }
}
