//! Checks the command before anything is started: whether it can be found, executed and recorded.
//!
//! Every refusal has a message and, where something helps, a help line. Its exit code follows env(1).

mod elf;
mod refusal;
mod resolve;
mod system;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use elf::Kind;
use memtrace_trace::arch::NAME;
use refusal::refuse;
use resolve::NotFound;
use rustix::fs::StatVfsMountFlags;
use rustix::process::{getegid, geteuid};
use rustix::thread::no_new_privs;

use crate::sanitizer;

pub(crate) use refusal::{MEMTRACE_FAILED, NOT_EXECUTABLE, NOT_FOUND, Refusal};
pub(crate) use system::check as check_system;

/// The maximum depth of nested script interpreters that the kernel follows (`fs/exec.c`).
const MAX_SCRIPTS: usize = 5;
/// The part of a script that the kernel reads for the interpreter's name, in bytes (`BINPRM_BUF_SIZE`).
const MAX_FIRST_LINE: usize = 256;

/// A program that can be recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Checked {
    /// Whether AddressSanitizer's runtime is a shared library that the program loads.
    pub(crate) needs_asan: bool,
}

/// The file that execvp would execute for a command. `None` if there is none.
pub(crate) fn resolve_program(command: &OsStr) -> Option<PathBuf> {
    resolve::resolve(command).ok()
}

/// Finds the program that would be executed and checks that it can be recorded.
pub(crate) fn check(command: &OsStr, arguments: &[OsString]) -> Result<Checked, Refusal> {
    let shown = command.to_string_lossy();
    let path = match resolve::resolve(command) {
        Ok(path) => path,
        Err(NotFound::Missing) if command.is_empty() => {
            let help = "check the shell variable that should contain the command";
            return refuse(NOT_FOUND, "the name of the command is empty", help);
        }
        Err(NotFound::Missing) => {
            let help = if is_python_script(command) && Path::new(command).exists() {
                format!("run the script with Python: memtrace -- python {shown}")
            } else if shown.contains(char::is_whitespace) {
                "pass the command and its arguments as separate words, without quotes around them".to_owned()
            } else if shown.contains('/') {
                "check the spelling and the current directory".to_owned()
            } else {
                "check the spelling and PATH".to_owned()
            };
            return refuse(NOT_FOUND, format!("cannot execute {shown}: command not found"), help);
        }
        Err(NotFound::Directory) => {
            return refuse(NOT_EXECUTABLE, format!("cannot execute {shown}: it is a directory"), "name a program");
        }
        Err(NotFound::Forbidden(path)) => {
            let path = path.display();
            let help = if is_python_script(command) {
                let rest: String = arguments.iter().map(|a| format!(" {}", a.to_string_lossy())).collect();
                format!("run the script with Python: memtrace -- python {shown}{rest}")
            } else {
                format!("make it executable: chmod +x {path}")
            };
            return refuse(NOT_EXECUTABLE, format!("cannot execute {path}: it is not executable"), help);
        }
    };
    check_file(&path, 0)
}

fn is_python_script(command: &OsStr) -> bool {
    Path::new(command).extension().is_some_and(|e| e == "py")
}

/// Checks one program and the interpreters that it needs.
fn check_file(path: &Path, depth: usize) -> Result<Checked, Refusal> {
    let shown = path.display();
    if depth > MAX_SCRIPTS {
        return refuse(
            NOT_EXECUTABLE,
            format!("cannot execute {shown}: more than {MAX_SCRIPTS} scripts name each other as interpreters"),
            "name a program as the interpreter in the first line",
        );
    }
    check_privileges(path)?;
    // A program that can be executed but not read cannot be checked. Leave it to the kernel.
    let Ok(file) = File::open(path) else { return Ok(Checked { needs_asan: false }) };
    let mut start = [0; MAX_FIRST_LINE];
    let read = file.read_at(&mut start, 0).unwrap_or(0);
    if let Some(line) = start[..read].strip_prefix(b"#!") {
        return check_interpreter(path, line, depth);
    }
    match elf::kind(&file) {
        // The file has no known magic number. execvp passes such a file to the shell.
        Kind::NotElf => check_file(Path::new("/bin/sh"), depth + 1),
        Kind::Dynamic { interpreter } => {
            if interpreter.file_name().is_some_and(|n| n.as_bytes().starts_with(b"ld-musl")) {
                return refuse(
                    MEMTRACE_FAILED,
                    format!("cannot record {shown}: it is a musl program, and memtrace needs glibc"),
                    "run a build of the program that uses glibc",
                );
            }
            if !interpreter.exists() {
                return refuse(
                    NOT_FOUND,
                    format!("cannot execute {shown}: its loader {} does not exist", interpreter.display()),
                    "install the loader, or run a build of the program for this system",
                );
            }
            Ok(Checked { needs_asan: elf::needs(&file, sanitizer::is_asan) })
        }
        // The dynamic loader itself has no loader, but it preloads libraries.
        Kind::Static if is_loader(path) => Ok(Checked { needs_asan: false }),
        Kind::Static => refuse(
            MEMTRACE_FAILED,
            format!("cannot record {shown}: it is statically linked, so no library can be preloaded"),
            "run a dynamically linked build of the program",
        ),
        Kind::Foreign { what } => refuse(
            MEMTRACE_FAILED,
            format!("cannot record {shown}: it is {what}, and this memtrace records 64-bit {NAME} programs"),
            "use a build of memtrace for that machine",
        ),
    }
}

fn is_loader(path: &Path) -> bool {
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    target.file_name().is_some_and(|n| n.as_bytes().starts_with(b"ld-linux") || n.as_bytes().starts_with(b"ld-2."))
}

fn check_interpreter(script: &Path, line: &[u8], depth: usize) -> Result<Checked, Refusal> {
    let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
    let is_blank = |b: &u8| *b == b' ' || *b == b'\t';
    let name = line.split(is_blank).find(|word| !word.is_empty()).unwrap_or_default();
    let shown = script.display();
    if name.is_empty() {
        return refuse(
            NOT_EXECUTABLE,
            format!("cannot execute {shown}: its first line names no interpreter"),
            "write the path of the interpreter after #! in the first line",
        );
    }
    let interpreter = Path::new(OsStr::from_bytes(name));
    if !interpreter.exists() {
        let help = if name.ends_with(b"\r") {
            "convert the DOS line ends of the script to Unix line ends"
        } else {
            "install the interpreter, or correct the first line of the script"
        };
        let name = String::from_utf8_lossy(name);
        return refuse(NOT_FOUND, format!("cannot execute {shown}: its interpreter {name:?} does not exist"), help);
    }
    check_file(interpreter, depth + 1)
}

/// How a running program was linked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Linkage {
    /// A dynamic loader loads it, so libraries can be preloaded.
    Dynamic,
    /// It has no dynamic loader.
    Static,
    /// It is for another machine.
    Foreign,
}

/// How the program in this file was linked. `None` when the file cannot be read or is not ELF.
pub(crate) fn linkage(path: &Path) -> Option<Linkage> {
    match elf::kind(File::open(path).ok()?) {
        Kind::Dynamic { .. } => Some(Linkage::Dynamic),
        Kind::Static if is_loader(path) => Some(Linkage::Dynamic),
        Kind::Static => Some(Linkage::Static),
        Kind::Foreign { .. } => Some(Linkage::Foreign),
        Kind::NotElf => None,
    }
}

/// Whether executing this program raises privileges.
pub(crate) fn is_privileged(path: &Path) -> bool {
    privileges(path).is_some()
}

/// A description of the privileges that executing this program adds. `None` when there are none.
fn privileges(path: &Path) -> Option<&'static str> {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let meta = std::fs::metadata(path).ok()?;
    if no_new_privs().unwrap_or(false) || is_on_nosuid(path) {
        return None;
    }
    let mode = meta.mode();
    if mode & libc::S_ISUID != 0 && meta.uid() != uid {
        Some("setuid")
    } else if mode & libc::S_ISGID != 0 && mode & libc::S_IXGRP != 0 && meta.gid() != gid {
        Some("setgid")
    } else if uid != 0 && has_capabilities(path) {
        Some("privileged (it has file capabilities)")
    } else {
        None
    }
}

/// Refuses a program that gains privileges when it is executed. The loader ignores LD_PRELOAD for such programs
/// (`AT_SECURE`).
fn check_privileges(path: &Path) -> Result<(), Refusal> {
    let Some(what) = privileges(path) else { return Ok(()) };
    let shown = path.display();
    refuse(
        MEMTRACE_FAILED,
        format!("cannot record {shown}: it is {what}, so no library can be preloaded"),
        format!("start memtrace from the privileged program: {shown} ... memtrace -- COMMAND"),
    )
}

fn is_on_nosuid(path: &Path) -> bool {
    rustix::fs::statvfs(path).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::NOSUID))
}

fn has_capabilities(path: &Path) -> bool {
    rustix::fs::getxattr_query(path, c"security.capability").is_ok_and(|size| size > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    fn file(dir: &tempfile::TempDir, name: &str, content: &[u8], mode: u32) -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn refusal(path: &Path) -> Refusal {
        check(path.as_os_str(), &[]).unwrap_err()
    }

    fn help(refusal: &Refusal) -> &str {
        refusal.help.as_deref().unwrap_or_default()
    }

    #[test]
    fn the_shell_can_be_recorded() {
        assert!(check(OsStr::new("sh"), &[]).is_ok());
    }

    #[test]
    fn every_refusal_has_help() {
        let dir = tempfile::tempdir().unwrap();
        let r = check(OsStr::new("no-such-command-here"), &[]).unwrap_err();
        assert!(r.code == NOT_FOUND && help(&r).contains("check the spelling"), "{r:?}");
        let r = check(OsStr::new("python train.py"), &[]).unwrap_err();
        assert!(r.code == NOT_FOUND && help(&r).contains("separate words"), "{r:?}");
        let r = refusal(&file(&dir, "train.py", b"print()", 0o644));
        assert!(r.code == NOT_EXECUTABLE && help(&r).contains("memtrace -- python"), "{r:?}");
        let r = refusal(&file(&dir, "tool", b"x", 0o644));
        assert!(r.code == NOT_EXECUTABLE && help(&r).contains("chmod +x"), "{r:?}");
        let r = refusal(dir.path());
        assert!(r.code == NOT_EXECUTABLE && r.message.contains("directory") && r.help.is_some(), "{r:?}");
        let r = refusal(&file(&dir, "bad", b"#!/no/such/interpreter\n", 0o755));
        assert!(r.code == NOT_FOUND && r.message.contains("/no/such/interpreter") && r.help.is_some(), "{r:?}");
        let r = refusal(&file(&dir, "dos", b"#!/bin/sh\r\n", 0o755));
        assert!(r.code == NOT_FOUND && help(&r).contains("DOS"), "{r:?}");
        let loops = file(&dir, "loop", b"", 0o755);
        std::fs::write(&loops, format!("#!{}\n", loops.display())).unwrap();
        assert_eq!(refusal(&loops).code, NOT_EXECUTABLE);
    }

    #[test]
    fn a_script_without_interpreter_line_goes_to_the_shell() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir, "plain", b"echo hello\n", 0o755);
        assert!(check(path.as_os_str(), &[]).is_ok());
    }
}
