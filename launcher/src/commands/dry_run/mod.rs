//! `memtrace dry-run`: runs a command over a simulated GPU, once or with several values of a placeholder.

mod results;
mod stop;
mod tries;

use std::path::{Path, PathBuf};

use anyhow::Context;
use memtrace_analysis::report::size_text;

use crate::cli::DryRun;
use crate::output::Printed;
use crate::private_folder::{PrivateFolder, Readers};
use crate::simulation::{Gpu, Simulation};

/// Prints the folder of an interpreter's PyTorch, that of the simulated libraries, and their paths, one a line.
///
/// # Errors
///
/// If this is no process of a dry run, or the libraries cannot be made.
pub(crate) fn simulated_libraries(python: &Path) -> anyhow::Result<()> {
    let libraries = std::env::var_os("SIMCUDA_LIBRARIES").map(PathBuf::from).unwrap_or_default();
    let folder = libraries.parent().filter(|folder| folder.is_absolute()).context("SIMCUDA_LIBRARIES is not set")?;
    let folder = PrivateFolder::enter(folder, &[], Readers::of_code())?;
    let paths = Simulation::libraries_for(python, &folder)?;
    let text: String = paths.iter().map(|path| format!("{}\n", path.display())).collect();
    super::write_output(Printed::Text(&text), None)
}

/// Runs the command, and returns the exit code of [`super::run::run`]. With `--vary` and `--max`, 1 if there is no
/// answer. After Ctrl-C and SIGTERM, 128 and the number of the signal.
pub(crate) fn dry_run(options: &DryRun) -> u8 {
    if options.list_gpus {
        return super::exit_code(list_gpus());
    }
    let mut simulation = simulation(options);
    let tried = match (&options.vary, &options.max) {
        (Some(values), _) => tries::vary(options, &simulation, values),
        (None, Some(bounds)) => tries::max(options, &simulation, bounds),
        (None, None) if !options.vary_gpu.is_empty() => tries::vary_gpu(options, &simulation),
        (None, None) if options.bounds => tries::bounds(options, &simulation).map(|bounds| {
            simulation.bounds = bounds;
            true
        }),
        (None, None) => return super::run::run(&options.run, Some(&simulation)),
    };
    match (tried, stop::signal()) {
        (Ok(_), Some(signal)) => 128 + signal,
        (Ok(_), None) if options.bounds => super::run::run(&options.run, Some(&simulation)),
        (Ok(is_answered), None) => u8::from(!is_answered),
        (Err(error), _) => super::exit_code(Err(error)),
    }
}

fn simulation(options: &DryRun) -> Simulation {
    let gpu = match (&options.gpu, options.memory) {
        (Some(gpu), None) => gpu.clone(),
        (Some(gpu), Some(memory_bytes)) => Gpu { memory_bytes, ..gpu.clone() },
        (None, Some(memory_bytes)) => Gpu::of_memory(memory_bytes),
        (None, None) => Gpu::default_model(),
    };
    Simulation {
        gpu,
        count: options.gpus,
        nonzero: options.nonzero,
        workspaces: options.workspaces,
        bounds: None,
        routing: options.routing.clone(),
        steps: options.steps,
        until_ready: options.until_ready,
        ready_line: options.ready_line.clone(),
    }
}

/// Prints a table of the GPUs that can be simulated.
fn list_gpus() -> anyhow::Result<()> {
    let head = ["--gpu", "name", "memory", "compute", "SMs", "context"].map(str::to_owned);
    let mut rows = vec![head];
    for gpu in Gpu::all() {
        let memory = size_text(gpu.memory_bytes);
        let compute = format!("{}.{}", gpu.compute_capability / 10, gpu.compute_capability % 10);
        let assumed = if gpu.is_context_assumed { "~" } else { "" };
        let context = format!("{assumed}{} MiB", gpu.context_bytes >> 20);
        rows.push([gpu.id.clone(), gpu.name.clone(), memory, compute, gpu.multiprocessors.to_string(), context]);
    }
    let [id, name, memory, compute, multiprocessors, context] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0));
    let mut table = String::new();
    for row in &rows {
        table += &format!(
            "{:<id$}  {:<name$}  {:>memory$}  {:>compute$}  {:>multiprocessors$}  {:>context$}\n",
            row[0], row[1], row[2], row[3], row[4], row[5]
        );
    }
    table += "~ assumed: that of an H200\n";
    super::write_output(Printed::Text(&table), None)
}
