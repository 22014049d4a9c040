//! Programs that print the purpose of their blocks, over the simulated CUDA. Every printed block must have that
//! category at that time.

use std::path::Path;

use memtrace_analysis::export::{TimelineForm, Window, blocks_csv, timeline};
use memtrace_analysis::{Process, Run, open_run};
use memtrace_tests::victim::{Victim, packages};

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
fn speaker(run: &Run) -> &Process {
    run.processes().iter().find(|process| process.rank() == Some(0)).unwrap_or(&run.processes()[0])
}

fn blocks(run: &Path) -> Vec<Block> {
    let run = open_run(run).unwrap();
    let mut table = Vec::new();
    blocks_csv(speaker(&run), &Window::WHOLE, &mut table, &mut |_| {}).unwrap();
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
fn is_right(case: &str, least: &[(&str, usize)]) {
    victim_is_right(&Victim::python("torch/categories.py", &[case]), case, least);
}

#[track_caller]
fn victim_is_right(victim: &Victim, case: &str, least: &[(&str, usize)]) {
    let run = victim.run();
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

/// The timeline's maximum equals PyTorch's count, and the raw format sums to the other format.
#[track_caller]
fn timeline_has_the_peak(run: &Path, output: &str) {
    let run = open_run(run).unwrap();
    let write = |form| {
        let mut out = Vec::new();
        timeline(speaker(&run), &Window::WHOLE, 0, form, &mut out, &mut |_| {}).unwrap();
        out
    };
    let json: (Vec<u64>, Vec<[i64; 9]>) = serde_json::from_slice(&write(TimelineForm::Json)).unwrap();
    let raw: Vec<(u64, u8, i64, usize)> = serde_json::from_slice(&write(TimelineForm::RawJson)).unwrap();
    let peak: i64 = output.lines().find_map(|line| line.strip_prefix("peak ")).unwrap().parse().unwrap();
    let mut now = [0i64; 8];
    let mut highest = 0;
    let mut at = 0;
    for (ns, action, bytes, category) in raw {
        assert!(at <= ns && action == if bytes > 0 { 2 } else { 4 });
        at = ns;
        now[category] += bytes;
        highest = highest.max(now.iter().sum());
    }
    assert_eq!(highest, peak);
    assert_eq!(json.0.len(), json.1.len());
    assert!(json.0.is_sorted_by(|a, b| a < b));
    assert_eq!(json.1.last().unwrap()[1..], now);
    let page = String::from_utf8(write(TimelineForm::Html)).unwrap();
    assert!(page.contains("<svg ") && page.contains("memory, ") && page.contains(">peak "));
}

#[test]
fn training() {
    let least = [("gradient", 60), ("activation", 60), ("optimizer_state", 60), ("autograd_detail", 9), ("input", 9)];
    is_right("training", &least);
}

#[test]
fn weights_that_autocast_casts() {
    is_right("mixed", &[("autocast_cache", 3), ("gradient", 12), ("input", 3)]);
}

#[test]
fn models_that_are_moved() {
    is_right("moved", &[("parameter", 30)]);
}

#[test]
fn a_checkpoint_beside_its_model() {
    is_right("loaded", &[("checkpoint", 12), ("parameter", 30), ("gradient", 20)]);
}

#[test]
fn a_cache_that_grows() {
    is_right("grown", &[("kv_cache", 100)]);
}

#[test]
fn a_cache_that_is_written_into() {
    is_right("preallocated", &[("kv_cache", 100)]);
}

#[test]
fn caches_outside_the_model() {
    is_right("dynamic", &[("kv_cache", 100)]);
    is_right("static", &[("kv_cache", 100)]);
}

#[test]
fn a_cache_of_pieces() {
    is_right("appended", &[("kv_cache", 32)]);
}

/// Results that an inference-only program keeps, or a tensor that grows with each call, are not always a cache.
#[test]
fn results_are_no_cache() {
    is_right("kept_results", &[("activation", 18)]);
    is_right("recomputed", &[("activation", 24)]);
}

#[test]
fn what_fsdp_gathers_and_its_shards() {
    is_right("gathered", &[("communication_bucket", 4), ("parameter", 40), ("optimizer_state", 40)]);
}

/// DataParallel copies the model to each device before each forward.
#[test]
fn copies_for_another_device() {
    let victim = Victim::python("torch/categories.py", &["replicated"]).env("SIMCUDA_DEVICES", "2");
    victim_is_right(&victim, "replicated", &[("communication_bucket", 4), ("parameter", 10)]);
}

/// Parameters that are views of ZeroRedundancyOptimizer's buckets have the category parameter.
#[test]
fn parameters_in_buckets() {
    is_right("sharded", &[("parameter", 50), ("gradient", 60)]);
}

#[test]
fn a_checkpoint_of_safetensors() {
    let packages = packages(&["safetensors==0.5.3"]);
    let victim = Victim::python("torch/categories.py", &["safetensors"]).env("PYTHONPATH", packages);
    victim_is_right(&victim, "safetensors", &[("checkpoint", 13), ("parameter", 50), ("gradient", 60)]);
}

#[test]
fn a_captured_graph() {
    is_right("graph", &[("graph_pool", 2), ("parameter", 10)]);
}

#[test]
fn buckets_of_ddp() {
    let run = Victim::python("torch/categories.py", &["buckets"]).run();
    run.assert_ended_well();
    let output = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let made: u64 = output.lines().find_map(|line| line.strip_prefix("buckets ")).unwrap().parse().unwrap();
    let found: u64 =
        blocks(&run.path()).iter().filter(|b| b.category == "communication_bucket").map(|b| b.requested).sum();
    assert!(found >= made / 2 && found > 0, "{found} of {made}");
}

mod exhaustive {
    use super::*;

    /// The cache classes of transformers, with a Llama of random weights.
    #[test]
    fn caches_of_transformers() {
        let packages = packages(&[
            "transformers==4.56.2",
            "huggingface-hub==0.35.3",
            "tokenizers==0.22.1",
            "regex==2025.9.18",
            "safetensors==0.6.2",
            "pyyaml==6.0.2",
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
            let victim = Victim::python("torch/generated.py", &[kind]).env("PYTHONPATH", &packages);
            victim_is_right(&victim, kind, &[("kv_cache", 72), ("parameter", 30)]);
        }
    }

    /// FSDP1 (`FullyShardedDataParallel`): one flat parameter holds many parameters.
    #[test]
    fn what_flat_parameters_are_gathered_from() {
        for kind in ["original", "flat"] {
            let victim =
                Victim::python("torch/flat.py", &[kind]).env("SIMCUDA_DEVICES", "2").env("OMP_NUM_THREADS", "1");
            let least = [("communication_bucket", 4), ("parameter", 8), ("gradient", 8), ("optimizer_state", 8)];
            victim_is_right(&victim, kind, &least);
            // The buffers into which the gradients of all ranks are reduced have the category gradient.
            victim_is_right(&victim.option("--no-names"), kind, &least);
        }
    }
}
