//! The HTML report: golden text; no text of the recorded program becomes a tag; the page shows what was requested.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it html` rewrites the golden file.

use std::collections::BTreeSet;

use crate::showcase::{PLAIN, Words};
use memtrace_analysis::load::Run;
use memtrace_analysis::{Process, html_report, summarize};

fn page(run: &Run, processes: &[&Process], device: Option<i16>) -> memtrace_analysis::Result<String> {
    let summary = summarize(run, &mut |_| {}).unwrap();
    let mut out = Vec::new();
    html_report(&summary, processes, device, &mut out, &mut |_| {})?;
    Ok(String::from_utf8(out).unwrap())
}

fn whole(run: &Run) -> String {
    page(run, &run.processes().iter().collect::<Vec<_>>(), None).unwrap()
}

/// The tags of the page as (name, attributes). Checks that every opened tag is closed and that `<` occurs nowhere else.
#[track_caller]
fn tags(page: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open: Vec<String> = Vec::new();
    for piece in page.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').unwrap_or_else(|| panic!("a tag ends: <{piece}"));
        assert!(!text.contains('>'), "{text:?} is text");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "what is closed was opened last");
            continue;
        }
        let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        if !["!DOCTYPE", "meta"].contains(&name) && !tag.ends_with('/') {
            open.push(name.to_owned());
        }
        found.push((name.to_owned(), attributes.to_owned()));
    }
    assert!(open.is_empty(), "{open:?} are closed");
    found
}

#[test]
fn the_report_matches_its_golden_file() {
    let run = crate::training::run(2, true);
    let page = whole(&run);
    tags(&page);
    crate::golden::assert_matches("report.html", &page);
    // The end-of-run summary comes first.
    let text = page.split_once("</h1>").unwrap().1;
    assert!(text.trim_start().starts_with("<pre id=\"report\">"), "{text}");
    assert!(text.contains("Tried to allocate 4.00 MiB"), "{text}");
}

#[test]
fn text_of_the_program_is_escaped() {
    const EVIL: &str =
        "\"'></title></pre></svg><script>alert(1)</script><img src=x onerror=alert(2)>\u{202e}\x1b[1m&lt;";
    let evil = Words {
        file: EVIL,
        function: EVIL,
        label: EVIL,
        module: EVIL,
        class: EVIL,
        node: EVIL,
        thread: EVIL,
        argument: EVIL,
        device: EVIL,
    };
    let (plain, page) = (whole(&crate::showcase::run(&PLAIN, 0..2)), whole(&crate::showcase::run(&evil, 0..2)));
    let names = |page: &str| tags(page).into_iter().map(|(name, _)| name).collect::<BTreeSet<_>>();
    assert_eq!(names(&page), names(&plain), "the same tags as with plain names");
    assert!(!names(&page).contains("script") && !names(&page).contains("img"));
    for (name, attributes) in tags(&page) {
        assert!(!attributes.contains("alert") && !attributes.contains("onerror"), "{name} {attributes}");
        assert!(!attributes.contains("http") || name == "svg" || name == "meta", "{name} {attributes} loads something");
    }
    assert!(!page.contains(['\u{202e}', '\x1b']));
    // All names are on the page, as text: those of frames, the module, the range, the node, the device and the command
    // line.
    assert!(page.matches("&lt;script&gt;").count() >= 6, "{}", page.matches("&lt;script&gt;").count());
}

#[test]
fn every_device_and_process_has_its_charts() {
    let run = crate::showcase::run(&PLAIN, 0..2);
    let page = whole(&run);
    for at in ["rank 0, GPU 0", "rank 0, GPU 1", "rank 1, GPU 0", "rank 1, GPU 1"] {
        assert_eq!(page.matches(&format!("<h2>{at}</h2>")).count(), 1, "{at}");
    }
    let count = |tag: &str| tags(&page).iter().filter(|(name, _)| name == tag).count();
    assert_eq!(count("svg"), 8, "a timeline and a flame graph each");
    // Computed by hand for the peak of GPU 0: 4 MiB of parameters, 1 of batch, 4 of a gradient and 4 of state. The 2
    // kept MiB were already freed.
    assert!(page.contains("13.0 MiB (100.0 %)"), "{page}");
    assert!(page.contains("<title>attend (model.py:6)"), "{page}");
    assert!(page.contains("<title>[autograd] BmmBackward0\n4.00 MiB (30.8 %)"), "{page}");
    assert!(page.contains("epoch"), "the named range");
}

#[test]
fn one_rank_or_device_is_selected() {
    let run = crate::showcase::run(&PLAIN, 0..2);
    let rank_1: Vec<&Process> = run.processes().iter().filter(|p| p.rank() == Some(1)).collect();
    let page_1 = page(&run, &rank_1, Some(1)).unwrap();
    assert!(page_1.contains("only rank 1, GPU 1 of this run"), "{page_1}");
    assert!(page_1.contains("<h2>rank 1, GPU 1</h2>") && !page_1.contains("GPU 0"), "{page_1}");
    let error = page(&run, &rank_1, Some(5)).unwrap_err();
    assert_eq!(
        (error.to_string().as_str(), error.help()),
        ("rank 1 has no events of device 5", Some("its devices are 0, 1"))
    );
}

#[test]
fn an_empty_run_has_a_report() {
    let mut program = crate::showcase::program(&PLAIN, 0);
    program.recording.events.clear();
    let run = Run::from_processes(std::path::Path::new("run"), Default::default(), vec![program.process()]);
    let page = whole(&run);
    tags(&page);
    assert!(page.contains("memtrace:"), "{page}");
}
