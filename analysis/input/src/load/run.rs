//! A run: a folder of traces with its manifest, or a single trace.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use memtrace_trace::file::Budget;

use super::device_samples::{DEVICE_SAMPLES_FILE, DeviceSamples};
use super::host_samples::{HOST_SAMPLES_FILE, HostSamples};
use super::manifest::{MANIFEST_FILE, Manifest, ManifestIndex};
use super::problem::Problem;
use super::process::Process;
use super::process_names::process_names;
use super::recording::TraceRecording;
use super::snapshot;
use super::snapshot_set::SnapshotSet;
use super::unrecorded::unrecorded;
use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::recording::Recording;
use crate::symbols::{ObjectReport, SYMBOLS_FILE, Search, Symbols};

/// The extension of trace files.
const TRACE_EXTENSION: &str = "mtr";

/// An open run.
#[derive(Debug)]
pub struct Run {
    path: PathBuf,
    manifest: Manifest,
    processes: Vec<Process>,
    problems: Vec<Problem>,
    native: NativeCode,
    device_samples: DeviceSamples,
    host_samples: HostSamples,
}

/// The symbols of the native code in stacks, and how complete they are.
#[derive(Debug, Default)]
struct NativeCode {
    symbols: Symbols,
    objects: Vec<ObjectReport>,
    /// Whether it contains symbols that the run folder does not have.
    has_new_symbols: bool,
}

impl Run {
    /// Makes a run from processes in memory.
    pub fn from_processes(path: &Path, manifest: Manifest, processes: Vec<Process>) -> Run {
        Run {
            path: path.to_owned(),
            manifest,
            processes,
            problems: Vec::new(),
            native: NativeCode::default(),
            device_samples: DeviceSamples::default(),
            host_samples: HostSamples::default(),
        }
    }

    /// The same run with these samples of its devices.
    pub fn with_device_samples(self, device_samples: DeviceSamples) -> Run {
        Run { device_samples, ..self }
    }

    /// The same run with these samples of main memory.
    pub fn with_host_samples(self, host_samples: HostSamples) -> Run {
        Run { host_samples, ..self }
    }

    /// The path that was opened: a run folder, a trace or a snapshot.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest that the launcher wrote; empty without `run.json`.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The processes that recorded anything, by rank, then by process id.
    pub fn processes(&self) -> &[Process] {
        &self.processes
    }

    /// A unique name for each of [`Self::processes`]: `rank3`, or the process id.
    pub fn process_names(&self) -> Vec<String> {
        process_names(&self.processes)
    }

    /// The samples of the devices' memory; empty without any.
    pub fn device_samples(&self) -> &DeviceSamples {
        &self.device_samples
    }

    /// The samples of main memory. Empty if there are none.
    pub fn host_samples(&self) -> &HostSamples {
        &self.host_samples
    }

    /// Files that could not be used.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// The objects whose code occurs in stacks, and how much is known about each.
    pub fn native_objects(&self) -> &[ObjectReport] {
        &self.native.objects
    }

    /// The symbols of native code, if the run folder does not have all of them. Else `None`.
    pub fn new_symbols(&self) -> Option<&Symbols> {
        self.native.has_new_symbols.then_some(&self.native.symbols)
    }
}

/// Opens a run folder, a `.mtr` file, a PyTorch snapshot or a folder of snapshots.
///
/// A folder opens if at least one of its traces does. The others are listed in [`Run::problems`].
pub fn open_run(path: impl AsRef<Path>) -> Result<Run> {
    open_run_with_progress(path, &mut |_, _| {})
}

/// Opens a run as [`open_run`] does. While a snapshot is read, `progress` receives the bytes read so far and the total.
pub fn open_run_with_progress(path: impl AsRef<Path>, progress: &mut dyn FnMut(u64, u64)) -> Result<Run> {
    let path = path.as_ref();
    if is_folder(path)? {
        let folder = RunFolder::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
        if is_recorded(&folder)? {
            return open_folder(&folder);
        }
        let mut set = SnapshotSet::default();
        set.add_folder(&folder, progress)?;
        return Ok(Run { path: path.to_owned(), ..of_snapshots(set)? });
    }
    if !is_trace(path)? {
        let (recording, problems) = snapshot::open(path, progress)?;
        let process = Process::new(path, Box::new(recording), &Manifest::default());
        return Ok(Run { problems, ..Run::from_processes(path, Manifest::default(), vec![process]) });
    }
    let budget = Budget::default();
    let mut recording = TraceRecording::open_within(path, &budget)?;
    // A trace inside a run folder has its manifest and symbols beside it.
    let folder = path.parent().map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    let folder = folder.and_then(|folder| RunFolder::open(folder).ok());
    let manifest =
        folder.as_ref().and_then(|folder| Manifest::read_within(folder, &budget).ok().flatten()).unwrap_or_default();
    let mut problems = Vec::new();
    problems.extend(problem_of(path, &recording));
    let name = Path::new(path.file_name().unwrap_or_default());
    problems.extend(recording.read_kept_state_in(folder.as_ref(), name, &budget).err());
    let recordings = std::slice::from_mut(&mut recording);
    let native = symbolize(folder.as_ref(), &manifest, recordings, &budget, &mut problems);
    let process = Process::new(path, Box::new(recording), &manifest);
    let (device_samples, host_samples) =
        folder.map(|folder| samples(&folder, &budget, &mut problems)).unwrap_or_default();
    Ok(Run {
        path: path.to_owned(),
        manifest,
        processes: vec![process],
        problems,
        native,
        device_samples,
        host_samples,
    })
}

/// Opens several snapshots and folders of snapshots as one run: a launch with a process for each rank. A single path
/// opens as [`open_run`] does.
///
/// # Errors
///
/// If one cannot be read, if two are of one rank, and for recorded runs beside others.
pub fn open_runs(paths: &[PathBuf], progress: &mut dyn FnMut(u64, u64)) -> Result<Run> {
    if let [only] = paths {
        return open_run_with_progress(only, progress);
    }
    let mut set = SnapshotSet::default();
    for path in paths {
        let is_recorded = if is_folder(path)? {
            let folder = RunFolder::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
            let is_recorded = is_recorded(&folder)?;
            if !is_recorded {
                set.add_folder(&folder, progress)?;
            }
            is_recorded
        } else {
            let is_trace = is_trace(path)?;
            if !is_trace {
                set.add_file(path, progress)?;
            }
            is_trace
        };
        if is_recorded {
            return Err(Error::Job {
                reason: format!("cannot read {} beside others: it is a recorded run", path.display()),
                help: "pass it alone, or one folder that has the run folders of a job".to_owned(),
            });
        }
    }
    of_snapshots(set)
}

fn is_folder(path: &Path) -> Result<bool> {
    let metadata = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::NoSuchRun { path: path.to_owned() },
        _ => Error::io(format!("cannot open {}", path.display()))(e),
    })?;
    Ok(metadata.is_dir())
}

/// Whether memtrace recorded into this folder: it has traces or a manifest.
fn is_recorded(folder: &RunFolder) -> Result<bool> {
    let names = folder.file_names().map_err(Error::io(format!("cannot list {}", folder.path().display())))?;
    Ok(names.iter().any(|name| is_trace_name(name) || name == MANIFEST_FILE))
}

fn is_trace_name(name: &OsString) -> bool {
    Path::new(name).extension().is_some_and(|e| e == TRACE_EXTENSION)
}

fn of_snapshots(set: SnapshotSet) -> Result<Run> {
    let (path, processes, problems) = set.into_processes()?;
    Ok(Run { problems, ..Run::from_processes(&path, Manifest::default(), processes) })
}

/// Whether to read a file as a trace: by its first bytes, else by its extension. Other files are read as snapshots,
/// whose reader reports what is wrong.
fn is_trace(path: &Path) -> Result<bool> {
    let cannot = || Error::io(format!("cannot open {}", path.display()));
    let mut file = memtrace_trace::file::untrusted::open(path).map_err(cannot())?;
    let mut head = [0; 4];
    let head = match file.read(&mut head) {
        Ok(n) => &head[..n],
        Err(e) => return Err(cannot()(e)),
    };
    Ok(head == &memtrace_trace::file::MAGIC[..4] || path.extension().is_some_and(|e| e == TRACE_EXTENSION))
}

/// Opens a run folder that already has a descriptor.
pub fn open_folder(folder: &RunFolder) -> Result<Run> {
    let path = folder.path();
    let mut problems = Vec::new();
    let budget = Budget::default();
    let mut manifest = match Manifest::read_within(folder, &budget) {
        Ok(manifest) => manifest.unwrap_or_default(),
        Err(e) => {
            problems.push(Problem { path: path.join(MANIFEST_FILE), text: e.reason() });
            Manifest::default()
        }
    };
    manifest.add_reports(unrecorded(folder));
    manifest.check_traces(folder);
    let file_names = folder.file_names().map_err(Error::io(format!("cannot list {}", path.display())))?;
    let traces: Vec<OsString> = file_names.into_iter().filter(is_trace_name).collect();
    if traces.is_empty() {
        // Without a manifest this is no run folder. If the manifest lists a recording, its trace is missing.
        let is_complete = manifest.state.is_some() && manifest.processes.is_empty();
        let path = path.to_owned();
        let without_end = manifest.without_end().map(str::to_owned).into_iter();
        let reasons = without_end.chain(manifest.not_recorded().into_iter().map(|one| one.text));
        return Err(match is_complete {
            true => Error::NothingRecorded { path, reasons: reasons.collect() },
            false => Error::NoTraces { path },
        });
    }
    let (mut recordings, mut paths) = (Vec::new(), Vec::new());
    for name in &traces {
        match TraceRecording::open_in(folder, name, &budget) {
            Ok(mut recording) => {
                problems.extend(problem_of(&path.join(name), &recording));
                problems.extend(recording.read_kept_state_in(Some(folder), name.as_ref(), &budget).err());
                recordings.push(recording);
                paths.push(path.join(name));
            }
            Err(e) => problems.push(Problem { path: path.join(name), text: e.reason() }),
        }
    }
    let native = symbolize(Some(folder), &manifest, &mut recordings, &budget, &mut problems);
    let opened = paths.into_iter().zip(recordings);
    let index = ManifestIndex::of(&manifest);
    let mut processes: Vec<Process> =
        opened.map(|(path, recording)| Process::of(&path, Box::new(recording), &index)).collect();
    if processes.is_empty() {
        let example = problems.last().map(|p| format!("{}: {}", p.path.display(), p.text)).unwrap_or_default();
        return Err(Error::NoReadableTrace { path: path.to_owned(), count: traces.len(), example });
    }
    processes.sort_by_key(|p| (p.rank().unwrap_or(u32::MAX), p.pid()));
    let (device_samples, host_samples) = samples(folder, &budget, &mut problems);
    Ok(Run { path: path.to_owned(), manifest, processes, problems, native, device_samples, host_samples })
}

/// The samples of a folder. A file that cannot be read is a problem.
fn samples(folder: &RunFolder, budget: &Budget, problems: &mut Vec<Problem>) -> (DeviceSamples, HostSamples) {
    let mut problem = |file: &str, error: std::io::Error| {
        problems.push(Problem { path: folder.path().join(file), text: error.to_string() });
    };
    let devices = DeviceSamples::read_within(folder, budget).unwrap_or_else(|error| {
        problem(DEVICE_SAMPLES_FILE, error);
        DeviceSamples::default()
    });
    let host = HostSamples::read_within(folder, budget).unwrap_or_else(|error| {
        problem(HOST_SAMPLES_FILE, error);
        HostSamples::default()
    });
    (devices, host)
}

/// The problem of a trace that needs more memory or work than the budget has. Its reader leaves the rest out.
fn problem_of(path: &Path, recording: &TraceRecording) -> Option<Problem> {
    let (exceeded, count) = recording.exceeded()?;
    let text = format!("{exceeded}; {count} of its definitions and frames are left out");
    Some(Problem { path: path.to_owned(), text })
}

/// Symbolizes the native frames of all traces: from the run folder's symbols, else from the objects' own files. Opens
/// no file if there are no native frames.
fn symbolize(
    folder: Option<&RunFolder>,
    manifest: &Manifest,
    recordings: &mut [TraceRecording],
    budget: &Budget,
    problems: &mut Vec<Problem>,
) -> NativeCode {
    if recordings.iter().all(|r| r.definitions().native_frames.is_empty()) {
        return NativeCode::default();
    }
    let mut symbols = Symbols::default();
    if let Some(folder) = folder {
        match Symbols::read_within(folder, budget) {
            Ok(stored) => symbols = stored.unwrap_or_default(),
            Err(e) => problems.push(Problem { path: folder.path().join(SYMBOLS_FILE), text: e.reason() }),
        }
    }
    let search = Search {
        directory: manifest.directory.as_ref().map(PathBuf::from),
        ended_ns: manifest.ended_ns,
        ..Search::local_machine()
    };
    let definitions = || recordings.iter().map(|r| r.definitions());
    let has_new_symbols = symbols.resolve_missing(definitions(), &search, budget);
    let objects = symbols.report(definitions());
    for recording in recordings {
        recording.symbolize(&symbols, budget);
    }
    NativeCode { symbols, objects, has_new_symbols }
}
