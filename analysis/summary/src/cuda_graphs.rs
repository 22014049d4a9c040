//! The cost of each CUDA graph and each private memory pool of a device.

use std::collections::{BTreeMap, HashMap};

use memtrace_insight::passes::{CudaGraph, CudaGraphs, private_pool_text};
use memtrace_insight::rules::is_graphs_own_pool;
use memtrace_replay::{HolderChange, Names};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ContextId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use memtrace_insight::FrameSummary;
use memtrace_insight::locations::{Locations, frame_summary};

/// The maximum number of graphs listed for one device.
const GRAPHS: usize = 512;

/// The CUDA graphs of a device, and the private memory pools of PyTorch's allocator.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CudaGraphsSummary {
    /// The number of graphs that were captured, or instantiated without a recorded capture.
    pub count: u64,
    /// The graphs, in the order of their captures.
    pub graphs: Vec<CudaGraphSummary>,
    /// The number of further graphs that `graphs` leaves out.
    pub graphs_left_out: u64,
    /// The number of calls that capture, instantiate or upload a graph and failed, in all devices of the process.
    pub failed_calls: u64,
    /// The private memory pools, by their highest reserved bytes in descending order.
    pub pools: Vec<MemoryPoolSummary>,
}

/// One CUDA graph.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CudaGraphSummary {
    /// The number of the graph on its device, counted from 0.
    pub index: u64,
    /// Whether the graph was captured. Otherwise the program built it from nodes.
    pub is_captured: bool,
    /// The line of the program that captured the graph, or instantiated one that was not captured. Absent if it is
    /// unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub captured_at: Option<FrameSummary>,
    /// That line as text, for example `serve.py:88 warm_up`. Empty if it is unknown.
    pub location: String,
    /// The innermost named range of the program (`record_function`, NVTX) around the capture. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The private memory pool that received the blocks of the capture, as PyTorch's `MempoolId_t`. Absent if the
    /// capture allocated in none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The number of graphs with blocks in that pool, including this one.
    pub graphs_in_pool: u64,
    /// By how many bytes of segments the capture enlarged private pools. A graph in a shared pool reuses what earlier
    /// captures left free.
    pub pool_growth_bytes: u64,
    /// The bytes of blocks that the capture allocated and that were still allocated when it ended: the outputs.
    pub kept_bytes: u64,
    /// The highest number of bytes of blocks that the capture had allocated.
    pub peak_bytes: u64,
    /// The number of nodes of the graph. 0 if it is unknown.
    pub nodes: u64,
    /// How often the graph was instantiated.
    pub instantiations: u64,
    /// By how many bytes the free memory of the device fell during its instantiations and uploads. This includes what
    /// other processes and threads took meanwhile. The driver may take more at the first launch.
    pub instantiated_bytes: u64,
    /// The name, data type and shape of the largest named output, for example `logits float32[8, 32000]`. Names of
    /// outputs need `--holders`. Absent without a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// The first dimension of all outputs whose shapes are known, if it is the same: usually the batch size. Absent
    /// otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_dimension: Option<u64>,
    /// Whether the program destroyed all its executable graphs. Graphs that are destroyed at the end of the process do
    /// not count.
    pub is_destroyed: bool,
}

/// A private memory pool of PyTorch's allocator: `torch.cuda.MemPool`, or a pool of CUDA graphs.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MemoryPoolSummary {
    /// PyTorch's `MempoolId_t`, for example `(0, 1)`.
    pub id: String,
    /// Whether it is known that a CUDA graph was captured into the pool.
    pub is_cuda_graph_pool: bool,
    /// The number of captures that allocated in it.
    pub captures: u64,
    /// The highest number of bytes of its segments.
    pub peak_reserved_bytes: u64,
    /// The bytes of its segments at the end.
    pub end_reserved_bytes: u64,
    /// The highest number of bytes of its allocated blocks.
    pub peak_allocated_bytes: u64,
    /// The bytes of its allocated blocks at the end.
    pub end_allocated_bytes: u64,
}

/// By `seq` of its allocation: the name, and the data type and shape, of the tensor in a block.
#[derive(Debug, Default)]
pub(crate) struct OutputNames(HashMap<u64, (String, String)>);

impl OutputNames {
    /// The names of the outputs of graphs.
    pub(crate) fn of(graphs: &CudaGraphs, names: &Names, changes: &[HolderChange]) -> OutputNames {
        let mut outputs = HashMap::new();
        let seqs = graphs.graphs().iter().flat_map(|graph| graph.capture.kept_blocks.iter().map(|(seq, _)| *seq));
        for seq in seqs {
            let named = names.of_allocation(seq).map(|named| (named.text(), named.shape.to_string()));
            outputs.insert(seq, named.unwrap_or_default());
        }
        for change in changes {
            let output = change.block.and_then(|block| outputs.get_mut(&block.seq));
            if let Some(output) = output.filter(|(name, _)| name.is_empty()) {
                *output = (change.path.to_string(), change.shape.to_string());
            }
        }
        outputs.retain(|_, (name, _)| !name.is_empty());
        OutputNames(outputs)
    }
}

/// Whether a CUDA graph was captured into a pool of a device, or PyTorch made it for one.
pub(crate) fn is_cuda_graph_pool(pool: (i16, u16), graphs: &CudaGraphs, definitions: &Definitions) -> bool {
    graphs.pools().get(&pool).is_some_and(|pool| pool.captures > 0)
        || definitions.pools.get(&pool.1).is_some_and(|id| is_graphs_own_pool(*id))
}

/// Summarizes the graphs and pools of one device. `None` if there are none.
pub(crate) fn cuda_graphs(
    device: i16,
    graphs: &CudaGraphs,
    locations: &Locations<'_>,
    names: &OutputNames,
) -> Option<CudaGraphsSummary> {
    let definitions = locations.definitions();
    let of_device = || graphs.graphs().iter().filter(|graph| graph.device == device);
    let mut in_pool: BTreeMap<u16, u64> = BTreeMap::new();
    for graph in of_device().filter(|graph| graph.capture.pool != 0) {
        *in_pool.entry(graph.capture.pool).or_default() += 1;
    }
    let mut pools: Vec<MemoryPoolSummary> = graphs
        .pools()
        .iter()
        .filter(|((on, _), _)| *on == device)
        .map(|((_, id), pool)| MemoryPoolSummary {
            id: private_pool_text(definitions, *id).unwrap_or_default(),
            is_cuda_graph_pool: is_cuda_graph_pool((device, *id), graphs, definitions),
            captures: pool.captures,
            peak_reserved_bytes: pool.reserved.1,
            end_reserved_bytes: pool.reserved.0,
            peak_allocated_bytes: pool.allocated.1,
            end_allocated_bytes: pool.allocated.0,
        })
        .collect();
    pools.sort_by(|a, b| b.peak_reserved_bytes.cmp(&a.peak_reserved_bytes).then(a.id.cmp(&b.id)));
    let count = of_device().count() as u64;
    if count == 0 && pools.is_empty() {
        return None;
    }
    let listed = of_device().take(GRAPHS).enumerate();
    Some(CudaGraphsSummary {
        count: count + graphs.left_out(),
        graphs: listed
            .map(|(index, graph)| {
                let shared = in_pool.get(&graph.capture.pool).copied().unwrap_or(0);
                CudaGraphSummary {
                    index: index as u64,
                    graphs_in_pool: shared,
                    is_destroyed: graphs.is_destroyed(graph),
                    ..summary_of(graph, locations, names)
                }
            })
            .collect(),
        graphs_left_out: count.saturating_sub(GRAPHS as u64) + graphs.left_out(),
        failed_calls: graphs.failed(),
        pools,
    })
}

fn summary_of(graph: &CudaGraph, locations: &Locations<'_>, names: &OutputNames) -> CudaGraphSummary {
    let definitions = locations.definitions();
    let frame = locations.own(graph.stack).and_then(|frame| definitions.frame(frame));
    let outputs = || graph.capture.kept_blocks.iter().filter_map(|(seq, _)| names.0.get(seq));
    let mut dimensions = outputs().filter_map(|(_, shape)| first_dimension(shape));
    let first = dimensions.next();
    CudaGraphSummary {
        is_captured: graph.is_captured,
        captured_at: frame.map(frame_summary),
        location: frame
            .map_or_else(|| locations.stack(graph.stack, ContextId::NONE).location, |frame| locations.frame(frame)),
        label: graph.label.and_then(|label| Some(definitions.labels.get(&label)?.text.to_string())),
        pool: private_pool_text(definitions, graph.capture.pool),
        pool_growth_bytes: graph.capture.growth,
        kept_bytes: graph.capture.kept,
        peak_bytes: graph.capture.peak,
        nodes: graph.nodes,
        instantiations: graph.instantiations,
        instantiated_bytes: graph.instantiated,
        output: outputs().next().map(|(name, shape)| format!("{name} {shape}").trim_end().to_owned()),
        first_dimension: first.filter(|first| dimensions.all(|one| one == *first)),
        ..CudaGraphSummary::default()
    }
}

/// The first dimension of a shape such as `float32[8, 1024]`. `None` for a scalar and for an unknown shape.
fn first_dimension(shape: &str) -> Option<u64> {
    let (_, dimensions) = shape.split_once('[')?;
    dimensions.split([',', ']']).next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_dimension_of_a_shape() {
        assert_eq!(first_dimension("float32[8, 1024]"), Some(8));
        assert_eq!(first_dimension("int64[3]"), Some(3));
        assert_eq!((first_dimension("float32[]"), first_dimension("")), (None, None));
    }
}
