//! A redacted run: the traces, the manifest and the symbols of a run folder with other names, and new reports of them.

use std::io::{BufWriter, Write};
use std::path::Path;

use memtrace_input::error::{Error, Result};
use memtrace_input::load::{MANIFEST_FILE, Process, Run, SNAPSHOT_END_REASON};
use memtrace_input::symbols::SYMBOLS_FILE;
use memtrace_input::{KeptState, RunFolder};
use memtrace_rewrite::{KEY_BYTES, Redactor};
use memtrace_summary::Progress;

use crate::finish::{FinishOptions, FinishedRun, finish_run};

/// The maximum size of `run.json` and of `symbols.json`, in bytes.
const MAX_JSON: u64 = 256 << 20;

/// Writes a redacted copy of `run` into the empty folder `out`. `key` is random and is not kept.
///
/// Only traces with the files beside them, `run.json` and `symbols.json` are read. The other files of `out` are written
/// from the redacted ones, so they cannot have a name that these do not have.
///
/// # Errors
///
/// If the run is a snapshot, if a file cannot be read, or if one cannot be written.
pub fn redact_run(
    run: &Run,
    out: &RunFolder,
    key: [u8; KEY_BYTES],
    options: &FinishOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<FinishedRun> {
    let mut redactor = Redactor::new(key);
    run.processes().iter().for_each(|process| redactor.add_public_names(process.definitions()));
    for process in run.processes() {
        let name = trace_name(process);
        let path = out.path().join(&name);
        let cannot = || Error::io(format!("cannot write {}", path.display()));
        let mut new = out.create_atomic(&name).map_err(cannot())?;
        let mut writer = BufWriter::new(new.file());
        redactor.trace(process.path(), &mut writer, &path)?;
        writer.flush().map_err(cannot())?;
        drop(writer);
        new.commit().map_err(cannot())?;
        if let Some(state) = process.recording().kept_state() {
            write(out, &KeptState::file_name(&name).to_string_lossy(), &redactor.kept_state(state))?;
        }
    }
    let source = if run.path().is_dir() { run.path() } else { run.path().parent().unwrap_or(Path::new("")) };
    let source = if source.as_os_str().is_empty() { Path::new(".") } else { source };
    let path = |name: &str| source.join(name);
    let source = RunFolder::open(source).map_err(Error::io(format!("cannot open {}", source.display())))?;
    match read(&source, MANIFEST_FILE)? {
        Some(text) => write(out, MANIFEST_FILE, redactor.manifest(&text, &path(MANIFEST_FILE))?.as_bytes())?,
        // Who made the folder may have claimed it with an empty file of this name.
        None => drop(out.remove(MANIFEST_FILE)),
    }
    let symbols = match run.new_symbols() {
        Some(symbols) => Some(symbols.to_json()),
        None => read(&source, SYMBOLS_FILE)?,
    };
    if let Some(symbols) = symbols {
        write(out, SYMBOLS_FILE, redactor.symbols(&symbols, &path(SYMBOLS_FILE))?.as_bytes())?;
    }
    finish_run(out, options, progress)
}

/// Whether a run can be redacted: its processes are traces, not snapshots of PyTorch.
pub fn can_redact(run: &Run) -> bool {
    let is_snapshot = |process: &Process| process.recording().end().is_some_and(|e| e.reason == SNAPSHOT_END_REASON);
    !run.processes().iter().any(is_snapshot)
}

/// The file name of a process's trace. memtrace names traces by numbers; another name could say something.
fn trace_name(process: &Process) -> String {
    let name = process.path().file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_number = |stem: &str| !stem.is_empty() && stem.chars().all(|c| c.is_ascii_digit() || matches!(c, '-' | '.'));
    match name.strip_suffix(".mtr").filter(|stem| is_number(stem)) {
        Some(_) => name.to_owned(),
        None => format!("{}.mtr", process.pid()),
    }
}

/// The text of a file; `None` if there is none.
fn read(folder: &RunFolder, name: &str) -> Result<Option<String>> {
    let cannot = || Error::io(format!("cannot read {}", folder.path().join(name).display()));
    let text = match folder.read_file(name, MAX_JSON) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(cannot()(e)),
    };
    String::from_utf8(text).map(Some).map_err(|e| cannot()(std::io::Error::other(e.utf8_error())))
}

fn write(folder: &RunFolder, name: &str, content: &[u8]) -> Result<()> {
    let cannot = || Error::io(format!("cannot write {}", folder.path().join(name).display()));
    let mut new = folder.create_atomic(name).map_err(cannot())?;
    new.file().write_all(content).map_err(cannot())?;
    new.commit().map_err(cannot())
}
