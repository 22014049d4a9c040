//! Loads the library through `sys.remote_exec` of Python 3.14 and newer: Python itself runs a script in the main thread of
//! another process, between two of its instructions. No thread is stopped for it.
//!
//! Only an interpreter of the same version can ask for that, so the interpreter of the process is started once more. The
//! kernel requires the same permission as for ptrace.
//!
//! A main thread that waits for others does not run Python. [`load`] then takes the request back.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::bail;

use super::inject::{Stopped, Strings, is_cancelled, not_loaded};
use super::traced_process::TracedProcess;

/// How long the main thread may take to run the script.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a script may go on that has begun when the request was taken back.
const BEGUN: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(1);
/// The result of a script that could not call the library's function.
const NOT_LOADED: &str = "-";

/// Loads the library and calls its function. `None` if Python cannot do that here, or has not within five seconds.
pub(super) fn load(
    process: &TracedProcess,
    strings: Strings<'_>,
    cancel: &impl AsFd,
) -> anyhow::Result<Option<Stopped>> {
    let Some(interpreter) = &process.interpreter else { return Ok(None) };
    let Ok(folder) = tempfile::Builder::new().prefix("memtrace-attach-").tempdir() else { return Ok(None) };
    let (script, result) = (folder.path().join("script.py"), folder.path().join("result"));
    let Some(source) = source(strings, &result) else { return Ok(None) };
    if fs::write(&script, source).is_err() || !is_visible(process.pid, &script) {
        return Ok(None);
    }
    if !request(process, interpreter, &script) {
        return Ok(None);
    }
    let until = Instant::now() + TIMEOUT;
    let mut is_interrupted = false;
    let mut answer = None;
    while answer.is_none() && !is_interrupted && Instant::now() < until {
        std::thread::sleep(PAUSE);
        answer = read(&result);
        is_interrupted = is_cancelled(cancel);
    }
    if answer.is_none() {
        // The next request replaces the one before.
        request(process, interpreter, Path::new("/dev/null"));
        std::thread::sleep(BEGUN);
        answer = read(&result);
    }
    match answer {
        Some(Ok(stopped)) => Ok(Some(stopped)),
        Some(Err(text)) => Err(not_loaded(process.pid, &text)),
        None if is_interrupted => bail!("interrupted"),
        None => Ok(None),
    }
}

/// The script. `None` for strings that are not UTF-8.
fn source([library, function, argument]: Strings<'_>, result: &Path) -> Option<String> {
    let text = |bytes| std::str::from_utf8(bytes).ok().and_then(|text| serde_json::to_string(text).ok());
    let (library, function, argument) = (text(library)?, text(function)?, text(argument)?);
    let result = text(result.as_os_str().as_bytes())?;
    // The library's function is called with the GIL, as through ptrace. A JSON string is one of Python.
    Some(format!(
        "import time\n\
         began = time.perf_counter_ns()\n\
         try:\n\
         \x20   import ctypes\n\
         \x20   function = ctypes.PyDLL({library})[{function}]\n\
         \x20   function.argtypes = [ctypes.c_char_p]\n\
         \x20   code = function({argument}.encode())\n\
         \x20   answer = f'{{code}} {{time.perf_counter_ns() - began}}'\n\
         except Exception as error:\n\
         \x20   answer = f'{NOT_LOADED} {{error!s:.1000}}'.replace('\\n', ' ')\n\
         with open({result}, 'w') as file:\n\
         \x20   file.write(answer + '\\n')\n"
    ))
}

/// What the script has written, if it is complete.
fn read(result: &Path) -> Option<Result<Stopped, String>> {
    let text = fs::read(result).ok()?;
    let text = String::from_utf8_lossy(&text);
    let (code, rest) = text.strip_suffix('\n')?.split_once(' ')?;
    if code == NOT_LOADED {
        return Some(Err(rest.to_owned()));
    }
    Some(Ok(Stopped { others_ns: None, loading_ns: rest.parse().ok()?, result: code.parse().ok()? }))
}

/// Whether the process has this file too, and not a file system of its own.
fn is_visible(pid: u32, file: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let theirs = Path::new(&format!("/proc/{pid}/root")).join(file.strip_prefix("/").unwrap_or(file));
    identity(file).is_some() && identity(file) == identity(&theirs)
}

/// Asks the process to run a script. Returns whether it was asked.
fn request(process: &TracedProcess, interpreter: &Path, script: &Path) -> bool {
    let mut command = Command::new(interpreter);
    command.args(["-S", "-B", "-c", "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"]);
    command.arg(process.pid.to_string()).arg(script).env_clear();
    // Without these, the interpreter may not find its libraries.
    for variable in &process.variables {
        if let Some((name @ ("LD_LIBRARY_PATH" | "PYTHONHOME"), value)) = variable.split_once('=') {
            command.env(name, OsStr::new(value));
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_macros, reason = "a test says that it was skipped")]
    fn the_answer_of_the_script_is_read_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let result = folder.path().join("a \"quoted\" name");
        let run = |function: &[u8]| {
            let strings: Strings<'_> = [b"libc.so.6", function, b"12"];
            let source = source(strings, &result).unwrap();
            Command::new("python3").arg("-c").arg(source).status().map(|status| assert!(status.success()))
        };
        assert!(read(&result).is_none());
        if let Err(error) = run(b"atoi") {
            println!("skipped: python3: {error}");
            return;
        }
        let stopped = read(&result).unwrap().unwrap();
        assert_eq!((stopped.result, stopped.others_ns), (12, None));
        run(b"no_such_function").unwrap();
        assert!(read(&result).unwrap().unwrap_err().contains("no_such_function"));
        fs::write(&result, "0 12").unwrap();
        assert!(read(&result).is_none());
    }
}
