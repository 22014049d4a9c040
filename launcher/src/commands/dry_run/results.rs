//! Reads what a try led to: the summary in its run folder, and the end of its output.
//!
//! The program of the try may have left anything in their place. So only regular files are read, never through links,
//! and up to a size. This happens in a sandboxed worker ([`crate::sandbox`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use memtrace_analysis::load::{SimulatedGpus, ValueException};
use memtrace_analysis::report::{DeviceSummary, KvCacheSummary};
use memtrace_analysis::{RunFolder, Summary};
use memtrace_trace::file::untrusted;
use serde::{Deserialize, Serialize};

/// The largest summary that is read, in bytes.
const MAX_SUMMARY: u64 = 64 << 20;
/// The bytes at the end of the output that are examined.
const END: u64 = 64 << 10;
/// The last lines of the output that are shown, and how many characters of each.
const SHOWN_LINES: usize = 15;
const SHOWN_CHARACTERS: usize = 400;
/// How many characters of a name are kept.
const MAX_NAME: usize = 4096;

/// The results of a try.
#[derive(Serialize, Deserialize, Default, Debug)]
pub(super) struct Results {
    /// The device with the least memory left. `None` if the program failed before it used one.
    pub(super) worst: Option<Figures>,
    /// The engine that serves models, on the device with the smallest KV cache. `None` for other programs.
    pub(super) server: Option<Server>,
    /// Why a server that has failed does not fit, if that is known.
    pub(super) does_not_fit: Option<String>,
    /// The out-of-memory error that the report explains.
    pub(super) out_of_memory: Option<OutOfMemory>,
    /// The exception that a value can be the reason of.
    pub(super) exception: Option<ValueException>,
    /// By how many bytes the peak can be higher, because workspaces of cuDNN are estimates.
    pub(super) above_bytes: u64,
    /// Whether values that nothing computed decided a size.
    pub(super) has_guessed_sizes: bool,
    /// The last lines of the output.
    pub(super) last_lines: Vec<String>,
    /// Why the summary is missing.
    pub(super) problem: Option<String>,
}

/// The peak of a device.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
pub(super) struct Figures {
    pub(super) device: i64,
    pub(super) allocated_bytes: u64,
    pub(super) reserved_bytes: u64,
    pub(super) total_bytes: u64,
    /// The phase of the peak.
    pub(super) phase: String,
    /// The free memory of the device at the most memory in use, by all libraries and processes.
    pub(super) free_bytes: u64,
}

/// The KV cache of an engine that serves models.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
pub(super) struct Server {
    pub(super) engine: String,
    pub(super) weights_bytes: u64,
    /// 0 without a KV cache.
    pub(super) kv_cache_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kv_cache_tokens: Option<u64>,
    /// How many requests of the longest length have room at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) concurrency: Option<f64>,
}

/// An out-of-memory error.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
pub(super) struct OutOfMemory {
    pub(super) requested_bytes: u64,
    pub(super) phase: String,
    pub(super) location: String,
}

impl Results {
    /// The results of a try that could not be read.
    pub(super) fn unknown(problem: String) -> Results {
        Results { problem: Some(problem), ..Results::default() }
    }
}

/// Reads the summary of the run folder `run` in `folder`, and the end of the output.
pub(super) fn read(folder: &RunFolder, run: &str, context_bytes: u64, output: &File) -> Results {
    let (summary, problem) = match summary(folder, run) {
        Ok(summary) => (Some(summary), None),
        // The program recorded nothing, or was not started.
        Err(e) if e.kind() == io::ErrorKind::NotFound => (None, None),
        Err(e) => (None, Some(format!("cannot read {}: {e}", folder.path().join(run).join(SUMMARY).display()))),
    };
    let (start, end) = end_of(output).unwrap_or_default();
    Results {
        worst: summary.as_ref().and_then(|summary| worst_device(summary, context_bytes)),
        server: summary.as_ref().and_then(server),
        does_not_fit: summary.as_ref().and_then(server_problem).or_else(|| refusal(&end)),
        out_of_memory: summary.as_ref().and_then(out_of_memory),
        exception: summary.as_ref().and_then(exception),
        above_bytes: simulated(summary.as_ref())
            .and_then(|one| Some(one.workspaces.as_ref()?.above_bytes))
            .unwrap_or(0),
        has_guessed_sizes: simulated(summary.as_ref())
            .is_some_and(|one| one.guessed_sizes.iter().any(|size| size.is_assumed)),
        last_lines: last_lines(start, &end),
        problem,
    }
}

/// Messages with which engines refuse to start for lack of memory, and what reports say of them. vLLM: `request_memory`
/// and `check_enough_kv_cache_memory`; SGLang: `profile_max_num_token` and `init_memory_pool`.
const REFUSALS: [(&str, &str); 6] = [
    ("less than desired GPU memory utilization", "less memory is free than the share that vLLM may use"),
    ("No available memory for the cache blocks", "vLLM has no memory for a KV cache"),
    ("larger than the available KV cache memory", "the KV cache has no room for a request of the longest length"),
    (
        "larger than the maximum number of tokens that can be stored in",
        "the KV cache has no room for a request of the longest length",
    ),
    ("Please try to increase --mem-fraction-static", "SGLang has no memory for a KV cache"),
    ("Loading a model of this size needs more GPU memory", "SGLang has no memory for the weights"),
];

/// The message in the end of the output with which an engine refuses to start.
fn refusal(end: &str) -> Option<String> {
    let found = REFUSALS.iter().find(|(message, _)| end.contains(message));
    found.map(|(_, text)| (*text).to_owned())
}

/// Why the engine in a summary has no KV cache.
fn server_problem(summary: &Summary) -> Option<String> {
    let mut servers = gpus(summary).filter_map(|device| device.server.as_ref());
    servers.find_map(|server| server.problem.as_deref()).map(name)
}

/// The engine in a summary, on the device with the smallest KV cache.
fn server(summary: &Summary) -> Option<Server> {
    let servers = gpus(summary).filter_map(|device| device.server.as_ref()).map(|server| {
        let cache = server.kv_cache.as_ref();
        Server {
            engine: name(&server.engine),
            weights_bytes: server.weights_bytes(),
            kv_cache_bytes: cache.map_or(0, |cache| cache.bytes),
            kv_cache_tokens: cache.and_then(|cache| cache.tokens),
            concurrency: cache.and_then(KvCacheSummary::concurrency),
        }
    });
    servers.min_by_key(|server| server.kv_cache_bytes)
}

/// The summary of a run.
const SUMMARY: &str = "summary.json";

fn summary(folder: &RunFolder, run: &str) -> io::Result<Summary> {
    let (owner, run) = (folder.stat()?.st_uid, folder.subfolder(run)?);
    let file = run.open_file_of(SUMMARY, owner)?;
    Summary::from_json(&untrusted::read(&file, MAX_SUMMARY)?).map_err(io::Error::other)
}

/// Where the end of a file begins, and the end.
fn end_of(output: &File) -> io::Result<(u64, String)> {
    let length = output.metadata()?.len();
    let (start, mut end) = (length.saturating_sub(END), Vec::new());
    end.resize((length - start) as usize, 0);
    // A process of the program that still runs may make it shorter.
    let read = output.read_at(&mut end, start)?;
    Ok((start, String::from_utf8_lossy(&end[..read]).into_owned()))
}

/// The last lines of a file whose end begins at `start`.
fn last_lines(start: u64, end: &str) -> Vec<String> {
    let lines: Vec<&str> = end.lines().collect();
    let first = lines.len().saturating_sub(SHOWN_LINES);
    let cut = |(number, line): (usize, &&str)| {
        let missing = if start > 0 && number == 0 { "..." } else { "" };
        match line.char_indices().nth(SHOWN_CHARACTERS) {
            Some((end, _)) => format!("{missing}{}... ({} more bytes)", &line[..end], line.len() - end),
            None => format!("{missing}{line}"),
        }
    };
    lines.iter().enumerate().skip(first).map(cut).collect()
}

/// A name in a summary, which can be of any length.
fn name(text: &str) -> String {
    text.chars().take(MAX_NAME).collect()
}

/// The GPUs of all processes.
fn gpus(summary: &Summary) -> impl Iterator<Item = &DeviceSummary> {
    summary.processes.iter().flat_map(|process| &process.devices).filter(|device| device.device >= 0)
}

fn worst_device(summary: &Summary, context_bytes: u64) -> Option<Figures> {
    let figures = gpus(summary).map(|device| {
        let (reserved_bytes, total_bytes) = (device.highest.reserved_bytes, device.total_bytes.unwrap_or(0));
        let used_bytes = device.device_memory.as_ref().map_or(0, |memory| memory.at_peak.used_bytes);
        // Kernels and libraries take memory beside the context and what PyTorch reserved.
        let used_bytes = used_bytes.max(reserved_bytes.saturating_add(context_bytes));
        Figures {
            device: device.device.into(),
            allocated_bytes: device.highest.allocated_bytes,
            reserved_bytes,
            total_bytes,
            phase: device.peak.as_ref().map_or("unknown", |peak| peak.phase.name()).to_owned(),
            free_bytes: total_bytes.saturating_sub(used_bytes),
        }
    });
    figures.min_by_key(|figures| (figures.free_bytes, std::cmp::Reverse(figures.allocated_bytes)))
}

/// The simulated GPUs of a summary.
fn simulated(summary: Option<&Summary>) -> Option<&SimulatedGpus> {
    summary?.run.simulated.as_ref()
}

/// The exception in a summary that a value can be the reason of.
fn exception(summary: &Summary) -> Option<ValueException> {
    summary.run.simulated.as_ref()?.exception.clone()
}

/// The out-of-memory error that a summary explains.
fn out_of_memory(summary: &Summary) -> Option<OutOfMemory> {
    let mut devices = summary.processes.iter().flat_map(|process| &process.devices);
    let oom = devices.find_map(DeviceSummary::explained_oom)?;
    Some(OutOfMemory {
        requested_bytes: oom.requested_bytes,
        phase: oom.in_use.phase.name().to_owned(),
        location: name(oom.requested_at.location.split(", ").next().unwrap_or_default()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_is_free_is_beside_all_memory_in_use() {
        let device = |used: Option<u64>| {
            let device_memory = used.map(|used| {
                let at = serde_json::json!({"used_bytes": used});
                serde_json::json!({"total_bytes": 1000, "at_peak": at, "at_end": at, "readings": 1, "over_time": [],
                    "other_processes": "unknown"})
            });
            let highest = serde_json::json!({"allocated_bytes": 500, "reserved_bytes": 600});
            let device = serde_json::json!({
                "device": 0, "total_bytes": 1000, "highest": highest, "device_memory": device_memory,
            });
            let json = serde_json::json!({"version": "2.0", "processes": [{"devices": [device]}]});
            Summary::from_json(json.to_string().as_bytes()).unwrap()
        };
        let free = |used| worst_device(&device(used), 100).unwrap().free_bytes;
        assert_eq!(free(Some(850)), 150);
        assert_eq!(free(Some(650)), 300, "the last reading is from before the peak");
        assert_eq!(free(None), 300);
    }

    #[test]
    fn only_the_end_of_the_output_is_read() {
        let lines = |write: &dyn Fn(&mut File)| {
            let mut file = tempfile::tempfile().unwrap();
            write(&mut file);
            let (start, end) = end_of(&file).unwrap();
            last_lines(start, &end)
        };
        assert_eq!(lines(&|_| {}), [""; 0]);
        assert_eq!(lines(&|file| file.write_all(b"a\nb\xff\n").unwrap()), ["a", "b\u{fffd}"]);
        let many = lines(&|file| (0..100_000).for_each(|line| writeln!(file, "{line}").unwrap()));
        assert_eq!((many.len(), many[14].as_str()), (SHOWN_LINES, "99999"));
        let long = lines(&|file| file.write_all(&[b'x'; 100_000]).unwrap());
        assert_eq!(
            long,
            [format!("...{}... ({} more bytes)", "x".repeat(SHOWN_CHARACTERS), END as usize - SHOWN_CHARACTERS)]
        );
        let sparse = lines(&|file| file.set_len(1 << 40).unwrap());
        assert_eq!(sparse.len(), 1, "a hole is not read");
    }

    #[test]
    fn only_a_regular_summary_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let read = || read(&RunFolder::open(folder.path()).unwrap(), "run", 0, &tempfile::tempfile().unwrap());
        assert!(read().problem.is_none(), "nothing was recorded");
        std::fs::create_dir(&run).unwrap();
        assert!(read().problem.is_none());
        std::fs::write(run.join(SUMMARY), "{").unwrap();
        assert!(read().problem.unwrap().contains(SUMMARY));
        std::fs::remove_file(run.join(SUMMARY)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", run.join(SUMMARY)).unwrap();
        assert!(read().problem.unwrap().contains("symbolic link"));
        std::fs::rename(&run, folder.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", &run).unwrap();
        assert!(read().problem.is_some(), "the run folder is a link");
    }
}
