//! The verdict: what happened to the worst device of a run, and the facts that explain it.

use std::iter;

use memtrace_input::load::{EstimatedWorkspaces, GuessedBranch, GuessedKind, GuessedSize, MissingFunction, PeakBounds};

use crate::allocator_advice::{allocator_advice, rest_words};
use crate::colocated::ColocationSummary;
use crate::conclusions::{OutsidePytorch, VerdictStatement, VerdictStatus, VerdictSummary};
use crate::device_names::{device_name, ordinal_text, process_name};
use crate::gaps::recording_gaps;
use crate::outside_pytorch::outside_at_error;
use crate::positions::{when_peaked, when_refused};
use crate::rank_sentences::launch_sentences;
use crate::summary::{DeviceSummary, OomSummary, ProcessSummary, Summary, WhatIfSummary, is_snapshot};
use memtrace_insight::units::{count_text, share_text, size_text};

impl Summary {
    /// Concludes again, after what the summary covers has changed.
    pub fn conclude(&mut self) {
        self.processes.iter_mut().flat_map(|process| &mut process.devices).for_each(conclude_device);
        let name = self.processes.first().filter(|_| self.processes.len() > 1).map(process_name);
        let mut verdict = VerdictSummary::default();
        verdict.add(self, name.as_deref());
        self.verdict = verdict;
        self.gaps = recording_gaps(self);
    }
}

fn conclude_device(device: &mut DeviceSummary) {
    device.outside_pytorch = OutsidePytorch::of(device);
    let advice = allocator_advice(device);
    if let Some(what_if) = &mut device.what_if {
        what_if.advice = advice;
    }
    let texts: Vec<Option<String>> = device.ooms.iter().map(|oom| outside_at_error(device, oom)).collect();
    for (oom, text) in device.ooms.iter_mut().zip(texts) {
        oom.outside_text = text;
    }
}

impl VerdictSummary {
    /// All sentences, in the order in which a report lists them.
    pub fn sentences(&self) -> Vec<&str> {
        let remarks = self.remarks.iter();
        let statements = self.statements.iter();
        let statements = statements.flat_map(|one| std::iter::once(&one.text).chain(&one.details));
        remarks.chain(statements).map(String::as_str).collect()
    }

    /// Adds all statements. `name` is the name of the worst process, if there are several.
    fn add(&mut self, summary: &Summary, name: Option<&str>) {
        if let Some(simulated) = &summary.run.simulated {
            let gpus =
                if simulated.count == 1 { String::new() } else { format!("{} x ", count_text(simulated.count.into())) };
            let (gpu, memory) = (&simulated.gpu, size_text(simulated.memory_bytes));
            let text = format!("Dry run on {gpus}{gpu} ({memory}), simulated: no GPU was used, no kernel ran.");
            self.remarks.push(text);
            if let Some(text) = simulated.workspaces.as_ref().and_then(estimated_workspaces) {
                self.remarks.push(text);
            }
            self.remarks.extend(missing_functions(&simulated.missing_functions));
            self.remarks.extend(guessed_sizes(&simulated.guessed_sizes, simulated.bounds.is_some()));
            self.remarks.extend(guessed_branches(&simulated.guessed_branches));
            if let Some(bounds) = &simulated.bounds {
                self.remarks.extend(peak_bounds(bounds, summary));
            }
            if simulated.was_ready {
                self.remarks.push("The program was ended when it was ready (--until-ready, --ready-line).".to_owned());
            }
        }
        if let Some(limit) = summary.run.limit_bytes {
            let text = format!("Limited to {} of each GPU (--limit); all processes together.", size_text(limit));
            self.remarks.push(text);
        }
        if let Some(count) = summary.run.limit_lock_missed {
            let allocations = if count == 1 { "allocation" } else { "allocations" };
            let text = format!(
                "The limit may not have been exact: {} {allocations} did not wait any longer for the others.",
                count_text(count)
            );
            self.state(VerdictStatus::Warning, &text);
        }
        self.refused_requests(summary, true);
        let process = summary.processes.first();
        let device = process.and_then(|process| process.devices.first());
        match (process, device) {
            (Some(process), Some(device)) => match device.explained_oom() {
                Some(oom) => {
                    self.oom_verdict(process, device, oom, name);
                    self.below_if(&preallocated_text(device).unwrap_or_default());
                }
                None => self.end_verdict(summary, process, device, name),
            },
            _ => {
                let text = format!(
                    "{}: no GPU memory was allocated, and no CPU tensors were recorded.",
                    capitalized(&summary.run.outcome)
                );
                self.state(end_mark(summary), &text);
                self.host_kill(summary);
            }
        }
        // A process that refused to start has less memory than those that prevented it.
        let shown = device.and_then(DeviceSummary::server_only).is_some();
        let others = summary.processes.iter().skip(1).flat_map(|process| process.devices.iter());
        let problem = others.filter_map(|device| device.server_only()?.problem.as_ref()).next();
        if let Some(problem) = problem.filter(|_| !shown) {
            self.state(end_mark(summary), problem);
        }
        self.refused_requests(summary, false);
        if let Some(exception) = summary.run.simulated.as_ref().and_then(|simulated| simulated.exception.as_ref()) {
            self.state(VerdictStatus::Failed, &exception.text());
        }
        if let Some(launch) = &summary.launch {
            launch_sentences(launch).iter().for_each(|text| self.below(text));
        }
        self.missing_parts(summary);
    }

    /// Adds a statement.
    pub(crate) fn state(&mut self, status: VerdictStatus, text: &str) {
        self.status = self.status.max(status);
        self.statements.push(VerdictStatement { status, text: text.to_owned(), details: Vec::new() });
    }

    /// Adds a detail of the last statement.
    fn below(&mut self, text: &str) {
        if let Some(statement) = self.statements.last_mut() {
            statement.details.push(text.to_owned());
        }
    }

    /// Adds the refused requests that ended their process, or all others. Of many, the first stand for all.
    fn refused_requests(&mut self, summary: &Summary, fatal: bool) {
        let has_several = summary.processes.len() > 1;
        let requests: Vec<_> = summary
            .processes
            .iter()
            .flat_map(|process| process.refused_requests.iter().map(move |request| (process, request)))
            .filter(|(_, request)| (request.fatal == Some(true)) == fatal)
            .collect();
        for (process, request) in requests.iter().take(NAMED_REQUESTS) {
            let device = ordinal_text(request.device);
            let device = if has_several { format!("{}, {device}", process_name(process)) } else { device };
            let statement = request.verdict(&device);
            self.status = self.status.max(statement.status);
            self.statements.push(statement);
        }
        let more = requests.len().saturating_sub(NAMED_REQUESTS);
        if more > 0 {
            self.below(&format!("Requests of {} further places were refused (summary.json).", count_text(more as u64)));
        }
    }

    fn oom_verdict(&mut self, process: &ProcessSummary, device: &DeviceSummary, oom: &OomSummary, name: Option<&str>) {
        let total = device.total_bytes.map(|total| format!(" ({})", size_text(total))).unwrap_or_default();
        let when = when_refused(device, oom);
        let location = &oom.requested_at.location;
        let at =
            location.split(", ").next().filter(|at| !at.is_empty()).map(|at| format!(", {at}")).unwrap_or_default();
        let times = match (device.oom_count, device.explained_oom) {
            (1, _) => String::new(),
            (n, Some(0)) => format!(" (the first of {} errors)", count_text(n)),
            (n, _) => format!(" (the last of {} errors)", count_text(n)),
        };
        let continued = oom.fatal == Some(false);
        let end = if continued { "; the program continued" } else { "" };
        let mark = if continued { VerdictStatus::Warning } else { VerdictStatus::Failed };
        let gpu = owner(device, name);
        // PyTorch's snapshots have the same form for GPUs of other makers, and do not say whose they are.
        let error = if is_snapshot(std::slice::from_ref(process)) { "Out of memory" } else { "CUDA out of memory" };
        self.state(mark, &format!("{error} on {gpu}{total}{when}{at}{times}{end}"));
        let tried = format!("Tried to allocate {}; {}", request(oom), lack(oom));
        let rest = rest_words(device);
        let settings = device.what_if.as_ref().map(|what_if| fragmentation(oom, what_if, rest)).unwrap_or_default();
        self.below(format!("{} {settings}", tried.trim_end_matches("; ")).trim_end());
        let remark = process.no_issue_remark.as_deref().map(str::to_owned);
        self.below_if(&remark.unwrap_or_else(|| issues_text(process)));
        if location.contains(", ") {
            self.below(&format!("Requested at {location}"));
        }
    }

    fn end_verdict(&mut self, summary: &Summary, process: &ProcessSummary, device: &DeviceSummary, name: Option<&str>) {
        let failed = summary.run.exit.success() == Some(false);
        let server = device.server_only().and_then(|server| server.verdict(failed));
        let steps = match device.steps {
            _ if server.is_some() => String::new(),
            0 => String::new(),
            1 => "1 step, ".to_owned(),
            n => format!("{} steps, ", count_text(n.into())),
        };
        let highest = device.highest.allocated_bytes;
        let of = |total: u64| format!(" of {} ({})", size_text(total), share_text(highest, total));
        let of = device.total_bytes.filter(|_| device.device >= 0).map(of).unwrap_or_default();
        let when = device.peak.as_ref().filter(|_| server.is_none()).map(when_peaked).unwrap_or_default();
        let issues = issues_text(process);
        let in_launch = summary.launch.as_ref().is_some_and(|launch| !launch.issues.is_empty());
        let mark = match end_mark(summary) {
            VerdictStatus::Good if !issues.is_empty() || in_launch || has_refused_requests(summary) => {
                VerdictStatus::Warning
            }
            mark => mark,
        };
        let text = format!(
            "{}: {steps}peak {}{of} on {}{when}",
            capitalized(&summary.run.outcome),
            size_text(highest),
            owner(device, name)
        );
        self.state(mark, &format!("{text}."));
        self.host_kill(summary);
        self.below_if(&server.unwrap_or_default());
        let colocation = device.colocation.as_ref().and_then(ColocationSummary::verdict);
        self.below_if(&colocation.unwrap_or_default());
        self.below_if(&preallocated_text(device).unwrap_or_default());
        if issues.is_empty() && !in_launch && !has_refused_requests(summary) && is_examined(summary, device) {
            self.below("No leaks or misuse found.");
        }
        self.below_if(&issues);
    }

    /// Adds who had the main memory when the kernel killed a process.
    fn host_kill(&mut self, summary: &Summary) {
        let kill = summary.host.as_ref().and_then(|host| host.kill.as_ref());
        self.below_if(kill.map_or("", |kill| &kill.text));
    }

    fn below_if(&mut self, text: &str) {
        if !text.is_empty() {
            self.below(text);
        }
    }

    /// Adds what the recording lacks: with it, the figures could be higher.
    fn missing_parts(&mut self, summary: &Summary) {
        let mut missing = Vec::new();
        match summary.lost_events() {
            0 => {}
            count => missing.push(format!("{} events lost", count_text(count))),
        }
        if summary.has_other_losses() {
            missing.push("parts of the recording are missing (see Losses)".to_owned());
        }
        missing.extend(not_recorded(summary));
        if !missing.is_empty() {
            self.state(VerdictStatus::Warning, &format!("Incomplete: {}.", missing.join(", ")));
        }
    }
}

/// How many refused requests the verdict names.
const NAMED_REQUESTS: usize = 3;

fn has_refused_requests(summary: &Summary) -> bool {
    summary.processes.iter().any(|process| !process.refused_requests.is_empty())
}

/// Ranges below this size in bytes are not worth a sentence.
const SMALL_RANGE: u64 = 1 << 20;

/// How far the peak of a dry run can be off, because workspaces of cuDNN are estimated. `None` if it hardly can.
fn estimated_workspaces(workspaces: &EstimatedWorkspaces) -> Option<String> {
    let side = |bytes: u64, word: &str| (bytes >= SMALL_RANGE).then(|| format!("{} {word}", size_text(bytes)));
    let sides = [side(workspaces.below_bytes, "lower"), side(workspaces.above_bytes, "higher")];
    let range = sides.into_iter().flatten().collect::<Vec<_>>().join(" or ");
    let (estimated, all) = (count_text(workspaces.estimated), count_text(workspaces.convolutions));
    (!range.is_empty()).then(|| {
        format!(
            "cuDNN workspaces of {estimated} of {all} convolutions are estimates: on a GPU, the peak can be {range}."
        )
    })
}

/// The range of the peak of a dry run with `--bounds`.
fn peak_bounds(bounds: &PeakBounds, summary: &Summary) -> Vec<String> {
    let devices = summary.processes.iter().flat_map(|process| &process.devices).filter(|device| device.device >= 0);
    let Some(own) = devices.map(|device| &device.highest).max_by_key(|highest| highest.reserved_bytes) else {
        return Vec::new();
    };
    let range = |figures: [u64; 3]| {
        let text = |bytes: Option<u64>| size_text(bytes.unwrap_or(0));
        format!("{} to {}", text(figures.into_iter().min()), text(figures.into_iter().max()))
    };
    let PeakBounds { smallest, largest } = bounds;
    let allocated = range([smallest.allocated_bytes, own.allocated_bytes, largest.allocated_bytes]);
    let reserved = range([smallest.reserved_bytes, own.reserved_bytes, largest.reserved_bytes]);
    let mut sentences =
        vec![format!("By the runs of --bounds, the peak is {allocated} allocated and {reserved} reserved.")];
    for (run, name) in [(smallest, "smallest"), (largest, "largest")] {
        if run.is_out_of_memory {
            sentences.push(format!("The run with the {name} sizes ran out of memory, so the peak can be higher."));
        } else if run.has_failed {
            sentences.push(format!("The run with the {name} sizes failed, so its peak is that up to there."));
        }
    }
    sentences
}

/// The maximum number of lines that a sentence about guessed sizes or branches names.
const NAMED_SIZES: usize = 4;

/// The first names of a list, and how many others `summary.json` has.
fn named(mut names: Vec<String>) -> String {
    let others = names.len().saturating_sub(NAMED_SIZES);
    if others > 0 {
        names.truncate(NAMED_SIZES);
        names.push(format!("{} more in summary.json", count_text(others as u64)));
    }
    names.join(", ")
}

/// The lines at which numbers that no kernel computed decided the course: the program's own, and those of optimizers.
fn guessed_branches(branches: &[GuessedBranch]) -> Vec<String> {
    let own = branches.iter().filter(|branch| branch.optimizer.is_none()).map(|branch| {
        let kind = match branch.kind {
            GuessedKind::Branch => "branch",
            GuessedKind::Size => "size",
        };
        format!("{} ({kind})", branch.location)
    });
    let of_optimizers = branches.iter().filter_map(|branch| {
        let optimizer = branch.optimizer.as_ref()?;
        Some(format!("{optimizer} at {}", branch.location))
    });
    let own = Some(named(own.collect())).filter(|names| !names.is_empty()).map(|names| {
        format!(
            "Numbers that a dry run does not compute decide the course at {names}. A run on a GPU can take another."
        )
    });
    let of_optimizers = Some(named(of_optimizers.collect()))
        .filter(|names| !names.is_empty())
        .map(|names| format!("An optimizer goes on to its limits, so its memory is an upper bound: {names}."));
    own.into_iter().chain(of_optimizers).collect()
}

/// The lines at which values that no kernel computed decided a size: those by policy, and those by random numbers.
fn guessed_sizes(sizes: &[GuessedSize], has_bounds: bool) -> Vec<String> {
    let lines = |is_assumed: bool| {
        let name = |size: &GuessedSize| {
            let (selected, total) = (count_text(size.selected), count_text(size.total));
            format!("{} ({}: {selected} of {total})", size.location, size.operator)
        };
        let found = named(sizes.iter().filter(|size| size.is_assumed == is_assumed).map(name).collect());
        (!found.is_empty()).then_some(found)
    };
    let assumed = lines(true).map(|names| {
        let range = if has_bounds { "" } else { " --bounds runs the program with both, and states the range." };
        format!(
            "Sizes are guessed, because they depend on values that a dry run does not compute: {names}. The peak on a \
             GPU can differ: with --nonzero zero these lines select nothing, with --nonzero full everything.{range}"
        )
    });
    let random = lines(false).map(|names| format!("Sizes follow random numbers, which are others on a GPU: {names}."));
    assumed.into_iter().chain(random).collect()
}

/// The maximum number of functions that a sentence about missing ones names.
const NAMED_FUNCTIONS: usize = 4;
/// Libraries whose kernels a dry run does not compile: the beginning of their functions' names, and the reason.
static NOT_COMPILED: &[(&str, &str)] = &[
    ("flashinfer.", "Kernels of FlashInfer were not compiled, because nvcc is missing"),
    ("sglang.", "Kernels of SGLang were not compiled, because nvcc is missing"),
    ("deep_gemm.", "Kernels of DeepGEMM were left out for other ones, because the CUDA toolkit is missing"),
    ("cutlass.", "Kernels of CUTLASS's Python DSL were not compiled, because no kernel runs"),
];

/// The functions that a dry run lacks and its program called: those of CUDA, and those that were not compiled.
fn missing_functions(functions: &[MissingFunction]) -> Vec<String> {
    let is_of = |prefix: &'static str| move |function: &&MissingFunction| function.name.starts_with(prefix);
    let is_of_cuda = |function: &&MissingFunction| !NOT_COMPILED.iter().any(|(prefix, _)| is_of(prefix)(function));
    let cuda: Vec<_> = functions.iter().filter(is_of_cuda).collect();
    let cuda_text = match cuda.len() {
        1 => "The simulation lacks a function that the program called".to_owned(),
        count => format!("The simulation lacks {} functions that the program called", count_text(count as u64)),
    };
    let kernels = NOT_COMPILED
        .iter()
        .map(|(prefix, text)| ((*text).to_owned(), functions.iter().filter(is_of(prefix)).collect()));
    let texts = iter::once((cuda_text, cuda)).chain(kernels).filter(|(_, functions)| !functions.is_empty());
    let sentence = |(text, functions): (String, Vec<&MissingFunction>)| {
        format!("{text}: {}. Memory that they take is missing.", named_functions(&functions))
    };
    texts.map(sentence).collect()
}

/// The first functions with the numbers of their calls, and how many others there are.
fn named_functions(functions: &[&MissingFunction]) -> String {
    let named = functions.iter().take(NAMED_FUNCTIONS).map(|MissingFunction { name, calls }| {
        let name = NOT_COMPILED.iter().find_map(|(prefix, _)| name.strip_prefix(prefix)).unwrap_or(name);
        if *calls <= 1 { name.to_owned() } else { format!("{name} ({} calls)", count_text(*calls)) }
    });
    let mut names: Vec<String> = named.collect();
    if functions.len() > NAMED_FUNCTIONS {
        names.push(format!("{} more", count_text((functions.len() - NAMED_FUNCTIONS) as u64)));
    }
    names.join(", ")
}

/// The GPU, and the process if there are several.
fn owner(device: &DeviceSummary, name: Option<&str>) -> String {
    let gpu = device_name(device);
    name.map_or(gpu.clone(), |name| format!("{name}, {gpu}"))
}

fn end_mark(summary: &Summary) -> VerdictStatus {
    let is_incomplete = summary.losses.values().any(|count| *count > 0) || summary.run.unrecorded_processes > 0;
    match summary.run.exit.success() {
        Some(false) => VerdictStatus::Failed,
        None if !is_snapshot(&summary.processes) => VerdictStatus::Warning,
        _ if is_incomplete => VerdictStatus::Warning,
        _ => VerdictStatus::Good,
    }
}

/// Whether the diagnostic rules saw the whole program: without losses, and with PyTorch's blocks.
fn is_examined(summary: &Summary, device: &DeviceSummary) -> bool {
    let is_whole = summary.losses.values().all(|count| *count == 0) && summary.run.unrecorded_processes == 0;
    is_whole && device.source == "torch" && !is_snapshot(&summary.processes) && summary.problems.is_empty()
}

/// How many issues there are, and what the fix of the first brings.
fn issues_text(process: &ProcessSummary) -> String {
    let Some(first) = process.issues.first() else { return String::new() };
    let count = match process.issues.len() {
        1 => "1 issue".to_owned(),
        n => format!("{n} issues, first"),
    };
    let saving = first.saves_bytes.map(|bytes| format!("; its fix lowers the peak by {}", size_text(bytes)));
    format!("{count}: {}{}.", first.rule, saving.unwrap_or_default())
}

/// Why the request failed, in bytes.
fn lack(oom: &OomSummary) -> String {
    match (oom.device_free_bytes, oom.refused_by_pytorch) {
        (Some(free), true) => format!(
            "PyTorch's own limit (set_per_process_memory_fraction) refused it at {} reserved; the device had {} free.",
            size_text(oom.in_use.totals.reserved_bytes),
            size_text(free)
        ),
        (Some(free), false) => match limit_text(oom) {
            Some(limit) => format!("{} free within a limit{}: {limit}.", size_text(free), short_text(oom)),
            None => format!("{} free on the device{}.", size_text(free), short_text(oom)),
        },
        (None, _) => String::new(),
    }
}

/// The sentence about fragmentation, from the replayed allocator settings. `rest` has words for the part after the
/// request.
fn fragmentation(oom: &OomSummary, what_if: &WhatIfSummary, rest: &str) -> String {
    let settings = &what_if.settings;
    if what_if.mismatch.is_some() || settings.is_empty() || oom.reserved_but_unallocated_bytes == 0 {
        return String::new();
    }
    if let Some(setting) = settings.iter().find(|setting| setting.step_fits == Some(true)) {
        return format!("Fragmentation: with {}, the request and {rest} fit.", setting.setting);
    }
    if let Some(setting) = settings.iter().find(|setting| setting.fits == Some(true)) {
        return match setting.step_short_bytes {
            Some(short) => format!(
                "Not only fragmentation: with {}, the request fits, and {rest} is {} short.",
                setting.setting,
                size_text(short)
            ),
            None => {
                format!("With {}, this request succeeds; whether {rest} fits is unknown.", setting.setting)
            }
        };
    }
    match settings.iter().all(|setting| setting.fits == Some(false)) {
        true if settings.len() == 1 => {
            "Not fragmentation: 1 other allocator setting replayed, it fails too.".to_owned()
        }
        true => format!("Not fragmentation: {} other allocator settings replayed, all fail.", settings.len()),
        false => String::new(),
    }
}

/// How many processes were not recorded: `1 process not recorded`. `None` if all were.
pub fn not_recorded(summary: &Summary) -> Option<String> {
    match summary.run.unrecorded_processes {
        0 => None,
        1 => Some("1 process not recorded".to_owned()),
        count => Some(format!("{} processes not recorded", count_text(count))),
    }
}

/// Formats the request: `200 MiB for Adam.exp_avg of head.weight` or `200 MiB (as large as head.weight)`.
pub fn request(oom: &OomSummary) -> String {
    let what = match (&oom.requested_for, &oom.as_large_as) {
        (Some(name), _) => format!(" for {name}"),
        (None, Some(name)) => format!(" (as large as {name})"),
        (None, None) => String::new(),
    };
    format!("{}{what}", size_text(oom.requested_bytes))
}

/// How much the free memory is short of the request: `, 474 MiB short`, or with the bytes that PyTorch requests for it.
pub fn short_text(oom: &OomSummary) -> String {
    let Some(short) = oom.short_bytes else { return String::new() };
    let of = match oom.segment_bytes == oom.requested_bytes {
        true => String::new(),
        false => format!(" of the {} that PyTorch requests from the driver for it", size_text(oom.segment_bytes)),
    };
    format!(", {} short{of}", size_text(short))
}

/// The bytes that a limit on this process leaves and holds back. `None` without a limit.
pub fn limit_text(oom: &OomSummary) -> Option<String> {
    let held_back = oom.held_back_bytes?;
    let held = oom.in_use.totals.reserved_bytes.saturating_add(oom.outside_pytorch_bytes);
    let left = held.saturating_add(oom.device_free_bytes?);
    Some(format!(
        "a library (such as HAMi-core) leaves the allocations of this process {}; it holds back {} that the device has \
         free",
        size_text(left),
        size_text(held_back)
    ))
}

/// The sentence of the verdict about a preallocated pool, whose size is not what the program uses. `None` without one.
pub fn preallocated_text(device: &DeviceSummary) -> Option<String> {
    let (pool, preallocated) =
        device.pools.iter().find_map(|pool| pool.preallocated_bytes.map(|bytes| (pool, bytes)))?;
    let share = device.total_bytes.map(|total| format!(" ({} of the device)", share_text(preallocated, total)));
    let used = match pool.used_peak_bytes {
        Some(used) => format!("the program used at most {} of it", size_text(used)),
        None => "how much of it the program used is not recorded (memtrace --pools read)".to_owned(),
    };
    let (library, size) = (&pool.library, size_text(preallocated));
    Some(format!("{size}{} is the pool that {library} preallocates: {used}.", share.unwrap_or_default()))
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}
