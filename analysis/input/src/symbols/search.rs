//! Where the file of an object is, and the one with its debug information: by build id, in gdb's order.
//!
//! A file counts only when its build id is the recorded one. Objects without a build id have nothing but their path: then
//! the file there must have none either, and not be newer than the run.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::elf::{Bytes, Elf};

/// Where to look. The default looks nowhere but at the object's own path.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Search {
    /// Roots of separate debug files: what gdb calls `debug-file-directory`.
    pub debug_roots: Vec<PathBuf>,
    /// The cache of debuginfod's clients. Nothing is ever fetched.
    pub debuginfod_cache: Option<PathBuf>,
    /// The folder that relative paths are relative to: where the program ran.
    pub directory: Option<PathBuf>,
    /// When the run ended: files without a build id that are newer are others. Nanoseconds since the epoch.
    pub ended_ns: Option<u64>,
}

impl Search {
    /// The places of this machine: `/usr/lib/debug`, and `$DEBUGINFOD_CACHE_PATH` or the client's default.
    pub fn here() -> Search {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = set("DEBUGINFOD_CACHE_PATH").or_else(|| {
            let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
            Some(caches.join("debuginfod_client"))
        });
        Search { debug_roots: vec!["/usr/lib/debug".into()], debuginfod_cache: cache, directory: None, ended_ns: None }
    }

    /// The object's own file, or the same from debuginfod's cache; the error says why there is none.
    pub(super) fn object(&self, path: &str, build_id: &str) -> Result<(PathBuf, Bytes), String> {
        let own = self.absolute(path);
        let why = match self.matching(&own, build_id) {
            Ok(bytes) => return Ok((own, bytes)),
            Err(why) => why,
        };
        let cached = self.cached(build_id, "executable").and_then(|path| {
            let bytes = self.matching(&path, build_id).ok()?;
            Some((path, bytes))
        });
        cached.ok_or(why)
    }

    /// The separate file with an object's debug information: from the debug roots by build id, by the object's debug link,
    /// from debuginfod's cache. `object` is the object's own file, where there is one. Files that would have been it but for
    /// their identity are told in `refused`.
    pub(super) fn debug_file(
        &self,
        build_id: &str,
        object: Option<(&Path, &Elf<'_>)>,
        refused: &mut Vec<String>,
    ) -> Option<(PathBuf, Bytes)> {
        let mut candidates = Vec::new();
        if let Some((folder, rest)) = split(build_id) {
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
        candidates.extend(self.cached(build_id, "debuginfo").map(|path| (path, None)));
        for (path, crc) in candidates {
            // debuginfod's clients note with an empty file that there is none. The link of a file that holds its own debug
            // information names that file.
            let is_file = std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() > 0);
            if !is_file || object.is_some_and(|(own, _)| own == path) {
                continue;
            }
            match (self.matching(&path, build_id), crc) {
                (Ok(bytes), Some(crc)) if build_id.is_empty() && crc32fast::hash(&bytes) != crc => {
                    refused.push(format!("{} has another checksum", path.display()));
                }
                (Ok(bytes), _) => return Some((path, bytes)),
                (Err(why), _) => refused.push(format!("{} {why}", path.display())),
            }
        }
        None
    }

    /// The file that `dwz` moved common parts of debug files into.
    pub(super) fn alternative(&self, debug_file: &Path, elf: &Elf<'_>) -> Option<Result<Bytes, String>> {
        let (path, build_id) = elf.alternative_link()?;
        let beside = debug_file.parent().map(|folder| folder.join(&path));
        let by_id = split(&build_id).map(|(folder, rest)| format!(".build-id/{folder}/{rest}.debug"));
        let by_id = self.debug_roots.iter().filter_map(|root| Some(root.join(by_id.as_ref()?)));
        let found = beside.into_iter().chain(by_id).find_map(|path| self.matching(&path, &build_id).ok());
        Some(found.ok_or_else(|| format!("its supplementary debug file {path} is not there")))
    }

    fn absolute(&self, path: &str) -> PathBuf {
        match &self.directory {
            Some(directory) if Path::new(path).is_relative() => directory.join(path),
            _ => path.into(),
        }
    }

    fn cached(&self, build_id: &str, what: &str) -> Option<PathBuf> {
        split(build_id)?;
        Some(self.debuginfod_cache.as_ref()?.join(build_id).join(what))
    }

    /// The file, if it is the one meant.
    fn matching(&self, path: &Path, build_id: &str) -> Result<Bytes, String> {
        let bytes = Bytes::map(path)?;
        let found = Elf::parse(&bytes)?.build_id().unwrap_or_default();
        if found != build_id {
            let or_none = |id: &str| if id.is_empty() { "none".to_owned() } else { id.to_owned() };
            return Err(format!("is another file now: its build id is {}, not {}", or_none(&found), or_none(build_id)));
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

/// The GNU build id of an ELF file, in lower-case hexadecimal digits.
///
/// # Errors
///
/// When the file cannot be read or is no 64-bit ELF file, in words.
pub fn build_id(path: &Path) -> Result<Option<String>, String> {
    Ok(Elf::parse(&Bytes::map(path)?)?.build_id())
}

/// A build id as folder and name; `None` for what is none and must become no path.
fn split(build_id: &str) -> Option<(&str, &str)> {
    let sound = build_id.len() > 2 && build_id.bytes().all(|b| b.is_ascii_hexdigit());
    sound.then(|| build_id.split_at(2))
}
