//! Links the libraries with `cc`.
//!
//! Every library gets its soname and these properties:
//! - The version definitions that importers ask for. Without them the dynamic linker ends the process.
//! - `-Bsymbolic`, so that a library does not call a preloaded library for its inner calls.
//! - `$ORIGIN` as run path, so that the runtime finds the driver beside it.
//!
//! A file is written under a temporary name and then renamed, so a running program keeps the old one.

use crate::archive::Archive;
use crate::imports::Library;
use crate::stubs;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Links into one folder.
pub(crate) struct Linker {
    out: PathBuf,
}

/// The content of one library.
struct Plan<'a> {
    soname: &'a str,
    archive: &'a Archive,
    c_text: String,
    version_script: String,
}

impl Linker {
    /// Creates the folder `out` if it does not exist. Fails when it cannot be created.
    pub(crate) fn new(out: &Path) -> Result<Self> {
        fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
        Ok(Linker { out: out.to_path_buf() })
    }

    /// Links `libcuda.so.1`, without versions and with the table of its own functions.
    pub(crate) fn driver(&self, archive: &Archive) -> Result<()> {
        self.link(Plan {
            soname: "libcuda.so.1",
            archive,
            c_text: stubs::entries(archive.functions.iter()),
            version_script: node("", archive.functions.iter()),
        })
    }

    /// Links a cudart: all functions of the archive, and stubs for the other imports.
    pub(crate) fn runtime(&self, archive: &Archive, library: &Library, version: u32) -> Result<()> {
        let own: BTreeSet<&String> = archive.functions.iter().collect();
        let extra = stubs::runtime_version(version);
        self.versioned(archive, library, &own, &extra)
    }

    /// Links another library: its functions in the archive, and stubs for the other imports.
    pub(crate) fn library(&self, archive: &Archive, library: &Library) -> Result<()> {
        let own = archive.functions.iter().filter(|name| family(name) == Some(library.key())).collect();
        self.versioned(archive, library, &own, "")
    }

    fn versioned(&self, archive: &Archive, library: &Library, own: &BTreeSet<&String>, extra: &str) -> Result<()> {
        let imports: BTreeSet<&String> = library.names().collect();
        let stubbed: Vec<&String> = imports.difference(own).copied().collect();
        // Functions that nobody imports are exported too, under the first version, because programs may look them up.
        let unneeded: Vec<&String> = own.difference(&imports).copied().collect();
        let nameless = library.versions.get("").into_iter().flatten();
        let mut further: Vec<&String> = nameless.chain(unneeded).collect();
        let mut version_script = String::new();
        for (version, names) in library.versions.iter().filter(|(version, _)| !version.is_empty()) {
            version_script.push_str(&node(version, names.iter().chain(further.drain(..))));
        }
        if version_script.is_empty() {
            version_script = node("", further.into_iter());
        }
        self.link(Plan {
            soname: &library.soname,
            archive,
            c_text: stubs::stubs(stubbed.iter().copied()) + extra,
            version_script,
        })
    }

    fn link(&self, plan: Plan<'_>) -> Result<()> {
        let work = self.out.join(format!(".{}.{}", plan.soname, std::process::id()));
        fs::create_dir_all(&work)?;
        let (c, script, so) = (work.join("beside.c"), work.join("versions"), work.join("so"));
        fs::write(&c, plan.c_text)?;
        fs::write(&script, plan.version_script)?;
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
            .arg(&so)
            .arg(&c)
            .arg("-Wl,--whole-archive")
            .arg(&plan.archive.path)
            .arg("-Wl,--no-whole-archive,--gc-sections,--strip-debug,-Bsymbolic,-rpath,$ORIGIN,-soname")
            .arg(format!("-Wl,{}", plan.soname))
            .arg(format!("-Wl,--version-script={}", script.display()))
            .args(["-lgcc_s", "-lpthread", "-ldl", "-lm", "-lc"])
            .output()
            .context("running cc: a C compiler is needed")?;
        if !output.status.success() {
            bail!("cc: {}", String::from_utf8_lossy(&output.stderr));
        }
        fs::rename(&so, self.out.join(plan.soname))?;
        fs::remove_dir_all(&work)?;
        Ok(())
    }

    /// Creates a symbolic link under a second name.
    pub(crate) fn alias(&self, soname: &str, name: &str) -> Result<()> {
        let path = self.out.join(name);
        let _ = fs::remove_file(&path);
        symlink(soname, &path).with_context(|| format!("making {}", path.display()))
    }
}

/// One node of a version script. A node without a name must be the only one.
fn node<'a>(version: &str, names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    let global = if names.is_empty() { String::new() } else { format!("global: {};", names.join("; ")) };
    format!("{version} {{ {global} local: *; }};\n")
}

/// The library to which a function of the shared archive belongs.
fn family(name: &str) -> Option<&'static str> {
    if name.starts_with("nvml") {
        return Some("nvidia-ml");
    }
    const FAMILIES: [&str; 10] =
        ["cublasLt", "cublas", "cudnn", "cufft", "cupti", "cusolver", "cusparseLt", "cusparse", "nccl", "nvrtc"];
    FAMILIES.into_iter().find(|family| name.starts_with(family))
}
