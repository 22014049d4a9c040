//! Loads the library through `sys.remote_exec` of Python 3.14 and newer: Python itself runs a script in the main thread
//! of another process, between two of its instructions. No thread is stopped for it.
//!
//! Only an interpreter of the same version can ask for that, so the interpreter of the process is started once more.
//! The kernel requires the same permission as for ptrace.
//!
//! A main thread that waits for others does not run Python. [`load`] then takes the request back.
//!
//! The script loads nothing while a thread has a lock of the loader ([`LoaderLocks`]): the main thread would wait for
//! that thread, which may wait for the main thread.
//!
//! [`LoaderLocks`]: super::loader_locks::LoaderLocks

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::bail;

use super::request::{Request, Stopped, is_cancelled, not_loaded};
use super::traced_process::TracedProcess;
use crate::private_folder::{ATTACH_PREFIX, PrivateFolder, TemporaryFolder};

/// How long the main thread may take to run the script.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a script may go on that has begun when the request was taken back.
const BEGUN: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(1);
/// How long until a script that could load nothing is run again. Each time is twice the one before.
const FIRST_RETRY: Duration = Duration::from_millis(10);
/// The result of a script that could not call the library's function.
const NOT_LOADED: &str = "-";
/// The result of a script that could load nothing, because a thread is loading a library.
const BUSY: &str = "busy";
/// The largest answer of the script, in bytes.
const MAX_ANSWER: u64 = 16 << 10;
/// The files of the private folder.
const SCRIPT: &str = "script.py";
const RESULT: &str = "result";

/// Loads the library and calls its function. `None` if Python cannot do that here, or has not within five seconds.
pub(super) fn load(
    process: &TracedProcess,
    request: Request<'_>,
    cancel: &impl AsFd,
) -> anyhow::Result<Option<Stopped>> {
    let Some(interpreter) = &process.interpreter else { return Ok(None) };
    let Some(folder) = prepare(process, request) else { return Ok(None) };
    let script = folder.path().join(SCRIPT);
    let until = Instant::now() + TIMEOUT;
    let mut retry = FIRST_RETRY;
    let mut is_interrupted = false;
    let mut answer = Some(Outcome::Busy);
    while !is_interrupted && Instant::now() < until {
        match answer {
            // The script has not run, or has ended. So its result can be replaced.
            Some(Outcome::Busy) => {
                if folder.replace(RESULT, b"").is_err() {
                    return Ok(None);
                }
                match ask(process, interpreter, &script) {
                    Some(true) => {}
                    Some(false) => return Ok(None),
                    None => {
                        folder.keep();
                        return Ok(None);
                    }
                }
            }
            None => {}
            Some(_) => break,
        }
        std::thread::sleep(PAUSE);
        answer = read(&folder);
        is_interrupted = is_cancelled(cancel);
        if matches!(answer, Some(Outcome::Busy)) {
            std::thread::sleep(retry);
            retry *= 2;
        }
    }
    if answer.is_none() {
        // The next request replaces the one before.
        let is_taken_back = ask(process, interpreter, Path::new("/dev/null")) == Some(true);
        std::thread::sleep(BEGUN);
        answer = read(&folder);
        if answer.is_none() && !is_taken_back {
            folder.keep();
        }
    }
    match answer {
        Some(Outcome::Loaded(stopped)) => Ok(Some(stopped)),
        Some(Outcome::NotLoaded(text)) => Err(not_loaded(process.pid, &text)),
        Some(Outcome::Busy) | None if is_interrupted => bail!("interrupted"),
        Some(Outcome::Busy) | None => Ok(None),
    }
}

/// The folder with the script. It is beside the library, which the process reads too.
fn prepare(process: &TracedProcess, request: Request<'_>) -> Option<TemporaryFolder> {
    let (beside, temporary) = (Path::new(OsStr::from_bytes(request.library)).parent()?, std::env::temp_dir());
    let folder = PrivateFolder::temporary_in(&[beside, &temporary], ATTACH_PREFIX).ok()?;
    let source = source(request, process.loader_locks.addresses(), &folder.path().join(RESULT))?;
    folder.replace(SCRIPT, source.as_bytes()).ok()?;
    folder.is_visible(process.pid).then_some(folder)
}

/// The script. `None` for strings that are not UTF-8. `locks` are the words of the loader's locks.
fn source(request: Request<'_>, locks: &[u64], result: &Path) -> Option<String> {
    let text = |bytes| std::str::from_utf8(bytes).ok().and_then(|text| serde_json::to_string(text).ok());
    let (library, options) = (text(request.library)?, text(request.options)?);
    let result = text(result.as_os_str().as_bytes())?;
    // The library's function is called with the GIL, as through ptrace. A JSON string is one of Python.
    Some(format!(
        "import time\n\
         began = time.perf_counter_ns()\n\
         def is_busy():\n\
         \x20   try:\n\
         \x20       with open('/proc/self/mem', 'rb', 0) as memory:\n\
         \x20           return any(memory.seek(lock) and any(memory.read(4)) for lock in {locks:?})\n\
         \x20   except OSError:\n\
         \x20       return True\n\
         try:\n\
         \x20   if is_busy():\n\
         \x20       answer = '{BUSY} '\n\
         \x20   else:\n\
         \x20       import ctypes\n\
         \x20       function = ctypes.PyDLL({library}).memtrace_attach\n\
         \x20       function.argtypes = [ctypes.c_char_p, ctypes.c_uint64]\n\
         \x20       code = function({options}.encode(), 0)\n\
         \x20       answer = f'{{code}} {{time.perf_counter_ns() - began}}'\n\
         except Exception as error:\n\
         \x20   answer = f'{NOT_LOADED} {{error!s:.1000}}'.replace('\\n', ' ')\n\
         with open({result}, 'w') as file:\n\
         \x20   file.write(answer + '\\n')\n"
    ))
}

/// The result of the script.
#[derive(Debug)]
enum Outcome {
    Loaded(Stopped),
    /// Python's error.
    NotLoaded(String),
    Busy,
}

/// The outcome that the script has written, if it is complete.
fn read(folder: &PrivateFolder) -> Option<Outcome> {
    let text = folder.read(RESULT, MAX_ANSWER).ok()?;
    let text = String::from_utf8_lossy(&text);
    let (code, rest) = text.strip_suffix('\n')?.split_once(' ')?;
    match code {
        NOT_LOADED => Some(Outcome::NotLoaded(rest.to_owned())),
        BUSY => Some(Outcome::Busy),
        _ => {
            let (loading_ns, result) = (rest.parse().ok()?, code.parse().ok()?);
            Some(Outcome::Loaded(Stopped { stopped_ns: None, loading_ns, result }))
        }
    }
}

/// Asks the process to run a script. Returns whether it was asked, `None` if that is not known.
fn ask(process: &TracedProcess, interpreter: &Path, script: &Path) -> Option<bool> {
    let mut command = Command::new(interpreter);
    // It imports nothing from the folder in which memtrace runs.
    command.args(["-S", "-B", "-P", "-c", "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"]);
    command.arg(process.pid.to_string()).arg(script).env_clear();
    // Without these, the interpreter may not find its libraries.
    for variable in &process.variables {
        if let Some((name @ ("LD_LIBRARY_PATH" | "PYTHONHOME"), value)) = variable.split_once('=') {
            command.env(name, OsStr::new(value));
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) => status.code().map(|code| code == 0),
        Err(_) => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_macros, reason = "a test says that it was skipped")]
    fn the_answer_of_the_script_is_read_when_it_is_complete() {
        // A library with a function of this name, which returns the length of the options.
        let place = tempfile::Builder::new().prefix("a \"quoted\" name").tempdir().unwrap();
        let (code, library) = (place.path().join("code.c"), place.path().join("lib.so"));
        let function =
            "#include <string.h>\nint memtrace_attach(const char *text, unsigned long n) { return strlen(text) + n; }";
        std::fs::write(&code, function).unwrap();
        let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&code).status().unwrap();
        assert!(status.success());
        let folder = PrivateFolder::temporary_in(&[place.path()], "folder").unwrap();
        folder.replace(RESULT, b"").unwrap();
        let run = |library: &Path, locks: &[u64]| {
            let request = Request { library: library.as_os_str().as_bytes(), options: "a \"'\\ ü".as_bytes() };
            let source = source(request, locks, &folder.path().join(RESULT)).unwrap();
            Command::new("python3").arg("-c").arg(source).status().map(|status| assert!(status.success()))
        };
        assert!(read(&folder).is_none());
        if let Err(error) = run(&library, &[]) {
            println!("skipped: python3: {error}");
            return;
        }
        let Some(Outcome::Loaded(stopped)) = read(&folder) else { panic!("it has not loaded the library") };
        assert_eq!((stopped.result, stopped.stopped_ns), (8, None));
        run(&place.path().join("none.so"), &[]).unwrap();
        assert!(matches!(read(&folder), Some(Outcome::NotLoaded(text)) if text.contains("none.so")));
        // The value of this word is not 0, as that of a lock that a thread has.
        let taken = 1u32;
        let busy = |lock: u64| {
            let request = Request { library: b"library", options: b"" };
            let source = source(request, &[lock], &folder.path().join(RESULT)).unwrap();
            let in_this_process = format!("import ctypes\nlock = ctypes.c_uint32({taken})\n{source}");
            let source = in_this_process.replace(&format!("[{lock}]"), "[ctypes.addressof(lock)]");
            assert!(Command::new("python3").arg("-c").arg(source).status().unwrap().success());
            matches!(read(&folder), Some(Outcome::Busy))
        };
        assert!(busy(4711));
        // Memory that cannot be read.
        run(&library, &[1 << 46]).unwrap();
        assert!(matches!(read(&folder), Some(Outcome::Busy)));
        std::fs::write(folder.path().join(RESULT), "0 12").unwrap();
        assert!(read(&folder).is_none());
    }
}
