//! The contents of a snapshot: events, the state at the end, and what they share. A complete dictionary becomes an
//! event, a frame, a block, a segment or a range, according to its keys. A list of frames becomes a stack, and a list
//! of events a range of rows.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::event::Action;
use memtrace_trace::ids::{ContextId, StackId};

use super::rows::{Row, Rows};
use super::tables::{Tables, TextId, text};

/// An item that occurs in large numbers and has a table of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ItemKind {
    Event,
    Block,
    Segment,
}

/// The largest size of one allocation, in bytes. Sums of valid sizes cannot overflow.
const MAX_ALLOCATION: u64 = 1 << 44;
/// The largest size of an out-of-memory request, which can be absurd, and of totals.
const MAX_TOTAL: u64 = 1 << 53;
/// The highest valid address. The largest reservation still fits behind it.
const MAX_ADDRESS: u64 = u64::MAX - (1 << 46) - MAX_ALLOCATION;
/// The latest valid time in microseconds, some centuries away.
const MAX_TIME_US: u64 = 1 << 53;

/// Whether memory of this size can be at this address.
fn is_valid_range(addr: u64, size: u64) -> bool {
    addr <= MAX_ADDRESS && size <= MAX_ALLOCATION
}

/// The memory of a name attached to an event, in bytes: here, in a map by row, and as a tensor name without its text.
const METADATA_BYTES: usize = 256;
/// The memory of a start or an end of a range, in bytes: here, and as an event.
const ANNOTATION_BYTES: usize = 2 * size_of::<Annotation>() + 256;
/// The memory of an unknown action, in bytes, without its text.
const UNKNOWN_ACTION_BYTES: usize = 96;

/// A value on the stack, in a list or in the memo.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Value {
    /// No memo has this number.
    Absent,
    None,
    Bool(bool),
    /// An integer. An unsigned value of 64 bits keeps its bits.
    Int(i64),
    Float(f64),
    Text(TextId),
    /// A container that is being filled, by its index in [`super::builder::SnapshotBuilder`].
    Container(u32),
    /// Two integers, by index.
    Pair(u32),
    Frame(u32),
    /// A list of frames.
    Stack(StackId, ContextId),
    /// A list of texts, by its index in [`Collections::lists`].
    Texts(u32),
    /// An event, a block or a segment, by number.
    Item(ItemKind, u32),
    /// Consecutive items in a list: the first number and the count.
    ItemRange(ItemKind, u32, u32),
    /// A whole list of consecutive items: the first number and the count.
    ItemList(ItemKind, u32, u32),
    List(u32),
    Dict(u32),
    /// The top-level dictionary of a snapshot.
    Snapshot,
    /// A value that no snapshot needs.
    Other,
    /// An item that should be usable and is not. It has been counted.
    Unusable,
}

/// A block of the state at the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct FinalBlock {
    /// The address. `None` in the oldest snapshots, where a block starts at the end of the previous one.
    pub(super) addr: Option<u64>,
    pub(super) size: u64,
    pub(super) requested: Option<u64>,
    pub(super) stack: StackId,
    pub(super) context: ContextId,
    /// The state as a text: [`text::ACTIVE_ALLOCATED`] and others.
    pub(super) state: TextId,
}

/// A segment of the state at the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct FinalSegment {
    pub(super) device: i64,
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) stream: u32,
    pub(super) pool: u16,
    pub(super) expandable: bool,
    pub(super) stack: StackId,
    pub(super) context: ContextId,
    /// The first block and the number of blocks.
    pub(super) blocks: (u32, u32),
}

/// The start or the end of a range that the program named.
#[derive(Clone, Copy, Debug)]
pub(super) struct Annotation {
    pub(super) name: TextId,
    pub(super) starts: bool,
    pub(super) time: u64,
}

/// The keys of a snapshot's top-level dictionary.
#[derive(Clone, Copy, Debug)]
pub(super) struct TopLevel {
    pub(super) segments: Option<Value>,
    pub(super) traces: Option<Value>,
    pub(super) settings: Option<Value>,
    pub(super) host: [Option<Value>; 2],
}

/// Counts of what could not be used.
#[derive(Debug, Default)]
pub(super) struct InvalidCounts {
    /// Events without a valid address, size or other required field.
    pub(super) malformed_events: u64,
    /// By action name.
    pub(super) unknown_actions: BTreeMap<TextId, u64>,
    pub(super) malformed_segments: u64,
    /// Events with an invalid time.
    pub(super) times: u64,
    /// Private pools beyond the number of available ids.
    pub(super) pools: u64,
}

/// The events of all devices.
#[derive(Default)]
pub(super) struct TraceEvents {
    pub(super) rows: Rows,
    /// By row: texts attached to events.
    pub(super) metadata: Vec<(u32, TextId)>,
    /// The compile contexts of events: the first row, and the text from there on. [`text::NOT_AVAILABLE`] is none.
    pub(super) compile_contexts: Vec<(u32, TextId)>,
    /// Whether any event has a time, and whether any has a pool.
    pub(super) has_times: bool,
    pub(super) has_pools: bool,
    /// The time of the previous event.
    last_time: u64,
}

/// The memory of the allocators at the end.
#[derive(Default)]
pub(super) struct AllocatorState {
    pub(super) segments: Vec<FinalSegment>,
    pub(super) blocks: Vec<FinalBlock>,
    /// The lists of blocks that a segment has. Each belongs to one segment, however often a file names it.
    used_block_lists: HashSet<(u32, u32)>,
}

/// The lists and dictionaries that are nothing else, and the pairs of integers, each once.
#[derive(Default)]
pub(super) struct Collections {
    pub(super) lists: Vec<Box<[Value]>>,
    pub(super) dicts: Vec<Box<[(TextId, Value)]>>,
    pairs: Vec<(u64, u64)>,
    pair_ids: HashMap<(u64, u64), u32>,
}

/// The contents of a snapshot.
pub(super) struct SnapshotContents {
    pub(super) top: Option<TopLevel>,
    pub(super) events: TraceEvents,
    pub(super) state: AllocatorState,
    pub(super) annotations: Vec<Annotation>,
    pub(super) collections: Collections,
    pub(super) tables: Tables,
    pub(super) invalid: InvalidCounts,
    /// By list of texts: the autograd node whose forward lines it has. A file can name one list in every event.
    forward_contexts: HashMap<u32, ContextId>,
    /// The memory of everything here except for the rows and the tables, in bytes.
    kept_bytes: usize,
    frames: Vec<u32>,
}

impl SnapshotContents {
    pub(super) fn new() -> SnapshotContents {
        SnapshotContents {
            top: None,
            events: TraceEvents::default(),
            state: AllocatorState::default(),
            annotations: Vec::new(),
            collections: Collections::default(),
            tables: Tables::new(),
            invalid: InvalidCounts::default(),
            forward_contexts: HashMap::new(),
            kept_bytes: 0,
            frames: Vec::new(),
        }
    }

    /// The approximate memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.events.rows.bytes() + self.tables.bytes() + self.kept_bytes
    }

    pub(super) fn add_pair(&mut self, first: u64, second: u64) -> Value {
        let next = self.collections.pairs.len() as u32;
        let id = *self.collections.pair_ids.entry((first, second)).or_insert(next);
        if id == next {
            self.collections.pairs.push((first, second));
            self.kept_bytes += 96;
        }
        Value::Pair(id)
    }

    pub(super) fn complete_list(&mut self, items: &[Value]) -> Value {
        match *items {
            [Value::Int(first), Value::Int(second)] => return self.add_pair(first as u64, second as u64),
            [Value::ItemRange(kind, first, len)] => return Value::ItemList(kind, first, len),
            [] => return Value::Other,
            [Value::Frame(_), ..] if items.iter().all(|item| matches!(item, Value::Frame(_))) => {
                let mut frames = std::mem::take(&mut self.frames);
                frames.clear();
                frames.extend(items.iter().map(|item| if let Value::Frame(id) = item { *id } else { 0 }));
                let (stack, context) = self.tables.stack(&frames);
                self.frames = frames;
                return Value::Stack(stack, context);
            }
            _ => {}
        }
        let id = self.collections.lists.len() as u32;
        self.collections.lists.push(items.into());
        self.kept_bytes += size_of_val(items) + 48;
        let texts = !items.is_empty() && items.iter().all(|item| matches!(item, Value::Text(_)));
        if texts { Value::Texts(id) } else { Value::List(id) }
    }

    pub(super) fn complete_dict(&mut self, pairs: &[(TextId, Value)]) -> Value {
        let has = |key: TextId| pairs.iter().any(|(k, _)| *k == key);
        if has(text::ACTION) {
            return self.add_event(pairs);
        }
        if has(text::FILENAME) {
            return self.add_frame(pairs);
        }
        if has(text::STATE) || has(text::REAL_SIZE) {
            return self.add_block(pairs);
        }
        if has(text::TOTAL_SIZE) {
            return self.add_segment(pairs);
        }
        if has(text::STAGE) {
            return self.add_annotation(pairs);
        }
        if has(text::DEVICE_TRACES) || has(text::SEGMENTS) {
            let get = |key: TextId| pairs.iter().rev().find(|(k, _)| *k == key).map(|(_, value)| *value);
            self.top = Some(TopLevel {
                segments: get(text::SEGMENTS),
                traces: get(text::DEVICE_TRACES),
                settings: get(text::ALLOCATOR_SETTINGS),
                host: [get(text::HOST_SEGMENTS), get(text::HOST_TRACES)],
            });
            return Value::Snapshot;
        }
        let id = self.collections.dicts.len() as u32;
        self.collections.dicts.push(pairs.into());
        self.kept_bytes += size_of_val(pairs) + 48;
        Value::Dict(id)
    }

    #[inline]
    fn add_event(&mut self, pairs: &[(TextId, Value)]) -> Value {
        let (mut action, mut addr, mut size) = (None, None, None);
        let (mut time, mut stream, mut pool) = (None, 0, 0);
        let (mut stack, mut context, mut forward) = (StackId::NONE, ContextId::NONE, None);
        let (mut metadata, mut compile_context) = (text::EMPTY, text::NOT_AVAILABLE);
        for &(key, value) in pairs {
            match key {
                text::ACTION => action = text_of(value),
                text::ADDR | text::DEVICE_FREE => addr = number(value),
                text::SIZE => size = number(value),
                text::STREAM => stream = number(value).unwrap_or(0),
                text::TIME_US => time = Some(number(value).unwrap_or(u64::MAX)),
                text::FRAMES => {
                    if let Value::Stack(s, c) = value {
                        (stack, context) = (s, c);
                    }
                }
                text::FORWARD_FRAMES => forward = Some(value),
                text::USER_METADATA => metadata = text_of(value).unwrap_or(text::EMPTY),
                text::COMPILE_CONTEXT => {
                    compile_context = text_of(value).filter(|id| *id != text::EMPTY).unwrap_or(text::NOT_AVAILABLE);
                }
                text::POOL_ID => {
                    if let Value::Pair(id) = value {
                        pool = self.pool(id);
                        self.events.has_pools = true;
                    }
                }
                _ => {}
            }
        }
        let Some(event_action) = action.and_then(action_of) else {
            match action {
                Some(name) => {
                    let count = self.invalid.unknown_actions.entry(name).or_default();
                    self.kept_bytes += if *count == 0 { UNKNOWN_ACTION_BYTES } else { 0 };
                    *count += 1;
                }
                None => self.invalid.malformed_events += 1,
            }
            return Value::Unusable;
        };
        let range = match event_action {
            // In these events, the fields are totals.
            Action::Snapshot | Action::Oom => Some((addr.unwrap_or(0), size.unwrap_or(0))),
            _ => addr.zip(size).filter(|(addr, size)| is_valid_range(*addr, *size)),
        };
        let Some((addr, size)) = range else {
            self.invalid.malformed_events += 1;
            return Value::Unusable;
        };
        if let (true, Some(Value::Texts(list))) = (context.is_none(), forward) {
            context = self.forward_context(list);
        }
        match time {
            Some(time) if time <= MAX_TIME_US => {
                self.events.last_time = time;
                self.events.has_times = true;
            }
            Some(_) => self.invalid.times += 1,
            None => {}
        }
        let index = self.events.rows.len() as u32;
        if metadata != text::EMPTY {
            self.events.metadata.push((index, metadata));
            self.kept_bytes += METADATA_BYTES;
        }
        let last = self.events.compile_contexts.last().map_or(text::NOT_AVAILABLE, |(_, id)| *id);
        if compile_context != last {
            self.events.compile_contexts.push((index, compile_context));
            self.kept_bytes += 2 * size_of::<(u32, TextId)>();
        }
        self.events.rows.push(Row {
            addr,
            size: size.min(MAX_TOTAL),
            time: self.events.last_time,
            stack,
            context,
            stream: self.tables.stream(stream),
            slack: Row::NO_SLACK,
            pool,
            action: event_action,
        });
        Value::Item(ItemKind::Event, index)
    }

    fn forward_context(&mut self, list: u32) -> ContextId {
        if let Some(context) = self.forward_contexts.get(&list) {
            return *context;
        }
        let lines = &self.collections.lists[list as usize];
        let lines: Vec<TextId> = lines.iter().filter_map(|line| text_of(*line)).collect();
        let context = self.tables.forward_context(&lines);
        self.forward_contexts.insert(list, context);
        self.kept_bytes += 32;
        context
    }

    fn pool(&mut self, pair: u32) -> u16 {
        let pool = self.collections.pairs[pair as usize];
        self.tables.pool(pool).unwrap_or_else(|| {
            self.invalid.pools += 1;
            0
        })
    }

    fn add_frame(&mut self, pairs: &[(TextId, Value)]) -> Value {
        let (mut name, mut filename, mut line) = (text::EMPTY, text::EMPTY, 0);
        for &(key, value) in pairs {
            match key {
                text::NAME => name = text_of(value).unwrap_or(text::EMPTY),
                text::FILENAME => filename = text_of(value).unwrap_or(text::EMPTY),
                // In a C++ frame, this can be an address in its object.
                text::LINE => line = number(value).and_then(|line| u32::try_from(line).ok()).unwrap_or(0),
                _ => {}
            }
        }
        Value::Frame(self.tables.frame(name, filename, line))
    }

    /// Makes a block, or what the oldest snapshots record about the contents of one.
    fn add_block(&mut self, pairs: &[(TextId, Value)]) -> Value {
        let mut block = FinalBlock {
            addr: None,
            size: 0,
            requested: None,
            stack: StackId::NONE,
            context: ContextId::NONE,
            state: text::INACTIVE,
        };
        for &(key, value) in pairs {
            match key {
                text::ADDRESS | text::ADDR => block.addr = number(value),
                text::SIZE => block.size = number(value).unwrap_or(0),
                text::REQUESTED_SIZE | text::REAL_SIZE => block.requested = number(value),
                text::STATE => block.state = text_of(value).unwrap_or(text::INACTIVE),
                text::FRAMES => {
                    if let Value::Stack(stack, context) = value {
                        (block.stack, block.context) = (stack, context);
                    }
                }
                text::FORWARD_FRAMES => {
                    if let (Value::Texts(list), true) = (value, block.context.is_none()) {
                        block.context = self.forward_context(list);
                    }
                }
                text::HISTORY => {
                    if let Some(newest) = self.newest_in_history(value) {
                        (block.stack, block.context) = (newest.stack, newest.context);
                        block.requested = block.requested.or(newest.requested);
                    }
                }
                _ => {}
            }
        }
        if !is_valid_range(block.addr.unwrap_or(0), block.size.max(block.requested.unwrap_or(0))) {
            self.invalid.malformed_segments += 1;
            return Value::Unusable;
        }
        let index = self.state.blocks.len() as u32;
        self.state.blocks.push(block);
        self.kept_bytes += 2 * size_of::<FinalBlock>();
        Value::Item(ItemKind::Block, index)
    }

    fn newest_in_history(&self, value: Value) -> Option<FinalBlock> {
        match value {
            Value::ItemList(ItemKind::Block, first, _) => self.state.blocks.get(first as usize).copied(),
            _ => None,
        }
    }

    /// The blocks of a segment: the first number and the count.
    fn blocks_of(&mut self, value: Value) -> (u32, u32) {
        let key = match value {
            Value::ItemList(ItemKind::Block, first, len) => Some((first, len)),
            // No list of items has the length 0.
            Value::List(list) => Some((list, 0)),
            Value::Other => return (0, 0),
            _ => None,
        };
        if !key.is_some_and(|key| self.state.used_block_lists.insert(key)) {
            self.invalid.malformed_segments += 1;
            return (0, 0);
        }
        self.kept_bytes += 32;
        let list = match value {
            Value::List(list) => list,
            _ => return key.unwrap_or_default(),
        };
        // In the oldest snapshots, blocks of histories lie between the blocks of a segment.
        let start = self.state.blocks.len();
        for item in &self.collections.lists[list as usize] {
            match *item {
                Value::ItemRange(ItemKind::Block, first, len) => {
                    self.state.blocks.extend_from_within(first as usize..(first + len) as usize)
                }
                Value::Unusable => {}
                _ => self.invalid.malformed_segments += 1,
            }
        }
        self.kept_bytes += 2 * (self.state.blocks.len() - start) * size_of::<FinalBlock>();
        (start as u32, (self.state.blocks.len() - start) as u32)
    }

    fn add_segment(&mut self, pairs: &[(TextId, Value)]) -> Value {
        let mut segment = FinalSegment {
            device: 0,
            addr: 0,
            size: 0,
            stream: 0,
            pool: 0,
            expandable: false,
            stack: StackId::NONE,
            context: ContextId::NONE,
            blocks: (0, 0),
        };
        let mut has_address = false;
        for &(key, value) in pairs {
            match key {
                text::DEVICE => segment.device = number(value).map_or(0, |device| device as i64),
                text::ADDRESS => {
                    segment.addr = number(value).unwrap_or(0);
                    has_address |= number(value).is_some();
                }
                text::TOTAL_SIZE => segment.size = number(value).unwrap_or(0),
                text::STREAM => segment.stream = self.tables.stream(number(value).unwrap_or(0)),
                text::SEGMENT_POOL_ID => {
                    if let Value::Pair(id) = value {
                        segment.pool = self.pool(id);
                    }
                }
                text::IS_EXPANDABLE => segment.expandable = value == Value::Bool(true),
                text::FRAMES => {
                    if let Value::Stack(stack, context) = value {
                        (segment.stack, segment.context) = (stack, context);
                    }
                }
                text::BLOCKS => {
                    segment.blocks = self.blocks_of(value);
                }
                _ => {}
            }
        }
        if !has_address || !is_valid_range(segment.addr, segment.size) {
            self.invalid.malformed_segments += 1;
            return Value::Unusable;
        }
        let index = self.state.segments.len() as u32;
        self.state.segments.push(segment);
        self.kept_bytes += 2 * size_of::<FinalSegment>();
        Value::Item(ItemKind::Segment, index)
    }

    fn add_annotation(&mut self, pairs: &[(TextId, Value)]) -> Value {
        let (mut name, mut stage, mut time) = (None, None, None);
        for &(key, value) in pairs {
            match key {
                text::NAME => name = text_of(value),
                text::STAGE => stage = text_of(value),
                text::TIME_US => time = number(value),
                _ => {}
            }
        }
        if let (Some(name), Some(stage @ (text::START | text::END)), Some(time)) = (name, stage, time) {
            self.annotations.push(Annotation { name, starts: stage == text::START, time: time.min(MAX_TIME_US) });
            self.kept_bytes += ANNOTATION_BYTES;
        }
        Value::Other
    }

    /// The keys of a dictionary that is not a snapshot.
    pub(super) fn keys(&self, value: Value) -> Vec<&str> {
        match value {
            Value::Dict(id) => {
                self.collections.dicts[id as usize].iter().map(|(key, _)| self.tables.str(*key)).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// A non-negative number; a negative integer by its bits.
#[inline(always)]
pub(super) fn number(value: Value) -> Option<u64> {
    match value {
        Value::Int(number) => Some(number as u64),
        Value::Float(number) if number >= 0.0 => Some(number as u64),
        _ => None,
    }
}

#[inline(always)]
fn text_of(value: Value) -> Option<TextId> {
    if let Value::Text(id) = value { Some(id) } else { None }
}

#[inline]
fn action_of(name: TextId) -> Option<Action> {
    Some(match name {
        text::ALLOC => Action::Alloc,
        text::FREE_REQUESTED => Action::FreeRequested,
        text::FREE_COMPLETED => Action::FreeCompleted,
        text::SEGMENT_ALLOC => Action::SegmentAlloc,
        text::SEGMENT_FREE => Action::SegmentFree,
        text::SEGMENT_MAP => Action::SegmentMap,
        text::SEGMENT_UNMAP => Action::SegmentUnmap,
        text::SNAPSHOT => Action::Snapshot,
        text::OOM => Action::Oom,
        text::ANNOTATE => Action::Annotate,
        _ => return None,
    })
}
