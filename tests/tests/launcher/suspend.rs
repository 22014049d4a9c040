//! `memtrace suspend` and `memtrace resume` over a driver that has the checkpoint functions alone
//! (`programs/launcher/checkpoint.c`). docs/dev/gpu.md describes a real driver.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use memtrace_tests::programs::ProgramFolder;
use serde_json::{Value, json};

use crate::launcher_support::*;

const NONE: &[&str] = &[];

/// A driver, and a process with two children. The files of a process's state say whether it uses CUDA.
struct Tree {
    programs: ProgramFolder,
    root: Child,
    pids: [u32; 3],
}

impl Tree {
    /// `states` are those of the root and its children. `None` for a process that does not use CUDA.
    fn with(states: [Option<u32>; 3]) -> Tree {
        Tree::of(&["sh", "-c", "sleep 1000 & echo $!; sleep 1000 & echo $!; wait"], states)
    }

    fn of(command: &[&str], states: [Option<u32>; 3]) -> Tree {
        let programs = ProgramFolder::new();
        programs.library("launcher/checkpoint.c", "libcuda.so.1", NONE);
        let mut root =
            Command::new(command[0]).args(&command[1..]).stdout(Stdio::piped()).spawn().expect("a process tree");
        let mut lines = BufReader::new(root.stdout.take().expect("stdout")).lines();
        let mut child = || lines.next().expect("a line").expect("text").parse().expect("a pid");
        let pids = [root.id(), child(), child()];
        for (pid, state) in pids.into_iter().zip(states) {
            if let Some(state) = state {
                std::fs::write(programs.path(&pid.to_string()), state.to_string()).expect("a state");
            }
        }
        Tree { programs, root, pids }
    }

    fn run(&self, words: &[&str]) -> Output {
        let pid = self.root.id().to_string();
        let folder = self.programs.path("");
        let mut command = Command::new(memtrace());
        output(command.args(words).arg(pid).env("LD_LIBRARY_PATH", &folder).env("CHECKPOINT_STATES", &folder))
    }

    /// The states of the processes that use CUDA.
    fn states(&self) -> Vec<u32> {
        let read = |pid: &u32| std::fs::read_to_string(self.programs.path(&pid.to_string())).ok();
        self.pids.iter().filter_map(read).map(|state| state.trim().parse().expect("a number")).collect()
    }

    /// Lets `function` fail once for the process at this place in the tree.
    fn fail(&self, place: usize, function: &str, code: u32) {
        let file = self.programs.path(&format!("{}.{function}", self.pids[place]));
        std::fs::write(file, code.to_string()).expect("a failure");
    }

    fn calls(&self) -> Vec<String> {
        let calls = std::fs::read_to_string(self.programs.path("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for pid in &self.pids[1..] {
            let _ = Command::new("kill").arg(pid.to_string()).status();
        }
        let _ = self.root.kill();
        let _ = self.root.wait();
    }
}

/// Requires the exit status 2, an error with this text, and a help line.
#[track_caller]
fn assert_error(output: &Output, expected: &str) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.starts_with("error: ") && message.contains("\nhelp: "), "{message}");
    assert!(message.contains(expected), "{expected}: {message}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_process_tree_is_suspended_and_resumed() {
    let tree = Tree::with([None, Some(0), Some(0)]);
    let [root, first, second] = tree.pids;
    let suspended = tree.run(&["suspend"]);
    assert!(suspended.status.success(), "{}", stderr(&suspended));
    let text = String::from_utf8_lossy(&suspended.stdout).into_owned();
    assert!(text.starts_with(&format!("suspended 2 processes ({first}, {second}) (")), "{text}");
    assert!(stderr(&suspended).contains(&format!("memtrace resume {root}")), "{}", stderr(&suspended));
    assert_eq!(tree.states(), [2, 2]);
    assert_error(&tree.run(&["suspend"]), "is suspended already");

    let resumed = tree.run(&["resume", "--json"]);
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    let report: Value = serde_json::from_slice(&resumed.stdout).expect("JSON");
    assert_eq!((&report["pid"], &report["processes"]), (&json!(root), &json!([first, second])));
    assert_eq!(report["gpu_memory_bytes"], Value::Null, "no NVML here");
    assert_eq!(tree.states(), [0, 0]);
    assert_error(&tree.run(&["resume"]), "is not suspended");
    let calls: Vec<String> = ["lock", "save", "restore", "unlock"]
        .iter()
        .flat_map(|call| [first, second].map(|pid| format!("{call} {pid}")))
        .collect();
    assert_eq!(tree.calls(), calls);
}

#[test]
fn a_failure_leaves_all_processes_as_they_were() {
    for (function, code, expected) in [
        ("lock", 600, "work on the GPU did not end in time (CUDA error 600)"),
        ("save", 801, "what the driver cannot save, such as managed memory"),
    ] {
        let tree = Tree::with([Some(0), Some(0), Some(0)]);
        tree.fail(2, function, code);
        let output = tree.run(&["suspend", "--timeout", "5"]);
        assert_error(&output, expected);
        assert!(stderr(&output).contains("all processes go on as before"), "{}", stderr(&output));
        assert_eq!(tree.states(), [0, 0, 0]);
    }
    let tree = Tree::with([Some(2), Some(2), Some(2)]);
    tree.fail(1, "restore", 2);
    assert_error(&tree.run(&["resume"]), "there is not enough memory (CUDA error 2)");
    assert_eq!(tree.states(), [2, 2, 2]);
    // A step that cannot be undone is reported.
    let tree = Tree::with([Some(0), Some(0), Some(0)]);
    tree.fail(2, "save", 801);
    tree.fail(0, "restore", 2);
    assert_error(&tree.run(&["suspend"]), "; and restoring process");
    assert_eq!(tree.states(), [2, 0, 0]);
}

#[test]
fn what_cannot_be_restored_is_not_suspended() {
    // A rank whose process group uses NCCL, as PyTorch names its thread.
    let script = "import ctypes, subprocess, threading, time\n\
        def watch():\n    ctypes.CDLL(None).prctl(15, b'pt_nccl_watchdg')\n    named.set(); time.sleep(1000)\n\
        named = threading.Event()\nthreading.Thread(target=watch, daemon=True).start()\nnamed.wait()\n\
        for _ in range(2): print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid, flush=True)\n\
        time.sleep(1000)";
    let tree = Tree::of(&["python3", "-c", script], [Some(0), None, None]);
    assert_error(&tree.run(&["suspend"]), "shares GPU memory with other ranks over NCCL");
    assert_eq!((tree.states(), tree.calls()), (vec![0], vec![]));
}

#[test]
fn processes_and_drivers_that_do_not_fit_are_refused() {
    let tree = Tree::with([None, None, None]);
    assert_error(&tree.run(&["suspend"]), "uses CUDA");
    std::fs::write(tree.programs.path("0.init"), "100").expect("a failure");
    let failed = tree.run(&["suspend"]);
    assert_eq!(failed.status.code(), Some(2));
    assert!(stderr(&failed).contains("there is no GPU (CUDA error 100)"), "{}", stderr(&failed));
    let old = ProgramFolder::new();
    old.library("process/bare.c", "libcuda.so.1", NONE);
    let pid = tree.root.id().to_string();
    let suspend =
        |pid: &str| output(Command::new(memtrace()).args(["suspend", pid]).env("LD_LIBRARY_PATH", old.path("")));
    assert_error(&suspend(&pid), "the NVIDIA driver cannot suspend processes");
    assert_error(&suspend("4194304"), "there is no process 4194304");
}
