//! The environment variables with which XLA writes about compiled programs, and does without its memory pool. They are
//! set only if the user asks for it (`--xla-dump`, `--pools off`).

use std::ffi::OsString;
use std::path::Path;

use memtrace_analysis::xla::XLA_FOLDER;

use crate::cli::{Pools, Run};
use crate::message::WithHelp;

const FLAGS: &str = "XLA_FLAGS";
const ALLOCATOR: &str = "XLA_PYTHON_CLIENT_ALLOCATOR";
const PREALLOCATE: &str = "XLA_PYTHON_CLIENT_PREALLOCATE";
/// The allocators of XLA that ask CUDA for each buffer. The first takes CUDA's stream-ordered allocator, which is as
/// fast as XLA's pool. The other waits for the device at each call, and rounds to 2 MiB.
const EACH_BUFFER: [&str; 2] = ["cuda_async", "platform"];

/// The variables to set for a run whose folder is `folder`, an absolute path.
///
/// # Errors
///
/// If the user has set a variable to something else, or if the path cannot be part of `XLA_FLAGS`.
pub(crate) fn environment(run: &Run, folder: &Path) -> anyhow::Result<Vec<(&'static str, OsString)>> {
    let mut variables = Vec::new();
    if run.xla_dump {
        let flags = std::env::var_os(FLAGS).unwrap_or_default();
        variables.push((FLAGS, dump_flags(&flags.to_string_lossy(), folder)?.into()));
    }
    if run.pools == Pools::Off {
        let set = std::env::var(ALLOCATOR).unwrap_or_default();
        if set.is_empty() {
            variables.push((ALLOCATOR, EACH_BUFFER[0].into()));
        } else if !EACH_BUFFER.contains(&set.as_str()) {
            let help = format!("unset {ALLOCATOR}, or leave out --pools off");
            return Err(WithHelp::new(format!("{ALLOCATOR} is {set}, which is a pool"), help).into());
        }
        // Otherwise the stream-ordered allocator takes a share of the device at the start, and gives it back.
        variables.push((PREALLOCATE, "false".into()));
    }
    Ok(variables)
}

/// The user's flags, with those of the dump behind them.
fn dump_flags(flags: &str, folder: &Path) -> anyhow::Result<String> {
    let folder = folder.join(XLA_FOLDER);
    let path = folder.to_str().filter(|path| !path.contains(|c: char| c.is_whitespace() || "'\"\\".contains(c)));
    let Some(path) = path else {
        let error = format!("{FLAGS} cannot have the path {}", folder.display());
        return Err(WithHelp::new(error, "choose a run folder without spaces and quotes with -o DIR").into());
    };
    if flags.contains("xla_dump_to") {
        let help = "remove --xla_dump_to from XLA_FLAGS, or leave out --xla-dump";
        return Err(WithHelp::new(format!("{FLAGS} already has --xla_dump_to"), help).into());
    }
    // XLA takes a value that does not begin with a dash for the name of a file with flags.
    if !flags.trim_start().starts_with('-') && !flags.trim().is_empty() {
        let help = "write the flags into XLA_FLAGS itself";
        return Err(WithHelp::new(format!("{FLAGS} is the name of a file with flags"), help).into());
    }
    let ours = format!("--xla_dump_to={path} --xla_dump_hlo_as_text");
    Ok(format!("{} {ours}", flags.trim()).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_the_user_are_kept() {
        let flags = |flags: &str| dump_flags(flags, Path::new("/runs/a")).map_err(|e| e.to_string());
        let ours = "--xla_dump_to=/runs/a/xla --xla_dump_hlo_as_text";
        assert_eq!(flags(""), Ok(ours.to_owned()));
        assert_eq!(flags(" --xla_x=1 "), Ok(format!("--xla_x=1 {ours}")));
        assert_eq!(flags("--xla_dump_to=/a"), Err("XLA_FLAGS already has --xla_dump_to".to_owned()));
        assert!(flags("/etc/flags").is_err());
        assert!(dump_flags("", Path::new("/runs/my run")).is_err());
    }
}
