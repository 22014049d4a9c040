//! A block of events as columns, compressed with zstd. Repeated values are stored once, changing values as differences.
//!
//! ```text
//! prefix (32 bytes)  count u32, 0 u32, first_seq u64, first_ticks u64, last_ticks u64     not compressed
//! columns            9 x (length varint, bytes)                                            compressed
//!   0 shapes         dictionary of fields with few combinations: source, action, device, flags, pool or api, stream,
//!                    module, thread
//!   1 shape          index into it, per event
//!   2 seq            zigzag(difference - 1)
//!   3 ticks          zigzag(difference)
//!   4 addr           index into the block's dictionary of addresses; index == its size: a new one, then
//!                    zigzag(difference from the last new one)
//!   5 size           0: the last size at this address; else size + 1
//!   6 stack          encoded like addr
//!   7 context        encoded like addr
//!   8 extra          with SLACK_KNOWN: slack; CUDA calls: zigzag(result); else nothing
//! ```
//!
//! A training loop requests the same addresses from the same stacks in the same order, step after step. zstd compresses
//! the indices well, because they are the same in every step.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use super::column::{Column, Invalid, malformed};
use super::event_counts::EventCounts;
use crate::api::Api;
use crate::error::{Error, Result};
use crate::event::{Action, Event, Flags, Source};
use crate::ids::{ContextId, ModuleId, StackId, ThreadId};
use crate::wire::{Cursor, put_varint, unzigzag, zigzag};

/// The number of events in a full block.
pub(super) const BLOCK_EVENTS: usize = 16 * 1024;
/// The largest number of events that a reader accepts in a block. It bounds a block's memory, whatever the file states.
pub(super) const MAX_EVENTS: u32 = 1 << 16;
/// The size of the uncompressed prefix in bytes.
pub(super) const PREFIX: usize = 32;
const COLUMNS: usize = 9;

/// The facts about a block that can be read without decoding it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Prefix {
    pub(super) count: u32,
    pub(super) first_seq: u64,
    pub(super) first_ticks: u64,
    pub(super) last_ticks: u64,
}

impl Prefix {
    /// The prefix of a block with these events.
    pub(super) fn of(events: &[Event]) -> Prefix {
        Prefix {
            count: events.len() as u32,
            first_seq: events.first().map_or(0, |e| e.seq),
            first_ticks: events.iter().map(|e| e.ticks).min().unwrap_or(0),
            last_ticks: events.iter().map(|e| e.ticks).max().unwrap_or(0),
        }
    }

    /// The start values for the differences of `seq` and `ticks`.
    fn bases(&self) -> (u64, u64) {
        (self.first_seq.wrapping_sub(1), self.first_ticks)
    }

    pub(super) fn to_bytes(self) -> [u8; PREFIX] {
        let mut b = [0; PREFIX];
        b[0..4].copy_from_slice(&self.count.to_le_bytes());
        b[8..16].copy_from_slice(&self.first_seq.to_le_bytes());
        b[16..24].copy_from_slice(&self.first_ticks.to_le_bytes());
        b[24..32].copy_from_slice(&self.last_ticks.to_le_bytes());
        b
    }

    /// Decodes a prefix. `None` if there are too few bytes.
    pub(super) fn from_bytes(b: &[u8]) -> Option<Prefix> {
        let word = |at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
        Some(Prefix {
            count: u32::from_le_bytes(b.get(0..4)?.try_into().ok()?),
            first_seq: word(8)?,
            first_ticks: word(16)?,
            last_ticks: word(24)?,
        })
    }
}

/// The fields of an event that have few combinations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shape {
    source: Source,
    action: Action,
    device: i16,
    flags: Flags,
    narrow: u16,
    stream: u64,
    module: ModuleId,
    thread: ThreadId,
}

impl Shape {
    fn of(e: &Event) -> Shape {
        Shape {
            source: e.source,
            action: e.action,
            device: e.device,
            flags: e.flags,
            narrow: if e.source.is_torch() { e.pool } else { e.api.0 },
            stream: e.stream,
            module: e.module,
            thread: e.thread,
        }
    }

    fn has_extra(&self) -> bool {
        !self.source.is_torch() || self.flags.contains(Flags::SLACK_KNOWN)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.source as u8);
        out.push(self.action as u8);
        put_varint(out, zigzag(self.device.into()));
        put_varint(out, self.flags.0.into());
        put_varint(out, self.narrow.into());
        put_varint(out, self.stream);
        put_varint(out, self.module.0.into());
        put_varint(out, self.thread.0.into());
    }

    fn decode(c: &mut Cursor<'_>) -> Result<Shape> {
        const BAD: Error = Error::Malformed { what: "event shape" };
        let narrow = |v: u64| u16::try_from(v).map_err(|_| BAD);
        Ok(Shape {
            source: Source::from_wire(c.byte()?.into()).ok_or(BAD)?,
            action: Action::from_wire(c.byte()?.into()).ok_or(BAD)?,
            device: i16::try_from(unzigzag(c.varint()?)).map_err(|_| BAD)?,
            flags: Flags(narrow(c.varint()?)?),
            narrow: narrow(c.varint()?)?,
            stream: c.varint()?,
            module: ModuleId(c.varint32()?),
            thread: ThreadId(c.varint32()?),
        })
    }
}

impl Hash for Shape {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let small = self.source as u64
            | (self.action as u64) << 3
            | (self.device as u16 as u64) << 8
            | (self.flags.0 as u64) << 24
            | (self.narrow as u64) << 40;
        state.write_u64(small);
        state.write_u64(self.stream);
        state.write_u64(u64::from(self.module.0) << 32 | u64::from(self.thread.0));
    }
}

/// A multiply-and-rotate hash over words. The keys are memtrace's own numbers, not strings of an adversary.
#[derive(Default)]
struct WordHasher(u64);

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64((*b).into());
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }
}

type WordMap<K, V> = HashMap<K, V, BuildHasherDefault<WordHasher>>;

/// A column of values that are stored by index after their first occurrence.
#[derive(Default)]
struct Dictionary {
    index: WordMap<u64, u32>,
    last_new: u64,
    column: Vec<u8>,
}

impl Dictionary {
    /// Writes `value`. Returns its index and whether it is new.
    fn put(&mut self, value: u64) -> (usize, bool) {
        let next = self.index.len() as u32;
        let index = *self.index.entry(value).or_insert(next);
        put_varint(&mut self.column, index.into());
        if index == next {
            put_varint(&mut self.column, zigzag(value.wrapping_sub(self.last_new) as i64));
            self.last_new = value;
        }
        (index as usize, index == next)
    }
}

/// Reads a column that [`Dictionary`] has written.
struct DictionaryReader<'a> {
    column: Column<'a>,
    values: Vec<u64>,
    last_new: u64,
}

impl<'a> DictionaryReader<'a> {
    fn new(column: Column<'a>) -> DictionaryReader<'a> {
        DictionaryReader { column, values: Vec::with_capacity(256), last_new: 0 }
    }

    #[inline(always)]
    fn get(&mut self) -> Result<(usize, u64), Invalid> {
        let index = self.column.varint()? as usize;
        if index == self.values.len() {
            self.add()?;
        }
        let value = self.values.get(index).ok_or("index into a block's dictionary")?;
        Ok((index, *value))
    }

    fn add(&mut self) -> Result<(), Invalid> {
        self.last_new = self.last_new.wrapping_add(unzigzag(self.column.varint()?) as u64);
        self.values.push(self.last_new);
        Ok(())
    }

    #[inline(always)]
    fn get32(&mut self) -> Result<u32, Invalid> {
        u32::try_from(self.get()?.1).map_err(|_| "id: more than 32 bits")
    }
}

/// Encodes `events` as uncompressed columns. `prefix` must be theirs.
pub(super) fn encode(prefix: &Prefix, events: &[Event], out: &mut Vec<u8>) {
    let mut shapes: WordMap<Shape, u32> = WordMap::default();
    let mut columns: [Vec<u8>; COLUMNS] = Default::default();
    let (mut addrs, mut stacks, mut contexts) = (Dictionary::default(), Dictionary::default(), Dictionary::default());
    let mut sizes: Vec<u64> = Vec::new();
    let (mut seq, mut ticks) = prefix.bases();
    for e in events {
        let shape = Shape::of(e);
        let next = shapes.len() as u32;
        let index = *shapes.entry(shape).or_insert(next);
        if index == next {
            shape.encode(&mut columns[0]);
        }
        put_varint(&mut columns[1], index.into());
        put_varint(&mut columns[2], zigzag(e.seq.wrapping_sub(seq).wrapping_sub(1) as i64));
        seq = e.seq;
        put_varint(&mut columns[3], zigzag(e.ticks.wrapping_sub(ticks) as i64));
        ticks = e.ticks;
        let (at, new) = addrs.put(e.addr);
        if new {
            sizes.push(0);
        }
        if new || sizes[at] != e.size || e.size == 0 {
            // A size of `u64::MAX` wraps to 0, the code for the last size. No allocation is that large, and every code
            // stays decodable.
            put_varint(&mut columns[5], e.size.wrapping_add(1));
            sizes[at] = e.size;
        } else {
            columns[5].push(0);
        }
        stacks.put(e.stack.0.into());
        contexts.put(e.context.0.into());
        if shape.has_extra() {
            let extra = if e.source.is_torch() { e.slack.into() } else { zigzag(e.result.into()) };
            put_varint(&mut columns[8], extra);
        }
    }
    columns[4] = addrs.column;
    columns[6] = stacks.column;
    columns[7] = contexts.column;
    out.clear();
    for column in &columns {
        put_varint(out, column.len() as u64);
        out.extend_from_slice(column);
    }
}

/// A shape as an event without the fields that differ between events, and whether it has an extra.
struct Template {
    event: Event,
    has_extra: bool,
}

impl Template {
    fn of(shape: &Shape) -> Template {
        let torch = shape.source.is_torch();
        let event = Event {
            stream: shape.stream,
            source: shape.source,
            action: shape.action,
            device: shape.device,
            flags: shape.flags,
            api: if torch { Api::NONE } else { Api(shape.narrow) },
            pool: if torch { shape.narrow } else { 0 },
            module: shape.module,
            thread: shape.thread,
            ..Event::EMPTY
        };
        Template { event, has_extra: shape.has_extra() }
    }
}

/// A block's columns. Only the shapes are decoded.
struct Columns<'a> {
    shapes: Vec<Template>,
    shape: Column<'a>,
    others: [Column<'a>; COLUMNS - 2],
}

impl<'a> Columns<'a> {
    fn of(prefix: &Prefix, raw: &'a [u8]) -> Result<Columns<'a>> {
        // Every event takes at least one byte in each of seven columns, so a larger count is invalid.
        if prefix.count as usize > raw.len() / 7 || prefix.count > MAX_EVENTS {
            return Err(malformed("event count of a block"));
        }
        let mut whole = Cursor::new(raw);
        let mut columns: [&[u8]; COLUMNS] = [&[]; COLUMNS];
        for column in &mut columns {
            let len = usize::try_from(whole.varint()?).map_err(|_| malformed("column length"))?;
            *column = whole.bytes(len)?;
        }
        let [table, shape, others @ ..] = columns;
        let mut table = Cursor::new(table);
        let mut shapes = Vec::new();
        while !table.is_empty() {
            // Every shape is that of an event.
            if shapes.len() == prefix.count as usize {
                return Err(malformed("event shape"));
            }
            shapes.push(Template::of(&Shape::decode(&mut table)?));
        }
        Ok(Columns { shapes, shape: Column::new(shape), others: others.map(Column::new) })
    }
}

/// Decodes the events of a block into `out`. The error is [`Error::Malformed`].
pub(super) fn decode(prefix: &Prefix, raw: &[u8], out: &mut Vec<Event>) -> Result<()> {
    out.clear();
    let columns = Columns::of(prefix, raw)?;
    decode_columns(prefix, columns, out).map_err(malformed)
}

fn decode_columns(prefix: &Prefix, columns: Columns<'_>, out: &mut Vec<Event>) -> Result<(), Invalid> {
    let Columns { shapes, shape: mut shape_column, others } = columns;
    let [mut seqs, mut times, addrs, mut size_column, stacks, contexts, mut extras] = others;
    let mut addrs = DictionaryReader::new(addrs);
    let mut stacks = DictionaryReader::new(stacks);
    let mut contexts = DictionaryReader::new(contexts);
    let mut sizes: Vec<u64> = Vec::with_capacity(256);
    let (mut seq, mut ticks) = prefix.bases();
    out.reserve(prefix.count as usize);
    for _ in 0..prefix.count {
        let shape = shapes.get(shape_column.varint()? as usize).ok_or("event shape")?;
        seq = seq.wrapping_add(1).wrapping_add(unzigzag(seqs.varint()?) as u64);
        ticks = ticks.wrapping_add(unzigzag(times.varint()?) as u64);
        let (at, addr) = addrs.get()?;
        if at == sizes.len() {
            sizes.push(0);
        }
        let code = size_column.varint()?;
        let last_size = sizes.get_mut(at).ok_or("address of a block")?;
        if code != 0 {
            *last_size = code - 1;
        }
        let size = *last_size;
        let extra = if shape.has_extra { extras.varint()? } else { 0 };
        let torch = shape.event.source.is_torch();
        out.push(Event {
            seq,
            ticks,
            addr,
            size,
            stack: StackId(stacks.get32()?),
            context: ContextId(contexts.get32()?),
            slack: if torch { extra as u32 } else { 0 },
            result: if torch { 0 } else { unzigzag(extra) as i32 },
            ..shape.event
        });
    }
    Ok(())
}

/// Counts a block's events by kind without decoding them. It reads two of nine columns. See
/// [`super::Decoder::count_events`].
pub(super) fn count_events(prefix: &Prefix, raw: &[u8], out: &mut EventCounts) -> Result<()> {
    let Columns { shapes, shape: mut column, others } = Columns::of(prefix, raw)?;
    let [.., mut extras] = others;
    // The same column stores the results of CUDA calls and the slack of PyTorch's blocks.
    let calls = shapes.iter().any(|shape| !shape.event.source.is_torch());
    let mut counts = vec![(0u64, 0u64); shapes.len()];
    let mut count = || {
        for _ in 0..prefix.count {
            let index = column.varint()? as usize;
            let (succeeded, failed) = counts.get_mut(index).ok_or("event shape")?;
            let shape = &shapes[index];
            let extra = if calls && shape.has_extra { extras.varint()? } else { 0 };
            let is_ok = shape.event.source.is_torch() || unzigzag(extra) as i32 == 0;
            *(if is_ok { succeeded } else { failed }) += 1;
        }
        Ok(())
    };
    count().map_err(malformed)?;
    for (shape, (succeeded, failed)) in shapes.iter().zip(counts) {
        out.add(&shape.event, false, succeeded);
        out.add(&shape.event, true, failed);
    }
    if prefix.count > 0 {
        out.extend_time_range((prefix.first_ticks, prefix.last_ticks));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(in crate::file) fn any_event() -> impl Strategy<Value = Event> {
        let small = prop_oneof![0u64..8, any::<u64>().prop_map(|v| v >> 1)];
        let words = prop::collection::vec(small, 5);
        (words, any::<[u32; 4]>(), any::<i16>(), any::<[u16; 2]>(), any::<i32>(), 0u8..5, 0u8..9).prop_filter_map(
            "a known action",
            |(w, i, device, n, result, source, action)| {
                let mut slot = Event {
                    seq: w[0],
                    ticks: w[1],
                    addr: w[2],
                    size: w[3],
                    stream: w[4],
                    stack: StackId(i[0]),
                    context: ContextId(i[1] % 3),
                    source: Source::from_wire(source.into())?,
                    action: Action::from_wire(action.into())?,
                    device,
                    flags: Flags(n[0]),
                    api: Api(n[1]),
                    pool: n[1],
                    slack: i[2],
                    result,
                    module: ModuleId(i[3]),
                    thread: ThreadId(i[3] % 5),
                };
                // Limits the event to what a ring slot contains. Slack is stored only if it is known.
                slot = Event::from_slot(&slot.to_slot(), slot.thread)?;
                if !slot.flags.contains(Flags::SLACK_KNOWN) {
                    slot.slack = 0;
                }
                Some(slot)
            },
        )
    }

    proptest! {
        #[test]
        fn blocks_round_trip(events in prop::collection::vec(any_event(), 1..50)) {
            let prefix = Prefix::of(&events);
            prop_assert_eq!(Prefix::from_bytes(&prefix.to_bytes()), Some(prefix));
            let (mut raw, mut back) = (Vec::new(), Vec::new());
            encode(&prefix, &events, &mut raw);
            decode(&prefix, &raw, &mut back).unwrap();
            prop_assert_eq!(&back, &events);
            let (mut counted, mut from_columns) = (EventCounts::default(), EventCounts::default());
            count_events(&prefix, &raw, &mut from_columns).unwrap();
            events.iter().for_each(|e| counted.count(e));
            prop_assert_eq!(from_columns, counted);
        }

        #[test]
        fn arbitrary_bytes_are_decoded_or_rejected(raw: Vec<u8>, count: u32) {
            let prefix = Prefix { count, first_seq: 1, first_ticks: 0, last_ticks: 0 };
            let _ = decode(&prefix, &raw, &mut Vec::new());
            let _ = count_events(&prefix, &raw, &mut EventCounts::default());
        }

        #[test]
        fn flipped_bytes_are_decoded_or_rejected(
            events in prop::collection::vec(any_event(), 1..20), at: prop::sample::Index, flip in 1u8..,
        ) {
            let prefix = Prefix::of(&events);
            let mut raw = Vec::new();
            encode(&prefix, &events, &mut raw);
            let at = at.index(raw.len());
            raw[at] ^= flip;
            let _ = decode(&prefix, &raw, &mut Vec::new());
            let _ = count_events(&prefix, &raw, &mut EventCounts::default());
        }
    }
}
