//! Programs with memory issues: the report must name each issue at the right line and nothing else, and report nothing
//! for healthy programs.
//!
//! A program of `tests/programs/trouble` declares its issue in comments: `# illness: NAME` (`none` for a healthy
//! program) and `# illness here` at each line that a report may name. `# env:` and `# exit:` give its environment and
//! exit status. Neither memtrace nor PyTorch reads them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_analysis::report::FindingSummary;
use memtrace_analysis::{open_run, summarize};
use memtrace_tests::victim::{Victim, root};

/// The rule that reports each issue.
const RULES: [(&str, &str); 15] = [
    ("leak", "leak"),
    ("gradients never cleared", "gradients not cleared"),
    ("gradients zeroed, not freed", "gradients not cleared"),
    ("gradients cleared late", "gradients cleared late"),
    ("graph retained", "graph retained"),
    ("graph kept", "graph kept"),
    ("reference cycle", "reference cycle"),
    ("checkpoint kept alive", "checkpoint kept"),
    ("load on the wrong device", "wrong device"),
    ("eval without no_grad", "eval without no_grad"),
    ("fragmentation", "fragmentation"),
    ("DDP buckets", "DDP buckets"),
    ("workspace growth", "workspaces"),
    ("optimizer state does not fit", "optimizer state does not fit"),
    ("deferred frees", "deferred frees"),
];

struct Program {
    path: PathBuf,
    name: String,
    illness: String,
    lines: Vec<usize>,
    env: Vec<(String, String)>,
    exit: i32,
}

impl Program {
    fn read(path: &Path) -> Program {
        let text = std::fs::read_to_string(path).unwrap();
        let said = |what: &str| text.lines().find_map(|line| line.strip_prefix(what)).map(str::to_owned);
        let env = said("# env: ").unwrap_or_default();
        let marked = text.lines().enumerate().filter(|(_, line)| line.ends_with("# illness here"));
        Program {
            path: path.to_owned(),
            name: path.file_name().unwrap().to_str().unwrap().to_owned(),
            illness: said("# illness: ").unwrap_or_else(|| panic!("{} says nothing", path.display())),
            lines: marked.map(|(at, _)| at + 1).collect(),
            env: env
                .split_whitespace()
                .filter_map(|pair| pair.split_once('='))
                .map(|(k, v)| (k.into(), v.into()))
                .collect(),
            exit: said("# exit: ").map_or(0, |code| code.parse().unwrap()),
        }
    }

    /// All findings of the program's run. `MEMTRACE_TEST_TROUBLE=DIR` reads runs recorded earlier instead, for work on
    /// the rules.
    fn findings(&self) -> Vec<FindingSummary> {
        let told = |folder: &Path| {
            let summary = summarize(&open_run(folder).unwrap(), &mut |_| {}).unwrap();
            assert!(summary.losses.is_empty(), "{}: {:?}", self.name, summary.losses);
            summary.processes.into_iter().flat_map(|p| p.findings).collect()
        };
        if let Some(folder) = std::env::var_os("MEMTRACE_TEST_TROUBLE") {
            return told(&Path::new(&folder).join(self.name.trim_end_matches(".py")));
        }
        let mut victim = Victim::python(self.path.to_str().unwrap(), &[]).option("--no-snapshot");
        for (name, value) in &self.env {
            victim = victim.env(name, value);
        }
        let run = victim.run();
        let error = String::from_utf8_lossy(&run.output.stderr);
        assert_eq!(run.output.status.code(), Some(self.exit), "{}: {error}", self.name);
        told(&run.path())
    }

    /// Whether a finding names one of the program's marked lines.
    fn at_the_line(&self, finding: &FindingSummary) -> bool {
        let place = finding.place.as_ref().map_or("", |p| &p.place);
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
    let mut paths: Vec<PathBuf> = std::fs::read_dir(root().join("tests/programs/trouble"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "py"))
        .collect();
    paths.sort();
    paths.iter().map(|path| Program::read(path)).collect()
}

/// The results by issue; `none` for the healthy programs.
fn examine(programs: &[Program]) -> BTreeMap<String, Row> {
    let rows: Mutex<BTreeMap<String, Row>> = Mutex::default();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let findings = program.findings();
                    let rule =
                        RULES.iter().find(|(illness, _)| *illness == program.illness).map_or("", |(_, rule)| rule);
                    let (right, wrong): (Vec<_>, Vec<_>) = findings.iter().partition(|f| f.rule == rule);
                    let mut rows = rows.lock().unwrap();
                    let row = rows.entry(program.illness.clone()).or_default();
                    row.variants += 1;
                    row.named += usize::from(!right.is_empty());
                    row.at_the_line += usize::from(right.iter().any(|f| program.at_the_line(f)));
                    row.nothing_else += usize::from(wrong.is_empty());
                    let told = |f: &&FindingSummary| {
                        format!(
                            "{}: {} {}, {}",
                            program.name,
                            f.rule,
                            f.place.as_ref().map_or("", |p| &p.place),
                            f.headline
                        )
                    };
                    if !right.iter().any(|f| program.at_the_line(f)) {
                        row.remarks.extend(right.iter().map(told));
                        if right.is_empty() && program.illness != "none" {
                            row.remarks.push(format!("{}: nothing", program.name));
                        }
                    }
                    row.remarks.extend(wrong.iter().map(told));
                }
            });
        }
    });
    rows.into_inner().unwrap()
}

fn table(rows: &BTreeMap<String, Row>) -> String {
    let mut text =
        "| illness | programs | named | at the right line | nothing else named |\n|---|---|---|---|---|\n".to_owned();
    for (illness, row) in rows.iter().filter(|(illness, _)| *illness != "none") {
        let Row { variants, named, at_the_line, nothing_else, .. } = row;
        writeln!(text, "| {illness} | {variants} | {named} | {at_the_line} | {nothing_else} |").unwrap();
    }
    let sick = rows.iter().filter(|(illness, _)| *illness != "none").map(|(_, row)| row);
    let sum = |of: fn(&Row) -> usize| sick.clone().map(of).sum::<usize>();
    let (variants, named) = (sum(|r| r.variants), sum(|r| r.named));
    writeln!(text, "| all | {variants} | {named} | {} | {} |", sum(|r| r.at_the_line), sum(|r| r.nothing_else))
        .unwrap();
    if let Some(healthy) = rows.get("none") {
        writeln!(text, "| healthy | {} | | | {} |", healthy.variants, healthy.nothing_else).unwrap();
    }
    text
}

/// The report is right about the first program of each issue and four healthy ones. `exhaustive` tests all programs.
#[test]
fn one_program_of_each_illness_is_named_with_its_line() {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut programs = programs();
    programs.retain(|program| {
        let count = seen.entry(program.illness.clone()).or_default();
        *count += 1;
        *count <= if program.illness == "none" { 4 } else { 1 }
    });
    let rows = examine(&programs);
    for (illness, _) in RULES {
        assert!(rows.contains_key(illness), "a program of {illness}");
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
    let findings: Vec<_> = summary.processes.iter().flat_map(|p| &p.findings).collect();
    let [finding] = findings[..] else { panic!("{findings:#?}") };
    assert_eq!((&*finding.rule, finding.bytes), ("gradients not cleared", 104_525_824));
    assert!(finding.place.as_ref().is_some_and(|place| place.place.starts_with("truth.py:12 train")), "{finding:#?}");
}

/// The docs describe each rule as the rule describes itself.
#[test]
fn the_docs_have_every_rule() {
    let docs = std::fs::read_to_string(root().join("docs/reference/diagnostics.md")).unwrap();
    for rule in memtrace_analysis::rules::ILLNESSES {
        let row = format!("| `{}` | {} | {} |", rule.name, rule.rests_on, rule.blind_to);
        assert!(docs.contains(&row), "docs/reference/diagnostics.md lacks\n{row}");
    }
}

mod exhaustive {
    use super::*;

    /// Every issue has at least two programs, at least twelve are healthy, and the report is right about all of them.
    #[test]
    fn each_illness_is_named_with_its_line_and_nothing_is_said_of_healthy_programs() {
        let programs = programs();
        let rows = examine(&programs);
        let table = table(&rows);
        println!("{table}");
        for (illness, _) in RULES {
            assert!(rows.get(illness).is_some_and(|row| row.variants >= 2), "two programs of {illness}");
        }
        assert!(rows["none"].variants >= 12);
        let remarks: Vec<&String> = rows.values().flat_map(|row| &row.remarks).collect();
        assert!(remarks.is_empty(), "{table}\n{remarks:#?}");
        let docs = std::fs::read_to_string(root().join("docs/dev/diagnostics.md")).unwrap();
        assert!(docs.contains(&table), "docs/dev/diagnostics.md has another table than\n{table}");
    }
}
