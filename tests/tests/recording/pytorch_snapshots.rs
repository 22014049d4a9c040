//! PyTorch's own snapshots of programs over the simulated CUDA.
//!
//! `memtrace report` gives the same for them as for our recording of the same process, as far as a snapshot has the
//! data. Python pickles the snapshots again in every protocol, and as JSON. [`crate::programs`] has the programs,
//! `exhaustive/versions.rs` the releases.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use memtrace_tests::traced_program::{Run, memtrace, root};
use serde_json::Value;

/// The output of `memtrace report --json` for a file.
#[track_caller]
fn report(path: &Path) -> Value {
    let output = Command::new(memtrace()).args(["report", "--json"]).arg(path).output().expect("memtrace");
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The values of each device that both sources have: peaks, bytes allocated and freed in total and by optimizers,
/// steps, errors.
fn facts(summary: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for device in summary["processes"][0]["devices"].as_array().expect("devices") {
        let name = |what: &str| format!("device {} {what}", device["device"]);
        found.insert(name("highest"), device["highest"].clone());
        found.insert(name("end"), device["end"]["totals"].clone());
        found.insert(name("errors"), device["oom_count"].clone());
        found.insert(name("steps"), device["steps"].clone());
        let rows = ["before_first_step", "first_step", "later_steps"]
            .into_iter()
            .flat_map(|part| device[part].as_array().into_iter().flatten());
        let mut sums: BTreeMap<&str, [u64; 4]> = BTreeMap::new();
        for row in rows {
            let phase = row["phase"].as_str().expect("a phase");
            for sum in if phase == "optimizer" { vec!["all", "optimizer"] } else { vec!["all"] } {
                let sum = sums.entry(sum).or_default();
                for (at, key) in ["allocations", "allocated_bytes", "frees", "freed_bytes"].into_iter().enumerate() {
                    sum[at] += row[key].as_u64().expect("a number");
                }
            }
        }
        found.insert(name("sums"), serde_json::json!(sums));
    }
    found
}

/// Compares the reports of a recording and of PyTorch's snapshot of the same process, in every format of the snapshot.
#[track_caller]
pub(crate) fn assert_same_reports(run: &Run, pickle: &Path) {
    let folder = pickle.parent().expect("a folder");
    let summary = report(&run.path());
    let (ours, source) = (facts(&summary), &summary["processes"][0]["devices"][0]["source"]);
    assert!(ours.values().any(|fact| fact["all"][0].as_u64().is_some_and(|allocations| allocations > 10)), "{ours:#?}");
    let script = "import gzip, json, pickle, sys\n\
        path = sys.argv[1]\n\
        found = pickle.load(open(path, 'rb'))\n\
        for protocol in range(2, 6):\n    pickle.dump(found, open(f'{path[:-7]}{protocol}.pkl', 'wb'), protocol)\n\
        json.dump(found, open(path[:-7] + '.json', 'w'))\n\
        gzip.open(path + '.gz', 'wb').write(open(path, 'rb').read())\n";
    let done = Command::new("python3").args(["-c", script]).arg(pickle).status().expect("python3");
    assert!(done.success());
    let names = [
        "theirs.pickle",
        "theirs.pickle.gz",
        "theirs.json",
        "theirs2.pkl",
        "theirs3.pkl",
        "theirs4.pkl",
        "theirs5.pkl",
    ];
    for name in names {
        let summary = report(&folder.join(name));
        assert_eq!(
            summary["losses"],
            serde_json::json!({}),
            "{name}: its state at the end is what its events add up to"
        );
        let mut theirs = facts(&summary);
        // Without a tracker, PyTorch's reporter gives rounded block sizes and no segments.
        for (name, totals) in ours.iter().filter(|_| source == "torch_reporter") {
            for key in ["requested_bytes", "reserved_bytes"] {
                if let Some(total) = totals.get(key) {
                    theirs.entry(name.clone()).or_default()[key] = total.clone();
                }
            }
        }
        assert_eq!(theirs, ours, "{name} (left: of PyTorch's snapshot, right: of our recording)");
    }
}

/// A ring that was too small: the report notes the overwritten part, and the rest agrees with PyTorch's own statistics.
#[test]
fn an_overwritten_ring_buffer_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ring.pickle");
    let program = root().join("tests/programs/torch/ring.py");
    let output =
        Command::new(root().join("scripts/sim")).arg("python").args([&program, &path]).output().expect("scripts/sim");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let statistics: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let summary = report(&path);
    let device = &summary["processes"][0]["devices"][0];
    for total in ["allocated", "active", "reserved", "requested"] {
        let key = format!("{total}_bytes");
        assert_eq!(device["end"]["totals"][&key], statistics[format!("{key}.all.current")], "{total}");
    }
    assert_eq!(summary["losses"], serde_json::json!({}));
    let notices = summary["processes"][0]["notices"].to_string();
    assert!(notices.contains("older than its first event") && notices.contains("max_entries"), "{notices}");
    // Range starts and ends have their own list, which is no ring.
    let annotations = statistics["annotations"].as_u64().expect("a number");
    assert_eq!(summary["run"]["events"], 100 + annotations);
}
