//! Finds the run folders below a folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memtrace_input::error::{Error, Result};
use memtrace_input::load::MANIFEST_FILE;

/// The number of folders between the given one and a run: `DIR/HOST/RUN` has one.
const DEPTH: usize = 3;
/// The maximum number of entries that are visited. A folder with more is not one of runs.
const MAX_ENTRIES: usize = 1 << 20;

/// A run folder below a folder.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct FoundRun {
    /// Its name, unique among the runs found: that of the folder, with `@` and the parent folders if several have it.
    pub name: String,
    /// Its path.
    pub path: PathBuf,
}

/// Whether this folder is a run itself: it has a manifest or traces.
pub fn is_run_folder(folder: &Path) -> bool {
    let is_trace = |entry: std::fs::DirEntry| Path::new(&entry.file_name()).extension().is_some_and(|e| e == "mtr");
    folder.join(MANIFEST_FILE).exists()
        || std::fs::read_dir(folder).is_ok_and(|entries| entries.flatten().any(is_trace))
}

/// The runs in a folder and in the folders below it, by name. If the folder is a run itself, that one. Links are not
/// followed.
///
/// # Errors
///
/// If the folder cannot be read, or has too many entries.
pub fn find_runs(folder: &Path) -> Result<Vec<FoundRun>> {
    let mut paths = Vec::new();
    if is_run_folder(folder) {
        paths.push(PathBuf::new());
    } else {
        let mut entries = 0;
        let listed = visit(folder, Path::new(""), DEPTH, &mut entries, &mut paths);
        listed.map_err(Error::io(format!("cannot list {}", folder.display())))?;
        if entries > MAX_ENTRIES {
            return Err(Error::Job {
                reason: format!("cannot read {}: it has more than {MAX_ENTRIES} entries", folder.display()),
                help: "pass a folder that has only run folders".to_owned(),
            });
        }
    }
    let absolute = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let text = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = |path: &PathBuf| text(path).or_else(|| text(&absolute)).unwrap_or_else(|| "run".to_owned());
    let mut uses: BTreeMap<String, usize> = BTreeMap::new();
    paths.iter().for_each(|path| *uses.entry(name(path)).or_default() += 1);
    let unique = |path: &PathBuf| {
        let name = name(path);
        let parents = path.parent().map(|parent| parent.to_string_lossy().replace('/', ".")).unwrap_or_default();
        match uses.get(&name) {
            Some(2..) if !parents.is_empty() => format!("{name}@{parents}"),
            _ => name,
        }
    };
    let mut runs: Vec<FoundRun> =
        paths.iter().map(|path| FoundRun { name: unique(path), path: folder.join(path) }).collect();
    runs.sort();
    Ok(runs)
}

/// Adds the runs below `root`/`relative`, as paths relative to `root`.
fn visit(
    root: &Path,
    relative: &Path,
    depth: usize,
    entries: &mut usize,
    paths: &mut Vec<PathBuf>,
) -> std::io::Result<()> {
    for entry in std::fs::read_dir(root.join(relative))? {
        *entries += 1;
        let Ok(entry) = entry else { continue };
        // A link can lead into a circle.
        if *entries > MAX_ENTRIES || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = relative.join(entry.file_name());
        if is_run_folder(&root.join(&path)) {
            paths.push(path);
        } else if depth > 0 {
            // A folder that cannot be listed is of someone else.
            let _ = visit(root, &path, depth - 1, entries, paths);
        }
    }
    Ok(())
}
