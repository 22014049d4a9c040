//! Programs that print the purpose of their blocks, over the simulated CUDA. Every printed block must have that
//! category at that time.

use std::path::Path;

use memtrace_analysis::export::{TimelineFormat, Window, blocks_csv, timeline};
use memtrace_analysis::{Process, Run, open_run};
use memtrace_tests::block_changes::block_changes;
use memtrace_tests::traced_program::{TracedProgram, packages};
use memtrace_tests::versions::Versions;

/// One line of the block table.
struct Block {
    address: u64,
    since: u64,
    until: Option<u64>,
    category: String,
    rule: String,
    requested: u64,
}

/// The process that prints: the only one, or rank 0.
fn reporting_process(run: &Run) -> &Process {
    run.processes().iter().find(|process| process.rank() == Some(0)).unwrap_or(&run.processes()[0])
}

fn blocks(run: &Path) -> Vec<Block> {
    let run = open_run(run).unwrap();
    let mut table = Vec::new();
    blocks_csv(reporting_process(&run), &Window::WHOLE, None, &mut table, &mut |_| {}).unwrap();
    let text = String::from_utf8(table).unwrap();
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    let column = |name: &str| columns.iter().position(|c| *c == name).unwrap();
    lines
        .map(|line| {
            // The fields that may contain commas are the last ones.
            let fields: Vec<&str> = line.split(',').collect();
            let number = |name: &str| fields[column(name)].parse::<u64>().ok();
            Block {
                address: number("address").unwrap(),
                since: number("alloc_ns").unwrap(),
                until: number("free_ns"),
                category: fields[column("category")].to_owned(),
                rule: fields[column("rule")].trim_start_matches('"').to_owned(),
                requested: number("requested").unwrap(),
            }
        })
        .collect()
}

/// Runs a case. Every block that the program prints must have the printed category, and each category must have at
/// least `least` blocks.
#[track_caller]
fn assert_categories(case: &str, least: &[(&str, usize)]) {
    assert_categories_of(&TracedProgram::python("torch/categories.py", &[case]), case, least);
}

#[track_caller]
fn assert_categories_of(traced: &TracedProgram, case: &str, least: &[(&str, usize)]) {
    let run = traced.run();
    run.assert_ended_well();
    let blocks = blocks(&run.path());
    let output = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let mut right: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
    let mut wrong = Vec::new();
    for line in output.lines() {
        let [address, at, expected] = line.split(' ').collect::<Vec<_>>()[..] else { continue };
        let (address, at): (u64, u64) = (address.parse().unwrap(), at.parse().unwrap());
        let there = |b: &&Block| b.address == address && b.since <= at && b.until.is_none_or(|until| at < until);
        match blocks.iter().find(there) {
            Some(block) if block.category == expected => *right.entry(expected).or_default() += 1,
            Some(b) => wrong.push(format!("{expected} of {} bytes is {} by '{}'", b.requested, b.category, b.rule)),
            None => wrong.push(format!("{expected} at {address:#x} is in no block")),
        }
    }
    assert!(
        wrong.is_empty(),
        "{case}: {} right, {} wrong:\n{}",
        right.values().sum::<usize>(),
        wrong.len(),
        wrong.join("\n")
    );
    for (category, count) in least {
        assert!(right.get(category).is_some_and(|n| n >= count), "{case}: {category}: {right:?}");
    }
    timeline_has_the_peak(&run.path(), &output);
}

/// The highest sum of all blocks equals PyTorch's count, and the timeline ends with what the blocks leave.
#[track_caller]
fn timeline_has_the_peak(run: &Path, output: &str) {
    let run = open_run(run).unwrap();
    let write = |format| {
        let mut out = Vec::new();
        timeline(reporting_process(&run), &Window::WHOLE, 0, format, &mut out, &mut |_| {}).unwrap();
        out
    };
    let json: (Vec<u64>, Vec<[i64; 9]>) = serde_json::from_slice(&write(TimelineFormat::Json)).unwrap();
    let peak: i64 = output.lines().find_map(|line| line.strip_prefix("peak ")).unwrap().parse().unwrap();
    let mut now = [0i64; 8];
    let mut highest = 0;
    for change in block_changes(reporting_process(&run), 0) {
        now[change.pytorch_category()] += change.bytes;
        highest = highest.max(now.iter().sum());
    }
    assert_eq!(highest, peak);
    assert_eq!(json.0.len(), json.1.len());
    assert!(json.0.is_sorted_by(|a, b| a < b));
    assert_eq!(json.1.last().unwrap()[1..], now);
    let picture = String::from_utf8(write(TimelineFormat::Svg)).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("memory, ") && picture.contains(">peak "));
}

#[test]
fn training() {
    let least = [("gradient", 60), ("activation", 60), ("optimizer_state", 60), ("autograd_detail", 9), ("input", 9)];
    assert_categories("training", &least);
}

#[test]
fn weights_that_autocast_casts() {
    assert_categories("mixed", &[("autocast_cache", 3), ("gradient", 12), ("input", 3)]);
}

#[test]
fn casts_of_activations_are_no_weights() {
    assert_categories("alike", &[("autocast_cache", 6), ("activation", 3)]);
}

#[test]
fn a_checkpoint_beside_its_model() {
    assert_categories("loaded", &[("checkpoint", 12), ("parameter", 30), ("gradient", 20)]);
}

#[test]
fn a_cache_that_grows() {
    assert_categories("grown", &[("kv_cache", 100)]);
}

#[test]
fn a_preallocated_cache() {
    assert_categories("preallocated", &[("kv_cache", 100)]);
}

#[test]
fn a_cache_in_buffers() {
    assert_categories("buffered", &[("kv_cache", 6), ("parameter", 3)]);
}

#[test]
fn weights_of_an_inner_loop() {
    assert_categories("meta", &[("activation", 60), ("input", 8), ("parameter", 4), ("optimizer_state", 8)]);
}

#[test]
fn caches_outside_the_model() {
    assert_categories("dynamic", &[("kv_cache", 100)]);
    assert_categories("static", &[("kv_cache", 100)]);
}

#[test]
fn caches_that_are_cut_back_and_caches_of_rollouts() {
    assert_categories("cut_back", &[("kv_cache", 100)]);
    assert_categories("rollouts", &[("kv_cache", 40)]);
}

#[test]
fn results_that_a_model_joins_are_no_cache() {
    assert_categories("joined_inside", &[("activation", 20)]);
}

#[test]
fn a_cache_of_appended_tensors() {
    assert_categories("appended", &[("kv_cache", 32)]);
}

#[test]
fn tensors_that_the_program_keeps() {
    assert_categories("kept", &[("kept_tensor", 15), ("input", 6), ("gradient", 24), ("optimizer_state", 4)]);
}

#[test]
fn a_recorded_backward_pass() {
    assert_categories("recorded", &[("activation", 4), ("gradient", 28), ("input", 4)]);
}

#[test]
fn an_optimizer_with_a_closure() {
    // Simulated kernels compute nothing, so LBFGS keeps a direction and a gradient, but no history.
    assert_categories("closure", &[("temporary", 12), ("optimizer_state", 8), ("gradient", 48)]);
}

/// Workspaces are recognized although no step ends, beside an activation of the same size.
#[test]
fn workspaces_in_an_error_of_the_first_step() {
    // PyTorch 2.15 keeps no workspace otherwise.
    let run =
        TracedProgram::python("torch/categories.py", &["first_step"]).env("TORCH_CUBLAS_WORKSPACE_CACHE", "1").run();
    run.assert_ended_well();
    let blocks = blocks(&run.path());
    let workspaces: Vec<&Block> = blocks.iter().filter(|b| b.category == "workspace").collect();
    assert!(workspaces.iter().any(|b| b.requested >= 8 << 20), "no workspace");
    assert!(
        workspaces.iter().map(|b| b.requested).sum::<u64>() <= (32 << 20) + (1 << 20),
        "one workspace of cuBLAS and one of cuBLASLt"
    );
    let summary = std::fs::read(run.path().join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_slice(&summary).unwrap();
    let oom = &summary["processes"][0]["devices"][0]["ooms"][0];
    let in_use = oom["in_use"]["by_category"].as_array().unwrap();
    let bytes = in_use.iter().find(|c| c["category"] == "workspace").and_then(|c| c["bytes"].as_u64());
    assert!(bytes.is_some_and(|bytes| bytes >= 8 << 20), "{in_use:?}");
}

/// Blocks as large as workspaces of cuBLAS are workspaces where PyTorch's recorder, with C++ stacks, shows that
/// PyTorch's functions for them allocated.
#[track_caller]
fn assert_workspaces(versions: Versions) {
    let run = TracedProgram::python("torch/cublas_workspaces.py", &[]).on(versions).run();
    run.assert_ended_well();
    let output = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let mut expected: Vec<(u64, u64, bool)> = Vec::new();
    for line in output.lines() {
        let [address, size, kind] = line.split(' ').collect::<Vec<_>>()[..] else { continue };
        expected.push((address.parse().unwrap(), size.parse().unwrap(), kind == "workspace"));
    }
    let is_workspace = |(.., workspace): &&(u64, u64, bool)| *workspace;
    assert!(expected.iter().filter(is_workspace).count() >= 5, "{output}");
    let mut recorded: Vec<Block> = blocks(&run.path());
    recorded.retain(|block| expected.iter().any(|(_, size, _)| *size == block.requested));
    recorded.sort_by_key(|block| block.since);
    let recorded: Vec<_> = recorded.iter().map(|b| (b.address, b.requested, b.category == "workspace")).collect();
    assert_eq!(recorded, expected);
}

#[test]
fn workspaces_are_known_by_their_caller() {
    assert_workspaces(Versions::DEFAULT);
}

#[test]
fn fsdp_shards_and_gathered_parameters() {
    assert_categories("gathered", &[("communication_bucket", 4), ("parameter", 40), ("optimizer_state", 40)]);
}

/// DataParallel copies the model to each device before each forward.
#[test]
fn copies_for_another_device() {
    let traced = TracedProgram::python("torch/categories.py", &["replicated"]).env("SIMCUDA_DEVICES", "2");
    assert_categories_of(&traced, "replicated", &[("communication_bucket", 4), ("parameter", 10)]);
}

/// Parameters that are views of ZeroRedundancyOptimizer's buckets have the category parameter.
#[test]
fn parameters_in_optimizer_buckets() {
    assert_categories("sharded", &[("parameter", 50), ("gradient", 60)]);
}

#[test]
fn a_checkpoint_of_safetensors() {
    let packages = packages(&["safetensors==0.5.3"]);
    let traced = TracedProgram::python("torch/categories.py", &["safetensors"]).env("PYTHONPATH", packages);
    assert_categories_of(&traced, "safetensors", &[("checkpoint", 13), ("parameter", 50), ("gradient", 60)]);
}

#[test]
fn a_captured_graph() {
    assert_categories("graph", &[("graph_pool", 2), ("memory_pool", 1), ("parameter", 10)]);
}

#[test]
fn ddp_buckets() {
    let run = TracedProgram::python("torch/categories.py", &["buckets"]).run();
    run.assert_ended_well();
    let output = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let made: u64 = output.lines().find_map(|line| line.strip_prefix("buckets ")).unwrap().parse().unwrap();
    let found: u64 =
        blocks(&run.path()).iter().filter(|b| b.category == "communication_bucket").map(|b| b.requested).sum();
    assert!(found >= made / 2 && found > 0, "{found} of {made}");
}

mod exhaustive {
    use super::*;

    memtrace_tests::for_each_version! { mod workspaces: assert_workspaces }

    #[test]
    fn workspaces_of_a_release_with_the_memory_reporter_only() {
        assert_workspaces(Versions::REPORTER_ONLY);
    }

    /// The cache classes of transformers, with a Llama of random weights.
    #[test]
    fn caches_of_transformers() {
        let packages = packages(&[
            "transformers==4.56.2",
            "huggingface-hub==0.35.3",
            "tokenizers==0.22.1",
            "regex==2026.11.15",
            "safetensors==0.6.2",
            "pyyaml==6.0.4",
            "requests==2.32.5",
            "tqdm==4.67.1",
            "packaging==25.0",
            "urllib3==2.5.0",
            "idna==3.10",
            "certifi==2025.8.3",
            "charset-normalizer==3.4.3",
            "hf-xet==1.1.10",
        ]);
        for kind in ["dynamic", "static"] {
            let traced = TracedProgram::python("torch/generated.py", &[kind]).env("PYTHONPATH", &packages);
            assert_categories_of(&traced, kind, &[("kv_cache", 72), ("parameter", 30)]);
        }
    }

    /// FSDP1 (`FullyShardedDataParallel`): one flat parameter holds many parameters.
    #[test]
    fn flat_parameters_of_fsdp() {
        for kind in ["original", "flat"] {
            let traced =
                TracedProgram::python("torch/flat.py", &[kind]).env("SIMCUDA_DEVICES", "2").env("OMP_NUM_THREADS", "1");
            let least = [("communication_bucket", 4), ("parameter", 8), ("gradient", 8), ("optimizer_state", 8)];
            assert_categories_of(&traced, kind, &least);
            // The buffers into which the gradients of all ranks are reduced have the category gradient.
            assert_categories_of(&traced.option("--no-names"), kind, &least);
        }
    }

    #[test]
    fn a_cache_in_a_training_belongs_to_its_graph() {
        assert_categories("cached", &[("activation", 18), ("kv_cache", 100)]);
    }

    #[test]
    fn models_that_are_moved() {
        assert_categories("moved", &[("parameter", 30)]);
        assert_categories("assigned", &[("parameter", 13)]);
    }

    /// Results that an inference-only program keeps, or a tensor that grows with each call, are not always a cache.
    #[test]
    fn kept_results_are_no_cache() {
        assert_categories("kept_results", &[("kept_tensor", 18)]);
        assert_categories("recomputed", &[("activation", 24)]);
    }
}
