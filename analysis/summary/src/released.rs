//! The memory that stayed on a device where the program had released memory, divided by what holds it.

use std::collections::BTreeSet;

use memtrace_input::EventSource;
use memtrace_insight::passes::{CudaGraphs, DeviceAnalysis, ReleasePoint, ReleasedMemory, private_pool_text};
use memtrace_trace::file::Definitions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cuda_graphs::is_cuda_graph_pool;
use crate::owners::{ROUNDING, UNUSED_POOLS, library_bytes};

/// The function whose calls are always points.
const EMPTY_CACHE: &str = "empty_cache";
/// The ranges whose names have one of these words are points, too.
const RELEASING: [&str; 3] = ["sleep", "offload", "unload"];
/// The maximum number of points that nobody requested.
const MAX_AUTOMATIC: usize = 8;

/// A part of the memory that stayed on a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ReleasedPart {
    /// The kind of memory.
    pub kind: ReleasedPartKind,
    /// The name in reports, for example `NCCL`.
    pub name: String,
    /// The bytes.
    pub bytes: u64,
}

/// Why memory stayed on a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReleasedPartKind {
    /// Blocks in use by the program.
    Allocated,
    /// Free memory of PyTorch's allocator in segments with blocks in use, which cannot be released.
    Blocked,
    /// Unused segments of PyTorch's allocator, which `torch.cuda.empty_cache` releases.
    Cached,
    /// Blocks that the program freed and that streams still use.
    PendingFree,
    /// A private pool of PyTorch's allocator, such as that of a CUDA graph. It stays as long as the graph and tensors
    /// in it.
    PrivatePool,
    /// PyTorch's caching allocator, of which only the calls of CUDA are recorded.
    CachingAllocator,
    /// Memory that another library has allocated from CUDA.
    Library,
    /// Memory of stream-ordered pools that is not in use.
    UnusedPools,
    /// The part of the driver's pages beyond the allocations in them.
    Rounding,
}

/// From this many calls of `empty_cache` on, a library or a loop calls it all the time: it ends no part of the program.
const ROUTINE: u64 = 100;

/// The points of a recording after which memory should be released.
#[derive(Debug)]
pub(crate) struct ReleasePoints {
    /// The requested ones first.
    pub(crate) all: Vec<ReleasePoint>,
    requested: usize,
}

impl ReleasePoints {
    /// Whether a report shows the point with this index, to which the program came so many times.
    pub(crate) fn is_shown(&self, index: usize, times: u64) -> bool {
        let is_routine = times >= ROUTINE && self.all[index] == ReleasePoint::Function(EMPTY_CACHE.into());
        times > 0 && (index < self.requested || !is_routine)
    }
}

/// The points of a recording, the requested ones included.
pub(crate) fn release_points(requested: &[ReleasePoint], definitions: &Definitions) -> ReleasePoints {
    let is_releasing = |name: &str| {
        let mut words = name.split(|c: char| !c.is_alphanumeric());
        words.any(|word| RELEASING.iter().any(|releasing| word.eq_ignore_ascii_case(releasing)))
    };
    // XLA names the passes of its compiler, such as `TSL:XlaPass:#name=...`.
    let is_of_library = |name: &str| name.starts_with("TSL:") || name.starts_with("XlaPass");
    let names = definitions.labels.values().map(|label| &*label.text);
    let ranges: BTreeSet<&str> = names.filter(|name| is_releasing(name) && !is_of_library(name)).collect();
    let automatic = [ReleasePoint::Function(EMPTY_CACHE.into())].into_iter();
    let automatic = automatic.chain(ranges.into_iter().map(|name| ReleasePoint::Range(name.into())));
    let mut points = requested.to_vec();
    points.extend(automatic.filter(|point| !requested.contains(point)).take(MAX_AUTOMATIC));
    ReleasePoints { all: points, requested: requested.len() }
}

/// Divides what stayed. The bytes of the parts add up to [`ReleasedMemory::stayed`]. Most bytes first.
pub(crate) fn released_parts(
    released: &ReleasedMemory,
    device: &DeviceAnalysis,
    (graphs, definitions): (&CudaGraphs, &Definitions),
) -> Vec<ReleasedPart> {
    let mut parts: Vec<ReleasedPart> = Vec::new();
    let mut add = |kind, name: &str, bytes: u64| match parts.iter_mut().find(|p| (p.kind, &*p.name) == (kind, name)) {
        Some(part) => part.bytes += bytes,
        None => parts.push(ReleasedPart { kind, name: name.to_owned(), bytes }),
    };
    let mut of_allocator = released.stayed;
    let libraries = library_bytes(&released.allocations, definitions);
    let libraries = libraries.map(|(name, bytes)| (ReleasedPartKind::Library, name, bytes));
    for (kind, name, bytes) in libraries.chain([
        (ReleasedPartKind::UnusedPools, UNUSED_POOLS, released.allocations.unused_pools),
        (ReleasedPartKind::Rounding, ROUNDING, released.allocations.rounding),
    ]) {
        of_allocator = of_allocator.saturating_sub(bytes);
        add(kind, name, bytes);
    }
    if device.source == EventSource::Torch {
        let reserved = &released.reserved;
        let unmapped = (released.kept.usage.reserved).saturating_sub(of_allocator);
        // Memory that a library has unmapped belongs first to the pools that it made for this.
        let mut left = unmapped;
        let mut mapped = |bytes: u64| {
            let taken = bytes.min(left);
            left -= taken;
            bytes - taken
        };
        for (pool, bytes, _) in &released.private_pools {
            let id = private_pool_text(definitions, *pool).unwrap_or_else(|| "of unknown id".to_owned());
            let name = if is_cuda_graph_pool((device.device, *pool), graphs, definitions) {
                format!("CUDA graph pool {id}, until its graphs and tensors are gone")
            } else {
                format!("memory pool {id}, until it and its tensors are gone")
            };
            add(ReleasedPartKind::PrivatePool, &name, mapped(*bytes));
        }
        for (kind, name, bytes) in [
            (ReleasedPartKind::Allocated, "blocks in use", reserved.allocated),
            (ReleasedPartKind::Blocked, "free in segments with blocks in use", reserved.blocked),
            (ReleasedPartKind::Cached, "unused segments, which empty_cache releases", reserved.releasable),
            (ReleasedPartKind::PendingFree, "freed blocks that streams still use", reserved.pending_free),
        ] {
            add(kind, name, mapped(bytes));
        }
    } else {
        add(ReleasedPartKind::CachingAllocator, "PyTorch's caching allocator", of_allocator);
    }
    parts.retain(|part| part.bytes > 0);
    parts.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.kind.cmp(&b.kind)).then_with(|| a.name.cmp(&b.name)));
    parts
}

#[cfg(test)]
mod tests {
    use memtrace_trace::definition::LabelOrigin;
    use memtrace_trace::file::Label;

    use super::*;

    #[test]
    fn ranges_that_are_named_after_a_release_are_points() {
        let mut definitions = Definitions::default();
        for (id, text) in (1..).zip([
            "forward",
            "engine.Sleep",
            "offload_weights",
            "sleepy",
            "offload_weights",
            "TSL:XlaPass:#name=host-offload-legalize#",
        ]) {
            definitions.labels.insert(id, Label { origin: LabelOrigin::Nvtx, text: text.into() });
        }
        let requested = [ReleasePoint::Range("trial".into()), ReleasePoint::Function("empty_cache".into())];
        let points: Vec<String> = release_points(&requested, &definitions).all.iter().map(ReleasePoint::text).collect();
        assert_eq!(points, ["range:trial", "function:empty_cache", "range:engine.Sleep", "range:offload_weights"]);
    }

    #[test]
    fn functions_that_are_called_all_the_time_are_shown_on_request_only() {
        let definitions = Definitions::default();
        let automatic = release_points(&[], &definitions);
        assert!(automatic.is_shown(0, 99) && !automatic.is_shown(0, 100) && !automatic.is_shown(0, 0));
        let requested = release_points(&[ReleasePoint::Function(EMPTY_CACHE.into())], &definitions);
        assert!(requested.is_shown(0, 3002));
    }
}
