//! Finds the file of an object and the file with its debug information: by build id, in gdb's order.
//!
//! A file is used only if its build id is the recorded one. For an object without a build id, the file at its path must
//! have none either, and must not be newer than the run.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use memtrace_trace::file::Budget;

use super::elf::{Bytes, Elf};

/// Where to search. The default searches only at the object's own path.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Search {
    /// Roots of separate debug files, gdb's `debug-file-directory`.
    pub debug_roots: Vec<PathBuf>,
    /// The cache of debuginfod clients. Nothing is ever downloaded.
    pub debuginfod_cache: Option<PathBuf>,
    /// The folder for resolving relative paths: where the program ran.
    pub directory: Option<PathBuf>,
    /// The end of the run, in nanoseconds since the epoch. A newer file without a build id is a different file.
    pub ended_ns: Option<u64>,
}

impl Search {
    /// The paths of this machine: `/usr/lib/debug`, and `$DEBUGINFOD_CACHE_PATH` or the client's default.
    pub fn local_machine() -> Search {
        let env_path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = env_path("DEBUGINFOD_CACHE_PATH").or_else(|| {
            let caches = env_path("XDG_CACHE_HOME").or_else(|| Some(env_path("HOME")?.join(".cache")))?;
            Some(caches.join("debuginfod_client"))
        });
        Search { debug_roots: vec!["/usr/lib/debug".into()], debuginfod_cache: cache, directory: None, ended_ns: None }
    }

    /// The object's own file, or a copy from debuginfod's cache. The error says why there is none.
    pub(super) fn object_file(&self, path: &str, build_id: &str, budget: &Budget) -> Result<(PathBuf, Bytes), String> {
        let own = self.absolute(path);
        let reason = match self.open_matching(&own, build_id, budget) {
            Ok(bytes) => return Ok((own, bytes)),
            Err(reason) => reason,
        };
        let cached = self.debuginfod_path(build_id, "executable").and_then(|path| {
            let bytes = self.open_matching(&path, build_id, budget).ok()?;
            Some((path, bytes))
        });
        cached.ok_or(reason)
    }

    /// The separate file with an object's debug information: from the debug roots by build id, by the object's debug
    /// link, or from debuginfod's cache. `object` is the object's own file, if there is one. `refused` gets a text for
    /// each candidate with another identity.
    pub(super) fn debug_file(
        &self,
        build_id: &str,
        object: Option<(&Path, &Elf<'_>)>,
        budget: &Budget,
        refused: &mut Vec<String>,
    ) -> Option<(PathBuf, Bytes)> {
        let mut candidates = Vec::new();
        if let Some((folder, rest)) = split_build_id(build_id) {
            candidates.extend(
                self.debug_roots
                    .iter()
                    .map(|root| (root.join(".build-id").join(folder).join(format!("{rest}.debug")), None)),
            );
        }
        let link = object.and_then(|(path, elf)| Some((path.parent()?, elf.debug_link()?)));
        if let Some((folder, (name, crc))) = link {
            let beside = [folder.join(&name), folder.join(".debug").join(&name)];
            candidates.extend(beside.map(|path| (path, Some(crc))));
            let below = folder.strip_prefix("/").unwrap_or(folder);
            candidates.extend(self.debug_roots.iter().map(|root| (root.join(below).join(&name), Some(crc))));
        }
        candidates.extend(self.debuginfod_path(build_id, "debuginfo").map(|path| (path, None)));
        for (path, crc) in candidates {
            // debuginfod clients store an empty file to record that there is none. The debug link of a file with its
            // own debug information refers to that file itself.
            let is_file = std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() > 0);
            if !is_file || object.is_some_and(|(own, _)| own == path) {
                continue;
            }
            match (self.open_matching(&path, build_id, budget), crc) {
                (Ok(bytes), Some(crc)) if build_id.is_empty() && checksum(&bytes, budget) != Some(crc) => {
                    refused.push(format!("{} has a different checksum", path.display()));
                }
                (Ok(bytes), _) => return Some((path, bytes)),
                (Err(reason), _) => refused.push(format!("{} {reason}", path.display())),
            }
        }
        None
    }

    /// The file into which `dwz` moved common parts of debug files. `None` if the file has no such link.
    pub(super) fn supplementary_file(&self, debug_file: &Path, elf: &Elf<'_>) -> Option<Result<Bytes, String>> {
        let budget = elf.budget();
        let (path, build_id) = elf.supplementary_link()?;
        let beside = debug_file.parent().map(|folder| folder.join(&path));
        let by_id = split_build_id(&build_id).map(|(folder, rest)| format!(".build-id/{folder}/{rest}.debug"));
        let by_id = self.debug_roots.iter().filter_map(|root| Some(root.join(by_id.as_ref()?)));
        let found = beside.into_iter().chain(by_id).find_map(|path| self.open_matching(&path, &build_id, budget).ok());
        Some(found.ok_or_else(|| format!("its supplementary debug file {path} does not exist")))
    }

    fn absolute(&self, path: &str) -> PathBuf {
        match &self.directory {
            Some(directory) if Path::new(path).is_relative() => directory.join(path),
            _ => path.into(),
        }
    }

    fn debuginfod_path(&self, build_id: &str, what: &str) -> Option<PathBuf> {
        split_build_id(build_id)?;
        Some(self.debuginfod_cache.as_ref()?.join(build_id).join(what))
    }

    /// Maps the file if its identity matches. The error says why it does not.
    fn open_matching(&self, path: &Path, build_id: &str, budget: &Budget) -> Result<Bytes, String> {
        let bytes = Bytes::map(path, budget)?;
        let found = Elf::parse(&bytes, budget)?.build_id().unwrap_or_default();
        if found != build_id {
            let or_none = |id: &str| if id.is_empty() { "none".to_owned() } else { id.to_owned() };
            return Err(format!("is a different file: its build id is {}, not {}", or_none(&found), or_none(build_id)));
        }
        if build_id.is_empty() && self.is_newer(path) {
            return Err("has no build id and was changed after the run".to_owned());
        }
        Ok(bytes)
    }

    fn is_newer(&self, path: &Path) -> bool {
        let modified = std::fs::metadata(path).and_then(|m| m.modified()).ok();
        let ended = self.ended_ns.map(|ns| SystemTime::UNIX_EPOCH + Duration::from_nanos(ns));
        modified.zip(ended).is_some_and(|(modified, ended)| modified > ended)
    }
}

/// The GNU build id of an ELF file, in lower-case hexadecimal digits; `None` if it has none.
///
/// # Errors
///
/// If the file cannot be read or is not a 64-bit ELF file. The error is a text.
pub fn build_id(path: &Path) -> Result<Option<String>, String> {
    let budget = Budget::default();
    Ok(Elf::parse(&Bytes::map(path, &budget)?, &budget)?.build_id())
}

/// The CRC-32 of a whole file. `None` if the budget does not allow to read it.
fn checksum(bytes: &[u8], budget: &Budget) -> Option<u32> {
    /// A step takes as long as the checksum of this many bytes.
    const BYTES_PER_STEP: u64 = 4;
    budget.work(bytes.len() as u64 / BYTES_PER_STEP).ok()?;
    Some(crc32fast::hash(bytes))
}

/// Splits a build id into folder and name. `None` for an invalid one, which must not become a path.
fn split_build_id(build_id: &str) -> Option<(&str, &str)> {
    let is_valid = build_id.len() > 2 && build_id.bytes().all(|b| b.is_ascii_hexdigit());
    is_valid.then(|| build_id.split_at(2))
}
