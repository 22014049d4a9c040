//! Several snapshots as one launch: files and folders of snapshots, with a rank each.
//!
//! A snapshot does not contain its rank. The rank is read from the names of the files, else of their folders, else it
//! is the position. A launch has one process for each rank, so two files of one rank are refused.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use memtrace_trace::file::untrusted;
use memtrace_trace::printable::line;

use super::manifest::Manifest;
use super::problem::Problem;
use super::process::Process;
use super::rank::RankSource;
use super::snapshot::{self, SnapshotRecording};
use crate::error::{Error, Result};
use crate::folder::RunFolder;

/// The extensions of snapshots, without `.gz`.
const EXTENSIONS: [&str; 3] = ["pickle", "pkl", "json"];
/// The largest number without the word "rank" that is read as a rank. Larger ones are dates, times or process ids.
const MAX_BARE_NUMBER: u32 = 9999;
/// The number of skipped files that are listed by name.
const LISTED: usize = 8;

/// Reads a rank from a name.
type ReadNumber = fn(&str) -> Option<u32>;
/// Receives the bytes read so far of a file, and its size.
type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// Opened snapshots of one launch.
#[derive(Default)]
pub(super) struct SnapshotSet {
    opened: Vec<(PathBuf, SnapshotRecording)>,
    files: BTreeSet<(u64, u64)>,
    problems: Vec<Problem>,
}

impl SnapshotSet {
    /// Adds one file.
    pub(super) fn add_file(&mut self, path: &Path, progress: &mut Progress<'_>) -> Result<()> {
        let file = untrusted::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
        self.add(path, file, progress)
    }

    /// Adds the snapshots of a folder. The other files are one problem.
    ///
    /// # Errors
    ///
    /// If the folder has no readable snapshot.
    pub(super) fn add_folder(&mut self, folder: &RunFolder, progress: &mut Progress<'_>) -> Result<()> {
        let path = folder.path();
        let names = folder.file_names().map_err(Error::io(format!("cannot list {}", path.display())))?;
        let (mut names, others): (Vec<OsString>, Vec<OsString>) = names.into_iter().partition(is_snapshot_name);
        names.sort_by_key(|name| natural_key(&name.to_string_lossy()));
        let count = names.len();
        let mut skipped = Vec::new();
        for name in names {
            let path = path.join(&name);
            let cannot = || Error::io(format!("cannot open {}", path.display()));
            let added = folder.open_file(&name).map_err(cannot()).and_then(|file| self.add(&path, file, progress));
            skipped.extend(added.err().map(|e| (name, Some(e.reason()))));
        }
        if skipped.len() == count {
            let path = path.to_owned();
            return Err(match skipped.first() {
                Some((name, reason)) => {
                    let example = format!("{}: {}", line(&name.to_string_lossy()), reason.as_deref().unwrap_or(""));
                    Error::NoReadableSnapshot { path, count, example }
                }
                None => Error::NoTraces { path },
            });
        }
        skipped.extend(others.into_iter().map(|name| (name, None)));
        if !skipped.is_empty() {
            let shown = skipped.iter().take(LISTED).map(|(name, reason)| {
                let reason = reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
                line(&name.to_string_lossy()).into_owned() + &reason
            });
            let shown = shown.collect::<Vec<_>>().join(", ");
            let more = skipped.len().saturating_sub(LISTED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let text = format!("{} of its entries are no readable snapshots: {shown}{more}", skipped.len());
            self.problems.push(Problem { path: path.to_owned(), text });
        }
        Ok(())
    }

    fn add(&mut self, path: &Path, file: File, progress: &mut Progress<'_>) -> Result<()> {
        let metadata = file.metadata().map_err(Error::io(format!("cannot read {}", path.display())))?;
        if !self.files.insert((metadata.dev(), metadata.ino())) {
            let text = "it is named twice and counted once".to_owned();
            self.problems.push(Problem { path: path.to_owned(), text });
            return Ok(());
        }
        let (recording, problems) = snapshot::read(path, file, progress)?;
        self.problems.extend(problems);
        self.opened.push((path.to_owned(), recording));
        Ok(())
    }

    /// The folder that all snapshots are in, the processes by rank, and the problems.
    ///
    /// # Errors
    ///
    /// If two snapshots are of one rank.
    pub(super) fn into_processes(self) -> Result<(PathBuf, Vec<Process>, Vec<Problem>)> {
        let (paths, recordings): (Vec<PathBuf>, Vec<SnapshotRecording>) = self.opened.into_iter().unzip();
        let ranks = ranks(&paths)?;
        let folder = common_folder(&paths);
        let manifest = Manifest::default();
        let processes = paths.iter().zip(recordings).zip(ranks).map(|((path, recording), rank)| {
            let name = path.strip_prefix(&folder).unwrap_or(path).to_string_lossy().into_owned();
            Process::new(path, Box::new(recording), &manifest).in_snapshot_set(name, rank)
        });
        let mut processes: Vec<Process> = processes.collect();
        processes.sort_by_key(|process| process.rank().unwrap_or(u32::MAX));
        let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
        Ok((folder, processes, self.problems))
    }
}

/// Whether a file is a snapshot by its name.
fn is_snapshot_name(name: &OsString) -> bool {
    let name = name.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.rsplit_once('.').is_some_and(|(_, extension)| EXTENSIONS.contains(&extension))
}

/// The rank of each file and its source. A single file has none: it is no launch.
fn ranks(paths: &[PathBuf]) -> Result<Vec<Option<(u32, RankSource)>>> {
    let name = |path: Option<&Path>| path.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let stems: Vec<String> = paths.iter().map(|path| stem(&name(Some(path)).unwrap_or_default()).to_owned()).collect();
    let folders: Vec<String> = paths.iter().map(|path| name(path.parent()).unwrap_or_default()).collect();
    if paths.len() < 2 {
        return Ok(vec![None; paths.len()]);
    }
    let named: Vec<Option<u32>> = stems.iter().map(|stem| number_after_rank(stem)).collect();
    if named.iter().any(Option::is_some) {
        return among_named(paths, &stems, &named);
    }
    let attempts: [(&[String], ReadNumber); 3] =
        [(&folders, number_after_rank), (&stems, bare_number), (&folders, bare_number)];
    for (names, read) in attempts {
        let numbers: Option<Vec<u32>> = names.iter().map(|name| read(name)).collect();
        if let Some(numbers) = numbers
            && numbers.iter().collect::<BTreeSet<_>>().len() == numbers.len()
        {
            return Ok(numbers.into_iter().map(|rank| Some((rank, RankSource::FileName))).collect());
        }
    }
    Ok((0..).take(paths.len()).map(|rank| Some((rank, RankSource::FileOrder))).collect())
}

/// The ranks of files of which some are named by their rank. The others have the number in their name, else the lowest
/// free rank. A name that is only a number is a process id: memtrace writes `<pid>.pickle` for a process without a
/// rank.
fn among_named(paths: &[PathBuf], stems: &[String], named: &[Option<u32>]) -> Result<Vec<Option<(u32, RankSource)>>> {
    let mut taken: BTreeMap<u32, &Path> = BTreeMap::new();
    for (path, rank) in paths.iter().zip(named).filter_map(|(path, rank)| Some((path, (*rank)?))) {
        if let Some(other) = taken.insert(rank, path) {
            return Err(Error::Snapshot {
                path: path.clone(),
                reason: format!("it is of rank {rank}, as {} is", other.display()),
                help: "pass one snapshot of each rank".to_owned(),
            });
        }
    }
    let (mut ranks, mut free) = (Vec::with_capacity(paths.len()), 0);
    for ((path, stem), rank) in paths.iter().zip(stems).zip(named) {
        ranks.push(match (*rank, bare_number(stem)) {
            (Some(rank), _) => Some((rank, RankSource::FileName)),
            (None, _) if stem.parse::<u32>().is_ok_and(|pid| pid > 0) => None,
            (None, Some(rank)) if !taken.contains_key(&rank) => Some((rank, RankSource::FileName)),
            _ => {
                while taken.contains_key(&free) {
                    free += 1;
                }
                Some((free, RankSource::FileOrder))
            }
        });
        if let Some(Some((rank, _))) = ranks.last() {
            taken.insert(*rank, path);
        }
    }
    Ok(ranks)
}

/// A file's name without its extension and `.gz`.
fn stem(name: &str) -> &str {
    let name = name.strip_suffix(".gz").unwrap_or(name);
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

/// The number after the last word "rank": `rank3`, `local_rank_3`, `Rank-3`.
fn number_after_rank(name: &str) -> Option<u32> {
    let name = name.to_ascii_lowercase();
    let is_word = |at: usize| !name[..at].ends_with(|c: char| c.is_ascii_alphabetic());
    name.rmatch_indices("rank").filter(|(at, _)| is_word(*at)).find_map(|(at, word)| {
        let number = name[at + word.len()..].trim_start_matches(['_', '-', '=', '.', ' ']);
        let end = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
        number[..end].parse().ok()
    })
}

/// The last number of a name, if it can be a rank.
fn bare_number(name: &str) -> Option<u32> {
    let mut numbers = name.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
    numbers.next_back()?.parse().ok().filter(|number| *number <= MAX_BARE_NUMBER)
}

/// Sorts `a10` after `a9`: each run of digits by its length without leading zeros, then by its text.
fn natural_key(name: &str) -> (Vec<(usize, String)>, String) {
    let mut parts: Vec<(usize, String)> = Vec::new();
    let mut was_digit = false;
    for c in name.chars() {
        let is_digit = c.is_ascii_digit();
        match parts.last_mut() {
            Some((_, part)) if is_digit == was_digit => part.push(c),
            _ => parts.push((0, c.into())),
        }
        was_digit = is_digit;
    }
    for (length, part) in parts.iter_mut().filter(|(_, part)| part.starts_with(|c: char| c.is_ascii_digit())) {
        *part = part.trim_start_matches('0').to_owned();
        *length = part.len();
    }
    (parts, name.to_owned())
}

/// The deepest folder that has all files.
fn common_folder(paths: &[PathBuf]) -> PathBuf {
    let mut folders = paths.iter().map(|path| path.parent().unwrap_or(Path::new("")));
    let Some(first) = folders.next() else { return PathBuf::new() };
    let mut common: Vec<Component<'_>> = first.components().collect();
    for folder in folders {
        let same = common.iter().zip(folder.components()).take_while(|(a, b)| **a == *b).count();
        common.truncate(same);
    }
    common.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks_of(names: &[&str]) -> Vec<Option<u32>> {
        let paths: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
        ranks(&paths).unwrap().into_iter().map(|rank| rank.map(|(rank, _)| rank)).collect()
    }

    fn source_of(names: &[&str]) -> RankSource {
        let paths: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
        ranks(&paths).unwrap()[0].unwrap().1
    }

    #[test]
    fn ranks_are_read_from_names() {
        let some = |ranks: &[u32]| ranks.iter().copied().map(Some).collect::<Vec<_>>();
        for names in [
            ["rank3.pickle", "rank1.pickle.gz"],
            ["step20_rank_3.pkl", "step10_Rank-1.json"],
            ["local_rank0_rank3.pickle", "rank1_memory_snapshot.pickle"],
            ["rank3/a.pickle", "rank1/a.pickle"],
            ["snapshot_3.pickle", "snapshot_1.pickle"],
            ["3.pickle", "1.pickle"],
            ["gpu3-mem.pickle", "gpu1-mem.pickle"],
            ["3/a.pickle", "1/a.pickle"],
        ] {
            assert_eq!(ranks_of(&names), some(&[3, 1]), "{names:?}");
            assert_eq!(source_of(&names), RankSource::FileName, "{names:?}");
        }
        for names in [
            ["a.pickle", "b.pickle"],
            ["host_20250101_120000.pickle", "host_20250101_120100.pickle"],
            ["a7.pickle", "b7.pickle"],
            ["frank3.pickle.gz", "x.pickle"],
            ["rank3/a.pickle", "rank3/b.pickle"],
            ["99999999999999999999.pickle", "1.pickle"],
        ] {
            assert_eq!(ranks_of(&names), some(&[0, 1]), "{names:?}");
            assert_eq!(source_of(&names), RankSource::FileOrder, "{names:?}");
        }
        // memtrace writes <pid>.pickle for a process without a rank.
        assert_eq!(ranks_of(&["rank1.pickle", "4711.pickle", "rank0.pickle"]), [Some(1), None, Some(0)]);
        assert_eq!(
            ranks_of(&["a.pickle", "rank0.pickle", "gpu2.pickle", "b2.pickle", "99999999999.pickle"]),
            [Some(1), Some(0), Some(2), Some(3), Some(4)]
        );
        assert_eq!(ranks_of(&["rank1.pickle"]), [None]);
    }

    #[test]
    fn two_files_of_one_rank_are_refused() {
        let error = ranks(&["a/rank0.pickle".into(), "b/rank0.pickle".into()]).unwrap_err();
        assert_eq!(error.to_string(), "cannot read b/rank0.pickle: it is of rank 0, as a/rank0.pickle is");
        assert_eq!(error.help(), Some("pass one snapshot of each rank"));
    }

    #[test]
    fn files_sort_as_people_count() {
        let mut names = ["b2", "b10", "b1", "a", "b01x", "\u{fffd}9", ""];
        names.sort_by_key(|name| natural_key(name));
        assert_eq!(names, ["", "a", "b1", "b01x", "b2", "b10", "\u{fffd}9"]);
    }

    #[test]
    fn the_common_folder_has_all_files() {
        let common = |paths: &[&str]| common_folder(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(common(&["/r/a/x", "/r/b/x"]), Path::new("/r"));
        assert_eq!(common(&["a/x", "a/y"]), Path::new("a"));
        assert_eq!(common(&["x", "a/y"]), Path::new(""));
    }
}
