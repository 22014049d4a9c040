//! `memtrace doctor`: checks what can be recorded here, and reports each failed check with its reason and fix.
//!
//! Each file holds checks of one subject. A check returns a [`report::Check`] and changes nothing. It tries the
//! operation where it can: it shares memory, connects a socket, records a process, reads the frames of each Python. A
//! given command is recorded by this same binary, as `memtrace run` does. The trace shows what could be recorded.

mod clock;
mod evidence;
mod features;
mod gpus;
mod ipc;
mod kernel;
mod layers;
mod limits;
mod own_command;
mod preload;
mod probe;
mod program;
mod pythons;
mod report;
mod self_test;
mod storage;
mod supervise;
mod tested;
mod text;
mod torch;
mod units;

use std::path::{Path, PathBuf};

use anyhow::Context;

use self::program::RecordOptions;
pub(crate) use self::report::DoctorReport;
use self::report::Machine;
pub(crate) use self::self_test::self_test_program;
use self::text::Style;
use crate::cli::Doctor;
use crate::host;
use crate::inherited::InheritedState;
use crate::message::WithHelp;
use crate::private_folder::{DOCTOR_PREFIX, PrivateFolder};

/// Checks the machine and, if one is given, the command. Must be called while this process has one thread.
///
/// Fails when no temporary folder can be created.
pub(crate) fn run_checks(options: &Doctor) -> anyhow::Result<DoctorReport> {
    // This forks a child, so it must come before the first thread.
    let (gpu, gpus) = gpus::gpus();
    let scratch = PrivateFolder::temporary(DOCTOR_PREFIX).with_context(|| {
        WithHelp::new("cannot create a temporary folder", "set TMPDIR to a folder that you can write to")
    })?;
    let state = InheritedState::capture_and_adjust();
    let here = options.output.as_deref().and_then(Path::parent).filter(|p| !p.as_os_str().is_empty());
    let here = here.map_or_else(|| std::env::current_dir().unwrap_or_else(|_| PathBuf::from(".")), Path::to_owned);
    let mut checks = vec![
        kernel::system(),
        ipc::memory(),
        ipc::socket(),
        kernel::seccomp(),
        kernel::proc(),
        kernel::checked_memory(),
        kernel::ptrace(),
        limits::group_memory(),
        limits::address_space(),
        limits::open_files(),
        storage::storage(&here),
        clock::clock(),
        own_command::own_command(),
        preload::library(&scratch.path().join("library")),
        preload::others(),
    ];
    checks.extend(preload::audit());
    checks.extend(preload::nested());
    checks.push(self_test::self_test(&scratch.path().join("self-test")));
    checks.push(gpu);
    let pythons = pythons::pythons(&scratch.path().join("pythons"));
    let program = (!options.command.is_empty()).then(|| {
        let folder = options.output.clone().unwrap_or_else(|| scratch.path().join("run"));
        let record_options = RecordOptions {
            command: &options.command,
            folder: &folder,
            keep: options.output.is_some(),
            limit: options.duration,
            to_stderr: options.json,
        };
        program::record(state, record_options)
    });
    Ok(DoctorReport::new(Machine { host: host::name(), checks, gpus, pythons }, program))
}

/// The report for people.
pub(crate) fn to_text(report: &DoctorReport, color: bool) -> String {
    text::to_text(report, Style { color })
}
