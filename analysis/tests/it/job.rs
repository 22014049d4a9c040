//! `memtrace report DIR`: the runs of one job, merged from what each run's launcher wrote. The folders here are made by
//! hand; `tests/tests/recording/hosts.rs` has those of a real job.

use std::path::Path;

use memtrace_analysis::passes::Phase;
use memtrace_analysis::report::{JobOrRuns, RankSummary, RunListText, RunOrigin, job_or_runs};
use memtrace_analysis::{Error, JobOptions, JobReport, Result, TextOptions, ToText, find_runs, job_html, job_report};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A run of one rank, as its launcher leaves it.
struct Made {
    name: &'static str,
    rank: u32,
    world_size: u32,
    host: &'static str,
    job: Option<&'static str>,
    peak: u64,
    started_ns: u64,
    version: &'static str,
}

const RANK: Made = Made {
    name: "run",
    rank: 0,
    world_size: 4,
    host: "node0",
    job: Some("71"),
    peak: 100 * MIB,
    started_ns: 1_000,
    version: "0.1.0",
};

impl Made {
    fn manifest(&self) -> Value {
        let mut env = json!({"RANK": self.rank.to_string(), "MASTER_ADDR": "node0", "MASTER_PORT": "29500"});
        if let Some(job) = self.job {
            env["SLURM_JOB_ID"] = job.into();
        }
        json!({
            "memtrace": self.version, "host": self.host, "state": "ended", "exit": {"code": 0},
            "started_ns": self.started_ns, "ended_ns": self.started_ns + 1_000,
            "processes": [{"pid": 7, "env": env, "trace": "7.mtr"}],
        })
    }

    fn summary(&self) -> Value {
        let phase = |phase: &str, peak: u64| json!({"phase": phase, "peak_bytes": peak});
        let step = |step: u64| json!({"step": step, "time_ns": self.started_ns + step * 100, "duration_ns": 100});
        json!({
            "version": "2.2",
            "run": {"started_ns": self.started_ns, "memtrace_version": self.version},
            "processes": [{
                "pid": 7, "rank": self.rank, "world_size": self.world_size, "host": self.host, "exit": {"code": 0},
                "trace": "7.mtr", "snapshot": format!("rank{}.pickle", self.rank), "events": 10, "losses": {},
                "devices": [{
                    "device": self.rank % 2,
                    "highest": {"allocated_bytes": self.peak, "reserved_bytes": self.peak + MIB},
                    "oom_count": 0,
                    "before_first_step": [phase("load", self.peak / 4)],
                    "first_step": [phase("forward", self.peak / 2), phase("backward", self.peak / 2)],
                    "later_steps": [phase("forward", self.peak), phase("backward", self.peak / 2)],
                    "by_step": [step(0), step(1)],
                }],
            }],
        })
    }

    fn write(&self, folder: &Path) {
        let run = folder.join(self.name);
        std::fs::create_dir_all(&run).unwrap();
        std::fs::write(run.join("run.json"), self.manifest().to_string()).unwrap();
        std::fs::write(run.join("summary.json"), self.summary().to_string()).unwrap();
    }
}

fn made(runs: &[Made]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    runs.iter().for_each(|run| run.write(folder.path()));
    folder
}

fn report_of(folder: &Path, job: Option<&str>) -> Result<JobReport> {
    job_report(folder, &JobOptions { job: job.map(str::to_owned), compares: false }, &mut |_| {})
}

#[track_caller]
fn assert_error(folder: &Path, job: Option<&str>, reason: &str, help: &str) {
    let error = report_of(folder, job).unwrap_err();
    let text = error.to_string().replace(&folder.display().to_string(), "DIR");
    assert_eq!((text.as_str(), error.help()), (reason, Some(help)), "{error:?}");
}

#[test]
fn ranks_of_all_hosts_are_one_table() {
    let runs = [
        Made { name: "a/memtrace-train", ..RANK },
        Made { name: "b/memtrace-train", rank: 1, host: "node1", peak: 300 * MIB, ..RANK },
        Made { name: "other", rank: 3, host: "node1", peak: 200 * MIB, started_ns: 1_050, ..RANK },
    ];
    let folder = made(&runs);
    let report = report_of(folder.path(), None).unwrap();
    assert_eq!((report.job.as_str(), report.job_source.as_str()), ("71", "SLURM_JOB_ID"));
    let names: Vec<&str> = report.runs.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(names, ["memtrace-train@a", "memtrace-train@b", "other"]);
    let ranks: Vec<_> =
        report.table.ranks.iter().map(|rank| (rank.rank, rank.peak_bytes / MIB, rank.device.unwrap())).collect();
    assert_eq!(ranks, [(1, 300, 1), (3, 200, 1), (0, 100, 0)]);
    let phases: Vec<_> =
        report.table.ranks[0].phases.iter().map(|row| (row.phase.name(), row.peak_bytes / MIB)).collect();
    assert_eq!(phases, [("load", 75), ("forward", 300), ("backward", 150)]);
    assert_eq!((report.table.world_size, report.table.unrecorded_ranks_count), (Some(4), 1));
    assert_eq!(
        (&*report.table.unrecorded_ranks, &*report.table.hosts),
        (&[2][..], &["node0".into(), "node1".into()][..])
    );
    let imbalance = report.table.imbalance.unwrap();
    assert_eq!((imbalance.worst_rank, imbalance.median_rank, imbalance.best_rank), (1, 3, 0));
    assert_eq!((imbalance.max_bytes / MIB, imbalance.median_bytes / MIB), (300, 200));
    // Of two ranks on a host, the steps begin with the earlier and end with the later one.
    let [clock] = &report.clocks[..] else { panic!("{:?}", report.clocks) };
    assert_eq!(
        (clock.host.as_str(), clock.common_steps, clock.later_ns, clock.differs_at_least_ns),
        ("node1", 2, 0, 0)
    );
    let text = report.to_text(&TextOptions::default());
    assert!(
        text.starts_with("memtrace report    job 71 (SLURM_JOB_ID)    3 ranks of 4 on 2 hosts, 3 runs\n"),
        "{text}"
    );
    let worst = "Worst of 3 ranks: rank 1 on node1, peak 300 MiB, 100 MiB (50 %) more than the median (rank 3), most \
                 of it in forward.";
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(worst), "{text}");
    assert!(text.contains("No recording: rank 2 has none, or used no GPU memory.\n"), "{text}");
    let mut page = Vec::new();
    job_html(&report, &mut page).unwrap();
    let page = String::from_utf8(page).unwrap();
    // The data for the script, and the report as text where scripts do not run.
    assert!(page.contains("id=\"job\"") && page.contains("No recording: rank 2 has none"), "{page}");
    crate::schemas::assert_valid("job", &report.to_json());
}

#[test]
fn several_jobs_are_listed_and_one_can_be_chosen() {
    let runs = [
        Made { name: "a", ..RANK },
        Made { name: "b", rank: 1, job: Some("72"), started_ns: 9_000, ..RANK },
        Made { name: "c", rank: 2, job: Some("72"), started_ns: 9_000, ..RANK },
    ];
    let folder = made(&runs);
    let jobs = "72 (2 runs, 2 processes), 71 (1 run, 1 process)";
    assert_error(folder.path(), None, "DIR has 2 jobs", &format!("choose one with --job: {jobs}"));
    assert_error(folder.path(), Some("7"), "DIR has no job 7", &format!("its jobs are {jobs}"));
    let report = report_of(folder.path(), Some("72")).unwrap();
    assert_eq!((report.table.ranks.len(), report.runs.len()), (2, 2));
    // A user sees the runs, the newest first.
    let options = |job: Option<&str>| JobOptions { job: job.map(str::to_owned), ..JobOptions::default() };
    let JobOrRuns::Runs(list) = job_or_runs(folder.path(), &options(None), &mut |_| {}).unwrap() else { panic!() };
    let runs: Vec<_> =
        list.runs.iter().map(|run| (run.path.file_name().unwrap().to_str().unwrap(), run.job.as_deref())).collect();
    assert_eq!(runs, [("c", Some("72")), ("b", Some("72")), ("a", Some("71"))]);
    let text = RunListText { list: &list, time: |ns| format!("at {ns}") }.to_text(&TextOptions::default());
    assert!(text.contains("  c    at 9000  72") && text.contains("--job ID"), "{text}");
    let chosen = job_or_runs(folder.path(), &options(Some("71")), &mut |_| {}).unwrap();
    assert!(matches!(chosen, JobOrRuns::Job(report) if report.job == "71"));
}

#[test]
fn a_shared_address_is_one_job_only_at_one_time() {
    let runs = [
        Made { name: "a", job: None, ..RANK },
        Made { name: "b", job: None, rank: 1, host: "node1", started_ns: 1_900, ..RANK },
        Made { name: "later", job: None, started_ns: 8_000, ..RANK },
    ];
    let folder = made(&runs);
    let jobs = "node0:29500@later (1 run, 1 process), node0:29500@a (2 runs, 2 processes)";
    assert_error(folder.path(), None, "DIR has 2 jobs", &format!("choose one with --job: {jobs}"));
    std::fs::remove_dir_all(folder.path().join("later")).unwrap();
    let report = report_of(folder.path(), None).unwrap();
    assert_eq!((report.job.as_str(), report.table.ranks.len()), ("node0:29500", 2));
}

#[test]
fn what_limits_the_table_is_named() {
    let runs = [
        Made { name: "first", ..RANK },
        Made { name: "again", peak: 50 * MIB, started_ns: 5_000, version: "0.2.0", ..RANK },
        Made { name: "one", rank: 1, world_size: 8, ..RANK },
        Made { name: "damaged", rank: 2, ..RANK },
        Made { name: "newer", rank: 3, ..RANK },
    ];
    let folder = made(&runs);
    std::fs::write(folder.path().join("damaged/summary.json"), "{\"version\": \"2.2\", \"run").unwrap();
    std::fs::write(folder.path().join("newer/summary.json"), "{\"version\": \"3.0\"}").unwrap();
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    let report = report_of(folder.path(), None).unwrap();
    let ranks: Vec<_> = report.table.ranks.iter().map(|rank| (rank.rank, rank.run.as_deref().unwrap())).collect();
    assert_eq!(ranks, [(1, "one"), (0, "again")]);
    assert_eq!((report.table.world_size, report.table.unrecorded_ranks_count), (Some(8), 6));
    assert_eq!(report.table.ranks[1].other_runs, ["first"]);
    let notices: Vec<&str> = report.notices.iter().map(String::as_str).collect();
    let no_trace = |name: &str| {
        let path = folder.path().join(name);
        format!(
            "{name} is left out: cannot read {}: the folder contains no trace (*.mtr) and no snapshot (*.pickle, \
             *.json)",
            path.display()
        )
    };
    assert_eq!(
        notices,
        [
            &no_trace("damaged"),
            &no_trace("newer"),
            "the runs were recorded by different versions of memtrace: 0.1.0 (2 runs), 0.2.0 (1 run)",
            "1 rank with several processes: the table has the one that started last, of rank 0 (again)",
            "the ranks report different world sizes: 4, 8",
        ]
    );
}

#[test]
fn folders_without_a_run_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let help = "pass the folder of --runs, or one into which run folders were gathered";
    assert_error(folder.path(), None, "cannot read DIR: it contains no run folder", help);
    std::fs::create_dir_all(folder.path().join("ranks/run=a")).unwrap();
    std::fs::write(folder.path().join("ranks/run=a/ranks.parquet"), "PAR1").unwrap();
    let help = "write it again: memtrace export DIR --to parquet --partition -o TABLES";
    assert_error(folder.path(), None, "cannot read DIR/ranks: it contains no readable run=NAME/ranks.parquet", help);
    assert!(matches!(report_of(&folder.path().join("none"), None), Err(Error::Io { .. })));
    // A link into a circle is not followed.
    std::os::unix::fs::symlink(folder.path(), folder.path().join("circle")).unwrap();
    assert_eq!(find_runs(folder.path()).unwrap(), []);
}

/// Tables that memtrace wrote before the version 2.0 of the report of a job: hosts.py on four ranks, and a process
/// without one.
#[test]
fn tables_of_an_older_version_are_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/ranks_of_job_1.0");
    let report = report_of(&folder, None).unwrap();
    assert_eq!((report.job.as_str(), report.job_source.as_str(), report.runs.len()), ("old", "--job", 3));
    let figures = |rank: &RankSummary| (rank.rank, rank.peak_bytes, rank.phase_peak(Phase::Backward), rank.device);
    let peaks: Vec<_> = report.table.ranks.iter().map(figures).collect();
    let (worst, other) = ((253_043_200, 219_972_608), (236_265_984, 203_195_392));
    let expected = |rank, (peak, backward)| (rank, peak, Some(backward), Some(rank as i16 % 2));
    assert_eq!(peaks, [expected(3, worst), expected(0, other), expected(1, other), expected(2, other)]);
    // Fields that the tables lack are unknown, and absent from the JSON.
    for rank in &report.table.ranks {
        assert_eq!((rank.rank_source, rank.steps, rank.outside_pytorch_bytes), (None, None, None));
        assert_eq!((rank.peak_phase, rank.ended_by_oom, rank.local_rank), (None, None, None));
    }
    let json: Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!((json["ranks"][0].get("steps"), json["ranks"][0].get("rank_source")), (None, None));
    let schema: Value = serde_json::from_str(&JobReport::json_schema()).unwrap();
    crate::json_schema::assert_valid(&schema, &json);
    let [alone] = &report.table.without_rank[..] else { panic!("{:?}", report.table.without_rank) };
    assert_eq!((alone.pid, alone.peak_bytes, alone.run.as_deref()), (1243, 20 * MIB, Some("helper")));
    let text = report.to_text(&TextOptions::default());
    assert!(text.contains("Worst of 4 ranks: rank 3, peak 241 MiB"), "{text}");
}

/// A recorded run without a `summary.json` is analyzed, with the same result.
#[test]
fn traces_give_what_the_summary_gives() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    std::fs::write(run.join("42.mtr"), crate::small_trace::trace(8)).unwrap();
    std::fs::write(run.join("run.json"), r#"{"memtrace":"0.1.0","state":"ended","host":"node0"}"#).unwrap();
    let analyzed = report_of(folder.path(), None).unwrap();
    assert_eq!(analyzed.runs[0].origin, RunOrigin::Traces);
    let summary = memtrace_analysis::summarize(&memtrace_analysis::open_run(&run).unwrap(), &mut |_| {}).unwrap();
    std::fs::write(run.join("summary.json"), summary.to_json()).unwrap();
    let read = report_of(folder.path(), None).unwrap();
    assert_eq!(read.runs[0].origin, RunOrigin::Summary);
    assert_eq!(read.table, analyzed.table);
    assert!(read.table.ranks.len() + read.table.without_rank.len() > 0, "{read:?}");
}
