//! Symbol names of real libraries, against binutils: PyTorch's libraries, which have symbol tables, and Python's, which
//! may have full DWARF.

use std::path::{Path, PathBuf};

use crate::native_objects::{compare, symbols};
use memtrace_tests::traced_program::TracedProgram;
use memtrace_tests::versions::Versions;

/// Prints the folder of PyTorch's libraries and the object that holds the interpreter.
const WHERE: &str = "
import os, sys, torch
print(os.path.join(os.path.dirname(torch.__file__), 'lib'))
maps = [line.split()[-1] for line in open('/proc/self/maps') if '/libpython3.' in line and '.so.1' in line]
print(os.path.realpath((maps or [sys.executable])[0]))
";

fn objects() -> (PathBuf, PathBuf) {
    // Debian's packages of Python have no symbol table, and pyenv's builds have one.
    let output = TracedProgram::command(&["python", "-c", WHERE]).over_simcuda().on(Versions::ON_GPUS).run_alone();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let [.., libraries, python] = lines[..] else { panic!("{text}") };
    (libraries.into(), python.into())
}

/// Addresses in `count` functions of an object, or in all of them when it has fewer.
fn some_places(object: &Path, count: usize) -> Vec<u64> {
    let all = symbols(object);
    let every = (all.len() / count).max(1);
    let mut places: Vec<u64> = all
        .into_iter()
        .step_by(every)
        .filter(|(range, _)| !range.is_empty())
        .map(|(r, _)| (r.start + r.end) / 2)
        .collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// A part of the functions; `exhaustive` compares more.
#[test]
fn symbols_of_pytorch_and_python_match_binutils() {
    match_binutils(&["libc10.so", "libtorch_python.so"], 150, 500);
}

/// Compares about so many functions of each library, and of the interpreter.
#[track_caller]
fn match_binutils(names: &[&str], of_library: usize, of_python: usize) {
    let (libraries, python) = objects();
    for name in names {
        let object = libraries.join(name);
        let places = some_places(&object, of_library);
        let compared = compare(&object, &places);
        assert!(
            places.len() * 5 > of_library * 3 && compared.named * 100 > compared.frames * 98,
            "{name}: {compared:?}"
        );
    }
    let places = some_places(&python, of_python);
    let compared = compare(&python, &places);
    println!("{}: {compared:?}", python.display());
    assert!(places.len() > 10 && compared.named * 10 > compared.frames * 9, "{}: {compared:?}", python.display());
    // Binutils names the compilation unit's own file where DWARF 5 names an included one.
    assert!(compared.other_files * 50 < compared.frames, "{}: {compared:?}", python.display());
}

mod exhaustive {
    #[test]
    fn more_symbols_of_pytorch_and_python_match_binutils() {
        super::match_binutils(&["libc10.so", "libtorch_cpu.so", "libtorch_python.so"], 500, 3000);
    }
}
