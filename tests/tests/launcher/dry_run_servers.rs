//! `memtrace dry-run` of engines that serve models: `tests/programs/serving` has the functions and the arithmetic of
//! vLLM's worker.

use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::traced_program::{python, root};
use serde_json::Value;

use crate::launcher_support::*;

const TOTAL: f64 = (8_u64 << 30) as f64;

/// A dry run of the engine, in a folder.
fn engine(folder: &Path, options: &[&str], arguments: &[&str]) -> Output {
    dry_run(folder, options, ("tests/programs/serving/engine.py", arguments))
}

/// A dry run of a program with its arguments.
fn dry_run(folder: &Path, options: &[&str], (program, arguments): (&str, &[&str])) -> Output {
    // For the Python of the test environment.
    let mut command = Command::new(root().join("scripts/sim"));
    command.current_dir(folder).arg(memtrace()).arg("dry-run").args(options).arg("--").arg(python());
    output(command.arg(root().join(program)).args(arguments))
}

/// The device in the summary of the run folder `run`.
fn device(folder: &Path) -> Value {
    let summary = std::fs::read(folder.join("run/summary.json")).unwrap();
    let mut summary: Value = serde_json::from_slice(&summary).unwrap();
    summary["processes"][0]["devices"][0].take()
}

/// The numbers that the program prints behind this word.
fn printed(output: &Output, word: &str) -> Vec<u64> {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{word} "))).unwrap_or_else(|| panic!("{text}"));
    line.split(' ').map(|number| number.parse().unwrap()).collect()
}

fn part(server: &Value, kind: &str) -> u64 {
    let parts = server["parts"].as_array().unwrap();
    parts.iter().find(|part| part["kind"] == kind).map_or(0, |part| part["bytes"].as_u64().unwrap())
}

#[test]
fn a_server_is_reported_as_one_and_its_figures_are_pytorchs() {
    let folder = tempfile::tempdir().unwrap();
    let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "run"], &["0.8", "--sleep", "--lora"]);
    let report = stderr(&ended);
    assert!(ended.status.success(), "{report}");
    let device = device(folder.path());
    let server = &device["server"];
    assert_eq!(server["engine"], "vLLM");
    assert_eq!(part(server, "weights"), printed(&ended, "weights")[0]);
    assert_eq!(part(server, "adapters"), printed(&ended, "adapters")[0]);
    assert_eq!(server["weights_by_type"][0]["data_type"], "bfloat16");
    let (cache, printed_cache) = (&server["kv_cache"], printed(&ended, "kv_cache"));
    assert_eq!((cache["bytes"].as_u64(), cache["tokens"].as_u64()), (Some(printed_cache[0]), Some(printed_cache[1])));
    assert_eq!((cache["block_tokens"].as_u64(), cache["max_model_len"].as_u64()), (Some(16), Some(2048)));
    let stages = server["stages"].as_array().unwrap();
    let names: Vec<&str> = stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["start", "load", "profile", "kv_cache", "capture", "warm_up", "serve", "sleep", "wake_up"]);
    let of_profile = |of: &str| stages[2][of].as_u64().unwrap();
    assert_eq!(of_profile("peak_bytes") - of_profile("end_bytes"), printed(&ended, "profile")[0]);
    assert_eq!(stages[7]["end_bytes"].as_u64(), Some(printed(&ended, "asleep")[0]));
    assert_eq!(device["highest"]["allocated_bytes"].as_u64(), Some(printed(&ended, "peak")[0]));
    for expected in server["expectations"].as_array().unwrap() {
        let (expected, actual) = (expected["expected_bytes"].as_f64(), expected["actual_bytes"].as_f64());
        assert!((expected.unwrap() / actual.unwrap() - 1.0).abs() < 1e-3, "{expected:?} {actual:?}");
    }
    let words: Vec<&str> = report.split(|c: char| !c.is_alphanumeric()).collect();
    // `forward` is also the name of PyTorch's functions.
    for word in ["step", "steps", "batch", "backward", "optimizer", "eval"] {
        assert!(!words.contains(&word), "{word}: {report}");
    }
    assert!(report.contains("vLLM answered requests, with a KV cache of"), "{report}");
}

/// Compares the reported use of a KV cache with the engine's own count: the highest use of so many units, the requests
/// then, the sum over all steps, their number, and preemptions.
fn check_use(usage: &Value, ended: &Output, units: u64) {
    let [highest, requests, sum, steps, preempted] = printed(ended, "cache_use")[..] else { panic!("{ended:?}") };
    assert_eq!(usage["highest_share"].as_f64(), Some(highest as f64 / units as f64), "{usage}");
    assert_eq!((usage["highest_requests"].as_u64(), usage["preemptions"].as_u64()), (Some(requests), Some(preempted)));
    // A step is read several times, but not equally often.
    let mean = sum as f64 / steps as f64 / units as f64;
    assert!((usage["mean_share"].as_f64().unwrap() / mean - 1.0).abs() < 0.1, "{mean}: {usage}");
    assert!(usage["readings"].as_u64().unwrap() >= steps, "{steps}: {usage}");
    let points = usage["over_time"].as_array().unwrap();
    assert!(points.iter().any(|point| point["share"] == usage["highest_share"]), "{usage}");
}

#[test]
fn the_use_of_the_cache_is_the_engines_own_count() {
    let requests = ["0.8", "--requests", "24", "--concurrent", "8", "--new", "40", "--eager"];
    for (more, is_full) in [(&[][..], false), (&["--blocks", "20", "--length", "256"], true)] {
        let folder = tempfile::tempdir().unwrap();
        let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "run"], &[&requests, more].concat());
        let report = stderr(&ended).split_whitespace().collect::<Vec<_>>().join(" ");
        let cache = &device(folder.path())["server"]["kv_cache"];
        let usage = &cache["usage"];
        // No request can have the null block.
        check_use(usage, &ended, cache["blocks"].as_u64().unwrap() - 1);
        assert_eq!((usage["full_readings"] != 0, report.contains("(preempted)")), (is_full, is_full), "{report}");
        assert_eq!(report.contains("were never needed in this run"), !is_full, "{report}");
    }
}

#[test]
fn a_server_leaks_what_each_request_leaves_and_not_what_is_bounded() {
    let run = |more: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let arguments = ["0.8", "--requests", "240", "--concurrent", "4", "--new", "12", "--eager"];
        let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "run"], &[&arguments, more].concat());
        let report = stderr(&ended).split_whitespace().collect::<Vec<_>>().join(" ");
        let summary = std::fs::read(folder.path().join("run/summary.json")).unwrap();
        let summary: Value = serde_json::from_slice(&summary).unwrap();
        let issues = summary["processes"][0]["issues"].as_array().unwrap().clone();
        let cache = device(folder.path())["server"]["kv_cache"]["bytes"].as_u64();
        assert_eq!(cache, Some(printed(&ended, "kv_cache")[0]), "what requests leave is no KV cache");
        (issues, printed(&ended, "allocated"), report)
    };
    let (issues, allocated, report) = run(&["--leak", "256"]);
    let [leak] = &issues[..] else { panic!("{report}") };
    let each = (allocated[239] - allocated[0]) as f64 / 239.0;
    let forecast = &leak["forecast"];
    assert_eq!((&leak["rule"], &forecast["turn"]), (&"leak".into(), &"request".into()), "{leak}");
    assert!((forecast["growth_bytes"].as_f64().unwrap() / each - 1.0).abs() < 0.05, "{each}: {leak}");
    let bytes = leak["bytes"].as_f64().unwrap() / (allocated[239] - allocated[0]) as f64;
    assert!((0.9..1.01).contains(&bytes), "{bytes}: {leak}");
    assert!(report.contains("more with each request") && report.contains("gpu_model_runner.py"), "{report}");
    // 160 results fill their cache; and nothing stays.
    for more in [&["--prefixes", "40"][..], &[]] {
        let (issues, allocated, report) = run(more);
        assert!(issues.is_empty() && report.contains("No leaks"), "{report}");
        assert_eq!(allocated[239] > allocated[0], !more.is_empty());
    }
}

#[test]
fn each_level_of_sleep_is_checked_by_what_stays() {
    for level in ["1", "2"] {
        let folder = tempfile::tempdir().unwrap();
        let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "run"], &["0.8", "--eager", "--sleep", level]);
        let [asleep, released, taken] = printed(&ended, "asleep")[..] else { panic!("{ended:?}") };
        assert!(released > 0 && released == taken, "{released} {taken}");
        let device = device(folder.path());
        let stage = |name: &str| {
            let stages = device["server"]["stages"].as_array().unwrap();
            let stage = stages.iter().find(|stage| stage["stage"] == name).unwrap();
            ["start_bytes", "end_bytes"].map(|bytes| stage[bytes].as_u64().unwrap())
        };
        assert_eq!((stage("sleep"), stage("wake_up")), ([asleep + released, asleep], [asleep, asleep + taken]));
        let check = |max: u64| {
            let mut command = Command::new(memtrace());
            command.current_dir(folder.path()).args(["check", "run", "--json", "--released-after", "function:sleep"]);
            let output = output(command.args(["--max", &max.to_string()]));
            (output.status.code(), serde_json::from_slice::<Value>(&output.stdout).unwrap())
        };
        let (code, result) = check(100 << 20);
        let stayed = result["results"][0]["value_bytes"].as_u64().unwrap();
        // With what is free in segments that have blocks in use.
        assert!(code == Some(0) && (asleep..asleep + (20 << 20)).contains(&stayed), "{asleep}: {result}");
        assert_eq!(check(stayed - 1).0, Some(1));
    }
}

#[test]
fn sglangs_count_excludes_prefixes_that_no_request_uses() {
    for tokens in ["4096", "400"] {
        let folder = tempfile::tempdir().unwrap();
        let program = ("tests/programs/serving/sglang_engine.py", &[tokens][..]);
        let ended = dry_run(folder.path(), &["--memory", "8GiB", "-o", "run"], program);
        let cache = &device(folder.path())["server"]["kv_cache"];
        assert_eq!((cache["tokens"].as_u64(), cache["block_tokens"].as_u64()), (tokens.parse().ok(), Some(4)));
        check_use(&cache["usage"], &ended, tokens.parse().unwrap());
    }
}

#[test]
fn the_suggested_utilization_brings_the_announced_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let of = |utilization: &str, name: &str| {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let ended = engine(&folder, &["--memory", "8GiB", "-o", "run"], &[utilization]);
        assert!(ended.status.success(), "{}", stderr(&ended));
        device(&folder)["server"].take()
    };
    let before = of("0.8", "before");
    let suggested = &before["utilization"];
    let safe = suggested["safe_value"].as_f64().unwrap();
    assert!(safe > 0.9 && safe < 1.0, "{suggested}");
    let after = of(&format!("{safe:.2}"), "after");
    let tokens = |server: &Value| server["kv_cache"]["tokens"].as_i64().unwrap();
    let gained = tokens(&after) - tokens(&before);
    assert!((gained - suggested["kv_cache_tokens"].as_i64().unwrap()).abs() <= 32, "{gained}: {suggested}");
    let free = after["utilization"]["free_bytes"].as_u64().unwrap() as f64;
    assert!((0.02 * TOTAL..0.04 * TOTAL).contains(&free), "{free}");
    assert!(after["utilization"]["safe_value"].is_null(), "{after}");
}

#[test]
fn a_server_without_room_for_a_cache_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "run"], &["0.05", "--layers", "64"]);
    let report = stderr(&ended).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!ended.status.success());
    assert!(report.contains("vLLM has no memory for a KV cache: of the 410 MiB that"), "{report}");
    let needed = report.split("MiB. `--gpu-memory-utilization ").nth(1).and_then(|rest| rest.split('`').next());
    let folder = tempfile::tempdir().unwrap();
    let arguments = [needed.unwrap_or_else(|| panic!("{report}")), "--layers", "64"];
    assert!(engine(folder.path(), &["--memory", "8GiB", "-o", "run"], &arguments).status.success(), "{arguments:?}");
}

#[test]
fn tries_of_a_server_end_when_it_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    let json = |options: &[&str], arguments: &[&str]| -> (Option<i32>, Value) {
        let ended = engine(folder.path(), options, arguments);
        let value = serde_json::from_slice(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {}", stderr(&ended)));
        (ended.status.code(), value)
    };
    let options = ["--memory", "1GiB", "--max", "util=0.05:0.97", "--json", "-o", "max"];
    let (code, report) = json(&options, &["{util}", "--port", "0", "--layers", "8"]);
    let tries = report["tries"].as_array().unwrap();
    assert_eq!((code, report["largest"].as_f64()), (Some(1), None), "{report}");
    assert!(
        tries[0]["result"]["does_not_fit"]["reason"].as_str().unwrap().contains("no memory for a KV cache"),
        "{report}"
    );
    let options = ["--memory", "1GiB", "--max", "util=0.5:0.97", "--json", "-o", "max2"];
    let (code, report) = json(&options, &["{util}", "--port", "0", "--layers", "8"]);
    assert_eq!((code, report["largest"].as_f64()), (Some(0), Some(0.96)), "{report}");
    let options = ["--vary-gpu", "t4,a100-40gb", "--jobs", "2", "--json", "-o", "gpus"];
    let (code, report) = json(&options, &["0.9", "--port", "0"]);
    let tries = report["tries"].as_array().unwrap();
    let tokens = |at: usize| tries[at]["server"]["kv_cache_tokens"].as_u64().unwrap();
    assert_eq!((code, &report["variable"], &tries[1]["value"]), (Some(0), &"gpu".into(), &"a100-40gb".into()));
    assert!(tries.iter().all(|one| one["result"] == "fits") && tokens(1) > 2 * tokens(0), "{report}");
}

#[test]
fn a_program_that_is_no_server_ends_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "run", "--until-ready"], &["0.8"]);
    assert!(ended.status.success() && !stderr(&ended).contains("was ended when"), "{}", stderr(&ended));
    let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "ready", "--until-ready"], &["0.8", "--port", "0"]);
    assert!(ended.status.success() && stderr(&ended).contains("ended when it was ready"), "{}", stderr(&ended));
    // The engine loads and profiles its model while it is constructed itself, and ends without a request.
    let summary: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("ready/summary.json")).unwrap()).unwrap();
    let server = &summary["processes"][0]["devices"][0]["server"];
    assert_eq!(server["weights_by_type"][0]["data_type"], "bfloat16", "{server}");
}

/// The device and the report of a server that does not come to serving or ends, on one line.
fn failed(memory: &str, arguments: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let ended = engine(folder.path(), &["--memory", memory, "-o", "run"], arguments);
    let report = stderr(&ended).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!ended.status.success(), "{report}");
    // Before it, the program prints its exception.
    let report = report.split("Dry run on").last().unwrap().to_owned();
    let words = ["batch size", "checkpointing", "gradient", "optimizer state", "rest of the step"];
    assert!(!words.iter().any(|word| report.contains(word)), "{report}");
    (device(folder.path()), report)
}

/// Runs a server that has the memory that it needs.
fn succeeded(memory: &str, arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let ended = engine(folder.path(), &["--memory", memory, "-o", "run"], arguments);
    assert!(ended.status.success(), "{arguments:?}: {}", stderr(&ended));
    ended
}

/// The value that the report suggests for an option.
fn suggested<'a>(report: &'a str, option: &str) -> &'a str {
    let rest = report.split(&format!("`{option} ")).nth(1).unwrap_or_else(|| panic!("{option}: {report}"));
    rest.split('`').next().unwrap()
}

#[test]
fn a_server_that_runs_out_of_memory_gets_the_advice_of_its_stage() {
    let (device, report) = failed("1GiB", &["0.9", "--layers", "200"]);
    assert_eq!(device["server"]["error_stage"], "load");
    assert_eq!(device["server"]["error_reason"], "the weights do not fit");
    assert!(report.contains("while it loaded the model"), "{report}");
    assert!(report.contains("`--tensor-parallel-size 2`: each GPU has half of the weights"), "{report}");

    let arguments = ["0.9", "--eager", "--batched", "16384"];
    let (device, report) = failed("256MiB", &arguments);
    assert_eq!(device["server"]["error_stage"], "profile");
    let tokens = suggested(&report, "--max-num-batched-tokens");
    assert_eq!(tokens, "8192", "{report}");
    // The report does not claim that one change suffices.
    succeeded("256MiB", &["0.9", "--eager", "--batched", "4096"]);

    for (stage, more) in [("capture", ["--sizes", "2048,1024"]), ("serve", ["--prompt", "2048"])] {
        let eager = if stage == "serve" { &["--eager"][..] } else { &[] };
        let (device, report) = failed("8GiB", &[&["0.999"], eager, &more].concat());
        let server = &device["server"];
        assert_eq!(server["error_stage"], stage, "{report}");
        let utilization = suggested(&report, "--gpu-memory-utilization");
        assert_eq!(utilization.parse::<f64>().ok(), server["utilization"]["safe_value"].as_f64(), "{report}");
        let ended = succeeded("8GiB", &[&[utilization], eager, &more].concat());
        // The cache shrinks by as many tokens as the report says.
        let tokens = printed(&ended, "kv_cache")[1] as i64 - server["kv_cache"]["tokens"].as_i64().unwrap();
        let announced = server["utilization"]["kv_cache_tokens"].as_i64().unwrap();
        assert!((tokens - announced).abs() <= 32, "{tokens}: {announced}");
        assert_eq!(report.contains("`--enforce-eager`"), stage == "capture", "{report}");
    }
}

#[test]
fn the_refusals_of_an_engine_name_options_with_which_it_starts() {
    let too_long = ["0.3", "--eager", "--length", "20000"];
    let (device, report) = failed("1GiB", &too_long);
    assert!(device["server"]["kv_cache"].is_null(), "{device}");
    // 2 * 2048 * 2 bytes in each of 4 layers.
    assert!(report.contains("a request of 20,000 tokens (`--max-model-len`) needs 625 MiB"), "{report}");
    let length = suggested(&report, "--max-model-len");
    let utilization = report.split(" or `--gpu-memory-utilization ").nth(1).and_then(|rest| rest.split('`').next());
    for arguments in [["0.3", "--eager", "--length", length], [utilization.unwrap(), "--eager", "--length", "20000"]] {
        succeeded("1GiB", &arguments);
    }
    // Nearly the longest length that fits.
    let tokens = printed(&succeeded("1GiB", &["0.3", "--eager"]), "kv_cache")[1] as f64;
    assert!(length.parse::<f64>().unwrap() > 0.9 * tokens, "{length} {tokens}");

    let (_, report) = failed("1GiB", &["0.9", "--held", "300"]);
    assert!(report.contains("vLLM did not start: `--gpu-memory-utilization 0.9` requests 922 MiB"), "{report}");
    let most = report.split("was free. `--gpu-memory-utilization ").nth(1).and_then(|rest| rest.split('`').next());
    let arguments = [most.unwrap_or_else(|| panic!("{report}")), "--eager", "--held", "300"];
    succeeded("1GiB", &arguments);
}

#[test]
fn a_line_of_output_shows_that_a_server_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["--memory", "8GiB", "-o", "run", "--ready-line", "^serv[a-z]+$"];
    let ended = engine(folder.path(), &options, &["0.8", "--port", "0", "--no-health"]);
    assert!(ended.status.success() && stderr(&ended).contains("was ended when it was ready"), "{}", stderr(&ended));
    // The output of the program passes through.
    let cache = &device(folder.path())["server"]["kv_cache"];
    assert_eq!(cache["bytes"].as_u64(), Some(printed(&ended, "kv_cache")[0]));
    let options = ["--vary-gpu", "t4", "--json", "-o", "gpus", "--ready-line", "^serving"];
    let ended = engine(folder.path(), &options, &["0.9", "--port", "0", "--no-health"]);
    let report: Value = serde_json::from_slice(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {}", stderr(&ended)));
    assert_eq!(report["tries"][0]["result"], "fits", "{report}");
    let ended = engine(folder.path(), &["--ready-line", "(", "-o", "no"], &["0.8"]);
    assert!(ended.status.code() == Some(2) && stderr(&ended).contains("no regular expression"), "{}", stderr(&ended));
}

#[test]
fn cuda_graphs_are_reported_by_size_and_servers_are_compared_by_part() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, utilization: &str, sizes: &str| {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let ended = engine(&folder, &["--memory", "8GiB", "-o", "run"], &[utilization, "--sizes", sizes]);
        assert!(ended.status.success(), "{}", stderr(&ended));
        (device(&folder)["server"].take(), ended)
    };
    let (server, ended) = of("a", "0.8", "1024,512,8,1");
    for (captured, size) in server["captured_sizes"].as_array().unwrap().iter().zip([1024, 512, 8, 1]) {
        assert_eq!(captured["size"].as_u64(), Some(size), "{server}");
        let growth = printed(&ended, &format!("captured_{size}"))[0];
        assert_eq!(captured["pool_growth_bytes"].as_u64(), Some(growth), "{server}");
        assert_eq!((captured["graphs"].as_u64(), captured["segments"] == 0), (Some(1), growth == 0), "{server}");
    }
    let (other, _) = of("b", "0.9", "8");
    let mut command = Command::new(memtrace());
    let compared = output(command.current_dir(folder.path()).args(["diff", "a/run", "b/run", "--json"]));
    let compared: Value = serde_json::from_slice(&compared.stdout).unwrap_or_else(|e| panic!("{e}"));
    let pair = &compared["pairs"][0];
    let parts = pair["by_server_part"].as_array().unwrap();
    let cache = parts.iter().find(|row| row["part"] == "kv_cache").unwrap_or_else(|| panic!("{compared}"));
    for (run, server) in [("a_bytes", &server), ("b_bytes", &other)] {
        assert_eq!(cache[run], server["kv_cache"]["bytes"], "{compared}");
    }
    let sum = |table: &str| -> i64 {
        pair[table].as_array().unwrap().iter().map(|row| row["difference_bytes"].as_i64().unwrap()).sum()
    };
    let difference = pair["difference_bytes"].as_i64().unwrap();
    assert_eq!((sum("by_server_part"), sum("by_stage")), (difference, difference), "{compared}");
    let mut command = Command::new(memtrace());
    let text = output(command.current_dir(folder.path()).args(["diff", "a/run", "b/run"]));
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("KV cache") && text.contains("Allocated in stage") && !text.contains("step"), "{text}");
}

#[test]
fn a_buffer_that_ranks_share_is_communication_and_counts_once() {
    let folder = tempfile::tempdir().unwrap();
    let ended = engine(folder.path(), &["--memory", "8GiB", "-o", "run"], &["0.8", "--eager", "--all-reduce", "64"]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let shared = printed(&ended, "all_reduce")[0];
    assert_eq!(part(&device(folder.path())["server"], "communication"), shared);
    let summary = std::fs::read(folder.path().join("run/summary.json")).unwrap();
    let summary: Value = serde_json::from_slice(&summary).unwrap();
    // The process that opened it has allocated nothing.
    assert_eq!(summary["processes"][1]["devices"].as_array().map(Vec::len), Some(0), "{summary}");
    let imports = summary["launch"]["shared_memory"].as_array().unwrap();
    assert_eq!((imports.len(), imports[0]["peak_bytes"].as_u64()), (1, Some(shared)), "{imports:?}");
    assert_eq!(imports[0]["exporter_pid"], summary["processes"][0]["pid"], "{imports:?}");
}

/// A dry run of an engine and a trainer on one GPU: the output, and the devices of its processes.
fn colocated(arguments: &[&str]) -> (Output, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let ended =
        dry_run(folder.path(), &["--memory", "4GiB", "-o", "run"], ("tests/programs/serving/colocated.py", arguments));
    assert!(ended.status.success(), "{}", stderr(&ended));
    let summary = std::fs::read(folder.path().join("run/summary.json")).unwrap();
    let mut summary: Value = serde_json::from_slice(&summary).unwrap();
    let processes = summary["processes"].as_array_mut().unwrap();
    (ended, processes.iter_mut().map(|process| process["devices"][0].take()).collect())
}

/// The bytes in an activity: in all, of the engine, and of the trainer.
fn activity(device: &Value, name: &str) -> [u64; 3] {
    let activities = device["colocation"]["activities"].as_array().unwrap();
    let found = activities.iter().find(|one| one["activity"] == name).unwrap();
    ["bytes", "engine_bytes", "trainer_bytes"].map(|field| found[field].as_u64().unwrap())
}

#[test]
fn an_engine_and_a_trainer_in_one_process_are_distinguished_in_each_activity() {
    let (awake, awake_devices) = colocated(&["--no-sleep"]);
    let (asleep, asleep_devices) = colocated(&[]);
    for (ended, devices) in [(&awake, &awake_devices), (&asleep, &asleep_devices)] {
        for name in ["rollout", "train", "sync"] {
            let [bytes, of_engine, of_trainer] = activity(&devices[0], name);
            assert_eq!(bytes, printed(ended, &format!("both_{name}"))[0], "{name}");
            assert_eq!(bytes, of_engine + of_trainer, "{name}");
        }
        let [_, of_engine, of_trainer] = activity(&devices[0], "rollout");
        // Parameters and two moments of AdamW. Workspaces of cuBLAS belong to the one who calls it first.
        assert!(of_trainer >= 3 * printed(ended, "parameters")[0], "{of_trainer}");
        assert!(of_engine >= printed(ended, "kv_cache")[0] + printed(ended, "engine_weights")[0], "{of_engine}");
    }
    // The gain of sleeping, as the report of the first run announces it.
    let advice = awake_devices[0]["colocation"]["advice"][0].as_str().unwrap();
    let [train, ..] = activity(&awake_devices[0], "train");
    let activities = ["rollout", "train", "sync"].map(|name| (activity(&asleep_devices[0], name)[0], name));
    let (highest, at) = activities.into_iter().max().unwrap();
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64);
    assert!(advice.contains("`llm.sleep(level=1)` before the training"), "{advice}");
    assert!(advice.contains(&format!("falls from {}", gib(train))), "{advice}");
    let announced: f64 = advice.rsplit_once(" to ").unwrap().1.trim_end_matches(" GiB.").parse().unwrap();
    let measured = highest as f64 / (1_u64 << 30) as f64;
    assert!((announced / measured - 1.0).abs() < 0.02, "announced {announced}, measured {measured}");
    let report = stderr(&asleep).split_whitespace().collect::<Vec<_>>().join(" ");
    let most = format!("in use at most, in {at}: memory that it unmaps to sleep is not in use.");
    assert!(report.contains(&most), "{report}");
}

#[test]
fn an_engine_and_a_trainer_in_two_processes_are_in_one_report() {
    let (ended, devices) = colocated(&["--separate"]);
    let engine = devices.iter().find(|device| device["server"].is_object()).unwrap();
    let trainer = devices.iter().find(|device| device["server"].is_null()).unwrap();
    assert!(trainer["colocation"].is_null(), "the engine's process has it");
    let [bytes, of_engine, of_trainer] = activity(engine, "train");
    assert_eq!(bytes, of_engine + of_trainer);
    // Reserved bytes are at least those that PyTorch allocated, and a sleeping engine has no cache.
    assert!(of_trainer >= printed(&ended, "trainer_train")[0] && of_engine < printed(&ended, "kv_cache")[0]);
    assert!(activity(engine, "rollout")[1] >= printed(&ended, "engine_rollout")[0]);
    // Memory that is free while the trainer waits is no room for the cache.
    let report = stderr(&ended);
    assert!(engine["server"]["utilization"].is_null() && !report.contains("--gpu-memory-utilization"), "{report}");
    assert!(report.contains("Rollout and training"), "{report}");
}
