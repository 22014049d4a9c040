//! Effects that `memtrace attach` must not have on the process: end its children, stop it, change its signals, take its
//! addresses.

use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::time::Duration;

use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::TracedProgram;
use memtrace_tests::versions::Versions;

use crate::attach::{Attached, Program};
use crate::launcher_support::*;

/// A program with the functions of `helper.c`, and a folder for recordings of it.
struct Helped {
    program: Program,
    folder: ProgramFolder,
    runs: usize,
}

const NO_OPTIONS: [&str; 0] = [];

impl Helped {
    /// Starts the program, which waits `pause` seconds for a line.
    fn start(versions: Versions, pause: impl Display) -> Helped {
        let folder = ProgramFolder::new();
        let helper = folder.library("attach/helper.c", "libhelper.so", &NO_OPTIONS);
        let arguments = [helper.to_str().unwrap(), &pause.to_string()];
        let program = Program::begin(TracedProgram::python("attach/helped.py", &arguments).on(versions));
        Helped { program, folder, runs: 0 }
    }

    fn ask(&mut self, line: &str) -> String {
        self.program.ask(line)
    }

    fn number(&mut self, line: &str) -> u64 {
        self.ask(line).parse().unwrap()
    }

    fn pid(&self) -> i32 {
        self.program.0.pid()
    }

    /// Attaches and detaches. `None` where the kernel does not permit to trace.
    fn attach(&mut self) -> Option<()> {
        let attached = self.begin()?;
        assert_eq!(self.ask("step"), "stepped");
        attached.detach();
        Some(())
    }

    fn begin(&mut self) -> Option<Attached> {
        self.runs += 1;
        Attached::start(self.pid(), &self.folder.path(&format!("run{}", self.runs)))
    }

    fn stop(mut self) {
        assert_eq!(self.ask("stop"), "stopped");
        assert!(self.program.0.child.wait().unwrap().success());
    }

    /// A field of `/proc/PID/status`.
    fn status(&self, name: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap().trim().to_owned()
    }

    /// Whether memtrace traces a thread.
    fn is_traced(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let statuses = threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("status")).ok());
        statuses.into_iter().any(|status| !status.contains("TracerPid:\t0\n"))
    }
}

fn children_that_are_forked_meanwhile_live(versions: Versions) {
    let mut helped = Helped::start(versions, 0.001);
    helped.ask("call slow_children");
    helped.ask("call start_forking");
    let mut failed = 0;
    for _ in 0..10 {
        let Some(attached) = helped.begin() else { return };
        failed += helped.number("forks");
        attached.detach();
    }
    wait_for(|| helped.number("call forked_children") > 100);
    helped.ask("call stop_forking");
    assert_eq!((failed, helped.number("call failed_children")), (0, 0));
    helped.stop();
}

fn a_thread_that_waits_for_a_child_with_the_same_memory_stops_no_other(versions: Versions) {
    let mut helped = Helped::start(versions, 0.001);
    helped.ask("call start_vfork");
    helped.ask("longest");
    // The child ends only afterwards, so neither attaching nor detaching may wait for it.
    let Some(()) = helped.attach() else { return };
    let longest = helped.number("longest");
    assert!(longest < 4000, "{longest} ms");
    helped.ask("call end_wait");
    helped.stop();
}

fn a_process_that_restricts_its_system_calls_is_refused_and_goes_on(versions: Versions) {
    let mut helped = Helped::start(versions, 0.001);
    assert_eq!(helped.ask("call forbid_writable_code"), "0");
    let output = output(&mut crate::attach::attach(helped.pid(), &helped.folder.path("run")));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("it restricts its system calls (seccomp)"), "{}", stderr(&output));
    assert_eq!(helped.ask("step"), "stepped");
    helped.stop();
}

fn attaching_makes_no_memory_that_is_writable_and_executable(versions: Versions) {
    let mut helped = Helped::start(versions, 0.001);
    assert_eq!(helped.ask("call forbid_writable_code"), "0");
    // The same filter for memtrace, so that it attaches.
    let library = std::ffi::CString::new(helped.folder.path("libhelper.so").to_str().unwrap()).unwrap();
    // SAFETY: two C strings. The library has no constructors.
    let forbid = unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
        let function = libc::dlsym(handle, c"forbid_writable_code".as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> i32>(function)
    };
    let mut command = crate::attach::attach(helped.pid(), &helped.folder.path("run"));
    // SAFETY: between fork and exec, the function only makes system calls.
    unsafe { command.pre_exec(move || if forbid() == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }) };
    let Some(attached) = Attached::of(command, helped.pid()) else { return };
    assert_eq!(helped.ask("step"), "stepped");
    attached.detach();
    helped.stop();
}

fn signals_are_blocked_ignored_and_handled_as_before(versions: Versions) {
    for mode in ["handle", "ignore", "block"] {
        let mut helped = Helped::start(versions, 0.001);
        helped.ask(&format!("trap {mode}"));
        let before = helped.ask("signals");
        let Some(()) = helped.attach() else { return };
        assert_eq!(helped.ask("signals"), before, "{mode}");
        assert_eq!(helped.ask("trap count"), "0", "{mode}");
        helped.stop();
    }
}

fn a_process_that_seldom_runs_is_attached_to_between_two_waits(versions: Versions) {
    let mut helped = Helped::start(versions, 1);
    let Some(()) = helped.attach() else { return };
    helped.stop();
}

fn system_calls_that_wait_are_not_interrupted(versions: Versions) {
    let mut helped = Helped::start(versions, 0.3);
    helped.ask("thread wait_for_descriptors");
    for _ in 0..3 {
        let Some(()) = helped.attach() else { return };
    }
    helped.ask("call end_wait_for_descriptors");
    assert_eq!(helped.ask("join"), "0");
    helped.stop();
}

fn no_thread_waits_for_the_loader(versions: Versions) {
    let mut helped = Helped::start(versions, 0.001);
    helped.ask("call start_loader_wait");
    let folder = helped.folder.path("waiting");
    let waiting = Attached::begin(helped.pid(), &folder);
    wait_for(|| helped.is_traced());
    // A thread that waited for the loader with Python's lock could not answer.
    helped.ask("call end_wait");
    let Some(attached) = waiting.started(helped.pid()) else { return };
    assert_eq!(helped.ask("step"), "stepped");
    attached.detach();
    helped.stop();
}

fn the_end_of_the_injector_at_any_time_is_not_noticed(versions: Versions) {
    kill_injectors(versions, 0..12);
}

/// Kills the process that attaches at a moment that depends on the seed. The program completes by itself the steps that
/// the killed process has begun.
fn kill_injectors(versions: Versions, seeds: std::ops::Range<u64>) {
    let mut helped = Helped::start(versions, 0.001);
    let before = helped.ask("signals");
    for seed in seeds {
        let folder = helped.folder.path(&format!("killed{seed}"));
        let mut attached = Attached::begin(helped.pid(), &folder);
        let launcher = attached.child.id() as i32;
        let mut injector = None;
        wait_for(|| {
            injector = children(launcher).first().copied();
            injector.is_some() || attached.child.try_wait().unwrap().is_some()
        });
        // It needs some ten milliseconds.
        std::thread::sleep(Duration::from_micros(seed.wrapping_mul(7919) % 60_000));
        // It may have ended.
        if let Some(injector) = injector {
            // SAFETY: takes integers. The process is a child of a child of ours, which has not been waited for.
            unsafe { libc::kill(injector, libc::SIGKILL) };
        }
        if seed % 3 == 0 {
            attached.child.kill().unwrap();
        } else {
            // SAFETY: takes integers. The child has not been waited for.
            unsafe { libc::kill(launcher, libc::SIGINT) };
        }
        attached.child.wait().unwrap();
        assert_eq!(helped.ask("step"), "stepped", "seed {seed}");
    }
    wait_for(|| !helped.is_traced());
    // A library that was left behind ends its recording by itself.
    wait_for(|| !has_thread(helped.pid(), "memtrace"));
    assert_eq!(helped.ask("signals"), before);
    let Some(()) = helped.attach() else { return };
    helped.stop();
}

fn has_thread(pid: i32, name: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")).ok());
    names.into_iter().any(|comm| comm.trim() == name)
}

fn attaching_again_takes_no_more_addresses(versions: Versions) {
    let mut helped = Helped::start(versions, 0.001);
    let kilobytes = |helped: &Helped| helped.status("VmSize").trim_end_matches(" kB").parse::<u64>().unwrap();
    let mut sizes = Vec::new();
    for _ in 0..8 {
        let Some(()) = helped.attach() else { return };
        sizes.push(kilobytes(&helped));
    }
    // The third one uses the memory of the first one.
    assert!(sizes[7] < sizes[2] + 8 * 1024, "{sizes:?}");
    helped.stop();
}

fn a_library_that_cannot_be_loaded_is_an_error_and_the_process_goes_on(versions: Versions) {
    let mut helped = Helped::start(versions, 0.001);
    let limit = |helped: &Helped, bytes: u64| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: `limit` is valid, and the kernel writes nothing.
        let result = unsafe { libc::prlimit(helped.pid(), libc::RLIMIT_AS, &limit, std::ptr::null_mut()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    };
    limit(&helped, 1 << 20);
    let output = output(&mut crate::attach::attach(helped.pid(), &helped.folder.path("run")));
    let text = stderr(&output);
    limit(&helped, libc::RLIM_INFINITY);
    if text.contains("the kernel") {
        println!("SKIPPED: {text}");
        return;
    }
    assert!(text.contains("cannot load the library into process"), "{text}");
    assert_eq!(helped.ask("step"), "stepped");
    helped.attach().unwrap();
    helped.stop();
}

/// Each test through Python itself (`sys.remote_exec`), and as debuggers do.
macro_rules! both_ways {
    ($($name:ident)*) => {
        mod through_python {
            use memtrace_tests::versions::Versions;
            $(
                #[test]
                fn $name() {
                    super::$name(Versions::DEFAULT);
                }
            )*
        }
        mod through_ptrace {
            use memtrace_tests::versions::Versions;
            $(
                #[test]
                fn $name() {
                    super::$name(Versions::ON_GPUS);
                }
            )*
        }
    };
}

both_ways! {
    children_that_are_forked_meanwhile_live
    a_thread_that_waits_for_a_child_with_the_same_memory_stops_no_other
    a_process_that_restricts_its_system_calls_is_refused_and_goes_on
    attaching_makes_no_memory_that_is_writable_and_executable
    signals_are_blocked_ignored_and_handled_as_before
    a_process_that_seldom_runs_is_attached_to_between_two_waits
    system_calls_that_wait_are_not_interrupted
    no_thread_waits_for_the_loader
    the_end_of_the_injector_at_any_time_is_not_noticed
    attaching_again_takes_no_more_addresses
    a_library_that_cannot_be_loaded_is_an_error_and_the_process_goes_on
}

mod exhaustive {
    use super::*;

    #[test]
    fn the_end_of_the_injector_is_not_noticed_with_many_seeds() {
        kill_injectors(Versions::DEFAULT, 12..212);
        kill_injectors(Versions::ON_GPUS, 12..212);
    }
}
