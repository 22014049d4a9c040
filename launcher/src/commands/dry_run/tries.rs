//! `--vary` and `--max`: dry runs of a command with several values of a placeholder such as `{bs}`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use memtrace_analysis::load::MANIFEST_FILE;
use memtrace_analysis::report::size_text;
use memtrace_analysis::{RunFolder, printable};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Serialize;

use super::results::{self, Figures, OutOfMemory, Results};
use crate::cli::DryRun;
use crate::commands::run;
use crate::message::{self, WithHelp};
use crate::option_values::{Bounds, Values};
use crate::output::{Printed, Stream};
use crate::simulation::Simulation;
use crate::{folder, host, inherited, sandbox};

/// The width of the bars in the table.
const BAR: usize = 24;
/// How long reading the results of a try may take.
const READ_TIME: Duration = Duration::from_secs(60);

/// What one value of the placeholder led to.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub(super) struct Try {
    value: u64,
    result: TryOutcome,
    /// The device with the least memory left. Absent if the program failed before it used one.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst: Option<Figures>,
    /// The run folder.
    run: String,
}

/// How a try ended.
#[derive(Serialize, Clone, PartialEq, Debug)]
#[serde(rename_all = "snake_case")]
enum TryOutcome {
    Fits,
    OutOfMemory {
        requested_bytes: u64,
        phase: String,
        location: String,
    },
    /// The program ended with this exit code and without an out-of-memory error.
    ProgramFailed(i32),
}

/// The tries of one command.
struct Tries<'a> {
    options: &'a DryRun,
    simulation: &'a Simulation,
    folder: RunFolder,
}

/// A try that runs.
struct Running {
    value: u64,
    child: Child,
    /// Its output, for reading. The program may replace the file of that name.
    output: File,
}

/// Tries all values, and prints a table. Fails at the first program that fails for another reason than memory.
pub(super) fn vary(options: &DryRun, simulation: &Simulation, values: &Values) -> anyhow::Result<bool> {
    let tries = Tries::new(options, simulation, &values.name)?;
    let (mut next, mut running, mut results) = (values.values.iter(), Vec::new(), Vec::new());
    let mut is_over = false;
    loop {
        while !is_over && running.len() < options.jobs {
            let Some(value) = next.next() else { break };
            match tries.start(&values.name, *value) {
                Ok(started) => running.push(started),
                Err(e) => {
                    is_over = true;
                    results.push(Err(e));
                }
            }
        }
        if running.is_empty() {
            break;
        }
        let ended = running.swap_remove(first_to_end(&running));
        let result = tries.finish(&values.name, ended);
        is_over |= result.as_ref().map_or(true, Try::has_failed);
        results.push(result);
    }
    let mut results = results.into_iter().collect::<anyhow::Result<Vec<Try>>>()?;
    results.sort_by_key(|one| one.value);
    tries.print(&values.name, &results, None)?;
    Ok(!results.iter().any(Try::has_failed))
}

/// Waits until one of the tries ends, and returns its index.
fn first_to_end(running: &[Running]) -> usize {
    let pidfd = |one: &Running| pidfd_open(Pid::from_child(&one.child), PidfdFlags::empty());
    // Without such descriptors (before Linux 5.3) they are waited for in their order.
    let Ok(children) = running.iter().map(pidfd).collect::<Result<Vec<_>, _>>() else { return 0 };
    let mut fds: Vec<PollFd<'_>> = children.iter().map(|child| PollFd::new(child, PollFlags::IN)).collect();
    if rustix::io::retry_on_intr(|| poll(&mut fds, None)).is_err() {
        return 0;
    }
    fds.iter().position(|fd| !fd.revents().is_empty()).unwrap_or(0)
}

/// Searches the largest value that fits by bisection, and prints the tries and the answer. Whether one fits.
pub(super) fn max(options: &DryRun, simulation: &Simulation, bounds: &Bounds) -> anyhow::Result<bool> {
    let tries = Tries::new(options, simulation, &bounds.name)?;
    let mut results: Vec<Try> = Vec::new();
    let mut fits = |value| -> anyhow::Result<Option<bool>> {
        let one = tries.finish(&bounds.name, tries.start(&bounds.name, value)?)?;
        let result = match one.result {
            TryOutcome::Fits => Some(true),
            TryOutcome::OutOfMemory { .. } => Some(false),
            TryOutcome::ProgramFailed(_) => None,
        };
        results.push(one);
        Ok(result)
    };
    let largest = search(bounds.low, bounds.high, &mut fits)?;
    results.sort_by_key(|one| one.value);
    tries.print(&bounds.name, &results, Some(largest))?;
    Ok(matches!(largest, Largest::Fits(_)))
}

/// The answer of a search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Largest {
    Fits(u64),
    /// Not even the lowest value fits.
    None,
    /// The program failed with this value.
    ProgramFailed(u64),
}

/// The largest value from `low` to `high` that fits, where each smaller value fits too.
fn search(low: u64, high: u64, fits: &mut impl FnMut(u64) -> anyhow::Result<Option<bool>>) -> anyhow::Result<Largest> {
    match fits(low)? {
        None => return Ok(Largest::ProgramFailed(low)),
        Some(false) => return Ok(Largest::None),
        Some(true) if low == high => return Ok(Largest::Fits(low)),
        Some(true) => {}
    }
    match fits(high)? {
        None => return Ok(Largest::ProgramFailed(high)),
        Some(true) => return Ok(Largest::Fits(high)),
        Some(false) => {}
    }
    let (mut fitting, mut failing) = (low, high);
    while failing - fitting > 1 {
        let middle = fitting + (failing - fitting) / 2;
        match fits(middle)? {
            None => return Ok(Largest::ProgramFailed(middle)),
            Some(true) => fitting = middle,
            Some(false) => failing = middle,
        }
    }
    Ok(Largest::Fits(fitting))
}

impl<'a> Tries<'a> {
    fn new(options: &'a DryRun, simulation: &'a Simulation, name: &str) -> anyhow::Result<Self> {
        let placeholder = format!("{{{name}}}");
        let has = |argument: &OsString| replaced(argument, &placeholder, "").is_some();
        ensure!(
            options.run.command.iter().any(has),
            WithHelp::new(
                format!("the command has no {placeholder}"),
                format!(
                    "write it where the value belongs: memtrace dry-run ... -- python train.py --batch-size \
                     {placeholder}"
                )
            )
        );
        let stamp = host::stamp(host::epoch_ns());
        let folder = folder::create(run::place(&options.run), &options.run.command, &stamp)?.folder;
        // Each try has a run folder of its own in this one, which is none.
        folder.remove(MANIFEST_FILE).context("cannot remove the manifest of the folder of tries")?;
        Ok(Tries { options, simulation, folder })
    }

    /// Runs the command with a value.
    fn start(&self, name: &str, value: u64) -> anyhow::Result<Running> {
        let output = format!("{name}-{value}.txt");
        let cannot = || format!("cannot write {}", self.folder.path().join(&output).display());
        let log = self.folder.create(&output).with_context(cannot)?;
        let output = self.folder.open_file(&output).with_context(cannot)?;
        let simulation = self.simulation;
        let placeholder = format!("{{{name}}}");
        let mut command = Command::new(std::env::current_exe().context("cannot find memtrace itself")?);
        inherited::restore_umask(&mut command);
        command.args(["dry-run", "--quiet", "--no-snapshot", "--gpus", &simulation.count.to_string()]);
        command.args(["--nonzero", simulation.nonzero.name()]);
        if let Some(steps) = simulation.steps {
            command.args(["--steps", &steps.to_string()]);
        }
        if let Some(gpu) = &self.options.gpu {
            command.args(["--gpu", &gpu.id]);
        }
        if let Some(memory) = self.options.memory {
            command.args(["--memory", &memory.to_string()]);
        }
        command.arg("-o").arg(self.folder.path().join(run_of(name, value))).arg("--");
        let text = value.to_string();
        command.args(
            self.options.run.command.iter().map(|a| replaced(a, &placeholder, &text).unwrap_or_else(|| a.clone())),
        );
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Running { value, child: command.spawn().context("cannot start a try")?, output })
    }

    /// Waits for a try, and reads what it led to.
    fn finish(&self, name: &str, mut running: Running) -> anyhow::Result<Try> {
        let value = running.value;
        let code = running.child.wait().context("cannot wait for a try")?.code().unwrap_or(-1);
        let (run, context_bytes) = (run_of(name, value), self.simulation.gpu.context_bytes);
        let read = sandbox::call(READ_TIME, || results::read(&self.folder, &run, context_bytes, &running.output));
        let run = self.folder.path().join(run);
        let results = read.unwrap_or_else(|e| Results::unknown(format!("cannot read {}: {e:#}", run.display())));
        let one = Try {
            value,
            worst: results.worst,
            result: match results.out_of_memory.filter(|_| code != 0) {
                Some(OutOfMemory { requested_bytes, phase, location }) => {
                    TryOutcome::OutOfMemory { requested_bytes, phase, location }
                }
                None if code == 0 => TryOutcome::Fits,
                None => TryOutcome::ProgramFailed(code),
            },
            run: run.display().to_string(),
        };
        if let Some(problem) = &results.problem {
            message::warning(problem);
        }
        if !self.options.run.summary.quiet && Stream::Stderr.is_terminal() {
            message::status(&format!("{name}={value}: {}", one.text()));
        }
        if one.has_failed() {
            message::error(
                &format!("the program failed with {name}={value}, not for lack of memory; its output ends with"),
                None,
            );
            results.last_lines.iter().for_each(|line| message::status(line));
            let path = self.folder.path().join(format!("{name}-{value}.txt"));
            message::status(&format!("all of it: {}", path.display()));
            if let Some(exception) = &results.exception {
                message::status(&exception.text());
            }
        }
        Ok(one)
    }

    fn print(&self, name: &str, results: &[Try], largest: Option<Largest>) -> anyhow::Result<()> {
        if self.options.json {
            #[derive(Serialize)]
            struct Report<'a> {
                simulated: memtrace_analysis::load::SimulatedGpus,
                variable: &'a str,
                tries: &'a [Try],
                #[serde(skip_serializing_if = "Option::is_none")]
                largest: Option<u64>,
            }
            let largest = match largest {
                Some(Largest::Fits(value)) => Some(value),
                _ => None,
            };
            let report = Report { simulated: self.simulation.description(), variable: name, tries: results, largest };
            let text = serde_json::to_string_pretty(&report)? + "\n";
            return crate::commands::write_output(Printed::Json(&text), None);
        }
        crate::commands::write_output(Printed::Text(&self.table(name, results, largest)), None)
    }

    fn table(&self, name: &str, results: &[Try], largest: Option<Largest>) -> String {
        let gpu = &self.simulation.gpu;
        let memory = size_text(gpu.memory_bytes);
        let mut text = format!("Dry runs on {} ({memory}), simulated: no GPU was used, no kernel ran.\n\n", gpu.name);
        let width = results.iter().map(|one| one.value.to_string().len()).max().unwrap_or(0).max(name.len());
        text += &format!(
            "{name:>width$}  {:>10}  {:>10}  {:<BAR$}  result\n",
            "allocated",
            "reserved",
            format!("of {memory}")
        );
        for one in results {
            let (allocated, reserved, bar) = one.worst.as_ref().map_or_else(Default::default, |worst| {
                let share = worst.reserved_bytes as f64 / worst.total_bytes.max(1) as f64;
                let bar = "#".repeat((share * BAR as f64).round().clamp(1.0, BAR as f64) as usize);
                (size_text(worst.allocated_bytes), size_text(worst.reserved_bytes), bar)
            });
            text += &format!("{:>width$}  {allocated:>10}  {reserved:>10}  {bar:<BAR$}  {}\n", one.value, one.text());
        }
        let at = |value: u64| results.iter().find(|one| one.value == value);
        match largest {
            Some(Largest::Fits(value)) => {
                let free = at(value).and_then(|one| one.worst.as_ref()).map(|worst| size_text(worst.free_bytes));
                let margin = free.map(|free| format!(", with {free} to spare")).unwrap_or_default();
                text += &format!("\nThe largest that fits: {name}={value}{margin}\n");
                if let Some(next) = results.iter().find(|one| one.value > value) {
                    text += &format!("{name}={} would run {}\n", next.value, next.text());
                }
            }
            Some(Largest::None) => text += &format!("\nNothing fits: {name}={} runs out of memory\n", results[0].value),
            Some(Largest::ProgramFailed(value)) => {
                text += &format!("\nNo answer: the program failed with {name}={value}\n")
            }
            None => {}
        }
        text += &format!("\nRuns  {}/\n", printable::line(&self.folder.path().to_string_lossy()));
        text
    }
}

impl Try {
    /// Whether the program failed for another reason than memory.
    fn has_failed(&self) -> bool {
        matches!(self.result, TryOutcome::ProgramFailed(_))
    }

    /// What the value led to, in a few words.
    fn text(&self) -> String {
        match &self.result {
            TryOutcome::Fits => match &self.worst {
                Some(worst) => format!("fits, peak in {}", worst.phase),
                None => "fits: it used no GPU memory".to_owned(),
            },
            TryOutcome::OutOfMemory { requested_bytes, phase, location } => {
                format!("out of memory in {phase} at {location}, which needs {} more", size_text(*requested_bytes))
            }
            TryOutcome::ProgramFailed(code) => format!("the program failed with exit code {code}"),
        }
    }
}

/// An argument with its placeholders replaced. `None` if it has none.
fn replaced(argument: &OsStr, placeholder: &str, value: &str) -> Option<OsString> {
    let (bytes, placeholder) = (argument.as_bytes(), placeholder.as_bytes());
    let mut result = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(placeholder.len()).position(|window| window == placeholder) {
        result.extend(&rest[..at]);
        result.extend(value.as_bytes());
        rest = &rest[at + placeholder.len()..];
    }
    result.extend(rest);
    (rest.len() < bytes.len()).then(|| OsString::from_vec(result))
}

/// The name of the run folder of a value.
fn run_of(name: &str, value: u64) -> String {
    format!("{name}-{value}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn largest(low: u64, high: u64, limit: u64) -> (Largest, usize) {
        let mut tries = 0;
        let found = search(low, high, &mut |value| {
            tries += 1;
            Ok(Some(value <= limit))
        });
        (found.unwrap(), tries)
    }

    #[test]
    fn the_largest_is_found() {
        for limit in 1..=512 {
            let (found, tries) = largest(1, 512, limit);
            assert_eq!(found, Largest::Fits(limit));
            assert!(tries <= 11, "{limit}: {tries}");
        }
        assert_eq!(largest(4, 512, 3), (Largest::None, 1));
        assert_eq!(largest(7, 7, 9), (Largest::Fits(7), 1));
    }

    #[test]
    fn a_program_error_ends_the_search() {
        let found = search(1, 8, &mut |value| Ok((value != 4).then_some(value < 8)));
        assert_eq!(found.unwrap(), Largest::ProgramFailed(4));
    }

    #[test]
    fn placeholders_are_replaced_everywhere() {
        let replace = |text: &str| replaced(OsStr::new(text), "{bs}", "16");
        assert_eq!(replace("--bs={bs},{bs}"), Some("--bs=16,16".into()));
        assert_eq!(replace("--bs={b}"), None);
    }
}
