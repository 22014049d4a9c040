//! Reads facts about a process from `/proc`. Any file may be missing (hidden, process gone), and every read has a size
//! limit.
//!
//! procfs-core parses `stat`. docs/decisions/009-launcher-crates.md says why this module reads and parses the other
//! files itself.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use memtrace_analysis::load::Workload;
use procfs_core::FromRead;
use procfs_core::process::Stat;
use rustix::process::Pid;
use serde_json::{Map, Value, json};

use crate::bounded_read::read_limited;
use crate::workload;

/// The maximum length of the figures of a process, in bytes.
const STAT_LIMIT: u64 = 4096;
/// The maximum length of a command line, in bytes.
const COMMAND_LIMIT: u64 = 64 * 1024;
/// The maximum length of a list of children, in bytes.
const CHILDREN_LIMIT: u64 = 256 * 1024;
/// The maximum length of a list of mappings, in bytes.
const MAPPINGS_LIMIT: u64 = 16 * 1024 * 1024;
/// The maximum length of an environment, in bytes.
const ENVIRONMENT_LIMIT: u64 = 1024 * 1024;

/// The `/proc` folder of one process.
#[derive(Debug)]
pub(crate) struct ProcessDir {
    path: PathBuf,
    /// Whether the process sees the same thread ids as the launcher. False for a process in a pid namespace of its own.
    same_namespace: bool,
}

impl ProcessDir {
    /// The folder of process `pid`, an id in the launcher's pid namespace.
    pub(crate) fn of(pid: u32) -> ProcessDir {
        let path = PathBuf::from(format!("/proc/{pid}"));
        let levels = |dir: &str| {
            let status = read_limited(&format!("{dir}/status"), 64 * 1024).ok()?;
            let line =
                String::from_utf8_lossy(&status).lines().find_map(|l| l.strip_prefix("NSpid:").map(str::to_owned))?;
            Some(line.split_whitespace().count())
        };
        let same_namespace = match (levels(&path.to_string_lossy()), levels("/proc/self")) {
            (Some(theirs), Some(ours)) => theirs == ours,
            // The kernel has no `NSpid` (before 4.1) or `/proc` is hidden. Thread names are then not read.
            _ => false,
        };
        ProcessDir { path, same_namespace }
    }

    fn read(&self, name: &str, limit: u64) -> Option<Vec<u8>> {
        read_limited(&self.path.join(name), limit).ok()
    }

    /// The kernel's name of a thread. `None` when the thread is gone or the process has a pid namespace of its own.
    pub(crate) fn thread_name(&self, tid: u32) -> Option<String> {
        if !self.same_namespace {
            return None;
        }
        let name = self.read(&format!("task/{tid}/comm"), 64)?;
        Some(String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned())
    }

    /// The kernel's name of the process. `None` when it is gone.
    pub(crate) fn name(&self) -> Option<String> {
        let name = self.read("comm", 64)?;
        Some(String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned())
    }

    /// The kernel's names of all threads. Empty without permission.
    pub(crate) fn thread_names(&self) -> Vec<String> {
        let threads = std::fs::read_dir(self.path.join("task")).into_iter().flatten().flatten();
        let names = threads.filter_map(|thread| read_limited(&thread.path().join("comm"), 64).ok());
        names.map(|name| String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned()).collect()
    }

    /// The `status` of all threads. Empty without permission.
    pub(crate) fn thread_statuses(&self) -> Vec<String> {
        let threads = std::fs::read_dir(self.path.join("task")).into_iter().flatten().flatten();
        let statuses = threads.filter_map(|thread| read_limited(&thread.path().join("status"), 64 * 1024).ok());
        statuses.map(|status| String::from_utf8_lossy(&status).into_owned()).collect()
    }

    /// The fields of `/proc/PID/stat`.
    fn stat(&self) -> Option<Stat> {
        parse_stat(&self.read("stat", STAT_LIMIT)?)
    }

    /// When the process started, in clock ticks since boot. Together with the pid it identifies the process uniquely.
    pub(crate) fn start_time(&self) -> Option<u64> {
        Some(self.stat()?.starttime)
    }

    /// The `wait(2)` status word of a process that has ended and is not yet collected.
    ///
    /// `None` unless the process started at `start_time`, in clock ticks since boot.
    pub(crate) fn zombie_status(&self, start_time: u64) -> Option<i32> {
        // For a user without permission the kernel shows the status 0. Such a user may not read this link either. A
        // zombie has no such link.
        if std::fs::read_link(self.path.join("exe")).is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied) {
            return None;
        }
        let stat = self.stat()?;
        let has_ended = stat.state == 'Z' && stat.starttime == start_time;
        has_ended.then_some(stat.exit_code?)
    }

    /// The command line.
    pub(crate) fn command_line(&self) -> Vec<String> {
        self.list("cmdline", COMMAND_LIMIT)
    }

    /// When the process started, in nanoseconds since the Unix epoch.
    pub(crate) fn start_epoch_ns(&self) -> Option<u64> {
        crate::host::boot_ticks_to_epoch_ns(self.stat()?.starttime)
    }

    /// The letter of the state, for example `T` for stopped.
    pub(crate) fn state(&self) -> Option<char> {
        Some(self.stat()?.state)
    }

    fn list(&self, name: &str, limit: u64) -> Vec<String> {
        let Some(bytes) = self.read(name, limit) else { return Vec::new() };
        let bytes = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
        if bytes.is_empty() {
            return Vec::new();
        }
        bytes.split(|b| *b == 0).map(|s| String::from_utf8_lossy(s).into_owned()).collect()
    }

    /// The path of a file in this `/proc` folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The processes that its threads started and of which it is still the parent.
    pub(crate) fn children(&self) -> Vec<u32> {
        let threads = std::fs::read_dir(self.path.join("task")).into_iter().flatten().flatten();
        let lists = threads.filter_map(|thread| read_limited(&thread.path().join("children"), CHILDREN_LIMIT).ok());
        lists
            .flat_map(|list| {
                let list = String::from_utf8_lossy(&list).into_owned();
                list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
            })
            .collect()
    }

    /// The content of `maps`. `None` without permission or when the process has no mappings.
    pub(crate) fn mappings(&self) -> Option<String> {
        // A process that has ended and is not yet collected has an empty list.
        self.read("maps", MAPPINGS_LIMIT)
            .map(|maps| String::from_utf8_lossy(&maps).into_owned())
            .filter(|m| !m.is_empty())
    }

    /// The path of its executable. `None` without permission.
    pub(crate) fn executable(&self) -> Option<PathBuf> {
        std::fs::read_link(self.path.join("exe")).ok()
    }

    /// The environment variables with which it was started. `None` without permission, when the process has ended, or
    /// while it executes another program.
    pub(crate) fn variables(&self) -> Option<Vec<String>> {
        let variables = self.list("environ", ENVIRONMENT_LIMIT);
        // An address space without an environment is one that `execve` still builds.
        if variables.is_empty() && self.stat()?.env_end.is_none_or(|end| end == 0) {
            return None;
        }
        // The list of a process that has ended is empty. While this link can be read, the process has not ended.
        self.executable().map(|_| variables)
    }

    /// Whether the process exists and is more than an exit status.
    pub(crate) fn exists(&self) -> bool {
        self.state().is_some_and(|state| !matches!(state, 'Z' | 'X'))
    }

    /// The content of `/proc/PID/status`.
    pub(crate) fn status(&self) -> Option<String> {
        self.read("status", 64 * 1024).map(|status| String::from_utf8_lossy(&status).into_owned())
    }

    /// The identity of its network namespace, as the target of a link. `None` without permission.
    pub(crate) fn network(&self) -> Option<PathBuf> {
        std::fs::read_link(self.path.join("ns/net")).ok()
    }

    /// Whether its address space has a limit (`RLIMIT_AS`).
    pub(crate) fn has_address_limit(&self) -> bool {
        let limits = self.read("limits", 64 * 1024).unwrap_or_default();
        let limits = String::from_utf8_lossy(&limits);
        let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"));
        line.and_then(|line| line.split_whitespace().next()).is_some_and(|soft| soft != "unlimited")
    }

    /// Whether its `/proc` files belong to this user. False while it runs as another user.
    pub(crate) fn is_of_our_user(&self) -> bool {
        let uid = rustix::process::geteuid();
        std::fs::metadata(&self.path).is_ok_and(|meta| meta.uid() == uid.as_raw())
    }

    /// Whether it belongs to another user, and this process is not root.
    pub(crate) fn is_of_another_user(&self) -> bool {
        !self.is_of_our_user() && !rustix::process::geteuid().is_root()
    }

    /// The pod, container, Slurm job and user of the process `pid`, whose folder this is.
    pub(crate) fn workload(&self, pid: u32) -> Workload {
        let environment = self.environment();
        workload::of_recorded(pid, &|name| environment.get(name)?.as_str().map(str::to_owned))
    }

    /// The environment variables that describe a training process, with their values at its start.
    fn environment(&self) -> Map<String, Value> {
        let pairs = self.list("environ", ENVIRONMENT_LIMIT);
        let pairs = pairs.iter().filter_map(|p| p.split_once('=')).filter(|(name, _)| is_of_interest(name));
        pairs
            .map(|(name, value)| (name.to_owned(), Value::from(value.chars().take(4096).collect::<String>())))
            .collect()
    }

    /// The info object of a trace, which describes the recorded process. `pid` is its process id.
    pub(crate) fn info(&self, pid: u32, workload: &Workload) -> Value {
        let stat = self.stat();
        let exe = std::fs::read_link(self.path.join("exe")).ok();
        let cwd = std::fs::read_link(self.path.join("cwd")).ok();
        json!({
            "memtrace": env!("CARGO_PKG_VERSION"),
            "pid": pid,
            "ppid": stat.as_ref().and_then(|stat| u32::try_from(stat.ppid).ok()),
            "argv": self.command_line(),
            "cwd": cwd.map(|p| p.to_string_lossy().into_owned()),
            "exe": exe.map(|p| p.to_string_lossy().into_owned()),
            "start_ns": stat.and_then(|stat| crate::host::boot_ticks_to_epoch_ns(stat.starttime)),
            "env": self.environment(),
            "workload": workload,
            "host": crate::host::name(),
        })
    }
}

/// Whether a variable describes the process's place in a job or its memory settings, and is not a secret.
fn is_of_interest(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "RAY_JOB_ID",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "PYTHONHASHSEED",
    ];
    const PREFIXES: &[&str] = &[
        "SLURM_",
        "OMPI_COMM_WORLD_",
        "PMI_",
        "PMIX_RANK",
        "CUDA_",
        "NVIDIA_",
        "PYTORCH_",
        "TORCH",
        "NCCL_",
        "XLA_",
        "JAX_",
    ];
    const SECRETS: &[&str] =
        &["TOKEN", "JWT", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "KEY", "AUTH", "COOKIE", "PRIVATE"];
    let is_named = NAMES.contains(&name) || PREFIXES.iter().any(|p| name.starts_with(p));
    (is_named || workload::is_variable(name)) && !SECRETS.iter().any(|s| name.contains(s))
}

/// The running processes that descend from a process.
pub(crate) fn descendants(ancestor: Pid) -> Vec<Pid> {
    let mut children: HashMap<Pid, Vec<Pid>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        let Some((pid, parent)) = pid.and_then(|pid| Some((pid, parent(pid)?))) else { continue };
        children.entry(parent).or_default().push(pid);
    }
    let (mut found, mut todo) = (Vec::new(), vec![ancestor]);
    while let Some(parent) = todo.pop() {
        let own = children.remove(&parent).unwrap_or_default();
        found.extend_from_slice(&own);
        todo.extend(own);
    }
    found
}

/// The parent of a process that has not ended.
fn parent(pid: Pid) -> Option<Pid> {
    let stat = parse_stat(&read_limited(&format!("/proc/{}/stat", pid.as_raw_nonzero()), STAT_LIMIT).ok()?)?;
    Pid::from_raw(stat.ppid).filter(|_| !matches!(stat.state, 'Z' | 'X'))
}

/// Parses `/proc/PID/stat`. `None` when the content is cut off.
fn parse_stat(bytes: &[u8]) -> Option<Stat> {
    // The name of a process may contain parentheses. procfs-core finds its end in the same way, and slices around it
    // without a check.
    let end = bytes.iter().rposition(|b| *b == b')')?;
    let (name, rest) = (bytes.get(..end)?, bytes.get(end + 1..)?);
    let is_complete = name.first()?.is_ascii_digit() && name.contains(&b'(') && matches!(rest, [b' ', b'A'..=b'z', ..]);
    is_complete.then(|| Stat::from_read(bytes).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_describes_this_process() {
        let dir = ProcessDir::of(std::process::id());
        let info = dir.info(std::process::id(), &Workload::default());
        assert_eq!(info["pid"], std::process::id());
        assert!(info["argv"][0].as_str().unwrap().contains("memtrace"));
        assert!(info["start_ns"].as_u64().unwrap() > 1_600_000_000_000_000_000);
        let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        assert!(dir.thread_name(tid).is_some());
        assert_eq!(info["ppid"], std::os::unix::process::parent_id());
    }

    #[test]
    fn stat_is_parsed_whatever_the_name_and_wherever_it_ends() {
        let stat = std::fs::read("/proc/self/stat").unwrap();
        let (before, after) = (stat.iter().position(|b| *b == b'('), stat.iter().rposition(|b| *b == b')'));
        let (before, after) = (&stat[..before.unwrap()], &stat[after.unwrap() + 1..]);
        for name in [&b""[..], b") Z 1 (", b"((", b"a\nb 1", b"\xff\xfe)", "é)".as_bytes()] {
            let stat = [before, b"(", name, b")", after].concat();
            let parsed = parse_stat(&stat).unwrap();
            assert_eq!(parsed.ppid.cast_unsigned(), std::os::unix::process::parent_id());
            assert!(parsed.starttime > 0 && parsed.exit_code.is_some());
            for len in 0..stat.len() {
                parse_stat(&stat[..len]);
            }
        }
        for bad in
            [&b"("[..], b")", b"()", b"1 ()", b"1 () ", b"(1 ) R", b"1)x R (", b"1 (a)\xff\xff R", b"1) R", b"1) R ("]
        {
            assert!(parse_stat(bad).is_none());
        }
    }

    #[test]
    fn a_missing_process_gives_empty_values() {
        let dir = ProcessDir::of(u32::MAX >> 1);
        assert_eq!(dir.thread_name(1), None);
        assert_eq!(dir.start_time(), None);
        assert!(dir.info(1, &Workload::default())["argv"].as_array().unwrap().is_empty());
    }

    #[test]
    fn secrets_are_left_out() {
        assert!(is_of_interest("SLURM_PROCID") && is_of_interest("RANK") && is_of_interest("POD_NAME"));
        assert!(!is_of_interest("SLURM_JWT") && !is_of_interest("HOME") && !is_of_interest("NVIDIA_API_KEY"));
    }
}
