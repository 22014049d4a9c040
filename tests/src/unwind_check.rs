//! Compares memtrace's native stacks with those of libgcc's unwinder while a program runs: `tests/unwindcheck`,
//! preloaded into it.

use std::path::PathBuf;

use crate::traced_program::{TracedProgram, memtrace, release_build};

/// The size of the results file, and the environment variable with its path (`tests/unwindcheck/src/results.rs`).
const FILE_BYTES: u64 = 4096;
const VARIABLE: &str = "UNWINDCHECK_RESULTS";

/// The results file of one or more programs.
#[derive(Debug)]
pub struct UnwindCheck {
    results: tempfile::NamedTempFile,
}

/// The stacks that were compared, in all processes.
#[derive(Debug)]
pub struct ComparedStacks {
    /// The stacks that were compared.
    pub compared: u64,
    /// Those of them that differ from all earlier ones of their process.
    pub distinct: u64,
    /// The threads whose stacks were compared.
    pub threads: u64,
    /// The stacks that differ from libgcc's.
    pub different: u64,
    /// A description of the first difference.
    pub first_difference: String,
}

impl Default for UnwindCheck {
    fn default() -> UnwindCheck {
        let results = tempfile::NamedTempFile::new().expect("a temporary file");
        results.as_file().set_len(FILE_BYTES).expect("the file's size");
        UnwindCheck { results }
    }
}

impl UnwindCheck {
    /// No stacks.
    pub fn new() -> UnwindCheck {
        UnwindCheck::default()
    }

    /// The program, with the comparison preloaded.
    pub fn preloaded(&self, program: TracedProgram) -> TracedProgram {
        program.preload(&library()).env(VARIABLE, self.results.path())
    }

    /// The stacks that were compared so far.
    pub fn compared_stacks(&self) -> ComparedStacks {
        let bytes = std::fs::read(self.results.path()).expect("the results");
        let (numbers, text) = bytes.split_at(4 * size_of::<u64>());
        let mut numbers = numbers.as_chunks().0.iter().map(|number| u64::from_ne_bytes(*number));
        let mut number = || numbers.next().expect("four numbers");
        ComparedStacks {
            compared: number(),
            distinct: number(),
            threads: number(),
            different: number(),
            first_difference: String::from_utf8_lossy(text).trim_end_matches('\0').to_owned(),
        }
    }

    /// The stacks that were compared so far. Panics if a stack differs.
    #[track_caller]
    pub fn equal_stacks(&self) -> ComparedStacks {
        let found = self.compared_stacks();
        assert_eq!(
            found.different, 0,
            "stacks that differ, of {}; the first: {}",
            found.compared, found.first_difference
        );
        found
    }
}

/// The library: beside the binary `memtrace`, for a machine without Rust, else that of the release build.
fn library() -> PathBuf {
    const NAME: &str = "libmemtrace_unwindcheck.so";
    let beside = memtrace().with_file_name(NAME);
    if beside.exists() { beside } else { release_build(NAME) }
}
