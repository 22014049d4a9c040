//! The data behind the page's views, beside plain computations: named ranges, the sum over ranks, and custom
//! categories.

use std::collections::BTreeMap;

use crate::page_data::{PageData, Range, Totals, decode, decode_totals, elements};
use crate::training::Program;
use memtrace_analysis::export::{PageDataOptions, RankSeries, SourceAccess, page_data, rank_totals};
use memtrace_analysis::load::{Manifest, Run};
use memtrace_analysis::rules::CustomRules;
use memtrace_analysis::{HtmlOptions, Process, SummaryOptions, html_report, summarize, summarize_with};
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{Label, Thread};
use memtrace_trace::ids::{StackId, ThreadId};

/// Numbers that look random and are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn inflated(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::ZlibDecoder::new(bytes), &mut plain).unwrap();
    plain
}

fn data_of(process: &Process, custom_rules: Option<&CustomRules>) -> PageData {
    let options = PageDataOptions {
        device: None,
        max_blocks: None,
        marks: &[],
        window: None,
        modules_at: 0,
        is_library: &|_| false,
        sources: SourceAccess::Nothing,
        custom_rules,
    };
    let mut bytes = Vec::new();
    page_data(process, &options, &mut bytes, &mut |_| {}).unwrap();
    decode(&inflated(&bytes))
}

fn define(p: &mut Program, labels: &[(&str, LabelOrigin)]) {
    for (id, (text, origin)) in (1..).zip(labels) {
        p.recording.definitions.labels.insert(id, Label { origin: *origin, text: (*text).into() });
    }
    let threads = ["", "main", "other"].into_iter().zip([0, 71, 72]);
    p.recording.definitions.threads = threads.map(|(name, tid)| Thread { tid, name: name.into() }).collect();
}

fn range(p: &mut Program, action: Action, label: u64, thread: u32) {
    let seq = p.recording.events.len() as u64 + 1;
    let (source, thread) = (Source::Label, ThreadId(thread));
    p.recording.events.push(Event { action, seq, ticks: seq * 1000, addr: label, source, thread, ..Event::EMPTY });
}

/// Ranges that nest on two threads, with random allocations and frees between their ends.
fn program_with_ranges(seed: u64, turns: u64) -> (Program, Vec<Range>) {
    let mut random = Random(seed);
    let mut p = Program::new();
    let names = [("epoch", LabelOrigin::RecordFunction), ("batch", LabelOrigin::Nvtx)];
    let own = ("Optimizer.step#SGD.step", LabelOrigin::RecordFunction);
    define(&mut p, &[names[0], names[1], own]);
    let (mut blocks, mut bytes) = (Vec::new(), 0u64);
    // By thread: what is open, with the highest level since it started.
    let mut open: [Vec<Range>; 2] = Default::default();
    let mut ended = Vec::new();
    let us = |p: &Program| p.recording.events.len() as u64 - 1;
    for _ in 0..turns {
        let thread = random.below(2) as usize;
        match random.below(6) {
            0 if open[thread].len() < 3 => {
                let label = 1 + random.below(3);
                range(&mut p, Action::RangeStart, label, thread as u32 + 1);
                let (name, origin) = [names[0], names[1], own][label as usize - 1];
                let kind = if origin == LabelOrigin::Nvtx { 1 } else { u64::from(label == 3) * 2 };
                let (at, now) = (p.recording.events.len() as u64, us(&p));
                let one = Range {
                    from: at,
                    to: 0,
                    began: now,
                    ended: 0,
                    track: 3 * thread as u64 + open[thread].len() as u64,
                    name: name.to_owned(),
                    kind,
                    levels: vec![[bytes, bytes, 0]],
                };
                open[thread].push(one);
            }
            1 => {
                if let Some(mut one) = open[thread].pop() {
                    // NVTX does not name what ends.
                    let label = if one.kind == 1 { 0 } else { 1 + one.kind };
                    range(&mut p, Action::RangeEnd, label, thread as u32 + 1);
                    (one.to, one.ended) = (p.recording.events.len() as u64, us(&p));
                    one.levels[0][2] = bytes;
                    ended.push(one);
                }
            }
            2 if !blocks.is_empty() => {
                let at = random.below(blocks.len() as u64) as usize;
                let (block, size) = blocks.swap_remove(at);
                p.free(block, StackId::NONE);
                bytes -= size;
            }
            _ => {
                let size = 512 * (1 + random.below(4000));
                blocks.push((p.alloc(size, StackId::NONE), size));
                bytes += size;
                open.iter_mut().flatten().for_each(|one| one.levels[0][1] = one.levels[0][1].max(bytes));
            }
        }
    }
    // Ranges that are still open end with the recording.
    let last = p.recording.events.len() as u64;
    for mut one in open.into_iter().flatten() {
        (one.to, one.ended, one.levels[0][2]) = (last, last - 1, bytes);
        ended.push(one);
    }
    ended.sort_by_key(|one| one.from);
    (p, ended)
}

#[test]
fn ranges_have_their_times_tracks_and_levels() {
    let mut tracks = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let (program, mut expected) = program_with_ranges(seed, 300);
        let process = program.process();
        let data = data_of(&process, None);
        // A thread's rows are neighbors. The threads are in the order in which their first ranges end.
        let threads: Vec<&str> = (data.json["ranges"]["tracks"].as_array().unwrap().iter())
            .map(|name| data.json["tables"]["strings"][name.as_u64().unwrap() as usize].as_str().unwrap())
            .collect();
        let first = threads[0];
        let rows = |thread: &str| threads.iter().filter(|one| **one == thread).count() as u64;
        for one in &mut expected {
            let (thread, row) = (if one.track < 3 { "main" } else { "other" }, one.track % 3);
            one.track = if thread == first { row } else { rows(first) + row };
        }
        assert_eq!(data.ranges, expected, "seed {seed}");
        assert_eq!(data.json["ranges"]["left_out"], 0);
        tracks.insert(threads.len());
    }
    assert!(tracks.contains(&6), "{tracks:?}");
}

/// The peak and the end of each name are those of the summary, which another pass computes.
#[test]
fn ranges_agree_with_the_summary() {
    let (program, _) = program_with_ranges(3, 2000);
    let process = program.process();
    let data = data_of(&process, None);
    let run = Run::from_processes(std::path::Path::new("run"), Manifest::default(), vec![process]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let labels = &summary.processes[0].devices[0].labels;
    assert_eq!(labels.len(), 3);
    for label in labels {
        let own: Vec<&Range> = data.ranges.iter().filter(|range| range.name == label.name).collect();
        let peak = own.iter().map(|range| range.levels[0][1]).max();
        assert_eq!((own.len() as u64, peak), (label.times, Some(label.peak_bytes)), "{}", label.name);
    }
}

/// A long run has the longest ranges, with those around them, and the number of the others.
#[test]
fn a_long_run_has_the_longest_ranges() {
    const MOST: usize = 1 << 14;
    let mut p = Program::new();
    define(&mut p, &[("epoch", LabelOrigin::RecordFunction), ("step", LabelOrigin::RecordFunction)]);
    let (epochs, steps) = (20u64, 2000u64);
    for _ in 0..epochs {
        range(&mut p, Action::RangeStart, 1, 1);
        for step in 0..steps {
            range(&mut p, Action::RangeStart, 2, 1);
            // Every fourth step is longer.
            for _ in 0..if step % 4 == 0 { 3 } else { 1 } {
                p.event(Action::Snapshot, 0, 0, StackId::NONE, Default::default());
            }
            range(&mut p, Action::RangeEnd, 2, 1);
        }
        range(&mut p, Action::RangeEnd, 1, 1);
    }
    p.alloc(1 << 20, StackId::NONE);
    let data = data_of(&p.process(), None);
    assert_eq!(data.ranges.len(), MOST);
    assert_eq!(data.json["ranges"]["left_out"], epochs + epochs * steps - MOST as u64);
    let count = |is_meant: &dyn Fn(&Range) -> bool| data.ranges.iter().filter(|range| is_meant(range)).count() as u64;
    assert_eq!(count(&|range| range.name == "epoch"), epochs);
    let longer = |range: &Range| range.name == "step" && range.to - range.from > 3;
    assert_eq!(count(&longer), epochs * steps / 4);
}

/// A rank whose clock begins at `begin_ns`, with random allocations and frees on two GPUs and with CPU tensors.
fn rank(rank: u64, begin_ns: u64, turns: u64) -> Process {
    let mut random = Random(rank + 7);
    let mut p = Program::new();
    p.recording.info = format!(r#"{{"pid": {}, "env": {{"RANK": "{rank}", "WORLD_SIZE": "3"}}}}"#, 7 + rank);
    let mut blocks = Vec::new();
    for _ in 0..turns {
        let before = p.recording.events.len();
        if random.below(5) < 2 && !blocks.is_empty() {
            let at = random.below(blocks.len() as u64) as usize;
            let (block, device) = blocks.swap_remove(at);
            p.free(block, StackId::NONE);
            p.recording.events[before..].iter_mut().for_each(|e| e.device = device);
        } else {
            let device = i16::from(random.below(3) == 0);
            blocks.push((p.alloc(512 * (1 + random.below(2000)), StackId::NONE), device));
            p.recording.events[before..].iter_mut().for_each(|e| e.device = device);
        }
    }
    // Irregular times, some of them equal, so that the ranks' events interleave.
    let mut now = 0;
    for e in &mut p.recording.events {
        now += random.below(4) * 700;
        e.ticks = now;
    }
    let point = |ns| ClockPoint { ticks: ns, monotonic_ns: ns, realtime_ns: begin_ns + ns };
    p.recording.clock = vec![point(0), point(1_000_000)];
    let path = format!("{}.mtr", 7 + rank);
    Process::new(std::path::Path::new(&path), Box::new(p.recording), &Manifest::default())
}

fn ranks(turns: u64) -> Vec<Process> {
    [(0, 5_000_000), (1, 5_000_300), (2, 5_090_000)].map(|(one, begin)| rank(one, begin, turns)).into()
}

/// The changes of all ranks in the order of time, by brute force: time, series, and the bytes of each series then.
fn truth(processes: &[Process], series: &[RankSeries]) -> Vec<(u64, usize, Vec<u64>)> {
    let mut changes = Vec::new();
    for (number, process) in processes.iter().enumerate() {
        let recording = process.recording();
        let (mut sizes, mut levels) = (BTreeMap::new(), BTreeMap::<i16, u64>::new());
        recording.stream(&mut |events| {
            for e in events {
                let level = levels.entry(e.device).or_default();
                match e.action {
                    Action::Alloc => {
                        sizes.insert(e.addr, e.size);
                        *level += e.size;
                    }
                    Action::FreeRequested => *level -= sizes[&e.addr],
                    _ => continue,
                }
                let place = series.iter().position(|one| (one.process, one.device) == (number, e.device)).unwrap();
                changes.push((recording.calibration().epoch_ns(e.ticks), number, e.seq, place, *level));
            }
        });
    }
    changes.sort_unstable();
    let mut now = vec![0; series.len()];
    let mut found = Vec::new();
    for (ns, _, _, place, level) in changes {
        now[place] = level;
        found.push((ns, place, now.clone()));
    }
    found
}

/// The time of the first event of all.
fn begin_of(processes: &[Process]) -> u64 {
    let first = |process: &Process| {
        let (first, _) = process.trace_index().tick_range.unwrap();
        process.recording().calibration().epoch_ns(first)
    };
    processes.iter().map(first).min().unwrap()
}

fn totals_of(processes: &[Process], series: &[RankSeries], is_complete: bool) -> Totals {
    let mut bytes = Vec::new();
    let processes: Vec<&Process> = processes.iter().collect();
    rank_totals(&processes, series, is_complete, &mut bytes, &mut |_| {}).unwrap();
    decode_totals(&inflated(&bytes))
}

fn all_series() -> Vec<RankSeries> {
    (0..3).flat_map(|process| [0, 1].map(|device| RankSeries { process, device })).collect()
}

#[test]
fn the_sum_over_ranks_is_in_the_order_of_the_wall_clock() {
    let (processes, series) = (ranks(3000), all_series());
    let truth = truth(&processes, &series);
    let totals = totals_of(&processes, &series, true);
    assert_eq!(totals.order, truth.iter().map(|(_, place, _)| *place as u64).collect::<Vec<_>>());
    assert!(totals.order.windows(2).filter(|pair| pair[0] / 2 != pair[1] / 2).count() > 1000, "the ranks interleave");
    assert_eq!(totals.json["events"], truth.len());
    assert_eq!(totals.json["begin_ns"], begin_of(&processes).to_string());
    // The page adds up the totals of its devices in this order. They have as many events.
    for (number, process) in processes.iter().enumerate() {
        let data = data_of(process, None);
        for (device, found) in &data.devices {
            let place = series.iter().position(|one| (one.process, i64::from(one.device)) == (number, *device));
            let count = totals.order.iter().filter(|one| Some(**one as usize) == place).count();
            assert_eq!(count, found.events.len());
        }
    }
}

#[test]
fn chosen_points_of_the_sum_are_exact_and_keep_every_extreme() {
    let (processes, series) = (ranks(9000), all_series());
    let truth = truth(&processes, &series);
    let sum = |parts: &[u64]| parts.iter().sum::<u64>();
    let totals = totals_of(&processes, &series, false);
    assert!(totals.order.is_empty() && totals.points.len() < truth.len());
    for (number, us, parts) in &totals.points {
        let (ns, _, expected) = &truth[*number as usize];
        assert_eq!((parts, *us), (expected, (ns - begin_of(&processes)) / 1000));
    }
    // In each range of changes, the highest and the lowest sum and the last one.
    let events: u64 = processes.iter().map(|process| process.recording().event_count()).sum();
    let width = events.div_ceil(10_000) as usize;
    assert!(width > 3);
    for (range, changes) in truth.chunks(width).enumerate() {
        let inside = |number: u64| number as usize / width == range;
        let found: Vec<u64> =
            totals.points.iter().filter(|(number, ..)| inside(*number)).map(|(.., parts)| sum(parts)).collect();
        let all: Vec<u64> = changes.iter().map(|(.., parts)| sum(parts)).collect();
        assert_eq!((found.iter().max(), found.iter().min()), (all.iter().max(), all.iter().min()), "range {range}");
        assert_eq!(found.last(), all.last());
    }
}

fn page(run: &Run, custom_rules: Option<&CustomRules>) -> String {
    let summary = summarize_with(run, &SummaryOptions { custom_rules, ..Default::default() }, &mut |_| {}).unwrap();
    let options = HtmlOptions { custom_rules, ..HtmlOptions::default() };
    let processes: Vec<&Process> = run.processes().iter().collect();
    let mut out = Vec::new();
    html_report(&summary, &processes, &options, &mut out, &mut |_| {}).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn a_page_with_several_devices_has_their_sum() {
    let run = Run::from_processes(std::path::Path::new("run"), Manifest::default(), ranks(20));
    let found = elements(&page(&run, None));
    let totals = decode_totals(&found["rank-totals"]);
    assert_eq!(totals.json["series"].as_array().unwrap().len(), 6);
    assert_eq!(totals.json["complete"], true);
    let single = crate::training::run(2, false);
    assert!(!elements(&page(&single, None)).contains_key("rank-totals"));
}

#[test]
fn blocks_have_the_custom_categories_of_the_summary() {
    let rules = CustomRules::parse(
        r#"{"categories": [
            {"name": "the model", "stack": "^model\\.py:6 forward$"},
            {"name": "optimizer", "stack": "/torch/optim/"},
            {"name": "weights", "stack": "module\\.py:\\d+ convert$"}
        ]}"#,
    )
    .unwrap();
    let run = crate::training::run(3, false);
    let options = SummaryOptions { custom_rules: Some(&rules), ..SummaryOptions::default() };
    let summary = summarize_with(&run, &options, &mut |_| {}).unwrap();
    let data = data_of(&run.processes()[0], Some(&rules));
    let tables = &data.json["tables"];
    let name = |custom: u64| {
        let number = tables["custom_categories"][custom.checked_sub(1)? as usize].as_u64().unwrap();
        Some(tables["strings"][number as usize].as_str().unwrap().to_owned())
    };
    let peak = summary.processes[0].devices[0].peak.as_ref().unwrap();
    let mut found: BTreeMap<Option<String>, (u64, u64)> = BTreeMap::new();
    for block in &data.devices[&0].blocks {
        if block.alloc <= peak.seq && block.free.is_none_or(|free| peak.seq < free) {
            let (bytes, blocks) = found.entry(name(block.custom)).or_default();
            (*bytes, *blocks) = (*bytes + block.size, *blocks + 1);
        }
    }
    let expected = peak.by_custom_category.iter().filter(|one| one.blocks > 0);
    let expected = expected.map(|one| (one.custom_category.clone(), (one.bytes, one.blocks))).collect();
    assert_eq!(found, expected);
    assert!(found.len() >= 3, "{found:?}");
    // Without rules, there are no names, and no block has a category.
    let plain = data_of(&run.processes()[0], None);
    assert_eq!(plain.json["tables"]["custom_categories"], serde_json::json!([]));
    assert!(plain.devices[&0].blocks.iter().all(|block| block.custom == 0));
}
