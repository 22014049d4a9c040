//! Several ranks: each has its own trace, equal to PyTorch's recorder, and its rank, in whatever way it is started. A
//! rank that runs out of memory is reported as the cause of the job's end.

use memtrace_tests::distributed::{Ranks, Start, compare, program, run, two_ranks};
use serde_json::{Value, json};

fn summary(ranks: &Ranks) -> Value {
    let text = std::fs::read_to_string(ranks.run.path().join("summary.json")).expect("summary.json");
    serde_json::from_str(&text).expect("JSON")
}

/// Requires that every rank has its file name in the run folder, and its entry in `run.json` under the process that
/// started it.
#[track_caller]
fn assert_known(ranks: &Ranks, start: Start) {
    let manifest = ranks.run.manifest();
    for (rank, (entry, trace, _)) in &ranks.ranks {
        assert_eq!((&entry["rank"], &entry["world_size"]), (&json!(rank), &json!(2)), "{entry}");
        assert_eq!(trace.definitions().rank, Some((*rank, 2)));
        // The command itself starts the ranks. It records nothing and has no entry.
        assert_eq!(entry["ppid"], manifest["pid"], "{entry}");
        let variables = ["RANK", "LOCAL_RANK", "WORLD_SIZE"].map(|name| entry["env"][name].clone());
        let expected = match start {
            Start::Torchrun => [json!(rank.to_string()), json!(rank.to_string()), json!("2")],
            Start::Spawn => [Value::Null, Value::Null, Value::Null],
        };
        assert_eq!(variables, expected, "{entry}");
        let pickle = ranks.run.path().join(format!("rank{rank}.pickle"));
        assert!(pickle.exists(), "{}", pickle.display());
        let stdout = String::from_utf8_lossy(&ranks.run.output.stdout);
        assert!(stdout.contains(&format!("rank {rank} pid {}\n", entry["pid"])), "{stdout}");
    }
    assert_eq!(std::fs::read_dir(ranks.run.path()).unwrap().filter(is_pickle).count(), 2);
    for process in summary(ranks)["processes"].as_array().unwrap() {
        let name = format!("rank{}.pickle", process["rank"]);
        assert_eq!((process["snapshot"].as_str(), &process["world_size"]), (Some(&*name), &json!(2)));
    }
}

fn is_pickle(entry: &std::io::Result<std::fs::DirEntry>) -> bool {
    entry.as_ref().is_ok_and(|e| e.path().extension().is_some_and(|x| x == "pickle"))
}

#[test]
fn ddp_and_fsdp_by_torchrun() {
    let ranks = compare(two_ranks(Start::Torchrun, &["ddp", "fsdp"]));
    assert_known(&ranks, Start::Torchrun);
    for (entry, ..) in ranks.ranks.values() {
        assert_eq!(entry["exit"], json!({"code": 0}), "{entry}");
    }
}

#[test]
fn ddp_and_fsdp_by_spawn() {
    let ranks = compare(two_ranks(Start::Spawn, &["ddp", "fsdp"]));
    assert_known(&ranks, Start::Spawn);
}

#[test]
fn compiled_ddp_by_torchrun() {
    let ranks = compare(two_ranks(Start::Torchrun, &["ddp", "--compile", "aot_eager"]));
    assert_known(&ranks, Start::Torchrun);
}

#[test]
fn the_rank_that_ran_out_of_memory_is_named() {
    let ranks = run(two_ranks(Start::Torchrun, &["ddp", "--oom", "1"]));
    assert_eq!(ranks.run.output.status.code(), Some(1));
    // torchrun ends the rank that waits for the other one.
    assert_eq!(ranks.ranks[&0].0["exit"], json!({"signal": libc::SIGTERM}));
    assert_eq!(ranks.ranks[&1].0["exit"], json!({"code": 1}));
    let summary = summary(&ranks);
    let outcome = summary["run"]["outcome"].as_str().unwrap();
    assert!(outcome.starts_with("ended by an out-of-memory error in rank 1"), "{outcome}");
    let text = std::fs::read_to_string(ranks.run.path().join("summary.txt")).unwrap();
    let ends =
        "The ranks ended differently: rank 1 exit status 1 after an out-of-memory error; rank 0 killed by SIGTERM.";
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&text).contains(ends), "{text}");
    let launch = &summary["launch"];
    assert_eq!((&launch["ranks"][0]["rank"], &launch["ranks"][0]["ended_by_oom"]), (&json!(1), &json!(true)));
    let fatal =
        |p: &Value| p["devices"][0]["ooms"].as_array().map(|ooms| ooms.iter().map(|o| o["fatal"].clone()).collect());
    let processes = summary["processes"].as_array().unwrap();
    let ooms: Vec<(Value, Option<Vec<Value>>)> = processes.iter().map(|p| (p["rank"].clone(), fatal(p))).collect();
    assert_eq!(ooms[0], (json!(1), Some(vec![json!(true)])), "{ooms:?}");
    assert_eq!(ooms[1].1.as_deref().unwrap_or_default(), [Value::Null; 0], "{ooms:?}");
}

/// The table of ranks equals each rank's own statistics, and names the rank, the phase, the line and the processes that
/// are to blame.
#[test]
fn uneven_ranks_are_compared() {
    let ranks = run(program("uneven.py", Start::Torchrun, &["--stray"]));
    ranks.run.assert_ended_well();
    let launch = &summary(&ranks)["launch"];
    let rows = launch["ranks"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["rank"].clone()).collect::<Vec<_>>(), [1, 0]);
    for row in rows {
        let rank = row["rank"].as_u64().unwrap();
        let (entry, _, oracle) = &ranks.ranks[&(rank as u32)];
        let statistics = &oracle.as_ref().expect("a snapshot").snapshot["statistics"][rank as usize];
        assert_eq!(row["peak_bytes"], statistics["allocated_bytes.all.peak"], "{row}");
        assert_eq!(row["reserved_bytes"], statistics["reserved_bytes.all.peak"], "{row}");
        assert_eq!((&row["pid"], &row["device"], &row["local_rank"]), (&entry["pid"], &json!(rank), &json!(rank)));
        let phases = row["phases"].as_array().unwrap();
        let highest = phases.iter().max_by_key(|phase| phase["peak_bytes"].as_u64()).unwrap();
        assert_eq!((&highest["peak_bytes"], &highest["phase"]), (&row["peak_bytes"], &row["peak_phase"]), "{row}");
    }
    let imbalance = &launch["imbalance"];
    let difference = rows[0]["peak_bytes"].as_u64().unwrap() - rows[1]["peak_bytes"].as_u64().unwrap();
    assert_eq!(imbalance["difference_bytes"], difference);
    assert_eq!((&imbalance["worst_rank"], &imbalance["median_rank"]), (&json!(1), &json!(0)));
    let comparison = &launch["worst_against_median"];
    let categories = comparison["by_category"].as_array().unwrap();
    assert_eq!(categories[0]["category"], "activation", "{comparison}");
    let sum: i64 = categories.iter().map(|row| row["difference_bytes"].as_i64().unwrap()).sum();
    assert_eq!(sum, difference as i64);
    assert!(comparison["by_line"][0]["location"].as_str().unwrap().contains("ranks.py:41 forward"), "{comparison}");
    let issues = launch["issues"].as_array().unwrap();
    let [issue] = &issues[..] else { panic!("{issues:#?}") };
    assert_eq!((&issue["rule"], &issue["processes"][0]["rank"]), (&json!("stray-context"), &json!(1)));
    assert_eq!(issue["bytes"], 20 << 20, "the segment of a block of 3 MiB");
    assert!(issue["processes"][0]["location"].as_str().unwrap().ends_with("uneven.py:22 main"), "{issue}");
}

#[test]
fn a_context_without_an_allocation_is_reported() {
    let ranks = run(program("uneven.py", Start::Torchrun, &["--context"]).with_device_usage());
    ranks.run.assert_ended_well();
    let issues = &summary(&ranks)["launch"]["issues"];
    let [issue] = &issues.as_array().unwrap()[..] else { panic!("{issues:#?}") };
    assert_eq!((&issue["rule"], &issue["bytes"]), (&json!("stray-context"), &json!(0)));
    assert_eq!(issue["processes"][0]["rank"], 1);
    assert_eq!(issue["headline"], "rank 1 holds a CUDA context on GPU 0, the GPU of rank 0");
}
