//! The command `gpu-memtrace`: executes the `memtrace` beside it, for machines where another `memtrace` comes first on
//! PATH.
//!
//! It has no runtime of Rust, which would ignore SIGPIPE and open closed standard streams: the command inherits both.

#![no_main]

use std::ffi::{CString, c_char, c_int};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memtrace_trace::printable;

/// The exit status of `memtrace` when it cannot run the command.
const CANNOT_RUN: c_int = 125;

/// # Safety
///
/// `argv` is that of a process: `argc` strings and a null pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn main(_argc: c_int, argv: *mut *const c_char) -> c_int {
    let name = match std::env::current_exe() {
        Ok(own) => own.with_file_name("memtrace"),
        Err(e) => return fail(&format!("cannot find the folder of gpu-memtrace: {e}")),
    };
    if !is_program(&name) {
        let name = name.display();
        return fail(&format!("{name} is not the binary of gpu-memtrace; another distribution may have replaced it"));
    }
    let Ok(path) = CString::new(name.as_os_str().as_bytes()) else { return CANNOT_RUN };
    // SAFETY: `argv` ends with a null pointer, and its first element, which is this program's name, can be written. A
    // process without arguments has the null pointer there, and keeps it.
    unsafe {
        if !(*argv).is_null() {
            *argv = path.as_ptr();
        }
        libc::execv(path.as_ptr(), argv);
    }
    fail(&format!("cannot execute {}: {}", name.display(), std::io::Error::last_os_error()))
}

/// Whether the file is a compiled program. A script of the same name belongs to another distribution.
fn is_program(path: &Path) -> bool {
    let mut start = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *b"\x7fELF"
}

fn fail(text: &str) -> c_int {
    // The text has the path of this program.
    let error = printable::output_line(&format!("error: {text}"));
    #[expect(clippy::disallowed_methods, reason = "this program has one message")]
    let mut stderr = std::io::stderr();
    let _ = writeln!(stderr, "{error}\nhelp: reinstall it: pip install --force-reinstall gpu-memtrace");
    CANNOT_RUN
}
