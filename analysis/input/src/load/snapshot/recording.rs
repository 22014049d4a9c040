//! A snapshot as a recording. First comes what existed before, then the events of all devices by time, then the totals
//! of the state at the end.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use memtrace_trace::clock::{Calibration, ClockPoint};
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{LabelOrigin, TensorKind};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Budget, Damage, Definitions, End, EventCounts, Exceeded, Label, TensorName};

use super::builder::SnapshotBuilder;
use super::contents::{Annotation, ItemKind, SnapshotContents, TraceEvents, Value};
use super::notices::ReadStatistics;
use super::prior_state::{FinalState, PriorState, RowRanges, reconstruct, row_indices};
use super::rows::{Row, Rows};
use super::tables::{Tables, TextId, text};
use crate::compile_contexts::{CHANGE_BYTES, CompileContextId, CompileContexts};
use crate::recording::{LostEvents, Recording};

/// The number of events delivered at once.
const EVENTS_PER_BLOCK: usize = 4096;

/// The largest number of devices. PyTorch numbers them with eight bits.
const MAX_DEVICES: usize = 128;

/// The end reason of such a recording.
pub const SNAPSHOT_END_REASON: &str = "a snapshot was taken";

/// A PyTorch snapshot as a recording.
#[derive(Debug)]
pub struct SnapshotRecording {
    definitions: Definitions,
    compile_contexts: CompileContexts,
    streams: Vec<u64>,
    rows: Rows,
    devices: Vec<DeviceEvents>,
    labels: Vec<Event>,
    /// The times of the first and the last event, in microseconds.
    first_us: u64,
    last_us: u64,
    end: End,
    info: String,
    events: u64,
    event_counts: EventCounts,
}

#[derive(Debug)]
struct DeviceEvents {
    ordinal: i16,
    row_ranges: RowRanges,
    prior: PriorState,
}

impl SnapshotRecording {
    /// Makes the recording of what has been read. The error means that it would need more memory than the budget has.
    pub(super) fn of(
        builder: SnapshotBuilder,
        value: Value,
        mut statistics: ReadStatistics,
        budget: &Budget,
    ) -> Result<SnapshotRecording, Exceeded> {
        budget.hold(builder.bytes() as u64)?;
        let SnapshotBuilder { mut contents, .. } = builder;
        let top = contents.top.filter(|_| value == Value::Snapshot);
        let DeviceTraces { mut traces, repeated, invalid_items } =
            top.and_then(|top| top.traces).map(|v| DeviceTraces::of(&contents, v)).unwrap_or_default();
        let has_state = top.is_none_or(|top| top.segments.is_some());
        statistics.ignored.repeated_traces = repeated;
        statistics.has_state = has_state;
        statistics.no_times = !contents.events.has_times && contents.events.rows.len() > 0;
        statistics.ignored.malformed_events = contents.invalid.malformed_events + invalid_items;
        statistics.ignored.malformed_segments = contents.invalid.malformed_segments;
        statistics.ignored.malformed_times = contents.invalid.times;
        statistics.ignored.excess_pools = contents.invalid.pools;
        statistics.ignored.unknown_actions = contents
            .invalid
            .unknown_actions
            .iter()
            .map(|(name, count)| (contents.tables.str(*name).to_owned(), *count))
            .collect();
        if let Some(top) = top {
            statistics.pinned_host_memory =
                top.host.map(|value| value.map_or(0, |value| count_items(&contents, value)));
        }
        // Segments of host memory come first or last and belong to no device here.
        let device_segments: Vec<usize> = match top {
            None => (0..contents.state.segments.len()).collect(),
            Some(top) => {
                let segments =
                    top.segments.map(|value| item_ranges(&contents, value, ItemKind::Segment)).unwrap_or_default();
                statistics.ignored.malformed_segments += segments.invalid_items;
                let numbers: Vec<usize> = row_indices(&segments.ranges).map(|number| number as usize).collect();
                // A segment that is named again would count its blocks again.
                let mut seen = HashSet::new();
                let distinct: Vec<usize> = numbers.iter().copied().filter(|number| seen.insert(*number)).collect();
                statistics.ignored.malformed_segments += (numbers.len() - distinct.len()) as u64;
                distinct
            }
        };
        let mut segments: std::collections::BTreeMap<i16, Vec<_>> = std::collections::BTreeMap::new();
        for number in device_segments {
            let Some(segment) = contents.state.segments.get(number) else { continue };
            let Some(ordinal) =
                i16::try_from(segment.device).ok().filter(|device| (*device as i64) < MAX_DEVICES as i64)
            else {
                statistics.ignored.malformed_segments += 1;
                continue;
            };
            segments.entry(ordinal.max(0)).or_default().push(*segment);
        }
        let device_count = segments.keys().next_back().map_or(0, |last| *last as usize + 1);
        if traces.len() < device_count {
            traces.resize(device_count, Vec::new());
        }
        let (has_pools, had_events) = (contents.events.has_pools, traces.iter().any(|trace| !trace.is_empty()));
        let mut devices = Vec::new();
        for (ordinal, row_ranges) in (0i16..).zip(traces) {
            let state = segments.get(&ordinal).map(Vec::as_slice);
            if row_ranges.is_empty() && state.is_none() {
                continue;
            }
            if row_ranges.is_empty() && had_events {
                statistics.devices_without_events.push(ordinal.into());
            }
            let final_state = FinalState {
                device: ordinal,
                segments: has_state.then(|| state.unwrap_or_default()),
                blocks: &contents.state.blocks,
                streams: contents.tables.streams(),
                has_pools,
            };
            let prior = reconstruct(&mut contents.events.rows, &row_ranges, &final_state, &mut statistics, budget)?;
            devices.push(DeviceEvents { ordinal, row_ranges, prior });
        }
        let labels = labels(&contents.annotations);
        let conf = top.and_then(|top| top.settings).and_then(|value| allocator_settings(&contents, value));
        let SnapshotContents { tables, events, annotations, .. } = contents;
        let TraceEvents { rows, metadata, compile_contexts: compiled, .. } = events;
        let texts = label_texts(&tables, &annotations);
        let mut texts_of_names: HashMap<TextId, Rc<str>> = HashMap::new();
        let named: HashMap<u32, Rc<str>> = metadata
            .iter()
            .map(|(row, name)| (*row, texts_of_names.entry(*name).or_insert_with(|| tables.str(*name).into()).clone()))
            .collect();
        let mut compile_contexts = CompileContexts::default();
        let mut ids: HashMap<TextId, CompileContextId> = HashMap::from([(text::NOT_AVAILABLE, CompileContextId::NONE)]);
        let compiled: Vec<(u32, CompileContextId)> = compiled
            .iter()
            .map(|(row, id)| (*row, *ids.entry(*id).or_insert_with(|| compile_contexts.add_text(tables.str(*id)))))
            .collect();
        let (mut definitions, streams) = tables.into_definitions(has_pools);
        definitions.labels = texts;
        definitions.notices = statistics.notices();
        let mut recording = SnapshotRecording {
            definitions,
            compile_contexts,
            streams,
            rows,
            devices,
            labels,
            first_us: 0,
            last_us: 0,
            end: End { reason: SNAPSHOT_END_REASON.into(), ..End::default() },
            info: serde_json::json!({
                "env": conf.map(|conf| HashMap::from([("PYTORCH_CUDA_ALLOC_CONF", conf)])).unwrap_or_default()
            })
            .to_string(),
            events: 0,
            event_counts: EventCounts::default(),
        };
        recording.count_events();
        recording.name_blocks(&named, budget)?;
        recording.set_compile_contexts(&compiled, budget)?;
        Ok(recording)
    }

    /// Counts the events by kind, and computes the times of the first and the last.
    fn count_events(&mut self) {
        let (mut first, mut last) = (u64::MAX, 0);
        let mut kinds: HashMap<(i16, Action, Flags), u64> = HashMap::new();
        for device in &self.devices {
            let mut actions = [[0u64; 2]; 10];
            for row in row_indices(&device.row_ranges).filter_map(|index| self.rows.get(index as usize)) {
                first = first.min(row.time);
                last = last.max(row.time);
                actions[row.action as usize % 10][usize::from(row.slack != Row::NO_SLACK)] += 1;
            }
            for (action, counts) in (0..).zip(actions) {
                let Some(action) = Action::from_wire(action) else { continue };
                for (count, flags) in counts.into_iter().zip([Flags(0), Flags::SLACK_KNOWN]) {
                    *kinds.entry((device.ordinal, action, flags)).or_default() += count;
                }
            }
            for event in &device.prior.events {
                *kinds.entry((device.ordinal, event.action, event.flags)).or_default() += 1;
            }
            *kinds.entry((device.ordinal, Action::Totals, Flags(0))).or_default() +=
                u64::from(device.prior.totals.is_some());
        }
        for event in &self.labels {
            first = first.min(event.ticks / 1000);
            last = last.max(event.ticks / 1000);
        }
        (self.first_us, self.last_us) = if first > last { (0, 0) } else { (first, last) };
        let to_ticks = |time: u64| time.saturating_mul(1000);
        for ((device, action, flags), count) in kinds {
            self.event_counts.count_many(&Event { device, action, flags, ..Event::EMPTY }, count);
        }
        for event in &self.labels {
            self.event_counts.count(event);
        }
        self.events = self.event_counts.events();
        self.event_counts.ticks = (self.events > 0).then(|| (to_ticks(self.first_us), to_ticks(self.last_us)));
    }

    /// Texts attached to allocations become names of their memory.
    fn name_blocks(&mut self, named: &HashMap<u32, Rc<str>>, budget: &Budget) -> Result<(), Exceeded> {
        if named.is_empty() {
            return Ok(());
        }
        let mut names = Vec::new();
        let mut held = Ok(());
        self.for_each_event(&mut |row, e| {
            if let Some(name) = row.and_then(|row| named.get(&row))
                && matches!(e.action, Action::Alloc | Action::Annotate)
                && held.is_ok()
                && let Some(name) = without_category(name)
            {
                // The file can name one long text in every event.
                held = budget.hold(name.len() as u64);
                names.push(named_tensor(e, name));
            }
        });
        self.definitions.tensor_names = names;
        held
    }

    /// Gives events their compile contexts. `compiled` has the first row of each, and the context from there on.
    fn set_compile_contexts(&mut self, compiled: &[(u32, CompileContextId)], budget: &Budget) -> Result<(), Exceeded> {
        if compiled.is_empty() {
            return Ok(());
        }
        let mut contexts = std::mem::take(&mut self.compile_contexts);
        let mut held = Ok(());
        self.for_each_event(&mut |row, e| {
            let of_row = |row: u32| {
                let next = compiled.partition_point(|(from, _)| *from <= row);
                next.checked_sub(1).and_then(|at| compiled.get(at)).map(|(_, id)| *id)
            };
            let id = row.and_then(of_row).unwrap_or_default();
            if held.is_ok() && contexts.set_from(e.seq, id) {
                held = budget.hold(CHANGE_BYTES as u64);
            }
        });
        self.compile_contexts = contexts;
        held
    }

    /// Passes every event in order to `sink`, with its row if it has one.
    fn for_each_event(&self, sink: &mut dyn FnMut(Option<u32>, &Event)) {
        let mut seq = 0;
        let mut put = |row: Option<u32>, e: Event| {
            seq += 1;
            sink(row, &Event { seq, ..e });
        };
        let ticks = self.first_us.saturating_mul(1000);
        for device in &self.devices {
            for e in &device.prior.events {
                put(None, Event { ticks, ..*e });
            }
        }
        match &self.devices[..] {
            [only] if self.labels.is_empty() => {
                for index in row_indices(&only.row_ranges) {
                    let Some(row) = self.rows.get(index as usize) else { continue };
                    put(Some(index), row.event(only.ordinal, &self.streams));
                }
            }
            _ => self.for_each_event_by_time(&mut put),
        }
        let ticks = self.last_us.saturating_mul(1000);
        for device in &self.devices {
            if let Some((allocated, reserved)) = device.prior.totals {
                let totals = Event {
                    addr: allocated,
                    size: reserved,
                    action: Action::Totals,
                    device: device.ordinal,
                    ticks,
                    ..Event::EMPTY
                };
                put(None, totals);
            }
        }
    }

    /// Merges the events of all devices and the labels by time. Events of one device keep their order.
    fn for_each_event_by_time(&self, put: &mut dyn FnMut(Option<u32>, Event)) {
        let mut sources: Vec<_> = self
            .devices
            .iter()
            .map(|device| {
                let mut rows = row_indices(&device.row_ranges).filter(|index| self.rows.get(*index as usize).is_some());
                (rows.next(), rows, device.ordinal)
            })
            .collect();
        let mut labels = self.labels.iter().peekable();
        let time = |index: &Option<u32>| index.and_then(|index| self.rows.get(index as usize)).map(|row| row.time);
        loop {
            let next = (0..sources.len()).filter_map(|i| Some((time(&sources[i].0)?, i))).min();
            // A range includes the events of the microsecond in which it starts, and of the one in which it ends.
            if let Some(label) = labels.next_if(|label| {
                let at = label.ticks / 1000;
                next.is_none_or(|(row, _)| if label.action == Action::RangeStart { at <= row } else { at < row })
            }) {
                put(None, *label);
                continue;
            }
            let Some((_, i)) = next else { break };
            let source = &mut sources[i];
            if let Some(index) = source.0
                && let Some(row) = self.rows.get(index as usize)
            {
                put(Some(index), row.event(source.2, &self.streams));
            }
            source.0 = source.1.next();
        }
    }
}

impl Recording for SnapshotRecording {
    fn definitions(&self) -> &Definitions {
        &self.definitions
    }

    fn calibration(&self) -> Calibration {
        // A tick is a nanosecond. Ticks count from the first event, because the calibration loses nanosecond precision
        // this far from 0.
        let first_ns = self.first_us.saturating_mul(1000);
        Calibration::new(&[ClockPoint { ticks: first_ns, monotonic_ns: 0, realtime_ns: first_ns }])
    }

    fn counter(&self, _: Counter) -> u64 {
        0
    }

    fn end(&self) -> Option<&End> {
        Some(&self.end)
    }

    fn damage(&self) -> Damage {
        Damage::default()
    }

    fn info(&self) -> &str {
        &self.info
    }

    fn event_count(&self) -> u64 {
        self.events
    }

    fn compile_contexts(&self) -> &CompileContexts {
        &self.compile_contexts
    }

    fn derived_events(&self) -> u64 {
        let derived =
            |device: &DeviceEvents| device.prior.events.len() as u64 + u64::from(device.prior.totals.is_some());
        self.devices.iter().map(derived).sum()
    }

    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        let mut block = Vec::with_capacity(EVENTS_PER_BLOCK);
        self.for_each_event(&mut |_, e| {
            block.push(*e);
            if block.len() == EVENTS_PER_BLOCK {
                sink(&block);
                block.clear();
            }
        });
        if !block.is_empty() {
            sink(&block);
        }
        LostEvents::default()
    }

    fn event_counts(&self) -> (EventCounts, LostEvents) {
        (self.event_counts.clone(), LostEvents::default())
    }
}

/// The text attached to a block without the line of its custom category, which snapshots of `memtrace-output` have.
/// `None` if nothing else is in it.
fn without_category(text: &str) -> Option<&str> {
    let (before, last) = text.rsplit_once('\n').unwrap_or(("", text));
    let text = if last.starts_with("custom category: ") { before } else { text };
    (!text.is_empty()).then_some(text)
}

/// The tensor name in a text attached to a block. In our own snapshots, a tensor's text ends with data type and shape.
fn named_tensor(e: &Event, text: &str) -> TensorName {
    let is_shape = |shape: &str| {
        let (dtype, dims) = shape.split_once('[').unwrap_or((shape, ""));
        let dims = dims.strip_suffix(']');
        dtype.starts_with(|c: char| c.is_ascii_lowercase())
            && dtype.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && dims.is_some_and(|dims| dims.chars().all(|c| c.is_ascii_digit() || matches!(c, ',' | ' ')))
    };
    let at = text.rfind('[').and_then(|bracket| text[..bracket].rfind(' '));
    let (name, shape) = match at.map(|at| (&text[..at], &text[at + 1..])) {
        Some((name, shape)) if is_shape(shape) => (name, shape),
        _ => (text, ""),
    };
    let kind = match name {
        _ if shape.is_empty() => TensorKind::Other,
        _ if name.ends_with(".grad") => TensorKind::Gradient,
        _ if name.contains(" of ") => TensorKind::OptimizerState,
        _ => TensorKind::Other,
    };
    TensorName { address: e.addr, seq: e.seq, kind, name: name.into(), shape: shape.into() }
}

/// The events of each device.
#[derive(Default)]
struct DeviceTraces {
    traces: Vec<RowRanges>,
    /// Lists that occur more than once.
    repeated: u64,
    /// Items of another kind where an event, or a list of events, should be.
    invalid_items: u64,
}

impl DeviceTraces {
    fn of(contents: &SnapshotContents, value: Value) -> DeviceTraces {
        let mut lists = DeviceTraces::default();
        let mut seen = HashSet::new();
        match value {
            Value::List(id) => {
                for item in &contents.collections.lists[id as usize] {
                    lists.add(contents, *item, &mut seen);
                }
            }
            // A bare list of events belongs to one device.
            other => lists.add(contents, other, &mut seen),
        }
        lists
    }

    fn add(&mut self, contents: &SnapshotContents, value: Value, seen: &mut HashSet<(u8, u32)>) {
        // A list is read once: it can be long, and a file can name it any number of times.
        let key = match value {
            Value::ItemList(_, first, _) => (0, first),
            Value::List(id) => (1, id),
            _ => (2, 0),
        };
        let is_device = self.traces.len() < MAX_DEVICES;
        if key.0 != 2 && !seen.insert(key) {
            self.repeated += 1;
            self.traces.extend(is_device.then(Vec::new));
            return;
        }
        if !is_device {
            self.invalid_items += 1;
            return;
        }
        let ItemRanges { ranges, invalid_items } = item_ranges(contents, value, ItemKind::Event);
        self.invalid_items += invalid_items;
        self.traces.push(ranges);
    }
}

/// The items of one kind in a list, and the number of other items.
#[derive(Default)]
struct ItemRanges {
    ranges: RowRanges,
    invalid_items: u64,
}

fn item_ranges(contents: &SnapshotContents, list: Value, kind: ItemKind) -> ItemRanges {
    let mut found = ItemRanges::default();
    match list {
        Value::ItemList(of, first, len) if of == kind => found.ranges.push((first, len)),
        Value::List(id) => {
            for item in &contents.collections.lists[id as usize] {
                match *item {
                    Value::ItemRange(of, first, len) if of == kind => found.ranges.push((first, len)),
                    Value::Unusable => {}
                    _ => found.invalid_items += 1,
                }
            }
        }
        // An empty list.
        Value::Other => {}
        _ => found.invalid_items += 1,
    }
    found
}

/// The number of items in a list or in the lists inside it.
fn count_items(contents: &SnapshotContents, value: Value) -> u64 {
    // A file can name a list any number of times. Each is counted once.
    let mut seen = HashSet::new();
    let mut waiting = vec![(value, 0)];
    let mut count = 0u64;
    while let Some((value, depth)) = waiting.pop() {
        match value {
            Value::ItemList(_, _, len) | Value::ItemRange(_, _, len) => count += u64::from(len),
            Value::List(id) if depth < 2 && seen.insert(id) => {
                waiting.extend(contents.collections.lists[id as usize].iter().map(|item| (*item, depth + 1)));
            }
            Value::Dict(_) => count += 1,
            _ => {}
        }
    }
    count
}

/// The allocator configuration exactly as the program received it.
fn allocator_settings(contents: &SnapshotContents, value: Value) -> Option<String> {
    let Value::Dict(id) = value else { return None };
    let of = |name: TextId| {
        contents.collections.dicts[id as usize].iter().find_map(|(key, value)| match value {
            Value::Text(text) if *key == name => Some(contents.tables.str(*text)),
            _ => None,
        })
    };
    of(text::CONF).filter(|conf| !conf.is_empty()).or(of(text::NEW_CONF)).map(str::to_owned)
}

/// The starts and ends of ranges as events, in order of time.
fn labels(annotations: &[Annotation]) -> Vec<Event> {
    let mut ends: Vec<&Annotation> = annotations.iter().collect();
    ends.sort_by_key(|annotation| annotation.time);
    // Ranges that do not nest come from several threads. Then each range gets a number.
    let mut open = Vec::new();
    let nest = ends.iter().all(|end| {
        if end.starts {
            open.push(end.name);
            return true;
        }
        open.pop() == Some(end.name)
    });
    let mut started: HashMap<TextId, Vec<u64>> = HashMap::new();
    let mut count = 0;
    let mut found = Vec::with_capacity(ends.len());
    for end in ends {
        let number = if nest {
            0
        } else if end.starts {
            count += 1;
            started.entry(end.name).or_default().push(count);
            count
        } else {
            let Some(number) = started.get_mut(&end.name).and_then(Vec::pop) else { continue };
            number
        };
        found.push(Event {
            ticks: end.time.saturating_mul(1000),
            addr: end.name.into(),
            size: number,
            source: Source::Label,
            action: if end.starts { Action::RangeStart } else { Action::RangeEnd },
            ..Event::EMPTY
        });
    }
    found
}

fn label_texts(tables: &Tables, annotations: &[Annotation]) -> std::collections::BTreeMap<u32, Label> {
    let label = |name: TextId| Label { origin: LabelOrigin::RecordFunction, text: tables.str(name).into() };
    let names: std::collections::BTreeSet<TextId> = annotations.iter().map(|annotation| annotation.name).collect();
    names.into_iter().map(|name| (name, label(name))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_of_our_snapshots_is_parsed_into_name_and_shape() {
        let e = Event { seq: 7, addr: 512, ..Event::EMPTY };
        let cases = [
            ("fc.weight float32[2, 3]", ("fc.weight", "float32[2, 3]", TensorKind::Other)),
            ("fc.weight.grad bfloat16[]", ("fc.weight.grad", "bfloat16[]", TensorKind::Gradient)),
            (
                "Adam.exp_avg of a, Adam.exp_avg of b int8[4]",
                ("Adam.exp_avg of a, Adam.exp_avg of b", "int8[4]", TensorKind::OptimizerState),
            ),
            ("in layers[2] of mine", ("in layers[2] of mine", "", TensorKind::Other)),
            ("x.grad", ("x.grad", "", TensorKind::Other)),
        ];
        for (text, (name, shape, kind)) in cases {
            let found = named_tensor(&e, text);
            assert_eq!((&*found.name, &*found.shape, found.kind, found.seq), (name, shape, kind, 7));
        }
    }
}
