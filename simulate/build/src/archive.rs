//! The archives that cargo built, and the functions that each defines.

use anyhow::{Context, Result};
use object::read::archive::ArchiveFile;
use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// One archive.
pub(crate) struct Archive {
    /// Its path.
    pub(crate) path: PathBuf,
    /// The C functions that it exports: global, defined, not mangled.
    pub(crate) functions: BTreeSet<String>,
}

/// The three archives.
pub(crate) struct Archives {
    /// `cu*`
    pub(crate) driver: Archive,
    /// `cuda*`
    pub(crate) runtime: Archive,
    /// cuBLAS, cuDNN, ...
    pub(crate) libs: Archive,
}

impl Archives {
    /// Reads the three archives in `folder`. Fails when one cannot be read.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        Ok(Archives {
            driver: Archive::open(folder, "driver")?,
            runtime: Archive::open(folder, "runtime")?,
            libs: Archive::open(folder, "libs")?,
        })
    }
}

/// The prefixes of CUDA's names. Only functions with these prefixes are exported.
const PREFIXES: &[&str] = &["cu", "__cuda", "nccl", "nvml", "nvrtc"];

impl Archive {
    fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(format!("libsimcuda_{name}.a"));
        let context = || format!("reading {}", path.display());
        let data = fs::read(&path).with_context(context)?;
        let mut functions = BTreeSet::new();
        for member in ArchiveFile::parse(&*data).with_context(context)?.members() {
            let member = member.with_context(context)?;
            // Skip members that are not object files, such as metadata.
            let Ok(file) = object::File::parse(member.data(&*data)?) else { continue };
            let defined = file.symbols().filter(|s| s.is_global() && s.is_definition());
            let names = defined.filter_map(|s| s.name().ok().map(str::to_string));
            functions.extend(names.filter(|n| PREFIXES.iter().any(|p| n.starts_with(p))));
        }
        Ok(Archive { path, functions })
    }
}
