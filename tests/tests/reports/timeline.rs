//! Timelines of bytes by category: the picture against the numbers, and the numbers against PyTorch's own exporter in
//! the same run.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use memtrace_analysis::export::{TimelineFormat, Window, timeline};
use memtrace_analysis::open_run;
use memtrace_analysis::passes::Category;
use memtrace_tests::block_changes::block_changes;
use memtrace_tests::traced_program::{Run, TracedProgram, memtrace, packages};
use memtrace_tests::versions::Versions;

/// `(times in microseconds, [0, bytes by PyTorch's categories])`.
type Json = (Vec<u64>, Vec<[i64; 9]>);
/// `(time in ns, action, bytes, category)`.
type Raw = Vec<(u64, u8, i64, usize)>;

/// PyTorch's numbers of the actions.
const CREATE: u8 = 2;
const INCREMENT_VERSION: u8 = 3;
const DESTROY: u8 = 4;
/// Our categories by PyTorch's category number. PyTorch's eighth category, unknown, corresponds to all others of ours.
const CATEGORIES: [Category; 7] = [
    Category::Parameter,
    Category::OptimizerState,
    Category::Input,
    Category::Temporary,
    Category::Activation,
    Category::Gradient,
    Category::AutogradDetail,
];

/// The colors in our pictures of a category of PyTorch.
fn colors(category: usize) -> Vec<u32> {
    let others = || Category::ALL.into_iter().filter(|one| !CATEGORIES.contains(one)).collect();
    let ours = CATEGORIES.get(category).map_or_else(others, |one| vec![*one]);
    ours.into_iter().map(Category::light_color).collect()
}

fn exported(run: &Run, device: i16, format: TimelineFormat) -> Vec<u8> {
    let run = open_run(run.path()).unwrap();
    let mut out = Vec::new();
    timeline(&run.processes()[0], &Window::WHOLE, device, format, &mut out, &mut |_| {}).unwrap();
    out
}

/// The areas of a picture, at each corner of their outlines from left to right.
struct Picture {
    /// The left and the right edge of the plot.
    left: f64,
    right: f64,
    /// The corners: the position from the left edge, and the height by color.
    corners: Vec<(f64, BTreeMap<u32, f64>)>,
}

impl Picture {
    fn read(file: &[u8]) -> Picture {
        let text = std::str::from_utf8(file).unwrap();
        let number = |text: &str| text.parse::<f64>().unwrap();
        // The horizontal axis is the one line of the axes' class whose ends have the same height.
        let attribute = |line: &str, name: &str| {
            let (_, rest) = line.split_once(&format!(" {name}=\"")).unwrap();
            number(rest.split_once('"').unwrap().0)
        };
        let axes = text.split("<line class=\"axis\"").skip(1).map(|rest| rest.split_once("/>").unwrap().0);
        let horizontal = axes.filter(|line| attribute(line, "y1") == attribute(line, "y2"));
        let [axis] = horizontal.collect::<Vec<_>>()[..] else { panic!("not one horizontal axis") };
        let mut corners: Vec<(f64, BTreeMap<u32, f64>)> = Vec::new();
        for area in text.split("<path fill=\"#").skip(1) {
            let color = u32::from_str_radix(&area[..6], 16).unwrap();
            let outline = area.split_once(" d=\"M").unwrap().1.split_once("Z\"").unwrap().0;
            let outline: Vec<(f64, f64)> = outline
                .split('L')
                .map(|corner| corner.split_once(' ').map(|(x, y)| (number(x), number(y))).unwrap())
                .collect();
            // The upper edge from the left to the right, then the lower one back.
            let (over, under) = outline.split_at(outline.len() / 2);
            corners.resize_with(over.len(), Default::default);
            for (corner, (over, under)) in corners.iter_mut().zip(over.iter().zip(under.iter().rev())) {
                assert_eq!(over.0, under.0);
                corner.0 = over.0 - attribute(axis, "x1");
                corner.1.insert(color, under.1 - over.1);
            }
        }
        Picture { left: attribute(axis, "x1"), right: attribute(axis, "x2"), corners }
    }
}

/// Requires that every column of the picture shows the JSON's maximum in its time range, and that every category's
/// height is its bytes.
#[track_caller]
fn picture_is_right(run: &Run, device: i16) {
    let (times, sizes): Json = serde_json::from_slice(&exported(run, device, TimelineFormat::Json)).unwrap();
    let picture = Picture::read(&exported(run, device, TimelineFormat::Svg));
    let wide = (picture.right - picture.left) as usize;
    assert!(wide > 700 && picture.corners.len() > 200, "a plot of {wide} columns, {} corners", picture.corners.len());
    let total = |bytes: &[i64; 9]| bytes.iter().sum::<i64>();
    let (begin, end) = (times[0], *times.last().unwrap());
    let span = (end - begin) as f64;
    let column = |at: f64| (at.max(0.0) as usize).min(wide - 1);
    let of_time = |time: u64| column((time - begin) as f64 / span * wide as f64);
    let mut expected: Vec<[i64; 9]> = Vec::new();
    let mut near: Vec<bool> = vec![false; wide];
    let mut now = [0; 9];
    for (time, bytes) in times.iter().zip(&sizes) {
        let at = of_time(*time);
        expected.resize_with(expected.len().max(at + 1), || now);
        if total(bytes) > total(&expected[at]) {
            expected[at] = *bytes;
        }
        // Rounding to a microsecond may move a change into the neighboring column.
        for edge in [of_time(time.saturating_sub(1).max(begin)), of_time((time + 1).min(end))] {
            near[edge] |= edge != at;
            near[at] |= edge != at;
        }
        now = *bytes;
    }
    let height = |areas: &BTreeMap<u32, f64>| areas.values().sum::<f64>();
    let mut drawn: Vec<BTreeMap<u32, f64>> = Vec::new();
    let mut now = BTreeMap::new();
    for (x, areas) in &picture.corners {
        let at = column(*x);
        drawn.resize_with(drawn.len().max(at + 1), || now.clone());
        if height(areas) > height(&drawn[at]) {
            drawn[at] = areas.clone();
        }
        // Positions have one decimal.
        for edge in [column(x - 0.1), column(x + 0.1)] {
            near[edge] |= edge != at;
            near[at] |= edge != at;
        }
        now = areas.clone();
    }
    // The highest column has the scale.
    let highest = (0..wide).max_by_key(|&x| total(&expected[x])).unwrap();
    let scale = height(&drawn[highest]) / total(&expected[highest]) as f64;
    let mut checked = [0; 8];
    for x in (0..wide).filter(|&x| !near[x]) {
        for (category, bytes) in expected[x][1..].iter().enumerate() {
            let shown: f64 = colors(category).iter().filter_map(|color| drawn[x].get(color)).sum();
            let right = *bytes as f64 * scale;
            // Heights have one decimal; the last category consists of several areas.
            let slack = if category == 7 { 1.0 } else { 0.25 };
            assert!((shown - right).abs() <= slack, "column {x}, category {category}: {shown} for {right}");
            checked[category] += usize::from(right > 3.0);
        }
    }
    for category in [0, 1, 4, 5] {
        assert!(checked[category] > 50, "category {category} is seen in too few columns: {checked:?}");
    }
}

/// Trains with torch.profiler enabled. Returns the run and a folder with PyTorch's exports.
fn trained(device: &str, versions: Versions) -> (Run, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let traced = TracedProgram::python("torch/exported.py", &[folder.path().to_str().unwrap(), device]);
    let run = traced.on(versions).option("--cpu").option("always").run();
    run.assert_ended_well();
    (run, folder)
}

fn unpacked(path: &Path) -> Vec<u8> {
    let mut out = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut out).unwrap();
    out
}

/// Requires that PyTorch's files and ours have the same structure and the same values at the same times.
#[track_caller]
fn as_pytorch_exports(device: &str, versions: Versions) {
    let (run, folder) = trained(device, versions);
    let number = if device == "cpu" { -1 } else { 0 };
    // Deserializing into these types checks the structure: two lists; integers; nine sizes, the first of them zero.
    let theirs: (Vec<u64>, Vec<[f64; 9]>) =
        serde_json::from_slice(&std::fs::read(folder.path().join("theirs.json")).unwrap()).unwrap();
    // Older releases write whole numbers with a decimal point.
    let whole = |bytes: f64| {
        assert_eq!(bytes.fract(), 0.0);
        bytes as i64
    };
    let theirs: Json = (theirs.0, theirs.1.into_iter().map(|sizes| sizes.map(whole)).collect());
    let ours: Json = serde_json::from_slice(&exported(&run, number, TimelineFormat::Json)).unwrap();
    for (whose, (times, sizes)) in [("PyTorch's", &theirs), ("ours", &ours)] {
        assert!(
            times.len() == sizes.len() && times.len() > 100,
            "{whose}: {} times, {} sizes",
            times.len(),
            sizes.len()
        );
        assert!(times.is_sorted(), "{whose}");
        assert!(sizes.iter().all(|bytes| bytes[0] == 0 && bytes.iter().all(|bytes| *bytes >= 0)), "{whose}");
    }
    let theirs_raw: Raw = serde_json::from_slice(&unpacked(&folder.path().join("theirs.raw.json.gz"))).unwrap();
    let opened = open_run(run.path()).unwrap();
    let ours_raw: Raw = block_changes(&opened.processes()[0], number)
        .iter()
        .map(|one| (one.time_ns, if one.bytes > 0 { CREATE } else { DESTROY }, one.bytes, one.pytorch_category()))
        .collect();
    // PyTorch changes a category with a tensor's version, in pairs of changes that sum to zero. We give each block one
    // category.
    let (versions, changes): (Raw, Raw) =
        theirs_raw.iter().copied().partition(|(_, action, ..)| *action == INCREMENT_VERSION);
    assert_eq!(versions.iter().map(|(_, _, bytes, _)| bytes).sum::<i64>(), 0);
    assert!(
        changes
            .iter()
            .all(|(_, action, bytes, category)| *action == if *bytes > 0 { CREATE } else { DESTROY } && *category < 8)
    );
    same_changes(&changes, &ours_raw);
    let share = agreement(&theirs_raw, &ours_raw);
    assert!(share > 0.98, "{share}");
    println!("{device}, PyTorch {versions:?}: {} changes, {share}", changes.len());
}

/// Requires the same changes of memory in the same order. Both clocks are wall clocks, each read near the allocation.
#[track_caller]
fn same_changes(theirs: &Raw, ours: &Raw) {
    let bytes = |raw: &Raw| raw.iter().map(|(_, _, bytes, _)| *bytes).collect::<Vec<_>>();
    let (a, b) = (bytes(theirs), bytes(ours));
    if let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) {
        let near = at.saturating_sub(3)..at + 5;
        let show = |raw: &Raw| format!("{:?}", raw.get(near.clone()));
        panic!("change {at} of {} and {}: PyTorch's {}, ours {}", a.len(), b.len(), show(theirs), show(ours));
    }
    assert_eq!(a.len(), b.len());
    let mut apart: Vec<u64> = theirs.iter().zip(ours).map(|(a, b)| a.0.abs_diff(b.0)).collect();
    apart.sort_unstable();
    let median = apart[apart.len() / 2];
    assert!(median < 1_000_000, "half of the moments are more than {median} ns apart");
}

/// The share of PyTorch's byte-time that has the same category in ours, for parameter, optimizer state, input,
/// activation and gradient. The areas of each category are compared over time.
fn agreement(theirs: &Raw, ours: &Raw) -> f64 {
    let mut events: Vec<(u64, usize, i64, usize)> = Vec::new();
    for (whose, raw) in [theirs, ours].into_iter().enumerate() {
        events.extend(raw.iter().map(|(ns, _, bytes, category)| (*ns, whose, *bytes, *category)));
    }
    events.sort_by_key(|event| event.0);
    let mut now = [[0i64; 8]; 2];
    let (mut same, mut all) = (0.0, 0.0);
    for pair in events.windows(2) {
        let (ns, whose, bytes, category) = pair[0];
        now[whose][category] += bytes;
        let time = (pair[1].0 - ns) as f64;
        for category in [0, 1, 2, 4, 5] {
            all += now[0][category] as f64 * time;
            same += now[0][category].min(now[1][category]) as f64 * time;
        }
    }
    same / all
}

/// Requires that PyTorch's own plot function accepts our timeline.
#[track_caller]
fn pytorch_plots(run: &Run) {
    const PACKAGES: [&str; 9] = [
        "matplotlib==3.11.2",
        "contourpy==1.4.0",
        "cycler==0.12.1",
        "fonttools==4.58.4",
        "kiwisolver==1.5.1",
        "packaging==25.0",
        "pyparsing==3.2.3",
        "python-dateutil==2.9.0.post0",
        "six==1.17.0",
    ];
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let export = Command::new(memtrace())
        .arg("export")
        .arg(run.path())
        .args(["--to", "timeline", "--device", "0", "-o", &file("ours.json")])
        .status();
    assert!(export.unwrap().success());
    let plot = TracedProgram::python("torch/plot_timeline.py", &[&file("ours.json"), &file("plot.html")])
        .env("PYTHONPATH", packages(&PACKAGES))
        .env("MPLBACKEND", "agg")
        .run_alone();
    assert!(plot.status.success(), "{}", String::from_utf8_lossy(&plot.stderr));
    let page = std::fs::read_to_string(file("plot.html")).unwrap_or_default();
    assert!(page.contains("data:image/png;base64,") && page.len() > 20_000, "{} bytes", page.len());
}

#[test]
fn the_timeline_of_a_gpu_matches_pytorchs_export() {
    as_pytorch_exports("cuda:0", Versions::DEFAULT);
}

#[test]
fn the_timeline_of_the_cpu_matches_pytorchs_export() {
    as_pytorch_exports("cpu", Versions::DEFAULT);
}

mod exhaustive {
    use super::*;

    #[test]
    fn the_picture_matches_the_numbers() {
        let (run, _folder) = trained("cuda:0", Versions::DEFAULT);
        picture_is_right(&run, 0);
        pytorch_plots(&run);
    }

    memtrace_tests::for_each_version! { mod versions: on }

    #[test]
    fn a_release_with_the_memory_reporter_only() {
        on(Versions::REPORTER_ONLY);
    }

    fn on(versions: Versions) {
        as_pytorch_exports("cuda:0", versions);
    }
}
