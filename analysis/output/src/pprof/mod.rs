//! A profile for `go tool pprof`, Pyroscope and Grafana: bytes and blocks by call stack, in
//! [pprof's format](https://github.com/google/pprof/blob/main/proto/README.md).
//!
//! A sample is a stack on one device with the phase that allocated and the category of the blocks as labels. Its four
//! values have the names of Go's heap profiles: `alloc_objects` and `alloc_space` are all blocks that were allocated,
//! `inuse_objects` and `inuse_space` those in use at the peak of the device. Stacks are those of
//! [`super::flame_graph`], and so are the sums.

mod proto;

use std::collections::{BTreeMap, HashMap};
use std::io::{BufWriter, Write};

use flate2::{Compression, write::GzEncoder};
use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::FrameId;
use prost::Message;

use super::block_sums::{BlockSum, BlockSums, FlameWeight};
use super::flame_graph::{AllocationSite, PathElement, device_name, path};
use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_input::printable;
use memtrace_insight::passes::{
    Analysis, BlockAllocation, BlockClassification, BlockObserver, Category, FirstPass, Phase,
};
use memtrace_replay::{Contexts, Usage};
use proto::{Function, Label, Line, Location, Mapping, Profile, Sample, ValueType};

/// The values of a sample, in this order: name and unit.
const SAMPLE_TYPES: [(&str, &str); 4] =
    [("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_objects", "count"), ("inuse_space", "bytes")];
/// The value that readers show first.
const DEFAULT_SAMPLE_TYPE: &str = "inuse_space";
/// The only mapping: pprof's tools look for the symbols of locations without one.
const MAPPING_ID: u64 = 1;

/// The blocks of a sample, on one device.
type SampleKey = (AllocationSite, Phase, Category);

/// Writes a window of one process as a pprof profile, compressed with gzip. `progress` receives the number of events
/// read so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn pprof(process: &Process, window: &Window, out: &mut dyn Write, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let sums = |of| BlockSums::new(process, window, of, sample_key);
    let mut both = AllocatedAndInUse { allocated: sums(FlameWeight::Total), in_use: sums(FlameWeight::Peak) };
    let first_pass = FirstPass::of_process(process);
    Analysis::with_observer(process.recording(), process.trace_index(), &first_pass, &mut both, progress);
    let profile = both.into_profile(process);
    let write = || {
        let mut out = GzEncoder::new(BufWriter::new(out), Compression::default());
        out.write_all(&profile.encode_to_vec())?;
        out.finish()?.flush()
    };
    write().map_err(Error::io("cannot write the pprof profile"))
}

fn sample_key(block: &BlockAllocation, classification: &BlockClassification) -> SampleKey {
    ((block.site.stack, block.site.context), block.phase, classification.category)
}

/// The sums of all blocks, and of those in use at the peaks.
struct AllocatedAndInUse<'a> {
    allocated: BlockSums<'a, SampleKey>,
    in_use: BlockSums<'a, SampleKey>,
}

impl BlockObserver for AllocatedAndInUse<'_> {
    fn allocated(&mut self, device: i16, block: &BlockAllocation, usage: &Usage) {
        self.allocated.allocated(device, block, usage);
        self.in_use.allocated(device, block, usage);
    }

    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        evidence: FrameId,
        free: Option<&Event>,
    ) {
        self.allocated.lifetime_ended(device, block, classification, evidence, free);
        self.in_use.lifetime_ended(device, block, classification, evidence, free);
    }
}

impl AllocatedAndInUse<'_> {
    fn into_profile(self, process: &Process) -> Profile {
        let mut samples: BTreeMap<(i16, SampleKey), [BlockSum; 2]> = BTreeMap::new();
        for (which, sums) in [self.allocated, self.in_use].into_iter().enumerate() {
            for (device, keys) in sums.finish() {
                for (key, sum) in keys {
                    samples.entry((device, key)).or_default()[which] = sum;
                }
            }
        }
        let definitions = process.definitions();
        let contexts = Contexts::of(definitions);
        let mut profile = ProfileBuilder::new(process);
        for ((device, (site, phase, category)), sums) in samples {
            let labels = [("device", &*device_name(device)), ("phase", phase.name()), ("category", category.name())];
            profile.sample(path(definitions, &contexts, site).iter().rev(), &labels, sums);
        }
        profile.finish()
    }
}

/// A profile to which samples are added. Texts, functions, locations and samples occur once.
struct ProfileBuilder<'a> {
    definitions: &'a Definitions,
    /// The label that tells the ranks of merged profiles apart.
    rank: Option<String>,
    profile: Profile,
    strings: HashMap<String, i64>,
    functions: HashMap<(i64, i64), u64>,
    locations: HashMap<PathElement<'a>, u64>,
    /// The index of the sample with these locations and labels.
    samples: HashMap<(Vec<u64>, Vec<i64>), usize>,
}

impl<'a> ProfileBuilder<'a> {
    fn new(process: &'a Process) -> ProfileBuilder<'a> {
        let mut builder = ProfileBuilder {
            definitions: process.definitions(),
            rank: process.rank().map(|rank| rank.to_string()),
            profile: Profile::default(),
            strings: HashMap::new(),
            functions: HashMap::new(),
            locations: HashMap::new(),
            samples: HashMap::new(),
        };
        // The format has the empty text first.
        builder.string("");
        let value_type = |builder: &mut ProfileBuilder<'_>, (name, unit)| ValueType {
            r#type: builder.string(name),
            unit: builder.string(unit),
        };
        builder.profile.sample_type = SAMPLE_TYPES.map(|each| value_type(&mut builder, each)).to_vec();
        builder.profile.default_sample_type = builder.string(DEFAULT_SAMPLE_TYPE);
        // Every allocation is recorded.
        builder.profile.period_type = Some(value_type(&mut builder, ("space", "bytes")));
        builder.profile.period = 1;
        let calibration = process.recording().calibration();
        let (first, last) = process.trace_index().tick_range.unwrap_or_default();
        let (first, last) = (calibration.epoch_ns(first), calibration.epoch_ns(last));
        builder.profile.time_nanos = to_i64(first);
        builder.profile.duration_nanos = to_i64(last.saturating_sub(first));
        let program = process.info().argv.first().map_or("", |program| program.rsplit('/').next().unwrap_or_default());
        let filename = builder.string(&printable::line(program));
        builder.profile.mapping = vec![Mapping {
            id: MAPPING_ID,
            filename,
            has_functions: true,
            has_filenames: true,
            has_line_numbers: true,
        }];
        let comments = [
            concat!("memtrace ", env!("CARGO_PKG_VERSION")),
            "alloc_*: all GPU memory blocks that were allocated; inuse_*: those in use at the peak of their device",
        ];
        builder.profile.comment = comments.map(|comment| builder.string(comment)).to_vec();
        builder
    }

    fn string(&mut self, text: &str) -> i64 {
        if let Some(index) = self.strings.get(text) {
            return *index;
        }
        let index = self.strings.len() as i64;
        self.strings.insert(text.to_owned(), index);
        self.profile.string_table.push(text.to_owned());
        index
    }

    fn location(&mut self, element: PathElement<'a>) -> u64 {
        if let Some(id) = self.locations.get(&element) {
            return *id;
        }
        // Viewers show these texts as they are.
        let (name, filename, line) = match element {
            PathElement::Frame(id) => self.definitions.frame(id).map_or_else(Default::default, |frame| {
                (printable::line(&frame.name), printable::line(&frame.filename), frame.line)
            }),
            // These have no file.
            _ => (printable::line(&element.text(self.definitions)).into_owned().into(), Default::default(), 0),
        };
        let (name, filename) = (self.string(&name), self.string(&filename));
        let function_id = match self.functions.get(&(name, filename)) {
            Some(id) => *id,
            None => {
                let id = self.functions.len() as u64 + 1;
                self.functions.insert((name, filename), id);
                self.profile.function.push(Function { id, name, filename });
                id
            }
        };
        let id = self.locations.len() as u64 + 1;
        self.locations.insert(element, id);
        let line = vec![Line { function_id, line: line.into() }];
        self.profile.location.push(Location { id, mapping_id: MAPPING_ID, line });
        id
    }

    /// Adds blocks. `path` is innermost first; `sums` are those of the allocated blocks and of those in use.
    fn sample<'p>(
        &mut self,
        path: impl Iterator<Item = &'p PathElement<'a>>,
        labels: &[(&str, &str)],
        [allocated, in_use]: [BlockSum; 2],
    ) where
        'a: 'p,
    {
        let location_id: Vec<u64> = path.map(|element| self.location(*element)).collect();
        let rank = self.rank.clone();
        let labels = labels.iter().copied().chain(rank.as_deref().map(|rank| ("rank", rank)));
        let label: Vec<Label> =
            labels.map(|(key, text)| Label { key: self.string(key), str: self.string(text) }).collect();
        let values = [allocated.blocks, allocated.bytes, in_use.blocks, in_use.bytes].map(to_i64);
        // Stacks of different threads or contexts can have the same frames.
        let key = (location_id.clone(), label.iter().map(|label| label.str).collect());
        let index = *self.samples.entry(key).or_insert_with(|| {
            self.profile.sample.push(Sample { location_id, value: vec![0; values.len()], label });
            self.profile.sample.len() - 1
        });
        for (sum, value) in self.profile.sample[index].value.iter_mut().zip(values) {
            *sum = sum.saturating_add(value);
        }
    }

    fn finish(self) -> Profile {
        self.profile
    }
}

fn to_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
