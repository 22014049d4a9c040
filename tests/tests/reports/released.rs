//! The memory that stayed on the device after a program had released memory, against the figures that the program
//! itself printed.

use std::process::{Command, Output};
use std::sync::LazyLock;

use memtrace_tests::traced_program::{Run, TracedProgram, memtrace};
use serde_json::Value;

static RUN: LazyLock<Run> = LazyLock::new(|| {
    let run = TracedProgram::python("released/offload.py", &[]).option("--holders").run();
    run.assert_ended_well();
    run
});

/// The bytes of PyTorch that the program printed after each release: the name, allocated and reserved.
fn printed() -> Vec<(String, u64, u64)> {
    let text = String::from_utf8_lossy(&RUN.output.stdout).into_owned();
    let row = |line: &str| {
        let mut words = line.split(' ');
        let mut number = || words.next_back().unwrap().parse().unwrap();
        let (reserved, allocated) = (number(), number());
        (words.next().unwrap().to_owned(), allocated, reserved)
    };
    text.lines().map(row).collect()
}

fn check(point: &str, max: u64) -> Output {
    let mut command = Command::new(memtrace());
    command.arg("check").arg(RUN.path()).args(["--json", "--released-after", point, "--max", &max.to_string()]);
    command.output().unwrap()
}

fn result(point: &str, max: u64) -> Value {
    let report: Value = serde_json::from_slice(&check(point, max).stdout).expect("JSON");
    report["results"][0].clone()
}

/// The summary's entry for a point of the only device.
fn released(point: &str) -> Value {
    let output = Command::new(memtrace())
        .arg("report")
        .arg(RUN.path())
        .args(["--json", "--released-after", point])
        .output()
        .unwrap();
    let summary: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let points = summary["processes"][0]["devices"][0]["released"].as_array().unwrap();
    points.iter().find(|one| one["after"] == point).unwrap_or_else(|| panic!("{point}: {points:?}")).clone()
}

fn part(released: &Value, kind: &str) -> u64 {
    let parts = released["parts"].as_array().unwrap();
    parts.iter().filter(|part| part["kind"] == kind).map(|part| part["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn the_limit_is_exact_to_the_byte_at_the_end_of_a_range_and_of_a_call() {
    let most = printed().iter().filter(|(name, ..)| name == "sleep").map(|(.., reserved)| *reserved).max().unwrap();
    for point in ["range:sleep", "function:sleep", "function:Server.sleep"] {
        assert_eq!(check(point, most).status.code(), Some(0), "{point}");
        assert_eq!(check(point, most - 1).status.code(), Some(1), "{point}");
        assert_eq!(result(point, most)["value_bytes"], most, "{point}");
    }
    // The line `del server`. The weights of the last job are still cached.
    let text = result("line:offload.py:49", u64::from(u32::MAX))["text"].as_str().unwrap().to_owned();
    assert!(text.contains(" unused segments, which empty_cache releases"), "{text}");
    let never = result("range:never", most);
    assert_eq!((&never["passed"], &never["text"]), (&false.into(), &"no device of the run came to range:never".into()));
}

#[test]
fn what_stayed_is_divided_by_why_it_stayed() {
    let sleep = released("range:sleep");
    let (_, allocated, reserved) = printed().into_iter().rfind(|(name, ..)| name == "sleep").unwrap();
    assert_eq!((&sleep["times"], part(&sleep, "allocated")), (&3.into(), allocated));
    assert_eq!(part(&sleep, "blocked"), reserved - allocated, "a tensor of 3 MiB holds a segment of 20 MiB: {sleep}");
    let sum: u64 = sleep["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sleep["stayed_bytes"], sum);
    let blocking = sleep["reserved"]["blocked_by"][0]["allocated_at"]["location"].as_str().unwrap();
    assert!(blocking.contains("offload.py:23 answer"), "{blocking}");
    // The cache was empty each time, and the weights were gone.
    assert!(sleep["start_bytes"].as_u64().unwrap() >= sum + (60 << 20), "{sleep}");
}

#[test]
fn a_weight_that_outlives_its_model_has_its_line_and_holder() {
    let shutdown = released("range:shutdown");
    let (_, allocated, _) = printed().pop().unwrap();
    assert_eq!(part(&shutdown, "allocated"), allocated);
    let groups = shutdown["state"]["largest_allocations"].as_array().unwrap();
    let weight = groups.iter().find(|group| group["bytes"] == 4 << 20).unwrap_or_else(|| panic!("{shutdown}"));
    assert!(weight["stack"]["location"].as_str().unwrap().contains("offload.py:32 wake"), "{weight}");
    let held = shutdown["held_by"].as_array().unwrap();
    let path = held.iter().find(|holder| holder["bytes"] == 4 << 20).unwrap_or_else(|| panic!("{shutdown}"));
    assert_eq!(path["path"], "__main__.kept['third']");
}

#[test]
fn the_report_names_the_points_that_release_memory() {
    let text = std::fs::read_to_string(RUN.path().join("summary.txt")).unwrap();
    assert!(
        text.contains(" after range:sleep (most of 3 times)") && text.contains("after function:empty_cache"),
        "{text}"
    );
    let section =
        Command::new(memtrace()).arg("report").arg(RUN.path()).args(["--section", "released"]).output().unwrap();
    let section = String::from_utf8_lossy(&section.stdout).into_owned();
    assert!(
        section.contains("free in segments with blocks in use") && section.contains("Segments blocked by"),
        "{section}"
    );
}
