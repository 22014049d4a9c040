//! The command line of the launcher, declared with clap.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::error::ErrorKind;
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use memtrace_analysis::diagnostics::diagnostic_rules;
use memtrace_analysis::passes::ReleasePoint;
use memtrace_analysis::{SECTIONS, Tolerance};
use memtrace_trace::options;
use regex_lite::Regex;

use crate::condition::{Condition, condition};
use crate::device_samples::MEMORY_IN_USE;
use crate::first_word::commands_like;
use crate::http::Address;
use crate::option_values::{
    Bounds, Kept, Values, bounds, category_limit, gpu_memory, kept, limit, line_expression, otlp_url, positive,
    release_point, routing, server_address, size, step_range, time_limit, time_range, tolerance, values,
};
use crate::output::{Printed, Stream, print, print_to_stderr};
use crate::simulation::{Gpu, Nonzero, Workspaces};
use crate::terminal::layout;

/// Record what fills the GPU memory of a program
///
/// memtrace runs an unmodified program and records every allocation with its stack. When the program ends, memtrace
/// prints a report and writes a snapshot for pytorch.org/memory_viz.
#[derive(Parser, Debug)]
#[command(name = "memtrace", version, subcommand_required = true, arg_required_else_help = true)]
#[command(override_usage = "memtrace [run] [OPTIONS] -- COMMAND [ARGS]...\n       \
    memtrace <report|export|lines|diff|check|redact> [RUN] [OPTIONS]\n       \
    memtrace doctor [OPTIONS] [-- COMMAND [ARGS]...]")]
#[command(after_help = "`run` is the default command: memtrace -- python train.py\n\n\
    Exit status of `run`: that of the command (128+n for signal n), 125 if memtrace fails, 126 if the command cannot \
    be executed, 127 if the command is not found. Other commands: 0 for success, 1 if a check failed, 2 for bad usage \
    or unreadable input.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a command and record its GPU memory (the default command)
    ///
    /// The command runs unmodified. Its output, its exit status and its signals stay the same. When it ends, memtrace
    /// prints a report on stderr and writes the run folder.
    Run(Run),
    /// Run a command over a simulated GPU: its exact GPU memory, on a machine without a GPU
    ///
    /// PyTorch's real allocator runs over a simulated CUDA. Kernels do not run: integers are computed on the host,
    /// other values are assumed. The report, the files and the exit status are those of a run.
    DryRun(Box<DryRun>),
    /// Print the report of a run
    Report(Report),
    /// Open the HTML report of a run in the browser
    ///
    /// Without a browser or a display, the command prints the path of the page.
    Open(Open),
    /// Export a run to the format of another tool
    Export(Export),
    /// Print the GPU memory that each source line allocated and freed
    ///
    /// The table is that of a line profiler. The program needs no decorator.
    Lines(Lines),
    /// Compare the peaks of two runs
    ///
    /// The comparison shows the difference by category, phase, source line, stack and module.
    Diff(Diff),
    /// Check a run against limits or a baseline
    ///
    /// The exit status says whether the run passes. CI can use it.
    Check(Check),
    /// Write a copy of a run without the names of its program, files, host and user
    ///
    /// The copy is a run folder. Names of public packages, figures, shapes and times stay.
    Redact(Redact),
    /// Give back all GPU memory of a running process and of those that it started
    ///
    /// The driver copies it to the host's memory. The processes go on until they call CUDA, and wait there for memtrace
    /// resume. They need not be recorded.
    Suspend(Suspend),
    /// Bring back the GPU memory of suspended processes
    Resume(Resume),
    /// Record a PyTorch process that runs already, until it ends or until Ctrl-C
    ///
    /// The blocks that exist are in the recording from its beginning. Afterwards the process goes on as before.
    Attach(Attach),
    /// Show the GPU memory of running recordings in the terminal
    ///
    /// The view has bars by category and by owner, the largest stacks and tensors, and the growth. The traced processes
    /// take no part: they get no signal and are not stopped.
    Live(Live),
    /// Write the state of a running recording into a file
    ///
    /// The traced process takes no part: it gets no signal and is not stopped. The file has all that it has published
    /// before the command.
    Snapshot(Snapshot),
    /// Check whether this machine and program can be traced
    ///
    /// Each failed check has a reason and a fix. With COMMAND, memtrace records the command as `memtrace run` does and
    /// checks the recording.
    Doctor(Doctor),
    /// Serve runs to agents over the Model Context Protocol (MCP), on stdin and stdout
    ///
    /// An MCP client starts this command and calls its tools: runs, summary, peak, out_of_memory, diagnostics, lines
    /// and diff. See docs/how-to/agents.md.
    Mcp(Mcp),
    /// Install or remove a Jupyter kernel that memtrace records
    ///
    /// The kernel of a Python whose notebooks are recorded, with %memtrace. See docs/how-to/notebooks.md.
    Kernel(Kernel),
    /// Explain a rule of an issue or of a suggestion: what it means, when it appears, and the code of the fix
    ///
    /// Reports and summary.json name rules: leak, checkpoint-layers. Without RULE, the command lists all rules.
    Explain(Explain),
    /// Print a page of the documentation
    ///
    /// The pages and JSON Schemas are inside the program. Help texts name them by their paths, such as
    /// docs/how-to/limit.md, which PAGE may be.
    Docs(Docs),
    /// Write the manual pages
    Man(Man),
    /// Print a completion script for a shell
    Completions(Completions),
    /// Print the simulated CUDA libraries for the PyTorch of a Python interpreter
    // Processes of dry runs call it (simulate/python/sitecustomize.py).
    #[command(hide = true, name = "simulated-libraries")]
    SimulatedLibraries {
        /// The interpreter
        python: PathBuf,
    },
    /// Print the memory in use on each GPU as NVML reports it
    #[command(hide = true, name = MEMORY_IN_USE)]
    MemoryInUse,
    // A new subcommand is a variant here and a small file in `commands`.
}

/// The options of a run that the tries of a dry run do not have.
const NOT_FOR_TRIES: [&str; 12] = [
    "stacks",
    "cpu",
    "no_names",
    "cycles",
    "holders",
    "pools",
    "xla_dump",
    "metrics",
    "otlp",
    "categories",
    "verbose",
    "reports_in_background",
];

/// The options of `memtrace dry-run`.
#[derive(Args, Debug)]
#[command(
    override_usage = "memtrace dry-run [--gpu NAME | --memory SIZE] [--gpus N] [OPTIONS] -- COMMAND [ARGS]...\n       \
                      memtrace dry-run --list-gpus"
)]
pub(crate) struct DryRun {
    /// The GPU to simulate, such as a100-40gb or rtx-4090 [default: h100-sxm]
    #[arg(long, value_name = "NAME", value_parser = Gpu::named)]
    pub(crate) gpu: Option<Gpu>,
    /// Print the GPUs that --gpu knows, and end
    #[arg(long, exclusive = true)]
    pub(crate) list_gpus: bool,
    /// The memory of each GPU that a program can use, with its context (24GiB, 80GB)
    #[arg(long, value_name = "SIZE", value_parser = gpu_memory)]
    pub(crate) memory: Option<u64>,
    /// The number of GPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) gpus: u32,
    /// The result of `x > 0` for values that no kernel computed, and so the share that masks and nonzero select
    #[arg(long, value_name = "SHARE", value_enum, default_value_t)]
    pub(crate) nonzero: Nonzero,
    /// The workspaces of cuDNN for convolutions that were not measured
    #[arg(long, value_name = "SHARE", value_enum, default_value_t)]
    pub(crate) workspaces: Workspaces,
    /// Run the command twice before, with the smallest and the largest sizes that values and workspaces can have, and
    /// report the range of the peak
    #[arg(long, conflicts_with_all = ["tries", "nonzero", "workspaces"])]
    pub(crate) bounds: bool,
    /// How tokens choose experts: evenly, by a Zipf distribution (zipf:1.2), or all the first experts (one-rank)
    #[arg(long, value_name = "RULE", default_value = "even", value_parser = routing)]
    pub(crate) routing: String,
    /// End the program, and its child processes, after this many steps of each optimizer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) steps: Option<u32>,
    /// End the program when it answers requests: an HTTP server of it replies to /health with status 200
    #[arg(long)]
    pub(crate) until_ready: bool,
    /// End the program when it prints a line that matches this regular expression
    #[arg(long, value_name = "REGEX", value_parser = line_expression)]
    pub(crate) ready_line: Option<Regex>,
    /// Run the command once for each value, in the place of {VAR} in its arguments, and print a table
    #[arg(long, value_name = "VAR=8,16,32", value_parser = values, group = "tries", conflicts_with_all = NOT_FOR_TRIES)]
    pub(crate) vary: Option<Values>,
    /// Run the command once on each of these GPUs, and print a table
    #[arg(long, value_name = "GPU,...", value_parser = Gpu::named, value_delimiter = ',', group = "tries",
        conflicts_with_all = ["gpu", "memory"], conflicts_with_all = NOT_FOR_TRIES)]
    pub(crate) vary_gpu: Vec<Gpu>,
    /// Search the largest value of {VAR} that fits, by bisection
    #[arg(long, value_name = "VAR=1:512", value_parser = bounds, group = "tries", conflicts_with_all = NOT_FOR_TRIES)]
    pub(crate) max: Option<Bounds>,
    /// Run this many values at a time
    #[arg(long, value_name = "N", default_value_t = 1, requires = "tries", conflicts_with = "max",
        value_parser = positive)]
    pub(crate) jobs: usize,
    /// Print the tries of --vary or --max as JSON, in bytes
    #[arg(long, requires = "tries")]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) run: Run,
}

/// The options of `memtrace report`.
#[derive(Args, Debug)]
pub(crate) struct Report {
    /// A run folder, a .mtr file or a PyTorch memory snapshot (.pickle, .pkl, .json, each also .gz); snapshots of
    /// several ranks, as files or folders; a folder with the runs of a job. Other folders with runs are listed
    /// [default: the newest run in the current folder]
    #[arg(value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Print the table of all ranks and phases, of a run or of a job on several hosts
    #[arg(long)]
    pub(crate) ranks: bool,
    /// Merge the runs of this job, if the folder has several
    #[arg(long, value_name = "ID")]
    pub(crate) job: Option<String>,
    /// Print evidence, replay details, and what each phase allocated and freed
    #[arg(short, long, conflicts_with = "json")]
    pub(crate) verbose: bool,
    /// Print the complete summary as JSON, in bytes and nanoseconds (analysis/schema/summary.schema.json)
    #[arg(long)]
    pub(crate) json: bool,
    /// Write an interactive page that loads nothing from the network into FILE, whose name ends in .html; of a job, and
    /// with --ranks, the table of all ranks [default: report.html]
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with_all = ["json", "verbose", "section", "range"])]
    pub(crate) html: Option<Option<PathBuf>>,
    /// Print one section in full
    #[arg(long, value_name = "NAME", value_parser = section_names(), conflicts_with = "json")]
    pub(crate) section: Option<String>,
    /// Add what stayed on the devices after POINT to the report: range:NAME (the end of ranges of this name),
    /// function:NAME (the end of its calls) or line:FILE:LINE
    #[arg(long, value_name = "POINT", value_parser = release_point)]
    pub(crate) released_after: Option<ReleasePoint>,
    /// Print only the peak while the program had a range of this name open (record_function, NVTX,
    /// gpu_memtrace.annotate); with --json, add it to the summary
    #[arg(long, value_name = "NAME", conflicts_with = "section")]
    pub(crate) range: Option<String>,
    /// The recording goes on, and all events up to now are in it
    #[arg(long, hide = true)]
    pub(crate) so_far: bool,
    /// Divide the memory into your own categories, by the rules of this JSON file (docs/how-to/custom-categories.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) categories: Option<PathBuf>,
}

/// The options of `memtrace open`.
#[derive(Args, Debug)]
#[command(
    after_help = "The browser is $BROWSER, or else what xdg-open selects. A server answers only on this machine, and \
    only those who have its URL."
)]
pub(crate) struct Open {
    /// A run folder; with --serve, also a .mtr file or a PyTorch memory snapshot [default: the newest run in the
    /// current folder]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<PathBuf>,
    /// Serve the page to this machine until Ctrl-C: where one zooms in, it loads all events and blocks of a long
    /// recording
    #[arg(long)]
    pub(crate) serve: bool,
    /// The port of the server on 127.0.0.1 [default: a free one]
    #[arg(long, value_name = "N", requires = "serve", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
}

/// The sections of a report, each with its description, as values for clap.
fn section_names() -> PossibleValuesParser {
    SECTIONS.iter().map(|section| PossibleValue::new(section.name).help(section.description)).collect::<Vec<_>>().into()
}

/// The options of `memtrace export`.
#[derive(Args, Debug)]
pub(crate) struct Export {
    /// A run folder, a .mtr file or a PyTorch memory snapshot (.pickle, .pkl, .json, each also .gz) [default: the
    /// newest run in the current folder]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<PathBuf>,
    /// The format
    #[arg(long, value_enum)]
    pub(crate) to: ExportFormat,
    /// The file to write, or the folder for parquet [default: one file for each process in the current folder; html:
    /// report.html; json: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Write parquet tables in folders by run and rank (TABLE/run=NAME/rank=N), of one run or of all runs in the folder
    /// RUN
    #[arg(long)]
    pub(crate) partition: bool,
    /// Export only the process of this rank
    #[arg(long, value_name = "N", conflicts_with = "pid")]
    pub(crate) rank: Option<u32>,
    /// Export only this process
    #[arg(long, value_name = "N")]
    pub(crate) pid: Option<u32>,
    /// The bytes that a flame graph shows (speedscope, folded) [default: peak]
    #[arg(long, value_enum)]
    pub(crate) of: Option<FlameOf>,
    /// Quote in a snapshot the source files of this machine that the recording names, even if nothing proves that it
    /// was made with them; use this only for recordings that you trust
    #[arg(long)]
    pub(crate) sources: bool,
    /// The recording goes on, and all events up to now are in it
    #[arg(long, hide = true)]
    pub(crate) so_far: bool,
    /// Give blocks your own categories, by the rules of this JSON file (docs/how-to/custom-categories.md): snapshot,
    /// html, json, csv, parquet
    #[arg(long, value_name = "FILE")]
    pub(crate) categories: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) window: Window,
}

/// The window of a process's recording that an export shows. It includes the blocks that are allocated when it begins.
#[derive(Args, Default, Debug)]
#[command(next_help_heading = "Window")]
pub(crate) struct Window {
    /// Export only this device; -1 is the CPU [default: all; timeline: the only device]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// Export only these steps, counted from 0: N, A-B or A- (from A on)
    #[arg(long, value_name = "A-B", value_parser = step_range)]
    pub(crate) steps: Option<(u32, u32)>,
    /// Export only from the first start to the last end of ranges of this name (record_function, NVTX,
    /// gpu_memtrace.annotate)
    #[arg(long, value_name = "NAME")]
    pub(crate) range: Option<String>,
    /// Export only this time range since the first recorded event of the run: A-B or A-, in seconds or with a unit
    /// (1.5s-2s, 250ms-, 1m30s-, 10us-20us, ns)
    #[arg(long, value_name = "A-B", value_parser = time_range)]
    pub(crate) time: Option<(u64, u64)>,
    /// Leave out blocks that are smaller (512KiB, 1.5GiB, 2GB, or a number of bytes)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) min_size: Option<u64>,
    /// Export only the newest N events of the window, as a PyTorch history of N entries would
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_events: Option<u64>,
}

impl Window {
    /// Whether the window has any limit besides the device.
    pub(crate) fn is_limited(&self) -> bool {
        self.steps.is_some()
            || self.range.is_some()
            || self.time.is_some()
            || self.min_size.is_some()
            || self.max_events.is_some()
    }
}

/// The options of `memtrace lines`.
#[derive(Args, Debug)]
pub(crate) struct Lines {
    /// A run folder, a .mtr file or a PyTorch memory snapshot (.pickle, .pkl, .json, each also .gz) [default: the
    /// newest run in the current folder]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<PathBuf>,
    /// Show this function: its name, its qualified name or the end of it, e.g. Block.forward; may be repeated [default:
    /// the functions of the program with the highest peaks]
    #[arg(long, value_name = "NAME")]
    pub(crate) function: Vec<String>,
    /// Show the functions of this file: its path or the end of it; may be repeated
    #[arg(long, value_name = "PATH")]
    pub(crate) file: Vec<String>,
    /// Show at most N functions, those with the highest peaks
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) top: usize,
    /// Show the process of this rank [default: the process with the highest peak]
    #[arg(long, value_name = "N", conflicts_with = "pid")]
    pub(crate) rank: Option<u32>,
    /// Show this process
    #[arg(long, value_name = "N")]
    pub(crate) pid: Option<u32>,
    /// Count only what happened while the program had a range of this name open (record_function, NVTX,
    /// gpu_memtrace.annotate)
    #[arg(long, value_name = "NAME")]
    pub(crate) range: Option<String>,
    /// Add the figures of torch.cuda.memory_stats to the JSON of each line
    #[arg(long, requires = "json")]
    pub(crate) statistics: bool,
    /// Show this device; -1 is the CPU [default: the device with the highest peak]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// Quote the source files of this machine that the recording names, even if nothing proves that it was made with
    /// them; use this only for recordings that you trust
    #[arg(long)]
    pub(crate) sources: bool,
    /// Divide the memory into your own categories, by the rules of this JSON file (docs/how-to/custom-categories.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) categories: Option<PathBuf>,
    /// Write an interactive page that loads nothing from the network into FILE, whose name ends in .html [default:
    /// that of --output, or lines.html]
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with = "json")]
    pub(crate) html: Option<Option<PathBuf>>,
    /// Print JSON, in bytes (analysis/schema/lines.schema.json)
    #[arg(long)]
    pub(crate) json: bool,
    /// The file to write [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// The options of `memtrace diff`.
#[derive(Args, Debug)]
#[command(
    override_usage = "memtrace diff A B [OPTIONS]\n       memtrace diff RUN --steps N M [OPTIONS]",
    after_help = "Exit status: 0 whether or not the runs differ, 2 for bad usage or unreadable input. `memtrace check \
    --baseline` fails if a run needs more memory than another."
)]
pub(crate) struct Diff {
    /// The first run: a run folder, a .mtr file or a PyTorch memory snapshot (.pickle, .pkl, .json, each also .gz)
    /// [default with --steps: the newest run in the current folder]
    #[arg(value_name = "A", required_unless_present = "steps")]
    pub(crate) a: Option<PathBuf>,
    /// The second run, of any of these kinds
    #[arg(value_name = "B", required_unless_present = "steps")]
    pub(crate) b: Option<PathBuf>,
    /// Compare the peak of step N of A with the peak of step M of B; without B, of A
    #[arg(long, num_args = 2, value_names = ["N", "M"])]
    pub(crate) steps: Option<Vec<u32>>,
    /// Compare only processes of this rank
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<u32>,
    /// Compare only this device; -1 is the CPU
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// Compare the text of the source files of this machine that the recordings name, even if nothing proves that they
    /// were made with them
    #[arg(long)]
    pub(crate) sources: bool,
    /// Divide the memory into your own categories, by the rules of this JSON file (docs/how-to/custom-categories.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) categories: Option<PathBuf>,
    /// Print the complete comparison as JSON, in bytes (analysis/schema/diff.schema.json)
    #[arg(long)]
    pub(crate) json: bool,
    /// Write an interactive page that loads nothing from the network into FILE, whose name ends in .html [default:
    /// diff.html]
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with = "json")]
    pub(crate) html: Option<Option<PathBuf>>,
}

/// The options of `memtrace check`.
#[derive(Args, Debug)]
#[command(
    group = ArgGroup::new("limits").required(true).multiple(true)
        .args([
            "max_peak", "max_reserved", "max_leak", "max_category", "released_after", "no_oom", "no_issue", "baseline",
        ]),
    after_help = "Exit status: 0 if the run passes, 1 if it exceeds a limit or the recording is not sufficient to \
    decide, 2 for bad usage or unreadable input.\n\
    Sizes have binary units (20GiB, 512MiB), decimal units (20GB) or are numbers of bytes. Each limit applies to each \
    device of each process."
)]
pub(crate) struct Check {
    /// A run folder, a .mtr file or a PyTorch memory snapshot (.pickle, .pkl, .json, each also .gz), or the snapshots
    /// of several ranks, as files or folders [default: the newest run in the current folder]
    #[arg(value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Fail if the peak of allocated memory (torch.cuda.max_memory_allocated) exceeds SIZE
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_peak: Option<u64>,
    /// Fail if the peak of reserved memory (torch.cuda.max_memory_reserved) exceeds SIZE
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_reserved: Option<u64>,
    /// Fail if memory grows by more than SIZE in each step after the second step
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_leak: Option<u64>,
    /// Fail if the blocks of a category exceed SIZE at the peak; NAME is a category, as the report prints it
    /// (activations, 'KV cache') or in JSON (kv_cache), or one of --categories; may be repeated
    #[arg(long, value_name = "NAME=SIZE", value_parser = category_limit)]
    pub(crate) max_category: Vec<(String, u64)>,
    /// Fail if the process has more than --max left on the device after POINT, without the CUDA context. POINT is the
    /// end of a range or of a call, or a line (range:NAME, function:NAME, line:FILE:LINE); the highest figure counts
    #[arg(long, value_name = "POINT", value_parser = release_point, requires = "max")]
    pub(crate) released_after: Option<ReleasePoint>,
    /// The bytes that may stay after --released-after
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "released_after")]
    pub(crate) max: Option<u64>,
    /// Fail if an out-of-memory error occurred, even if the program caught it
    #[arg(long)]
    pub(crate) no_oom: bool,
    /// Fail if the report has an issue of this rule (any: of any rule); may be repeated
    #[arg(long, value_name = "RULE", value_parser = rule_names())]
    pub(crate) no_issue: Vec<String>,
    /// Fail if peak or reserved memory exceeds that of this earlier run: its folder, its summary.json, a trace or a
    /// snapshot
    #[arg(long, value_name = "RUN")]
    pub(crate) baseline: Option<PathBuf>,
    /// Accept this much more than the baseline: a share (2%) or a size
    #[arg(long, value_name = "MORE", value_parser = tolerance, default_value = "1%")]
    pub(crate) tolerance: Tolerance,
    /// Check only processes of this rank
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<u32>,
    /// Check only this device; -1 is the CPU
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) device: Option<i16>,
    /// Divide the memory into your own categories, by the rules of this JSON file (docs/how-to/custom-categories.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) categories: Option<PathBuf>,
    /// Accept an incomplete recording: lost events, processes that were not recorded, or a program that failed
    #[arg(long)]
    pub(crate) allow_incomplete: bool,
    /// Print JSON, in bytes (analysis/schema/check.schema.json)
    #[arg(long, conflicts_with = "github")]
    pub(crate) json: bool,
    /// Print annotations for GitHub Actions too
    #[arg(long)]
    pub(crate) github: bool,
}

/// The options of `memtrace redact`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 for success, 2 for bad usage or unreadable input.\n\
    Export the copy for a redacted file of another format: memtrace export DIR --to snapshot")]
pub(crate) struct Redact {
    /// A run folder or a .mtr file [default: the newest run in the current folder]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<PathBuf>,
    /// Write the copy into this folder, which must be new or empty; its name is part of the copy
    #[arg(short, long, value_name = "DIR", required = true)]
    pub(crate) output: PathBuf,
    /// Write no snapshot
    #[arg(long)]
    pub(crate) no_snapshot: bool,
}

/// The options of `memtrace suspend`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 for success, 2 for bad usage or if nothing was suspended.\n\
    Needs NVIDIA driver 570 or newer and as much free memory on the host. See docs/how-to/suspend.md.")]
pub(crate) struct Suspend {
    /// The id of a process; all processes that it started count too
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pid: u32,
    /// How long to wait for the work on the GPU: in seconds or with a unit (90, 500ms, 1m30s, 2h)
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time_limit)]
    pub(crate) timeout: Duration,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `memtrace attach`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 for success, 2 for bad usage or if nothing was recorded.\n\
    Needs the permission to trace the process, as a debugger does. See docs/how-to/attach.md.")]
pub(crate) struct Attach {
    /// The id of a process in which Python has imported PyTorch
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pid: u32,
    /// Write the recording into this folder, which must be new or empty [default: memtrace-PROGRAM-TIME]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) recording: RecordingOptions,
    /// Detach after this time: in seconds or with a unit (90, 500ms, 1m30s, 2h)
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    pub(crate) duration: Option<Duration>,
    #[command(flatten)]
    pub(crate) summary: EndSummaryOptions,
}

/// The options of `memtrace resume`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 for success, 2 for bad usage or if nothing was resumed.")]
pub(crate) struct Resume {
    /// The id that memtrace suspend was given
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pid: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `memtrace live`.
#[derive(Args, Debug)]
#[command(
    after_help = "Keys: q quits, tab shows the next process, d the next device, t tensors instead of stacks, s sorts \
    by the next column, / searches.\n\
    Exit status: 0 for success, 2 for bad usage or if the recording does not run."
)]
pub(crate) struct Live {
    /// The id of a recorded process or of the memtrace that records it, or the run folder [default: all running
    /// recordings of this user]
    #[arg(value_name = "PID|RUN")]
    pub(crate) target: Option<String>,
    /// Print the figures once, as text
    #[arg(long)]
    pub(crate) once: bool,
    /// Print them as JSON, in bytes and nanoseconds (analysis/schema/live.schema.json)
    #[arg(long, requires = "once")]
    pub(crate) json: bool,
}

/// The options of `memtrace snapshot`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 for success, 1 if the recording ended and no trigger had fired, 2 for bad usage, or \
    if the recording does not run or a file cannot be written."
)]
pub(crate) struct Snapshot {
    /// The id of a recorded process or of the memtrace that records it, the run folder, or a .mtr file in it [default:
    /// the only running recording of this user]
    #[arg(value_name = "PID|RUN")]
    pub(crate) target: Option<String>,
    /// The file to write; the ending of its name selects the format: .pickle, .html, .json, .txt (the report), .csv,
    /// .svg, .pftrace, .speedscope.json, .folded [default: a .pickle file for each process in the current folder]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Wait, and write a file after each out-of-memory error; FILE gets a number: now-1.pickle
    #[arg(long, value_enum)]
    pub(crate) on: Option<SnapshotOn>,
    /// Wait, and write a file each time that this begins to hold on a device: allocated, reserved or used > SIZE or
    /// SHARE% of the device's memory ('allocated > 60GiB', 'used > 90%')
    #[arg(long, value_name = "CONDITION", value_parser = condition)]
    pub(crate) when: Option<Condition>,
    /// Wait, and write a file at this interval: in seconds or with a unit (90, 500ms, 1m30s, 2h)
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    pub(crate) every: Option<Duration>,
    /// End after N files [default: when the recording ends]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: Option<u32>,
}

/// The values of `--on`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum SnapshotOn {
    /// An out-of-memory error, also one that the program catches
    Oom,
}

/// The rules of the diagnostics, and `any`, as values for clap.
fn rule_names() -> PossibleValuesParser {
    let names = diagnostic_rules().into_iter().map(|rule| rule.id.as_str()).chain(["any"]);
    names.map(PossibleValue::new).collect::<Vec<_>>().into()
}

/// The options of `memtrace doctor`.
#[derive(Args, Debug)]
#[command(
    override_usage = "memtrace doctor [OPTIONS] [-- COMMAND [ARGS]...]",
    after_help = "Exit status: 0 if all checks passed, 1 if a check failed, 2 for bad usage.\n\
    The output of COMMAND stays on stdout; with --json it goes to stderr."
)]
pub(crate) struct Doctor {
    /// Print JSON (launcher/schema/doctor.schema.json)
    #[arg(long)]
    pub(crate) json: bool,
    /// End the command and all its processes after this time: in seconds or with a unit (90, 500ms, 1m30s, 2h)
    #[arg(long, alias = "seconds", value_name = "TIME", value_parser = time_limit, requires = "command")]
    pub(crate) duration: Option<Duration>,
    /// Keep the recording in this folder, which must be new or empty
    #[arg(short, long, value_name = "DIR", requires = "command")]
    pub(crate) output: Option<PathBuf>,
    /// List what memtrace has written outside of run folders: copies of its library, simulated CUDA libraries, and
    /// temporary folders that a killed memtrace has left
    #[arg(long, conflicts_with_all = ["json", "command"])]
    pub(crate) clean: bool,
    /// Remove what --clean lists, except what a running memtrace uses
    #[arg(long, requires = "clean")]
    pub(crate) yes: bool,
    /// Run the program that the self-test records
    #[arg(long, hide = true)]
    pub(crate) self_test_program: bool,
    /// The command to record, and its arguments
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// The options of `memtrace mcp`.
#[derive(Args, Debug)]
#[command(after_help = "The wheel has the server. cargo builds it with --features mcp.\n\
    Exit status: 0 if the client closed stdin, 2 for bad usage or if the server cannot be started.")]
pub(crate) struct Mcp {
    /// Offer tools that run commands under memtrace: the agent can then run any program as this user
    #[arg(long)]
    pub(crate) allow_run: bool,
}

/// The commands of `memtrace kernel`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 for success, 2 for bad usage or if the kernel cannot be installed or removed.")]
pub(crate) struct Kernel {
    #[command(subcommand)]
    pub(crate) command: KernelCommand,
}

/// The subcommands of `memtrace kernel`.
#[derive(Subcommand, Debug)]
pub(crate) enum KernelCommand {
    /// Install a Jupyter kernel that memtrace records
    ///
    /// Each start of the kernel makes a run folder beside the notebook. A kernel of the same name is replaced if
    /// memtrace has installed it.
    #[command(override_usage = "memtrace kernel install [OPTIONS] [-- RUN_OPTIONS...]")]
    Install(KernelInstall),
    /// Remove a kernel that memtrace has installed
    Remove(KernelRemove),
}

/// Where a kernel is installed.
#[derive(Args, Debug)]
#[group(multiple = false)]
pub(crate) struct KernelLocation {
    /// In the home folder of this user (the default of `install`)
    #[arg(long)]
    pub(crate) user: bool,
    /// In DIR/share/jupyter
    #[arg(long, value_name = "DIR")]
    pub(crate) prefix: Option<PathBuf>,
    /// In the environment of the Python
    #[arg(long)]
    pub(crate) sys_prefix: bool,
}

/// The options of `memtrace kernel install`.
#[derive(Args, Debug)]
pub(crate) struct KernelInstall {
    #[command(flatten)]
    pub(crate) location: KernelLocation,
    /// The name of the kernel for programs (jupyter nbconvert --ExecutePreprocessor.kernel_name=NAME)
    #[arg(long, value_name = "NAME", default_value = "memtrace")]
    pub(crate) name: String,
    /// The name of the kernel for people [default: Python X.Y (memtrace)]
    #[arg(long, value_name = "TEXT")]
    pub(crate) display_name: Option<String>,
    /// The Python of the kernel, which needs ipykernel [default: the first python on PATH]
    #[arg(long, value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
    /// Options of `memtrace run` for this kernel, such as --runs DIR
    #[arg(value_name = "RUN_OPTIONS", last = true)]
    pub(crate) options: Vec<String>,
}

/// The options of `memtrace kernel remove`.
#[derive(Args, Debug)]
pub(crate) struct KernelRemove {
    #[command(flatten)]
    pub(crate) location: KernelLocation,
    /// The name of the kernel
    #[arg(long, value_name = "NAME", default_value = "memtrace")]
    pub(crate) name: String,
    /// A Python that has Jupyter's packages [default: the first python on PATH]
    #[arg(long, value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
}

/// The options of `memtrace explain`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 for success, 2 for a rule that does not exist.")]
pub(crate) struct Explain {
    /// The name of a rule, as reports print it [default: list all rules]
    #[arg(value_name = "RULE")]
    pub(crate) rule: Option<String>,
}

/// The options of `memtrace docs`.
#[derive(Args, Debug)]
#[command(after_help = "`memtrace docs out-of-memory | less` shows a page in a pager.")]
pub(crate) struct Docs {
    /// The name of a page: out-of-memory, how-to/out-of-memory or docs/how-to/out-of-memory.md [default: list all
    /// pages]
    #[arg(value_name = "PAGE")]
    pub(crate) page: Option<String>,
}

/// The options of `memtrace man`.
#[derive(Args, Debug)]
#[command(after_help = "`memtrace man | man -l -` shows memtrace(1).")]
pub(crate) struct Man {
    /// Write a page for each command into this folder [default: print memtrace(1)]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
}

/// The options of `memtrace completions`.
#[derive(Args, Debug)]
#[command(after_help = "bash: memtrace completions bash > ~/.local/share/bash-completion/completions/memtrace\n\
    zsh: write the script to the file _memtrace in a folder of $fpath\n\
    fish: memtrace completions fish > ~/.config/fish/completions/memtrace.fish")]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: clap_complete::Shell,
}

/// The values of `--to`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum ExportFormat {
    /// A PyTorch snapshot pickle, for pytorch.org/memory_viz
    Snapshot,
    /// The report as one interactive HTML page that loads nothing from the network; with --steps, --range, --time or
    /// --max-events its timeline shows that part first
    Html,
    /// The summary (summary.json)
    Json,
    /// Bytes by category over time, as PyTorch's export_memory_timeline writes them; the extension of FILE selects the
    /// format: .html (the page of --to html), .svg, .json
    Timeline,
    /// A table of all blocks: time, size, stack, category
    Csv,
    /// A trace for ui.perfetto.dev: memory over time, blocks, steps, phases and named ranges
    Perfetto,
    /// A flame graph of bytes by call stack, for speedscope.app; see --of
    Speedscope,
    /// The same flame graph as folded stacks, for flamegraph.pl and similar tools
    Folded,
    /// A profile for `go tool pprof`, Pyroscope and Grafana: bytes and blocks by call stack, at the peak and over the
    /// run, with device, phase and category as labels
    Pprof,
    /// Tables of events, blocks, stacks and phases, for DuckDB, Polars, Spark and Ray Data; see
    /// docs/reference/parquet.md
    Parquet,
}

/// The values of `--of`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum FlameOf {
    /// The blocks in use at the peak
    Peak,
    /// The blocks that were allocated and never freed
    Leaks,
    /// All blocks that were allocated
    Total,
}

impl From<FlameOf> for memtrace_analysis::export::FlameWeight {
    fn from(of: FlameOf) -> memtrace_analysis::export::FlameWeight {
        match of {
            FlameOf::Peak => memtrace_analysis::export::FlameWeight::Peak,
            FlameOf::Leaks => memtrace_analysis::export::FlameWeight::Leaks,
            FlameOf::Total => memtrace_analysis::export::FlameWeight::Total,
        }
    }
}

/// The options of `memtrace run`.
#[derive(Args, Debug)]
#[command(override_usage = "memtrace [run] [OPTIONS] -- COMMAND [ARGS]...")]
pub(crate) struct Run {
    /// Write the recording into this folder, which must be new or empty [default: memtrace-PROGRAM-TIME]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// Make the run folder memtrace-PROGRAM-TIME in this folder [default: the current folder]
    #[arg(long, value_name = "DIR", conflicts_with = "output")]
    pub(crate) runs: Option<PathBuf>,
    /// The id of the distributed job, whose runs on all hosts `memtrace report DIR` merges
    /// [default: $MEMTRACE_JOB, or the id of Slurm, torchrun, mpirun or Ray]
    #[arg(long, value_name = "ID")]
    pub(crate) job: Option<String>,
    #[command(flatten)]
    pub(crate) recording: RecordingOptions,
    /// Keep only the newest part of each process's trace: 10GiB of it, or the last 24h
    ///
    /// Older events are dropped while the program runs. Blocks that they left in use are kept with their stacks, names
    /// and categories, as are the segments and the open ranges. A trace that reaches the size is rewritten, and its
    /// newest half stays; it grows meanwhile. With a time, events are dropped when they are older by a quarter.
    #[arg(long, value_name = "SIZE|TIME", value_parser = kept)]
    pub(crate) keep: Option<Kept>,
    /// Write the objects of reference cycles that held tensors to cycle-N.html; this adds a function to gc.callbacks
    ///
    /// While the garbage collector runs, memtrace sets gc.DEBUG_SAVEALL. It reads what was found, and frees it in the
    /// same collection.
    #[arg(long)]
    pub(crate) cycles: bool,
    /// Record which Python objects hold the tensors, as paths such as __main__.trainer.state; this adds an atexit
    /// function
    ///
    /// memtrace walks over the program's objects after some steps, after an out-of-memory error and before the
    /// interpreter ends. It runs none of the program's code.
    #[arg(long)]
    pub(crate) holders: bool,
    /// How to handle the memory pools of JAX and CuPy (docs/how-to/jax-and-cupy.md)
    #[arg(long, value_enum, default_value_t = Pools::Keep)]
    pub(crate) pools: Pools,
    /// Let XLA write the buffer assignment of each program that it compiles into the run folder; this sets XLA_FLAGS
    #[arg(long)]
    pub(crate) xla_dump: bool,
    /// Let the command and its child processes together see GPUs with this much memory: what does not fit fails as on a
    /// smaller GPU (24GiB; docs/how-to/limit.md)
    #[arg(long, value_name = "SIZE", value_parser = limit)]
    pub(crate) limit: Option<u64>,
    /// Serve figures of the running processes for Prometheus at http://ADDR/metrics, such as 127.0.0.1:9400; port 0
    /// takes a free port, and unix:PATH a Unix socket that only you can read (docs/how-to/metrics.md)
    #[arg(long, value_name = "ADDR", value_parser = server_address)]
    pub(crate) metrics: Option<Address>,
    /// Serve the metrics only to requests with the token in this file, which must be yours alone: Authorization: Bearer
    /// TOKEN
    #[arg(long, value_name = "FILE", requires = "metrics")]
    pub(crate) metrics_token_file: Option<PathBuf>,
    /// Push these figures to an OpenTelemetry collector every 10 s, over HTTP: http://127.0.0.1:4318
    /// (docs/how-to/metrics.md)
    #[arg(long, value_name = "URL", value_parser = otlp_url)]
    pub(crate) otlp: Option<String>,
    /// Divide the memory of the report and the snapshot into your own categories, by the rules of this JSON file
    /// (docs/how-to/custom-categories.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) categories: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) summary: EndSummaryOptions,
    /// End with the command, and write the reports afterwards, in the background; prints nothing about them
    #[arg(long)]
    pub(crate) reports_in_background: bool,
    /// The command to record, and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// Options for recording, in `memtrace run` and `memtrace attach`.
#[derive(Args, Debug)]
pub(crate) struct RecordingOptions {
    /// Which call stacks to record
    #[arg(long, value_enum, default_value_t = Stacks::Python)]
    pub(crate) stacks: Stacks,
    /// Whether to record CPU tensors
    #[arg(long, value_enum, default_value_t = Cpu::Auto)]
    pub(crate) cpu: Cpu,
    /// Do not read the program's objects: record no names of tensors and modules, and no module calls
    #[arg(long)]
    pub(crate) no_names: bool,
    /// Do not ask the driver and NVML how much of the GPUs' memory is in use
    #[arg(long)]
    pub(crate) no_device_usage: bool,
}

/// Options for the end-of-run summary and its files.
#[derive(Args, Debug)]
pub(crate) struct EndSummaryOptions {
    /// Print only errors and warnings
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Print evidence, replay details, and what each phase allocated and freed
    #[arg(short, long, conflicts_with = "quiet")]
    pub(crate) verbose: bool,
    /// Write no snapshot, only the trace and the summary
    #[arg(long)]
    pub(crate) no_snapshot: bool,
}

/// The values of `--stacks`.
#[derive(Clone, Copy, ValueEnum, Debug)]
pub(crate) enum Stacks {
    /// Python frames, or native frames where there are neither Python frames nor an autograd node
    Python,
    /// Native frames (C++)
    Native,
    /// Native frames, with the Python frames in their places
    Both,
    /// No stacks
    None,
}

/// The values of `--pools`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum Pools {
    /// Nothing: the report has what the pools took from CUDA
    Keep,
    /// Read how much of them is in use when the program ends; this adds an atexit function
    Read,
    /// Switch them off, so that each buffer is an allocation with a call stack: CUDA's stream-ordered allocator serves
    /// JAX (this sets XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async and XLA_PYTHON_CLIENT_PREALLOCATE=false) and CuPy (this
    /// calls cupy.cuda.set_allocator); reads the figures too
    Off,
}

/// The values of `--cpu`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum Cpu {
    /// Until the program uses a CUDA device
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

impl From<Pools> for options::Pools {
    fn from(pools: Pools) -> options::Pools {
        match pools {
            Pools::Keep => options::Pools::Keep,
            Pools::Read => options::Pools::Read,
            Pools::Off => options::Pools::Off,
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

/// Whether the first word of the command line belongs to memtrace. Otherwise, it is the command to run.
fn is_subcommand(first: &str) -> bool {
    matches!(first, "help" | "--help" | "-h" | "--version" | "-V") || Cli::command().find_subcommand(first).is_some()
}

impl Cli {
    /// Parses the command line. The error has its message and its exit code.
    pub(crate) fn from_arguments(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, UsageError> {
        let mut arguments: Vec<OsString> = arguments.into_iter().collect();
        let first = arguments.get(1).and_then(|a| a.to_str());
        let is_named = first == Some("run");
        let is_run = is_named || !first.is_some_and(is_subcommand);
        if is_run && arguments.len() > 1 && !is_named {
            arguments.insert(1, "run".into());
        }
        // Only on a terminal, and an argument has no sequence that could be taken for one of clap.
        let is_styled = !arguments.iter().any(|argument| argument.as_encoded_bytes().contains(&0x1b));
        let cli = Cli::try_parse_from(&arguments).map_err(|error| UsageError { error, is_run, is_styled })?;
        match &cli.command {
            Command::Run(run) if !is_named => match mistyped_command(&arguments, &run.command) {
                Some(error) => Err(UsageError { error, is_run: false, is_styled }),
                None => Ok(cli),
            },
            _ => Ok(cli),
        }
    }
}

/// The error of a command line without `run` and `--`, if the command to record is a command of memtrace that is
/// misspelled or stands after options.
fn mistyped_command(arguments: &[OsString], recorded: &[OsString]) -> Option<clap::Error> {
    let before = arguments.len().checked_sub(recorded.len() + 1)?;
    let word = recorded.first()?.to_str().filter(|_| arguments.get(before).is_none_or(|last| last != "--"))?;
    let commands = Cli::command();
    let names = commands.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    let similar = commands_like(word, names.chain(["help"]));
    let text = match &similar[..] {
        [] => return None,
        // An exact name is recognized as the first word, so this one stands after options.
        [command] if command == word => format!("options of memtrace {word} stand after {word}"),
        _ => format!("memtrace has no command {word}"),
    };
    let similar: Vec<String> = similar.iter().map(|command| format!("`memtrace {command}`")).collect();
    let help = format!("use {}; to record a program of this name, write `memtrace -- {word}`", similar.join(" or "));
    Some(clap::Error::raw(ErrorKind::InvalidSubcommand, format!("{text}\nhelp: {help}\n")))
}

/// The command line is invalid, or requests help.
#[derive(Debug)]
pub(crate) struct UsageError {
    error: clap::Error,
    is_run: bool,
    is_styled: bool,
}

impl UsageError {
    /// Prints the message on stdout or stderr, and returns the exit code.
    pub(crate) fn print(&self) -> u8 {
        let stream = if self.error.use_stderr() { Stream::Stderr } else { Stream::Stdout };
        let text = self.error.render();
        let text = match self.is_styled && layout(stream, false).color {
            true => text.ansi().to_string(),
            false => text.to_string(),
        };
        match stream {
            Stream::Stderr => print_to_stderr(Printed::Styled(&text)),
            // If even this text cannot be printed, there is nothing left to do.
            Stream::Stdout => _ = print(Printed::Styled(&text)),
        }
        match self.error.exit_code() {
            0 => 0,
            _ if self.is_run => crate::preflight::MEMTRACE_FAILED,
            _ => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, u8> {
        Cli::from_arguments(std::iter::once("memtrace").chain(line.split_whitespace()).map(OsString::from))
            .map_err(|e| e.print())
    }

    fn command(line: &str) -> Vec<String> {
        let Command::Run(run) = parse(line).unwrap().command else { panic!("{line}: not a run") };
        run.command.iter().map(|a| a.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn run_is_the_default_command() {
        assert_eq!(command("-- python train.py --lr 1"), ["python", "train.py", "--lr", "1"]);
        assert_eq!(command("run -- python -c x"), ["python", "-c", "x"]);
        assert_eq!(command("-o out --quiet -- a -- b"), ["a", "--", "b"]);
        assert_eq!(command("python -o x"), ["python", "-o", "x"]);
        assert_eq!(command("-q srun python view"), ["srun", "python", "view"]);
    }

    #[test]
    fn a_mistyped_command_is_recorded_only_where_it_is_marked() {
        for line in ["reprot x", "view x", "-q view x", "-o out stats", "-q report x", "Report", "viEW"] {
            assert_eq!(parse(line).unwrap_err(), 2, "{line}");
        }
        for line in ["-- view x", "-q -- view x", "run view x", "run -q view x", "run -- view x"] {
            assert_eq!(command(line), ["view", "x"], "{line}");
        }
        assert_eq!(command("-- report x"), ["report", "x"]);
    }

    /// Every option that has a time, in every command.
    #[test]
    fn all_times_have_the_same_units() {
        let lines = [
            ("run keep", "run --keep {} -- x"),
            ("dry-run keep", "dry-run --keep {} -- x"),
            ("suspend timeout", "suspend 1 --timeout {}"),
            ("attach duration", "attach 1 --duration {}"),
            ("snapshot every", "snapshot --every {}"),
            ("doctor duration", "doctor --duration {} -- x"),
        ];
        let mut with_time = Vec::new();
        for command in Cli::command().get_subcommands() {
            for option in command.get_arguments() {
                let names = option.get_value_names().unwrap_or_default();
                if names.iter().any(|name| name.split('|').any(|kind| kind == "TIME")) {
                    with_time.push(format!("{} {}", command.get_name(), option.get_long().unwrap()));
                    let help = option.get_help().unwrap().to_string();
                    assert!(help.contains("500ms, 1m30s, 2h") || help.contains("24h"), "{help}");
                }
            }
        }
        with_time.sort();
        let mut known = lines.map(|(name, _)| name);
        known.sort_unstable();
        assert_eq!(with_time, known);
        for (name, line) in lines {
            for time in ["10s", "5m", "2h", "1m30s", "1500ms"] {
                assert!(parse(&line.replace("{}", time)).is_ok(), "{name}: {time}");
            }
        }
        assert!(parse("doctor --seconds 3 -- x").is_ok(), "the former name");
    }

    #[test]
    fn usage_errors_have_exit_codes() {
        assert_eq!(parse("--").unwrap_err(), 125);
        assert_eq!(parse("--no-such-option -- x").unwrap_err(), 125);
        assert_eq!(parse("--stacks wrong -- x").unwrap_err(), 125);
        assert_eq!(parse("").unwrap_err(), 125);
        assert_eq!(parse("lines --top x").unwrap_err(), 2);
        assert_eq!(parse("--help").unwrap_err(), 0);
        assert_eq!(parse("-V").unwrap_err(), 0);
        assert_eq!(parse("diff a").unwrap_err(), 2);
        assert_eq!(parse("check a").unwrap_err(), 2, "no limit");
        assert_eq!(parse("check a --no-issue headache").unwrap_err(), 2);
    }
}
