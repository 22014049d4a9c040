//! The user's own categories of a hand-made training program: every split adds up to the whole, in every output.

use std::sync::Arc;

use crate::training::{MIB, run};
use memtrace_analysis::export::{SnapshotOptions, Window, blocks_csv, snapshot};
use memtrace_analysis::report::{Change, CustomCategoryAmount};
use memtrace_analysis::rules::CustomRules;
use memtrace_analysis::{
    CheckOptions, DiffOptions, LinesOptions, Section, Summary, SummaryOptions, TextOptions, ToText, Tolerance, check,
    diff, lines, lines_html, open_run, section_text, summarize, summarize_with,
};

fn rules() -> Arc<CustomRules> {
    let text = r#"{"categories": [
        {"name": "the model", "stack": "^model\\.py:6 forward$"},
        {"name": "optimizer", "stack": "/torch/optim/"},
        {"name": "weights", "stack": "module\\.py:\\d+ convert$"},
        {"name": "optimizer", "node": "^Never"}
    ]}"#;
    Arc::new(CustomRules::parse(text).unwrap())
}

fn summary() -> Summary {
    let options = SummaryOptions { custom_rules: Some(&rules()), ..SummaryOptions::default() };
    summarize_with(&run(3, false), &options, &mut |_| {}).unwrap()
}

fn named(amounts: &[CustomCategoryAmount]) -> Vec<(&str, u64, u64)> {
    amounts.iter().map(|a| (a.custom_category.as_deref().unwrap_or("-"), a.bytes / MIB, a.blocks)).collect()
}

#[test]
fn the_peak_is_divided_without_remainder() {
    let summary = summary();
    let device = &summary.processes[0].devices[0];
    let peak = device.peak.as_ref().unwrap();
    // The peak is in the optimizer: two parameters, Adam's state and its temporary block, two gradients whose forward
    // call is in the model, and the batch.
    let expected = [("the model", 8, 2), ("optimizer", 24, 5), ("weights", 8, 2), ("-", 1, 1)];
    assert_eq!(named(&peak.by_custom_category), expected);
    let sum: u64 = peak.by_custom_category.iter().map(|a| a.bytes).sum();
    assert_eq!(sum, peak.by_category.iter().map(|a| a.bytes).sum::<u64>());
    assert_eq!(sum, peak.totals.allocated_bytes);
    for group in &peak.largest_allocations {
        let in_model = group.stack.frames.iter().any(|frame| frame.filename == "model.py");
        assert_eq!(group.custom_category.as_deref() == Some("the model"), in_model, "{group:?}");
    }
    let blocks: u64 = device.category_rules.iter().map(|rule| rule.blocks).sum();
    assert_eq!(device.custom_category_rules.iter().map(|rule| rule.blocks).sum::<u64>(), blocks);
    let schema = serde_json::from_str(&Summary::json_schema()).unwrap();
    crate::json_schema::assert_valid(&schema, &serde_json::from_str(&summary.to_json()).unwrap());
}

#[test]
fn reports_show_the_split_and_the_rules() {
    let summary = summary();
    let text = summary.to_text(&TextOptions::default());
    let expected = "  In use by custom category (% of the 41.0 MiB allocated)
    24.0 MiB   59 %  optimizer in 5 blocks
    8.00 MiB   20 %  the model in 2 blocks
    8.00 MiB   20 %  weights in 2 blocks
    1.00 MiB    2 %  none of the rules
";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("optimizer state in 4 blocks [optimizer]"), "{text}");
    let text = section_text(&summary, Section::named("rules").unwrap(), &TextOptions::default());
    let row = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_owned();
    assert!(row("weights").contains("rule 3 of --categories"), "{text}");
    assert!(row("none of the rules").contains("3.00 MiB"), "one batch in each of three steps: {text}");
}

#[test]
fn without_rules_nothing_changes() {
    let plain = summarize(&run(3, false), &mut |_| {}).unwrap();
    assert!(!plain.to_json().contains("custom"));
    let mut ruled = summary();
    for process in &mut ruled.processes {
        for device in &mut process.devices {
            device.custom_category_rules.clear();
            for state in device.peak.iter_mut().chain(&mut device.end) {
                state.by_custom_category.clear();
                state.largest_allocations.iter_mut().for_each(|group| group.custom_category = None);
            }
        }
    }
    assert_eq!(ruled.to_json(), plain.to_json());
}

#[test]
fn lines_have_a_column() {
    let options = LinesOptions { top: 9, custom_rules: Some(rules()), ..LinesOptions::default() };
    let report = lines(&run(3, false), &options, &mut |_| {}).unwrap();
    let module = report.functions.iter().find(|f| f.function == "<module>").unwrap();
    let of = |line: u32| named(&module.lines.iter().find(|l| l.line == line).unwrap().custom_categories);
    assert_eq!(of(20), [("the model", 21, 9)]);
    assert_eq!(of(22), [("optimizer", 40, 7)]);
    assert_eq!(of(19), [("-", 3, 3)]);
    for line in report.functions.iter().flat_map(|f| &f.lines) {
        let sum: u64 = line.custom_categories.iter().map(|amount| amount.bytes).sum();
        assert_eq!(sum, line.figures.map_or(0, |figures| figures.allocated_bytes));
    }
    let text = report.to_text(&TextOptions { width: 160, ..TextOptions::default() });
    assert!(text.contains("Custom categories") && text.contains("none of the rules 3.00 MiB"), "{text}");
    let mut page = Vec::new();
    lines_html(&report, &mut page).unwrap();
    let page = String::from_utf8(page).unwrap();
    let data = &crate::page_data::elements(&page)["line-table"];
    let inside: serde_json::Value = serde_json::from_slice(data).unwrap();
    assert_eq!(inside["lines"], serde_json::from_str::<serde_json::Value>(&report.to_json()).unwrap());
    assert_eq!(inside["page"]["no_custom_category"], "none of the rules");
}

#[test]
fn a_comparison_divides_the_difference() {
    let options = DiffOptions { custom_rules: Some(rules()), ..DiffOptions::default() };
    let report = diff(&run(1, true), &run(3, false), &options, &mut |_| {});
    let pair = &report.pairs[0];
    let sum = |of: fn(&Change) -> i64| pair.by_custom_category.iter().map(|row| of(&row.change)).sum::<i64>();
    assert_eq!(sum(|change| change.difference_bytes), pair.difference_bytes);
    assert_ne!(pair.difference_bytes, 0);
    let row = |name| pair.by_custom_category.iter().find(|row| row.custom_category.as_deref() == name).unwrap();
    assert_eq!(row(Some("weights")).change.difference_bytes, 0);
    assert_eq!(row(None).change.b_bytes, MIB);
    assert!(report.to_text(&TextOptions::default()).contains("Custom category"));
    let plain = diff(&run(1, true), &run(3, false), &DiffOptions::default(), &mut |_| {});
    assert!(plain.pairs[0].by_custom_category.is_empty());
}

#[test]
fn a_check_limits_categories() {
    let limits = |categories: &[(&str, u64)]| CheckOptions {
        max_peak: None,
        max_reserved: None,
        max_leak: None,
        max_categories: categories.iter().map(|(name, limit)| ((*name).to_owned(), *limit)).collect(),
        released_after: None,
        no_oom: false,
        no_issues: Vec::new(),
        tolerance: Tolerance::Share(0.0),
        rank: None,
        device: None,
        allow_incomplete: false,
    };
    let summary = summary();
    let at = [("optimizer", 24 * MIB), ("gradient", 8 * MIB)];
    assert!(check(&summary, None, None, &limits(&at)).passed);
    let report = check(&summary, None, None, &limits(&[("optimizer", 24 * MIB - 1), ("gradient", 8 * MIB)]));
    assert!(!report.passed);
    let result = &report.results[0];
    assert_eq!((&*result.limit, result.value_bytes), ("max-category", Some(24 * MIB)));
    assert!(result.text.starts_with("optimizer 24.0 MiB > 24.0 MiB at the peak (GPU 0, "), "{}", result.text);
}

#[test]
fn tables_and_snapshots_have_the_category_of_each_block() {
    let (run, rules) = (run(3, false), rules());
    let process = &run.processes()[0];
    let mut table = Vec::new();
    blocks_csv(process, &Window::WHOLE, Some(&rules), &mut table, &mut |_| {}).unwrap();
    let table = String::from_utf8(table).unwrap();
    let count = |name: &str| table.lines().filter(|line| line.ends_with(&format!(",{name},,"))).count();
    // Two parameters; in each step two activations, scratch memory, and two blocks of each of two nodes.
    assert_eq!((count("weights"), count("the model"), count("optimizer"), count("")), (2, 3 * 7, 4 + 3, 3), "{table}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pickle");
    let write = |custom_rules| {
        let options = SnapshotOptions { custom_rules, ..SnapshotOptions::default() };
        snapshot(process, &mut std::fs::File::create(&path).unwrap(), &options, &mut |_| {}).unwrap();
        std::fs::read(&path).unwrap()
    };
    let has = |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(!has(&write(None), "custom category"));
    assert!(has(&write(Some(rules)), "custom category: the model"));
    let read = open_run(&path).unwrap();
    assert!(read.processes()[0].definitions().tensor_names.is_empty(), "a category is no tensor name");
}
