//! A program cannot detect memtrace.
//!
//! The state that it sees of itself is the same, byte for byte, before, during and after its use of CUDA. A program
//! that does not use CUDA has one small library more in memory, and no other difference.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::process::{Command, Output};

use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_trace::options::{Cpu, ENV, Options, Stacks};

const NONE: &[&str] = &[];
const LIBRARY: &str = "libmemtrace_interpose.so";

/// Runs a command with and without memtrace. Requires the same output and exit status, and returns the output and the
/// run.
#[track_caller]
fn same(traced: TracedProgram) -> (Output, Run) {
    let traced = traced.option("--quiet");
    let (alone, run) = (traced.run_alone(), traced.run());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&alone.stdout), text(&run.output.stdout));
    assert_eq!(text(&alone.stderr), text(&run.output.stderr));
    assert_eq!(alone.status, run.output.status);
    (alone, run)
}

/// Like [`same`], for a program that does not use CUDA: there must be no trace either.
#[track_caller]
fn same_and_silent<S: AsRef<OsStr>>(command: &[S]) -> Output {
    let (alone, run) = same(TracedProgram::command(command));
    assert!(run.traces().is_empty());
    assert_eq!(run.manifest()["processes"].as_array().map(Vec::len), Some(0));
    alone
}

#[test]
fn the_state_of_a_program_with_cuda_is_unchanged() {
    let programs = ProgramFolder::new();
    let options = [vec!["-DCUDA".to_owned()], linked_with("libcudart.so.12"), vec!["-lm".to_owned()]].concat();
    let program = programs.program("host/state.c", "state", &options);
    let (alone, run) = same(with_simcuda(&[program.as_os_str(), "".as_ref(), "two words".as_ref()]));
    assert_eq!(alone.status.code(), Some(3));
    assert_eq!(events(&run.trace()).iter().filter(|e| e.result != 0).count(), 4, "two failures, each in both layers");
}

#[test]
fn errno_is_unchanged() {
    // The driver of this test never changes errno.
    let programs = ProgramFolder::new();
    programs.library("host/failing.c", "libcuda.so.1", NONE);
    let folder = format!("-L{}", programs.path("").display());
    let program = programs.program("host/state.c", "state", &["-DCUDA", folder.as_str(), "-l:libcuda.so.1", "-lm"]);
    let (alone, _) = same(TracedProgram::command(&[&program]).env("LD_LIBRARY_PATH", programs.path("")));
    let stdout = String::from_utf8_lossy(&alone.stdout);
    for line in [
        "too much: 2, errno 77, (nil)",
        "after open: 0, errno 2, then 2",
        "freed: 0, errno 78",
        "open right after a call: -1 No such file or directory",
        "bad pointer: 1, errno 79",
    ] {
        assert!(stdout.contains(line), "{line}: {stdout}");
    }
}

#[test]
fn the_state_of_a_program_without_cuda_is_unchanged() {
    let programs = ProgramFolder::new();
    let program = programs.program("host/state.c", "state", &["-lm"]);
    assert_eq!(same_and_silent(&[program.as_os_str(), "x".as_ref()]).status.code(), Some(3));
}

#[test]
fn the_state_and_gpu_of_a_pytorch_program_are_unchanged() {
    let (alone, run) = same(TracedProgram::python("host/state.py", &["a", "b c"]));
    let stdout = String::from_utf8_lossy(&alone.stdout);
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    assert!(stdout.contains("CUDA out of memory. Tried to allocate 64.00 GiB"), "{stdout}");
    assert!(events(&run.trace()).len() > 10);
}

#[test]
fn ordinary_programs_run_unchanged() {
    let programs = ProgramFolder::new();
    let source = memtrace_tests::traced_program::root().join("tests/programs/host/quiet.c");
    let object = |name: &str| programs.path(name);
    let compile =
        |name: &str| ["cc", "-O2", "-c", "-o"].map(PathBuf::from).into_iter().chain([object(name), source.clone()]);
    let alone = TracedProgram::command(&compile("alone.o").collect::<Vec<_>>()).run_alone();
    let run = TracedProgram::command(&compile("traced.o").collect::<Vec<_>>()).option("--quiet").run();
    assert!(alone.status.success() && run.output.status.success());
    assert!(run.output.stdout.is_empty() && run.output.stderr.is_empty() && run.traces().is_empty());
    assert_eq!(std::fs::read(object("alone.o")).unwrap(), std::fs::read(object("traced.o")).unwrap());

    same_and_silent(&["python3", "-c", "import json, socket, threading, ctypes; print(json.dumps({'a': 1}))"]);
    same_and_silent(&["python3", "-c", "import ctypes; print(ctypes.CDLL(None).getpid() > 0); raise SystemExit(5)"]);
    same_and_silent(&["sh", "-c", "seq 100000 | sort -rn | head -n 3; cat /no/such/file | wc -c; exit 4"]);
    same_and_silent(&["env", "-i", "/bin/sh", "-c", "echo alone $#"]);
    same_and_silent(&["git", "--version"]);
}

/// The memory mappings of a process, parsed from the output of `quiet`.
struct Mappings {
    /// (file or area, protection) of every named mapping except those of our library.
    named: Vec<(String, String)>,
    /// The number of our library's mappings.
    library: usize,
    /// The total size in bytes of the unnamed mappings: data without a file, and the loader's own data.
    anonymous: u64,
}

impl Mappings {
    fn of(stdout: &[u8]) -> Mappings {
        let mut mappings = Mappings { named: Vec::new(), library: 0, anonymous: 0 };
        for line in String::from_utf8_lossy(stdout).lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            let (start, end) = words[0].split_once('-').unwrap();
            match words.get(5) {
                Some(name) if name.ends_with(LIBRARY) => mappings.library += 1,
                Some(name) => mappings.named.push(((*name).to_owned(), words[1].to_owned())),
                None => mappings.anonymous += address(end) - address(start),
            }
        }
        mappings.named.sort();
        mappings
    }
}

#[test]
fn a_program_without_cuda_only_loads_one_small_library() {
    let programs = ProgramFolder::new();
    let program = programs.program("host/quiet.c", "quiet", NONE);
    let traced = TracedProgram::command(&[&program]).option("--quiet");
    let (alone, run) = (traced.run_alone(), traced.run());
    let (alone, traced) = (Mappings::of(&alone.stdout), Mappings::of(&run.output.stdout));
    assert_eq!(alone.library, 0);
    assert!(traced.library > 0, "the library is there");
    assert_eq!(alone.named, traced.named);
    // The library's data without a file is address space. Two thirds of it are the heap's reserve, which is not touched
    // here.
    let more = traced.anonymous - alone.anonymous;
    assert!(more < 896 << 10, "{more} bytes");
    assert!(run.traces().is_empty());
}

/// The path of the preloaded library as the launcher puts it into `LD_PRELOAD`.
fn library() -> PathBuf {
    let run = TracedProgram::command(&["sh", "-c", "printf %s \"$LD_PRELOAD\""]).option("--quiet").run();
    String::from_utf8(run.output.stdout).unwrap().split(':').next().unwrap().into()
}

/// The number of connections that a command with our library makes to the launcher's address.
fn connections(mut command: Command) -> usize {
    let token = format!("test{:08x}{:x}", std::process::id(), std::ptr::from_ref(&command).addr());
    let address = SocketAddr::from_abstract_name(format!("memtrace-{token}")).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    listener.set_nonblocking(true).unwrap();
    let options = Options { cpu: Cpu::Never, stacks: Stacks::None, ..Options::new(token) };
    let mut child = command.env("LD_PRELOAD", library()).env(ENV, options.encode()).spawn().unwrap();
    let mut count = 0;
    loop {
        let ended = child.try_wait().unwrap();
        match listener.accept() {
            // The test closes the connection without an answer. The program must continue.
            Ok(connection) => {
                drop(connection);
                count += 1;
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => match ended {
                Some(status) => {
                    assert!(status.success());
                    return count;
                }
                None => std::thread::sleep(std::time::Duration::from_millis(1)),
            },
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn only_programs_with_cuda_connect_and_retry_with_exponential_backoff() {
    let programs = ProgramFolder::new();
    let quiet = programs.program("host/quiet.c", "quiet", NONE);
    let mut command = Command::new(quiet);
    command.stdout(std::process::Stdio::null());
    assert_eq!(connections(command), 0);

    let program = programs.program_over_bare_driver("process/process.c", "process");
    let mut command = Command::new(program);
    command.args(["some", "100"]).env("LD_LIBRARY_PATH", programs.path(""));
    // 400 events: the first attempt is at the first event, the next ones after 1, 2, 4, ... 256 further events.
    assert_eq!(connections(command), 1 + 9);
}

#[test]
fn the_library_depends_only_on_the_c_library() {
    let output = Command::new("readelf").arg("-d").arg(library()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let needed: Vec<&str> =
        text.lines().filter(|l| l.contains("(NEEDED)")).filter_map(|l| l.split(['[', ']']).nth(1)).collect();
    // Any further library would have to exist in every container; without it no traced program would start there.
    assert_eq!(needed, ["libc.so.6"]);
}
