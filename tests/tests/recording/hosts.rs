//! A job on several hosts: `memtrace report DIR` merges the run folders of all launchers. torchrun runs on two hosts
//! that are network namespaces with names of their own, and every figure is that of PyTorch in the rank itself.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::traced_program::{memtrace, packages, root};
use serde_json::{Value, json};

/// The exit status of `hosts.sh` where the machine does not permit namespaces.
const SKIPPED: i32 = 77;

fn report(folder: &Path) -> Value {
    let output = Command::new(memtrace()).arg("report").arg(folder).arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn copy_runs(from: &Path, to: &Path) {
    let output = Command::new("cp").arg("-r").arg(from).arg(to).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Runs torchrun with two ranks on each of two hosts, which share a folder. `None` where that is not permitted.
fn torchrun(folder: &Path) -> Option<Output> {
    let programs = root().join("tests/programs/distributed");
    let mut command = Command::new(root().join("scripts/sim"));
    command.arg(programs.join("hosts.sh")).arg(memtrace()).arg("--runs").arg(folder.join("runs"));
    command.args(["--", "python", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]);
    command.args(["--rdzv-backend", "c10d", "--rdzv-endpoint", "host-a:29400", "--rdzv-id", "job7"]);
    command.arg(programs.join("hosts.py")).arg(folder);
    let output = command.env("SIMCUDA_DEVICES", "2").env("OMP_NUM_THREADS", "1").output().unwrap();
    if output.status.code() == Some(SKIPPED) {
        println!("{}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(output)
}

/// The figures that PyTorch measured in each rank.
fn measured(folder: &Path) -> BTreeMap<u64, Value> {
    let read = |rank: u64| {
        let text = std::fs::read_to_string(folder.join(format!("{rank}.json"))).unwrap();
        (rank, serde_json::from_str(&text).unwrap())
    };
    (0..4).map(read).collect()
}

fn phase_peak(rank: &Value, phase: &str) -> Value {
    let phases = rank["phases"].as_array().unwrap();
    phases.iter().find(|row| row["phase"] == phase).map_or(Value::Null, |row| row["peak_bytes"].clone())
}

#[track_caller]
fn assert_equals_pytorch(report: &Value, measured: &BTreeMap<u64, Value>) {
    let ranks = report["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 4, "{report}");
    for rank in ranks {
        let own = &measured[&rank["rank"].as_u64().unwrap()];
        assert_eq!((&rank["host"], &rank["pid"]), (&own["host"], &own["pid"]));
        assert_eq!((&rank["peak_bytes"], &rank["reserved_bytes"]), (&own["peaks"]["any"], &own["reserved"]), "{rank}");
        for phase in ["forward", "backward", "optimizer"] {
            assert_eq!(phase_peak(rank, phase), own["peaks"][phase], "{phase} of {rank}");
        }
    }
}

/// The ranks without the names of their runs.
fn without_runs(ranks: &Value) -> Vec<Value> {
    let mut ranks = ranks.as_array().unwrap().clone();
    for rank in &mut ranks {
        rank.as_object_mut().unwrap().remove("run").unwrap();
    }
    ranks
}

/// The ranks of `launch` in the summaries of all runs, in the order of the merged report, with the names of their runs.
fn ranks_of_launches(runs: &Path, merged: &Value) -> Value {
    let mut found = Vec::new();
    for run in merged["runs"].as_array().unwrap() {
        let text = std::fs::read_to_string(runs.join(run["name"].as_str().unwrap()).join("summary.json")).unwrap();
        let summary: Value = serde_json::from_str(&text).unwrap();
        for rank in summary["launch"]["ranks"].as_array().unwrap() {
            let mut rank = rank.clone();
            rank["run"] = run["name"].clone();
            found.push(rank);
        }
    }
    let number = |rank: &Value| rank["rank"].as_u64();
    let order: Vec<_> = merged["ranks"].as_array().unwrap().iter().map(number).collect();
    found.sort_by_key(|rank| order.iter().position(|other| *other == number(rank)));
    found.into()
}

#[test]
fn torchrun_on_two_hosts_gives_one_report() {
    let folder = tempfile::tempdir().unwrap();
    if torchrun(folder.path()).is_none() {
        return;
    }
    let measured = measured(folder.path());
    let runs = folder.path().join("runs");
    let merged = report(&runs);
    assert_equals_pytorch(&merged, &measured);
    assert_eq!((&merged["job"], &merged["job_source"]), (&json!("job7"), &json!("TORCHELASTIC_RUN_ID")));
    assert_eq!((&merged["world_size"], &merged["unrecorded_ranks_count"]), (&json!(4), &json!(0)));
    assert_eq!(merged["ranks"], ranks_of_launches(&runs, &merged), "the ranks are those of each run's own launch");
    assert!(merged["runs"].as_array().unwrap().iter().all(|run| run["origin"] == "summary"), "{merged}");
    // Both hosts have one clock here, and each step waits for all ranks.
    let [clock] = &merged["clocks"].as_array().unwrap()[..] else { panic!("{merged}") };
    assert_eq!((&clock["common_steps"], &clock["differs_at_least_ns"]), (&json!(3), &json!(0)), "{clock}");
    // The last rank keeps 8 MiB of each step; two steps had ended at its peak.
    let difference = &merged["worst_against_median"];
    let expected = measured[&3]["peaks"]["any"].as_i64().unwrap() - measured[&0]["peaks"]["any"].as_i64().unwrap();
    assert_eq!((&difference["worst"]["rank"], &difference["difference_bytes"]), (&json!(3), &json!(expected)));
    let line = &difference["by_line"][0];
    let location = line["location"].as_str().unwrap();
    assert!(location.contains("hosts.py:") && line["difference_bytes"] == json!(16 << 20), "{line}");
    let text = Command::new(memtrace()).arg("report").arg(&runs).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let peak = |rank: u64| measured[&rank]["peaks"]["any"].as_f64().unwrap();
    let (mib, percent) = (peak(3) / f64::from(1 << 20), (peak(3) - peak(0)) / peak(0) * 100.0);
    let worst = format!("rank 3 on host-b, peak {mib:.0} MiB, 16.0 MiB ({percent:.0} %) more than the median (rank 1)");
    assert!(text.contains(&format!("Worst of 4 ranks: {worst}")), "{text}");

    // Without summaries, the traces give the same. The disks of the hosts were gathered into two folders here.
    let gathered = folder.path().join("gathered");
    std::fs::create_dir(&gathered).unwrap();
    for (host, entry) in ["a", "b"].iter().zip(std::fs::read_dir(&runs).unwrap()) {
        std::fs::create_dir(gathered.join(host)).unwrap();
        let run = gathered.join(host).join("run");
        copy_runs(&entry.unwrap().path(), &run);
        std::fs::remove_file(run.join("summary.json")).unwrap();
    }
    let replayed = report(&gathered);
    assert_equals_pytorch(&replayed, &measured);
    assert!(replayed["runs"].as_array().unwrap().iter().all(|run| run["origin"] == "traces"), "{replayed}");
    let names: Vec<&Value> = replayed["runs"].as_array().unwrap().iter().map(|run| &run["name"]).collect();
    assert_eq!(names, ["run@a", "run@b"]);
    assert_eq!(replayed["imbalance"], merged["imbalance"]);
    assert_eq!(without_runs(&replayed["ranks"]), without_runs(&merged["ranks"]));

    // One host's folder is lost.
    let lost = merged["ranks"][0]["run"].as_str().unwrap();
    let partial = folder.path().join("partial");
    copy_runs(&runs, &partial);
    std::fs::remove_dir_all(partial.join(lost)).unwrap();
    let partial = report(&partial);
    assert_eq!((&partial["unrecorded_ranks"], partial["ranks"].as_array().unwrap().len()), (&json!([2, 3]), 2));

    assert_tables(&runs, folder.path(), &measured);
}

/// The partitioned tables say the same, to memtrace, DuckDB and Polars.
fn assert_tables(runs: &Path, folder: &Path, measured: &BTreeMap<u64, Value>) {
    let tables = folder.join("tables");
    let mut export = Command::new(memtrace());
    export.arg("export").arg(runs).args(["--to", "parquet", "--partition", "-o"]).arg(&tables);
    let output = export.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let from_tables = report(&tables);
    assert_equals_pytorch(&from_tables, measured);
    assert_eq!(from_tables["ranks"], report(runs)["ranks"]);
    assert_eq!(from_tables["job"], "job7");
    let packages = packages(&["duckdb==2.0.0", "polars==2.1.0", "polars-runtime-32==2.1.0"]);
    let mut read = Command::new(root().join("scripts/sim"));
    read.args(["env", &format!("PYTHONPATH={packages}"), "python"]).arg(root().join("tests/parquet/partitioned.py"));
    let output = read.arg(&tables).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let peaks: Value = measured.iter().map(|(rank, own)| json!([rank, own["peaks"]["any"]])).collect();
    for key in ["peaks_of_events", "peaks_of_ranks", "peaks_by_polars"] {
        assert_eq!(found[key], peaks, "{key}");
    }
    let phases = &found["phases"];
    for (rank, own) in measured {
        for phase in ["forward", "backward", "optimizer"] {
            assert_eq!(phases[format!("{rank}")][phase], own["peaks"][phase], "{phase} of rank {rank}");
        }
    }
    let line = &found["worst_against_median"][0];
    assert!(line[0].as_str().unwrap().ends_with("hosts.py") && line[2] == json!(16 << 20), "{line}");
    // Each step of the last rank keeps 8 MiB, and no other rank keeps anything.
    assert_eq!(found["growth"], json!([[3, 8 << 20]]));
}
