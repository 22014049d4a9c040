//! Reads how much of its cache of keys and values an engine uses, from the engine's own counters.
//!
//! The counters change when the engine schedules requests. So they are read again after a few more blocks were freed,
//! which happens several times in each pass of the model. No clock decides: the same requests give the same readings.
//!
//! Constraints: as in [`engine`](super::engine). The object with the counters is known by a weak reference.

use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash, Hasher};

use memtrace_trace::clock;
use memtrace_trace::definition::Definition;
use memtrace_trace::definition::owned::CacheUse;

use super::tensors::{TensorLayout, TorchSymbols};
use crate::cpython::api::{self, PendingCall, PyObjectPtr};
use crate::cpython::gil::{GilToken, PyOwned};
use crate::recording::guard::Guard;
use crate::recording::watch::Watch;

/// The counters are read after this many freed blocks. A pass of a model frees more, also one with CUDA graphs.
const FREES: u32 = 8;
/// So many definitions have one change of the use each. After as many, each has twice as many changes.
const DEFINITIONS: u32 = 1024;
/// A cache with less than this part of its units free is nearly full.
const NEARLY_FULL: u64 = 8;
/// The requests of which it is read whether they were preempted.
const MAX_REQUESTS: usize = 512;

/// Where the counters are. Paths begin at an object of the class. A counter is a number, the length of a list or of a
/// tensor, or the first value of a dictionary.
pub(super) struct CacheCounters {
    /// Module and name.
    pub(super) class: (&'static CStr, &'static CStr),
    /// The units of the cache.
    size: &'static str,
    /// How many of them no request can have.
    unusable: u64,
    /// The units in one of `free`; empty for 1.
    page: &'static str,
    /// The free ones: the sum. Without the first there is no reading.
    free: &'static [&'static str],
    /// Those that are only kept for requests with the same prefix: the first path that exists.
    evictable: &'static [&'static str],
    /// The requests that have units, or all that could have.
    requests: &'static str,
    /// If not empty: how many of `requests` have none.
    idle_requests: &'static str,
    /// A tensor that begins where its storage begins, on which the layout of tensors is verified.
    whole_tensor: &'static str,
    /// Collections of requests: those that leave the first for none of the others have ended.
    all_requests: &'static [&'static str],
    /// The attribute of a request that identifies it.
    request_id: &'static str,
    /// The attribute of a request that counts how often it lost its units to others.
    preemptions: &'static str,
}

/// vLLM since 0.8. The free blocks include those with prefixes.
pub(super) static VLLM: CacheCounters = CacheCounters {
    class: (c"vllm.v1.core.sched.scheduler", c"Scheduler"),
    size: "kv_cache_manager.block_pool.num_gpu_blocks",
    // The null block.
    unusable: 1,
    page: "",
    free: &["kv_cache_manager.block_pool.free_block_queue.num_free_blocks"],
    evictable: &[],
    requests: "running",
    idle_requests: "",
    whole_tensor: "",
    all_requests: &["requests"],
    request_id: "request_id",
    preemptions: "num_preemptions",
};

/// SGLang 0.5. Its allocators for hybrid models have no `free_pages` of their own.
pub(super) static SGLANG: CacheCounters = CacheCounters {
    class: (c"sglang.srt.managers.scheduler", c"Scheduler"),
    size: "max_total_num_tokens",
    unusable: 0,
    page: "token_to_kv_pool_allocator.page_size",
    free: &[
        "token_to_kv_pool_allocator.free_pages",
        "token_to_kv_pool_allocator.release_pages",
        "token_to_kv_pool_allocator.num_staged_pages",
    ],
    evictable: &["tree_cache.evictable_size_", "tree_cache.tree_core.component_evictable_size_"],
    requests: "req_to_token_pool.size",
    idle_requests: "req_to_token_pool.free_slots",
    whole_tensor: "req_to_token_pool.req_to_token",
    all_requests: &["running_batch.reqs", "waiting_queue"],
    request_id: "rid",
    preemptions: "retraction_count",
};

/// Requests the next reading.
pub(super) fn schedule(watch: &Watch) {
    watch.read_counters_at_frees(FREES);
}

/// Queues a reading.
pub(super) fn request(watch: &Watch, read: PendingCall) {
    if !api::find().filter(|api| api.is_running()).is_some_and(|api| api.queue_call(read)) {
        schedule(watch);
    }
}

/// Reads the counters of one engine.
pub(super) struct CacheReader {
    counters: &'static CacheCounters,
    /// A weak reference to the object that has them, which is never given back.
    object: usize,
    torch: Option<TorchSymbols>,
    layout: Option<TensorLayout>,
    /// The last reading: free units and use.
    last: (u64, Reading),
    preemptions: u64,
    /// Hashes of the ids in the first collection of requests.
    present: Vec<u64>,
    uses: Uses,
}

// SAFETY: the fields have addresses of the program's objects and of PyTorch's functions, which belong to no thread.
// They are used with the GIL only.
unsafe impl Send for CacheReader {}

/// One reading.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Reading {
    ticks: u64,
    used: u64,
    size: u64,
    requests: u64,
    preempted: u64,
    ended: u64,
}

impl CacheReader {
    /// `None` if the object cannot be known by a weak reference.
    pub(super) fn new(gil: GilToken<'_>, counters: &'static CacheCounters, object: PyObjectPtr) -> Option<CacheReader> {
        Some(CacheReader {
            counters,
            object: gil.weak_reference(object)?.into_raw().expose_provenance(),
            torch: TorchSymbols::find().ok(),
            layout: None,
            last: (u64::MAX, Reading::default()),
            preemptions: 0,
            present: Vec::new(),
            uses: Uses::default(),
        })
    }

    /// Reads the counters. Returns `false` once their object is freed.
    pub(super) fn read(&mut self, gil: GilToken<'_>) -> bool {
        let Some(object) = gil.referent(std::ptr::with_exposed_provenance_mut(self.object)) else { return false };
        let _gc_paused = gil.pause_gc();
        if let Some(reading) = self.reading(gil, object)
            && let Some(ready) = self.uses.add(reading)
            && let Some(mut guard) = Guard::enter()
        {
            ready.into_iter().flatten().for_each(|cache_use| guard.define(&definition(cache_use)));
        }
        true
    }

    fn reading(&mut self, gil: GilToken<'_>, object: PyObjectPtr) -> Option<Reading> {
        let CacheCounters { free, evictable, .. } = *self.counters;
        let (first, others) = free.split_first()?;
        let page = if self.counters.page.is_empty() { 1 } else { self.count(gil, object, self.counters.page)? };
        let mut available = self.count(gil, object, first)?;
        available += others.iter().filter_map(|path| self.count(gil, object, path)).sum::<u64>();
        available = available.saturating_mul(page);
        available += evictable.iter().find_map(|path| self.count(gil, object, path)).unwrap_or(0);
        let (before, mut reading) = self.last;
        reading.ticks = clock::now();
        (reading.preempted, reading.ended) = (0, 0);
        // With the same number of free units, only preemptions can have happened, and only in a cache that is nearly
        // full.
        if available != before || available < reading.size / NEARLY_FULL {
            let size = self.count(gil, object, self.counters.size)?.saturating_sub(self.counters.unusable);
            let requests = self.count(gil, object, self.counters.requests)?;
            let idle = match self.counters.idle_requests {
                "" => 0,
                path => self.count(gil, object, path)?,
            };
            let (preemptions, ended) = self.changes_of_requests(gil, object);
            let preempted = preemptions.saturating_sub(std::mem::replace(&mut self.preemptions, preemptions));
            let (used, requests) = (size.saturating_sub(available), requests.saturating_sub(idle));
            reading = Reading { used, size, requests, preempted, ended, ..reading };
        }
        self.last = (available, reading);
        Some(reading)
    }

    /// How often the present requests lost their units, and how many have ended since the last time.
    fn changes_of_requests(&mut self, gil: GilToken<'_>, object: PyObjectPtr) -> (u64, u64) {
        let CacheCounters { all_requests, request_id, preemptions, .. } = *self.counters;
        let Some((id, count)) = gil.new_str(request_id).zip(gil.new_str(preemptions)) else { return (0, 0) };
        let (mut sum, mut present, mut first) = (0, Vec::new(), 0);
        for path in all_requests {
            let Some(all) = at(gil, object, path) else { continue };
            let requests = gil.elements(all.object).chain(gil.entries(all.object).map(|(_, request)| request));
            for request in requests.take(MAX_REQUESTS) {
                let count = gil.constant_or_stored(request, &count).and_then(|count| gil.int_value(count.object));
                sum += count.and_then(|count| u64::try_from(count).ok()).unwrap_or(0);
                let id = gil.constant_or_stored(request, &id);
                present.extend(id.as_ref().and_then(|id| gil.str(id.object)).map(|id| {
                    let mut hasher = DefaultHasher::new();
                    id.hash(&mut hasher);
                    hasher.finish()
                }));
            }
            if first == 0 {
                first = present.len();
            }
        }
        let before = std::mem::replace(&mut self.present, present.iter().take(first).copied().collect());
        present.sort_unstable();
        let ended = before.iter().filter(|id| present.binary_search(id).is_err()).count();
        (sum, ended as u64)
    }

    /// The counter at a path. `None` if there is none.
    fn count(&mut self, gil: GilToken<'_>, object: PyObjectPtr, path: &str) -> Option<u64> {
        let counter = at(gil, object, path)?.object;
        if gil.is_builtin(counter, "int") {
            return u64::try_from(gil.int_value(counter)?).ok();
        }
        if gil.is_sequence(counter) {
            return Some(gil.elements(counter).count() as u64);
        }
        if gil.is_dict(counter) {
            let (_, value) = gil.entries(counter).next()?;
            return u64::try_from(gil.int_value(value)?).ok();
        }
        let torch = self.torch.as_ref().filter(|torch| gil.is_instance(counter, torch.tensor_class))?;
        if self.layout.is_none() {
            let whole = at(gil, object, self.counters.whole_tensor)?;
            let whole = Some(whole).filter(|whole| gil.is_instance(whole.object, torch.tensor_class))?;
            // SAFETY: this is a live tensor, and the token guarantees the GIL.
            self.layout = unsafe { torch.verify_layout(whole.object) }.ok()?;
        }
        // SAFETY: this is a live tensor, and the token guarantees the GIL.
        unsafe { torch.length(self.layout.as_ref()?, counter) }
    }
}

/// The object at a path of stored attributes.
fn at<'a>(gil: GilToken<'a>, object: PyObjectPtr, path: &str) -> Option<PyOwned<'a>> {
    let mut at: Option<PyOwned<'_>> = None;
    for name in path.split('.') {
        at = gil.constant_or_stored(at.as_ref().map_or(object, |at| at.object), &gil.new_str(name)?).map(Some)?;
    }
    at
}

fn definition(cache_use: CacheUse) -> Definition<'static> {
    let CacheUse { ticks, used, size, requests, readings, sum, full, preempted, ended } = cache_use;
    Definition::CacheUse { ticks, used, size, requests, readings, sum, full, preempted, ended }
}

/// Joins readings: their number grows with the time, and that of the definitions with its logarithm.
#[derive(Default, Debug)]
struct Uses {
    /// The joined readings that are not written yet.
    joined: Option<CacheUse>,
    /// Changes of the use in them.
    changes: u32,
    /// The use in the last reading.
    last: Option<u64>,
    written: u32,
    highest: u64,
}

impl Uses {
    /// Adds a reading. Returns the definitions to write: the readings before, and this one at once if it may be
    /// the last that shows a maximum or a preemption.
    fn add(&mut self, reading: Reading) -> Option<[Option<CacheUse>; 2]> {
        let Reading { ticks, used, size, requests, preempted, ended } = reading;
        let is_counted = u64::from(requests > 0);
        let one = CacheUse {
            ticks,
            used,
            size,
            requests,
            readings: is_counted,
            sum: is_counted * used,
            full: u64::from(used >= size && size > 0),
            preempted,
            ended,
        };
        let is_remarkable = used > self.highest || preempted > 0;
        self.highest = self.highest.max(used);
        self.changes += u32::from(self.last.replace(used) != Some(used));
        let limit = 1_u32 << (self.written / DEFINITIONS).min(31);
        let before = if is_remarkable || self.changes > limit { self.joined.take() } else { None };
        let mut joined =
            self.joined.unwrap_or(CacheUse { readings: 0, sum: 0, full: 0, preempted: 0, ended: 0, ..one });
        if used > joined.used {
            joined = CacheUse { ticks, used, size, requests, ..joined };
        }
        joined.readings += one.readings;
        joined.sum += one.sum;
        joined.full += one.full;
        joined.preempted += one.preempted;
        joined.ended += one.ended;
        if self.joined.is_none() {
            self.changes = 1;
        }
        let ready = [before, if is_remarkable { Some(joined) } else { None }];
        self.joined = if is_remarkable { None } else { Some(joined) };
        self.written += ready.iter().flatten().count() as u32;
        ready.iter().any(Option::is_some).then_some(ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(ticks: u64, used: u64) -> Reading {
        Reading { ticks, used, size: 1000, requests: u64::from(used > 0), preempted: 0, ended: 1 }
    }

    #[test]
    fn a_maximum_is_written_at_once_and_a_long_time_takes_few_definitions() {
        let mut uses = Uses::default();
        let mut written = Vec::new();
        let mut add = |reading| written.extend(uses.add(reading).into_iter().flatten().flatten());
        (0..3).for_each(|n| add(reading(n, 0)));
        add(reading(3, 900));
        (4..200_000).for_each(|n| add(reading(n, 100 + n % 2)));
        add(Reading { preempted: 2, ..reading(200_000, 1000) });
        let sum = |of: fn(&CacheUse) -> u64| written.iter().map(of).sum::<u64>();
        assert_eq!((sum(|one| one.readings), sum(|one| one.preempted), sum(|one| one.full)), (199_998, 2, 1));
        assert_eq!(sum(|one| one.ended), 200_001);
        assert_eq!(sum(|one| one.sum), 900 + 1000 + (4..200_000).map(|n| 100 + n % 2).sum::<u64>());
        assert_eq!((written[1].ticks, written[1].used, written.last().unwrap().used), (3, 900, 1000));
        assert!(written.len() < 9 * DEFINITIONS as usize, "{}", written.len());
    }
}
