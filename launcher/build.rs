//! Builds the preloaded library (`memtrace-interpose`) and the simulated CUDA (`simulate`), and lets the launcher embed
//! them, so that all always come from one build. Lists the pages and JSON Schemas that `memtrace docs` prints.
//!
//! Cargo cannot depend on a cdylib. This script therefore runs a second cargo with its own target directory.
//! `MEMTRACE_EMBED_LIBRARY` names a library, and `MEMTRACE_EMBED_SIMCUDA` a folder, that were built elsewhere instead.

#![expect(clippy::disallowed_macros, reason = "cargo reads what a build script prints")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const NAME: &str = "libmemtrace_interpose.so";
/// The parts of the simulated CUDA.
const SIMCUDA: [&str; 3] = ["driver", "runtime", "libs"];

fn main() {
    if let Some(error) = unsupported_target() {
        println!("cargo::error={error}");
        return;
    }
    list_pages();
    println!("cargo::rerun-if-env-changed=MEMTRACE_EMBED_LIBRARY");
    println!("cargo::rerun-if-env-changed=MEMTRACE_EMBED_SIMCUDA");
    let library = match env::var_os("MEMTRACE_EMBED_LIBRARY") {
        Some(path) => PathBuf::from(path),
        None => build(&["memtrace-interpose"], "library", &["interpose", "trace/src", "trace/Cargo.toml"]).join(NAME),
    };
    println!("cargo::rerun-if-changed={}", library.display());
    let content = fs::read(&library).unwrap_or_else(|e| panic!("cannot read {}: {e}", library.display()));
    println!("cargo::rustc-env=MEMTRACE_EMBEDDED_LIBRARY={}", library.display());
    println!("cargo::rustc-env=MEMTRACE_EMBEDDED_HASH={:016x}", fnv1a(&content));
    let simcuda = match env::var_os("MEMTRACE_EMBED_SIMCUDA") {
        Some(folder) => PathBuf::from(folder),
        None => build(&SIMCUDA.map(|part| format!("simcuda-{part}")), "simulate", &["simulate"]),
    };
    for part in SIMCUDA {
        let core = simcuda.join(format!("libsimcuda_{part}.so"));
        assert!(core.exists(), "{} is missing", core.display());
        println!("cargo::rerun-if-changed={}", core.display());
        println!("cargo::rustc-env=MEMTRACE_EMBEDDED_SIMCUDA_{}={}", part.to_uppercase(), core.display());
    }
}

/// Writes `pages.rs`: the name and the text of each page of docs/ that is for users, by its path without `.md`, and of
/// each JSON Schema, by its file name.
fn list_pages() {
    let root = Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("..");
    let schemas = ["analysis/schema", "launcher/schema"].map(|folder| text_files(&root.join(folder), "json"));
    let lists = [list("PAGES", text_files(&root.join("docs"), "md")), list("SCHEMAS", schemas.concat())];
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("pages.rs");
    fs::write(&out, lists.concat()).unwrap_or_else(|e| panic!("cannot write {}: {e}", out.display()));
}

/// A constant of these entries.
fn list(constant: &str, mut entries: Vec<String>) -> String {
    entries.sort();
    format!("static {constant}: [(&str, &str); {}] = [\n{}];\n", entries.len(), entries.concat())
}

/// The name and the text of each file below `root` with this extension. The name of a page is without it.
fn text_files(root: &Path, extension: &str) -> Vec<String> {
    let mut folders = vec![root.to_path_buf()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        println!("cargo::rerun-if-changed={}", folder.display());
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("cannot read {}: {e}", folder.display())) {
            let path = entry.expect("an entry of a folder").path();
            let name = path.strip_prefix(root).expect("it is below the root");
            if path.is_dir() {
                let is_for_developers = ["dev", "decisions"].iter().any(|folder| name == Path::new(folder));
                folders.extend((!is_for_developers).then_some(path));
            } else if path.extension().is_some_and(|one| one == extension) {
                println!("cargo::rerun-if-changed={}", path.display());
                let name = if extension == "md" { name.with_extension("") } else { name.to_path_buf() };
                files.push(format!("({name:?}, include_str!({path:?})),\n"));
            }
        }
    }
    files
}

/// The error for a target whose programs memtrace cannot record.
fn unsupported_target() -> Option<String> {
    let of = |part: &str| env::var(format!("CARGO_CFG_TARGET_{part}")).unwrap_or_default();
    let is_supported =
        of("OS") == "linux" && ["x86_64", "aarch64"].contains(&of("ARCH").as_str()) && of("ENV") == "gnu";
    let target = env::var("TARGET").unwrap_or_default();
    let help = "build it on Linux on x86-64 or AArch64 with glibc, not on Alpine or macOS";
    (!is_supported).then(|| format!("memtrace cannot record programs of {target}; {help}"))
}

/// Builds shared libraries with a cargo of their own, and returns their folder. `sources` are what they are made of.
fn build(packages: &[impl AsRef<str>], profile: &str, sources: &[&str]) -> PathBuf {
    let var = |name: &str| env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    // Read the variable at run time, not at compile time: checkouts may share a target directory.
    let root = Path::new(&var("CARGO_MANIFEST_DIR")).join("..");
    for changed in sources.iter().chain(&["Cargo.toml", "Cargo.lock"]) {
        println!("cargo::rerun-if-changed={}", root.join(changed).display());
    }
    let manifest = root.join("Cargo.toml");
    let first = root.join(sources[0]);
    assert!(first.exists(), "{} is missing: build memtrace from its repository", first.display());
    let target_dir = PathBuf::from(var("OUT_DIR")).join("interpose");
    let (host, target) = (var("HOST"), var("TARGET"));

    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--profile", profile, "--manifest-path"]).arg(manifest);
    cargo.args(packages.iter().flat_map(|package| ["--package", package.as_ref()]));
    cargo.arg("--target-dir").arg(&target_dir);
    // The preloaded library gets debug information when the launcher does: `--profile profiling`, `--profile dev`.
    if profile == "library" && var("DEBUG") != "false" {
        for setting in ["debug=\"line-tables-only\"", "strip=false"] {
            cargo.args(["--config", &format!("profile.{profile}.{setting}")]);
        }
    }
    let mut out = target_dir.clone();
    if host != target {
        cargo.args(["--target", &target]);
        out.push(&target);
    }
    // The libraries are the same for every build of the launcher. Flags of the outer build (clippy's wrapper, coverage,
    // loom) must not reach them.
    for name in [
        "CARGO_ENCODED_RUSTFLAGS",
        "RUSTFLAGS",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_BUILD_TARGET",
        "CARGO_TARGET_DIR",
    ] {
        cargo.env_remove(name);
    }
    let status = cargo.status().unwrap_or_else(|e| panic!("cannot run cargo: {e}"));
    assert!(status.success(), "a library that memtrace embeds does not build; see above");
    out.join(profile)
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
