//! Everything that memtrace prints, whatever the names are: a recording, folders, processes and arguments whose names
//! are control sequences, characters that change the order of text, and commands for CI services.
//!
//! The commands and options are those of the command line's own definition (`memtrace completions fish` lists all of
//! them, hidden ones too). A new one fails the test until [`KNOWN`] says how to call it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_analysis::printable::is_unprintable;
use memtrace_tests::programs::ProgramFolder;
use memtrace_trace::printable::STYLES;

use crate::launcher_support::*;

const INTRUDER: &str = env!("CARGO_BIN_EXE_intruder");

/// A name. It is valid as that of a file, and as an argument.
const HOSTILE: &str = "\x1b]0;owned\x07\x1b[2J\u{9b}31m\u{202e}\u{2066}\u{2028}\t\r\n::error::owned \
                       ##[group]x ##vso[task.z]y\x7f";
/// A shorter one, for the kernel's name of a process.
const HOSTILE_PROCESS: &str = "\x1b[2J\u{202e}owned";

/// Each command with its calls. The first call prints a hostile name, if the command can. Words in braces are replaced:
/// - `{run}` and `{trace}`: a run folder and a file in it. `{snapshot}`: its snapshot.
/// - `{new}`: a path where nothing is. `{missing}`: the same, for reading.
/// - `{live}` and `{pid}`: a run that goes on, and its recorded process. `{other}`: a process that is not recorded.
/// - `{intruder}`: a program that records hostile names. `{python}`, `{bad_python}`: programs that answer as a Python.
/// - `{rules}`: a file of categories. `{hostile}`: a name.
const KNOWN: &[(&str, &[&str])] = &[
    (
        "run",
        &[
            "run -o {new} -- {intruder} names",
            "run --verbose --no-snapshot --job {hostile} --categories {rules} -o {new} -- {intruder} oom exit=3",
            "run --runs {new} --stacks both --cpu never --no-names --no-device-usage --cycles --holders --pools read \
             --quiet -- {intruder} names",
            "run --keep 1MiB --limit 1GiB --xla-dump --metrics 127.0.0.1:0 --reports-in-background -o {new} -- true",
            "run --otlp http://127.0.0.1:9 -o {new} -- true",
            "run --metrics 127.0.0.1:0 --metrics-token-file {missing} -o {new} -- true",
            "run -o {new} -- {missing}",
            "run -o {new} -- {run}",
        ],
    ),
    (
        "dry-run",
        &[
            "dry-run --vary bs=1,2 --jobs 2 -o {new} -- {intruder} oom say={bs} exit=1",
            "dry-run --max bs=1:3 --json --gpu t4 -o {new} -- {intruder} oom say={bs} exit=1",
            "dry-run --vary bs=1 --memory 1GiB --gpus 2 --nonzero full --routing even --steps 3 --no-device-usage \
             --no-snapshot --quiet -o {new} -- {intruder} names say={bs}{hostile} exit=9",
            "dry-run --max bs=1:2 --limit 1GiB --keep 1GiB --job {hostile} -o {new} -- {intruder} names \
             say={bs}{hostile} exit=9",
            "dry-run --runs {new} --stacks none --cpu always --no-names --cycles --holders --pools off --verbose \
             --categories {rules} -- {intruder} names",
            "dry-run --vary-gpu t4,l40s -o {new} -- {intruder} oom say={hostile} exit=1",
            "dry-run --workspaces largest -o {new} -- {intruder} names",
            "dry-run --bounds -o {new} -- {intruder} names exit=9",
            "dry-run --until-ready --ready-line {hostile} -o {new} -- {intruder} names",
            "dry-run --xla-dump --metrics 127.0.0.1:0 --reports-in-background -o {new} -- true",
            "dry-run --metrics 127.0.0.1:0 --metrics-token-file {missing} -o {new} -- true",
            "dry-run --otlp http://127.0.0.1:9 -o {new} -- true",
            "dry-run --list-gpus",
        ],
    ),
    (
        "report",
        &[
            "report {run}",
            "report {run} --verbose --categories {rules}",
            "report {run} --json",
            "report {run} --section peak",
            "report {run} --range {range}",
            "report {run} --range {hostile}",
            "report {run} --released-after function:{hostile} --so-far",
            "report {run} --ranks --json",
            "report {here} --job {hostile}",
            "report {run} --ranks --html {new}.html",
            "report {run} --html {new}.html",
            "report {missing}",
            "report {damaged}",
            "report {run} {missing}",
            "report {here}",
            "report",
        ],
    ),
    (
        "open",
        &["open {run}", "open", "open {run} --serve", "open {run} --serve --port 1", "open {missing}", "open {trace}"],
    ),
    (
        "export",
        &[
            "export {run} --to snapshot -o {new}",
            "export {run} --to csv --categories {rules} --so-far --rank 7",
            "export {run} --to csv --pid 7",
            "export {run} --to csv --device 0 --steps 0- --min-size 1MiB -o {new}",
            "export {run} --to csv --max-events 3 --time 0s- -o {new}",
            "export {run} --to html --range {range} -o {new}",
            "export {run} --to html --range {hostile} -o {new}",
            "export {run} --to folded --of total -o {new}",
            "export {run} --to snapshot --sources -o {new}",
            "export {run} --to timeline -o {new}",
            "export {run} --to json",
            "export {run} --to perfetto -o {missing}/x",
            "export {run} --to parquet --partition -o {new}",
            "export {run} --to parquet -o {new}",
            "export {run} --to speedscope",
            "export {run} --to pprof -o {new}",
            "export {run} --to csv -o {trace}",
            "export {missing} --to csv",
        ],
    ),
    (
        "lines",
        &[
            "lines {run}",
            "lines {run} --json --statistics",
            "lines {run} --html --categories {rules}",
            "lines {run} --function {hostile} --file {hostile} --range {hostile}",
            "lines {run} --top 99 --rank 7",
            "lines {run} --pid 7 --device 3 --sources",
            "lines {run} -o {new}",
            "lines {run} --output {missing}/x",
            "lines {missing}",
            "lines",
        ],
    ),
    (
        "diff",
        &[
            "diff {run} {other_run}",
            "diff {run} {other_run} --json --sources --categories {rules}",
            "diff {run} {other_run} --rank 7",
            "diff {run} {other_run} --device 3",
            "diff {run} --steps 0 1",
            "diff {run} {other_run} --html {new}.html",
            "diff {run} {other_run} --html {new}",
            "diff {run} {missing}",
        ],
    ),
    (
        "check",
        &[
            "check {run} --no-issue any --github --released-after function:{hostile} --max 1",
            "check {run} --max-peak 1 --max-reserved 1 --max-leak 1 --no-oom --json",
            "check {run} --max-category activation=1 --categories {rules} --allow-incomplete --device 0",
            "check {run} --max-category {hostile}=1",
            "check {run} --baseline {other_run} --tolerance 2%",
            "check {run} --baseline {damaged}",
            "check {run} --baseline {missing} --rank 7",
            "check {missing} --no-oom",
        ],
    ),
    (
        "redact",
        &[
            "redact {run} -o {new} --no-snapshot",
            "redact {run} --output {run}",
            "redact {snapshot} -o {new}",
            "redact {missing} -o {new}",
        ],
    ),
    ("suspend", &["suspend {other} --timeout 60s", "suspend {other} --json", "suspend {pid}", "suspend 2147483647"]),
    ("resume", &["resume {other}", "resume {other} --json", "resume 2147483647"]),
    (
        "attach",
        &[
            "attach {other} -o {new}",
            "attach {pid} -o {new} --stacks python --cpu auto --no-names --no-device-usage --duration 1s --quiet \
             --no-snapshot",
            "attach {other} --output {run} --verbose",
            "attach 2147483647",
        ],
    ),
    ("live", &["live --once {live}", "live --once --json", "live --once {pid}", "live {pid}", "live --once {missing}"]),
    (
        "snapshot",
        &[
            "snapshot {live} -o {new}.txt",
            "snapshot {pid} -o {new}.json",
            "snapshot {pid} --when allocated>1 --count 1 --output {new}.csv",
            "snapshot {pid} --when allocated>1 --on oom --every 1h --count 1 -o {new}.html",
            "snapshot {live}",
            "snapshot {live} -o {new}",
            "snapshot {missing}",
        ],
    ),
    (
        "doctor",
        &[
            "doctor --duration 60 --output {new} -- {intruder} names",
            "doctor --json -- {intruder} names",
            "doctor --self-test-program",
            "doctor -- {missing}",
            "doctor --clean",
            "doctor --yes",
        ],
    ),
    ("mcp", &["mcp", "mcp --allow-run"]),
    (
        "kernel install",
        &[
            "kernel install --python {python} --name {hostile} --display-name {hostile} --prefix {new} -- --job \
             {hostile}",
            "kernel install --python {bad_python} --user",
            "kernel install --python {missing} --sys-prefix",
            "kernel install --python {python} -- {hostile}",
        ],
    ),
    (
        "kernel remove",
        &[
            "kernel remove --python {python} --name {hostile} --user",
            "kernel remove --python {bad_python} --prefix {new}",
            "kernel remove --python {missing} --sys-prefix",
        ],
    ),
    ("explain", &["explain {hostile}", "explain", "explain leak", "explain autocast"]),
    ("docs", &["docs {hostile}", "docs", "docs install"]),
    ("man", &["man -o {new}", "man", "man --output {trace}"]),
    ("completions", &["completions bash", "completions {hostile}"]),
    ("memory-in-use", &["memory-in-use"]),
    ("simulated-libraries", &["simulated-libraries {python}"]),
    (
        "help",
        &[
            "help",
            "help {hostile}",
            "--help",
            "--version",
            "--{hostile}",
            "{missing}",
            "reprot {hostile}",
            "-q view {hostile}",
        ],
    ),
];

/// The commands whose first call has no name to print. `attach` refuses a process without PyTorch before it names
/// anything.
const WITHOUT_NAMES: [&str; 6] = ["attach", "mcp", "completions", "memory-in-use", "simulated-libraries", "help"];

/// The words of a command, and its options: whether each has a value.
fn defined() -> BTreeMap<String, BTreeMap<String, bool>> {
    let script = output(Command::new(memtrace()).args(["completions", "fish"]));
    let script = String::from_utf8(script.stdout).unwrap();
    let after = |line: &str, start: &str| {
        let rest = line.split_once(start)?.1;
        Some(rest.split([' ', '"', ';']).next().unwrap_or_default().to_owned())
    };
    let mut commands: BTreeMap<String, BTreeMap<String, bool>> = BTreeMap::new();
    for line in script.lines().filter(|line| line.starts_with("complete ") && !line.contains("; and not ")) {
        // The description can have anything.
        let (head, tail) = line.split_once(" -d '").unwrap_or((line, ""));
        if head.contains("__fish_memtrace_needs_command") {
            if let Some(name) = after(head, " -a \"") {
                commands.entry(name).or_default();
            }
            continue;
        }
        let command = after(head, "__fish_memtrace_using_subcommand ").expect(line);
        let command = match after(head, "__fish_seen_subcommand_from ") {
            Some(sub) => format!("{command} {sub}"),
            None => command,
        };
        let options = commands.entry(command).or_default();
        if let Some(option) = after(head, " -l ").filter(|option| option != "help") {
            options.insert(option, tail.split_once("' -r").is_some());
        }
    }
    commands.retain(|name, _| !name.starts_with("help ") && !name.ends_with(" help"));
    // A command with commands is none itself.
    let parents: BTreeSet<String> =
        commands.keys().filter_map(|name| Some(name.split_once(' ')?.0.to_owned())).collect();
    commands.retain(|name, _| !parents.contains(name));
    assert!(commands.len() > 20 && !commands["report"]["json"] && commands["report"]["section"], "{commands:?}");
    commands
}

/// The options before the recorded command, as the completions name them.
fn options_of(call: &str) -> BTreeSet<String> {
    let words = call.split_whitespace().take_while(|word| *word != "--");
    let long = words.clone().filter_map(|word| word.strip_prefix("--")).map(str::to_owned);
    let short = words.filter(|word| *word == "-o").map(|_| "output".to_owned());
    long.chain(short).collect()
}

#[test]
fn the_calls_of_every_command_and_option_are_known() {
    let known: BTreeMap<&str, BTreeSet<String>> = KNOWN
        .iter()
        .map(|(command, calls)| (*command, calls.iter().flat_map(|call| options_of(call)).collect()))
        .collect();
    let defined = defined();
    let commands: Vec<&str> = defined.keys().map(String::as_str).collect();
    assert_eq!(known.keys().copied().collect::<Vec<_>>(), commands, "say in KNOWN how to call each command");
    for (command, options) in &defined {
        let missing: Vec<_> = options.keys().filter(|option| !known[&**command].contains(*option)).collect();
        assert!(missing.is_empty(), "say in KNOWN how to call {command} with {missing:?}");
    }
}

/// The options that the help of a command lists.
fn shown_options(command: &str) -> BTreeSet<String> {
    let help = output(Command::new(memtrace()).args(command.split(' ')).arg("--help"));
    let help = String::from_utf8(help.stdout).unwrap();
    let name = |line: &str| {
        let line = line.trim_start();
        let line = if line.starts_with("--") { line } else { line.get(4..)? };
        let name = line.strip_prefix("--")?.split([' ', '=']).next()?;
        (!matches!(name, "help" | "version")).then(|| name.to_owned())
    };
    // The texts of options are indented by ten columns.
    let is_option = |line: &&str| line.starts_with("  ") && line.len() - line.trim_start().len() < 10;
    help.lines().filter(is_option).filter_map(name).collect()
}

/// The options of a command whose help names a default, and this.
fn shown_defaults(command: &str) -> BTreeMap<String, String> {
    let help = output(Command::new(memtrace()).args(command.split(' ')).arg("--help"));
    let help = String::from_utf8(help.stdout).unwrap();
    let mut found = BTreeMap::new();
    let mut option = None;
    let mut text = String::new();
    for line in help.lines().chain(["  -end"]) {
        let is_option = line.starts_with("  ") && line.trim_start().starts_with('-') && !line.starts_with("          ");
        if !is_option {
            text.push_str(line.trim());
            text.push(' ');
            continue;
        }
        if let (Some(option), Some((_, rest))) = (option.take(), text.split_once("[default: ")) {
            found.insert(option, rest.split(']').next().unwrap().to_owned());
        }
        text.clear();
        option = line.split_once("--").map(|(_, rest)| rest.split([' ', '=']).next().unwrap().to_owned());
    }
    found
}

/// docs/reference/command-line.md has a section for each command, whose table has the command's options and no others.
#[test]
fn the_page_of_the_command_line_lists_every_option() {
    let page = std::fs::read_to_string(memtrace_tests::traced_program::root().join("docs/reference/command-line.md"));
    let page = page.unwrap();
    let sections = page.split("\n## ").skip(1).filter_map(|section| section.split_once('\n'));
    let listed = |text: &str| -> BTreeSet<String> {
        let cells = text.lines().filter(|line| line.starts_with("| `")).filter_map(|line| line.split(" | ").next());
        let names = cells.flat_map(|cell| cell.split("`--").skip(1).map(|rest| rest.split(['`', ' ']).next().unwrap()));
        names.map(str::to_owned).collect()
    };
    let mut left: BTreeSet<String> = defined()
        .into_keys()
        .filter(|name| !matches!(&**name, "help" | "memory-in-use" | "simulated-libraries"))
        .collect();
    let of_run = shown_options("run");
    assert!(of_run.len() > 15 && of_run.contains("output") && of_run.contains("verbose"), "{of_run:?}");
    for (heading, text) in sections {
        let is_of_section = |command: &&String| heading.split(", ").any(|name| command.split(' ').next() == Some(name));
        let commands: Vec<String> = left.iter().filter(is_of_section).cloned().collect();
        left.retain(|command| !commands.contains(command));
        let mut options: BTreeSet<String> = commands.iter().flat_map(|command| shown_options(command)).collect();
        if heading == "dry-run" {
            options.retain(|option| !of_run.contains(option));
        }
        assert!(
            commands.is_empty() || listed(text) == options,
            "{heading}: {:?}",
            listed(text).symmetric_difference(&options)
        );
    }
    assert!(left.is_empty(), "commands without a section: {left:?}");
    // Every default of the help texts is in the row of its option.
    let mut defaults = 0;
    for command in
        defined().into_keys().filter(|name| !matches!(&**name, "help" | "memory-in-use" | "simulated-libraries"))
    {
        let heading = |text: &str| {
            text.split_once('\n')
                .is_some_and(|(heading, _)| heading.split(", ").any(|name| command.split(' ').next() == Some(name)))
        };
        let section =
            page.split("\n## ").skip(1).find(|section| heading(section)).unwrap_or_else(|| panic!("{command}"));
        let of_run = page.split("\n## ").find(|section| section.starts_with("run\n")).unwrap();
        for (option, default) in shown_defaults(&command) {
            let is_row = |line: &&str| {
                line.starts_with("| `") && [' ', '`'].iter().any(|end| line.contains(&format!("`--{option}{end}")))
            };
            // Some options are as for `run`.
            let rows: Vec<&str> = section.lines().chain(of_run.lines()).filter(is_row).collect();
            let is_listed = rows.iter().any(|row| row.replace('`', "").contains(&default));
            assert!(is_listed, "{command} --{option} [default: {default}]: {rows:?}");
            defaults += 1;
        }
    }
    assert!(defaults > 20, "{defaults} defaults in the help texts");
}

/// The files and runs that the calls work on.
struct Fixture {
    folder: tempfile::TempDir,
    programs: ProgramFolder,
    words: BTreeMap<&'static str, String>,
    new: AtomicUsize,
    other: Child,
    live: Option<Running>,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().join(HOSTILE);
        std::fs::create_dir(&here).unwrap();
        let path = |name: &str| here.join(name).into_os_string().into_string().unwrap();
        let (intruder, run, other_run, live) = (path("intruder"), path("run"), path("other run"), path("live"));
        std::fs::copy(INTRUDER, &intruder).unwrap();
        for (run, words) in [(&run, &["oom", "exit=3"][..]), (&other_run, &["live=9", "names"])] {
            let recorded =
                output(recording(Path::new(run)).arg(&intruder).args(words).arg("say=").env("TMPDIR", &here));
            assert!(recorded.status.code() == Some(3) || recorded.status.success(), "{recorded:?}");
        }
        let trace = only_file(Path::new(&run), "mtr");
        let snapshot = path("a.pickle");
        std::fs::copy(only_file(Path::new(&run), "pickle"), &snapshot).unwrap();
        std::fs::write(path("damaged"), format!("{{\"version\": \"{HOSTILE}")).unwrap();
        let rules = serde_json::json!({"categories": [{"name": "mine", "function": HOSTILE}]});
        std::fs::write(path("rules"), rules.to_string()).unwrap();
        let answer = serde_json::json!({
            "path": here, "display_name": HOSTILE, "warnings": [HOSTILE], "error": null, "help": "",
        });
        std::fs::write(folder.path().join("answer"), answer.to_string()).unwrap();
        std::fs::write(folder.path().join("text"), HOSTILE).unwrap();
        for (name, script) in [("python", "cat $FIXTURE/answer"), ("bad_python", "cat $FIXTURE/text >&2; exit 1")] {
            std::fs::write(path(name), format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(path(name), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        }
        let sleep = path(HOSTILE_PROCESS);
        std::fs::copy("/bin/sleep", &sleep).unwrap();
        let other = Command::new(&sleep).arg("100000").stdout(Stdio::null()).spawn().unwrap();
        // A driver that can suspend it.
        let programs = ProgramFolder::new();
        programs.library("launcher/checkpoint.c", "libcuda.so.1", &[] as &[&str]);
        std::fs::write(programs.path(&other.id().to_string()), "0").unwrap();
        let mut running = recording(Path::new(&live));
        running.arg(&intruder).args(["names", "say=ready", "wait"]).stdin(Stdio::piped());
        let mut running = Running::start(&mut running);
        assert_eq!(running.line(), "ready");
        let recorded = children(running.pid()).into_iter();
        let is_intruder =
            |pid: &i32| std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new(&intruder));
        let pid = recorded.into_iter().find(is_intruder).expect("the recorded process");
        // The range of the recorded program.
        let range = "\x1b]0;owned\x07\x1b[2J\u{9b}31m\u{202e}\r\n\"\\\u{7f}\n::error::owned ##[group]x ##vso[task.z]y";
        let words = [
            ("here", path("")),
            ("intruder", intruder),
            ("run", run),
            ("other_run", other_run),
            ("trace", trace.into_os_string().into_string().unwrap()),
            ("snapshot", snapshot),
            ("damaged", path("damaged")),
            ("rules", path("rules")),
            ("python", path("python")),
            ("bad_python", path("bad_python")),
            ("missing", path(&format!("missing{HOSTILE}"))),
            ("hostile", HOSTILE.to_owned()),
            ("range", range.to_owned()),
            ("live", live),
            ("pid", pid.to_string()),
            ("other", other.id().to_string()),
        ];
        let live = Some(running);
        Fixture { folder, programs, words: words.into_iter().collect(), new: AtomicUsize::new(0), other, live }
    }

    fn here(&self) -> PathBuf {
        self.folder.path().join(HOSTILE)
    }

    /// The words of a call.
    fn words(&self, call: &str) -> Vec<String> {
        let word = |word: &str| {
            let mut word = word.to_owned();
            for (name, value) in &self.words {
                word = word.replace(&format!("{{{name}}}"), value);
            }
            if word.contains("{new}") {
                let new = self.here().join(format!("new {}", self.new.fetch_add(1, Ordering::Relaxed)));
                word = word.replace("{new}", new.to_str().unwrap());
            }
            word
        };
        call.split_whitespace().map(word).collect()
    }

    fn command(&self, words: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new(memtrace());
        command.args(words).current_dir(self.here()).stdin(Stdio::null()).env("FIXTURE", self.folder.path());
        // No browser, no other Python, no output of CI.
        for name in ["BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "GITHUB_WORKSPACE"] {
            command.env_remove(name);
        }
        command.env("PATH", "/usr/bin:/bin").env("HOME", self.folder.path());
        if words.first().is_some_and(|word| matches!(word.as_ref().as_bytes(), b"suspend" | b"resume")) {
            let folder = self.programs.path("");
            command.env("LD_LIBRARY_PATH", &folder).env("CHECKPOINT_STATES", &folder);
        }
        if words.first().is_some_and(|word| word.as_ref() == "doctor") {
            command.env("PATH", self.folder.path());
        }
        command
    }

    /// Runs a call to its end. A server ends with its stdin.
    fn run(&self, words: &[String]) -> Output {
        let mut command = self.command(words);
        if !words.iter().any(|word| word == "--serve") {
            return output(&mut command);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (mut text, mut byte) = (Vec::new(), [0]);
        let stdout = child.stdout.as_mut().unwrap();
        while !text.ends_with(b"stop\n") && stdout.read(&mut byte).unwrap() == 1 {
            text.push(byte[0]);
        }
        let mut output = child.wait_with_output().unwrap();
        output.stdout.splice(0..0, text);
        output
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        drop(self.live.take());
        let _ = self.other.kill();
        let _ = self.other.wait();
    }
}

/// The only file of a folder with this extension.
fn only_file(folder: &Path, extension: &str) -> PathBuf {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    let [path] = &found[..] else { panic!("{found:?}") };
    path.clone()
}

/// Requires that nobody who shows these bytes obeys a name.
#[track_caller]
fn assert_safe(words: &[String], stream: &str, bytes: &[u8]) {
    let text = std::str::from_utf8(bytes).unwrap_or_else(|e| panic!("{words:?}: {stream}: {e}"));
    let bad = text.chars().find(|c| *c != '\n' && is_unprintable(*c));
    assert_eq!(bad, None, "{words:?}: {stream}: {text:?}");
    for line in text.lines() {
        let is_annotation = words.iter().any(|word| word == "--github")
            && ["::error file=", "::error title=", "::notice title="].iter().any(|start| line.starts_with(start));
        assert!(is_annotation || !line.trim_start().starts_with("::"), "{words:?}: {stream}: {line}");
        assert!(!line.contains("##[") && !line.contains("##vso["), "{words:?}: {stream}: {line}");
    }
}

fn check(words: &[String], output: &Output) {
    assert_safe(words, "stdout", &output.stdout);
    assert_safe(words, "stderr", &output.stderr);
    assert_ne!(output.status.code(), Some(101), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    let is_json = words.iter().take_while(|word| *word != "--").any(|word| word == "--json");
    if is_json && !output.stdout.is_empty() {
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap_or_else(|e| panic!("{words:?}: {e}"));
    }
}

#[test]
fn no_command_prints_a_name_raw() {
    let fixture = Fixture::new();
    let defined = defined();
    let (next, printed) = (AtomicUsize::new(0), Mutex::new(BTreeSet::new()));
    // The calls of one command run in their order, and those of several commands at the same time.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((command, calls)) = KNOWN.get(next.fetch_add(1, Ordering::Relaxed)) {
                    for (number, call) in calls.iter().enumerate() {
                        let words = fixture.words(call);
                        let output = fixture.run(&words);
                        check(&words, &output);
                        let has_name =
                            [&output.stdout, &output.stderr].iter().any(|text| text.windows(5).any(|w| w == b"owned"));
                        if number == 0 && has_name {
                            printed.lock().unwrap().insert(*command);
                        }
                    }
                    // Each option with a value that it does not expect, and one that does not exist.
                    let first: Vec<&str> = calls[0].split_whitespace().collect();
                    let (own, rest) = first.split_at(command.split(' ').count());
                    let options = defined[*command].iter().filter(|(_, has_value)| **has_value);
                    let options = options.map(|(option, _)| format!("--{option} {{hostile}}"));
                    for option in options.chain(["--{hostile}".to_owned()]) {
                        let words = fixture.words(&[own.join(" "), option, rest.join(" ")].join(" "));
                        check(&words, &fixture.run(&words));
                    }
                }
            });
        }
    });
    let expected: BTreeSet<&str> =
        KNOWN.iter().map(|(command, _)| *command).filter(|command| !WITHOUT_NAMES.contains(command)).collect();
    assert_eq!(printed.into_inner().unwrap(), expected, "the first calls print hostile names");
}

/// On a terminal, memtrace styles its text. It shows no other sequence.
#[test]
fn no_command_shows_a_name_raw_on_a_terminal() {
    let fixture = Fixture::new();
    for call in [
        "report {run} --verbose",
        "report {missing}",
        "run -o {new} -- {intruder} oom exit=3",
        "dry-run --vary bs=1,2 -o {new} -- {intruder} oom say={bs} exit=1",
        "lines {run}",
        "diff {run} {other_run}",
        "check {run} --no-issue any",
        "open {run}",
        "redact {run} -o {new}",
        "suspend {other}",
        "doctor -- {intruder} names",
        "report --section {hostile}",
        "report --section \u{1b}[31mowned",
        "help",
    ] {
        let words = fixture.words(call);
        let (text, _) = on_terminal(fixture.command(&words), None);
        let own = STYLES.iter().fold(text.replace("\r\n", "\n"), |text, style| text.replace(style, ""));
        assert_safe(&words, "terminal", own.as_bytes());
        assert!(call == "help" || text.contains("owned"), "{call}: {text}");
        assert!(!text.contains("\u{1b}[31mowned"), "{call}: {text}");
    }
}

/// The view of `memtrace live` moves the cursor, and shows names.
#[test]
fn the_live_view_shows_no_name_raw() {
    let fixture = Fixture::new();
    let words = fixture.words("live {live}");
    // `t` shows tensors, `/` searches.
    let (text, code) = on_terminal(fixture.command(&words), Some(("quit", b"t/\xc2\x9b\xe2\x80\xae\rq")));
    assert_eq!(code, Some(0), "{text:?}");
    assert!(text.contains("owned"), "{text:?}");
    for raw in ["\x1b]0;owned", "\u{9b}", "\u{202e}", "\u{2066}", "\u{7f}", "\x07"] {
        assert!(!text.contains(raw), "{raw:?}: {text:?}");
    }
}

/// Runs a command on a terminal of its own, and types keys when it shows a text. Returns what the terminal shows.
fn on_terminal(mut command: Command, keys: Option<(&str, &[u8])>) -> (String, Option<i32>) {
    let (mut ours, theirs) = terminal();
    let size = libc::winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptor is open, and `size` lives during the call.
    assert_eq!(unsafe { libc::ioctl(theirs.as_raw_fd(), libc::TIOCSWINSZ, &size) }, 0);
    let mut child = start_on(&theirs, command.env("TERM", "xterm").env_remove("NO_COLOR"));
    // Both have the terminal open.
    drop((theirs, command));
    let mut text = Vec::new();
    if let Some((shown, typed)) = keys {
        let mut byte = [0];
        while !text.ends_with(shown.as_bytes()) {
            ours.read_exact(&mut byte).unwrap();
            text.push(byte[0]);
        }
        ours.write_all(typed).unwrap();
    }
    // Reading fails when the last process has closed the terminal.
    let _ = ours.read_to_end(&mut text);
    (String::from_utf8_lossy(&text).into_owned(), child.wait().unwrap().code())
}

/// Names that are not UTF-8: the bytes of C1 control characters.
#[test]
fn bytes_that_are_no_text_are_not_printed() {
    let fixture = Fixture::new();
    let broken = OsStr::from_bytes(b"\x9b2J\xff owned\x1b[2J");
    let run = fixture.here().join(broken);
    let calls: [&[&OsStr]; 5] = [
        &["-o".as_ref(), run.as_os_str(), "--".as_ref(), "true".as_ref(), broken],
        &["report".as_ref(), run.as_os_str()],
        &["open".as_ref(), run.as_os_str()],
        &["dry-run".as_ref(), "--json".as_ref(), "--vary".as_ref(), broken],
        &["report".as_ref(), "--section".as_ref(), broken],
    ];
    for words in calls {
        let output = output(&mut fixture.command(words));
        let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        check(&words, &output);
        let all = [output.stdout, output.stderr].concat();
        let is_refused = words[0] == "dry-run" || words[1] == "--section";
        assert!(is_refused || String::from_utf8_lossy(&all).contains("owned"), "{words:?}");
    }
    let tries = fixture.here().join(OsStr::from_bytes(b"\x9btries"));
    let mut command = fixture.command(&["dry-run", "--json", "--vary", "bs=1"]);
    let output = output(command.arg("-o").arg(tries).args(["--", "true", "{bs}"]));
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert!(report["tries"][0]["run"].as_str().unwrap().ends_with("tries/bs-1"), "{report}");
}

/// The other name of the command, where it does not find the binary beside it.
#[test]
fn the_other_name_of_the_command_prints_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().join(HOSTILE);
    std::fs::create_dir(&here).unwrap();
    let program = here.join("gpu-memtrace");
    std::fs::copy(memtrace().with_file_name("gpu-memtrace"), &program).unwrap();
    let output = output(&mut Command::new(&program));
    assert_eq!(output.status.code(), Some(125));
    assert_safe(&[], "stderr", &output.stderr);
    assert!(String::from_utf8_lossy(&output.stderr).contains("owned"), "{output:?}");
}
