//! The HTML report: its policy, its data beside an independent replay, no text of the recorded program as markup, and
//! what was requested.

use std::collections::{BTreeMap, BTreeSet};

use crate::page_data::{DeviceData, Listed, decode, elements};
use crate::showcase::{PLAIN, Words};
use memtrace_analysis::export::{PageDataOptions, SourceAccess, page_data};
use memtrace_analysis::load::Run;
use memtrace_analysis::model::{Change, Replay};
use memtrace_analysis::{
    DiffOptions, DiffPageRun, DiffReport, HtmlOptions, PageWindow, Process, diff, diff_html, html_report, html_window,
    open_run, summarize,
};
use serde_json::Value;

fn page(run: &Run, processes: &[&Process], device: Option<i16>) -> memtrace_analysis::Result<String> {
    let summary = summarize(run, &mut |_| {}).unwrap();
    let mut out = Vec::new();
    let options = HtmlOptions {
        device,
        sources: SourceAccess::Nothing,
        windows: Vec::new(),
        custom_rules: None,
        is_served: false,
    };
    html_report(&summary, processes, &options, &mut out, &mut |_| {})?;
    Ok(String::from_utf8(out).unwrap())
}

fn whole(run: &Run) -> String {
    page(run, &run.processes().iter().collect::<Vec<_>>(), None).unwrap()
}

/// The page without its style sheet, its data and its script.
fn markup(page: &str) -> String {
    let mut found = String::new();
    for (i, piece) in page.split("<script").enumerate() {
        found.push_str(if i == 0 { piece } else { piece.split_once("</script>").unwrap().1 });
    }
    let (head, rest) = found.split_once("<style>").unwrap();
    format!("{head}{}", rest.split_once("</style>").unwrap().1)
}

fn summary_of(page: &str) -> Value {
    summary_of_elements(&elements(page))
}

fn summary_of_elements(elements: &BTreeMap<String, Vec<u8>>) -> Value {
    serde_json::from_slice(&elements["summary"]).unwrap()
}

fn data_of(process: &Process, max_blocks: Option<u64>, marks: &[u64]) -> crate::page_data::PageData {
    data_in(process, max_blocks, marks, None)
}

/// The data of a part of the recording.
fn data_in(
    process: &Process,
    max_blocks: Option<u64>,
    marks: &[u64],
    window: Option<(u64, u64)>,
) -> crate::page_data::PageData {
    let options = PageDataOptions {
        device: None,
        max_blocks,
        marks,
        window,
        modules_at: 0,
        is_library: &|_| false,
        sources: SourceAccess::Nothing,
        custom_rules: None,
    };
    let mut bytes = Vec::new();
    page_data(process, &options, &mut bytes, &mut |_| {}).unwrap();
    let mut plain = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::ZlibDecoder::new(&bytes[..]), &mut plain).unwrap();
    decode(&plain)
}

/// The state of each device by a plain replay: blocks, and `seq`, allocated and reserved bytes after each allocation
/// and free.
type Truth = BTreeMap<i64, (BTreeSet<(u64, Option<u64>, u64, u64)>, Vec<(u64, u64, u64)>)>;

fn truth(process: &Process) -> Truth {
    let mut replay = Replay::new(process.trace_index(), None);
    let mut truth = Truth::new();
    process.recording().stream(&mut |events| {
        for e in events {
            replay.apply(e, |replay, slot, e, change| {
                let device = &replay.devices()[slot];
                let usage = device.allocator.usage();
                let (blocks, levels) = truth.entry(device.device.into()).or_default();
                match change {
                    Change::Alloc(_) => {}
                    Change::FreeRequested(id) => {
                        let block = device.allocator.block(id);
                        blocks.insert((block.seq, Some(e.seq), block.size, block.addr));
                    }
                    _ => return,
                }
                levels.push((e.seq, usage.allocated, usage.reserved));
            });
        }
    });
    for device in replay.devices() {
        for (_, block) in device.allocator.allocated() {
            let (blocks, _) = truth.entry(device.device.into()).or_default();
            blocks.insert((block.seq, None, block.size, block.addr));
        }
    }
    truth
}

fn is_live(block: &Listed, seq: u64) -> bool {
    block.alloc <= seq && block.free.is_none_or(|free| seq < free)
}

fn runs() -> Vec<Run> {
    let snapshots = ["resnet_leak.pickle.gz", "native_stacks.pickle.gz"];
    let golden = snapshots.map(|name| open_run(format!("../tests/golden/snapshots/{name}")).unwrap());
    golden.into_iter().chain([crate::training::run(3, false), crate::showcase::run(&PLAIN, 0..2)]).collect()
}

#[test]
fn the_data_has_every_block_and_every_change() {
    for run in runs() {
        for process in run.processes() {
            let data = data_of(process, None, &[]);
            let truth = truth(process);
            assert_eq!(data.devices.keys().collect::<Vec<_>>(), truth.keys().collect::<Vec<_>>());
            for (device, (blocks, levels)) in &truth {
                let DeviceData { events, blocks: found, reserved, .. } = &data.devices[device];
                let found: BTreeSet<_> = found.iter().map(|b| (b.alloc, b.free, b.size, b.address)).collect();
                assert_eq!(found, *blocks);
                assert_eq!(*events, levels.iter().map(|(seq, ..)| *seq).collect::<Vec<_>>());
                for (seq, _, bytes) in levels.iter().filter(|_| !reserved.is_empty()) {
                    let at = reserved.partition_point(|(changed, _)| changed <= seq);
                    assert_eq!(reserved[at - 1].1, *bytes, "reserved at {seq}");
                }
            }
            assert!(data.phases.is_sorted_by_key(|(seq, ..)| *seq));
        }
    }
}

#[test]
fn totals_are_exact_when_only_some_blocks_are_listed() {
    for run in runs() {
        for process in run.processes() {
            let complete = data_of(process, None, &[]);
            let truth = truth(process);
            for most in [0, 1, 7, 100] {
                let middle = truth.values().next().unwrap().1[0].0 + 1;
                let data = data_of(process, Some(most), &[middle]);
                for (device, (blocks, levels)) in &truth {
                    let DeviceData { blocks: listed, points, events, .. } = &data.devices[device];
                    let chosen = listed.iter().filter(|block| block.free.is_some() && !is_live(block, middle));
                    assert!(events.is_empty() && chosen.count() as u64 <= most);
                    assert!(listed.iter().all(|b| blocks.contains(&(b.alloc, b.free, b.size, b.address))));
                    // Every point is a state that existed, and its parts are exact.
                    let levels: BTreeMap<u64, u64> = levels.iter().map(|(seq, bytes, _)| (*seq, *bytes)).collect();
                    let all = &complete.devices[device].blocks;
                    for (seq, total, count, rest) in points {
                        assert_eq!(levels[seq], *total);
                        let live: Vec<&Listed> = listed.iter().filter(|block| is_live(block, *seq)).collect();
                        let live_bytes: u64 = live.iter().map(|block| block.size).sum();
                        assert_eq!(live_bytes + rest.iter().sum::<i64>() as u64, *total, "at {seq}");
                        let existing: Vec<&Listed> = all.iter().filter(|block| is_live(block, *seq)).collect();
                        assert_eq!(existing.len() as i64, live.len() as i64 + count);
                        for (category, rest) in rest.iter().enumerate() {
                            let of = |blocks: &[&Listed]| -> i64 {
                                let of = blocks.iter().filter(|block| block.category == category as u64);
                                of.map(|block| block.size as i64).sum()
                            };
                            assert_eq!(of(&existing), of(&live) + rest, "{category} at {seq}");
                        }
                    }
                    // The peak, the end and the state at the mark are points.
                    let seqs: BTreeSet<u64> = points.iter().map(|(seq, ..)| *seq).collect();
                    let most_bytes = *levels.values().max().unwrap();
                    let peak = *levels.iter().find(|(_, bytes)| **bytes == most_bytes).unwrap().0;
                    let marked = levels.range(..=middle).next_back();
                    let at_mark = points.iter().find(|(seq, ..)| marked.is_some_and(|(marked, _)| seq == marked));
                    assert!(at_mark.is_none_or(|(_, _, count, _)| *count == 0), "all blocks are listed at a mark");
                    assert_eq!(points.last().map(|(_, _, count, _)| *count), Some(0), "and at the end");
                    assert!(seqs.contains(&peak) && seqs.contains(levels.last_key_value().unwrap().0));
                    assert!(marked.is_none_or(|(seq, _)| seqs.contains(seq)));
                }
            }
        }
    }
}

/// The windows of a recording that the tests read: parts, one event, the end, nothing before the first event, the
/// whole.
fn windows(levels: &[(u64, u64, u64)]) -> Vec<(u64, u64)> {
    let at = |part: usize| levels[part * (levels.len() - 1) / 10].0;
    let all = [
        (at(2), at(4)),
        (at(5), at(5)),
        (at(9), u64::MAX),
        (0, at(1)),
        (at(3) + 1, at(7).saturating_sub(1)),
        (0, u64::MAX),
    ];
    all.into_iter().filter(|(first, last)| first <= last).collect()
}

#[test]
fn a_window_has_every_block_and_every_change_in_it() {
    for run in runs() {
        for process in run.processes() {
            let whole = data_of(process, None, &[]);
            for (device, (blocks, levels)) in &truth(process) {
                for (first, last) in windows(levels) {
                    let data = data_in(process, None, &[], Some((first, last)));
                    let DeviceData { events, blocks: found, reserved, .. } = &data.devices[device];
                    let is_in = |alloc: u64, free: Option<u64>| alloc <= last && free.is_none_or(|free| free >= first);
                    let expected: BTreeSet<_> = blocks.iter().copied().filter(|b| is_in(b.0, b.1)).collect();
                    let blocks: BTreeSet<_> = found.iter().map(|b| (b.alloc, b.free, b.size, b.address)).collect();
                    assert_eq!(blocks, expected, "{first} to {last}");
                    // The state before the window is its first point.
                    let before = levels.iter().rfind(|(seq, ..)| *seq < first);
                    let inside = levels.iter().filter(|(seq, ..)| (first..=last).contains(seq));
                    let points: Vec<_> = before.into_iter().chain(inside).collect();
                    assert_eq!(*events, points.iter().map(|(seq, ..)| *seq).collect::<Vec<_>>());
                    for (seq, allocated, bytes) in points {
                        let live = found.iter().filter(|block| is_live(block, *seq));
                        assert_eq!(live.map(|block| block.size).sum::<u64>(), *allocated, "at {seq}");
                        let at = reserved.partition_point(|(changed, _)| changed <= seq);
                        let found = at.checked_sub(1).map_or(0, |at| reserved[at].1);
                        let is_known = !whole.devices[device].reserved.is_empty();
                        assert!(!is_known || found == *bytes, "reserved at {seq}");
                    }
                    // Categories, phases and steps are those of the whole recording.
                    let category = |all: &[Listed]| -> BTreeMap<(u64, u64), u64> {
                        all.iter().map(|block| ((block.alloc, block.address), block.category)).collect()
                    };
                    let of_whole = category(&whole.devices[device].blocks);
                    assert!(category(found).iter().all(|(block, category)| of_whole[block] == *category));
                    let phase = |phases: &[(u64, u64, u64)], seq: u64| {
                        phases[..phases.partition_point(|(begin, ..)| *begin <= seq)].last().map(|one| (one.1, one.2))
                    };
                    for (seq, ..) in levels.iter().filter(|(seq, ..)| (first..=last).contains(seq)) {
                        assert_eq!(phase(&data.phases, *seq), phase(&whole.phases, *seq), "phase at {seq}");
                    }
                }
            }
        }
    }
}

#[test]
fn totals_of_a_window_are_exact_when_only_some_blocks_are_listed() {
    for run in runs() {
        for process in run.processes() {
            for (device, (_, levels)) in &truth(process) {
                for ((first, last), most) in windows(levels).into_iter().flat_map(|window| [(window, 0), (window, 7)]) {
                    let data = data_in(process, Some(most), &[first, last], Some((first, last)));
                    let points = &data.devices[device].points;
                    let of: BTreeMap<u64, u64> = levels.iter().map(|(seq, bytes, _)| (*seq, *bytes)).collect();
                    for (seq, total, _, rest) in points {
                        assert_eq!(of[seq], *total);
                        let live = data.devices[device].blocks.iter().filter(|block| is_live(block, *seq));
                        let live: u64 = live.map(|block| block.size).sum();
                        assert_eq!(live + rest.iter().sum::<i64>() as u64, *total, "at {seq} of {first} to {last}");
                    }
                    // The state before the window, then states in it, among them the highest and the last.
                    let seqs: Vec<u64> = points.iter().map(|(seq, ..)| *seq).collect();
                    let before = of.range(..first).next_back().map(|(seq, _)| *seq);
                    assert_eq!(seqs.first().filter(|seq| **seq < first).copied(), before);
                    let inside: Vec<(u64, u64)> = of.range(first..=last).map(|(seq, bytes)| (*seq, *bytes)).collect();
                    let highest = inside.iter().map(|(_, bytes)| *bytes).max();
                    let found = points.iter().filter(|(seq, ..)| *seq >= first).map(|(_, bytes, ..)| *bytes).max();
                    assert_eq!(found, highest, "{first} to {last}");
                    assert!(inside.last().is_none_or(|(seq, _)| seqs.last() == Some(seq)));
                }
            }
        }
    }
}

#[test]
fn windows_of_a_served_page_are_those_of_its_processes() {
    let run = crate::showcase::run(&PLAIN, 0..3);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let processes: Vec<&Process> = run.processes().iter().collect();
    let options = HtmlOptions { is_served: true, ..HtmlOptions::default() };
    let mut page = Vec::new();
    html_report(&summary, &processes, &options, &mut page, &mut |_| {}).unwrap();
    let found = elements(&String::from_utf8(page).unwrap());
    assert!(summary_of_elements(&found)["page"]["complete_window"].as_u64() > Some(0));
    assert_eq!(summary_of(&whole(&run))["page"]["complete_window"], Value::Null, "a file loads nothing");
    let window = |window: PageWindow| {
        let mut bytes = Vec::new();
        let is_there = html_window(&summary, &processes, &options, window, &mut bytes, &mut |_| {}).unwrap();
        assert_eq!(is_there, !bytes.is_empty());
        let mut plain = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::ZlibDecoder::new(&bytes[..]), &mut plain).ok()?;
        is_there.then(|| decode(&plain))
    };
    for process in 0..3 {
        let of_page = decode(&found[&format!("process-{process}")]);
        for (device, expected) in &of_page.devices {
            let device = i16::try_from(*device).unwrap();
            let all = PageWindow { process, device, first: 0, last: u64::MAX - 1 };
            let data = window(all).expect("a device of the page");
            assert_eq!(data.devices.keys().collect::<Vec<_>>(), [&i64::from(device)], "no other device");
            // The window is too large for all blocks: its points are exact.
            let points = &data.devices[&i64::from(device)].points;
            assert!(points.len() == expected.events.len() && data.devices[&i64::from(device)].events.is_empty());
            let last = *expected.events.last().unwrap();
            let complete = window(PageWindow { last, ..all }).unwrap();
            let complete = &complete.devices[&i64::from(device)];
            assert_eq!(complete.events, expected.events);
            let blocks = |all: &[Listed]| all.iter().map(|b| (b.alloc, b.free, b.size)).collect::<BTreeSet<_>>();
            assert_eq!(blocks(&complete.blocks), blocks(&expected.blocks));
        }
    }
    assert!(window(PageWindow { process: 3, device: 0, first: 0, last: 9 }).is_none());
    assert!(window(PageWindow { process: 0, device: 99, first: 0, last: 9 }).is_none());
    assert!(window(PageWindow { process: 0, device: 0, first: 9, last: 8 }).is_none());
}

#[test]
fn the_policy_allows_the_script_and_the_styles_and_nothing_else() {
    let page = whole(&crate::training::run(2, true));
    let policy = page.split_once("Content-Security-Policy\" content=\"").unwrap().1.split_once('"').unwrap().0;
    let parts: Vec<&str> = policy.split("; ").collect();
    assert_eq!(parts.len(), 5, "{policy}");
    assert_eq!((parts[0], parts[3], parts[4]), ("default-src 'none'", "base-uri 'none'", "form-action 'none'"));
    assert!(parts[1].starts_with("script-src 'sha256-") && parts[2].starts_with("style-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe") && !policy.contains("http"));
    let markup = markup(&page);
    assert!(!markup.contains("src=") && !markup.contains("href=") && !markup.contains("url("), "{markup}");
    // A page from a server may ask this server for more.
    let served = memtrace_analysis::served_policy();
    assert_eq!(served.replace("; connect-src 'self'", ""), policy);
    // Browsers without scripts show the end-of-run summary.
    assert!(markup.contains("<noscript><pre id=\"report\">") && markup.contains("out of memory"), "{markup}");
}

/// The comparison of two runs, or of two steps of one, and its page.
fn comparison(a: &Run, b: &Run, steps: Option<(u32, u32)>) -> (DiffReport, String) {
    let options = DiffOptions { steps, ..DiffOptions::default() };
    let report = diff(a, b, &options, &mut |_| {});
    let summaries = [a, b].map(|run| summarize(run, &mut |_| {}).unwrap());
    let pages = (
        DiffPageRun { run: a, summary: &summaries[0], custom_rules: None },
        DiffPageRun { run: b, summary: &summaries[1], custom_rules: None },
    );
    let mut page = Vec::new();
    diff_html(&report, pages, None, &mut page, &mut |_| {}).unwrap();
    (report, String::from_utf8(page).unwrap())
}

#[test]
fn the_page_of_a_comparison_has_both_runs() {
    let (a, b) = (crate::training::run(2, false), crate::training::run(3, false));
    let (report, page) = comparison(&a, &b, None);
    let found = elements(&page);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["comparison", "process-0", "process-1"]);
    let inside: Value = serde_json::from_slice(&found["comparison"]).unwrap();
    assert_eq!(inside["diff"], serde_json::from_str::<Value>(&report.to_json()).unwrap());
    assert_eq!(inside["page"]["processes"], serde_json::json!([[0, 1]]));
    assert!(inside["page"]["verdict"][0].as_str().unwrap().ends_with(&report.pairs[0].headline), "{inside:#}");
    for (number, run, peak) in [(0, &a, &report.pairs[0].a), (1, &b, &report.pairs[0].b)] {
        let data = decode(&found[&format!("process-{number}")]);
        let process = &run.processes()[0];
        assert_eq!(data.devices[&0].events, data_of(process, None, &[]).devices[&0].events);
        // The compared peak is a state of the timeline.
        let blocks = &data.devices[&i64::from(peak.device)].blocks;
        let live: u64 = blocks.iter().filter(|block| is_live(block, peak.seq)).map(|block| block.size).sum();
        assert_eq!(live, peak.totals.allocated_bytes);
    }
    // The policy is that of the report. Browsers without scripts show the comparison as text.
    let policy =
        |page: &str| page.split_once("Content-Security-Policy").unwrap().1.split_once('>').unwrap().0.to_owned();
    assert_eq!(policy(&page), policy(&whole(&a)));
    let markup = markup(&page);
    assert!(markup.contains("<noscript><pre id=\"report\">memtrace diff") && !markup.contains("href="), "{markup}");
}

/// A page that colors a module's blocks colors exactly the bytes that the comparison names.
#[test]
fn blocks_are_in_the_modules_of_the_comparison() {
    let mut modules = BTreeSet::new();
    for run in runs().into_iter().chain([crate::modules_at_peak::run()]) {
        let (report, page) = comparison(&run, &run, None);
        let found = elements(&page);
        let inside: Value = serde_json::from_slice(&found["comparison"]).unwrap();
        for (pair, numbers) in report.pairs.iter().zip(inside["page"]["processes"].as_array().unwrap()) {
            let data = decode(&found[&format!("process-{}", numbers[0])]);
            let mut bytes: BTreeMap<Option<String>, u64> = BTreeMap::new();
            for block in &data.devices[&i64::from(pair.a.device)].blocks {
                let text = block.module.checked_sub(1).map(|number| {
                    let text = data.json["tables"]["strings"][number as usize].as_str().unwrap();
                    // A slash and a class: a model itself.
                    if text.starts_with('/') { String::new() } else { text.to_owned() }
                });
                if is_live(block, pair.a.seq) {
                    *bytes.entry(text).or_default() += block.size;
                }
            }
            let rows = pair.by_module.iter().filter(|row| row.change.a_bytes > 0);
            let expected: BTreeMap<_, _> = rows.map(|row| (row.path.clone(), row.change.a_bytes)).collect();
            if !expected.is_empty() {
                assert_eq!(bytes, expected);
            }
            modules.extend(expected.into_keys().flatten());
        }
    }
    assert!(["", "blocks.0", "blocks.0.fc"].iter().all(|path| modules.contains(*path)), "{modules:?}");
}

#[test]
fn the_page_of_two_steps_of_a_run_has_the_run_once() {
    let run = crate::training::run(3, false);
    let (report, page) = comparison(&run, &run, Some((0, 2)));
    let found = elements(&page);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["comparison", "process-0"]);
    let inside: Value = serde_json::from_slice(&found["comparison"]).unwrap();
    assert_eq!(inside["page"]["processes"], serde_json::json!([[0, 0]]));
    assert!(report.pairs[0].a.seq < report.pairs[0].b.seq, "{report:#?}");
}

/// The devices with the largest differences have their timelines; a page with all of many ranks would be too large.
#[test]
fn the_page_of_many_processes_has_the_timelines_of_some() {
    let (a, b) = (crate::showcase::run(&PLAIN, 0..6), crate::showcase::run(&PLAIN, 0..6));
    let (report, page) = comparison(&a, &b, None);
    let found = elements(&page);
    assert_eq!(found.len(), 1 + 8, "{:?}", found.keys());
    let inside: Value = serde_json::from_slice(&found["comparison"]).unwrap();
    let numbers = inside["page"]["processes"].as_array().unwrap();
    assert_eq!(numbers.len(), report.pairs.len());
    for (pair, numbers) in report.pairs.iter().zip(numbers).filter(|(_, numbers)| !numbers.is_null()) {
        for (side, peak) in [&pair.a, &pair.b].into_iter().enumerate() {
            let data = decode(&found[&format!("process-{}", numbers[side])]);
            let blocks = &data.devices[&i64::from(peak.device)].blocks;
            let live: u64 = blocks.iter().filter(|block| is_live(block, peak.seq)).map(|block| block.size).sum();
            assert_eq!(live, peak.totals.allocated_bytes);
        }
    }
    assert!(numbers.iter().filter(|one| !one.is_null()).count() >= 4, "{numbers:?}");
}

#[test]
fn text_of_the_program_is_data() {
    const EVIL: &str =
        "\"'></title></pre></svg></script><script>alert(1)</script><img src=x onerror=alert(2)>\u{202e}\x1b[1m&lt;";
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
    let tags = |page: &str| -> Vec<String> {
        page.split('<').skip(1).map(|tag| tag.split(['>', ' ']).next().unwrap().to_owned()).collect()
    };
    assert_eq!(page.matches("<script").count(), plain.matches("<script").count());
    let set = |page: &str| tags(&markup(page)).into_iter().collect::<BTreeSet<_>>();
    assert_eq!(set(&page), set(&plain), "the same tags as with plain names");
    assert!(!page.contains(['\u{202e}', '\x1b']) && !page.contains("alert(1)</script>"));
    // The data has the names, made printable.
    let data = decode(&elements(&page)["process-0"]);
    let strings: Vec<&str> =
        data.json["tables"]["strings"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert!(strings.iter().any(|text| text.contains("<script>alert(1)</script>")), "{strings:?}");
    assert!(strings.iter().all(|text| !text.contains(['\u{202e}', '\x1b'])), "{strings:?}");
}

#[test]
fn every_device_and_process_is_in_the_page() {
    let run = crate::showcase::run(&PLAIN, 0..2);
    let page = whole(&run);
    let elements = elements(&page);
    assert_eq!(elements.keys().collect::<Vec<_>>(), ["process-0", "process-1", "rank-totals", "summary"]);
    let summary = summary_of(&page);
    assert_eq!(summary["page"]["only"], Value::Null);
    for number in 0..2 {
        let data = decode(&elements[&format!("process-{number}")]);
        assert_eq!(data.devices.keys().copied().collect::<Vec<_>>(), [0, 1]);
        // Computed by hand for the peak of GPU 0: 4 MiB of parameters, 1 of batch, 4 of a gradient and 4 of state.
        let described = &summary["summary"]["processes"][number]["devices"];
        let peak = described.as_array().unwrap().iter().find(|device| device["device"] == 0).unwrap()["peak"].clone();
        let seq = peak["seq"].as_u64().unwrap();
        let live: u64 = data.devices[&0].blocks.iter().filter(|b| is_live(b, seq)).map(|b| b.size).sum();
        assert_eq!((live, peak["totals"]["allocated_bytes"].as_u64().unwrap()), (13 << 20, 13 << 20));
    }
}

#[test]
fn one_rank_or_device_is_selected() {
    let run = crate::showcase::run(&PLAIN, 0..2);
    let rank_1: Vec<&Process> = run.processes().iter().filter(|p| p.rank() == Some(1)).collect();
    let page_1 = page(&run, &rank_1, Some(1)).unwrap();
    assert_eq!(summary_of(&page_1)["page"]["only"], "rank 1, GPU 1");
    let elements = elements(&page_1);
    assert_eq!(elements.len(), 2);
    assert_eq!(decode(&elements["process-0"]).devices.keys().copied().collect::<Vec<_>>(), [1]);
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
    assert!(decode(&elements(&page)["process-0"]).devices.is_empty());
}
