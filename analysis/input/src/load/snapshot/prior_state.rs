//! Reconstructs what existed on a device before its first event. It works backwards from the state at the end and from
//! the events.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::file::{Budget, Exceeded};
use memtrace_trace::ids::{ContextId, StackId};

use super::contents::{FinalBlock, FinalSegment};
use super::notices::ReadStatistics;
use super::rows::{Row, Rows};
use super::tables::text;
use crate::address_map::AddressBuildHasher;

/// The events of one device as ranges of rows: the first row and the count.
pub(super) type RowRanges = Vec<(u32, u32)>;

/// A block that is older than the first event.
#[derive(Clone, Copy, Debug)]
struct PriorBlock {
    addr: u64,
    requested: u64,
    /// The size of the block in bytes, if the state at the end has it.
    size: Option<u64>,
    stack: StackId,
    context: ContextId,
    stream: u32,
    pool: u16,
    /// Whether it was freed before the first event and still waited for streams.
    is_pending: bool,
}

/// The memory of an element in bytes, in a collection that has up to twice its length: a block in use, a prior block
/// with the two events that recreate it, and a mapped range with its event.
const LIVE_BLOCK_BYTES: u64 = size_of::<(u64, LiveBlock)>() as u64 + 1;
const PRIOR_BLOCK_BYTES: u64 = 2 * (size_of::<PriorBlock>() + 2 * size_of::<Event>()) as u64;
const RANGE_BYTES: u64 = 2 * (size_of::<(u64, MappedRange)>() + size_of::<Event>()) as u64;
/// The number of rows between two checks of the budget.
const ROWS_PER_CHECK: usize = 1 << 14;

/// A segment, or a mapped range of an expandable segment.
#[derive(Clone, Copy, Debug)]
struct MappedRange {
    size: u64,
    stream: u32,
    pool: u16,
    expandable: bool,
    stack: StackId,
    context: ContextId,
}

/// A block in use.
struct LiveBlock {
    origin: Origin,
    stack: StackId,
}

/// The blocks in use by address.
type LiveBlocks = HashMap<u64, LiveBlock, AddressBuildHasher>;

/// Where a block in use comes from.
#[derive(Clone, Copy)]
enum Origin {
    /// The row of its allocation.
    Row(u32),
    /// It is older than the first event: its index among the prior blocks.
    Prior(u32),
}

/// The state that a device's events show: the blocks in use after them, the blocks that were freed without an
/// allocation, and the rows of segment events.
#[derive(Default)]
struct EventScan {
    live: LiveBlocks,
    prior_blocks: Vec<PriorBlock>,
    segment_rows: Vec<u32>,
}

/// The state of a device before its first event, and its totals at the end.
#[derive(Debug, Default)]
pub(super) struct PriorState {
    /// Events that recreate what existed before, without numbers and times.
    pub(super) events: Vec<Event>,
    /// Allocated and reserved bytes at the end, from the file's state. `None` if the file has no state.
    pub(super) totals: Option<(u64, u64)>,
}

/// The state of a device at the end, as a file records it.
#[derive(Clone, Copy)]
pub(super) struct FinalState<'a> {
    pub(super) device: i16,
    /// Its segments at the end; `None` if the file does not have them.
    pub(super) segments: Option<&'a [FinalSegment]>,
    /// The blocks of all segments.
    pub(super) blocks: &'a [FinalBlock],
    pub(super) streams: &'a [u64],
    /// Whether events carry their pools.
    pub(super) has_pools: bool,
}

/// Reconstructs the device's prior state. Rows also get what only the state at the end has: the size of blocks and the
/// pools of segments.
pub(super) fn reconstruct(
    rows: &mut Rows,
    row_ranges: &RowRanges,
    final_state: &FinalState<'_>,
    statistics: &mut ReadStatistics,
    budget: &Budget,
) -> Result<PriorState, Exceeded> {
    let EventScan { live, mut prior_blocks, segment_rows } = scan_events(rows, row_ranges, statistics, budget)?;
    statistics.before.known_by_free += prior_blocks.len() as u64;
    let mut mapped: BTreeMap<u64, MappedRange> = BTreeMap::new();
    let mut totals = None;
    if let Some(segments) = final_state.segments {
        let blocks: u64 = segments.iter().map(|segment| u64::from(segment.blocks.1)).sum();
        budget.check((blocks + prior_blocks.len() as u64) * PRIOR_BLOCK_BYTES + segments.len() as u64 * RANGE_BYTES)?;
        mapped.extend(segments.iter().map(|segment| (segment.addr, MappedRange::of(segment))));
        let mut unmatched = Vec::new();
        let with_stack = &mut statistics.events.stacks_of_state;
        let known = (&live, &mut prior_blocks[..], &mut unmatched, with_stack);
        totals = Some(match_final_blocks(rows, segments, final_state.blocks, known));
        // The events are captured before the state. A block at an address without any allocation event was there before
        // the first event. At an address with one, the recorded block was freed, so the block at the end was allocated
        // in between.
        let allocated_later = addresses_with_allocation(rows, row_ranges, &unmatched);
        statistics.after_blocks += allocated_later.len() as u64;
        prior_blocks.extend(unmatched.into_iter().filter(|block| !allocated_later.contains(&block.addr)));
    }
    undo_segment_events(rows, &segment_rows, &mut mapped, final_state.has_pools);
    statistics.before.blocks += prior_blocks.len() as u64;
    statistics.before.bytes = prior_blocks
        .iter()
        .fold(statistics.before.bytes, |sum, block| sum.saturating_add(block.size.unwrap_or(block.requested)));
    statistics.before.segments += mapped.len() as u64;
    prior_blocks.sort_by_key(|block| block.addr);
    let events = recreating_events(&mapped, &prior_blocks, final_state);
    budget.hold(2 * size_of_val(&events[..]) as u64)?;
    Ok(PriorState { events, totals })
}

/// Reads a device's events in order.
fn scan_events(
    rows: &Rows,
    row_ranges: &RowRanges,
    statistics: &mut ReadStatistics,
    budget: &Budget,
) -> Result<EventScan, Exceeded> {
    let mut scan = EventScan::default();
    for (count, index) in row_indices(row_ranges).enumerate() {
        if count % ROWS_PER_CHECK == 0 {
            let live = scan.live.capacity() as u64 * LIVE_BLOCK_BYTES;
            budget.check(live + scan.prior_blocks.len() as u64 * PRIOR_BLOCK_BYTES)?;
        }
        let Some(row) = rows.get(index as usize) else { continue };
        statistics.events.all += 1;
        match row.action {
            Action::Alloc => {
                statistics.events.allocations += 1;
                statistics.events.without_stack += u64::from(row.stack.is_none() && row.context.is_none());
                scan.live.insert(row.addr, LiveBlock { origin: Origin::Row(index), stack: row.stack });
            }
            Action::FreeRequested => match scan.live.get(&row.addr) {
                Some(block) => {
                    if matches!(block.origin, Origin::Row(_)) && !row.stack.is_none() {
                        statistics.events.frees_with_stack += 1;
                        statistics.events.frees_of_allocation += u64::from(block.stack == row.stack);
                    }
                }
                None => {
                    let origin = Origin::Prior(scan.prior_blocks.len() as u32);
                    scan.prior_blocks.push(PriorBlock::freed(row, false));
                    scan.live.insert(row.addr, LiveBlock { origin, stack: row.stack });
                }
            },
            Action::FreeCompleted => {
                let was_live = scan.live.remove(&row.addr).is_some();
                scan.prior_blocks.extend((!was_live).then(|| PriorBlock::freed(row, true)));
            }
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap => {
                scan.segment_rows.push(index);
            }
            _ => {}
        }
    }
    Ok(scan)
}

/// Finds the allocations of the blocks at the end. A known allocation gets the size of its block, and its stack if the
/// event has none: PyTorch records `context="state"` so. Blocks without an allocation go to `unmatched`. `known` are
/// the blocks in use after the events, those older than them, `unmatched`, and the count of events that got a stack.
/// Returns the allocated and the reserved bytes at the end.
fn match_final_blocks(
    rows: &mut Rows,
    segments: &[FinalSegment],
    blocks: &[FinalBlock],
    known: (&LiveBlocks, &mut [PriorBlock], &mut Vec<PriorBlock>, &mut u64),
) -> (u64, u64) {
    let (live, prior_blocks, unmatched, with_stack) = known;
    let (mut allocated, mut reserved) = (0u64, 0u64);
    for segment in segments {
        reserved = reserved.saturating_add(segment.size);
        let mut at = segment.addr;
        for block in blocks.iter().skip(segment.blocks.0 as usize).take(segment.blocks.1 as usize) {
            let addr = block.addr.unwrap_or(at);
            at = addr.saturating_add(block.size);
            if !matches!(block.state, text::ACTIVE_ALLOCATED | text::ACTIVE_PENDING_FREE | text::ACTIVE_AWAITING_FREE) {
                continue;
            }
            let is_pending = block.state != text::ACTIVE_ALLOCATED;
            allocated = allocated.saturating_add(if is_pending { 0 } else { block.size });
            match live.get(&addr).map(|block| block.origin) {
                Some(Origin::Row(index)) => {
                    if let Some(row) = rows.get_mut(index as usize)
                        && block.requested.is_none_or(|requested| requested == row.size)
                        && let Some(slack) = block.size.checked_sub(row.size)
                    {
                        row.slack = u32::try_from(slack).unwrap_or(Row::NO_SLACK);
                        let has_more = !block.stack.is_none() || !block.context.is_none();
                        if row.stack.is_none() && row.context.is_none() && has_more {
                            (row.stack, row.context) = (block.stack, block.context);
                            *with_stack += 1;
                        }
                    }
                }
                // Its free was requested in the recording.
                Some(Origin::Prior(index)) => {
                    if let Some(prior) = prior_blocks.get_mut(index as usize) {
                        prior.size = Some(block.size);
                        (prior.stack, prior.context) = (block.stack, block.context);
                    }
                }
                None => unmatched.push(PriorBlock::at_end(addr, block, segment, is_pending)),
            }
        }
    }
    (allocated, reserved)
}

/// The addresses of `blocks` at which the events have an allocation.
fn addresses_with_allocation(rows: &Rows, row_ranges: &RowRanges, blocks: &[PriorBlock]) -> HashSet<u64> {
    let addresses: HashSet<u64> = blocks.iter().map(|block| block.addr).collect();
    if addresses.is_empty() {
        return addresses;
    }
    row_indices(row_ranges)
        .filter_map(|index| rows.get(index as usize))
        .filter(|row| row.action == Action::Alloc && addresses.contains(&row.addr))
        .map(|row| row.addr)
        .collect()
}

/// Undoes the segment events, from the last to the first. Turns the mapped ranges at the end into those before the
/// first event. Unless events carry their pools, the events that add ranges get the pools of the ranges.
fn undo_segment_events(
    rows: &mut Rows,
    segment_rows: &[u32],
    mapped: &mut BTreeMap<u64, MappedRange>,
    has_pools: bool,
) {
    for index in segment_rows.iter().rev() {
        let Some(row) = rows.get(*index as usize).copied() else { continue };
        match row.action {
            Action::SegmentAlloc => {
                if let Some(range) = mapped.remove(&row.addr)
                    && !has_pools
                    && let Some(row) = rows.get_mut(*index as usize)
                {
                    row.pool = range.pool;
                }
            }
            Action::SegmentMap => {
                let pool = remove_range(mapped, row.addr, row.size);
                if let (false, Some(pool), Some(row)) = (has_pools, pool, rows.get_mut(*index as usize)) {
                    row.pool = pool;
                }
            }
            action => {
                let range = MappedRange {
                    size: row.size,
                    stream: row.stream,
                    pool: row.pool,
                    expandable: action == Action::SegmentUnmap,
                    stack: StackId::NONE,
                    context: ContextId::NONE,
                };
                insert_range(mapped, row.addr, range);
            }
        }
    }
}

/// Events that recreate the ranges and the blocks, which must be sorted, in the order of their addresses.
fn recreating_events(
    mapped: &BTreeMap<u64, MappedRange>,
    prior_blocks: &[PriorBlock],
    final_state: &FinalState<'_>,
) -> Vec<Event> {
    let FinalState { device, streams, .. } = *final_state;
    let mut events = Vec::with_capacity(mapped.len() + prior_blocks.len());
    let mut rest = prior_blocks;
    let stream = |number: u32| streams.get(number as usize).copied().unwrap_or(0);
    for (addr, range) in mapped {
        // Blocks outside every known segment come at their addresses.
        let (outside, others) = rest.split_at(rest.partition_point(|block| block.addr < *addr));
        let (inside, others) = others.split_at(others.partition_point(|block| block.addr - addr < range.size));
        outside.iter().for_each(|block| block.push_events(&mut events, device, &stream));
        events.push(Event {
            addr: *addr,
            size: range.size,
            stream: stream(range.stream),
            stack: range.stack,
            context: range.context,
            action: if range.expandable { Action::SegmentMap } else { Action::SegmentAlloc },
            device,
            flags: Flags::PREEXISTING,
            pool: range.pool,
            ..Event::EMPTY
        });
        inside.iter().for_each(|block| block.push_events(&mut events, device, &stream));
        rest = others;
    }
    rest.iter().for_each(|block| block.push_events(&mut events, device, &stream));
    events
}

/// The numbers of the rows, in order.
pub(super) fn row_indices(row_ranges: &RowRanges) -> impl Iterator<Item = u32> {
    row_ranges.iter().flat_map(|(first, len)| *first..first.saturating_add(*len))
}

impl PriorBlock {
    /// A block of which only the free is known.
    fn freed(row: &Row, is_pending: bool) -> PriorBlock {
        PriorBlock {
            addr: row.addr,
            requested: row.size,
            size: None,
            // The stack can be that of the free or of the allocation, which PyTorch does not distinguish.
            stack: StackId::NONE,
            context: ContextId::NONE,
            stream: row.stream,
            pool: row.pool,
            is_pending,
        }
    }

    /// A block that was there at the end.
    fn at_end(addr: u64, block: &FinalBlock, segment: &FinalSegment, is_pending: bool) -> PriorBlock {
        PriorBlock {
            addr,
            requested: block.requested.unwrap_or(block.size),
            size: Some(block.size),
            stack: block.stack,
            context: block.context,
            stream: segment.stream,
            pool: segment.pool,
            is_pending,
        }
    }

    fn push_events(&self, events: &mut Vec<Event>, device: i16, stream: &impl Fn(u32) -> u64) {
        let slack = self.size.and_then(|size| u32::try_from(size.checked_sub(self.requested)?).ok());
        let alloc = Event {
            addr: self.addr,
            size: self.requested,
            stream: stream(self.stream),
            stack: self.stack,
            context: self.context,
            action: Action::Alloc,
            device,
            flags: if slack.is_some() { Flags::PREEXISTING.with(Flags::SLACK_KNOWN) } else { Flags::PREEXISTING },
            pool: self.pool,
            slack: slack.unwrap_or(0),
            ..Event::EMPTY
        };
        events.push(alloc);
        if self.is_pending {
            events.push(Event { action: Action::FreeRequested, flags: Flags::PREEXISTING, slack: 0, ..alloc });
        }
    }
}

impl MappedRange {
    fn of(segment: &FinalSegment) -> MappedRange {
        MappedRange {
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
fn remove_range(mapped: &mut BTreeMap<u64, MappedRange>, addr: u64, size: u64) -> Option<u16> {
    let (start, range) = mapped.range(..=addr).next_back().map(|(start, range)| (*start, *range))?;
    let (offset, end) = (addr - start, addr.checked_add(size)?);
    if offset.checked_add(size)? > range.size {
        return None;
    }
    mapped.remove(&start);
    if offset > 0 {
        mapped.insert(start, MappedRange { size: offset, ..range });
    }
    let after = range.size - offset - size;
    if after > 0 {
        mapped.insert(end, MappedRange { size: after, ..range });
    }
    Some(range.pool)
}

/// Adds a range. A range of an expandable segment merges with adjacent ones.
fn insert_range(mapped: &mut BTreeMap<u64, MappedRange>, addr: u64, range: MappedRange) {
    let (mut start, mut whole) = (addr, range);
    if range.expandable {
        let before = mapped.range(..addr).next_back().map(|(start, range)| (*start, *range));
        if let Some((at, before)) = before
            && before.expandable
            && at.checked_add(before.size) == Some(addr)
        {
            (start, whole) = (at, MappedRange { size: before.size.saturating_add(range.size), ..before });
        }
        if let Some(after) = addr.checked_add(range.size).and_then(|end| mapped.get(&end).map(|r| (end, *r)))
            && after.1.expandable
        {
            mapped.remove(&after.0);
            whole.size = whole.size.saturating_add(after.1.size);
        }
    }
    mapped.insert(start, whole);
}
