//! Names that attack the reader: every text output and every export of a run whose names are control sequences, markup,
//! formulas, separators and commands for CI services.

use std::collections::BTreeMap;
use std::io::Read as _;

use crate::showcase::{PLAIN, Words};
use memtrace_analysis::export::{
    FlameFormat, FlameWeight, SnapshotOptions, TableLayout, TimelineFormat, Window, blocks_csv, flame_graph, perfetto,
    pprof, snapshot, tables, timeline,
};
use memtrace_analysis::load::Run;
use memtrace_analysis::{
    CheckOptions, DiffOptions, DiffPageRun, HtmlOptions, LinesOptions, Process, SECTIONS, TextOptions, ToText,
    Tolerance, check, check_text, diff, diff_html, github_annotations, html_report, lines, lines_html, printable,
    section_text, summarize,
};
use serde_json::Value;

const HOSTILE: &str = "=1+cmd|'/c calc'!A0;@b,-c\"'></title><script>alert(1)</script>\x1b]0;x\x07\x1b[2J\u{9b}31m\
                       \u{202e}\u{2066}\u{200f}\u{2028}\u{7f}\t\r\n ::error::x ##[stop-commands]y ##vso[task.z]";

const EVIL: Words = Words {
    file: HOSTILE,
    function: HOSTILE,
    label: HOSTILE,
    module: HOSTILE,
    class: HOSTILE,
    node: HOSTILE,
    thread: HOSTILE,
    argument: HOSTILE,
    device: HOSTILE,
};

fn run(words: &Words) -> Run {
    crate::showcase::run(words, 0..2)
}

fn exported(run: &Run, write: impl FnOnce(&Process, &mut Vec<u8>) -> memtrace_analysis::Result<()>) -> Vec<u8> {
    let mut out = Vec::new();
    write(&run.processes()[0], &mut out).unwrap();
    out
}

fn flame(run: &Run, format: FlameFormat) -> String {
    let window = Window::WHOLE;
    let out = exported(run, |p, out| flame_graph(p, &window, FlameWeight::Total, format, out, &mut |_| {}));
    String::from_utf8(out).unwrap()
}

fn csv(run: &Run) -> String {
    String::from_utf8(exported(run, |p, out| blocks_csv(p, &Window::WHOLE, None, out, &mut |_| {}))).unwrap()
}

/// The output of the commands on a terminal, by command.
fn printed(run: &Run, options: &TextOptions) -> BTreeMap<String, String> {
    let summary = summarize(run, &mut |_| {}).unwrap();
    let mut all = BTreeMap::from([
        ("report".to_owned(), summary.to_text(options)),
        ("report --json".to_owned(), summary.to_json()),
    ]);
    for section in SECTIONS {
        all.insert(format!("report --section {}", section.name), section_text(&summary, section, options));
    }
    let table = lines(run, &LinesOptions { top: 99, ..LinesOptions::default() }, &mut |_| {}).unwrap();
    all.insert("lines".to_owned(), table.to_text(options));
    all.insert("lines --json".to_owned(), table.to_json());
    let comparison = diff(run, &self::run(&PLAIN), &DiffOptions::default(), &mut |_| {});
    all.insert("diff".to_owned(), comparison.to_text(options));
    all.insert("diff --json".to_owned(), comparison.to_json());
    let result = check(&summary, None, None, &limits());
    all.insert("check".to_owned(), check_text(&result));
    all.insert("check --json".to_owned(), result.to_json());
    all
}

/// Limits that the run exceeds.
fn limits() -> CheckOptions {
    CheckOptions {
        max_peak: Some(1),
        max_reserved: Some(1),
        max_leak: None,
        max_categories: Vec::new(),
        released_after: None,
        no_oom: true,
        no_issues: vec!["any".to_owned()],
        tolerance: Tolerance::Bytes(0),
        rank: None,
        device: None,
        allow_incomplete: false,
    }
}

#[track_caller]
fn assert_printable(what: &str, text: &str) {
    let bad = text.chars().find(|c| *c != '\n' && printable::is_unprintable(*c));
    assert_eq!(bad, None, "{what}: {text:?}");
}

#[track_caller]
fn assert_no_command(what: &str, text: &str) {
    for line in text.lines() {
        assert!(!line.trim_start().starts_with("::"), "{what}: {line:?}");
        assert!(!line.contains("##[") && !line.contains("##vso["), "{what}: {line:?}");
    }
}

#[test]
fn nothing_printed_controls_a_terminal_or_a_ci_service() {
    let run = run(&EVIL);
    // In narrow reports, a wrapped line can begin anywhere in a name.
    for width in [40, 63, 80, 100, 200] {
        for (command, text) in printed(&run, &TextOptions { width, ..TextOptions::default() }) {
            assert_printable(&command, &text);
            assert_no_command(&command, &text);
        }
        for (command, text) in
            printed(&run, &TextOptions { width, color: true, verbose: true, ..TextOptions::default() })
        {
            let own = ["0", "1", "2", "1;31", "1;32", "1;33", "32", "33", "34", "35", "36", "37"]
                .map(|code| format!("\x1b[{code}m"));
            assert_printable(&command, &own.iter().fold(text, |text, own| text.replace(own, "")));
        }
    }
}

#[test]
fn annotations_have_no_other_command() {
    let summary = summarize(&run(&EVIL), &mut |_| {}).unwrap();
    let result = check(&summary, None, None, &limits());
    let annotations = github_annotations(&result, "/");
    assert_printable("annotations", &annotations);
    let failed = result.results.iter().filter(|result| !result.passed).count();
    assert!(failed > 0);
    assert_eq!(annotations.lines().count(), failed + result.notes.len(), "{annotations}");
    for line in annotations.lines() {
        assert!(line.starts_with("::error ") || line.starts_with("::notice "), "{line}");
        let (properties, _) = line.split_at(line[2..].find("::").unwrap() + 2);
        let properties = properties.split_once(' ').unwrap().1;
        for property in properties.split(',') {
            let name = property.split_once('=').map(|(name, _)| name);
            assert!(matches!(name, Some("file" | "line" | "title")), "{line}");
        }
        assert!(!line.contains("##["), "{line}");
    }
}

/// Every text in a JSON value.
fn strings(value: &Value, out: &mut Vec<String>) {
    match value {
        Value::String(text) => out.push(text.clone()),
        Value::Array(values) => values.iter().for_each(|value| strings(value, out)),
        Value::Object(fields) => fields.values().for_each(|value| strings(value, out)),
        _ => {}
    }
}

#[test]
fn json_keeps_the_names() {
    let all = printed(&run(&EVIL), &TextOptions::default());
    for (command, text) in all.iter().filter(|(command, _)| command.ends_with("--json")) {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{command}: {e}"));
        let mut texts = Vec::new();
        strings(&value, &mut texts);
        // The result of a check has names only as parts of sentences.
        let has = if command == "check --json" {
            texts.iter().any(|text| text.contains('\x1b'))
        } else {
            texts.iter().any(|text| text == HOSTILE)
        };
        assert!(has, "{command}: {text}");
    }
}

/// The records of a CSV file (RFC 4180).
fn records(text: &str) -> Vec<Vec<String>> {
    let (mut records, mut record, mut field) = (Vec::new(), Vec::new(), String::new());
    let mut chars = text.chars().peekable();
    let mut is_quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '"' if is_quoted && chars.peek() == Some(&'"') => field.extend(chars.next()),
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => record.push(std::mem::take(&mut field)),
            '\n' if !is_quoted => {
                record.push(std::mem::take(&mut field));
                records.push(std::mem::take(&mut record));
            }
            c => field.push(c),
        }
    }
    assert!(!is_quoted && field.is_empty(), "the file ends with a record");
    records
}

#[test]
fn a_spreadsheet_evaluates_no_cell() {
    let text = csv(&run(&EVIL));
    assert_printable("csv", &text);
    let records = records(&text);
    assert_eq!(records.len(), self::records(&csv(&run(&PLAIN))).len());
    let columns = &records[0];
    let mut hostile = 0;
    for record in &records[1..] {
        assert_eq!(record.len(), columns.len(), "{record:?}");
        for (column, cell) in columns.iter().zip(record) {
            hostile += usize::from(cell.contains("cmd|"));
            // The number of a device may be -1.
            let begins_formula = |cell: &str| {
                let is_number = cell.parse::<i64>().is_ok();
                !is_number && cell.trim_start().starts_with(['=', '+', '-', '@', '\t', '\r'])
            };
            // Some spreadsheets split cells at semicolons too, whether they are quoted or not.
            for part in cell.split([';', ',']) {
                assert!(!begins_formula(part), "{column}: {cell}");
            }
        }
    }
    assert!(hostile > 0, "{text}");
}

#[test]
fn folded_stacks_keep_their_format() {
    let (plain, evil) = (flame(&run(&PLAIN), FlameFormat::Folded), flame(&run(&EVIL), FlameFormat::Folded));
    assert_printable("folded", &evil);
    // A line is frames, a space and a number. The order of lines depends on the names.
    let layout = |text: &str| {
        let mut lines: Vec<(usize, u64)> = text
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(frames, bytes)| (frames.split(';').count(), bytes.parse().unwrap()))
            .collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(layout(&evil), layout(&plain), "{evil}");
    assert!(evil.contains("cmd|"));
}

#[test]
fn speedscope_files_keep_their_format() {
    let (plain, evil) = (flame(&run(&PLAIN), FlameFormat::Speedscope), flame(&run(&EVIL), FlameFormat::Speedscope));
    assert_printable("speedscope", &evil);
    assert_no_command("speedscope", &evil);
    let (plain, evil): (Value, Value) = (serde_json::from_str(&plain).unwrap(), serde_json::from_str(&evil).unwrap());
    assert_eq!(evil["profiles"], plain["profiles"], "the names are in the frames only");
    let mut names = Vec::new();
    strings(&evil["shared"], &mut names);
    names.iter().for_each(|name| assert_printable("a name", name));
    assert!(names.iter().any(|name| name.contains("cmd|")), "{names:?}");
}

#[test]
fn pprof_profiles_are_printable() {
    let [plain, evil] = [&PLAIN, &EVIL].map(|words| {
        let file = exported(&run(words), |p, out| pprof(p, &Window::WHOLE, out, &mut |_| {}));
        let mut profile = Vec::new();
        flate2::read::GzDecoder::new(&*file).read_to_end(&mut profile).unwrap();
        profile
    });
    // All texts are UTF-8, and the numbers between them may be any bytes.
    let text = String::from_utf8_lossy(&evil);
    for part in HOSTILE.split(printable::is_unprintable).filter(|part| part.len() > 5) {
        assert!(text.contains(part), "{part}");
    }
    for bad in ["\x1b]0;x", "\x1b[2J", "\u{9b}", "\u{202e}", "\u{2028}"] {
        assert!(!text.contains(bad), "{bad:?}");
    }
    assert!(!String::from_utf8_lossy(&plain).contains("cmd|"));
}

#[test]
fn pages_have_no_markup_of_the_program() {
    let run = run(&EVIL);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let mut report = Vec::new();
    let options = HtmlOptions::default();
    html_report(&summary, &run.processes().iter().collect::<Vec<_>>(), &options, &mut report, &mut |_| {}).unwrap();
    // The rest of the page is the script and its data.
    let report = String::from_utf8(report).unwrap();
    let report = report.split_once("<script").unwrap().0.to_owned().into_bytes();
    let plain = self::run(&PLAIN);
    let comparison = diff(&plain, &run, &DiffOptions::default(), &mut |_| {});
    let plain_summary = summarize(&plain, &mut |_| {}).unwrap();
    let [a, b] = [(&plain, &plain_summary), (&run, &summary)].map(|(run, summary)| DiffPageRun {
        run,
        summary,
        custom_rules: None,
    });
    let mut changes = Vec::new();
    diff_html(&comparison, (a, b), None, &mut changes, &mut |_| {}).unwrap();
    let changes = String::from_utf8(changes).unwrap().split_once("<script").unwrap().0.to_owned().into_bytes();
    let table = lines(&run, &LinesOptions { top: 99, ..LinesOptions::default() }, &mut |_| {}).unwrap();
    let mut line_page = Vec::new();
    lines_html(&table, &mut line_page).unwrap();
    let line_page = String::from_utf8(line_page).unwrap().split_once("<script").unwrap().0.to_owned().into_bytes();
    let picture = exported(&run, |p, out| timeline(p, &Window::WHOLE, 0, TimelineFormat::Svg, out, &mut |_| {}));
    for (what, page) in [("report", report), ("comparison", changes), ("lines", line_page), ("timeline", picture)] {
        let page = String::from_utf8(page).unwrap();
        assert_printable(what, &page);
        assert!(!page.contains("<script") && !page.contains("\"'>"), "{what}: {page}");
        assert!(what == "timeline" || page.contains("&lt;script&gt;"), "{what}: {page}");
    }
}

/// Binary files hold the names as they are.
#[test]
fn binary_files_keep_the_names() {
    let run = run(&EVIL);
    let pickle = exported(&run, |p, out| snapshot(p, out, &SnapshotOptions::default(), &mut |_| {}).map(drop));
    let trace = exported(&run, |p, out| perfetto(p, &Window::WHOLE, out, &mut |_| {}));
    for (what, bytes) in [("snapshot", pickle), ("perfetto", trace)] {
        assert!(bytes.windows(HOSTILE.len()).any(|part| part == HOSTILE.as_bytes()), "{what}");
    }
    let process = &run.processes()[0];
    let mut files = [const { Vec::new() }; 4];
    let outputs = files.each_mut().map(|file| file as &mut (dyn std::io::Write + Send));
    tables(process, "run", TableLayout::Whole, &Window::WHOLE, None, outputs, &mut |_| {}).unwrap();
    assert!(files.iter().all(|file: &Vec<u8>| file.starts_with(b"PAR1") && file.ends_with(b"PAR1")));
}
