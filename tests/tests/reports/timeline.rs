//! Timelines of bytes by category: the picture against the numbers, and the numbers against PyTorch's own exporter in
//! the same run.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use memtrace_analysis::export::{TimelineFormat, Window, timeline};
use memtrace_analysis::open_run;
use memtrace_tests::traced_program::{Run, TracedProgram, memtrace, packages};

/// `(times in microseconds, [0, bytes by PyTorch's categories])`.
type Json = (Vec<u64>, Vec<[i64; 9]>);
/// `(time in ns, action, bytes, category)`.
type Raw = Vec<(u64, u8, i64, usize)>;

/// PyTorch's numbers of the actions.
const CREATE: u8 = 2;
const INCREMENT_VERSION: u8 = 3;
const DESTROY: u8 = 4;
/// The colors of our pictures by PyTorch's category number: parameter, optimizer state, input, temporary, activation,
/// gradient, autograd temporaries. PyTorch's eighth category, unknown, corresponds to several of ours.
const COLOURS: [u32; 7] = [0x1b7837, 0xdfa11b, 0x222222, 0x9970ab, 0xd6321f, 0x2b4fb8, 0x74a9f0];
const OTHERS: [u32; 7] = [0x8c510a, 0x01665e, 0x878787, 0x35978f, 0xbf812d, 0xa6dba0, 0xbdbdbd];

fn exported(run: &Run, device: i16, format: TimelineFormat) -> Vec<u8> {
    let run = open_run(run.path()).unwrap();
    let mut out = Vec::new();
    timeline(&run.processes()[0], &Window::WHOLE, device, format, &mut out, &mut |_| {}).unwrap();
    out
}

/// A decoded picture.
struct Picture {
    width: usize,
    height: usize,
    pixels: Vec<[u8; 3]>,
}

impl Picture {
    fn read(file: &[u8]) -> Picture {
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut bytes).unwrap();
        assert_eq!((info.color_type, info.bit_depth), (png::ColorType::Rgb, png::BitDepth::Eight));
        let pixels = bytes[..info.buffer_size()].as_chunks::<3>().0.to_vec();
        Picture { width: info.width as usize, height: info.height as usize, pixels }
    }

    fn at(&self, x: usize, y: usize) -> u32 {
        let [r, g, b] = self.pixels[y * self.width + x];
        u32::from_be_bytes([0, r, g, b])
    }

    /// The longest run of pixels in the axes' color along a line of pixels: its start and its length.
    fn axis(&self, along: usize, at: impl Fn(usize) -> (usize, usize)) -> (usize, usize) {
        let mut best = (0, 0);
        let mut since = None;
        for i in 0..=along {
            let is = i < along && {
                let (x, y) = at(i);
                self.at(x, y) == 0x444444
            };
            match (is, since) {
                (true, None) => since = Some(i),
                (false, Some(from)) => {
                    best = if i - from > best.1 { (from, i - from) } else { best };
                    since = None;
                }
                _ => {}
            }
        }
        best
    }
}

/// Requires that every column of the picture shows the JSON's maximum in its time range, and that every category's
/// height is its bytes.
#[track_caller]
fn picture_is_right(run: &Run, device: i16) {
    let (times, sizes): Json = serde_json::from_slice(&exported(run, device, TimelineFormat::Json)).unwrap();
    let picture = Picture::read(&exported(run, device, TimelineFormat::Png));
    // The plot is right of the longest vertical line in the axes' color and above the longest horizontal one.
    let vertical = |x| picture.axis(picture.height, move |y| (x, y));
    let horizontal = |y| picture.axis(picture.width, move |x| (x, y));
    let left = (0..picture.width).max_by_key(|&x| vertical(x).1).unwrap();
    let bottom = (0..picture.height).max_by_key(|&y| horizontal(y).1).unwrap();
    let top = vertical(left).0;
    let wide = horizontal(bottom).1 - 1;
    assert!(wide > 800 && bottom - top > 400, "a plot of {wide} by {} pixels", bottom - top);
    let total = |bytes: &[i64; 9]| bytes.iter().sum::<i64>();
    let heights = |x: usize| {
        let mut found: BTreeMap<u32, i64> = BTreeMap::new();
        for y in top..bottom {
            *found.entry(picture.at(left + 1 + x, y)).or_default() += 1;
        }
        found
    };
    // Compute the bytes per pixel from all columns together.
    let (begin, end) = (times[0], *times.last().unwrap());
    let span = (end - begin) as f64;
    let column = |time: u64| (((time - begin) as f64 / span * wide as f64) as usize).min(wide - 1);
    let mut expected: Vec<[i64; 9]> = Vec::new();
    let mut near: Vec<bool> = vec![false; wide];
    let mut now = [0; 9];
    for (time, bytes) in times.iter().zip(&sizes) {
        let at = column(*time);
        expected.resize_with(expected.len().max(at + 1), || now);
        if total(bytes) > total(&expected[at]) {
            expected[at] = *bytes;
        }
        // Rounding to a microsecond may move a change into the neighboring column.
        for edge in [column(time.saturating_sub(1).max(begin)), column((time + 1).min(end))] {
            near[edge] |= edge != at;
            near[at] |= edge != at;
        }
        now = *bytes;
    }
    let known = |found: &BTreeMap<u32, i64>| -> i64 {
        COLOURS.iter().chain(&OTHERS).map(|colour| found.get(colour).copied().unwrap_or(0)).sum()
    };
    let highest = (0..wide).max_by_key(|&x| total(&expected[x])).unwrap();
    // The dashes that mark the peak hide the column of the peak, so its neighbors give the scale.
    let scale_from = (0..wide).filter(|&x| x != highest && !near[x]).max_by_key(|&x| total(&expected[x])).unwrap();
    let scale = known(&heights(scale_from)) as f64 / total(&expected[scale_from]) as f64;
    let mut checked = [0; 8];
    for x in (0..wide).filter(|&x| x != highest && !near[x]) {
        let found = heights(x);
        for (category, bytes) in expected[x][1..].iter().enumerate() {
            let colours: &[u32] = COLOURS.get(category..=category).unwrap_or(&OTHERS);
            let pixels: i64 = colours.iter().map(|colour| found.get(colour).copied().unwrap_or(0)).sum();
            let right = *bytes as f64 * scale;
            // Rounding affects the lower and the upper edge; the last category consists of several areas.
            let slack = if category == 7 { 4.0 } else { 2.0 };
            assert!((pixels as f64 - right).abs() <= slack, "column {x}, category {category}: {pixels} for {right}");
            checked[category] += usize::from(right > 3.0);
        }
    }
    for category in [0, 1, 4, 5] {
        assert!(checked[category] > 50, "category {category} is seen in too few columns: {checked:?}");
    }
}

/// Trains with torch.profiler enabled. Returns the run and a folder with PyTorch's exports.
fn trained(device: &str, release: &str) -> (Run, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let traced = TracedProgram::python("torch/exported.py", &[folder.path().to_str().unwrap(), device]);
    let run = traced.env("SIM_TORCH", release).option("--cpu").option("always").run();
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
fn as_pytorch_exports(device: &str, release: &str) {
    let (run, folder) = trained(device, release);
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
    let ours_raw: Raw = serde_json::from_slice(&exported(&run, number, TimelineFormat::RawJson)).unwrap();
    let mut zipped = Vec::new();
    flate2::read::GzDecoder::new(&exported(&run, number, TimelineFormat::RawJsonGz)[..])
        .read_to_end(&mut zipped)
        .unwrap();
    assert_eq!(serde_json::from_slice::<Raw>(&zipped).unwrap(), ours_raw);
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
    assert!(
        ours_raw
            .iter()
            .all(|(_, action, bytes, category)| *action == if *bytes > 0 { CREATE } else { DESTROY } && *category < 8)
    );
    same_changes(&changes, &ours_raw);
    let share = agreement(&theirs_raw, &ours_raw);
    assert!(share > 0.98, "{share}");
    println!("{device}, PyTorch {release}: {} changes, {share}", changes.len());
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
        "matplotlib==3.10.3",
        "contourpy==1.3.2",
        "cycler==0.12.1",
        "fonttools==4.58.4",
        "kiwisolver==1.4.8",
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
    as_pytorch_exports("cuda:0", "2.11.0");
}

#[test]
fn the_timeline_of_the_cpu_matches_pytorchs_export() {
    as_pytorch_exports("cpu", "2.11.0");
}

mod exhaustive {
    use super::*;

    #[test]
    fn the_picture_matches_the_numbers() {
        let (run, _folder) = trained("cuda:0", "2.11.0");
        picture_is_right(&run, 0);
        pytorch_plots(&run);
    }

    #[test]
    fn other_releases_export_the_same_timeline() {
        for release in ["2.1.2", "2.15.0"] {
            as_pytorch_exports("cuda:0", release);
        }
    }
}
