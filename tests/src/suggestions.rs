//! Suggestions of the report against the truth: the peak that each one announces, and the peak of the program with that
//! change.
//!
//! The programs are those of `tests/programs/suggestions`. With `--change RULE` they do what a suggestion of that rule
//! says, and they print `torch.cuda.max_memory_allocated()`.

use std::path::PathBuf;
use std::process::{Command, Output};

use memtrace_analysis::suggestions::Cost;
use serde_json::Value;

use crate::traced_program::{Run, TracedProgram, on_gpu, packages, root};

/// The exit status of a program that cannot make a change.
const CANNOT: i32 = 3;

/// The outcome of the program with the suggested change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Changed {
    /// It runs; its peak in bytes.
    Peak(u64),
    /// It runs out of memory.
    OutOfMemory,
    /// It has no such variant, for this reason.
    Cannot(String),
}

/// A suggestion, what it announces, and what the changed program does.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The program's name.
    pub program: String,
    /// The memory of the device, where it is limited.
    pub limit: Option<u64>,
    /// The id of the suggestion's rule.
    pub rule: String,
    /// The suggested change, as text.
    pub action: String,
    /// The peak without the change; `None` where the program runs out of memory.
    pub peak: Option<u64>,
    /// The announced peak; `None` where the program runs out of memory, since it is then that of the recorded part.
    pub announced: Option<u64>,
    /// The announced answer whether the program fits into the device's memory.
    pub announced_fit: Option<bool>,
    /// The outcome.
    pub changed: Changed,
}

impl Outcome {
    /// The error of the announced peak, in percent of the measured one; `None` where one of them is missing.
    pub fn error_percent(&self) -> Option<f64> {
        match (&self.changed, self.announced) {
            (Changed::Peak(measured), Some(announced)) => {
                Some(100.0 * announced.abs_diff(*measured) as f64 / *measured as f64)
            }
            _ => None,
        }
    }

    /// Whether the change does not lower the peak.
    pub fn is_useless(&self) -> bool {
        matches!((&self.changed, self.peak), (Changed::Peak(measured), Some(peak)) if *measured >= peak)
    }

    /// Whether the announced answer whether the program fits is wrong.
    pub fn is_wrong_about_fit(&self) -> bool {
        let fits = match self.changed {
            Changed::Peak(_) => true,
            Changed::OutOfMemory => false,
            Changed::Cannot(_) => return false,
        };
        self.limit.is_some() && self.announced_fit.is_some_and(|announced| announced != fits)
    }
}

/// The names of the programs, each with the memory limits in bytes under which it runs out of memory.
pub fn programs() -> Vec<(String, Vec<u64>)> {
    let folder = root().join("tests/programs/suggestions");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "py"));
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).expect("a program");
        if !text.contains("CHANGES = changes.parse(") {
            continue;
        }
        let limits = text.lines().find_map(|line| line.strip_prefix("# limits: ")).unwrap_or_default();
        let limits = limits.split_whitespace().map(|limit| {
            let mebibytes: u64 = limit.trim_end_matches('M').parse().expect("a limit such as 900M");
            mebibytes << 20
        });
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        found.push((name, limits.collect()));
    }
    found
}

/// The packages that a program names in its line `# packages:`.
fn packages_of(name: &str) -> Option<String> {
    let path = root().join(format!("tests/programs/suggestions/{name}.py"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let line = text.lines().find_map(|line| line.strip_prefix("# packages: "))?;
    Some(packages(&line.split_whitespace().collect::<Vec<&str>>()))
}

fn program(name: &str, arguments: &[String], limit: Option<u64>) -> TracedProgram {
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let bytes = limit.map(|limit| limit.to_string()).unwrap_or_default();
    if on_gpu() && limit.is_some() {
        arguments.extend(["--limit", bytes.as_str()]);
    }
    // Two simulated devices are there for the programs of two ranks.
    let traced = TracedProgram::python(&format!("suggestions/{name}.py"), &arguments)
        .option("--no-snapshot")
        .env("SIMCUDA_DEVICES", "2")
        .env("OMP_NUM_THREADS", "1");
    let traced = match packages_of(name) {
        Some(folder) => traced.env("PYTHONPATH", &folder),
        None => traced,
    };
    if limit.is_some() { traced.env("SIMCUDA_MEMORY", &bytes) } else { traced }
}

fn ran_out_of_memory(output: &Output) -> bool {
    !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("OutOfMemoryError")
}

#[track_caller]
fn printed_peak(output: &Output) -> u64 {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = text.lines().last().unwrap_or_default();
    last.parse().unwrap_or_else(|e| panic!("{last:?} is no number of bytes: {e}; {output:?}"))
}

/// The device that the suggestions are about: the first one of rank 0, or of the first process that used one.
fn device(run: &Run) -> Value {
    let text = std::fs::read_to_string(run.path().join("summary.json"))
        .unwrap_or_else(|e| panic!("summary.json: {e}: {:?}", run.output));
    let mut summary: Value = serde_json::from_str(&text).expect("JSON");
    let processes = summary["processes"].as_array_mut().expect("processes");
    processes.retain(|process| process["devices"].as_array().is_some_and(|devices| !devices.is_empty()));
    let rank_0 = processes.iter().position(|process| process["rank"] == 0).unwrap_or(0);
    processes[rank_0]["devices"][0].take()
}

/// The arguments with which a program makes the suggested change.
fn change(suggestion: &Value) -> Vec<String> {
    let rules = match suggestion["combines"].as_array() {
        Some(rules) => rules.clone(),
        None => vec![suggestion["rule"].clone()],
    };
    let mut arguments = Vec::new();
    for rule in &rules {
        arguments.extend(["--change".to_owned(), rule.as_str().expect("a rule").to_owned()]);
    }
    // The action names what is changed, for example modules.
    arguments.extend(["--action".to_owned(), suggestion["action"].as_str().expect("an action").to_owned()]);
    arguments
}

/// The code of each suggestion is Python without placeholders, and the cheapest comes first.
#[track_caller]
fn check_code(name: &str, suggestions: &[Value]) {
    let costs: Vec<Cost> =
        suggestions.iter().map(|one| serde_json::from_value(one["cost"].clone()).expect("a cost")).collect();
    let alone = suggestions.iter().take_while(|one| one["combines"].is_null()).count();
    assert!(suggestions[alone..].len() <= 1, "{name}: a combination is last");
    assert!(costs[..alone].is_sorted(), "{name}: {costs:?}");
    for one in suggestions {
        let code = code(one);
        assert!(!code.trim().is_empty(), "{name}: {one}");
        let placeholders = ["place", "call", "count", "twice", "layers", "classes", "name", "optimizer", "evaluation"];
        assert!(!placeholders.iter().any(|name| code.contains(&format!("{{{name}}}"))), "{name}: {code}");
        let parsed = Command::new("python3").args(["-c", "import ast, sys; ast.parse(sys.argv[1])", &code]).output();
        assert!(parsed.expect("python3").status.success(), "{name}: {code}");
    }
}

fn code(suggestion: &Value) -> String {
    let lines = suggestion["code"].as_array().expect("code").iter().map(|line| line.as_str().expect("a line"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Runs the program with the code of a suggestion in place of its own variant. Returns the announced peak, and that of
/// the program with the code.
#[track_caller]
pub fn measure_code(name: &str, rule: &str) -> (u64, u64) {
    let device = device(&program(name, &[], None).run());
    let all = device["suggestions"].as_array().expect("suggestions");
    let suggestion = all.iter().find(|one| one["rule"] == rule).unwrap_or_else(|| panic!("{name}: {all:?}"));
    let arguments = [change(suggestion), vec!["--code".to_owned(), code(suggestion)]].concat();
    let output = program(name, &arguments, None).run_alone();
    assert!(output.status.success(), "{name} {arguments:?}: {output:?}");
    (suggestion["peak_after_bytes"].as_u64().expect("bytes"), printed_peak(&output))
}

/// Runs the program under memtrace, and then without memtrace with each suggested change. With `limit`, a program with
/// all of the device's memory must run out of it.
#[track_caller]
pub fn measure(name: &str, limit: Option<u64>) -> Vec<Outcome> {
    let run = program(name, &[], limit).run();
    let device = device(&run);
    let peak = if limit.is_some() {
        assert!(ran_out_of_memory(&run.output), "{name} with {limit:?} bytes: {:?}", run.output);
        None
    } else {
        run.assert_ended_well();
        let peak = printed_peak(&run.output);
        assert_eq!(device["highest"]["allocated_bytes"], peak, "{name}: the report's peak, and PyTorch's");
        Some(peak)
    };
    let suggestions = device["suggestions"].as_array().expect("suggestions");
    check_code(name, suggestions);
    let outcome = |suggestion: &Value| {
        let arguments = change(suggestion);
        let output = program(name, &arguments, limit).run_alone();
        let changed = if output.status.code() == Some(CANNOT) {
            Changed::Cannot(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        } else if limit.is_some() && ran_out_of_memory(&output) {
            Changed::OutOfMemory
        } else {
            assert!(output.status.success(), "{name} {arguments:?}: {output:?}");
            Changed::Peak(printed_peak(&output))
        };
        Outcome {
            program: name.to_owned(),
            limit,
            rule: suggestion["rule"].as_str().unwrap_or_default().to_owned(),
            action: suggestion["action"].as_str().unwrap_or_default().to_owned(),
            peak,
            announced: if limit.is_none() { suggestion["peak_after_bytes"].as_u64() } else { None },
            announced_fit: suggestion["fits"].as_bool(),
            changed,
        }
    };
    suggestions.iter().map(outcome).collect()
}
