//! Programs with memory issues: the report must name each issue at the right line and nothing else, and report nothing
//! for healthy programs.
//!
//! A program of `tests/programs/issues` declares its issue in comments: `# issue: RULE` (`none` for a healthy
//! program) and `# issue here` at each line that a report may name. `# env:` and `# exit:` give its environment and
//! exit status. Neither memtrace nor PyTorch reads them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use memtrace_analysis::diagnostics::diagnostic_rules;
use memtrace_analysis::report::IssueSummary;
use memtrace_analysis::rules::{Framework, RuleId};
use memtrace_analysis::suggestions::suggestion_rules;
use memtrace_analysis::{open_run, summarize};
use memtrace_tests::parallel::{cores, in_parallel};
use memtrace_tests::traced_program::{TracedProgram, root};

struct Program {
    path: PathBuf,
    name: String,
    /// The rule that reports the program's issue; `None` for a healthy program.
    issue: Option<RuleId>,
    lines: Vec<usize>,
    env: Vec<(String, String)>,
    exit: i32,
}

/// The environment that a program declares: `# env: NAME=VALUE...`.
pub(crate) fn declared_env(text: &str) -> Vec<(String, String)> {
    let declared = text.lines().find_map(|line| line.strip_prefix("# env: ")).unwrap_or_default();
    let pairs = declared.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.into(), value.into())).collect()
}

impl Program {
    fn read(path: &Path) -> Program {
        let text = std::fs::read_to_string(path).unwrap();
        let field = |what: &str| text.lines().find_map(|line| line.strip_prefix(what)).map(str::to_owned);
        let marked = text.lines().enumerate().filter(|(_, line)| line.ends_with("# issue here"));
        Program {
            path: path.to_owned(),
            name: path.file_name().unwrap().to_str().unwrap().to_owned(),
            issue: match field("# issue: ").as_deref() {
                Some("none") => None,
                Some(rule) => Some(rule.parse().unwrap_or_else(|e| panic!("{}: {rule}: {e}", path.display()))),
                None => panic!("{} declares no issue", path.display()),
            },
            lines: marked.map(|(at, _)| at + 1).collect(),
            env: declared_env(&text),
            exit: field("# exit: ").map_or(0, |code| code.parse().unwrap()),
        }
    }

    /// All issues of the program's run. `MEMTRACE_TEST_ISSUES=DIR` reads runs recorded earlier instead, for work on the
    /// rules.
    fn issues(&self) -> Vec<IssueSummary> {
        let issues_of = |folder: &Path| {
            let summary = summarize(&open_run(folder).unwrap(), &mut |_| {}).unwrap();
            assert!(summary.losses.is_empty(), "{}: {:?}", self.name, summary.losses);
            let of_launch = summary.launch.into_iter().flat_map(|launch| launch.issues).map(|one| one.issue);
            summary.processes.into_iter().flat_map(|p| p.issues).chain(of_launch).collect()
        };
        if let Some(folder) = std::env::var_os("MEMTRACE_TEST_ISSUES") {
            return issues_of(&Path::new(&folder).join(self.name.trim_end_matches(".py")));
        }
        let mut traced = TracedProgram::python(self.path.to_str().unwrap(), &[]).option("--no-snapshot");
        for (name, value) in &self.env {
            traced = traced.env(name, value);
        }
        let run = traced.run();
        let error = String::from_utf8_lossy(&run.output.stderr);
        assert_eq!(run.output.status.code(), Some(self.exit), "{}: {error}", self.name);
        issues_of(&run.path())
    }

    /// Whether an issue names one of the program's marked lines.
    fn at_the_line(&self, issue: &IssueSummary) -> bool {
        let place = issue.stack.as_ref().map_or("", |stack| &stack.location);
        self.lines.iter().any(|line| {
            let named = format!("{}:{line}", self.name);
            place
                .match_indices(&named)
                .any(|(at, _)| !place[at + named.len()..].starts_with(|c: char| c.is_ascii_digit()))
        })
    }
}

#[derive(Default)]
struct Row {
    variants: usize,
    named: usize,
    at_the_line: usize,
    nothing_else: usize,
    remarks: Vec<String>,
}

fn programs() -> Vec<Program> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(root().join("tests/programs/issues"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "py"))
        .collect();
    paths.sort();
    paths.iter().map(|path| Program::read(path)).collect()
}

/// The results by rule, in alphabetical order, and those of the healthy programs under `None`.
fn examine(programs: &[Program]) -> BTreeMap<Option<&'static str>, Row> {
    let mut rows: BTreeMap<Option<&'static str>, Row> = BTreeMap::new();
    let all_issues = in_parallel(programs, cores(), Program::issues);
    for (program, issues) in programs.iter().zip(&all_issues) {
        let (right, wrong): (Vec<_>, Vec<_>) = issues.iter().partition(|issue| Some(issue.rule) == program.issue);
        let row = rows.entry(program.issue.map(RuleId::as_str)).or_default();
        row.variants += 1;
        row.named += usize::from(!right.is_empty());
        row.at_the_line += usize::from(right.iter().any(|f| program.at_the_line(f)));
        row.nothing_else += usize::from(wrong.is_empty());
        let remark = |f: &&IssueSummary| {
            let place = f.stack.as_ref().map_or("", |stack| &stack.location);
            format!("{}: {} {place}, {}", program.name, f.rule, f.headline)
        };
        if !right.iter().any(|f| program.at_the_line(f)) {
            row.remarks.extend(right.iter().map(remark));
            if right.is_empty() && program.issue.is_some() {
                row.remarks.push(format!("{}: nothing", program.name));
            }
        }
        row.remarks.extend(wrong.iter().map(remark));
    }
    rows
}

fn table(rows: &BTreeMap<Option<&str>, Row>) -> String {
    let mut text =
        "| issue | programs | named | at the right line | nothing else named |\n|---|---|---|---|---|\n".to_owned();
    let with_issue = rows.iter().filter_map(|(rule, row)| Some(((*rule)?, row)));
    for (rule, row) in with_issue.clone() {
        let Row { variants, named, at_the_line, nothing_else, .. } = row;
        writeln!(text, "| {rule} | {variants} | {named} | {at_the_line} | {nothing_else} |").unwrap();
    }
    let sum = |of: fn(&Row) -> usize| with_issue.clone().map(|(_, row)| of(row)).sum::<usize>();
    let (variants, named) = (sum(|r| r.variants), sum(|r| r.named));
    writeln!(text, "| all | {variants} | {named} | {} | {} |", sum(|r| r.at_the_line), sum(|r| r.nothing_else))
        .unwrap();
    if let Some(healthy) = rows.get(&None) {
        writeln!(text, "| healthy | {} | | | {} |", healthy.variants, healthy.nothing_else).unwrap();
    }
    text
}

/// The report is right about the first programs of each issue and two healthy ones. `exhaustive` tests all programs.
#[test]
fn one_program_of_each_issue_is_diagnosed_with_its_line() {
    let mut seen: BTreeMap<Option<RuleId>, usize> = BTreeMap::new();
    let mut programs = programs();
    programs.retain(|program| {
        let count = seen.entry(program.issue).or_default();
        *count += 1;
        *count
            <= match program.issue {
                None => 2,
                // Gradients that are never cleared, and gradients that are filled with zeros.
                Some(RuleId::GradientsNotCleared) => 2,
                Some(_) => 1,
            }
    });
    let rows = examine(&programs);
    for rule in diagnostic_rules() {
        assert!(rows.contains_key(&Some(rule.id.as_str())), "a program of {}", rule.id);
    }
    let remarks: Vec<&String> = rows.values().flat_map(|row| &row.remarks).collect();
    assert!(remarks.is_empty(), "{}\n{remarks:#?}", table(&rows));
}

/// The bug of PyTorch's blog post on memory, in a snapshot that PyTorch itself wrote on an H200: three steps without
/// `zero_grad`.
#[test]
fn the_textbook_snapshot() {
    let snapshot = root().join("tests/golden/snapshots/resnet_leak.pickle.gz");
    let summary = summarize(&open_run(&snapshot).unwrap(), &mut |_| {}).unwrap();
    let issues: Vec<_> = summary.processes.iter().flat_map(|p| &p.issues).collect();
    let [issue] = issues[..] else { panic!("{issues:#?}") };
    assert_eq!((issue.rule, issue.bytes), (RuleId::GradientsNotCleared, 104_525_824));
    assert!(issue.stack.as_ref().is_some_and(|stack| stack.location.starts_with("truth.py:12 train")), "{issue:#?}");
}

/// docs/reference/diagnostics.md has a heading for each rule id, followed by the texts of the rule.
#[test]
fn the_docs_describe_every_rule() {
    let docs = std::fs::read_to_string(root().join("docs/reference/diagnostics.md")).unwrap();
    let sections: BTreeMap<&str, String> = docs
        .split("\n### ")
        .skip(1)
        .filter_map(|section| section.split("\n## ").next()?.split_once('\n'))
        .map(|(id, text)| (id, text.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect();
    let issues = diagnostic_rules().into_iter().map(|rule| (rule.id, vec![rule.evidence, rule.limits]));
    let suggestions = suggestion_rules();
    let suggestions = suggestions.iter().map(|rule| (rule.id, vec![rule.action, rule.condition, rule.method]));
    let rules: BTreeMap<RuleId, Vec<&str>> = issues.chain(suggestions).collect();
    for id in RuleId::ALL {
        let section = sections.get(id.as_str()).unwrap_or_else(|| panic!("docs/reference/diagnostics.md lacks {id}"));
        for text in &rules[&id] {
            assert!(section.contains(text), "docs/reference/diagnostics.md, {id}, lacks\n{text}");
        }
        for setting in Framework::ALL.into_iter().filter_map(|framework| framework.setting(id)) {
            let (_, setting) = setting.text.split_once(": ").unwrap();
            assert!(docs.contains(&format!("| {setting} |")), "docs/reference/diagnostics.md, {id}, lacks {setting}");
        }
    }
}

mod exhaustive {
    use super::*;

    /// Every issue has at least two programs, at least twelve are healthy, and the report is right about all of them.
    #[test]
    fn each_program_is_diagnosed_with_its_line_and_healthy_programs_have_no_issue() {
        let programs = programs();
        let rows = examine(&programs);
        let table = table(&rows);
        println!("{table}");
        for rule in diagnostic_rules() {
            let row = rows.get(&Some(rule.id.as_str()));
            assert!(row.is_some_and(|row| row.variants >= 2), "two programs of {}", rule.id);
        }
        assert!(rows[&None].variants >= 12);
        let remarks: Vec<&String> = rows.values().flat_map(|row| &row.remarks).collect();
        assert!(remarks.is_empty(), "{table}\n{remarks:#?}");
        let docs = std::fs::read_to_string(root().join("docs/dev/diagnostics.md")).unwrap();
        assert!(docs.contains(&table), "docs/dev/diagnostics.md has another table than\n{table}");
    }
}
