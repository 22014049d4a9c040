//! The object of an address, with every C library.
//!
//! glibc's `_dl_find_object` needs some nanoseconds and no lock. Without it (musl, and glibc before 2.35) the list of
//! objects is searched by program headers, which takes microseconds. Every CUDA call asks for its caller, so the ranges
//! of callers are cached. An unload makes all cached ranges invalid.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use super::super::pages::page_size;
use super::find_object::{self, FoundObject};
use super::reading::Reading;
use super::unloads;

/// How many ranges are cached. Few objects call CUDA.
const SLOTS: usize = 64;
/// In [`Slot::version`]: a thread is writing.
const BUSY: u64 = u64::MAX;

struct Slot {
    /// One more than the number of unloads at which the slot was written. 0 if it is empty.
    version: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
    link_map: AtomicUsize,
    path: AtomicUsize,
}

static CACHE: [Slot; SLOTS] = [const {
    Slot {
        version: AtomicU64::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        link_map: AtomicUsize::new(0),
        path: AtomicUsize::new(0),
    }
}; SLOTS];

/// The object that contains `address`. `None` if there is none.
#[inline]
pub fn object_containing(address: usize) -> Option<FoundObject> {
    match find_object::function() {
        Some(find) => find_object::call(find, address),
        None => search(address),
    }
}

/// [`object_containing`] without the help of the C library.
#[cold]
fn search(address: usize) -> Option<FoundObject> {
    let version = unloads::count().map(|unloads| u64::from(unloads) + 1);
    if let Some(version) = version
        && let Some(known) = cached(address, version)
    {
        return Some(known);
    }
    let reading = Reading::begin();
    let mut range = 0..0;
    let object = reading.objects().find(|object| {
        let found = object.with_program_headers(&reading, |headers| mapped_range(headers, object.bias));
        range = found.unwrap_or(0..0);
        range.contains(&address)
    })?;
    let found = FoundObject { start: range.start, link_map: object.link_map, path: object.name };
    if let Some(version) = version {
        remember(&found, range.end, version);
    }
    Some(found)
}

/// The pages from the first to the last segment.
fn mapped_range(headers: &[libc::Elf64_Phdr], bias: usize) -> Range<usize> {
    let page = page_size();
    let segments = || headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let start = segments().map(|segment| segment.p_vaddr as usize).min().unwrap_or(0) & !(page - 1);
    let end = segments().map(|segment| (segment.p_vaddr as usize).saturating_add(segment.p_memsz as usize)).max();
    bias.wrapping_add(start)..bias.wrapping_add(end.unwrap_or(0))
}

fn cached(address: usize, version: u64) -> Option<FoundObject> {
    CACHE.iter().find_map(|slot| {
        if slot.version.load(Ordering::Acquire) != version {
            return None;
        }
        let (start, end) = (slot.start.load(Ordering::Acquire), slot.end.load(Ordering::Acquire));
        let (link_map, path) = (slot.link_map.load(Ordering::Acquire), slot.path.load(Ordering::Acquire));
        // Another thread may have written the slot meanwhile, after an unload.
        let is_whole = slot.version.load(Ordering::Acquire) == version;
        (is_whole && (start..end).contains(&address)).then_some(FoundObject { start, link_map, path })
    })
}

fn remember(found: &FoundObject, end: usize, version: u64) {
    for slot in &CACHE {
        let seen = slot.version.load(Ordering::Relaxed);
        // A slot that a signal handler has left half written stays unused.
        if seen >= version || slot.version.compare_exchange(seen, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            continue;
        }
        // A reader that sees one of the stores below also sees `BUSY` or a later version in its second load: this fence
        // synchronizes with its Acquire loads of the fields. Without it, a field may become visible before `BUSY`.
        fence(Ordering::Release);
        slot.start.store(found.start, Ordering::Relaxed);
        slot.end.store(end, Ordering::Relaxed);
        slot.link_map.store(found.link_map, Ordering::Relaxed);
        slot.path.store(found.path, Ordering::Relaxed);
        slot.version.store(version, Ordering::Release);
        return;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_finds_what_the_c_library_finds() {
        assert!(find_object::is_available(), "this test needs glibc 2.35");
        let functions = [
            the_search_finds_what_the_c_library_finds as *const () as usize,
            libc::malloc as *const () as usize,
            search as *const () as usize,
        ];
        let mut starts = Vec::new();
        for address in functions.into_iter().chain([0, 8, (&raw const starts).addr(), usize::MAX]) {
            for round in 0..3 {
                let (here, expected) = (search(address), find_object::containing(address));
                assert_eq!(
                    here.map(|found| (found.link_map, found.path)),
                    expected.map(|found| (found.link_map, found.path)),
                    "{address:#x} in round {round}"
                );
                // With gaps between its segments, the C library finds one of them. Those of AArch64 are aligned to 64
                // KiB.
                let [here_at, expected_at] = [here, expected].map(|found| found.map_or(0, |found| found.start));
                assert!(here_at <= expected_at && expected_at <= address, "{address:#x} in round {round}");
                starts.extend(here.map(|found| found.start));
            }
        }
        starts.sort_unstable();
        starts.dedup();
        assert!(starts.len() >= 2, "{starts:x?}");
    }
}
