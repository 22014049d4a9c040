//! What is printed.

use std::collections::BTreeMap;

use crate::baseline::{Baseline, TOLERANCE, Verdict};
use crate::case::{Case, Measured};

/// Prints all cases beside the baseline; true where none fails.
pub(crate) fn table(cases: &[&Case], measured: &BTreeMap<&str, Measured>, baseline: &Baseline) -> bool {
    println!(
        "instructions of memtrace's library for one step; calls of the C library from it, and instructions in those\n"
    );
    println!("{:<12} {:>9} {:>9} {:>7} {:>7} {:>9}  step", "case", "now", "baseline", "change", "calls", "in calls");
    let (mut failed, mut cheaper) = (Vec::new(), Vec::new());
    for case in cases {
        let Some(measured) = measured.get(case.name) else { continue };
        let now = measured.counts();
        let then = baseline.cases.get(case.name).map(|c| c.instructions);
        let change = then.map_or(String::new(), |t| format!("{:+.1} %", (now.instructions / t - 1.0) * 100.0));
        println!(
            "{:<12} {:>9.1} {:>9} {:>7} {:>7.1} {:>9.1}  {} ({} events checked)",
            case.name,
            now.instructions,
            then.map_or("-".into(), |t| format!("{t:.1}")),
            change,
            now.c_library_calls,
            now.c_library_instructions,
            case.what,
            measured.events,
        );
        match baseline.compare(case.name, &now) {
            Verdict::Same => {}
            Verdict::Cheaper(text) => cheaper.push(format!("{}: {text}", case.name)),
            Verdict::Fails(text) => failed.push(format!("{}: {text}", case.name)),
        }
    }
    let percent = TOLERANCE * 100.0;
    if !cheaper.is_empty() {
        println!(
            "\ncheaper by more than {percent} %: make it the measure of what comes next (tests/instructions/run --accept)"
        );
        cheaper.iter().for_each(|line| println!("  {line}"));
    }
    if !failed.is_empty() {
        println!("\nFAILED: the event path costs more than {percent} % above the baseline");
        failed.iter().for_each(|line| println!("  {line}"));
        println!("  where they go:           tests/instructions/run --annotate CASE");
        println!("  where it is worth it:    tests/instructions/run --accept, and say in the commit what it buys");
    }
    failed.is_empty()
}

/// Prints where a case's instructions go.
pub(crate) fn annotate(name: &str, measured: &Measured, lines: usize) {
    let counts = measured.counts();
    println!("{name}: {:.1} instructions a step, {} steps\n", counts.instructions, measured.steps);

    println!("{:>9} {:>9}  function (own; with all it calls, in whatever library)", "own", "inclusive");
    let mut functions: Vec<_> = measured.profile.functions.iter().collect();
    functions.sort_by_key(|(_, cost)| std::cmp::Reverse((cost.own, cost.inclusive)));
    for (function, cost) in functions.iter().filter(|(_, c)| c.own != 0) {
        println!("{:>9.1} {:>9.1}  {function}", measured.a_step(cost.own), measured.a_step(cost.inclusive));
    }

    println!("\n{:>9} {:>9}  call into another library", "calls", "cost");
    let mut calls: Vec<_> = measured.profile.calls_out.iter().filter(|(_, c)| c.count != 0).collect();
    calls.sort_by_key(|(_, c)| std::cmp::Reverse((c.count, c.cost)));
    for ((object, function), calls) in calls {
        println!("{:>9.1} {:>9.1}  {function} in {object}", measured.a_step(calls.count), measured.a_step(calls.cost));
    }

    println!("\n{:>9}  source line, in function (what was inlined is where it was written)", "own");
    let mut places: Vec<_> = measured.profile.lines.iter().filter(|(_, cost)| **cost != 0).collect();
    places.sort_by_key(|(_, cost)| std::cmp::Reverse(**cost));
    let rest: i64 = places.iter().skip(lines).map(|(_, cost)| **cost).sum();
    for ((function, file, line), cost) in places.iter().take(lines) {
        println!("{:>9.1}  {}:{line}  {}", measured.a_step(**cost), short(file), last(function));
    }
    if rest != 0 {
        println!("{:>9.1}  in {} more lines", measured.a_step(rest), places.len() - lines);
    }
}

/// A source's path from its crate on.
fn short(file: &str) -> &str {
    let from = ["/interpose/", "/trace/", "/library/"].iter().find_map(|part| file.rfind(part));
    from.map_or(file, |at| &file[at + 1..])
}

/// A function's name without its path.
fn last(function: &str) -> &str {
    function.rsplit("::").next().unwrap_or(function)
}
