//! `--vary` and `--max`: dry runs of a command with several values of a placeholder such as `{bs}`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context, ensure};
use memtrace_analysis::load::{MANIFEST_FILE, ValueException};
use memtrace_analysis::report::size_text;
use serde::Serialize;
use serde_json::Value;

use crate::cli::DryRun;
use crate::commands::run;
use crate::message::{self, WithHelp};
use crate::option_values::{Bounds, Values};
use crate::simulation::Simulation;
use crate::{folder, host, inherited};

/// The width of the bars in the table.
const BAR: usize = 24;
/// The last lines of a failed program's output that are shown.
const SHOWN_LINES: usize = 15;

/// What one value of the placeholder led to.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub(super) struct Try {
    value: u64,
    result: Outcome,
    /// The device with the least memory left. Absent if the program failed before it used one.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst: Option<Figures>,
    /// The run folder.
    run: PathBuf,
}

/// How a try ended.
#[derive(Serialize, Clone, PartialEq, Debug)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Fits,
    OutOfMemory {
        requested_bytes: u64,
        phase: String,
        location: String,
    },
    /// The program ended with this exit code and without an out-of-memory error.
    ProgramFailed(i32),
}

/// The peak of a device.
#[derive(Serialize, Clone, PartialEq, Debug)]
struct Figures {
    device: i64,
    allocated_bytes: u64,
    reserved_bytes: u64,
    total_bytes: u64,
    /// The phase of the peak.
    phase: String,
    /// What was free on the device at the most memory in use, by all libraries and processes.
    free_bytes: u64,
}

/// The tries of one command.
struct Tries<'a> {
    options: &'a DryRun,
    simulation: &'a Simulation,
    folder: PathBuf,
}

/// Tries all values, and prints a table. Fails at the first program that fails for another reason than memory.
pub(super) fn vary(options: &DryRun, simulation: &Simulation, values: &Values) -> anyhow::Result<bool> {
    let tries = Tries::new(options, simulation, &values.name)?;
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.min(values.values.len()) {
            scope.spawn(|| {
                while let Some(value) = values.values.get(next.fetch_add(1, Relaxed)) {
                    let result = tries.run(&values.name, *value);
                    if result.as_ref().map_or(true, Try::has_failed) {
                        next.store(values.values.len(), Relaxed);
                    }
                    let mut results = results.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    results.push(result);
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut results = results.into_iter().collect::<anyhow::Result<Vec<Try>>>()?;
    results.sort_by_key(|one| one.value);
    tries.print(&values.name, &results, None)?;
    Ok(!results.iter().any(Try::has_failed))
}

/// Searches the largest value that fits by bisection, and prints the tries and the answer. Whether one fits.
pub(super) fn max(options: &DryRun, simulation: &Simulation, bounds: &Bounds) -> anyhow::Result<bool> {
    let tries = Tries::new(options, simulation, &bounds.name)?;
    let mut results: Vec<Try> = Vec::new();
    let mut fits = |value| -> anyhow::Result<Option<bool>> {
        let one = tries.run(&bounds.name, value)?;
        let result = match one.result {
            Outcome::Fits => Some(true),
            Outcome::OutOfMemory { .. } => Some(false),
            Outcome::ProgramFailed(_) => None,
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
                    "write it where the value belongs: memtrace dry-run ... -- python train.py --batch-size {placeholder}"
                )
            )
        );
        let stamp = host::stamp(host::epoch_ns());
        let folder = folder::create(run::place(&options.run), &options.run.command, &stamp)?.folder;
        // Each try has a run folder of its own in this one, which is none.
        folder.remove(MANIFEST_FILE).context("cannot remove the manifest of the folder of tries")?;
        Ok(Tries { options, simulation, folder: folder.path().to_owned() })
    }

    /// Runs the command with a value, and reads what it led to.
    fn run(&self, name: &str, value: u64) -> anyhow::Result<Try> {
        let run = self.folder.join(format!("{name}-{value}"));
        let output = self.folder.join(format!("{name}-{value}.txt"));
        let log = File::create(&output).with_context(|| format!("cannot write {}", output.display()))?;
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
        command.arg("-o").arg(&run).arg("--");
        let text = value.to_string();
        command.args(
            self.options.run.command.iter().map(|a| replaced(a, &placeholder, &text).unwrap_or_else(|| a.clone())),
        );
        let status =
            command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).status().context("cannot start a try")?;
        let code = status.code().unwrap_or(-1);
        let summary = std::fs::read(run.join("summary.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let one = Try {
            value,
            worst: summary.as_ref().and_then(|summary| worst_device(summary, simulation.gpu.context_bytes)),
            result: match summary.as_ref().and_then(out_of_memory).filter(|_| code != 0) {
                Some(oom) => oom,
                None if code == 0 => Outcome::Fits,
                None => Outcome::ProgramFailed(code),
            },
            run,
        };
        if !self.options.run.summary.quiet && std::io::stderr().is_terminal() {
            message::status(&format!("{name}={value}: {}", one.text()));
        }
        if one.has_failed() {
            self.show_end_of(&output, name, value);
            if let Some(exception) = summary.as_ref().and_then(exception) {
                message::status(&exception.text());
            }
        }
        Ok(one)
    }

    /// Prints the last lines of a failed program's output.
    fn show_end_of(&self, output: &Path, name: &str, value: u64) {
        let text = std::fs::read(output).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        message::error(
            &format!("the program failed with {name}={value}, not for lack of memory; its output ends with"),
            None,
        );
        for line in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
            message::status(line);
        }
        message::status(&format!("all of it: {}", output.display()));
    }

    fn print(&self, name: &str, results: &[Try], largest: Option<Largest>) -> anyhow::Result<()> {
        let text = if self.options.json {
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
            serde_json::to_string_pretty(&report)? + "\n"
        } else {
            self.table(name, results, largest)
        };
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")
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
        text += &format!("\nRuns  {}/\n", self.folder.display());
        text
    }
}

impl Try {
    /// Whether the program failed for another reason than memory.
    fn has_failed(&self) -> bool {
        matches!(self.result, Outcome::ProgramFailed(_))
    }

    /// What the value led to, in a few words.
    fn text(&self) -> String {
        match &self.result {
            Outcome::Fits => match &self.worst {
                Some(worst) => format!("fits, peak in {}", worst.phase),
                None => "fits: it used no GPU memory".to_owned(),
            },
            Outcome::OutOfMemory { requested_bytes, phase, location } => {
                format!("out of memory in {phase} at {location}, which needs {} more", size_text(*requested_bytes))
            }
            Outcome::ProgramFailed(code) => format!("the program failed with exit code {code}"),
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

/// The devices of all processes in a summary.
fn devices(summary: &Value) -> impl Iterator<Item = &Value> {
    let processes = summary["processes"].as_array().into_iter().flatten();
    processes.flat_map(|process| process["devices"].as_array().into_iter().flatten())
}

fn worst_device(summary: &Value, context_bytes: u64) -> Option<Figures> {
    let figures = devices(summary).filter(|device| device["device"].as_i64() >= Some(0)).map(|device| {
        let number = |path: &str| device.pointer(path).and_then(Value::as_u64).unwrap_or(0);
        let (reserved_bytes, total_bytes) = (number("/highest/reserved_bytes"), number("/total_bytes"));
        // Kernels and libraries take memory beside the context and what PyTorch reserved.
        let used_bytes = number("/device_memory/at_peak/used_bytes").max(reserved_bytes + context_bytes);
        Figures {
            device: device["device"].as_i64().unwrap_or(0),
            allocated_bytes: number("/highest/allocated_bytes"),
            reserved_bytes,
            total_bytes,
            phase: device.pointer("/peak/phase").and_then(Value::as_str).unwrap_or("unknown").to_owned(),
            free_bytes: total_bytes.saturating_sub(used_bytes),
        }
    });
    figures.min_by_key(|figures| (figures.free_bytes, std::cmp::Reverse(figures.allocated_bytes)))
}

/// The exception in a summary that a value can be the reason of.
fn exception(summary: &Value) -> Option<ValueException> {
    serde_json::from_value(summary.pointer("/run/simulated/exception")?.clone()).ok()
}

/// The out-of-memory error that a summary explains.
fn out_of_memory(summary: &Value) -> Option<Outcome> {
    let oom = devices(summary).find_map(|device| {
        let index = device["explained_oom"].as_u64().unwrap_or(0) as usize;
        device["ooms"].as_array()?.get(index)
    })?;
    let text = |path: &str| oom.pointer(path).and_then(Value::as_str).unwrap_or("unknown").to_owned();
    let location = text("/requested_at/location");
    Some(Outcome::OutOfMemory {
        requested_bytes: oom["requested_bytes"].as_u64().unwrap_or(0),
        phase: text("/in_use/phase"),
        location: location.split(", ").next().unwrap_or_default().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_is_beside_all_memory_in_use() {
        let device = |used: Option<u64>| {
            let memory = used.map(|used| serde_json::json!({"at_peak": {"used_bytes": used}}));
            serde_json::json!({"processes": [{"devices": [{
                "device": 0, "total_bytes": 1000, "highest": {"allocated_bytes": 500, "reserved_bytes": 600},
                "device_memory": memory,
            }]}]})
        };
        let free = |used| worst_device(&device(used), 100).unwrap().free_bytes;
        assert_eq!(free(Some(850)), 150);
        assert_eq!(free(Some(650)), 300, "the last reading is from before the peak");
        assert_eq!(free(None), 300);
    }

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
