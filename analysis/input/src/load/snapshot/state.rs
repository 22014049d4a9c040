//! Reconstructs what existed on a device before its first event. It works backwards from the state at the end and from
//! the events.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::ids::{ContextId, StackId};

use super::machine::{FinalBlock, FinalSegment};
use super::remarks::Facts;
use super::rows::{Row, Rows};
use super::tables::text;
use crate::address_map::AddressHashing;

/// The events of one device as ranges of rows: the first row and the count.
pub(super) type Stretches = Vec<(u32, u32)>;

/// A block that is older than the first event.
#[derive(Clone, Copy, Debug)]
struct Older {
    addr: u64,
    requested: u64,
    /// The size of the block in bytes, if the state at the end has it.
    size: Option<u64>,
    stack: StackId,
    context: ContextId,
    stream: u32,
    pool: u16,
    /// Whether it was freed before the first event and still waited for streams.
    pending: bool,
}

/// A segment, or a mapped range of an expandable segment.
#[derive(Clone, Copy, Debug)]
struct Range {
    size: u64,
    stream: u32,
    pool: u16,
    expandable: bool,
    stack: StackId,
    context: ContextId,
}

/// A block in use. `row`: its allocation, if the recording has it.
struct Live {
    row: Option<u32>,
    stack: StackId,
}

/// What is known about a device besides its events.
#[derive(Debug, Default)]
pub(super) struct Frame {
    /// Events that recreate what existed before, without numbers and times.
    pub(super) before: Vec<Event>,
    /// Allocated and reserved bytes at the end, from the file's state. `None` if the file has no state.
    pub(super) totals: Option<(u64, u64)>,
}

/// What a file records about a device besides its events.
#[derive(Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) device: i16,
    /// Its segments at the end; `None` if the file does not have them.
    pub(super) segments: Option<&'a [FinalSegment]>,
    /// The blocks of all segments.
    pub(super) blocks: &'a [FinalBlock],
    pub(super) streams: &'a [u64],
    /// Whether events carry their pools.
    pub(super) has_pools: bool,
}

/// Reconstructs the device's prior state. Rows also get what only the state at the end knows: the size of blocks and
/// the pools of segments.
pub(super) fn frame(rows: &mut Rows, stretches: &Stretches, known: &Known<'_>, facts: &mut Facts) -> Frame {
    let Known { device, segments, blocks, streams, has_pools } = *known;
    let mut live: HashMap<u64, Live, AddressHashing> = HashMap::default();
    let mut older = Vec::new();
    let mut segment_rows = Vec::new();
    for index in indices(stretches) {
        let Some(row) = rows.get(index as usize) else { continue };
        facts.events += 1;
        match row.action {
            Action::Alloc => {
                facts.allocations += 1;
                facts.without_stack += u64::from(row.stack.is_none() && row.context.is_none());
                live.insert(row.addr, Live { row: Some(index), stack: row.stack });
            }
            Action::FreeRequested => match live.get(&row.addr) {
                Some(block) => {
                    if block.row.is_some() && !row.stack.is_none() {
                        facts.frees_with_stack += 1;
                        facts.frees_of_allocation += u64::from(block.stack == row.stack);
                    }
                }
                None => {
                    older.push(Older::freed(row, false));
                    live.insert(row.addr, Live { row: None, stack: row.stack });
                }
            },
            Action::FreeCompleted => {
                let known = live.remove(&row.addr).is_some();
                older.extend((!known).then(|| Older::freed(row, true)));
            }
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap => {
                segment_rows.push(index);
            }
            _ => {}
        }
    }
    facts.before_unseen += older.len() as u64;
    let mut ranges: BTreeMap<u64, Range> = BTreeMap::new();
    let mut totals = None;
    if let Some(segments) = segments {
        let mut unmatched = Vec::new();
        let (mut allocated, mut reserved) = (0u64, 0u64);
        for segment in segments {
            reserved = reserved.saturating_add(segment.size);
            ranges.insert(segment.addr, Range::of(segment));
            let mut at = segment.addr;
            for block in blocks.iter().skip(segment.blocks.0 as usize).take(segment.blocks.1 as usize) {
                let addr = block.addr.unwrap_or(at);
                at = addr.saturating_add(block.size);
                if !matches!(
                    block.state,
                    text::ACTIVE_ALLOCATED | text::ACTIVE_PENDING_FREE | text::ACTIVE_AWAITING_FREE
                ) {
                    continue;
                }
                let pending = block.state != text::ACTIVE_ALLOCATED;
                allocated = allocated.saturating_add(if pending { 0 } else { block.size });
                match live.get(&addr).map(|block| block.row) {
                    Some(Some(index)) => {
                        if let Some(row) = rows.get_mut(index as usize)
                            && block.requested.is_none_or(|requested| requested == row.size)
                            && let Some(slack) = block.size.checked_sub(row.size)
                        {
                            row.slack = u32::try_from(slack).unwrap_or(Row::NO_SLACK);
                        }
                    }
                    // Its free was requested in the recording.
                    Some(None) => {
                        if let Some(known) = older.iter_mut().find(|o: &&mut Older| o.addr == addr) {
                            known.size = Some(block.size);
                        }
                    }
                    None => unmatched.push(Older::at_end(addr, block, segment, pending)),
                }
            }
        }
        totals = Some((allocated, reserved));
        // The events are captured before the state. A block at an address without any allocation event was there before
        // the first event. At an address with one, the recorded block was freed, so the block at the end was allocated
        // in between.
        let asked: HashSet<u64> = unmatched.iter().map(|block| block.addr).collect();
        let mut came: HashSet<u64> = HashSet::new();
        if !asked.is_empty() {
            for row in indices(stretches).filter_map(|index| rows.get(index as usize)) {
                if row.action == Action::Alloc && asked.contains(&row.addr) {
                    came.insert(row.addr);
                }
            }
        }
        facts.after_blocks += came.len() as u64;
        older.extend(unmatched.into_iter().filter(|block| !came.contains(&block.addr)));
    }
    for index in segment_rows.iter().rev() {
        let Some(row) = rows.get(*index as usize).copied() else { continue };
        match row.action {
            Action::SegmentAlloc => {
                if let Some(range) = ranges.remove(&row.addr)
                    && !has_pools
                    && let Some(row) = rows.get_mut(*index as usize)
                {
                    row.pool = range.pool;
                }
            }
            Action::SegmentMap => {
                let pool = take_out(&mut ranges, row.addr, row.size);
                if let (false, Some(pool), Some(row)) = (has_pools, pool, rows.get_mut(*index as usize)) {
                    row.pool = pool;
                }
            }
            action => {
                let range = Range {
                    size: row.size,
                    stream: row.stream,
                    pool: row.pool,
                    expandable: action == Action::SegmentUnmap,
                    stack: StackId::NONE,
                    context: ContextId::NONE,
                };
                put_in(&mut ranges, row.addr, range);
            }
        }
    }
    facts.before_blocks += older.len() as u64;
    facts.before_bytes =
        older.iter().fold(facts.before_bytes, |sum, block| sum.saturating_add(block.size.unwrap_or(block.requested)));
    facts.before_segments += ranges.len() as u64;
    older.sort_by_key(|block| block.addr);
    let mut before = Vec::with_capacity(ranges.len() + older.len());
    let mut rest = older.as_slice();
    let stream = |number: u32| streams.get(number as usize).copied().unwrap_or(0);
    for (addr, range) in &ranges {
        // Blocks outside every known segment come at their addresses.
        let (outside, others) = rest.split_at(rest.partition_point(|block| block.addr < *addr));
        let (inside, others) = others.split_at(others.partition_point(|block| block.addr - addr < range.size));
        outside.iter().for_each(|block| block.put(&mut before, device, &stream));
        before.push(Event {
            addr: *addr,
            size: range.size,
            stream: stream(range.stream),
            stack: range.stack,
            context: range.context,
            action: if range.expandable { Action::SegmentMap } else { Action::SegmentAlloc },
            device,
            flags: Flags::BEFORE,
            pool: range.pool,
            ..Event::EMPTY
        });
        inside.iter().for_each(|block| block.put(&mut before, device, &stream));
        rest = others;
    }
    rest.iter().for_each(|block| block.put(&mut before, device, &stream));
    Frame { before, totals }
}

/// The numbers of the rows, in order.
pub(super) fn indices(stretches: &Stretches) -> impl Iterator<Item = u32> {
    stretches.iter().flat_map(|(first, len)| *first..first.saturating_add(*len))
}

impl Older {
    /// A block of which only the free is known.
    fn freed(row: &Row, pending: bool) -> Older {
        Older {
            addr: row.addr,
            requested: row.size,
            size: None,
            // The stack can be that of the free or of the allocation, which PyTorch does not distinguish.
            stack: StackId::NONE,
            context: ContextId::NONE,
            stream: row.stream,
            pool: row.pool,
            pending,
        }
    }

    /// A block that was there at the end.
    fn at_end(addr: u64, block: &FinalBlock, segment: &FinalSegment, pending: bool) -> Older {
        Older {
            addr,
            requested: block.requested.unwrap_or(block.size),
            size: Some(block.size),
            stack: block.stack,
            context: block.context,
            stream: segment.stream,
            pool: segment.pool,
            pending,
        }
    }

    fn put(&self, before: &mut Vec<Event>, device: i16, stream: &impl Fn(u32) -> u64) {
        let slack = self.size.and_then(|size| u32::try_from(size.checked_sub(self.requested)?).ok());
        let alloc = Event {
            addr: self.addr,
            size: self.requested,
            stream: stream(self.stream),
            stack: self.stack,
            context: self.context,
            action: Action::Alloc,
            device,
            flags: if slack.is_some() { Flags::BEFORE.with(Flags::SLACK_KNOWN) } else { Flags::BEFORE },
            pool: self.pool,
            slack: slack.unwrap_or(0),
            ..Event::EMPTY
        };
        before.push(alloc);
        if self.pending {
            before.push(Event { action: Action::FreeRequested, flags: Flags::BEFORE, slack: 0, ..alloc });
        }
    }
}

impl Range {
    fn of(segment: &FinalSegment) -> Range {
        Range {
            size: segment.size,
            stream: segment.stream,
            pool: segment.pool,
            expandable: segment.expandable,
            stack: segment.stack,
            context: segment.context,
        }
    }
}

/// Removes a range from the existing ones and returns its pool. `None` if no range contains it.
fn take_out(ranges: &mut BTreeMap<u64, Range>, addr: u64, size: u64) -> Option<u16> {
    let (start, range) = ranges.range(..=addr).next_back().map(|(start, range)| (*start, *range))?;
    let (offset, end) = (addr - start, addr.checked_add(size)?);
    if offset.checked_add(size)? > range.size {
        return None;
    }
    ranges.remove(&start);
    if offset > 0 {
        ranges.insert(start, Range { size: offset, ..range });
    }
    let after = range.size - offset - size;
    if after > 0 {
        ranges.insert(end, Range { size: after, ..range });
    }
    Some(range.pool)
}

/// Adds a range. A range of an expandable segment merges with adjacent ones.
fn put_in(ranges: &mut BTreeMap<u64, Range>, addr: u64, range: Range) {
    let (mut start, mut whole) = (addr, range);
    if range.expandable {
        let before = ranges.range(..addr).next_back().map(|(start, range)| (*start, *range));
        if let Some((at, before)) = before
            && before.expandable
            && at.checked_add(before.size) == Some(addr)
        {
            (start, whole) = (at, Range { size: before.size.saturating_add(range.size), ..before });
        }
        if let Some(after) = addr.checked_add(range.size).and_then(|end| ranges.get(&end).map(|r| (end, *r)))
            && after.1.expandable
        {
            ranges.remove(&after.0);
            whole.size = whole.size.saturating_add(after.1.size);
        }
    }
    ranges.insert(start, whole);
}
