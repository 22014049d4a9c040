//! The summary concludes, and reports draw: each sentence of a summary is in the terminal report and in the page.

use memtrace_analysis::report::{OwnerSummary, ReplayedSetting, WhatIfSummary};
use memtrace_analysis::{HtmlOptions, Process, Run, Summary, TextOptions, ToText, html_report, open_run, summarize};

/// A width at which no line is wrapped.
const UNLIMITED: usize = 1 << 16;

fn golden(name: &str) -> Run {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/snapshots");
    open_run(format!("{folder}/{name}")).unwrap()
}

fn runs() -> Vec<(&'static str, Run)> {
    let mut cut = crate::training::training(3, false);
    cut.recording.end = None;
    vec![
        ("finished", crate::training::run(3, false)),
        ("out of memory", crate::training::run(3, true)),
        ("cut", Run::from_processes("run".as_ref(), Default::default(), vec![cut.process()])),
        ("snapshot at an error", golden("oom.json")),
        ("snapshot of a leak", golden("resnet_leak.json")),
        ("snapshot with native stacks", golden("native_stacks.pickle.gz")),
    ]
}

/// All sentences that the summary concludes about the run and its devices.
fn sentences(summary: &Summary) -> Vec<&str> {
    let devices = || summary.processes.iter().flat_map(|process| &process.devices);
    let mut all = summary.verdict.sentences();
    all.extend(summary.gaps.iter().map(|gap| gap.text.as_str()));
    all.extend(devices().filter_map(|device| Some(device.what_if.as_ref()?.advice.as_ref()?.text.as_str())));
    all.extend(devices().filter_map(|device| match device.explained_oom() {
        Some(oom) => oom.outside_text.as_deref(),
        None => device.outside_pytorch.as_ref().map(|outside| outside.text.as_str()),
    }));
    all
}

/// Adds facts that these small runs lack: a replayed setting that helps, and a library that allocates from CUDA.
fn add_facts(summary: &mut Summary) {
    for device in summary.processes.iter_mut().flat_map(|process| &mut process.devices) {
        let (fits, reserved_peak_bytes) = (Some(true), 600 << 20);
        let setting = "expandable_segments:True".to_owned();
        let settings = vec![ReplayedSetting { setting, fits, reserved_peak_bytes, ..ReplayedSetting::default() }];
        device.what_if = Some(WhatIfSummary { reserved_peak_bytes: 1 << 30, settings, ..WhatIfSummary::default() });
        let object = Some("/lib/libnccl.so.2".to_owned());
        let owner = "NCCL".to_owned();
        device.owners.push(OwnerSummary { owner, object, peak_bytes: 388 << 20, ..OwnerSummary::default() });
    }
    summary.conclude();
    let text = sentences(summary).join("\n");
    assert!(text.contains("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"), "{text}");
}

fn page_of(run: &Run, summary: &Summary) -> String {
    let processes: Vec<&Process> = run.processes().iter().collect();
    let mut page = Vec::new();
    let options = HtmlOptions::default();
    html_report(summary, &processes, &options, &mut page, &mut |_| {}).unwrap();
    String::from_utf8(page).unwrap()
}

/// The text of a page for readers without scripts, in one line.
fn without_markup(page: &str) -> String {
    let text = page.replace("&quot;", "\"").replace("&#39;", "'").replace("&lt;", "<").replace("&gt;", ">");
    text.replace("&amp;", "&").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn reports_draw_each_sentence_of_a_summary() {
    for (name, run) in runs() {
        let mut summary = summarize(&run, &mut |_| {}).unwrap();
        add_facts(&mut summary);
        let text = summary.to_text(&TextOptions { width: UNLIMITED, ..TextOptions::default() });
        let page = without_markup(&page_of(&run, &summary));
        let sentences = sentences(&summary);
        assert!(!sentences.is_empty(), "{name} concludes nothing");
        for sentence in &sentences {
            assert!(text.contains(sentence), "{name}: the terminal lacks {sentence:?}:\n{text}");
            let words = sentence.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(page.contains(&words), "{name}: the page lacks {sentence:?}");
        }
    }
}

/// A reader of `summary.json` concludes the same.
#[test]
fn a_stored_summary_concludes_the_same() {
    for (name, run) in runs() {
        let summary = summarize(&run, &mut |_| {}).unwrap();
        let mut read = Summary::from_json(summary.to_json().as_bytes()).unwrap();
        assert_eq!(read.verdict, summary.verdict, "{name}");
        let gaps = std::mem::take(&mut read.gaps);
        read.conclude();
        assert_eq!((read.verdict, read.gaps), (summary.verdict, gaps), "{name}");
    }
}
