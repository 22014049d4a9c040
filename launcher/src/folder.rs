//! The folder of one run: readable by its owner only, and never one that holds something else.

use std::ffi::OsString;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Makes the run folder: `wanted`, which must be new or empty, or one in the current folder named after the program and the
/// time.
pub(crate) fn create(wanted: Option<&Path>, command: &[OsString], stamp: &str) -> anyhow::Result<PathBuf> {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    if let Some(path) = wanted {
        let shown = path.display();
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("cannot create {}; choose another folder with -o", parent.display()))?;
        }
        match builder.create(path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let mut entries = std::fs::read_dir(path)
                    .with_context(|| format!("{shown} cannot be used as the run's folder; choose another with -o"))?;
                if entries.next().is_some() {
                    bail!("{shown} is not empty; remove it or choose another folder with -o");
                }
            }
            Err(e) => return Err(e).with_context(|| format!("cannot create {shown}; choose another folder with -o")),
        }
        check_writable(path)?;
        return Ok(path.to_owned());
    }
    let name = format!("memtrace-{}-{stamp}", program(command));
    for suffix in 1..1000 {
        let path = PathBuf::from(if suffix == 1 { name.clone() } else { format!("{name}-{suffix}") });
        match builder.create(&path) {
            Ok(()) => return check_writable(&path).map(|()| path),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => {
                return Err(e)
                    .with_context(|| format!("cannot create {} here; choose another folder with -o", path.display()));
            }
        }
    }
    bail!("there are too many folders called {name}; choose another name with -o")
}

fn check_writable(path: &Path) -> anyhow::Result<()> {
    let probe = path.join(".memtrace-writable");
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&probe);
    made.with_context(|| format!("cannot write into {}; choose another folder with -o", path.display()))?;
    std::fs::remove_file(&probe).ok();
    Ok(())
}

/// Writes a file as a whole or not at all.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let partial = path.with_extension("partial");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    let written = file.write_all(content).and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        std::fs::remove_file(&partial).ok();
    }
    written
}

/// A short name for the program: the script's where an interpreter runs one.
fn program(command: &[OsString]) -> String {
    let stem = |a: &OsString| Path::new(a).file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let first = command.first().map(stem).unwrap_or_default();
    let arguments = command.get(1..).unwrap_or_default();
    let module = arguments.iter().position(|a| a == "-m").filter(|_| first.starts_with("python"));
    let script = arguments.iter().find(|a| Path::new(a).extension().is_some_and(|e| e == "py"));
    let name = match (script, module.and_then(|i| arguments.get(i + 1))) {
        (Some(script), _) => stem(script),
        (None, Some(module)) => module.to_string_lossy().into_owned(),
        (None, None) => first,
    };
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' }).take(48).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { "run".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn name(line: &str) -> String {
        program(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn named_after_the_script() {
        assert_eq!(name("python train.py --bs 16"), "train");
        assert_eq!(name("/usr/bin/python3.12 -u examples/gpt/train.py"), "train");
        assert_eq!(name("python -m torch.distributed.run --nproc 2 ddp.py"), "ddp");
        assert_eq!(name("python -m pkg.tool"), "pkg.tool");
        assert_eq!(name("torchrun --nproc-per-node 2 x/ddp.py"), "ddp");
        assert_eq!(name("./a b"), "a");
        assert_eq!(name("/bin/.. x"), "run");
        assert_eq!(name("ä/ü"), "_");
    }

    #[test]
    fn only_new_or_empty_folders() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        assert_eq!(create(Some(&path), &[], "").unwrap(), path);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        create(Some(&path), &[], "").unwrap();
        write_atomically(&path.join("run.json"), b"{}").unwrap();
        assert_eq!(std::fs::metadata(path.join("run.json")).unwrap().permissions().mode() & 0o777, 0o600);
        let error = create(Some(&path), &[], "").unwrap_err().to_string();
        assert!(error.contains("not empty"), "{error}");
        let error = create(Some(&path.join("run.json")), &[], "").unwrap_err().to_string();
        assert!(error.contains("choose another"), "{error}");
    }
}
