//! The modes of all that memtrace creates, whatever the umask, and of what it uses again (docs/reference/safety.md).

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_tests::traced_program::{python, root};

use crate::launcher_support::*;

/// Runs commands of memtrace and then lists every file and folder below the folder `$1`, and below the cache of root.
/// `$2` is memtrace, `$3` a Python with PyTorch, `$4` the umask.
const COMMANDS: &str = r#"
set -e
folder=$1 memtrace=$2 python=$3
export HOME=$folder/home TMPDIR=$folder/tmp XDG_CACHE_HOME=$folder/home/cache XDG_RUNTIME_DIR=$folder/run-time
mkdir -m 700 "$HOME" "$TMPDIR" "$XDG_RUNTIME_DIR" "$folder/out"
umask "$4"
cd "$folder/out"
exec 3>&2 >"$folder/output" 2>&1
printf 'import sys, torch\ndef main():\n    torch.ones(int(sys.argv[1]) << 20, device="cuda")\nmain()\n' \
    >"$folder/program.py"
"$memtrace" dry-run -o run -- "$python" "$folder/program.py" 1
"$memtrace" dry-run -o tries --vary n=1,2 -- "$python" "$folder/program.py" {n}
for format in snapshot html perfetto speedscope folded pprof csv json; do
    "$memtrace" export run --to $format -o new.$format
done
"$memtrace" export run --to parquet -o tables
"$memtrace" export run --to csv
"$memtrace" lines run --html -o lines.html
"$memtrace" redact run -o redacted
"$memtrace" diff run redacted --html=diff.html || true
"$memtrace" report run --json >/dev/null
"$memtrace" doctor -- true || true
"$memtrace" man -o man
find "$folder" -mindepth 1 -not -path "$folder/output" -not -path "$folder/program.py" -printf '%m %y %p\n' >&3
[ "$(id -u)" != 0 ] || find /var/cache/memtrace -printf '%m %y %p\n' >&3
"#;

/// Runs [`COMMANDS`] in a folder. Root has an empty cache for it.
fn run_commands(folder: &Path, umask: &str) -> Output {
    let mut command = Command::new(root().join("scripts/sim"));
    if is_root() {
        let isolated = r#"mount -t tmpfs -o mode=755 none /var/cache && exec "$@""#;
        command.args(["unshare", "-m", "sh", "-c", isolated, "sh"]);
    }
    command.args(["sh", "-c", COMMANDS, "sh"]).arg(folder).arg(memtrace()).arg(python()).arg(umask);
    output(&mut command)
}

fn is_root() -> bool {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    unsafe { libc::geteuid() == 0 }
}

/// The paths that the commands created, with the mode of each.
#[track_caller]
fn created(umask: &str) -> BTreeMap<PathBuf, u32> {
    let folder = tempfile::tempdir().unwrap();
    let result = run_commands(folder.path(), umask);
    let log = std::fs::read_to_string(folder.path().join("output")).unwrap_or_default();
    assert!(result.status.success(), "{log}\n{}", stderr(&result));
    let list = stderr(&result);
    let parts = list.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ' ');
        Some((parts.next()?, parts.next()?, parts.next()?))
    });
    // The mode of a link has no meaning.
    let parts = parts.filter(|(_, kind, _)| *kind != "l");
    let modes = parts.filter_map(|(mode, _, path)| Some((PathBuf::from(path), u32::from_str_radix(mode, 8).ok()?)));
    // The names have no random parts but those of the temporary folder.
    let known = |path: PathBuf| path.strip_prefix(folder.path()).map_or(path.clone(), Path::to_owned);
    let modes: BTreeMap<_, _> = modes.map(|(path, mode)| (known(path), mode)).collect();
    for name in [
        "new.html",
        "new.snapshot",
        "tables",
        "redacted",
        "run/run.json",
        "tries/n-1/run.json",
        "lines.html",
        "diff.html",
        "man",
    ] {
        assert!(modes.contains_key(&Path::new("out").join(name)), "{name} is missing: {modes:#?}\n{log}");
    }
    let has = |name: &str| modes.keys().any(|path| path.ends_with(name));
    for name in
        ["libmemtrace_interpose.so", "site-packages/sitecustomize.py", "site-packages/__pycache__", "libcuda.so.1"]
    {
        assert!(has(name), "{name} is missing: {modes:#?}\n{log}");
    }
    modes
}

/// Only this user can read and change what memtrace creates. The code that the programs of root load is an exception:
/// all users can read it, because a program may change its user, and only root can change it.
#[track_caller]
fn assert_private(modes: &BTreeMap<PathBuf, u32>) {
    for (path, mode) in modes {
        let others = if path.starts_with("/var/cache") { 0o022 } else { 0o077 };
        assert_eq!(mode & others, 0, "{mode:o} {}", path.display());
    }
}

#[test]
fn the_umask_opens_nothing_that_memtrace_creates() {
    assert_private(&created("000"));
}

#[test]
fn the_umask_closes_nothing_that_memtrace_needs() {
    let modes = created("077");
    assert_private(&modes);
    let code = modes.iter().filter(|(path, _)| path.starts_with("/var/cache/memtrace"));
    for (path, mode) in code.filter(|(path, _)| !path.components().any(|part| part.as_os_str() == "__pycache__")) {
        assert_eq!(mode & 0o444, 0o444, "{mode:o} {}", path.display());
    }
}

/// Libraries and modules of a dry run that another user could have changed, or that are not what memtrace wrote, are
/// made anew and never loaded.
#[test]
fn changed_libraries_of_dry_runs_are_not_used() {
    const MARK: &str = "forged";
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let run = |name: &str| {
        let mut command = Command::new(root().join("scripts/sim"));
        if is_root() {
            // Root prefers folders that every user can search.
            let isolated = r#"mount -t tmpfs -o mode=700 none /var/cache && exec "$@""#;
            command.args(["unshare", "-m", "sh", "-c", isolated, "sh"]);
        }
        command.args(["env", "-u", "XDG_RUNTIME_DIR"]).arg(format!("XDG_CACHE_HOME={}", cache.display()));
        command.arg(memtrace()).args(["dry-run", "--quiet", "--no-snapshot", "-o"]).arg(folder.path().join(name));
        command.arg("--").arg(python()).args(["-c", "import sitecustomize; print(sitecustomize.__file__)"]);
        let output = output(&mut command);
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    std::fs::create_dir(&cache).unwrap();
    for path in [folder.path(), &cache] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let first = run("first");
    let module = PathBuf::from(first.trim());
    assert!(module.starts_with(&cache), "{first}");
    let libraries = module.ancestors().nth(2).unwrap();
    let original = std::fs::read(&module).unwrap();
    let forge = || {
        let forged = [&original[..], format!("\nprint({MARK:?})\n").as_bytes()].concat();
        std::fs::write(&module, forged).unwrap();
    };
    let open = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let assert_made_anew = |name: &str| {
        assert_eq!(run(name), first, "{name}");
        assert_eq!(std::fs::read(&module).unwrap(), original, "{name}");
    };
    forge();
    assert_made_anew("changed");
    // As versions before wrote them under a umask of 0.
    forge();
    open(libraries, 0o777);
    assert_made_anew("folder");
    assert_eq!(std::fs::metadata(libraries).unwrap().permissions().mode() & 0o022, 0);
    open(&module, 0o666);
    assert_made_anew("file");
    open(&module.with_file_name("__pycache__"), 0o777);
    assert_made_anew("compiled");
    std::fs::write(libraries.join("libcuda.so.1"), "forged").unwrap();
    assert_made_anew("library");
    assert_ne!(std::fs::read(libraries.join("libcuda.so.1")).unwrap(), b"forged");
}
