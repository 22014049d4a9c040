//! The process to attach to: whether it can be recorded, and where its functions are.

use std::ffi::OsStr;
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use memtrace_trace::options::{self, ENV};

use super::arch::LOADER;
use super::loaded_file::{LoadedFile, Mapping, find_signal_return, mappings};
use super::loader_locks::LoaderLocks;
use super::tracee::Memory;
use crate::message::WithHelp;
use crate::proc::ProcessDir;
use crate::running;

/// The function of CPython that executes Python code.
const INTERPRETER_LOOP: &str = "_PyEval_EvalFrameDefault";
/// The function of the library that begins the recording.
const LIBRARY_FUNCTION: &str = "memtrace_attach";
/// Its variables for the injector.
const LIBRARY_VARIABLES: [&str; 2] = ["memtrace_attach_ready", "memtrace_attach_answer"];

/// `PY_VERSION_HEX` of the first version that has `sys.remote_exec`.
const FIRST_VERSION: u64 = 0x030e_0000;

/// The facts about a process that the injection needs.
#[derive(Debug)]
pub(crate) struct TracedProcess {
    pub(super) pid: u32,
    /// The interpreter, if Python has `sys.remote_exec`.
    pub(super) interpreter: Option<PathBuf>,
    /// The environment with which the process was started: `NAME=VALUE`.
    pub(super) variables: Vec<String>,
    /// The addresses of the function that executes Python code. From 3.14 on, it may only begin that: each instruction
    /// is a function of its own that jumps to the next one (`Python/ceval.c`, `Py_TAIL_CALL_INTERP`).
    pub(super) interpreter_loop: Range<u64>,
    /// The code of the file that has this function.
    pub(super) interpreter_code: Vec<Range<u64>>,
    /// The function `dlopen` of the C library.
    pub(super) dlopen: u64,
    /// The code to which signal handlers return.
    pub(super) return_from_signal: u64,
    pub(super) loader_locks: LoaderLocks,
    /// The limit of the main thread's stack, in bytes. `None` if there is none.
    pub(super) stack_limit: Option<u64>,
    /// The path of our library in the list of mapped files.
    pub(super) library: PathBuf,
}

/// Where the process has loaded our library.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadedLibrary {
    /// The function that begins the recording.
    pub(super) attach: u64,
    /// The variable that is 1 as soon as the function may be called.
    pub(super) ready: u64,
    /// The variable with the result of the latest call.
    pub(super) answer: u64,
}

impl TracedProcess {
    /// Checks that a process can be recorded, and finds its functions. `library` is the library to load.
    ///
    /// The error says what prevents it, and has the fix.
    pub(super) fn examine(pid: u32, library: &Path) -> anyhow::Result<TracedProcess> {
        check(pid, library)?;
        let mappings = mappings(pid).map_err(|_| not_permitted(pid))?;
        let named = |matches: &dyn Fn(&[u8]) -> bool| {
            mappings.iter().find(|mapping| !mapping.path.is_empty() && matches(mapping.file_name()))
        };
        let memory = Memory::of(pid).map_err(|_| not_permitted(pid))?;
        let Some(c_library) = named(&|name| name.starts_with(b"libc.so.6") || name.starts_with(b"libc-2.")) else {
            bail!(WithHelp::new(
                format!("cannot attach to process {pid}: it is not dynamically linked with glibc"),
                "memtrace records programs that use a dynamically linked Python"
            ));
        };
        let executable = fs::read_link(format!("/proc/{pid}/exe")).map_err(|_| not_permitted(pid))?;
        let main = mappings.iter().find(|mapping| mapping.path == executable.as_os_str().as_bytes());
        let python = named(&|name| name.starts_with(b"libpython3") && !name.starts_with(b"libpython3.so")).or(main);
        let python = python.context("cannot read the mappings of the process")?;
        let file = if python.path == executable.as_os_str().as_bytes() {
            PathBuf::from(format!("/proc/{pid}/exe"))
        } else {
            in_root(pid, python)
        };
        let code = mappings.iter().filter(|mapping| mapping.is_executable && mapping.path == python.path);
        let interpreter_code = code.map(|mapping| mapping.start..mapping.end).collect();
        let python = LoadedFile::read(pid, &file, python)?;
        let [interpreter_loop] = python.functions([INTERPRETER_LOOP], &memory);
        let Some(interpreter_loop) = interpreter_loop.filter(|range| !range.is_empty()) else {
            bail!(WithHelp::new(
                format!("cannot attach to process {pid}: it does not run CPython"),
                "name the process of Python itself, not of a shell or a launcher that has started it"
            ));
        };
        if named(&|name| name.starts_with(b"libc10.so")).is_none() {
            bail!(WithHelp::new(
                format!("cannot attach to process {pid}: it has not imported PyTorch"),
                "attach after `import torch`, or start the program with: memtrace -- COMMAND"
            ));
        }
        let dlopen = |mapping: &Mapping| {
            let [dlopen] = LoadedFile::read(pid, &in_root(pid, mapping), mapping)?.functions(["dlopen"], &memory);
            anyhow::Ok(dlopen.map(|range| range.start))
        };
        let mut found = dlopen(c_library)?;
        // Before glibc 2.34, it is in a library of its own.
        if let Some(mapping) = named(&|name| name.starts_with(b"libdl.so.2") || name.starts_with(b"libdl-2."))
            && found.is_none()
        {
            found = dlopen(mapping)?;
        }
        let loader = named(&|name| name.starts_with(LOADER) || name.starts_with(b"ld-2."));
        let locks = loader.and_then(|mapping| {
            let [variable] = LoadedFile::read(pid, &in_root(pid, mapping), mapping).ok()?.variables(["_rtld_global"]);
            variable.map(|range| LoaderLocks::find(&memory, range.start, range.end - range.start))
        });
        let return_from_signal = find_signal_return(&memory, &mappings, c_library);
        Ok(TracedProcess {
            pid,
            interpreter: version(&python, &memory).and_then(|version| interpreter(version, &executable)),
            variables: ProcessDir::of(pid).variables().unwrap_or_default(),
            interpreter_loop,
            interpreter_code,
            dlopen: found.with_context(|| format!("process {pid} has no function dlopen"))?,
            return_from_signal: return_from_signal.context("the C library of the process is not known")?,
            loader_locks: locks.unwrap_or_default(),
            stack_limit: stack_limit(pid),
            // The kernel shows mapped files by paths without links.
            library: fs::canonicalize(library).unwrap_or_else(|_| library.to_owned()),
        })
    }

    /// Where the process has our library. `None` if it has not loaded it.
    pub(super) fn loaded_library(&self, memory: &Memory) -> Option<LoadedLibrary> {
        let mappings = mappings(self.pid).ok()?;
        let first = mappings.iter().find(|mapping| mapping.path == self.library.as_os_str().as_bytes())?;
        let file = LoadedFile::read(self.pid, &in_root(self.pid, first), first).ok()?;
        let [attach] = file.functions([LIBRARY_FUNCTION], memory);
        let [ready, answer] = file.variables(LIBRARY_VARIABLES).map(|found| found.map(|range| range.start));
        Some(LoadedLibrary { attach: attach?.start, ready: ready?, answer: answer? })
    }
}

/// The soft limit of the stack, in bytes.
fn stack_limit(pid: u32) -> Option<u64> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max stack size"));
    line?.split_whitespace().next()?.parse().ok()
}

/// The file of a mapping, as the process sees it.
fn in_root(pid: u32, mapping: &Mapping) -> PathBuf {
    let path = OsStr::from_bytes(mapping.path.strip_prefix(b"/").unwrap_or(&mapping.path));
    PathBuf::from(format!("/proc/{pid}/root")).join(path)
}

/// The version of Python, as `PY_VERSION_HEX` has it. Python before 3.11 does not export it.
fn version(python: &LoadedFile, memory: &Memory) -> Option<u64> {
    let [variable] = python.variables(["Py_Version"]);
    memory.word(variable?.start).ok()
}

/// The interpreter that can ask a process of this version of Python (`PY_VERSION_HEX`) and this executable to run a
/// script.
fn interpreter(version: u64, executable: &Path) -> Option<PathBuf> {
    // Another program that embeds Python does not understand Python's arguments.
    let name = executable.file_name()?.to_str()?.strip_prefix("python")?;
    let is_python = name.chars().all(|letter| letter.is_ascii_digit() || ".td".contains(letter));
    (version >= FIRST_VERSION && is_python).then(|| executable.to_owned())
}

/// The value of a field of `/proc/PID/status`.
fn status_field(pid: &str, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

/// Checks for obstacles to recording that are known without tracing.
fn check(pid: u32, library: &Path) -> anyhow::Result<()> {
    let cannot = |why: &str| format!("cannot attach to process {pid}: {why}");
    let process = ProcessDir::of(pid);
    if !process.exists() {
        bail!(WithHelp::new(format!("there is no process {pid}"), "nvidia-smi lists the processes that use a GPU"));
    }
    let id = pid.to_string();
    if pid == std::process::id() {
        bail!(WithHelp::new(cannot("it is this memtrace"), "name the process of Python"));
    }
    let us = rustix::process::geteuid().as_raw().to_string();
    let users = status_field(&id, "Uid").unwrap_or_default();
    if users.split_whitespace().any(|user| user != us) {
        bail!(WithHelp::new(cannot("it belongs to another user"), "run memtrace as that user"));
    }
    if process.state() == Some('T') {
        bail!(WithHelp::new(cannot("it is stopped"), format!("resume it: kill -CONT {pid}")));
    }
    if let Some(tracer) = status_field(&id, "TracerPid").filter(|tracer| tracer != "0") {
        bail!(WithHelp::new(
            cannot(&format!("process {tracer} traces it")),
            "end the debugger, strace or other tracer first"
        ));
    }
    if status_field(&id, "x86_Thread_features").is_some_and(|features| features.contains("shstk")) {
        bail!(WithHelp::new(
            cannot("the processor guards its return addresses (shadow stacks)"),
            "start the program with: memtrace -- COMMAND"
        ));
    }
    let filters = |status: String| options::filters_in(&status);
    let ours = fs::read_to_string("/proc/self/status").map_or(0, filters);
    let statuses = process.thread_statuses();
    if statuses.into_iter().map(filters).any(|theirs| theirs > ours) {
        // Loading a library needs system calls that the filter may punish with the end of the process.
        bail!(WithHelp::new(
            cannot("it restricts its system calls (seccomp)"),
            "start the program with: memtrace -- COMMAND"
        ));
    }
    let namespace = |of: &str, kind: &str| fs::read_link(format!("/proc/{of}/ns/{kind}")).ok();
    if ["pid", "net"].iter().any(|kind| {
        let theirs = namespace(&id, kind);
        theirs.is_some() && theirs != namespace("self", kind)
    }) {
        bail!(WithHelp::new(
            cannot("it runs in a container"),
            "run memtrace attach inside that container, with the process id there"
        ));
    }
    if process.variables().is_some_and(|all| all.iter().any(|one| one.starts_with(&format!("{ENV}=")))) {
        bail!(WithHelp::new(
            cannot("it was started by memtrace"),
            format!("look at its recording with: memtrace live {pid}")
        ));
    }
    let recording =
        running::recordings().into_iter().find(|one| one.answer.processes.iter().any(|process| process.pid == pid));
    if let Some(recording) = recording {
        bail!(WithHelp::new(
            cannot(&format!("memtrace (process {}) records it already", recording.answer.pid)),
            format!("look at the recording with: memtrace live {pid}")
        ));
    }
    let seen = fs::metadata(Path::new(&format!("/proc/{pid}/root")).join(library.strip_prefix("/").unwrap_or(library)));
    let ours = fs::metadata(library)?;
    match seen {
        Ok(seen) if (seen.dev(), seen.ino()) == (ours.dev(), ours.ino()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Err(not_permitted(pid)),
        _ => Err(anyhow!(WithHelp::new(
            cannot(&format!("it does not see {}", library.display())),
            "run memtrace attach in the container or the root folder of the process"
        ))),
    }
}

/// Why the kernel does not permit to trace a process, with the fix.
pub(super) fn not_permitted(pid: u32) -> anyhow::Error {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    let has_capability = status_field("self", "CapEff")
        .and_then(|set| u64::from_str_radix(&set, 16).ok())
        .is_some_and(|set| set >> CAP_SYS_PTRACE & 1 != 0);
    let (why, fix) =
        reason(scope.as_deref().map(str::trim), has_capability, status_field("self", "Seccomp").as_deref());
    anyhow!(WithHelp::new(format!("cannot attach to process {pid}: {why}"), fix))
}

/// `CAP_SYS_PTRACE` of linux/capability.h.
const CAP_SYS_PTRACE: u32 = 19;

/// The reason for a refusal and its fix, from the value of ptrace_scope, from whether this process has CAP_SYS_PTRACE
/// and from the `Seccomp` field of its status.
fn reason(scope: Option<&str>, has_capability: bool, seccomp: Option<&str>) -> (&'static str, &'static str) {
    match (scope, has_capability) {
        (Some("3"), _) => (
            "the kernel forbids every process to trace another (kernel.yama.ptrace_scope is 3)",
            "only a restart of the machine changes that; start the program with: memtrace -- COMMAND",
        ),
        (Some("2"), false) => (
            "the kernel permits only administrators to trace (kernel.yama.ptrace_scope is 2)",
            "use sudo for root's processes, or: sudo sysctl kernel.yama.ptrace_scope=0",
        ),
        (Some("1"), false) => (
            "the kernel permits to trace only own children (kernel.yama.ptrace_scope is 1)",
            "permit it until the next restart: sudo sysctl kernel.yama.ptrace_scope=0",
        ),
        _ if seccomp == Some("2") => (
            "the kernel or the container's seccomp profile does not permit to trace it",
            "start the container with --cap-add=SYS_PTRACE",
        ),
        (_, false) => (
            "the kernel does not permit to trace it: it may have more privileges or have forbidden it \
             (PR_SET_DUMPABLE)",
            "start the program with: memtrace -- COMMAND",
        ),
        (_, true) => ("the kernel does not permit to trace it", "start the program with: memtrace -- COMMAND"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_of_the_kernel_has_its_reason_and_its_fix() {
        let why = |scope, capability, seccomp| reason(scope, capability, seccomp).0;
        assert!(why(Some("3"), true, None).contains("ptrace_scope is 3"));
        assert!(why(Some("2"), false, None).contains("ptrace_scope is 2"));
        assert!(why(Some("1"), false, Some("0")).contains("ptrace_scope is 1"));
        assert!(why(Some("1"), true, Some("2")).contains("seccomp"));
        assert!(why(None, false, Some("2")).contains("seccomp"));
        assert!(why(Some("0"), false, Some("0")).contains("PR_SET_DUMPABLE"));
    }

    #[test]
    fn only_an_interpreter_of_python_3_14_is_started() {
        let found = |version, path: &str| interpreter(version, Path::new(path)).is_some();
        assert!(found(0x030e_00f0, "/usr/bin/python3.14") && found(0x030f_00a1, "/opt/bin/python3.15t"));
        assert!(!found(0x030d_0bf0, "/usr/bin/python3.13"));
        assert!(!found(0x030e_00f0, "/usr/bin/blender") && !found(0x030e_00f0, "/usr/bin/python-server"));
    }
}
