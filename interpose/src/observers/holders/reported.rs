//! The paths that were reported. A path is reported again only for other memory or if it has changed.

use std::hash::{BuildHasherDefault, DefaultHasher};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, ScanOccasion};

use super::maps::Map;
use super::paths::{HeldTensor, Paths};
use crate::recording::emit::truncate;
use crate::recording::guard::Guard;
use crate::recording::process::Process;

/// The paths of the last search.
#[derive(Default)]
pub(super) struct Reported {
    /// A hash of path and shape, and the number that the address had
    /// ([`Watch::free_count_at`](crate::recording::watch::Watch::free_count_at)), by address.
    paths: Map<u64, (u64, u16)>,
}

/// The facts that one search reports about itself.
pub(super) struct ScanFacts {
    pub(super) seq: u64,
    pub(super) occasion: ScanOccasion,
    pub(super) objects: u64,
    pub(super) is_partial: bool,
}

impl Reported {
    /// Writes what has changed since the last search.
    pub(super) fn write(&mut self, process: &Process, found: &Paths, facts: &ScanFacts) {
        let Some(mut guard) = Guard::enter() else { return };
        let before = std::mem::take(&mut self.paths);
        for HeldTensor { address, path, shape } in &found.of_storages {
            let key = (hash(&(path, shape)), process.watch.free_count_at(*address));
            self.paths.insert(*address, key);
            if before.get(address) != Some(&key) {
                let (path, shape) = (truncate(process, path), truncate(process, shape));
                guard.define(&Definition::Holder { address: *address, seq: facts.seq, path, shape });
            }
        }
        let mut gone: Vec<u64> = before.into_keys().filter(|address| !self.paths.contains_key(address)).collect();
        gone.sort_unstable();
        for address in gone {
            guard.define(&Definition::Holder { address, seq: facts.seq, path: "", shape: "" });
        }
        process.count(Counter::HoldersNotShown, found.dropped + u64::from(facts.is_partial));
        let ScanFacts { seq, occasion, objects, is_partial } = *facts;
        guard.define(&Definition::HolderScan { seq, occasion, objects, is_partial });
    }
}

fn hash(texts: &(&String, &String)) -> u64 {
    use std::hash::BuildHasher as _;
    BuildHasherDefault::<DefaultHasher>::default().hash_one(texts)
}
