//! Compiles the C programs of `tests/programs` and runs them over the simulated CUDA.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::traced_program::{TracedProgram, root};

/// The folder with the simulated `libcuda.so.1`, `libcudart.so.12` and `libcudart.so.13`. Builds them on first use.
pub fn simcuda() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let mut command = Command::new(root().join("scripts/sim"));
        let output = command.args(["printenv", "SIMCUDA_LIB"]).env("SIM_TORCH", "none").output().expect("scripts/sim");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("a path").trim_end().into()
    })
}

/// The compiler options that link a program with one of the simulated libraries, such as `libcuda.so.1`.
pub fn linked_with(library: &str) -> Vec<String> {
    vec![format!("-L{}", simcuda().display()), format!("-l:{library}")]
}

/// A temporary folder for the programs of one test. Dropping it removes the folder with its content.
#[derive(Debug)]
pub struct ProgramFolder {
    folder: tempfile::TempDir,
}

impl Default for ProgramFolder {
    fn default() -> ProgramFolder {
        ProgramFolder {
            folder: tempfile::Builder::new().prefix("memtrace-test-").tempdir().expect("a temporary folder"),
        }
    }
}

impl ProgramFolder {
    /// An empty folder.
    pub fn new() -> ProgramFolder {
        ProgramFolder::default()
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Compiles `tests/programs/SOURCE` into the program `name` and returns its path.
    #[track_caller]
    pub fn program<S: AsRef<OsStr>>(&self, source: &str, name: &str, options: &[S]) -> PathBuf {
        self.compile(source, name, &["-rdynamic"], options)
    }

    /// Compiles `tests/programs/SOURCE` into the program `name`, over a driver without locks, files or memory of its
    /// own (`programs/process/bare.c`). Running it needs this folder in `LD_LIBRARY_PATH`.
    #[track_caller]
    pub fn program_over_bare_driver(&self, source: &str, name: &str) -> PathBuf {
        const NONE: &[&str] = &[];
        self.library("process/bare.c", "libcuda.so.1", NONE);
        let folder = format!("-L{}", self.path("").display());
        self.program(source, name, &[folder.as_str(), "-l:libcuda.so.1"])
    }

    /// Compiles `tests/programs/SOURCE` into the shared library `name` and returns its path.
    #[track_caller]
    pub fn library<S: AsRef<OsStr>>(&self, source: &str, name: &str, options: &[S]) -> PathBuf {
        let soname = format!("-Wl,-soname,{name}");
        self.compile(source, name, &["-shared", "-fPIC", "-fvisibility=hidden", &soname], options)
    }

    #[track_caller]
    fn compile<S: AsRef<OsStr>>(&self, source: &str, name: &str, kind: &[&str], options: &[S]) -> PathBuf {
        let out = self.path(name);
        let mut command = Command::new("cc");
        command.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]).args(kind);
        command.arg("-o").arg(&out).arg(root().join("tests/programs").join(source)).args(options).arg("-ldl");
        let output = command.output().expect("cc");
        assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
        out
    }
}

/// A command that finds the simulated CUDA by `LD_LIBRARY_PATH`.
pub fn with_simcuda<S: AsRef<OsStr>>(command: &[S]) -> TracedProgram {
    let mut path = OsString::from(simcuda());
    if let Some(before) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(before);
    }
    TracedProgram::command(command).env("LD_LIBRARY_PATH", path)
}

/// Builds the program `name` of `tests/programs/rust` with one of its features. `toolkit` is the folder where cudarc
/// looks for CUDA's libraries.
#[track_caller]
pub fn rust_program(name: &str, feature: &str, toolkit: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let target = target.join("rust-programs").join(feature);
    let mut command = Command::new("cargo");
    command.args(["build", "--release", "--locked", "--quiet", "--bin", name, "--features", feature, "--target-dir"]);
    command.arg(&target).arg("--manifest-path").arg(root().join("tests/programs/rust/Cargo.toml"));
    let output = command.env("CUDA_HOME", toolkit).output().expect("cargo");
    assert!(output.status.success(), "{feature}: {}", String::from_utf8_lossy(&output.stderr));
    target.join("release").join(name)
}
