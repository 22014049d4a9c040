//! `--vary` and `--max`: dry runs of a command with several values of a placeholder such as `{bs}`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use memtrace_analysis::load::{BoundingRun, MANIFEST_FILE, PeakBounds};
use memtrace_analysis::report::{count_text, size_text};
use memtrace_analysis::{RunFolder, printable};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, set_parent_process_death_signal};
use serde::Serialize;

use super::results::{self, Figures, OutOfMemory, Results, Server};
use super::stop::{self, Handler};
use crate::cli::DryRun;
use crate::commands::run;
use crate::folder::Place;
use crate::message::{self, WithHelp};
use crate::option_values::{Bounds, Values};
use crate::output::{Printed, Stream};
use crate::private_folder::{BOUNDS_PREFIX, PrivateFolder};
use crate::simulation::{Nonzero, Simulation, Workspaces};
use crate::{folder, host, inherited, sandbox};

/// The width of the bars in the table.
const BAR: usize = 24;
/// Their width in a table with figures of servers.
const SHORT_BAR: usize = 12;
/// How long reading the results of a try may take.
const READ_TIME: Duration = Duration::from_secs(60);

/// The outcome of one value of the placeholder.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub(super) struct Try {
    #[serde(serialize_with = "as_number")]
    value: String,
    /// The position in the table.
    #[serde(skip)]
    position: u64,
    result: TryOutcome,
    /// The device with the least memory left. Absent if the program failed before it used one.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst: Option<Figures>,
    /// The engine that serves models. Absent for other programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<Server>,
    /// By how many bytes the peak can be higher, because workspaces of cuDNN are estimates. Absent if they are not.
    #[serde(skip_serializing_if = "is_zero")]
    above_bytes: u64,
    /// Whether values that nothing computed decided a size (`run.simulated.guessed_sizes` of the summary).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    has_guessed_sizes: bool,
    /// The run folder.
    run: String,
}

/// Serializes a value as a number if it is one.
fn as_number<S: serde::Serializer>(value: &str, serializer: S) -> Result<S::Ok, S::Error> {
    match (value.parse::<u64>(), value.parse::<f64>()) {
        (Ok(whole), _) => serializer.serialize_u64(whole),
        (_, Ok(number)) if number.is_finite() && !value.contains(char::is_alphabetic) => {
            serializer.serialize_f64(number)
        }
        _ => serializer.serialize_str(value),
    }
}

/// [`as_number`] of a value that is there.
fn as_number_of<S: serde::Serializer>(value: &Option<&str>, serializer: S) -> Result<S::Ok, S::Error> {
    as_number(value.unwrap_or_default(), serializer)
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
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
    /// The engine refused to start, for lack of memory.
    DoesNotFit {
        reason: String,
    },
    /// The program ended with this exit code and without an out-of-memory error.
    ProgramFailed(i32),
}

/// The tries of one command.
struct Tries<'a> {
    options: &'a DryRun,
    simulation: &'a Simulation,
    /// The name of the placeholder, or `gpu`.
    name: &'a str,
    folder: RunFolder,
    /// Ends them after a signal.
    _handler: Handler,
}

/// The placeholder of [`vary_gpu`]. The command need not have it.
const GPU: &str = "gpu";

/// A try that runs.
struct Running {
    value: String,
    position: u64,
    child: Child,
    /// Its output, for reading. The program may replace the file of that name.
    output: File,
}

/// Tries all values, and prints a table. Fails at the first program that fails for another reason than memory.
pub(super) fn vary(options: &DryRun, simulation: &Simulation, values: &Values) -> anyhow::Result<bool> {
    Tries::new(options, simulation, &values.name)?.all(&values.values)
}

/// Tries all GPUs, and prints a table.
pub(super) fn vary_gpu(options: &DryRun, simulation: &Simulation) -> anyhow::Result<bool> {
    let names: Vec<String> = options.vary_gpu.iter().map(|gpu| gpu.id.clone()).collect();
    Tries::new(options, simulation, GPU)?.all(&names)
}

/// Runs the command with the smallest and with the largest sizes that values and workspaces can have. `None` after a
/// signal.
pub(super) fn bounds(options: &DryRun, simulation: &Simulation) -> anyhow::Result<Option<PeakBounds>> {
    const RUNS: [(&str, Nonzero, Workspaces); 2] =
        [("smallest", Nonzero::Zero, Workspaces::Smallest), ("largest", Nonzero::Full, Workspaces::Largest)];
    let temporary = PrivateFolder::temporary(BOUNDS_PREFIX)?;
    let mut runs = Vec::new();
    for (position, (name, nonzero, workspaces)) in (0..).zip(RUNS) {
        let simulation = Simulation { nonzero, workspaces, ..simulation.clone() };
        let tries = Tries::in_folder(options, &simulation, "bounds", Place::In(temporary.path()))?;
        let Some(one) = tries.run(name, position)? else { return Ok(None) };
        let worst = one.worst.as_ref();
        runs.push(BoundingRun {
            allocated_bytes: worst.map_or(0, |worst| worst.allocated_bytes),
            reserved_bytes: worst.map_or(0, |worst| worst.reserved_bytes),
            is_out_of_memory: matches!(one.result, TryOutcome::OutOfMemory { .. } | TryOutcome::DoesNotFit { .. }),
            has_failed: one.has_failed(),
        });
    }
    if runs.iter().any(|one| one.has_failed) {
        // The message names the file with the output.
        temporary.keep();
    }
    let [smallest, largest] = runs.try_into().unwrap_or_default();
    Ok(Some(PeakBounds { smallest, largest }))
}

/// Waits until one of the tries ends, and returns its index. After a signal, all of them get SIGTERM.
fn first_to_end(running: &[Running]) -> usize {
    let pidfd = |one: &Running| pidfd_open(Pid::from_child(&one.child), PidfdFlags::empty());
    // Without such descriptors (before Linux 5.3) they are waited for in their order.
    let Ok(children) = running.iter().map(pidfd).collect::<Result<Vec<_>, _>>() else { return 0 };
    let mut fds: Vec<PollFd<'_>> = children.iter().map(|child| PollFd::new(child, PollFlags::IN)).collect();
    let signaled = stop::event();
    fds.extend(signaled.as_ref().map(|event| PollFd::new(event, PollFlags::IN)));
    if rustix::io::retry_on_intr(|| poll(&mut fds, None)).is_err() {
        return 0;
    }
    if stop::signal().is_some() {
        for one in running {
            // It may have ended by now; nobody has waited for it, so its id is its own.
            let _ = kill_process(Pid::from_child(&one.child), Signal::TERM);
        }
        return 0;
    }
    fds.iter().position(|fd| !fd.revents().is_empty()).unwrap_or(0)
}

/// Searches the largest value that fits by bisection, and prints the tries and the answer. Whether one fits.
pub(super) fn max(options: &DryRun, simulation: &Simulation, bounds: &Bounds) -> anyhow::Result<bool> {
    let tries = Tries::new(options, simulation, &bounds.name)?;
    let mut results: Vec<Try> = Vec::new();
    let mut fits = |value| -> anyhow::Result<Option<bool>> {
        let Some(one) = tries.run(&bounds.text(value), value)? else { return Ok(None) };
        let result = match one.result {
            TryOutcome::Fits => Some(true),
            TryOutcome::OutOfMemory { .. } | TryOutcome::DoesNotFit { .. } => Some(false),
            TryOutcome::ProgramFailed(_) => None,
        };
        results.push(one);
        Ok(result)
    };
    let found = search(bounds.low, bounds.high, &mut fits)?;
    results.sort_by_key(|one| one.position);
    let largest = if stop::signal().is_some() { Largest::Interrupted } else { found };
    tries.print(&results, Some(largest))?;
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
    /// A signal ended the search.
    Interrupted,
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
    fn new(options: &'a DryRun, simulation: &'a Simulation, name: &'a str) -> anyhow::Result<Self> {
        let placeholder = format!("{{{name}}}");
        let has = |argument: &OsString| replaced(argument, &placeholder, "").is_some();
        ensure!(
            options.max.is_none() && options.vary.is_none() || options.run.command.iter().any(has),
            WithHelp::new(
                format!("the command has no {placeholder}"),
                format!(
                    "write it where the value belongs: memtrace dry-run ... -- python train.py --batch-size \
                     {placeholder}"
                )
            )
        );
        Tries::in_folder(options, simulation, name, run::place(&options.run))
    }

    /// The tries of a command, in a new folder in a place.
    fn in_folder(
        options: &'a DryRun,
        simulation: &'a Simulation,
        name: &'a str,
        place: Place<'_>,
    ) -> anyhow::Result<Self> {
        let stamp = host::stamp(host::epoch_ns());
        let folder = folder::create(place, &options.run.command, &stamp)?.folder;
        let handler = Handler::install()?;
        // Each try has a run folder of its own in this one, which is none.
        folder.remove(MANIFEST_FILE).context("cannot remove the manifest of the folder of tries")?;
        Ok(Tries { options, simulation, name, folder, _handler: handler })
    }

    /// Tries all values, and prints a table.
    fn all(&self, values: &[String]) -> anyhow::Result<bool> {
        let (mut next, mut running, mut results) = (values.iter().zip(0..), Vec::new(), Vec::new());
        let mut is_over = false;
        loop {
            while !is_over && running.len() < self.options.jobs {
                let Some((value, position)) = next.next() else { break };
                match self.start(value, position) {
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
            let result = self.finish(ended);
            is_over |= stop::signal().is_some()
                || result.as_ref().map_or(true, |one| one.as_ref().is_some_and(Try::has_failed));
            results.extend(result.transpose());
        }
        let mut results = results.into_iter().collect::<anyhow::Result<Vec<Try>>>()?;
        results.sort_by_key(|one| one.position);
        self.print(&results, None)?;
        if stop::signal().is_some() {
            message::warning("interrupted; the table has the tries that ended before");
        }
        Ok(!results.iter().any(Try::has_failed))
    }

    /// Runs the command with a value, and reads what it led to. `None` if a signal ended it.
    fn run(&self, value: &str, position: u64) -> anyhow::Result<Option<Try>> {
        let running = self.start(value, position)?;
        first_to_end(std::slice::from_ref(&running));
        self.finish(running)
    }

    /// Starts the command with a value.
    fn start(&self, value: &str, position: u64) -> anyhow::Result<Running> {
        let name = self.name;
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
        command.args(["--workspaces", simulation.workspaces.name(), "--routing", &simulation.routing]);
        if let Some(steps) = simulation.steps {
            command.args(["--steps", &steps.to_string()]);
        }
        // A server that is ready shows all that it needs, and would not end by itself.
        command.arg("--until-ready");
        if let Some(line) = &simulation.ready_line {
            command.args(["--ready-line", line.as_str()]);
        }
        let gpu =
            if self.options.vary_gpu.is_empty() { self.options.gpu.as_ref().map(|gpu| &*gpu.id) } else { Some(value) };
        if let Some(gpu) = gpu {
            command.args(["--gpu", gpu]);
        }
        if let Some(memory) = self.options.memory {
            command.args(["--memory", &memory.to_string()]);
        }
        command.arg("-o").arg(self.folder.path().join(run_of(name, value))).arg("--");
        command.args(
            self.options.run.command.iter().map(|a| replaced(a, &placeholder, value).unwrap_or_else(|| a.clone())),
        );
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // A try does not go on without this process.
        // SAFETY: the closure makes one system call.
        unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?)) };
        Ok(Running { value: value.to_owned(), position, child: command.spawn().context("cannot start a try")?, output })
    }

    /// Waits for a try, and reads what it led to. `None` if a signal ended it.
    fn finish(&self, mut running: Running) -> anyhow::Result<Option<Try>> {
        let (name, value) = (self.name, std::mem::take(&mut running.value));
        let code = running.child.wait().context("cannot wait for a try")?.code().unwrap_or(-1);
        if stop::signal().is_some() {
            return Ok(None);
        }
        let (run, context_bytes) = (run_of(name, &value), self.simulation.gpu.context_bytes);
        let read = sandbox::call(READ_TIME, || results::read(&self.folder, &run, context_bytes, &running.output));
        let run = self.folder.path().join(run);
        let results = read.unwrap_or_else(|e| Results::unknown(format!("cannot read {}: {e:#}", run.display())));
        let one = Try {
            value,
            position: running.position,
            server: results.server,
            worst: results.worst,
            result: match (results.out_of_memory.filter(|_| code != 0), results.does_not_fit) {
                (Some(OutOfMemory { requested_bytes, phase, location }), _) => {
                    TryOutcome::OutOfMemory { requested_bytes, phase, location }
                }
                (None, _) if code == 0 => TryOutcome::Fits,
                (None, Some(reason)) => TryOutcome::DoesNotFit { reason },
                (None, None) => TryOutcome::ProgramFailed(code),
            },
            above_bytes: results.above_bytes,
            has_guessed_sizes: results.has_guessed_sizes,
            run: run.display().to_string(),
        };
        if let Some(problem) = &results.problem {
            message::warning(problem);
        }
        if !self.options.run.summary.quiet && Stream::Stderr.is_terminal() {
            message::status(&format!("{name}={}: {}", one.value, one.text()));
        }
        if one.has_failed() {
            message::error(
                &format!("the program failed with {name}={}, not for lack of memory; its output ends with", one.value),
                None,
            );
            results.last_lines.iter().for_each(|line| message::status(line));
            let path = self.folder.path().join(format!("{name}-{}.txt", one.value));
            message::status(&format!("all of it: {}", path.display()));
            if let Some(exception) = &results.exception {
                message::status(&exception.text());
            }
        }
        Ok(Some(one))
    }

    fn print(&self, results: &[Try], largest: Option<Largest>) -> anyhow::Result<()> {
        if self.options.json {
            #[derive(Serialize)]
            struct Report<'a> {
                simulated: memtrace_analysis::load::SimulatedGpus,
                variable: &'a str,
                tries: &'a [Try],
                #[serde(skip_serializing_if = "Option::is_none")]
                #[serde(serialize_with = "as_number_of")]
                largest: Option<&'a str>,
            }
            let largest = match largest {
                Some(Largest::Fits(position)) => at(results, position).map(|one| &*one.value),
                _ => None,
            };
            let report =
                Report { simulated: self.simulation.description(), variable: self.name, tries: results, largest };
            let text = serde_json::to_string_pretty(&report)? + "\n";
            return crate::commands::write_output(Printed::Json(&text), None);
        }
        crate::commands::write_output(Printed::Text(&self.table(results, largest)), None)
    }

    fn table(&self, results: &[Try], largest: Option<Largest>) -> String {
        let (name, gpu) = (self.name, &self.simulation.gpu);
        let memory = size_text(gpu.memory_bytes);
        let varies_gpu = !self.options.vary_gpu.is_empty();
        let on = if varies_gpu { "several GPUs".to_owned() } else { format!("{} ({memory})", gpu.name) };
        let of = if varies_gpu { "of the GPU".to_owned() } else { format!("of {memory}") };
        let mut text = format!("Dry runs on {on}, simulated: no GPU was used, no kernel ran.\n\n");
        let has_server = results.iter().any(|one| one.server.is_some());
        let width = results.iter().map(|one| one.value.chars().count()).max().unwrap_or(0).max(name.len());
        let of_server = |cache: &str, tokens: &str, requests: &str| {
            if has_server { format!("  {cache:>9}  {tokens:>10}  {requests:>8}") } else { String::new() }
        };
        let bar_width = if has_server { SHORT_BAR } else { BAR };
        text += &format!(
            "{name:>width$}  {:>10}  {:>10}  {of:<bar_width$}{}  result\n",
            "allocated",
            "reserved",
            of_server("KV cache", "tokens", "requests")
        );
        for one in results {
            let (allocated, reserved, bar) = one.worst.as_ref().map_or_else(Default::default, |worst| {
                let share = worst.reserved_bytes as f64 / worst.total_bytes.max(1) as f64;
                let bar = "#".repeat((share * bar_width as f64).round().clamp(1.0, bar_width as f64) as usize);
                (size_text(worst.allocated_bytes), size_text(worst.reserved_bytes), bar)
            });
            let server = one.server.as_ref().filter(|server| server.kv_cache_bytes > 0);
            let cache = server.map(|server| size_text(server.kv_cache_bytes)).unwrap_or_default();
            let tokens = server.and_then(|server| server.kv_cache_tokens).map(count_text).unwrap_or_default();
            let requests = server.and_then(|server| server.concurrency).map(|n| format!("{n:.1}")).unwrap_or_default();
            text += &format!(
                "{:>width$}  {allocated:>10}  {reserved:>10}  {bar:<bar_width$}{}  {}\n",
                one.value,
                of_server(&cache, &tokens, &requests),
                one.text()
            );
        }
        if has_server {
            text += "\nrequests: how many of the longest length have room at a time\n";
        }
        match largest {
            Some(Largest::Fits(position)) => {
                let fitting = at(results, position);
                let value = fitting.map_or("", |one| &one.value);
                let free = fitting.and_then(|one| one.worst.as_ref()).map(|worst| size_text(worst.free_bytes));
                let margin = free.map(|free| format!(", with {free} to spare")).unwrap_or_default();
                let doubt = fitting.and_then(Try::doubt).unwrap_or_default();
                text += &format!("\nThe largest that fits: {name}={value}{margin}{doubt}\n");
                if let Some(next) = results.iter().find(|one| one.position > position) {
                    let text_of_next = match next.result {
                        TryOutcome::OutOfMemory { .. } => format!("would run {}", next.text()),
                        _ => next.text(),
                    };
                    text += &format!("{name}={} {text_of_next}\n", next.value);
                }
            }
            Some(Largest::None) => {
                let first = &results[0];
                text += &match first.result {
                    TryOutcome::OutOfMemory { .. } => {
                        format!("\nNothing fits: {name}={} runs out of memory\n", first.value)
                    }
                    _ => format!("\nNothing fits: {name}={} {}\n", first.value, first.text()),
                };
            }
            Some(Largest::ProgramFailed(position)) => {
                let value = at(results, position).map_or("", |one| &one.value);
                text += &format!("\nNo answer: the program failed with {name}={value}\n");
            }
            Some(Largest::Interrupted) => text += "\nNo answer: interrupted\n",
            None => {}
        }
        text += &format!("\nRuns  {}/\n", printable::line(&self.folder.path().to_string_lossy()));
        text
    }
}

/// The try at this position.
fn at(results: &[Try], position: u64) -> Option<&Try> {
    results.iter().find(|one| one.position == position)
}

impl Try {
    /// Whether the program failed for another reason than memory.
    fn has_failed(&self) -> bool {
        matches!(self.result, TryOutcome::ProgramFailed(_))
    }

    /// Why a value that fits may not fit on a GPU.
    fn doubt(&self) -> Option<String> {
        let free = self.worst.as_ref()?.free_bytes;
        if free < self.above_bytes {
            let above = size_text(self.above_bytes);
            return Some(format!(
                ".\nIt may not fit on a GPU: workspaces of cuDNN are estimates, and can take {above} more"
            ));
        }
        let text = ".\nIt may not fit on a GPU: values that a dry run does not compute decide sizes (see its report)";
        self.has_guessed_sizes.then(|| text.to_owned())
    }

    /// The outcome of the value, in a few words.
    fn text(&self) -> String {
        match &self.result {
            TryOutcome::Fits if self.server.is_some() => "fits, ready to serve".to_owned(),
            TryOutcome::Fits => match &self.worst {
                Some(worst) => format!("fits, peak in {}", worst.phase),
                None => "fits: it used no GPU memory".to_owned(),
            },
            TryOutcome::OutOfMemory { requested_bytes, phase, location } => {
                format!("out of memory in {phase} at {location}, which needs {} more", size_text(*requested_bytes))
            }
            TryOutcome::DoesNotFit { reason } => {
                format!("does not fit: {}", printable::line(reason.trim_end_matches('.')))
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
fn run_of(name: &str, value: &str) -> String {
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
    fn less_to_spare_than_workspaces_can_take_is_doubtful() {
        let with = |free_bytes: u64, above_bytes: u64, has_guessed_sizes: bool| Try {
            value: "8".to_owned(),
            position: 8,
            result: TryOutcome::Fits,
            worst: Some(Figures {
                device: 0,
                allocated_bytes: 1,
                reserved_bytes: 1,
                total_bytes: 1 << 30,
                phase: "backward".to_owned(),
                free_bytes,
            }),
            server: None,
            above_bytes,
            has_guessed_sizes,
            run: String::new(),
        };
        let mib = |count: u64| count << 20;
        assert_eq!(with(mib(7), mib(7), false).doubt(), None);
        let text = with(mib(7), mib(8), false).doubt().unwrap();
        assert!(text.contains("may not fit on a GPU") && text.contains("8.00 MiB more"), "{text}");
        assert!(with(mib(7), 0, true).doubt().unwrap().contains("values that a dry run does not compute"));
    }

    #[test]
    fn placeholders_are_replaced_everywhere() {
        let replace = |text: &str| replaced(OsStr::new(text), "{bs}", "16");
        assert_eq!(replace("--bs={bs},{bs}"), Some("--bs=16,16".into()));
        assert_eq!(replace("--bs={b}"), None);
    }
}
