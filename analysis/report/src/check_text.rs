//! The result of `memtrace check` as text.

use memtrace_input::printable;
use memtrace_summary::CheckReport;

/// The result as text: the headline, then one line for each further failure and each note.
pub fn check_text(report: &CheckReport) -> String {
    let mut lines = vec![format!("memtrace check: {}", report.headline)];
    let failed = report.results.iter().filter(|result| !result.passed);
    lines.extend(failed.skip(1).map(|result| format!("  FAIL  {}", result.text)));
    lines.extend(report.notes.iter().map(|note| format!("  note: {note}")));
    lines.iter().map(|line| printable::line(line).into_owned() + "\n").collect()
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
            (Some(file), Some(line)) => format!("file={},line={line},", property(file)),
            _ => String::new(),
        };
        out += &format!("::error {place}title=memtrace check::{}\n", message(&result.text));
    }
    for note in &report.notes {
        out += &format!("::notice title=memtrace check::{}\n", message(note));
    }
    out
}

/// Escapes the message of a workflow command, as GitHub's runner expects it.
fn message(text: &str) -> String {
    let escaped = text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    printable::line(&escaped).into_owned()
}

/// Escapes a property of a workflow command, as GitHub's runner expects it.
fn property(text: &str) -> String {
    message(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use memtrace_summary::CheckResult;

    use super::*;

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
