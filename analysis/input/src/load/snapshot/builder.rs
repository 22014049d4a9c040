//! Builds events, stacks and segments from a snapshot while it is read, for both formats, pickle and JSON. It has a
//! stack of values, as Python's unpickler has, but keeps no containers. A complete dictionary becomes an event, a
//! frame, a block, a segment or a range, according to its keys. A list of frames becomes a stack, and a list of events
//! a range of rows.
//!
//! A container is complete when another container takes it, or when a memo refers to it. A file that changes a complete
//! container, or refers to one from within itself, is refused. No writer of snapshots does that, and it ensures that no
//! value here can contain itself.

use std::collections::BTreeMap;

use memtrace_trace::event::Action;
use memtrace_trace::ids::{ContextId, StackId};

use super::read_error::ReadError;
use super::rows::{Row, Rows};
use super::tables::{Tables, TextId, text};

/// The maximum distance of a memo number beyond twice the number of memos.
const MEMO_GAP: usize = 1 << 16;

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
    /// A container that is being filled, by its index in [`SnapshotBuilder::containers`].
    Container(u32),
    /// Two integers, by index.
    Pair(u32),
    Frame(u32),
    /// A list of frames.
    Stack(StackId, ContextId),
    /// A list of texts, by its index in [`SnapshotBuilder::lists`].
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

/// A container that is being filled.
#[derive(Debug, Default)]
struct Container {
    is_dict: bool,
    pairs: Vec<(TextId, Value)>,
    items: Vec<Value>,
    memos: Vec<u32>,
    position: usize,
    /// The part of [`SnapshotBuilder::capacity_bytes`] that this container has.
    capacity_bytes: usize,
}

/// A container keeps the memory of its lists for the next one if they have at most this many bytes.
const MAX_KEPT_CAPACITY: usize = 64 << 10;

impl Container {
    /// Empties it, and returns the memory of its lists in bytes. They are kept for the next container unless they are
    /// large.
    fn empty(&mut self) -> usize {
        self.pairs.clear();
        self.items.clear();
        self.memos.clear();
        let bytes = self.pairs.capacity() * PAIR_BYTES / 2
            + self.items.capacity() * ITEM_BYTES / 2
            + self.memos.capacity() * MEMO_BYTES / 2;
        if bytes <= MAX_KEPT_CAPACITY {
            return bytes;
        }
        (self.pairs, self.items, self.memos) = Default::default();
        0
    }
}

/// The memory of one element of a container that is being filled, in bytes. A growing vector has up to twice its length.
const PAIR_BYTES: usize = 2 * size_of::<(TextId, Value)>();
const ITEM_BYTES: usize = 2 * size_of::<Value>();
const MEMO_BYTES: usize = 2 * size_of::<u32>();

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

/// Builds the contents of a snapshot.
pub(super) struct SnapshotBuilder {
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Value>,
    memo_count: usize,
    containers: Vec<Container>,
    free_containers: Vec<u32>,
    /// The memory of what is in containers that are being filled, and of the empty lists of the others, in bytes.
    open_bytes: usize,
    capacity_bytes: usize,
    pub(super) tables: Tables,
    pub(super) rows: Rows,
    pub(super) blocks: Vec<FinalBlock>,
    pub(super) segments: Vec<FinalSegment>,
    pub(super) annotations: Vec<Annotation>,
    /// By row: texts attached to events.
    pub(super) metadata: Vec<(u32, TextId)>,
    pub(super) lists: Vec<Box<[Value]>>,
    pub(super) dicts: Vec<Box<[(TextId, Value)]>>,
    pairs: Vec<(u64, u64)>,
    pair_ids: std::collections::HashMap<(u64, u64), u32>,
    pub(super) top: Option<TopLevel>,
    pub(super) invalid: InvalidCounts,
    /// Whether any event has a time, and whether any has a pool.
    pub(super) has_times: bool,
    pub(super) has_pools: bool,
    /// The lists of blocks that a segment has. Each belongs to one segment, however often a file names it.
    used_block_lists: std::collections::HashSet<(u32, u32)>,
    /// By list of texts: the autograd node whose forward lines it has. A file can name one list in every event.
    forward_contexts: std::collections::HashMap<u32, ContextId>,
    /// The time of the previous event.
    last_time: u64,
    /// The compile contexts of events: the first row, and the text from there on. [`text::NOT_AVAILABLE`] is none.
    pub(super) compile_contexts: Vec<(u32, TextId)>,
    kept_bytes: usize,
    frames: Vec<u32>,
}

fn invalid<T>(what: &str) -> Result<T, ReadError> {
    Err(ReadError::Invalid(format!("its structure is invalid: {what}")))
}

impl SnapshotBuilder {
    pub(super) fn new() -> SnapshotBuilder {
        SnapshotBuilder {
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            memo_count: 0,
            containers: Vec::new(),
            free_containers: Vec::new(),
            open_bytes: 0,
            capacity_bytes: 0,
            tables: Tables::new(),
            rows: Rows::default(),
            blocks: Vec::new(),
            segments: Vec::new(),
            annotations: Vec::new(),
            metadata: Vec::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            pairs: Vec::new(),
            pair_ids: std::collections::HashMap::new(),
            top: None,
            invalid: InvalidCounts::default(),
            has_times: false,
            has_pools: false,
            used_block_lists: std::collections::HashSet::new(),
            forward_contexts: std::collections::HashMap::new(),
            last_time: 0,
            compile_contexts: Vec::new(),
            kept_bytes: 0,
            frames: Vec::new(),
        }
    }

    /// The approximate memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let values = self.stack.capacity() + self.memo.capacity();
        let numbers = self.marks.capacity() * size_of::<usize>() + self.free_containers.capacity() * size_of::<u32>();
        values * size_of::<Value>()
            + numbers
            + self.containers.capacity() * size_of::<Container>()
            + self.open_bytes
            + self.capacity_bytes
            + self.rows.bytes()
            + self.tables.bytes
            + self.kept_bytes
    }

    #[inline(always)]
    pub(super) fn push(&mut self, value: Value) {
        self.stack.push(value);
    }

    /// Pushes a text, known or new.
    #[inline]
    pub(super) fn push_text(&mut self, bytes: &[u8]) {
        let id = self.tables.text(bytes);
        self.stack.push(Value::Text(id));
    }

    /// Pushes an empty container.
    #[inline]
    pub(super) fn open(&mut self, is_dict: bool) {
        let position = self.stack.len();
        let id = match self.free_containers.pop() {
            Some(id) => id,
            None => {
                self.containers.push(Container::default());
                (self.containers.len() - 1) as u32
            }
        };
        let open = &mut self.containers[id as usize];
        open.is_dict = is_dict;
        open.position = position;
        self.stack.push(Value::Container(id));
    }

    #[inline(always)]
    pub(super) fn mark(&mut self) {
        self.marks.push(self.stack.len());
    }

    fn pop_mark(&mut self) -> Result<usize, ReadError> {
        match self.marks.pop() {
            Some(mark) if mark <= self.stack.len() => Ok(mark),
            _ => invalid("a batch has no mark"),
        }
    }

    /// The lowest stack position that may be popped. Values below it belong to a batch that is being filled.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    /// Pops the topmost value and completes it.
    fn pop(&mut self) -> Result<Value, ReadError> {
        if self.stack.len() <= self.floor() {
            return invalid("a value is missing");
        }
        let value = self.stack.pop().unwrap_or(Value::None);
        Ok(self.complete(value))
    }

    /// Discards the topmost value, or the topmost mark.
    pub(super) fn drop_top(&mut self) -> Result<(), ReadError> {
        if self.marks.last() == Some(&self.stack.len()) {
            self.marks.pop();
            return Ok(());
        }
        self.pop().map(|_| ())
    }

    /// Discards everything above the topmost mark.
    pub(super) fn drop_batch(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        while self.stack.len() > mark {
            self.pop()?;
        }
        Ok(())
    }

    /// Duplicates the topmost value.
    pub(super) fn duplicate_top(&mut self) -> Result<(), ReadError> {
        let value = self.pop()?;
        self.stack.push(value);
        self.stack.push(value);
        Ok(())
    }

    /// Stores the topmost value in the memo, under the next number or under `number`.
    #[inline]
    pub(super) fn memoize(&mut self, number: Option<u32>) -> Result<(), ReadError> {
        let Some(&value) = self.stack.last() else { return invalid("a memo has no value") };
        let index = number.map_or(self.memo_count, |n| n as usize);
        if index >= self.memo.len() {
            if index > 2 * self.memo_count + MEMO_GAP {
                return invalid("memo numbers are out of order");
            }
            self.memo.resize(index + 1, Value::Absent);
        }
        self.memo_count += usize::from(self.memo[index] == Value::Absent);
        self.memo[index] = value;
        if let Value::Container(id) = value {
            self.containers[id as usize].memos.push(index as u32);
            self.open_bytes += MEMO_BYTES;
        }
        Ok(())
    }

    /// Pushes the value of a memo.
    #[inline]
    pub(super) fn recall(&mut self, number: u32) -> Result<(), ReadError> {
        let mut value = self.memo.get(number as usize).copied().unwrap_or(Value::Absent);
        if let Value::Container(id) = value {
            let position = self.containers[id as usize].position;
            value = self.complete(value);
            self.stack[position] = value;
        }
        if value == Value::Absent {
            return invalid("a memo is not defined");
        }
        self.stack.push(value);
        Ok(())
    }

    /// The open container at this stack position. Fails if there is none, or if it is complete.
    #[inline]
    fn open_at(&self, position: usize, is_dict: bool) -> Result<usize, ReadError> {
        match self.stack.get(position) {
            Some(Value::Container(id)) if self.containers[*id as usize].is_dict == is_dict => Ok(*id as usize),
            _ => invalid("a value is added to something that is not an open container"),
        }
    }

    /// Does `container[key] = value`.
    pub(super) fn set_item(&mut self) -> Result<(), ReadError> {
        let (value, key) = (self.pop()?, self.pop()?);
        let open = self.open_at(self.stack.len().wrapping_sub(1), true)?;
        self.insert_pair(open, key, value);
        Ok(())
    }

    /// Does `container[key] = value` for all pairs above the topmost mark.
    #[inline]
    pub(super) fn set_items(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        if !(self.stack.len() - mark).is_multiple_of(2) {
            return invalid("a key has no value");
        }
        let open = self.open_at(mark.wrapping_sub(1), true)?;
        for at in (mark..self.stack.len()).step_by(2) {
            let (key, value) = (self.stack[at], self.complete(self.stack[at + 1]));
            self.insert_pair(open, key, value);
        }
        self.stack.truncate(mark);
        Ok(())
    }

    #[inline]
    fn insert_pair(&mut self, open: usize, key: Value, value: Value) {
        match key {
            Value::Text(key) => {
                self.containers[open].pairs.push((key, value));
                self.open_bytes += PAIR_BYTES;
            }
            // All keys of a snapshot are texts, so other keys are ignored.
            other => drop(self.complete(other)),
        }
    }

    /// Does `list.append(value)`.
    pub(super) fn append(&mut self) -> Result<(), ReadError> {
        let value = self.pop()?;
        let open = self.open_at(self.stack.len().wrapping_sub(1), false)?;
        self.push_item(open, value);
        Ok(())
    }

    /// Does `list.append(value)` for all values above the topmost mark.
    #[inline]
    pub(super) fn append_all(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        let open = self.open_at(mark.wrapping_sub(1), false)?;
        for at in mark..self.stack.len() {
            let value = self.complete(self.stack[at]);
            self.push_item(open, value);
        }
        self.stack.truncate(mark);
        Ok(())
    }

    #[inline]
    fn push_item(&mut self, open: usize, value: Value) {
        let items = &mut self.containers[open].items;
        match (items.last_mut(), value) {
            (Some(Value::ItemRange(of, first, len)), Value::Item(kind, next))
                if *of == kind && *first + *len == next =>
            {
                *len += 1
            }
            (_, value) => {
                items.push(match value {
                    Value::Item(kind, first) => Value::ItemRange(kind, first, 1),
                    other => other,
                });
                self.open_bytes += ITEM_BYTES;
            }
        }
    }

    /// Makes a list of all values above the topmost mark.
    pub(super) fn list_of_batch(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        self.container_of_batch(mark, false)
    }

    /// Makes a tuple of the topmost `len` values, or of all values above the topmost mark.
    pub(super) fn tuple(&mut self, len: Option<usize>) -> Result<(), ReadError> {
        let mark = match len {
            Some(len) if self.stack.len() >= self.floor() + len => self.stack.len() - len,
            Some(_) => return invalid("a value is missing"),
            None => self.pop_mark()?,
        };
        if let [Value::Int(first), Value::Int(second)] = self.stack[mark..] {
            let pair = self.add_pair(first as u64, second as u64);
            self.stack.truncate(mark);
            self.stack.push(pair);
            return Ok(());
        }
        self.container_of_batch(mark, false)
    }

    /// Makes a dictionary of all values above the topmost mark.
    pub(super) fn dict_of_batch(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        self.container_of_batch(mark, true)
    }

    fn container_of_batch(&mut self, mark: usize, is_dict: bool) -> Result<(), ReadError> {
        let mut batch = self.stack.split_off(mark);
        if is_dict && !batch.len().is_multiple_of(2) {
            return invalid("a key has no value");
        }
        for value in &mut batch {
            *value = self.complete(*value);
        }
        self.open(is_dict);
        let open = self.open_at(mark, is_dict)?;
        if is_dict {
            batch.chunks_exact(2).for_each(|pair| self.insert_pair(open, pair[0], pair[1]));
        } else {
            batch.iter().for_each(|value| self.push_item(open, *value));
        }
        Ok(())
    }

    fn add_pair(&mut self, first: u64, second: u64) -> Value {
        let next = self.pairs.len() as u32;
        let id = *self.pair_ids.entry((first, second)).or_insert(next);
        if id == next {
            self.pairs.push((first, second));
            self.kept_bytes += 96;
        }
        Value::Pair(id)
    }

    /// Pops the result when everything has been read.
    pub(super) fn finish(&mut self) -> Result<Value, ReadError> {
        self.pop()
    }

    /// Completes a container and returns what it represents; other values are returned unchanged. A complete container
    /// takes no more items.
    #[inline]
    fn complete(&mut self, value: Value) -> Value {
        let Value::Container(id) = value else { return value };
        let mut open = std::mem::take(&mut self.containers[id as usize]);
        self.open_bytes -=
            open.pairs.len() * PAIR_BYTES + open.items.len() * ITEM_BYTES + open.memos.len() * MEMO_BYTES;
        let value = if open.is_dict { self.complete_dict(&open.pairs) } else { self.complete_list(&open.items) };
        for memo in open.memos.drain(..) {
            if self.memo[memo as usize] == Value::Container(id) {
                self.memo[memo as usize] = value;
            }
        }
        let capacity_bytes = open.empty();
        self.capacity_bytes = self.capacity_bytes - open.capacity_bytes + capacity_bytes;
        open.capacity_bytes = capacity_bytes;
        self.containers[id as usize] = open;
        self.free_containers.push(id);
        value
    }

    fn complete_list(&mut self, items: &[Value]) -> Value {
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
        let id = self.lists.len() as u32;
        self.lists.push(items.into());
        self.kept_bytes += size_of_val(items) + 48;
        let texts = !items.is_empty() && items.iter().all(|item| matches!(item, Value::Text(_)));
        if texts { Value::Texts(id) } else { Value::List(id) }
    }

    fn complete_dict(&mut self, pairs: &[(TextId, Value)]) -> Value {
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
        let id = self.dicts.len() as u32;
        self.dicts.push(pairs.into());
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
                        self.has_pools = true;
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
                self.last_time = time;
                self.has_times = true;
            }
            Some(_) => self.invalid.times += 1,
            None => {}
        }
        let index = self.rows.len() as u32;
        if metadata != text::EMPTY {
            self.metadata.push((index, metadata));
            self.kept_bytes += METADATA_BYTES;
        }
        let last = self.compile_contexts.last().map_or(text::NOT_AVAILABLE, |(_, id)| *id);
        if compile_context != last {
            self.compile_contexts.push((index, compile_context));
            self.kept_bytes += 2 * size_of::<(u32, TextId)>();
        }
        self.rows.push(Row {
            addr,
            size: size.min(MAX_TOTAL),
            time: self.last_time,
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
        let lines = &self.lists[list as usize];
        let lines: Vec<TextId> = lines.iter().filter_map(|line| text_of(*line)).collect();
        let context = self.tables.forward_context(&lines);
        self.forward_contexts.insert(list, context);
        self.kept_bytes += 32;
        context
    }

    fn pool(&mut self, pair: u32) -> u16 {
        let pool = self.pairs[pair as usize];
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
        let index = self.blocks.len() as u32;
        self.blocks.push(block);
        self.kept_bytes += 2 * size_of::<FinalBlock>();
        Value::Item(ItemKind::Block, index)
    }

    fn newest_in_history(&self, value: Value) -> Option<FinalBlock> {
        match value {
            Value::ItemList(ItemKind::Block, first, _) => self.blocks.get(first as usize).copied(),
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
        if !key.is_some_and(|key| self.used_block_lists.insert(key)) {
            self.invalid.malformed_segments += 1;
            return (0, 0);
        }
        self.kept_bytes += 32;
        let list = match value {
            Value::List(list) => list,
            _ => return key.unwrap_or_default(),
        };
        // In the oldest snapshots, blocks of histories lie between the blocks of a segment.
        let start = self.blocks.len();
        for item in &self.lists[list as usize] {
            match *item {
                Value::ItemRange(ItemKind::Block, first, len) => {
                    self.blocks.extend_from_within(first as usize..(first + len) as usize)
                }
                Value::Unusable => {}
                _ => self.invalid.malformed_segments += 1,
            }
        }
        self.kept_bytes += 2 * (self.blocks.len() - start) * size_of::<FinalBlock>();
        (start as u32, (self.blocks.len() - start) as u32)
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
        let index = self.segments.len() as u32;
        self.segments.push(segment);
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

    /// Builds a snapshot from a file that ends early or is damaged. It keeps the events, segments and lists that are
    /// complete. Returns whether there is a snapshot.
    pub(super) fn salvage(&mut self) -> bool {
        if !matches!(self.stack.first(), Some(Value::Container(_))) {
            return false;
        }
        // There is one batch per container that was being filled, from the outermost. Lists in lists in the top-level
        // dictionary are valid, only their ends are missing.
        let is_list = |builder: &SnapshotBuilder, mark: usize| builder.open_at(mark.wrapping_sub(1), false).is_ok();
        let outer = (1..self.marks.len().min(3)).take_while(|level| is_list(self, self.marks[*level])).count() + 1;
        if let Some(inner) = self.marks.get(outer).copied() {
            self.marks.truncate(outer);
            // The incomplete container itself is also discarded.
            self.stack.truncate(inner.saturating_sub(1).max(self.floor()));
        }
        while self.marks.len() > 1 {
            if self.append_all().is_err() {
                return false;
            }
        }
        if self.open_at(0, false).is_ok() {
            self.marks.truncate(1);
            return self.marks.is_empty() || self.append_all().is_ok();
        }
        let Ok(top) = self.open_at(0, true) else { return false };
        let start = self.marks.pop().unwrap_or(1).max(1);
        let mut at = start;
        while let Some(Value::Text(key)) = self.stack.get(at).copied() {
            let first = at + 1;
            at = first;
            // A single value of a list has no batch. It lies behind its list on the stack, not yet added, and the list
            // can itself be such a value.
            while self.stack.get(at).is_some_and(|value| !matches!(value, Value::Text(_))) {
                at += 1;
            }
            for position in (first + 1..at).rev() {
                let value = self.complete(self.stack[position]);
                let Ok(list) = self.open_at(position - 1, false) else { continue };
                self.push_item(list, value);
            }
            if first < at {
                let value = self.complete(self.stack[first]);
                self.insert_pair(top, Value::Text(key), value);
            }
        }
        self.stack.truncate(1);
        true
    }

    /// The two topmost texts, joined with a dot: what `STACK_GLOBAL` would import.
    pub(super) fn import_name(&self) -> String {
        let names: Vec<&str> = self
            .stack
            .iter()
            .rev()
            .take(2)
            .rev()
            .map(|value| if let Value::Text(id) = value { self.tables.str(*id) } else { "?" })
            .collect();
        memtrace_trace::printable::line(&names.join(".")).chars().take(160).collect()
    }

    /// The keys of a dictionary that is not a snapshot.
    pub(super) fn keys(&self, value: Value) -> Vec<&str> {
        match value {
            Value::Dict(id) => self.dicts[id as usize].iter().map(|(key, _)| self.tables.str(*key)).collect(),
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
