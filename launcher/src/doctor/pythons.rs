//! Tests the Python interpreters on PATH.
//!
//! Each one is started under the recorder, prints facts about itself and calls one hook. Whether its frames can be read
//! is therefore tested, not looked up.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::file::Reader;

use super::report::{Check, PyTorch, Python};
use super::{probe, tested, torch};

/// The maximum number of interpreters that are tested.
const MAX_PYTHONS: usize = 24;
const TIMEOUT: Duration = Duration::from_secs(10);
/// The innermost frames that the stack of [`PROGRAM`] must have, innermost first.
const INNERMOST: [&str; 2] = ["allocates", "<module>"];

/// The test program. It runs in Python 2.7 and later and imports only `ctypes`.
const PROGRAM: &str = r#"
import sys
def fact(name, value):
    sys.stdout.write(name + "=" + value + "\n")
level = "" if sys.version_info[3] == "final" else sys.version_info[3]
fact("version", ".".join(map(str, sys.version_info[:3])) + level)
fact("implementation", getattr(getattr(sys, "implementation", None), "name", "cpython"))
build = ["free-threaded"] if "free-threading" in sys.version else []
build += ["debug"] if hasattr(sys, "gettotalrefcount") else []
fact("build", " ".join(build) or "release")
fact("executable", sys.executable)
fact("prefix", sys.prefix)
for line in open("/proc/self/maps"):
    path = line.split(None, 5)[-1].strip()
    if "/libpython" in path or "/libpypy" in path:
        fact("library", path)
        break
sys.stdout.flush()
import ctypes
report = ctypes.CDLL(None)["_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"]
report.restype = None
report.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint16]
def allocates():
    report(4096, 64, 0, 0, 0xff00)
allocates()
"#;

/// A Python interpreter to test.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Candidate {
    path: PathBuf,
    is_default: bool,
}

/// Finds all interpreters and tests each one. `folder` is empty and may be written to.
pub(super) fn pythons(folder: &Path) -> Vec<Python> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let candidates = candidates(&std::env::split_paths(&path).collect::<Vec<_>>());
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<(usize, PathBuf, Python)>> = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(candidate) = candidates.get(index) else { break };
                    let (real, python) = check_python(candidate, &folder.join(index.to_string()));
                    found.lock().unwrap_or_else(PoisonError::into_inner).push((index, real, python));
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(index, ..)| *index);
    // A shim may have turned out to be an interpreter that was already tested.
    let mut seen = Vec::new();
    found.retain(|(_, real, _)| {
        let is_new = !seen.contains(real);
        seen.push(real.clone());
        is_new
    });
    found.into_iter().map(|(.., python)| python).collect()
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// The interpreters to test, each program once.
///
/// First come the `python3` and `python` that PATH finds. Then come the other Pythons in these folders, and those of
/// pyenv's versions if its shims are on PATH.
fn candidates(folders: &[PathBuf]) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    for name in ["python3", "python"] {
        let first = folders.iter().map(|f| f.join(name)).find(|p| is_executable(p));
        all.extend(first.map(|path| Candidate { path, is_default: true }));
    }
    let listed = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
        let mut paths: Vec<PathBuf> = entries.filter(|p| is_python_name(p) && is_executable(p)).collect();
        paths.sort();
        paths
    };
    for folder in folders {
        all.extend(listed(folder).into_iter().map(|path| Candidate { path, is_default: false }));
        if folder.ends_with("shims")
            && let Some(root) = folder.parent()
        {
            let versions =
                std::fs::read_dir(root.join("versions")).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
            let mut bins: Vec<PathBuf> = versions.map(|v| v.join("bin")).collect();
            bins.sort();
            all.extend(bins.iter().flat_map(|bin| listed(bin)).map(|path| Candidate { path, is_default: false }));
        }
    }
    let mut seen = Vec::new();
    all.retain(|candidate| {
        // A shim is a script that runs one of the versions. Only the default shim adds information.
        let is_script = std::fs::File::open(&candidate.path).is_ok_and(|f| {
            let mut head = [0; 2];
            std::os::unix::fs::FileExt::read_exact_at(&f, &mut head, 0).is_ok() && &head == b"#!"
        });
        let same = (candidate.path.canonicalize().unwrap_or_default(), virtual_environment(&candidate.path));
        let is_new = (candidate.is_default || !is_script) && !seen.contains(&same);
        if is_new {
            seen.push(same);
        }
        is_new
    });
    all.truncate(MAX_PYTHONS);
    all
}

/// The virtual environment that contains a program. The same program is a different Python in each environment.
fn virtual_environment(path: &Path) -> Option<PathBuf> {
    let folder = path.parent()?.parent()?;
    folder.join("pyvenv.cfg").exists().then(|| folder.to_owned())
}

/// Whether this is a name such as `python`, `python3`, `python3.11`, `python3.13t` or `pypy3`, but not
/// `python3-config`.
fn is_python_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_bytes();
    ["python", "pypy"].iter().any(|kind| {
        name.strip_prefix(kind.as_bytes())
            .is_some_and(|rest| rest.iter().all(|b| b.is_ascii_digit() || b".td".contains(b)))
    })
}

/// Tests one interpreter. Also returns the path that the interpreter itself reports.
fn check_python(candidate: &Candidate, folder: &Path) -> (PathBuf, Python) {
    let command: Vec<OsString> =
        vec![candidate.path.clone().into(), "-E".into(), "-s".into(), "-S".into(), "-c".into(), PROGRAM.into()];
    let mut python = Python {
        path: candidate.path.display().to_string(),
        is_default: candidate.is_default,
        version: String::new(),
        implementation: String::new(),
        linkage: String::new(),
        build: String::new(),
        stacks: Check::unused("Python stacks", ""),
        pytorch: None,
    };
    let result = match probe::record(folder, &command, TIMEOUT) {
        Ok(result) => result,
        Err(e) => {
            python.stacks = Check::note("Python stacks", format!("cannot start a recording: {e}"));
            return (candidate.path.clone(), python);
        }
    };
    let fact = |name: &str| {
        let facts = result.stdout.lines().filter_map(|l| l.split_once('='));
        facts.filter(|(n, _)| *n == name).map(|(_, value)| value.to_owned()).next()
    };
    let Some(version) = fact("version") else {
        let reason = format!("it does not start: {}", result.failure_reason());
        python.stacks = downgrade_unless_default(
            candidate,
            Check::failed("Python stacks", reason, "reinstall it, or remove it from PATH"),
        );
        return (candidate.path.clone(), python);
    };
    let executable = fact("executable");
    python.implementation = fact("implementation").unwrap_or_default();
    python.build = fact("build").unwrap_or_default();
    python.linkage = fact("library").unwrap_or_else(|| "static".to_owned());
    python.pytorch = pytorch(&candidate.path, executable.as_deref(), fact("prefix"), &version);
    python.stacks = downgrade_unless_default(candidate, stacks(&python.implementation, &version, &result, folder));
    python.version = version;
    let program = executable.map_or_else(|| candidate.path.clone(), PathBuf::from);
    let real =
        if virtual_environment(&program).is_some() { program } else { program.canonicalize().unwrap_or(program) };
    (real, python)
}

/// Downgrades a failed check to a note for an interpreter that is not the default one.
fn downgrade_unless_default(candidate: &Candidate, check: Check) -> Check {
    if check.has_failed() && !candidate.is_default {
        return Check { status: super::report::CheckStatus::Note, ..check };
    }
    check
}

/// Checks the recorder's notices about Python frames, and that the recorded stack is the expected one.
fn stacks(implementation: &str, version: &str, result: &probe::ProbeResult, folder: &Path) -> Check {
    let name = "Python stacks";
    let supported = format!("use a release build of CPython {} with the GIL", tested::pythons());
    if implementation != "cpython" {
        return Check::failed(
            name,
            format!("{implementation} is not CPython, so memtrace cannot read its frames"),
            supported,
        );
    }
    let traces = probe::traces(&folder.join("run"));
    let Some(trace) = traces.first() else {
        let reason = format!("the test program recorded nothing: {}", result.failure_reason());
        return Check::note(name, reason).with_fix("install its ctypes module, which this check needs");
    };
    let notices = &trace.definitions().notices;
    match notices.iter().rev().find(|n| &*n.topic == "python" && n.status != NoticeStatus::Remark) {
        Some(notice) if notice.status == NoticeStatus::Off => {
            let reason = notice.text.split_once("no Python stacks: ").map_or(&*notice.text, |(_, reason)| reason);
            Check::failed(name, reason, supported)
        }
        Some(_) if !has_expected_stack(trace) => Check::failed(
            name,
            "the layout was verified, but the recorded stack differs from the actual stack",
            "report it with this output; until then record with --stacks native",
        ),
        Some(_) if tested::is_python_tested(version) => Check::ok(name, "layout verified, version tested"),
        Some(_) => Check::ok(name, "layout verified, version not tested"),
        None => Check::failed(name, "memtrace did not recognize the interpreter", supported),
    }
}

fn has_expected_stack(trace: &Reader) -> bool {
    let definitions = trace.definitions();
    let events = trace.events().flatten().flatten();
    events.map(|e| e.stack).any(|stack| {
        let names = definitions.walk(stack).map(|(_, frame)| frame.map_or("", |f| &*f.name));
        names.take(INNERMOST.len()).eq(INNERMOST)
    })
}

/// The PyTorch installed for this Python. `None` when there is none.
fn pytorch(path: &Path, executable: Option<&str>, prefix: Option<String>, version: &str) -> Option<PyTorch> {
    let minor = version.split('.').take(2).collect::<Vec<_>>().join(".");
    let of_program = |p: &Path| p.parent().and_then(Path::parent).map(Path::to_owned);
    let resolved = path.canonicalize().ok();
    let homes = [
        of_program(path),
        executable.map(Path::new).and_then(of_program),
        resolved.as_deref().and_then(of_program),
        prefix.map(PathBuf::from),
    ];
    let below = homes.into_iter().flatten().flat_map(|home| {
        [
            home.join(format!("lib/python{minor}/site-packages")),
            home.join(format!("local/lib/python{minor}/dist-packages")),
            home.join("lib/python3/dist-packages"),
        ]
    });
    let named = std::env::var_os("PYTHONPATH").unwrap_or_default();
    let user = std::env::var_os("HOME").map(|h| Path::new(&h).join(format!(".local/lib/python{minor}/site-packages")));
    let all = std::env::split_paths(&named).filter(|p| p.is_absolute()).chain(below).chain(user);
    all.map(|folder| folder.join("torch")).find_map(|folder| torch::in_folder(&folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(folder: &Path, name: &str, content: &[u8]) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let path = folder.join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn each_python_on_path_is_found_once() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let first = program(&a, "python3.11", b"\x7fELF 1");
        std::os::unix::fs::symlink(&first, a.join("python3")).unwrap();
        program(&a, "python3-config", b"#!/bin/sh");
        program(&a, "pythonic", b"\x7fELF");
        let other = program(&b, "python3.12", b"\x7fELF 2");
        let shims = dir.path().join("pyenv/shims");
        program(&shims, "python3", b"#!/bin/sh");
        let third = program(&dir.path().join("pyenv/versions/3.9.1/bin"), "python3.9", b"\x7fELF 3");
        let found = candidates(&[a.clone(), b, shims, dir.path().join("missing")]);
        let expected = [(a.join("python3"), true), (other, false), (third, false)];
        assert_eq!(found, expected.map(|(path, is_default)| Candidate { path, is_default }));
        assert_eq!(candidates(&[]), []);
    }
}
