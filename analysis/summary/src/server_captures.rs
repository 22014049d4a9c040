//! The CUDA graphs of a server by captured size.
//!
//! An engine captures its forward pass once for each size, largest first, and the pass can consist of many graphs. So a
//! capture begun at a place that the current size already has belongs to the next size.

use std::collections::HashSet;

use memtrace_insight::passes::CudaGraph;
use memtrace_insight::units::{count_text, number_text, size_text};
use memtrace_trace::ids::StackId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The CUDA graphs that a server captured for one size.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CapturedSize {
    /// The size: tokens, or requests in decode. Absent unless the bytes of the outputs and the engine's settings prove
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// The number of its mode, such as decode, counted from 0. The graphs of a mode begin at the same places.
    pub mode: u64,
    /// The number of graphs.
    pub graphs: u64,
    /// By how many bytes of segments the captures enlarged private pools.
    pub pool_growth_bytes: u64,
    /// The number of these segments.
    pub segments: u64,
    /// By how many bytes the free memory of the device fell during instantiations and uploads.
    pub instantiated_bytes: u64,
    /// The bytes of blocks that were still allocated when their capture ended.
    pub kept_bytes: u64,
}

/// The sizes of one mode, such as decode: the graphs begin at the same places.
#[derive(Default)]
struct Mode {
    sizes: Vec<CapturedSize>,
    /// The kept blocks of the first graph of each size, in bytes, largest first.
    outputs: Vec<Vec<u64>>,
    /// The places of a whole size. Unknown until the first place comes again.
    places: Option<HashSet<StackId>>,
}

/// The captured sizes, in the order of the captures. `largest` is the largest size, and that of a mode with fewer
/// sizes.
pub(crate) fn captured_sizes<'a>(
    graphs: impl Iterator<Item = &'a CudaGraph>,
    largest: Option<(u64, u64)>,
) -> Vec<CapturedSize> {
    let mut modes: Vec<Mode> = Vec::new();
    let mut current: HashSet<StackId> = HashSet::new();
    for graph in graphs {
        let is_foreign =
            modes.last().is_none_or(|mode| mode.places.as_ref().is_some_and(|places| !places.contains(&graph.stack)));
        if is_foreign {
            modes.push(Mode::default());
            current.clear();
        }
        let number = modes.len().saturating_sub(1) as u64;
        let Some(mode) = modes.last_mut() else { continue };
        if current.contains(&graph.stack) {
            mode.places.get_or_insert_with(|| current.clone());
            current.clear();
        }
        if current.is_empty() {
            mode.sizes.push(CapturedSize { mode: number, ..CapturedSize::default() });
            mode.outputs.push(graph.capture.kept_blocks.iter().map(|(_, bytes)| *bytes).collect());
        }
        current.insert(graph.stack);
        let Some(size) = mode.sizes.last_mut() else { continue };
        size.graphs += 1;
        size.pool_growth_bytes += graph.capture.growth;
        size.segments += graph.capture.segments;
        size.instantiated_bytes += graph.instantiated;
        size.kept_bytes += graph.capture.kept;
    }
    if let Some((largest, largest_requests)) = largest {
        name_sizes(&mut modes, largest, largest_requests);
    }
    modes.into_iter().flat_map(|mode| mode.sizes).collect()
}

/// Names the sizes of modes whose outputs are proportional to them. The first mode has all sizes; another one has as
/// many, or those up to `largest_requests`.
fn name_sizes(modes: &mut [Mode], largest: u64, largest_requests: u64) {
    let mut all: Vec<u64> = Vec::new();
    for mode in modes {
        let smaller: Vec<u64> = all.iter().copied().filter(|size| *size <= largest_requests).collect();
        let largest = match (all.is_empty() || mode.sizes.len() == all.len(), smaller.first()) {
            (true, _) => largest,
            (false, Some(first)) if smaller.len() == mode.sizes.len() => *first,
            _ => continue,
        };
        let Some(named) = proportional(&mode.outputs, largest) else { continue };
        mode.sizes.iter_mut().zip(&named).for_each(|(size, named)| size.size = Some(*named));
        if all.is_empty() {
            all = named;
        }
    }
}

/// The sizes that belong to the largest block of each size, if exactly one block of the first size explains them: the
/// first capture also keeps workspaces. `None` if they are not proportional to whole numbers that fall from `largest`.
fn proportional(outputs: &[Vec<u64>], largest: u64) -> Option<Vec<u64>> {
    /// PyTorch's allocator rounds blocks up to this many bytes.
    const ROUNDING: u64 = 512;
    let (first, others) = outputs.split_first()?;
    let others: Option<Vec<u64>> = others.iter().map(|blocks| blocks.first().copied()).collect();
    let others = others?;
    let sizes_with = |block: u64| {
        let unit = Some(block / largest.max(1)).filter(|unit| *unit >= ROUNDING)?;
        let size_of = |bytes: u64| {
            let size = bytes.checked_div(unit)?.max(1);
            (size * unit).abs_diff(bytes).le(&ROUNDING).then_some(size)
        };
        let sizes: Vec<u64> =
            std::iter::once(Some(largest)).chain(others.iter().map(|bytes| size_of(*bytes))).collect::<Option<_>>()?;
        sizes.windows(2).all(|pair| pair[0] > pair[1]).then_some(sizes)
    };
    let mut blocks = first.clone();
    blocks.dedup();
    let mut found = blocks.into_iter().filter_map(sizes_with);
    found.next().filter(|_| found.next().is_none())
}

/// The figures of all sizes in one line. Empty without captures.
pub(crate) fn captures_text(sizes: &[CapturedSize]) -> String {
    let sum = |of: fn(&CapturedSize) -> u64| sizes.iter().map(of).sum::<u64>();
    let (graphs, growth) = (sum(|size| size.graphs), sum(|size| size.pool_growth_bytes));
    let Some(most) = sizes.iter().max_by_key(|size| (size.pool_growth_bytes, size.size)) else { return String::new() };
    let (segments, instantiated) = (sum(|size| size.segments), sum(|size| size.instantiated_bytes));
    // By mode.
    let counts = sizes.chunk_by(|a, b| a.mode == b.mode).map(|mode| count_text(mode.len() as u64));
    let counts = counts.collect::<Vec<_>>().join(" + ");
    let mut text = format!(
        "{} for {counts} {}: pools grew by {} in {}",
        number_text(graphs, "graph"),
        if sizes.len() == 1 { "size" } else { "sizes" },
        size_text(growth),
        number_text(segments, "segment")
    );
    if let Some(size) = most.size.filter(|_| sizes.len() > 1 && growth > 0) {
        text += &format!(", by {} for size {}", size_text(most.pool_growth_bytes), count_text(size));
    }
    if instantiated > 0 {
        text += &format!("; instantiated, they took {}", size_text(instantiated));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_insight::passes::CaptureMemory;

    fn graph(place: u32, kept: u64, growth: u64) -> CudaGraph {
        let kept_blocks = if kept > 0 { vec![(1, kept)] } else { Vec::new() };
        let capture =
            CaptureMemory { kept, kept_blocks, growth, segments: u64::from(growth > 0), ..Default::default() };
        let mut graph = CudaGraph::default();
        (graph.stack, graph.capture) = (StackId(place), capture);
        graph
    }

    #[test]
    fn a_size_has_each_place_once_and_modes_have_places_of_their_own() {
        // Two pieces for each of the sizes 512, 496, 8 and 1; then whole passes for 8 and 1 requests.
        let kept = |size: u64| (size * 1792).next_multiple_of(512);
        let pieces = [512, 496, 8, 1].into_iter().flat_map(|size| [graph(1, kept(size), size), graph(2, 0, 0)]);
        let whole = [graph(3, kept(8), 4), graph(3, kept(1), 0)];
        let mut graphs: Vec<CudaGraph> = pieces.chain(whole).collect();
        graphs[0].capture.kept_blocks.insert(0, (0, 32 << 20));
        let sizes = captured_sizes(graphs.iter(), Some((512, 256)));
        let found: Vec<_> = sizes.iter().map(|size| (size.size, size.graphs, size.pool_growth_bytes)).collect();
        let named = |size, graphs, growth| (Some(size), graphs, growth);
        assert_eq!(found[..4], [named(512, 2, 512), named(496, 2, 496), named(8, 2, 8), named(1, 2, 1)]);
        // Not as many as all sizes up to 256 requests would be: 8 and 1 are.
        assert_eq!(found[4..], [named(8, 1, 4), named(1, 1, 0)]);
        assert_eq!(
            captures_text(&sizes),
            "10 graphs for 4 + 2 sizes: pools grew by 1.00 KiB in 5 segments, by 512 B for size 512"
        );
        assert!(captured_sizes(graphs.iter(), None).iter().all(|size| size.size.is_none()));
        let other = [graph(1, 512 * 1792, 0), graph(1, 512 * 1792, 0)];
        assert_eq!(captured_sizes(other.iter(), Some((512, 256)))[0].size, None, "outputs do not depend on the size");
    }
}
