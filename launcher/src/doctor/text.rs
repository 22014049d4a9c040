//! The report for people: the result, the failed checks with their fixes, all checks by layer, and the next steps.

use memtrace_analysis::printable;

use super::report::{Check, CheckStatus, DoctorReport, Python, RecordedProcess};
use super::units::count_text;

/// The width of the column of names, in characters.
const NAME_WIDTH: usize = 20;
/// The maximum length of a command line in the report, in characters.
const MAX_COMMAND: usize = 100;

/// Options of the text report.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    /// Whether to use terminal colors.
    pub(super) color: bool,
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn status(self, status: CheckStatus) -> String {
        match status {
            CheckStatus::Ok => self.paint("32", "ok  "),
            CheckStatus::Failed => self.paint("1;31", "FAIL"),
            CheckStatus::Note => self.paint("33", "note"),
            CheckStatus::Unused => self.paint("2", "-   "),
        }
    }

    fn heading(self, text: &str) -> String {
        self.paint("1", text)
    }
}

/// Adds a line. Facts come from the machine and the program, and can contain anything.
fn push(out: &mut String, style: Style, line: &str) {
    *out += &printable::styled_line(line, if style.color { &printable::STYLES } else { &[] });
    out.push('\n');
}

/// Adds a heading with a blank line above it.
fn push_heading(out: &mut String, style: Style, heading: &str) {
    out.push('\n');
    push(out, style, heading);
}

/// Formats the report.
pub(super) fn to_text(report: &DoctorReport, style: Style) -> String {
    let mut out = String::new();
    result(&mut out, report, style);
    machine(&mut out, report, style);
    program(&mut out, report, style);
    push_heading(&mut out, style, &style.heading("Next steps"));
    for (command, effect) in next_steps(report) {
        push(&mut out, style, &format!("  {command:40} {effect}"));
    }
    out
}

fn result(out: &mut String, report: &DoctorReport, style: Style) {
    let text = match (report.failed, &report.program) {
        (0, None) => "All checks passed".to_owned(),
        (0, Some(p)) if p.processes.is_empty() => {
            "All checks passed; this command allocated no memory that memtrace records".to_owned()
        }
        (0, Some(_)) => "All checks passed; the recording of this command is complete".to_owned(),
        (1, _) => "1 check failed:".to_owned(),
        (n, _) => format!("{} checks failed:", count_text(n as u64)),
    };
    let color = if report.failed == 0 { "1;32" } else { "1;31" };
    push(out, style, &style.paint(color, &text));
    for (at, check) in report.checks().filter(|(_, check)| check.has_failed()) {
        let at = if at.is_empty() { at } else { format!(" ({at})") };
        push(out, style, &format!("  {}{at}: {}", check.name, check.detail));
        if let Some(fix) = &check.fix {
            push(out, style, &format!("    {} {fix}", style.paint("1", "fix:")));
        }
    }
}

fn line(out: &mut String, check: &Check, style: Style) {
    push(out, style, &format!("  {:NAME_WIDTH$} {} {}", check.name, style.status(check.status), check.detail));
    fix_of_note(out, check, style);
}

/// Writes the fix of a note. The fixes of failed checks are at the top of the report.
fn fix_of_note(out: &mut String, check: &Check, style: Style) {
    if let (CheckStatus::Note, Some(fix)) = (check.status, &check.fix) {
        push(out, style, &format!("  {:NAME_WIDTH$}      fix: {fix}", ""));
    }
}

fn machine(out: &mut String, report: &DoctorReport, style: Style) {
    let machine = &report.machine;
    let title = format!("Machine    {}, memtrace {}", machine.host, report.memtrace);
    push_heading(out, style, &style.heading(&title));
    for check in &machine.checks {
        line(out, check, style);
    }
    push_heading(out, style, &style.heading("Python interpreters on PATH (* is the default)"));
    if machine.pythons.is_empty() {
        push(out, style, "  none");
    }
    for python in &machine.pythons {
        self::python(out, python, style);
    }
}

fn python(out: &mut String, python: &Python, style: Style) {
    let mut name = format!("{} {}", python.implementation, python.version);
    if python.is_default {
        name += " *";
    }
    let library = python.linkage.rsplit('/').next().unwrap_or_default();
    let build = if python.build.is_empty() { String::new() } else { format!(" ({library}, {})", python.build) };
    let version = name.trim();
    let status = style.status(python.stacks.status);
    push(out, style, &format!("  {version:NAME_WIDTH$} {status} {}: {}{build}", python.path, python.stacks.detail));
    fix_of_note(out, &python.stacks, style);
    if let Some(pytorch) = &python.pytorch {
        line(out, &Check { name: "  PyTorch".to_owned(), ..pytorch.tested.clone() }, style);
    }
}

fn program(out: &mut String, report: &DoctorReport, style: Style) {
    let Some(program) = &report.program else { return };
    let title = format!("Command    {}    {:.1} s", shown(&program.command), program.seconds);
    push_heading(out, style, &style.heading(&title));
    for check in &program.checks {
        line(out, check, style);
    }
    for process in &program.processes {
        self::process(out, process, style);
    }
    if !program.not_recorded.is_empty() {
        push_heading(out, style, &style.heading("Processes that were not recorded"));
    }
    for process in &program.not_recorded {
        let check = Check { name: format!("{} {}", process.pid, process.check.name), ..process.check.clone() };
        line(out, &check, style);
    }
}

fn process(out: &mut String, process: &RecordedProcess, style: Style) {
    push_heading(out, style, &style.heading(&format!("Process {}    {}", process.pid, shown(&process.argv))));
    for check in process.layers.iter().chain(&process.checks) {
        line(out, check, style);
    }
    if let Some(pytorch) = &process.pytorch {
        line(out, &pytorch.tested, style);
    }
}

fn shown(words: &[String]) -> String {
    let all = words.iter().map(|w| w.replace(|c: char| c.is_control(), " ")).collect::<Vec<_>>().join(" ");
    let mut text: String = all.chars().take(MAX_COMMAND).collect();
    if text.len() < all.len() {
        text += "...";
    }
    text
}

/// The commands to run next, each with its effect.
fn next_steps(report: &DoctorReport) -> Vec<(String, &'static str)> {
    const CHECK_AGAIN: &str = "check again after the fixes";
    match (report.ok, &report.program) {
        (true, None) => vec![
            ("memtrace doctor -- python train.py".to_owned(), "check one program"),
            ("memtrace -- python train.py".to_owned(), "record it"),
        ],
        (true, Some(p)) => match &p.folder {
            Some(folder) => vec![(format!("memtrace report {folder}"), "print the report of this recording")],
            None => vec![(format!("memtrace -- {}", shown(&p.command)), "record the command")],
        },
        (false, None) => vec![("memtrace doctor".to_owned(), CHECK_AGAIN)],
        (false, Some(p)) => vec![(format!("memtrace doctor -- {}", shown(&p.command)), CHECK_AGAIN)],
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::{Machine, NotRecorded, Program, PyTorch, StackCounts};
    use super::*;

    fn machine(checks: Vec<Check>) -> Machine {
        let python = Python {
            path: "/usr/bin/python3".into(),
            is_default: true,
            version: "3.11.2".into(),
            implementation: "cpython".into(),
            linkage: "static".into(),
            build: "release".into(),
            stacks: Check::ok("Python stacks", "layout verified, version tested"),
            pytorch: Some(PyTorch {
                version: "2.11.0+cu130".into(),
                cuda: Some("13.0".into()),
                path: "/x/torch".into(),
                tested: Check::ok("PyTorch", "2.11.0+cu130 is tested"),
            }),
        };
        Machine { host: "host".into(), checks, gpus: Vec::new(), pythons: vec![python] }
    }

    fn program() -> Program {
        let process = RecordedProcess {
            pid: 7,
            argv: vec!["python".into(), "train.py".into()],
            events: 12,
            pytorch: None,
            layers: vec![
                Check::ok("CUDA driver", "4 events"),
                Check::failed("Allocator tracker", "not attached: no interface", "use a later release"),
                Check::unused("CPU tensors", "none allocated"),
            ],
            stacks: StackCounts { python: 12, ..StackCounts::default() },
            checks: vec![Check::ok("Losses", "none of 12 events")],
            counters: Default::default(),
        };
        Program {
            command: vec!["python".into(), "train.py".into()],
            ending: "finished".into(),
            seconds: 1.25,
            stopped: false,
            folder: None,
            checks: vec![Check::ok("Exit", "finished")],
            processes: vec![process],
            not_recorded: vec![NotRecorded {
                pid: 9,
                exe: "/sbin/ldconfig".into(),
                check: Check::note("ldconfig", "statically linked").with_fix("run another build"),
            }],
        }
    }

    #[test]
    fn a_report_in_which_all_checks_passed() {
        let report = DoctorReport::new(machine(vec![Check::ok("Clock", "invariant")]), None);
        let expected = format!(
            "\
All checks passed

Machine    host, memtrace {}
  Clock                ok   invariant

Python interpreters on PATH (* is the default)
  cpython 3.11.2 *     ok   /usr/bin/python3: layout verified, version tested (static, release)
    PyTorch            ok   2.11.0+cu130 is tested

Next steps
  memtrace doctor -- python train.py       check one program
  memtrace -- python train.py              record it
",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(to_text(&report, Style { color: false }), expected);
    }

    #[test]
    fn a_report_in_which_a_check_failed() {
        let text = to_text(&DoctorReport::new(machine(Vec::new()), Some(program())), Style { color: false });
        let (result, rest) = text.split_once("\n\n").unwrap();
        let expected = "\
1 check failed:
  Allocator tracker (process 7): not attached: no interface
    fix: use a later release";
        assert_eq!(result, expected);
        let (_, rest) = rest.split_once("Command    ").unwrap();
        let expected = "\
python train.py    1.2 s
  Exit                 ok   finished

Process 7    python train.py
  CUDA driver          ok   4 events
  Allocator tracker    FAIL not attached: no interface
  CPU tensors          -    none allocated
  Losses               ok   none of 12 events

Processes that were not recorded
  9 ldconfig           note statically linked
                            fix: run another build

Next steps
  memtrace doctor -- python train.py       check again after the fixes
";
        assert_eq!(rest, expected);
    }

    #[test]
    fn colors_are_optional() {
        let report = DoctorReport::new(machine(vec![Check::failed("a", "b", "c")]), None);
        assert!(to_text(&report, Style { color: true }).contains("\x1b["));
        assert!(!to_text(&report, Style { color: false }).contains('\x1b'));
    }
}
