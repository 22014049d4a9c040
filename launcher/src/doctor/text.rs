//! The report for people: the result, the problems with their fixes, all findings by layer, and the next step.

use super::diagnosis::{Diagnosis, Finding, Process, Python, State};
use super::units::count_text;

/// The width of the column of names, in characters.
const NAME: usize = 20;
/// The maximum length of a command line in the report, in characters.
const COMMAND: usize = 100;

/// Options of the text report.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    /// Whether to use terminal colors.
    pub(super) colour: bool,
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn state(self, state: State) -> String {
        match state {
            State::Ok => self.paint("32", "ok  "),
            State::Off => self.paint("1;31", "OFF "),
            State::Note => self.paint("33", "note"),
            State::Unused => self.paint("2", "-   "),
        }
    }

    fn heading(self, text: &str) -> String {
        self.paint("1", text)
    }
}

/// Writes the report.
pub(super) fn page(diagnosis: &Diagnosis, style: Style) -> String {
    let mut out = String::new();
    answer(&mut out, diagnosis, style);
    machine(&mut out, diagnosis, style);
    program(&mut out, diagnosis, style);
    out += &format!("\n{}    {}\n", style.heading("next"), next(diagnosis));
    out
}

fn answer(out: &mut String, diagnosis: &Diagnosis, style: Style) {
    let text = match (diagnosis.off, &diagnosis.program) {
        (0, None) => "memtrace can record everything here".to_owned(),
        (0, Some(p)) if p.processes.is_empty() => {
            "memtrace can record everything here; this program allocated nothing that it records".to_owned()
        }
        (0, Some(_)) => "memtrace can record everything here, and recorded all that this program used".to_owned(),
        (1, _) => "1 thing is off:".to_owned(),
        (n, _) => format!("{} things are off:", count_text(n as u64)),
    };
    let colour = if diagnosis.off == 0 { "1;32" } else { "1;31" };
    *out += &style.paint(colour, &text);
    out.push('\n');
    for (at, finding) in diagnosis.findings().filter(|(_, f)| f.is_off()) {
        let at = if at.is_empty() { at } else { format!(" ({at})") };
        *out += &format!("  {}{at}: {}\n", finding.what, finding.found);
        if let Some(mend) = &finding.mend {
            *out += &format!("    {} {mend}\n", style.paint("1", "mend:"));
        }
    }
}

fn line(out: &mut String, finding: &Finding, style: Style) {
    *out += &format!("  {:NAME$} {} {}\n", finding.what, style.state(finding.state), finding.found);
    // Problems have their fix at the top of the report.
    if let (State::Note, Some(mend)) = (finding.state, &finding.mend) {
        *out += &format!("  {:NAME$}      mend: {mend}\n", "");
    }
}

fn machine(out: &mut String, diagnosis: &Diagnosis, style: Style) {
    let machine = &diagnosis.machine;
    let title = format!("machine  {}, memtrace {}", machine.host, diagnosis.memtrace);
    *out += &format!("\n{}\n", style.heading(&title));
    for finding in &machine.checks {
        line(out, finding, style);
    }
    *out += &format!("\n{}\n", style.heading("Pythons on PATH"));
    if machine.pythons.is_empty() {
        *out += "  none\n";
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
    let state = style.state(python.stacks.state);
    *out += &format!("  {version:NAME$} {state} {}: {}{build}\n", python.path, python.stacks.found);
    if let (State::Note, Some(mend)) = (python.stacks.state, &python.stacks.mend) {
        *out += &format!("  {:NAME$}      mend: {mend}\n", "");
    }
    if let Some(pytorch) = &python.pytorch {
        line(out, &Finding { what: "  PyTorch".to_owned(), ..pytorch.tested.clone() }, style);
    }
}

fn program(out: &mut String, diagnosis: &Diagnosis, style: Style) {
    let Some(program) = &diagnosis.program else { return };
    let title = format!("program  {}    {:.1} s", shown(&program.command), program.seconds);
    *out += &format!("\n{}\n", style.heading(&title));
    for finding in &program.checks {
        line(out, finding, style);
    }
    for process in &program.processes {
        self::process(out, process, style);
    }
    if !program.not_recorded.is_empty() {
        *out += &format!("\n{}\n", style.heading("processes without the recorder"));
    }
    for stranger in &program.not_recorded {
        let finding = Finding { what: format!("{} {}", stranger.pid, stranger.why.what), ..stranger.why.clone() };
        line(out, &finding, style);
    }
}

fn process(out: &mut String, process: &Process, style: Style) {
    *out += &format!("\n{}\n", style.heading(&format!("process {}  {}", process.pid, shown(&process.argv))));
    for finding in &process.layers {
        line(out, finding, style);
    }
    for finding in &process.checks {
        line(out, finding, style);
    }
    if let Some(pytorch) = &process.pytorch {
        line(out, &pytorch.tested, style);
    }
}

fn shown(words: &[String]) -> String {
    let all = words.iter().map(|w| w.replace(|c: char| c.is_control(), " ")).collect::<Vec<_>>().join(" ");
    let mut text: String = all.chars().take(COMMAND).collect();
    if text.len() < all.len() {
        text += "...";
    }
    text
}

fn next(diagnosis: &Diagnosis) -> String {
    let command = diagnosis.program.as_ref().map_or("python train.py".to_owned(), |p| shown(&p.command));
    match (diagnosis.ok, &diagnosis.program) {
        (true, None) => {
            "memtrace doctor -- python train.py   looks at one program;   memtrace -- python train.py   records it"
                .to_owned()
        }
        (true, Some(p)) => match &p.folder {
            Some(folder) => format!("memtrace report {folder}"),
            None => format!("memtrace -- {command}"),
        },
        (false, None) => "mend the above, then: memtrace doctor".to_owned(),
        (false, Some(_)) => format!("mend the above, then: memtrace doctor -- {command}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::diagnosis::{Machine, Program, PyTorch, Stacks, Stranger};
    use super::*;

    fn machine(checks: Vec<Finding>) -> Machine {
        let python = Python {
            path: "/usr/bin/python3".into(),
            is_default: true,
            version: "3.11.2".into(),
            implementation: "cpython".into(),
            linkage: "static".into(),
            build: "release".into(),
            stacks: Finding::ok("Python stacks", "layout verified just now, version tested"),
            pytorch: Some(PyTorch {
                version: "2.11.0+cu130".into(),
                cuda: Some("13.0".into()),
                path: "/x/torch".into(),
                tested: Finding::ok("PyTorch", "2.11.0+cu130 is tested"),
            }),
        };
        Machine { host: "host".into(), checks, gpus: Vec::new(), pythons: vec![python] }
    }

    fn program() -> Program {
        let process = Process {
            pid: 7,
            argv: vec!["python".into(), "train.py".into()],
            events: 12,
            pytorch: None,
            layers: vec![
                Finding::ok("CUDA driver", "4 events"),
                Finding::off("PyTorch tracker", "not attached: no door", "use a later release"),
                Finding::unused("CPU tensors", "none allocated"),
            ],
            stacks: Stacks { python: 12, ..Stacks::default() },
            checks: vec![Finding::ok("losses", "none of 12 events")],
            counters: Default::default(),
        };
        Program {
            command: vec!["python".into(), "train.py".into()],
            ending: "ended well".into(),
            seconds: 1.25,
            stopped: false,
            folder: None,
            checks: vec![Finding::ok("program", "ended well")],
            processes: vec![process],
            not_recorded: vec![Stranger {
                pid: 9,
                exe: "/sbin/ldconfig".into(),
                why: Finding::note("ldconfig", "statically linked").with_mend("run another build"),
            }],
        }
    }

    #[test]
    fn all_is_well() {
        let page =
            page(&Diagnosis::new(machine(vec![Finding::ok("clock", "invariant")]), None), Style { colour: false });
        let expected = format!(
            "\
memtrace can record everything here

machine  host, memtrace {}
  clock                ok   invariant

Pythons on PATH
  cpython 3.11.2 *     ok   /usr/bin/python3: layout verified just now, version tested (static, release)
    PyTorch            ok   2.11.0+cu130 is tested

next    memtrace doctor -- python train.py   looks at one program;   memtrace -- python train.py   records it
",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(page, expected);
    }

    #[test]
    fn something_is_off() {
        let page = page(&Diagnosis::new(machine(Vec::new()), Some(program())), Style { colour: false });
        let (answer, rest) = page.split_once("\n\n").unwrap();
        let expected = "\
1 thing is off:
  PyTorch tracker (process 7): not attached: no door
    mend: use a later release";
        assert_eq!(answer, expected);
        let (_, rest) = rest.split_once("program  ").unwrap();
        let expected = "\
python train.py    1.2 s
  program              ok   ended well

process 7  python train.py
  CUDA driver          ok   4 events
  PyTorch tracker      OFF  not attached: no door
  CPU tensors          -    none allocated
  losses               ok   none of 12 events

processes without the recorder
  9 ldconfig           note statically linked
                            mend: run another build

next    mend the above, then: memtrace doctor -- python train.py
";
        assert_eq!(rest, expected);
    }

    #[test]
    fn colours_only_where_they_are_wanted() {
        let diagnosis = Diagnosis::new(machine(vec![Finding::off("a", "b", "c")]), None);
        assert!(page(&diagnosis, Style { colour: true }).contains("\x1b["));
        assert!(!page(&diagnosis, Style { colour: false }).contains('\x1b'));
    }
}
