//! Reads what the processes of a dry run have written into the folder of its files.
//!
//! The user's program can leave anything there: a pipe without a writer, a link to a device, files without a bound. So
//! only regular files of this user are read, never through links, up to a size and a number. This happens in a
//! sandboxed worker ([`crate::sandbox`]), and what is left out is reported.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::time::SystemTime;

use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{EstimatedWorkspaces, GuessedBranch, GuessedSize, MissingFunction, ValueException};
use memtrace_trace::file::untrusted;
use serde::{Deserialize, Serialize};

use super::values::{self, EXCEPTIONS, GUESSES};

/// The folder in the run folder for files that are only needed during the run.
pub(super) const SCRATCH: &str = ".simulated";
/// The folder in it through which the processes of the run share the memory of each GPU and exchange messages.
pub(super) const SHARED: &str = "shared";
/// The file in that folder which the first process that uses CUDA creates (`simulate/src/shared.rs`).
const USAGE: &str = "usage";
/// The folder in [`SCRATCH`] in which each process writes what is known of cuDNN's workspaces.
pub(super) const WORKSPACES: &str = "workspaces";
/// The folder in [`SCRATCH`] in which each process writes which functions the simulation lacks.
pub(super) const MISSING: &str = "missing";
/// The most files of a folder that are examined. Each process writes at most one.
const MAX_FILES: usize = 4096;
/// The largest file about an exception, in bytes: a name and two lines of source files.
const MAX_EXCEPTION: u64 = 16 << 10;
/// The largest file about workspaces, in bytes. The simulated cuDNN writes less.
const MAX_WORKSPACES: u64 = 4096;
/// The largest file about missing functions, in bytes. All functions that packages import are in a few hundred lines.
const MAX_MISSING: u64 = 64 << 10;
/// The largest file about sizes and branches that were guessed, in bytes: twice 256 lines with their paths.
const MAX_GUESSES: u64 = 512 << 10;
/// The maximum number of lines with such sizes, and of those with such branches.
const MAX_GUESSED: usize = 256;
/// The maximum number of missing functions, and the maximum length of a name.
const MAX_FUNCTIONS: usize = 256;
const MAX_NAME: usize = 256;

/// The results of a dry run that ended.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Finished {
    /// Whether any process used CUDA.
    pub(crate) used_cuda: bool,
    /// The exception that ended the program after it had read values that nothing computed.
    pub(crate) exception: Option<ValueException>,
    /// The package that needs the CUDA toolkit, if the program failed.
    pub(crate) missing_toolkit: Option<MissingToolkit>,
    /// The estimates of cuDNN's workspaces. `None` if the program used no convolutions of cuDNN.
    pub(crate) workspaces: Option<EstimatedWorkspaces>,
    /// The functions that the program called and the simulation lacks, the one with the most calls first.
    pub(crate) missing_functions: Vec<MissingFunction>,
    /// The lines where values that nothing computed decided a size, those of the largest tensors first.
    pub(crate) guessed_sizes: Vec<GuessedSize>,
    /// The lines where numbers that nothing computed decided a branch or a size, those that were read most often first.
    pub(crate) guessed_branches: Vec<GuessedBranch>,
    /// The omitted parts, and the reasons.
    pub(crate) problems: Vec<String>,
}

/// An exception that the program raised because the machine has no CUDA toolkit. Unknown fields are refused, because
/// the files of [`ValueException`]s are in the same folder.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MissingToolkit {
    /// The package of the innermost line outside of PyTorch. `None` for the program itself.
    package: Option<String>,
    /// The name of the exception's class.
    exception: String,
    /// That line, as FILE:LINE.
    location: String,
}

impl MissingToolkit {
    /// The warning, and the help line for it.
    pub(crate) fn texts(&self) -> [String; 2] {
        let package = self.package.as_deref().unwrap_or("the program");
        let settings = match package {
            "deep_gemm" => {
                ", or choose other kernels with SGLANG_ENABLE_JIT_DEEPGEMM=0 (SGLang) or VLLM_USE_DEEP_GEMM=0 (vLLM)"
            }
            _ => "",
        };
        [
            format!(
                "{package} needs the CUDA toolkit, which this machine lacks ({} at {}). It fails in the same way on a \
                 machine that has a GPU and no toolkit.",
                self.exception, self.location
            ),
            format!("set CUDA_HOME to the folder of a CUDA toolkit{settings}"),
        ]
    }
}

/// Reads what the processes have written. `has_failed` is true if the command ended with another status than 0.
pub(super) fn read(run_folder: &RunFolder, has_failed: bool) -> Finished {
    let mut finished = Finished::default();
    let scratch = match run_folder.subfolder(SCRATCH) {
        Ok(scratch) => scratch,
        Err(e) => {
            finished.problems.push(format!("cannot read {}: {e}", run_folder.path().join(SCRATCH).display()));
            return finished;
        }
    };
    finished.used_cuda = scratch.subfolder(SHARED).is_ok_and(|shared| shared.open_file(USAGE).is_ok());
    // A program that ends well went on after the exit that it requested.
    let is_reason = |found: &ValueException| has_failed || found.exception != values::EXIT;
    // Of several the one of the process that wrote it first. A process may have ended while it wrote.
    if let Some(written) = Written::in_folder(&scratch, EXCEPTIONS, MAX_EXCEPTION, &mut finished.problems) {
        finished.exception = written.texts().find_map(|text| serde_json::from_slice(&text).ok()).filter(is_reason);
        finished.missing_toolkit =
            written.texts().find_map(|text| serde_json::from_slice(&text).ok()).filter(|_| has_failed);
    }
    finished.workspaces = Written::in_folder(&scratch, WORKSPACES, MAX_WORKSPACES, &mut finished.problems)
        .and_then(|written| sum(written.texts().filter_map(|text| serde_json::from_slice(&text).ok())));
    if let Some(written) = Written::in_folder(&scratch, MISSING, MAX_MISSING, &mut finished.problems) {
        finished.missing_functions = missing_functions(written.texts());
    }
    if let Some(written) = Written::in_folder(&scratch, GUESSES, MAX_GUESSES, &mut finished.problems) {
        let guesses: Vec<Guesses> = written.texts().filter_map(|text| serde_json::from_slice(&text).ok()).collect();
        finished.guessed_sizes = guessed_sizes(&guesses);
        finished.guessed_branches = guessed_branches(&guesses);
    }
    finished
}

/// The file of one process (`simcuda/guesses.py`).
#[derive(Deserialize)]
struct Guesses {
    sizes: Vec<GuessedSize>,
    branches: Vec<GuessedBranch>,
}

/// The lines with branches of all processes, each once.
fn guessed_branches(guesses: &[Guesses]) -> Vec<GuessedBranch> {
    let mut branches: BTreeMap<_, GuessedBranch> = BTreeMap::new();
    for one in guesses.iter().flat_map(|process| &process.branches) {
        let key = (&one.location, one.kind);
        if branches.len() < MAX_GUESSED || branches.contains_key(&key) {
            let times = branches.get(&key).map_or(0, |found| found.times).saturating_add(one.times);
            branches.insert(key, GuessedBranch { times, ..one.clone() });
        }
    }
    let mut branches: Vec<_> = branches.into_values().collect();
    branches.sort_by_key(|one| std::cmp::Reverse(one.times));
    branches
}

/// The lines with sizes of all processes, each once.
fn guessed_sizes(guesses: &[Guesses]) -> Vec<GuessedSize> {
    let mut sizes: BTreeMap<_, GuessedSize> = BTreeMap::new();
    for one in guesses.iter().flat_map(|process| &process.sizes) {
        let key = (&one.location, &one.operator);
        if sizes.len() < MAX_GUESSED || sizes.contains_key(&key) {
            sizes.entry(key).and_modify(|found| found.add(one)).or_insert_with(|| one.clone());
        }
    }
    let mut sizes: Vec<_> = sizes.into_values().collect();
    sizes.sort_by_key(|one| std::cmp::Reverse((one.is_assumed, one.total)));
    sizes
}

/// The functions of all processes. Each line has the number of calls and the name.
fn missing_functions(texts: impl Iterator<Item = Vec<u8>>) -> Vec<MissingFunction> {
    let mut calls: BTreeMap<String, u64> = BTreeMap::new();
    for text in texts {
        for line in String::from_utf8_lossy(&text).lines() {
            let Some((number, name)) = line.trim_start().split_once(' ') else { continue };
            let is_name =
                name.len() <= MAX_NAME && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._".contains(&b));
            if let Some(number) = number.parse::<u64>().ok().filter(|_| is_name)
                && (calls.len() < MAX_FUNCTIONS || calls.contains_key(name))
            {
                let calls = calls.entry(name.to_owned()).or_default();
                *calls = calls.saturating_add(number);
            }
        }
    }
    let mut functions: Vec<_> = calls.into_iter().map(|(name, calls)| MissingFunction { name, calls }).collect();
    functions.sort_by_key(|function| std::cmp::Reverse(function.calls));
    functions
}

fn sum(mut workspaces: impl Iterator<Item = EstimatedWorkspaces>) -> Option<EstimatedWorkspaces> {
    let mut all = workspaces.next()?;
    workspaces.for_each(|process| all.add(&process));
    Some(all)
}

/// The files of one folder that may be read, in the order in which they were written.
struct Written {
    folder: RunFolder,
    limit: u64,
    owner: u32,
    files: Vec<(SystemTime, OsString)>,
}

impl Written {
    /// Examines the files of a folder in `scratch`. `limit` is the largest size, in bytes. `None` if there is no such
    /// folder.
    fn in_folder(scratch: &RunFolder, name: &str, limit: u64, problems: &mut Vec<String>) -> Option<Written> {
        let path = scratch.path().join(name);
        let folder = match scratch.subfolder(name) {
            Ok(folder) => folder,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
            Err(e) => {
                problems.push(format!("cannot read {}: {e}", path.display()));
                return None;
            }
        };
        // A file server may store another user as the owner of all files of this one.
        let owner = scratch.stat().ok()?.st_uid;
        let names = folder.any_file_names(MAX_FILES + 1).unwrap_or_default();
        if names.len() > MAX_FILES {
            problems.push(format!("{} has more than {MAX_FILES} files; others were not read", path.display()));
        }
        let mut written = Written { folder, limit, owner, files: Vec::new() };
        let (mut refused, mut example) = (0, String::new());
        for name in names.into_iter().take(MAX_FILES) {
            let examined = written.open(&name).and_then(|file| file.metadata()?.modified());
            match examined {
                Ok(time) => written.files.push((time, name)),
                // It was there a moment ago, and a process of the program may still run.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => {
                    (refused, example) = (refused + 1, format!("{}: {e}", path.join(&name).display()));
                }
            }
        }
        match refused {
            0 => {}
            1 => problems.push(format!("cannot read {example}")),
            count => problems.push(format!("cannot read {count} files in {}, for example {example}", path.display())),
        }
        written.files.sort();
        Some(written)
    }

    fn open(&self, name: &OsString) -> io::Result<File> {
        let file = self.folder.open_file_of(name, self.owner)?;
        let length = file.metadata()?.len();
        if length > self.limit {
            return Err(io::Error::other(format!("it has {length} bytes, more than memtrace writes")));
        }
        Ok(file)
    }

    fn texts(&self) -> impl Iterator<Item = Vec<u8>> {
        self.files.iter().filter_map(|(_, name)| untrusted::read(&self.open(name).ok()?, self.limit).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::time::Duration;

    const GOOD: &str = r#"{"exception": "ValueError", "location": "a.py:1", "read_location": "a.py:2"}"#;

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in [EXCEPTIONS, WORKSPACES, MISSING, SHARED] {
            std::fs::create_dir_all(folder.path().join(SCRATCH).join(name)).unwrap();
        }
        folder
    }

    fn read_all(folder: &Path) -> Finished {
        read(&RunFolder::open(folder).unwrap(), true)
    }

    fn pipe(path: &Path) {
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: `name` is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    }

    #[test]
    fn the_first_complete_exception_counts() {
        let folder = folder();
        let path = |name: &str| folder.path().join(SCRATCH).join(EXCEPTIONS).join(name);
        assert!(read_all(folder.path()).exception.is_none());
        std::fs::write(path("1.json"), &GOOD[..20]).unwrap();
        std::fs::write(path("2.json"), GOOD).unwrap();
        std::fs::write(path("3.json"), GOOD.replace("Value", "Key")).unwrap();
        let now = SystemTime::now();
        for (name, seconds) in [("1.json", 30), ("2.json", 10), ("3.json", 20)] {
            let file = File::options().write(true).open(path(name)).unwrap();
            file.set_modified(now - Duration::from_secs(seconds)).unwrap();
        }
        let finished = read_all(folder.path());
        assert_eq!(finished.exception.unwrap().exception, "KeyError");
        assert_eq!(finished.missing_toolkit, None);
        assert!(finished.problems.is_empty(), "{:?}", finished.problems);
    }

    #[test]
    fn a_missing_toolkit_is_reported_if_the_program_failed() {
        let folder = folder();
        let path = folder.path().join(SCRATCH).join(EXCEPTIONS).join("1.toolkit.json");
        std::fs::write(&path, r#"{"exception": "AssertionError", "location": "a.py:1", "package": "deep_gemm"}"#)
            .unwrap();
        let failed = read_all(folder.path());
        let [text, help] = failed.missing_toolkit.unwrap().texts();
        assert!(
            text.starts_with("deep_gemm needs the CUDA toolkit, which this machine lacks (AssertionError at a.py:1)")
        );
        assert!(help.contains("CUDA_HOME") && help.contains("SGLANG_ENABLE_JIT_DEEPGEMM=0"), "{help}");
        assert!(failed.exception.is_none());
        assert_eq!(read(&RunFolder::open(folder.path()).unwrap(), false).missing_toolkit, None);
        std::fs::write(&path, r#"{"exception": "OSError", "location": "a.py:1", "package": null}"#).unwrap();
        let [text, help] = read_all(folder.path()).missing_toolkit.unwrap().texts();
        assert!(text.starts_with("the program needs the CUDA toolkit"), "{text}");
        assert_eq!(help, "set CUDA_HOME to the folder of a CUDA toolkit");
    }

    #[test]
    fn other_files_than_those_of_processes_are_left_out_and_reported() {
        let folder = folder();
        for name in [EXCEPTIONS, WORKSPACES] {
            let path = |file: &str| folder.path().join(SCRATCH).join(name).join(file);
            pipe(&path("0.json"));
            symlink("/dev/zero", path("1.json")).unwrap();
            File::create(path("2.json")).unwrap().set_len(1 << 30).unwrap();
        }
        let finished = read_all(folder.path());
        assert!(finished.exception.is_none() && finished.workspaces.is_none());
        assert_eq!(finished.problems.len(), 2, "{:?}", finished.problems);
        assert!(finished.problems.iter().all(|problem| problem.starts_with("cannot read 3 files in ")));
        // A folder that is none.
        let exceptions = folder.path().join(SCRATCH).join(EXCEPTIONS);
        std::fs::remove_dir_all(&exceptions).unwrap();
        symlink("/", &exceptions).unwrap();
        assert!(read_all(folder.path()).problems[0].contains(EXCEPTIONS));
        std::fs::remove_dir_all(folder.path().join(SCRATCH)).unwrap();
        assert!(read_all(folder.path()).problems[0].contains(SCRATCH));
    }

    #[test]
    fn calls_of_missing_functions_are_added_up() {
        let folder = folder();
        let path = |name: &str| folder.path().join(SCRATCH).join(MISSING).join(name);
        std::fs::write(path("1"), "                   2 cuNew\n                   1 cuOther\n").unwrap();
        std::fs::write(path("2"), "                   5 cuNew\n   3 cu New\n x cuNew\n 1 \u{1b}[31m\n 9").unwrap();
        let functions = read_all(folder.path()).missing_functions;
        let expected =
            [("cuNew", 7), ("cuOther", 1)].map(|(name, calls)| MissingFunction { name: name.to_owned(), calls });
        assert_eq!(functions, expected);
    }

    #[test]
    fn guessed_sizes_are_those_of_all_processes() {
        let folder = folder();
        let guesses = folder.path().join(SCRATCH).join(GUESSES);
        std::fs::create_dir(&guesses).unwrap();
        let line = |line: u32, selected: u64, total: u64, is_assumed: bool| {
            format!(
                r#"{{"location": "a.py:{line}", "operator": "nonzero", "times": 2, "selected": {selected},
                "total": {total}, "is_assumed": {is_assumed}}}"#
            )
        };
        let branch = |times: u32| {
            format!(r#"{{"location": "a.py:7", "kind": "branch", "optimizer": "LBFGS", "times": {times}}}"#)
        };
        let write = |name: &str, sizes: &str, branches: &str| {
            std::fs::write(guesses.join(name), format!(r#"{{"sizes": [{sizes}], "branches": [{branches}]}}"#)).unwrap();
        };
        write("1", &format!("{}, {}", line(1, 5, 10, true), line(2, 9, 90, false)), &branch(3));
        write("2", &line(1, 50, 100, true), &branch(2));
        std::fs::write(guesses.join("3.new"), "[{").unwrap();
        let finished = read_all(folder.path());
        let [found] = &finished.guessed_branches[..] else { panic!("{finished:?}") };
        assert_eq!((found.times, found.optimizer.as_deref()), (5, Some("LBFGS")));
        let sizes = finished.guessed_sizes;
        let figures = |size: &GuessedSize| (size.times, size.selected, size.total, size.is_assumed);
        assert_eq!(sizes.iter().map(figures).collect::<Vec<_>>(), [(4, 50, 100, true), (2, 9, 90, false)]);
    }

    #[test]
    fn the_number_of_files_is_bounded() {
        let folder = folder();
        for number in 0..=MAX_FILES {
            std::fs::write(folder.path().join(SCRATCH).join(WORKSPACES).join(number.to_string()), "").unwrap();
        }
        let problems = read_all(folder.path()).problems;
        assert!(problems.len() == 1 && problems[0].contains("more than 4096 files"), "{problems:?}");
    }
}
