//! The command line of the launcher, declared with clap.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use memtrace_analysis::rules::ILLNESSES;
use memtrace_analysis::{SECTIONS, Tolerance};
use memtrace_trace::options;

/// Records what fills the GPU memory of a program, and says so when the program ends.
#[derive(Parser, Debug)]
#[command(name = "memtrace", version, subcommand_required = true, arg_required_else_help = true)]
#[command(
    override_usage = "memtrace [run] [OPTIONS] -- COMMAND [ARGS]...\n       memtrace <report|export|lines|diff|check> RUN [OPTIONS]\n       \
    memtrace doctor [OPTIONS] [-- COMMAND [ARGS]...]"
)]
#[command(after_help = "`run` may be left out: memtrace -- python train.py\n\n\
    Exit status of `run`: the command's own (128+n for signal n); 125 when memtrace cannot start, 126 when the command \
    cannot be executed, 127 when it is not found. Other commands: 0 fine, 1 the answer is no (doctor: \
    something is off), 2 bad usage or unreadable input.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a command and record its GPU memory (the default)
    Run(Run),
    /// Print the summary of a run
    Report(Report),
    /// Write a run in the form of another program
    Export(Export),
    /// Print what each source line did to the GPU memory: the table of a line profiler, with no decorator
    Lines(Lines),
    /// Say what made the peak of one run higher than another's: by category, phase, line, stack and module
    Diff(Diff),
    /// Hold a run to limits or to a baseline, for CI: the exit status says whether it keeps them
    Check(Check),
    /// Say what can be recorded on this machine and of this program, what is off and how to mend it
    Doctor(Doctor),
    /// Write the manual pages
    Man(Man),
    /// Print what makes a shell complete memtrace's options
    Completions(Completions),
    // A new subcommand is a variant here and a small file in `commands`.
}

/// `memtrace report`.
#[derive(Args, Debug)]
pub(crate) struct Report {
    /// A run folder, a .mtr file, or any PyTorch memory snapshot (.pickle, .pkl, .json; .gz too)
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// JSON for programs: bytes and nanoseconds; it has everything
    #[arg(long)]
    pub(crate) json: bool,
    /// Only one part, in full
    #[arg(long, value_name = "NAME", value_parser = section_names(), conflicts_with = "json")]
    pub(crate) section: Option<String>,
}

/// The sections of a report, each with its description, as values for clap.
fn section_names() -> PossibleValuesParser {
    SECTIONS.iter().map(|section| PossibleValue::new(section.name).help(section.tells)).collect::<Vec<_>>().into()
}

/// `memtrace export`.
#[derive(Args, Debug)]
pub(crate) struct Export {
    /// A run folder, a .mtr file, or any PyTorch memory snapshot (.pickle, .pkl, .json; .gz too)
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// The form
    #[arg(long, value_enum)]
    pub(crate) to: Format,
    /// The file to write [default: one a process, in the current folder; html: report.html; json: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Only the process of this rank
    #[arg(long, value_name = "N", conflicts_with = "pid")]
    pub(crate) rank: Option<u32>,
    /// Only this process
    #[arg(long, value_name = "N")]
    pub(crate) pid: Option<u32>,
    /// speedscope, folded: which bytes [default: peak]
    #[arg(long, value_enum)]
    pub(crate) of: Option<FlameOf>,
    #[command(flatten)]
    pub(crate) window: Window,
}

/// Which part of a process's recording an export shows. What is alive when the part begins is there.
#[derive(Args, Debug)]
#[command(next_help_heading = "Part of the recording")]
pub(crate) struct Window {
    /// Only this device; -1 is the CPU [timeline: the only one]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// Only these steps, from 0: N, A-B or A- (from A on). A step begins with its first block
    #[arg(long, value_name = "A-B", value_parser = step_range)]
    pub(crate) steps: Option<(u32, u32)>,
    /// Only this stretch of time since the run's first recorded event: A-B or A-, in seconds or with a unit (1.5s-2s, 250ms-, 10us-20us, ns)
    #[arg(long, value_name = "A-B", value_parser = time_range)]
    pub(crate) time: Option<(u64, u64)>,
    /// Leave out blocks that are smaller (512KiB, 1MiB, 2GiB, bytes)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) min_size: Option<u64>,
    /// Only the newest N events of that, as PyTorch's ring keeps them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_events: Option<u64>,
}

impl Window {
    /// Whether the window selects anything besides a device.
    pub(crate) fn is_part(&self) -> bool {
        self.steps.is_some() || self.time.is_some() || self.min_size.is_some() || self.max_events.is_some()
    }
}

/// Parses `A-B` or `A-`. Also parses `A` alone, as `A-A`, if `alone` is given. `most` is the end of `A-`.
fn range<T: PartialOrd + Copy>(
    text: &str,
    most: T,
    alone: Option<T>,
    parse: impl Fn(&str) -> Option<T>,
) -> Option<(T, T)> {
    let (from, to) = match text.split_once('-') {
        Some((from, "")) => (parse(from)?, most),
        Some((from, to)) => (parse(from)?, parse(to)?),
        None => {
            alone?;
            (parse(text)?, parse(text)?)
        }
    };
    (from <= to).then_some((from, to))
}

/// Parses a range of steps.
fn step_range(text: &str) -> Result<(u32, u32), String> {
    range(text, u32::MAX, Some(0), |n| n.trim().parse().ok())
        .ok_or_else(|| "a step is meant (3), or steps from a smaller to a larger number (2-5, 2-)".to_owned())
}

/// Parses a range of times, in nanoseconds.
fn time_range(text: &str) -> Result<(u64, u64), String> {
    range(text, u64::MAX, None, moment).ok_or_else(|| {
        "a time from an earlier to a later moment is meant, in seconds or with a unit: 1.5-2, 250ms-300ms, 2s-"
            .to_owned()
    })
}

/// Parses a point in time, in nanoseconds. The result is exact, unlike a floating-point number of seconds.
fn moment(text: &str) -> Option<u64> {
    let text = text.trim();
    let units = [("ns", 0), ("us", 3), ("ms", 6), ("s", 9), ("", 9)];
    let (number, digits) = units.iter().find_map(|(unit, digits)| Some((text.strip_suffix(unit)?.trim(), *digits)))?;
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if !part.bytes().all(|b| b.is_ascii_digit()) || whole.is_empty() {
        return None;
    }
    // Digits beyond a nanosecond are cut off.
    let part: String = part.chars().chain(std::iter::repeat('0')).take(digits as usize).collect();
    let part = if part.is_empty() { 0 } else { part.parse::<u64>().ok()? };
    whole.parse::<u64>().ok()?.checked_mul(10u64.pow(digits))?.checked_add(part)
}

/// Parses a size in bytes: a whole number, or a number with a binary unit.
fn size(text: &str) -> Result<u64, String> {
    const MEANT: &str = "a size is meant, such as 512KiB, 1MiB, 1.5GiB or a number of bytes";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let shift = match text[digits.len()..].trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        unit @ ("K" | "M" | "G" | "T" | "KB" | "kB" | "MB" | "GB" | "TB") => {
            return Err(format!("sizes are in binary units: {}iB, not {unit}", unit[..1].to_uppercase()));
        }
        _ => return Err(MEANT.to_owned()),
    };
    let unit = 1u64 << shift;
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(unit).filter(|size| *size < 1 << 62).ok_or_else(|| MEANT.to_owned());
    }
    match digits.parse::<f64>() {
        Ok(number) if shift > 0 && (0.0..1e6).contains(&number) => Ok((number * unit as f64) as u64),
        _ => Err(MEANT.to_owned()),
    }
}

/// `memtrace lines`.
#[derive(Args, Debug)]
pub(crate) struct Lines {
    /// A run folder, a .mtr file, or any PyTorch memory snapshot (.pickle, .pkl, .json; .gz too)
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Of this function: its name, its qualified name or the end of it, e.g. Block.forward [default: the program's own, by peak]
    #[arg(long, value_name = "NAME")]
    pub(crate) function: Option<String>,
    /// Of the functions in this file: its path or the end of it
    #[arg(long, value_name = "PATH")]
    pub(crate) file: Option<String>,
    /// At most so many functions, those with the highest peaks
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) top: usize,
    /// Of the process of this rank [default: the fullest]
    #[arg(long, value_name = "N", conflicts_with = "pid")]
    pub(crate) rank: Option<u32>,
    /// Of this process
    #[arg(long, value_name = "N")]
    pub(crate) pid: Option<u32>,
    /// Of this device; -1 is the CPU [default: the fullest]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// A page of HTML that needs nothing else
    #[arg(long, conflicts_with = "json")]
    pub(crate) html: bool,
    /// JSON for programs: bytes (analysis/schema/lines.schema.json)
    #[arg(long)]
    pub(crate) json: bool,
    /// The file to write [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// `memtrace diff`.
#[derive(Args, Debug)]
#[command(
    override_usage = "memtrace diff A B [OPTIONS]\n       memtrace diff RUN --steps N M [OPTIONS]",
    after_help = "Exit status: 0 whether or not they differ (`memtrace check --baseline` decides), 2 bad usage or unreadable input."
)]
pub(crate) struct Diff {
    /// The first: a run folder, a .mtr file, or any PyTorch memory snapshot (.pickle, .pkl, .json; .gz too)
    #[arg(value_name = "A")]
    pub(crate) a: PathBuf,
    /// The second, of any of these kinds
    #[arg(value_name = "B", required_unless_present = "steps")]
    pub(crate) b: Option<PathBuf>,
    /// The peak of step N of A against that of step M of B (without B: of A, too), instead of the peaks of all
    #[arg(long, num_args = 2, value_names = ["N", "M"])]
    pub(crate) steps: Option<Vec<u32>>,
    /// Only processes of this rank
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<u32>,
    /// Only this device; -1 is the CPU
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// JSON for programs: bytes (analysis/schema/diff.schema.json); it has everything
    #[arg(long)]
    pub(crate) json: bool,
}

/// `memtrace check`.
#[derive(Args, Debug)]
#[command(
    group = ArgGroup::new("limits").required(true).multiple(true)
        .args(["max_peak", "max_reserved", "max_leak", "no_oom", "no_finding", "baseline"]),
    after_help = "Exit status: 0 all limits are kept, 1 one is not, or the recording cannot tell, 2 bad usage or unreadable input.\n\
    Sizes are in binary units (20GiB, 512MiB) or bytes. Each limit holds for each device of each process by itself."
)]
pub(crate) struct Check {
    /// A run folder, a .mtr file, or any PyTorch memory snapshot (.pickle, .pkl, .json; .gz too)
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// The peak of allocated memory (torch.cuda.max_memory_allocated) is at most this
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_peak: Option<u64>,
    /// The peak of reserved memory (torch.cuda.max_memory_reserved) is at most this
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_reserved: Option<u64>,
    /// What each step keeps, once the second is over, is at most this
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_leak: Option<u64>,
    /// There is no out-of-memory error, caught or not
    #[arg(long)]
    pub(crate) no_oom: bool,
    /// There is no finding of this rule, e.g. leak (docs/reference/diagnostics.md lists them), or of any; may be
    /// repeated
    #[arg(long, value_name = "RULE", value_parser = rule_names())]
    pub(crate) no_finding: Vec<String>,
    /// Peak and reserved memory are those of this earlier run, or less: its folder, its summary.json, a trace or snapshot
    #[arg(long, value_name = "RUN")]
    pub(crate) baseline: Option<PathBuf>,
    /// How much more than the baseline is fine: a share (2%) or a size
    #[arg(long, value_name = "MORE", value_parser = tolerance, default_value = "1%")]
    pub(crate) tolerance: Tolerance,
    /// Only processes of this rank
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<u32>,
    /// Only this device; -1 is the CPU
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// Check also what lacks something: lost events, a program that did not end well
    #[arg(long)]
    pub(crate) allow_incomplete: bool,
    /// JSON for programs: bytes (analysis/schema/check.schema.json)
    #[arg(long, conflicts_with = "github")]
    pub(crate) json: bool,
    /// Annotations for GitHub Actions besides
    #[arg(long)]
    pub(crate) github: bool,
}

/// The rules of the diagnostics, and `any`, as values for clap.
fn rule_names() -> PossibleValuesParser {
    let names = ILLNESSES.iter().map(|rule| rule.name).chain(["any"]);
    names.map(PossibleValue::new).collect::<Vec<_>>().into()
}

/// Parses a tolerance: a share in percent, or a size.
fn tolerance(text: &str) -> Result<Tolerance, String> {
    match text.strip_suffix('%').map(|share| share.trim().parse::<f64>()) {
        Some(Ok(share)) if (0.0..=1000.0).contains(&share) => Ok(Tolerance::Share(share / 100.0)),
        Some(_) => Err("a share is meant, e.g. 2%".to_owned()),
        None => size(text).map(Tolerance::Bytes),
    }
}

/// `memtrace doctor`.
#[derive(Args, Debug)]
#[command(
    override_usage = "memtrace doctor [OPTIONS] [-- COMMAND [ARGS]...]",
    after_help = "Exit status: 0 all that can be seen here is seen, 1 something is off (each with its mend), 2 bad usage.\n\
    With a COMMAND it is run and recorded as `memtrace run` would do it; its output passes (with --json: to stderr)."
)]
pub(crate) struct Doctor {
    /// JSON for programs (launcher/schema/doctor.schema.json)
    #[arg(long)]
    pub(crate) json: bool,
    /// End the command, and all its processes, after so many seconds
    #[arg(long, value_name = "N", value_parser = seconds, requires = "command")]
    pub(crate) seconds: Option<f64>,
    /// Keep the recording in this folder, which must be new or empty
    #[arg(short, long, value_name = "DIR", requires = "command")]
    pub(crate) output: Option<PathBuf>,
    /// Be the program of doctor's own test
    #[arg(long, hide = true)]
    pub(crate) victim: bool,
    /// A command to try
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// `memtrace man`.
#[derive(Args, Debug)]
#[command(after_help = "memtrace man | man -l -    shows the first of them")]
pub(crate) struct Man {
    /// Write a page for each command into this folder [default: memtrace(1) to stdout]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
}

/// `memtrace completions`.
#[derive(Args, Debug)]
#[command(after_help = "bash: memtrace completions bash > ~/.local/share/bash-completion/completions/memtrace\n\
    zsh: into _memtrace, in a folder of $fpath\n\
    fish: memtrace completions fish > ~/.config/fish/completions/memtrace.fish")]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: clap_complete::Shell,
}

/// Parses a time of at most one day, in seconds.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if seconds > 0.0 && seconds <= 86_400.0 => Ok(seconds),
        _ => Err("a number of seconds is meant, more than 0 and at most 86400".to_owned()),
    }
}

/// `--to`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum Format {
    /// A PyTorch snapshot pickle, for pytorch.org/memory_viz
    Snapshot,
    /// The report as one page: the answer first, memory over time, a flame graph of the peak, every section; it loads nothing
    Html,
    /// The summary
    Json,
    /// Bytes by category over time, as export_memory_timeline of PyTorch writes it; by the ending of FILE: .html (a page with a
    /// picture), .png, .json, .raw.json, .raw.json.gz
    Timeline,
    /// A table of all blocks: when, how large, from where, what for
    Csv,
    /// A trace for ui.perfetto.dev: memory over time, blocks, steps, phases and named ranges
    Perfetto,
    /// A flame graph of bytes by call stack, for speedscope.app; see --of
    Speedscope,
    /// The same as folded stacks, for flamegraph.pl and its kin
    Folded,
    /// Tables for DuckDB, Polars, Spark and Ray Data (events, blocks, stacks, phases); -o is a folder. See
    /// docs/reference/parquet.md
    Parquet,
}

/// `--of`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum FlameOf {
    /// What was there when most was allocated
    Peak,
    /// What was allocated and never freed
    Leaks,
    /// Everything that was allocated
    Total,
}

impl From<FlameOf> for memtrace_analysis::export::FlameOf {
    fn from(of: FlameOf) -> memtrace_analysis::export::FlameOf {
        match of {
            FlameOf::Peak => memtrace_analysis::export::FlameOf::Peak,
            FlameOf::Leaks => memtrace_analysis::export::FlameOf::Leaks,
            FlameOf::Total => memtrace_analysis::export::FlameOf::Total,
        }
    }
}

/// `memtrace run`.
#[derive(Args, Debug)]
#[command(override_usage = "memtrace [run] [OPTIONS] -- COMMAND [ARGS]...")]
pub(crate) struct Run {
    /// Folder for the recording; must be new or empty [default: memtrace-PROGRAM-TIME]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// Which call stacks to record
    #[arg(long, value_enum, default_value_t = Stacks::Python)]
    pub(crate) stacks: Stacks,
    /// Compare every native stack with the C library's own unwinder, and count what differs: slow
    #[arg(long, hide = true)]
    pub(crate) check_stacks: bool,
    /// Whether to record CPU tensors (auto: only where no CUDA device is used)
    #[arg(long, value_enum, default_value_t = Cpu::Auto)]
    pub(crate) cpu: Cpu,
    /// Read nothing from the program's objects: no names of tensors and modules, and not which module is being called
    #[arg(long)]
    pub(crate) no_names: bool,
    /// Show the objects of reference cycles that held tensors, in cycle-N.html: runs PyTorch's torch.utils.viz._cycles in the program
    /// whenever the garbage collector finds a new kind of cycle
    #[arg(long)]
    pub(crate) cycles: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Write no snapshot, only the trace and the summary
    #[arg(long)]
    pub(crate) no_snapshot: bool,
    /// The command to record, and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// `--stacks`.
#[derive(Clone, Copy, ValueEnum, Debug)]
pub(crate) enum Stacks {
    /// Python frames; native ones where there are neither those nor an autograd node
    Python,
    /// Native frames (C++)
    Native,
    /// Native frames with the Python frames in their places
    Both,
    /// None
    None,
}

/// `--cpu`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum Cpu {
    /// Until the program turns out to use a CUDA device
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl From<Stacks> for options::Stacks {
    fn from(stacks: Stacks) -> options::Stacks {
        match stacks {
            Stacks::Python => options::Stacks::Python,
            Stacks::Native => options::Stacks::Native,
            Stacks::Both => options::Stacks::Both,
            Stacks::None => options::Stacks::None,
        }
    }
}

impl From<Cpu> for options::Cpu {
    fn from(cpu: Cpu) -> options::Cpu {
        match cpu {
            Cpu::Auto => options::Cpu::Auto,
            Cpu::Always => options::Cpu::Always,
            Cpu::Never => options::Cpu::Never,
        }
    }
}

/// Whether the first word of the command line is for memtrace. Otherwise it is the command to run.
fn is_word(first: &str) -> bool {
    matches!(first, "help" | "--help" | "-h" | "--version" | "-V") || Cli::command().find_subcommand(first).is_some()
}

impl Cli {
    /// Parses the command line. The error contains its message and knows its exit code.
    pub(crate) fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, BadUsage> {
        let mut arguments: Vec<OsString> = arguments.into_iter().collect();
        let first = arguments.get(1).and_then(|a| a.to_str());
        let is_run = first == Some("run") || !first.is_some_and(is_word);
        if is_run && arguments.len() > 1 && first != Some("run") {
            arguments.insert(1, "run".into());
        }
        Cli::try_parse_from(arguments).map_err(|error| BadUsage { error, is_run })
    }
}

/// The command line is invalid, or asks for help.
#[derive(Debug)]
pub(crate) struct BadUsage {
    error: clap::Error,
    is_run: bool,
}

impl BadUsage {
    /// Prints the message on stdout or stderr, and returns the exit code.
    pub(crate) fn print(&self) -> u8 {
        // If even this message cannot be printed, there is nothing left to do.
        let _ = self.error.print();
        match self.error.exit_code() {
            0 => 0,
            _ if self.is_run => crate::preflight::CANNOT,
            _ => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Cli, u8> {
        Cli::read(std::iter::once("memtrace").chain(line.split_whitespace()).map(OsString::from)).map_err(|e| e.print())
    }

    fn command(line: &str) -> Vec<String> {
        let Command::Run(run) = read(line).unwrap().command else { panic!("{line}: not a run") };
        run.command.iter().map(|a| a.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn run_may_be_left_out() {
        assert_eq!(command("-- python train.py --lr 1"), ["python", "train.py", "--lr", "1"]);
        assert_eq!(command("run -- python -c x"), ["python", "-c", "x"]);
        assert_eq!(command("-o out --quiet -- a -- b"), ["a", "--", "b"]);
        assert_eq!(command("python -o x"), ["python", "-o", "x"]);
    }

    #[test]
    fn parts_of_a_recording() {
        assert_eq!(step_range("3"), Ok((3, 3)));
        assert_eq!(step_range("2-5"), Ok((2, 5)));
        assert_eq!(step_range("2-"), Ok((2, u32::MAX)));
        assert_eq!(time_range("0.1-2"), Ok((100_000_000, 2_000_000_000)));
        assert_eq!(time_range("1.5s-2.000000001s"), Ok((1_500_000_000, 2_000_000_001)));
        assert_eq!(time_range("250ms-"), Ok((250_000_000, u64::MAX)));
        assert_eq!(time_range("7ns-1us"), Ok((7, 1000)));
        assert_eq!((size("1MiB"), size("512"), size("1.5 GiB")), (Ok(1 << 20), Ok(512), Ok(3 << 29)));
        for bad in ["", "-", "-3", "5-2", "a-b", "1-2-3", "1.5"] {
            assert!(step_range(bad).is_err(), "{bad}");
        }
        for bad in ["", "-", "2", "2-1", "1e3-2e3", "1h-2h", ".-1", "99999999999999-"] {
            assert!(time_range(bad).is_err(), "{bad}");
        }
        for bad in ["", "MiB", "1.5", "-1", "1XiB", "99999999999GiB", "inf MiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn exit_codes_of_bad_usage() {
        assert_eq!(read("--").unwrap_err(), 125);
        assert_eq!(read("--no-such-option -- x").unwrap_err(), 125);
        assert_eq!(read("--stacks wrong -- x").unwrap_err(), 125);
        assert_eq!(read("").unwrap_err(), 125);
        assert_eq!(read("report").unwrap_err(), 2);
        assert_eq!(read("--help").unwrap_err(), 0);
        assert_eq!(read("-V").unwrap_err(), 0);
        assert_eq!(read("diff a").unwrap_err(), 2);
        assert_eq!(read("check a").unwrap_err(), 2, "nothing to check");
        assert_eq!(read("check a --no-finding headache").unwrap_err(), 2);
    }

    #[test]
    fn sizes_are_binary() {
        assert_eq!(size("20GiB"), Ok(20 << 30));
        assert_eq!(size("1.5 MiB"), Ok(3 << 19));
        assert_eq!((size("0"), size("512B"), size("7")), (Ok(0), Ok(512), Ok(7)));
        assert!(size("20GB").unwrap_err().contains("GiB, not GB"));
        for wrong in ["", "-1MiB", "GiB", "1e30", "nan", "1 Gib"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!((tolerance("2%"), tolerance("1MiB")), (Ok(Tolerance::Share(0.02)), Ok(Tolerance::Bytes(1 << 20))));
        assert!(tolerance("x%").is_err() && tolerance("-1%").is_err());
    }
}
