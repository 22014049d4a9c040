//! The cost of CUDA graphs and private memory pools, against PyTorch's own snapshot at each capture.

use memtrace_tests::snapshots::summary;
use memtrace_tests::traced_program::{Run, TracedProgram};
use serde_json::Value;

/// The memory that the simulated driver takes for each node of an executable graph.
const NODE_BYTES: u64 = 64 << 10;

fn graph_costs(settings: &str) -> Run {
    let program = TracedProgram::python("allocators/graph_costs.py", &[]);
    let run = program.env("PYTORCH_CUDA_ALLOC_CONF", settings).env("SIMCUDA_GRAPH_NODE", NODE_BYTES.to_string()).run();
    run.assert_ended_well();
    run
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} in {value}"))
}

#[track_caller]
fn assert_costs(run: &Run) {
    let theirs: Value = serde_json::from_slice(&run.output.stdout).expect("the program's figures");
    let ours = summary(run)["devices"][0]["cuda_graphs"].take();
    let graphs = ours["graphs"].as_array().expect("graphs");
    let captures = theirs["captures"].as_array().expect("captures");
    // `make_graphed_callables` captures the forward and the backward pass after these.
    assert_eq!(graphs.len(), captures.len() + 2, "{ours}");
    for (index, (graph, capture)) in graphs.iter().zip(captures).enumerate() {
        assert_eq!(graph["pool"], capture["pool"], "graph {index}");
        assert_eq!(number(graph, "pool_growth_bytes"), number(capture, "growth"), "graph {index}: {graph}");
        assert_eq!(number(graph, "kept_bytes"), number(capture, "kept"), "graph {index}: {graph}");
        assert!(graph["location"].as_str().is_some_and(|at| at.contains("graph_costs.py:")), "{graph}");
        assert!(number(graph, "nodes") > 0, "{graph}");
        assert!(graph["label"].as_str().is_some_and(|label| label.starts_with("capture ")), "{graph}");
    }
    let in_pool = |graph: &Value| number(graph, "graphs_in_pool");
    assert_eq!(graphs.iter().take(6).map(in_pool).collect::<Vec<_>>(), [1, 1, 4, 4, 4, 4]);
    for graph in graphs {
        assert_eq!(number(graph, "instantiations"), 1, "{graph}");
        assert_eq!(number(graph, "instantiated_bytes"), number(graph, "nodes") * NODE_BYTES, "{graph}");
    }
    assert_eq!(graphs[0]["is_destroyed"], true);
    assert_eq!(graphs[1]["is_destroyed"], false);
    let pools = ours["pools"].as_array().expect("pools");
    let pool = |id: &str| pools.iter().find(|pool| pool["id"] == id);
    for (id, figures) in theirs["pools"].as_object().expect("pools") {
        let found = pool(id).unwrap_or_else(|| panic!("no pool {id} in {ours}"));
        let end = [number(found, "end_reserved_bytes"), number(found, "end_allocated_bytes")];
        assert_eq!(serde_json::json!(end), *figures, "pool {id}");
    }
    let mem_pool = theirs["mem_pool"].as_str().expect("an id");
    for found in pools {
        assert_eq!(found["is_cuda_graph_pool"], found["id"] != mem_pool, "{found}");
    }
    assert_eq!(pool(mem_pool).map(|pool| number(pool, "captures")), Some(0));
    let peak = summary(run)["devices"][0]["peak"].take();
    let groups = peak["largest_allocations"].as_array().expect("allocations");
    let category = |group: &&Value| group["memory_pool"] == mem_pool;
    assert_eq!(groups.iter().find(category).expect("the MemPool's block")["category"], "memory_pool");
    let text = std::fs::read_to_string(run.path().join("summary.txt")).expect("summary.txt");
    assert!(text.contains(&format!("memory pool {mem_pool}")), "{text}");
    assert!(text.contains("CUDA graphs"), "{text}");
}

#[test]
fn each_capture_costs_what_pytorch_reserves_for_it() {
    for settings in ["expandable_segments:False", "expandable_segments:True"] {
        assert_costs(&graph_costs(settings));
    }
}
