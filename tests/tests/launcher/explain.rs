//! `memtrace explain`: its texts are those of docs/reference/diagnostics.md and of the rules.

use std::process::Command;

use memtrace_analysis::diagnostics::diagnostic_rules;
use memtrace_analysis::rules::{Framework, RuleId};
use memtrace_analysis::suggestions::suggestion_rules;
use memtrace_tests::traced_program::{memtrace, root};

/// The exit status of `memtrace explain ARGUMENTS`, and what it prints.
fn explain(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(memtrace()).arg("explain").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn every_rule_is_explained_by_its_section_its_code_and_its_settings() {
    let page = std::fs::read_to_string(root().join("docs/reference/diagnostics.md")).unwrap();
    for id in RuleId::ALL {
        let (status, text, error) = explain(&[id.as_str()]);
        assert!(status == 0 && error.is_empty(), "{id}: {error}");
        let (_, section) = page.split_once(&format!("\n### {id}\n\n")).unwrap();
        let section = section.split("\n##").next().unwrap().trim().replace("**", "");
        assert!(text.starts_with(&format!("{id}\n\n{section}\n")), "{id}:\n{text}");
        for setting in Framework::ALL.into_iter().filter_map(|framework| framework.setting(id)) {
            assert!(text.contains(&format!("    {}\n", setting.text)), "{id}:\n{text}");
        }
    }
    for rule in diagnostic_rules() {
        let (_, text, _) = explain(&[rule.id.as_str()]);
        let code: String = rule.code.iter().map(|line| format!("    {line}\n")).collect();
        assert!(text.contains(&code) && text.ends_with(&format!("\nMore: {}\n", rule.link)), "{text}");
    }
    for rule in suggestion_rules().iter().filter(|rule| rule.id != RuleId::CombinedChanges) {
        let (_, text, _) = explain(&[rule.id.as_str()]);
        assert!(text.contains(&format!("\nCost: {}\n", rule.cost.text())) && text.contains(rule.link), "{text}");
    }
}

#[test]
fn without_a_rule_all_are_listed() {
    let (status, list, _) = explain(&[]);
    assert_eq!(status, 0);
    let named: Vec<&str> = list.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    assert_eq!(named, RuleId::ALL.map(RuleId::as_str));
}

#[test]
fn an_unknown_rule_is_an_error_with_names_that_are_close() {
    let (status, output, error) = explain(&["graph-kpet"]);
    assert_eq!((status, &*output), (2, ""));
    assert_eq!(
        error,
        "error: there is no rule graph-kpet\n\
         help: did you mean graph-kept? memtrace explain lists all rules\n"
    );
    let (status, _, error) = explain(&["zebra"]);
    assert!(status == 2 && error.ends_with("help: memtrace explain lists all rules\n"), "{error}");
    assert_eq!(explain(&["Checkpoint_Layers"]).1, explain(&["checkpoint-layers"]).1);
}
