//! The line table of a hand-made training program: figures computed by hand, golden text and JSON, the page.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it lines` rewrites the golden files.

use crate::training::MIB;
use memtrace_analysis::report::{FunctionLines, LineFigures};
use memtrace_analysis::{LinesOptions, LinesReport, TextOptions, ToText, lines};

fn options() -> LinesOptions {
    LinesOptions { top: 5, ..LinesOptions::default() }
}

fn report(options: &LinesOptions) -> LinesReport {
    lines(&crate::training::run(3, false), options, &mut |_| {}).expect("there are such functions")
}

fn figures(function: &FunctionLines, line: u32) -> LineFigures {
    function.lines.iter().find(|l| l.line == line).and_then(|l| l.figures).expect("a line with events")
}

#[test]
fn figures_match_the_program() {
    let report = report(&options());
    let module = report.functions.iter().find(|f| f.function == "<module>").expect("the module");
    // 8 MiB of parameters. Then, in the first step, the batch (1), activations (4) and scratch memory (3).
    assert_eq!(figures(module, 10).active_peak_bytes, 8 * MIB);
    assert_eq!((figures(module, 10).net_bytes, figures(module, 10).allocations), (8 * MIB as i64, 2));
    let forward = figures(module, 20);
    // From the second step on there are 16 MiB of Adam's state.
    assert_eq!(forward.active_peak_bytes, (8 + 16 + 1 + 4 + 3) * MIB);
    assert_eq!((forward.allocations, forward.frees, forward.net_bytes), (9, 3, 12 * MIB as i64));
    assert_eq!((forward.times, forward.backward_allocations, forward.backward_bytes), (3, 12, 36 * MIB));
    // The backward pass does not count for the line whose nodes it runs.
    assert_eq!(forward.allocated_bytes, 3 * 7 * MIB);
    // Every block is in a segment of its own, and the segments are never freed.
    assert_eq!(report.reserved_peak_bytes, module.reserved_peak_bytes.max(report.reserved_peak_bytes));
    let model = report.functions.iter().find(|f| f.function == "forward").expect("the model");
    assert_eq!(figures(model, 6), LineFigures { ..forward });
    assert_eq!(figures(module, 22).times, 3, "state and step of the optimizer are one call, as far as events tell");
}

#[test]
fn statistics_agree_with_the_figures() {
    let report = report(&LinesOptions { statistics: true, ..options() });
    let rows: Vec<_> = report.functions.iter().flat_map(|f| &f.lines).filter(|row| row.figures.is_some()).collect();
    assert!(rows.len() > 5);
    for row in rows {
        let figures = row.figures.expect("filtered");
        let statistics = |key: &str| row.statistics[key];
        assert_eq!(statistics("allocated_bytes.all.allocated"), figures.allocated_bytes, "line {}", row.line);
        assert_eq!(statistics("allocated_bytes.all.freed"), figures.freed_bytes);
        assert_eq!(statistics("allocation.all.allocated"), figures.allocations);
        assert_eq!(statistics("allocation.all.freed"), figures.frees);
        assert_eq!(statistics("active_bytes.all.peak"), figures.active_peak_bytes);
        assert_eq!(statistics("reserved_bytes.all.peak"), figures.reserved_peak_bytes);
    }
    let without = LinesOptions { range: Some("no such range".into()), ..options() };
    assert_eq!(lines(&crate::training::run(1, false), &without, &mut |_| {}), None);
}

#[test]
fn functions_and_files_are_selected_by_the_ends_of_their_names() {
    let list = |names: Option<&str>| names.iter().flat_map(|names| names.split('|')).map(Into::into).collect();
    let by = |function: Option<&str>, file: Option<&str>| {
        let options = LinesOptions { functions: list(function), files: list(file), ..options() };
        lines(&crate::training::run(1, false), &options, &mut |_| {}).map(|r| r.functions.len())
    };
    assert_eq!(by(Some("forward"), None), Some(2));
    assert_eq!(by(Some("forward"), Some("modules/linear.py")), Some(1));
    assert_eq!(by(None, Some("model.py")), Some(1));
    assert_eq!(by(Some("forward|step"), None), Some(3));
    assert_eq!(by(Some("nothing|forward"), Some("nothing.py|model.py")), Some(1));
    assert_eq!(by(Some("nothing"), None), None);
    assert_eq!(by(None, Some("odel.py")), None);
}

#[test]
fn the_page_has_the_table_as_json_and_the_policy_of_the_other_pages() {
    let report = report(&options());
    let mut page = Vec::new();
    memtrace_analysis::lines_html(&report, &mut page).unwrap();
    let page = String::from_utf8(page).unwrap();
    let found = crate::page_data::elements(&page);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["line-table"]);
    let inside: serde_json::Value = serde_json::from_slice(&found["line-table"]).unwrap();
    assert_eq!(inside["lines"], serde_json::from_str::<serde_json::Value>(&report.to_json()).unwrap());
    let policy = page.split_once("Content-Security-Policy\" content=\"").unwrap().1.split_once('"').unwrap().0;
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
    // Browsers without scripts show the table as text.
    let text = page.split_once("<noscript><pre id=\"report\">").unwrap().1.split_once("</pre>").unwrap().0;
    assert!(text.contains("forward") && text.contains("Active peak"), "{text}");
}

#[test]
fn text_and_json_are_golden() {
    let report = report(&LinesOptions { files: vec!["train.py".into()], ..options() });
    crate::golden::assert_matches("lines.txt", &report.to_text(&TextOptions::default()));
    crate::golden::assert_matches("lines.json", &report.to_json());
    crate::schemas::assert_valid("lines", &report.to_json());
}

/// Figures give way to the code, the least needed ones first, and the report names them.
#[test]
fn code_is_whole_where_the_width_allows_it() {
    let mut report = report(&options());
    let module = report.functions.iter_mut().find(|f| f.function == "<module>").expect("the module");
    let code = "    logits = model(ids, mask=mask)  # in a long line";
    let too_long = format!("    loss = criterion({}end)", "prediction, target, ".repeat(6));
    for line in &mut module.lines {
        line.text = Some(if line.line == 10 { too_long.clone() } else { code.to_owned() });
    }
    for (width, columns) in [(160, 7), (120, 4), (100, 2), (80, 1)] {
        let text = report.to_text(&TextOptions { width, ..TextOptions::default() });
        let is_whole = |line: &&str| line.ends_with(code.trim_start());
        assert_eq!(text.lines().filter(is_whole).count(), 4, "{width}: {text}");
        assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
        // A line that is too long for any choice of columns is wrapped, not cut.
        let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(joined.contains(too_long.trim()), "{width}: {text}");
        let head = text.lines().find(|line| line.ends_with("Code")).expect("a table");
        let names = ["Active peak", "Reserved peak", "Net", "Allocated", "Blocks", "Times", "Backward"];
        let (shown, left_out): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| head.contains(**name));
        assert_eq!(shown.len(), columns, "{width}: {head}");
        let note = joined.split("no room beside the code for ").nth(1).unwrap_or_default();
        assert!(left_out.iter().all(|name| note.contains(name)), "{width}: {text}");
    }
}
