//! The process to attach to: whether it can be recorded, and where its functions are.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use memtrace_trace::options::ENV;
use object::elf::PT_LOAD;
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol};

use super::tracee::Memory;
use crate::message::WithHelp;
use crate::proc::ProcessDir;
use crate::running;

/// Functions of CPython at whose beginning the thread holds the GIL and no lock of the C library. None of them takes a
/// floating-point argument.
const SAFE_FUNCTIONS: [&str; 20] = [
    "PyEval_SaveThread",
    "PyErr_CheckSignals",
    "PyObject_Malloc",
    "PyObject_Free",
    "PyMem_Malloc",
    "PyCallable_Check",
    "PyTuple_New",
    "PyList_New",
    "PyDict_New",
    "PyDict_SetItem",
    "PyObject_GetAttr",
    "PyObject_Vectorcall",
    "PyObject_Call",
    "PyObject_IsTrue",
    "PyLong_FromLong",
    "PyLong_FromSsize_t",
    "PyType_GenericAlloc",
    "PyObject_GC_Del",
    "_PyObject_GC_New",
    "_PyEval_EvalFrameDefault",
];

/// `PY_VERSION_HEX` of the first version that has `sys.remote_exec`.
const FIRST_VERSION: u64 = 0x030e_0000;
/// How many bytes at the beginning of a function are compared with its file.
const COMPARED_BYTES: usize = 16;

/// What the injection needs to know about a process.
#[derive(Debug)]
pub(crate) struct TracedProcess {
    pub(super) pid: u32,
    /// The interpreter, if Python has `sys.remote_exec`.
    pub(super) interpreter: Option<PathBuf>,
    /// The environment with which the process was started: `NAME=VALUE`.
    pub(super) variables: Vec<String>,
    /// The addresses at which the process may be interrupted.
    pub(super) safe_points: Vec<u64>,
    /// Functions of the C library.
    pub(super) dlopen: u64,
    pub(super) dlsym: u64,
    pub(super) dlerror: u64,
    pub(super) errno_location: u64,
    /// The address of a `syscall` instruction.
    pub(super) syscall: u64,
}

/// One line of `/proc/PID/maps`.
struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
    is_executable: bool,
    path: Vec<u8>,
}

fn mappings(pid: u32) -> anyhow::Result<Vec<Mapping>> {
    let text = fs::read(format!("/proc/{pid}/maps")).map_err(|_| not_permitted(pid))?;
    let parse = |line: &[u8]| {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let mut next = || fields.next().and_then(|field| std::str::from_utf8(field).ok());
        let (start, end) = next()?.split_once('-')?;
        let (protection, offset) = (next()?, next()?);
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (is_executable, (start, end), offset) = (protection.contains('x'), (hex(start)?, hex(end)?), hex(offset)?);
        let path = fields.nth(2).unwrap_or_default().trim_ascii_start().to_vec();
        Some(Mapping { start, end, offset, is_executable, path })
    };
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// A loaded ELF object with its functions.
struct LoadedFile {
    bytes: Vec<u8>,
    bias: u64,
}

impl LoadedFile {
    fn read(pid: u32, file: &Path, base: &Mapping) -> anyhow::Result<LoadedFile> {
        let cannot = || format!("cannot read {} of process {pid}", file.display());
        let bytes = fs::read(file).with_context(cannot)?;
        let elf = ElfFile64::<Endianness>::parse(&*bytes).with_context(cannot)?;
        let (endian, headers) = (elf.endian(), elf.elf_program_headers());
        let load = |header: &&_| ProgramHeader::p_type(*header, endian) == PT_LOAD;
        let first = headers.iter().find(load).with_context(cannot)?;
        // The first segment of an object is mapped from the page of its offset.
        let lowest = first.p_vaddr(endian) & !0xfff;
        let bias = (base.start - base.offset).wrapping_sub(lowest.wrapping_sub(first.p_offset(endian) & !0xfff));
        Ok(LoadedFile { bytes, bias })
    }

    /// The addresses of exported functions, `None` for those that do not exist or differ in memory.
    fn functions<const N: usize>(&self, names: [&str; N], memory: &Memory) -> [Option<u64>; N] {
        let mut found = [None; N];
        let Ok(elf) = ElfFile64::<Endianness>::parse(&*self.bytes) else { return found };
        for symbol in elf.dynamic_symbols().filter(|symbol| symbol.is_definition()) {
            let Some(index) = symbol.name().ok().and_then(|name| names.iter().position(|one| *one == name)) else {
                continue;
            };
            let address = symbol.address().wrapping_add(self.bias);
            if self.is_same(&elf, symbol.address(), address, memory)
                && let Some(place) = found.get_mut(index)
            {
                *place = Some(address);
            }
        }
        found
    }

    /// The version of Python, as `PY_VERSION_HEX` has it. Python before 3.11 does not export it.
    fn version(&self, memory: &Memory) -> Option<u64> {
        let [address] = self.functions(["Py_Version"], memory);
        let mut bytes = [0; 8];
        memory.read(address?, &mut bytes).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }

    /// Whether the process has the bytes of the file at the beginning of a function.
    fn is_same(&self, elf: &ElfFile64<'_>, in_file: u64, address: u64, memory: &Memory) -> bool {
        let endian = elf.endian();
        let of_file = elf.elf_program_headers().iter().find_map(|header| {
            let at = in_file.checked_sub(header.p_vaddr(endian)).filter(|at| *at < header.p_filesz(endian))?;
            let start = (header.p_offset(endian) + at) as usize;
            (header.p_type(endian) == PT_LOAD).then(|| self.bytes.get(start..start + COMPARED_BYTES))?
        });
        let mut here = [0; COMPARED_BYTES];
        of_file.is_some_and(|bytes| memory.read(address, &mut here).is_ok() && here == bytes)
    }
}

impl TracedProcess {
    /// Checks that a process can be recorded, and finds its functions. `library` is the library to load.
    ///
    /// The error says what prevents it, and has the fix.
    pub(super) fn examine(pid: u32, library: &Path) -> anyhow::Result<TracedProcess> {
        check(pid, library)?;
        let mappings = mappings(pid)?;
        let named = |matches: &dyn Fn(&[u8]) -> bool| {
            mappings.iter().find(|mapping| !mapping.path.is_empty() && matches(file_name(&mapping.path)))
        };
        let memory = Memory::of(pid).map_err(|_| not_permitted(pid))?;
        let in_root = |mapping: &Mapping| {
            let path = OsStr::from_bytes(mapping.path.strip_prefix(b"/").unwrap_or(&mapping.path));
            PathBuf::from(format!("/proc/{pid}/root")).join(path)
        };
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
            in_root(python)
        };
        let python = LoadedFile::read(pid, &file, python)?;
        let safe_points = python.functions(SAFE_FUNCTIONS, &memory);
        let version = python.version(&memory);
        let safe_points: Vec<u64> = safe_points.into_iter().flatten().collect();
        if safe_points.is_empty() {
            bail!(WithHelp::new(
                format!("cannot attach to process {pid}: it does not run CPython"),
                "name the process of Python itself, not of a shell or a launcher that has started it"
            ));
        }
        if named(&|name| name.starts_with(b"libc10.so")).is_none() {
            bail!(WithHelp::new(
                format!("cannot attach to process {pid}: it has not imported PyTorch"),
                "attach after `import torch`, or start the program with: memtrace -- COMMAND"
            ));
        }
        const LOADER: [&str; 4] = ["dlopen", "dlsym", "dlerror", "__errno_location"];
        let of_c_library = LoadedFile::read(pid, &in_root(c_library), c_library)?.functions(LOADER, &memory);
        // Before glibc 2.34, they are in a library of their own.
        let of_loader = match named(&|name| name.starts_with(b"libdl.so.2") || name.starts_with(b"libdl-2.")) {
            Some(mapping) => LoadedFile::read(pid, &in_root(mapping), mapping)?.functions(LOADER, &memory),
            None => [None; 4],
        };
        let function = |index: usize| {
            let at = |functions: &[Option<u64>; 4]| functions.get(index).copied().flatten();
            let found = at(&of_c_library).or_else(|| at(&of_loader));
            found.with_context(|| format!("process {pid} has no function {}", LOADER[index]))
        };
        let syscall = mappings.iter().filter(|mapping| mapping.path == b"[vdso]").chain([c_library]);
        let syscall = syscall
            .chain(mappings.iter().filter(|mapping| mapping.path == c_library.path && mapping.is_executable))
            .find_map(|mapping| find_syscall(&memory, mapping));
        Ok(TracedProcess {
            pid,
            interpreter: version.and_then(|version| interpreter(version, &executable)),
            variables: ProcessDir::of(pid).variables().unwrap_or_default(),
            safe_points,
            dlopen: function(0)?,
            dlsym: function(1)?,
            dlerror: function(2)?,
            errno_location: function(3)?,
            syscall: syscall.context("the process has no system call instruction")?,
        })
    }
}

/// The interpreter that can ask a process of this version of Python (`PY_VERSION_HEX`) and this executable to run a script.
fn interpreter(version: u64, executable: &Path) -> Option<PathBuf> {
    // Another program that embeds Python does not understand Python's arguments.
    let name = executable.file_name()?.to_str()?.strip_prefix("python")?;
    let is_python = name.chars().all(|letter| letter.is_ascii_digit() || ".td".contains(letter));
    (version >= FIRST_VERSION && is_python).then(|| executable.to_owned())
}

/// The address of a `syscall` instruction in this mapping.
fn find_syscall(memory: &Memory, mapping: &Mapping) -> Option<u64> {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    if !mapping.is_executable {
        return None;
    }
    let mut bytes = vec![0; (mapping.end - mapping.start).min(8 << 20) as usize];
    memory.read(mapping.start, &mut bytes).ok()?;
    bytes.windows(2).position(|pair| pair == SYSCALL).map(|at| mapping.start + at as u64)
}

/// The value of a field of `/proc/PID/status`.
fn status_field(pid: &str, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

/// What prevents recording and can be known without tracing.
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

/// The reason for a refusal and its fix, from the value of ptrace_scope, from whether this process has CAP_SYS_PTRACE and
/// from the `Seccomp` field of its status.
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
            "the kernel does not permit to trace it: it may have more privileges or have forbidden it (PR_SET_DUMPABLE)",
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

    #[test]
    #[expect(clippy::disallowed_macros, reason = "a test says that it was skipped")]
    fn cpython_exports_each_public_safe_function() {
        // `PyObject_Vectorcall` is a function of the library since 3.11.
        let script = "import sys, ctypes\nif sys.version_info < (3, 11): sys.exit()\n\
            print(*[name for name in sys.argv[1:] if not hasattr(ctypes.pythonapi, name)])";
        let public = SAFE_FUNCTIONS.iter().filter(|name| !name.starts_with('_'));
        let output = std::process::Command::new("python3").args(["-c", script]).args(public).output();
        let Ok(output) = output.inspect_err(|e| println!("skipped: python3: {e}")) else { return };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "");
    }

    #[test]
    fn functions_of_this_process_are_found_in_its_files() {
        let pid = std::process::id();
        let mappings = mappings(pid).unwrap();
        let c_library = mappings.iter().find(|one| file_name(&one.path).starts_with(b"libc.so.6")).unwrap();
        let path = PathBuf::from(OsStr::from_bytes(&c_library.path));
        let memory = Memory::of(pid).unwrap();
        let found =
            LoadedFile::read(pid, &path, c_library).unwrap().functions(["getppid", "no_such_function"], &memory);
        // SAFETY: a C string.
        let expected = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"getppid".as_ptr()) };
        assert_eq!(found, [Some(expected.addr() as u64), None]);
        let code = mappings.iter().find(|one| one.path == c_library.path && one.is_executable).unwrap();
        assert!(find_syscall(&memory, code).is_some());
    }
}
