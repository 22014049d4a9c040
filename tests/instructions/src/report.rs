//! Prints the results.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use anyhow::Result;

use crate::baseline::{Baseline, Comparison, TOLERANCE};
use crate::case::{Case, Measured};
use crate::sources::Sources;

/// Prints all cases beside the baseline and returns the comparison of each.
pub(crate) fn table<'a>(
    cases: &[&'a Case],
    measured: &BTreeMap<&str, Measured>,
    baseline: &Baseline,
) -> Vec<(&'a str, Comparison)> {
    println!(
        "instructions of memtrace's library for one step; its calls of the C library, and instructions in those\n"
    );
    println!("{:<12} {:>9} {:>9} {:>7} {:>7} {:>9}  step", "case", "now", "baseline", "change", "calls", "in calls");
    let mut comparisons = Vec::new();
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
        comparisons.push((case.name, baseline.compare(case.name, &now)));
    }
    comparisons
}

/// Prints which cases fail and which ask for a new baseline. Returns whether no case fails.
pub(crate) fn passes(comparisons: &[(&str, Comparison)]) -> bool {
    let (mut failed, mut cheaper) = (Vec::new(), Vec::new());
    for (case, comparison) in comparisons {
        match comparison {
            Comparison::Same => {}
            Comparison::Cheaper(text) => cheaper.push(format!("  {case}: {text}")),
            Comparison::Fails(text) => failed.push(format!("  {case}: {text}")),
        }
    }
    let percent = TOLERANCE * 100.0;
    if !cheaper.is_empty() {
        println!("\ncheaper by more than {percent} %: update the baseline with tests/instructions/run --accept");
        println!("{}", cheaper.join("\n"));
    }
    if !failed.is_empty() {
        println!("\nFAILED: more than {percent} % above the baseline");
        println!("{}", failed.join("\n"));
        println!("  to see where the instructions go:  tests/instructions/run --annotate CASE");
        println!(
            "  to accept the increase:            tests/instructions/run --accept, and the commit says what it buys"
        );
    }
    failed.is_empty()
}

/// Prints the functions, source lines and external calls that a case's instructions belong to.
pub(crate) fn annotate(name: &str, measured: &Measured, lines: usize) -> Result<()> {
    let counts = measured.counts();
    println!("{name}: {:.1} instructions a step, {} steps", counts.instructions, measured.steps);

    println!("\n{:>9} {:>9}  function, as compiled (own; with all it calls, in whatever library)", "own", "inclusive");
    let mut functions: Vec<_> = measured.profile.functions.iter().filter(|(_, c)| c.own != 0).collect();
    functions.sort_by_key(|(_, cost)| Reverse((cost.own, cost.inclusive)));
    for (function, cost) in functions {
        println!("{:>9.1} {:>9.1}  {function}", measured.a_step(cost.own), measured.a_step(cost.inclusive));
    }

    println!("\n{:>9} {:>9}  call into another library", "calls", "cost");
    let mut calls: Vec<_> = measured.profile.calls_out.iter().filter(|(_, c)| c.count != 0).collect();
    calls.sort_by_key(|(_, c)| Reverse((c.count, c.cost)));
    for ((object, function), calls) in calls {
        println!("{:>9.1} {:>9.1}  {function} in {object}", measured.a_step(calls.count), measured.a_step(calls.cost));
    }

    let sources = Sources::of(&measured.profile)?;
    println!("\n{:>9} {:>9}  function, as written (own; with what is inlined into it)", "own", "inclusive");
    let mut functions: Vec<_> = sources.functions.iter().filter(|(_, c)| c.inclusive != 0).collect();
    functions.sort_by_key(|(_, cost)| Reverse((cost.inclusive, cost.own)));
    for (function, cost) in functions {
        println!("{:>9.1} {:>9.1}  {function}", measured.a_step(cost.own), measured.a_step(cost.inclusive));
    }

    println!("\n{:>9}  source line", "own");
    let mut places: Vec<_> = sources.lines.iter().filter(|(_, count)| **count != 0).collect();
    places.sort_by_key(|(_, count)| Reverse(**count));
    let rest: i64 = places.iter().skip(lines).map(|(_, count)| **count).sum();
    for (line, count) in places.iter().take(lines) {
        println!("{:>9.1}  {line}", measured.a_step(**count));
    }
    if rest != 0 {
        println!("{:>9.1}  in {} more lines", measured.a_step(rest), places.len() - lines);
    }
    Ok(())
}
