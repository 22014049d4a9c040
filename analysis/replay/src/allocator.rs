//! The state of PyTorch's CUDA caching allocator on one device, reconstructed from its events.
//!
//! The bookkeeping is that of `NativeCachingAllocator` (c10/cuda/CUDACachingAllocator.cpp). The blocks of a segment
//! form a doubly linked list that tiles it. A freed block absorbs free neighbors and keeps its own `requested_size`. A
//! split leaves the old block object with the remainder. Reproducing exactly this, stale fields included, makes
//! [`Allocator::segments`] equal to PyTorch's own `_snapshot()["segments"]`.
//!
//! Events can be missing: they were lost, or are older than the recording. Nothing here panics. Each inconsistency is
//! counted in [`Anomalies`], and the blocks always tile their segments.

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::{ContextId, StackId};

use memtrace_input::AddressMap;

/// Requests are rounded up to multiples of this many bytes (`kMinBlockSize`).
const MIN_BLOCK_SIZE: u64 = 512;
/// The largest rounded request that goes to the small pool (`kSmallSize`), in bytes.
const SMALL_SIZE: u64 = 1 << 20;
/// The size of small-pool segments (`kSmallBuffer`), in bytes.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// The assumed maximum length of an expandable segment whose reservation is unknown, in bytes.
const UNKNOWN_RESERVATION: u64 = 1 << 46;

/// The index of a block in the allocator. It is valid from the block's allocation to its release.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId(u32);

impl BlockId {
    const NONE: BlockId = BlockId(u32::MAX);

    /// An id without an allocator. Only for tests in the crates above.
    #[doc(hidden)]
    pub const fn for_tests(index: u32) -> BlockId {
        BlockId(index)
    }

    /// The id as an index into a table kept beside the allocator.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The state of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockState {
    /// Free: cached.
    Inactive,
    /// In use by the program.
    Allocated,
    /// Freed by the program, but still used by streams.
    PendingFree,
    /// Address space of an expandable segment without memory.
    Unmapped,
}

/// A block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// The start address.
    pub addr: u64,
    /// The size in bytes, rounded as the allocator rounds.
    pub size: u64,
    /// The requested size in bytes. Stale in a free block, as in PyTorch.
    pub requested: u64,
    /// The stream that it belongs to.
    pub stream: u64,
    /// The stack of its allocation.
    pub stack: StackId,
    /// The autograd node or module call of its allocation.
    pub context: ContextId,
    /// The stack of its segment's allocation, if PyTorch's bookkeeping still has it on this block.
    pub segment_stack: StackId,
    /// The autograd node or module call of its segment's allocation, if PyTorch's bookkeeping still has it on this
    /// block.
    pub segment_context: ContextId,
    /// `seq` of its allocation.
    pub seq: u64,
    /// Its state.
    pub state: BlockState,
    /// Its segment.
    pub segment: BlockSegment,
    neighbors: Neighbors,
}

/// The facts about a segment that each of its blocks has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockSegment {
    /// The private pool; 0 for the default pool.
    pub pool: u16,
    /// Whether it is in the pool of small blocks.
    pub small: bool,
    /// Whether it is expandable.
    pub expandable: bool,
    /// Whether no event announced it. Such a segment consists of one block and exists as long as it.
    pub implied: bool,
}

/// The blocks before and after a block in its segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Neighbors {
    prev: BlockId,
    next: BlockId,
}

impl Neighbors {
    const NONE: Neighbors = Neighbors { prev: BlockId::NONE, next: BlockId::NONE };
}

impl Block {
    /// Whether the program or a stream uses it.
    pub fn is_active(&self) -> bool {
        matches!(self.state, BlockState::Allocated | BlockState::PendingFree)
    }
}

/// Running totals in bytes, as `torch.cuda.memory_stats` counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Blocks in use by the program, rounded as the allocator rounds.
    pub allocated: u64,
    /// `allocated` plus the blocks that streams still use.
    pub active: u64,
    /// Segments.
    pub reserved: u64,
    /// Requested bytes of active blocks.
    pub requested: u64,
}

/// The highest value of each total. The totals can reach them at different times.
pub type Peak = Usage;

impl Usage {
    fn raise_to(&mut self, now: &Usage) {
        self.allocated = self.allocated.max(now.allocated);
        self.active = self.active.max(now.active);
        self.reserved = self.reserved.max(now.reserved);
        self.requested = self.requested.max(now.requested);
    }
}

/// Inconsistencies between the events and the replayed state. All are zero for a complete recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Anomalies {
    /// Frees of blocks that were not allocated in the recording.
    pub unmatched_frees: u64,
    /// Allocations at the address of a block in use. The free of that block is missing.
    pub missing_frees: u64,
    /// Allocations outside every known segment.
    pub outside_segments: u64,
    /// Allocations that do not fit the free block they start in.
    pub misfits: u64,
    /// Segment frees and unmaps of memory that was not a known free range.
    pub unmatched_segment_frees: u64,
    /// Comparisons of the allocator's own totals with the replay.
    pub totals_checked: u64,
    /// Comparisons that disagreed.
    pub totals_mismatched: u64,
}

impl Anomalies {
    /// The sum of all inconsistencies.
    pub fn total(&self) -> u64 {
        self.unmatched_frees
            + self.missing_frees
            + self.outside_segments
            + self.misfits
            + self.unmatched_segment_frees
            + self.totals_mismatched
    }
}

/// A segment at one point in time: the blocks that tile it, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// The start address.
    pub addr: u64,
    /// The size in bytes.
    pub size: u64,
    /// The stream that it belongs to.
    pub stream: u64,
    /// The stack of its allocation, as far as PyTorch would still know it.
    pub stack: StackId,
    /// The autograd node of its allocation, as far as PyTorch would still know it.
    pub context: ContextId,
    /// The private pool; 0 for the default pool.
    pub pool: u16,
    /// Whether it serves small blocks.
    pub small: bool,
    /// Whether it is expandable.
    pub expandable: bool,
    /// Its blocks, in the order of their addresses.
    pub blocks: Vec<Block>,
}

/// The reconstructed allocator of one device.
#[derive(Clone, Debug, Default)]
pub struct Allocator {
    blocks: Vec<Block>,
    free_ids: Vec<BlockId>,
    by_address: AddressMap<BlockId>,
    reservations: std::collections::BTreeMap<u64, u64>,
    usage: Usage,
    peak: Peak,
    live_blocks: u64,
    anomalies: Anomalies,
    /// The part of the reserved bytes that stream-ordered pools hold unused, at no known address.
    unused_pool_bytes: u64,
    /// The block that the next event most likely refers to: the one that was freed last.
    lookup_hint: Option<BlockId>,
    /// By address: the free memory of segments that existed before the recording. Some entries are outdated.
    earlier_free: std::collections::BTreeMap<u64, BlockId>,
}

impl Allocator {
    /// The current totals.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The highest totals so far.
    pub fn peak(&self) -> &Peak {
        &self.peak
    }

    /// The number of blocks in use.
    pub fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    /// The number of blocks, free ones included, and of reservations that this value keeps: its memory is proportional
    /// to it.
    pub fn entries(&self) -> usize {
        self.blocks.len() + self.reservations.len() + self.earlier_free.len()
    }

    /// The inconsistencies so far.
    pub fn anomalies(&self) -> &Anomalies {
        &self.anomalies
    }

    /// A block. The id must come from this allocator, and the block must not have been released since. Otherwise this
    /// panics or returns a wrong block.
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }

    /// The blocks before and after it in its segment.
    pub fn neighbors(&self, id: BlockId) -> [Option<(BlockId, &Block)>; 2] {
        let block = &self.blocks[id.index()];
        [block.neighbors.prev, block.neighbors.next]
            .map(|id| (id != BlockId::NONE).then(|| (id, &self.blocks[id.index()])))
    }

    /// The block that starts at this address; `None` if there is none.
    pub fn find(&self, addr: u64) -> Option<BlockId> {
        self.by_address.get(&addr).copied()
    }

    /// Every block in use by the program or a stream.
    pub fn allocated(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        self.blocks.iter().enumerate().filter(|(_, b)| b.is_active() && b.size > 0).map(|(i, b)| (BlockId(i as u32), b))
    }

    /// The size of the largest free block, in bytes.
    pub fn largest_free(&self) -> u64 {
        self.blocks.iter().filter(|b| b.state == BlockState::Inactive).map(|b| b.size).max().unwrap_or(0)
    }

    /// The start of the reservation that contains this address of an expandable segment; `None` if no reservation is
    /// known.
    pub fn reservation_start(&self, addr: u64) -> Option<u64> {
        let (start, size) = self.reservations.range(..=addr).next_back()?;
        (addr - start < *size).then_some(*start)
    }

    /// Applies a reservation of address space: the bounds of an expandable segment.
    pub fn reserve(&mut self, addr: u64, size: u64) {
        self.reservations.insert(addr, size);
    }

    /// Applies the release of reserved address space.
    pub fn unreserve(&mut self, addr: u64) {
        self.reservations.remove(&addr);
        // The rest of the segment is unmapped address space, which goes with the reservation.
        if let Some(id) = self.find(addr)
            && self.blocks[id.index()].state == BlockState::Unmapped
        {
            let next = self.blocks[id.index()].neighbors.next;
            if next != BlockId::NONE {
                self.blocks[next.index()].neighbors.prev = BlockId::NONE;
            }
            self.discard(id);
        }
    }

    /// Applies a `segment_alloc` event.
    pub fn segment_alloc(&mut self, e: &Event) {
        self.drop_block_at(e.addr);
        let id = self.insert(Block {
            segment_stack: e.stack,
            segment_context: e.context,
            stream: e.stream,
            segment: BlockSegment { pool: e.pool, small: e.size <= SMALL_SEGMENT, ..BlockSegment::default() },
            ..Block::free(e.addr, e.size)
        });
        self.by_address.insert(e.addr, id);
        if e.flags.contains(Flags::PREEXISTING) {
            self.lookup_hint = Some(id);
            self.earlier_free.insert(e.addr, id);
        }
        self.usage.reserved += e.size;
        self.peak.raise_to(&self.usage);
    }

    /// Applies a `segment_free` event.
    pub fn segment_free(&mut self, e: &Event) {
        let Some(id) = self.find(e.addr) else {
            self.anomalies.unmatched_segment_frees += 1;
            return;
        };
        let block = self.blocks[id.index()];
        let alone = block.neighbors == Neighbors::NONE;
        if block.state != BlockState::Inactive || !alone || block.size != e.size {
            self.anomalies.unmatched_segment_frees += 1;
        }
        self.drop_linked_blocks(id);
    }

    /// Applies a `segment_map` event.
    pub fn segment_map(&mut self, e: &Event) {
        let known = self.find(e.addr).filter(|id| self.blocks[id.index()].state == BlockState::Unmapped);
        let id = match known.or_else(|| self.unmapped_block_containing(e)) {
            Some(id) => id,
            None => {
                if self.find(e.addr).is_some() {
                    self.anomalies.misfits += 1;
                    return;
                }
                self.new_expandable(e)
            }
        };
        // As in `map_block()`: the unmapped block's object becomes the mapped one, and the remainder gets a new object.
        let to_map = self.blocks[id.index()];
        let size = e.size.min(to_map.size);
        if size < to_map.size {
            let rest = self.insert(Block {
                state: BlockState::Unmapped,
                stream: to_map.stream,
                segment: BlockSegment { expandable: true, ..to_map.segment },
                neighbors: Neighbors { prev: id, next: to_map.neighbors.next },
                ..Block::free(e.addr + size, to_map.size - size)
            });
            if to_map.neighbors.next != BlockId::NONE {
                self.blocks[to_map.neighbors.next.index()].neighbors.prev = rest;
            }
            self.by_address.insert(e.addr + size, rest);
            let block = &mut self.blocks[id.index()];
            block.neighbors.next = rest;
            block.size = size;
        }
        self.blocks[id.index()].state = BlockState::Inactive;
        self.merge(id);
        let block = &mut self.blocks[id.index()];
        if block.neighbors.prev == BlockId::NONE && block.segment_stack.is_none() && block.segment_context.is_none() {
            (block.segment_stack, block.segment_context) = (e.stack, e.context);
        }
        if e.flags.contains(Flags::PREEXISTING) {
            self.lookup_hint = Some(id);
            self.earlier_free.insert(self.blocks[id.index()].addr, id);
        }
        self.usage.reserved += size;
        self.peak.raise_to(&self.usage);
    }

    /// Applies a `segment_unmap` event.
    pub fn segment_unmap(&mut self, e: &Event) {
        let Some(id) = self.free_block_containing(e.addr, e.size) else {
            self.anomalies.unmatched_segment_frees += 1;
            return;
        };
        // As in `unmap_block()`: the parts before and after the range get new objects, and the block's own object
        // becomes the unmapped one.
        let block = self.blocks[id.index()];
        self.by_address.remove(&block.addr);
        let segment = BlockSegment { expandable: true, ..block.segment };
        let template = Block { stream: block.stream, segment, ..Block::free(0, 0) };
        let Neighbors { mut prev, mut next } = block.neighbors;
        let before = e.addr - block.addr;
        if before > 0 {
            let neighbors = Neighbors { prev, next: id };
            let new = self.insert(Block { addr: block.addr, size: before, neighbors, ..template });
            self.by_address.insert(block.addr, new);
            if prev != BlockId::NONE {
                self.blocks[prev.index()].neighbors.next = new;
            }
            prev = new;
        }
        let after = block.size - before - e.size;
        if after > 0 {
            let addr = e.addr + e.size;
            let neighbors = Neighbors { prev: id, next };
            let new = self.insert(Block { addr, size: after, neighbors, ..template });
            self.by_address.insert(addr, new);
            if next != BlockId::NONE {
                self.blocks[next.index()].neighbors.prev = new;
            }
            next = new;
        }
        let range = &mut self.blocks[id.index()];
        range.addr = e.addr;
        range.size = e.size;
        range.state = BlockState::Unmapped;
        range.neighbors = Neighbors { prev, next };
        self.by_address.insert(e.addr, id);
        self.merge(id);
        self.usage.reserved = self.usage.reserved.saturating_sub(e.size);
    }

    /// Applies an `alloc` event and returns the block. If no segment is known there, one is assumed.
    pub fn alloc(&mut self, e: &Event) -> BlockId {
        let found = match self.find(e.addr) {
            Some(id) if self.blocks[id.index()].is_active() => {
                self.anomalies.missing_frees += 1;
                self.free_block(id);
                self.find(e.addr)
            }
            found => found,
        };
        let found = found.filter(|id| self.blocks[id.index()].state == BlockState::Inactive);
        let id = match found {
            Some(id) => self.split_free_block(id, e),
            None => self.add_unannounced_segment(e),
        };
        let block = &mut self.blocks[id.index()];
        block.state = BlockState::Allocated;
        block.requested = e.size;
        block.stack = e.stack;
        block.context = e.context;
        block.seq = e.seq;
        let (size, small) = (block.size, block.segment.small);
        if (round(e.size) <= SMALL_SIZE) != small && !block.segment.implied {
            self.correct_pool(id, round(e.size) <= SMALL_SIZE);
        }
        self.live_blocks += 1;
        self.usage.allocated += size;
        self.usage.active += size;
        self.usage.requested += e.size;
        self.peak.raise_to(&self.usage);
        id
    }

    /// Adds a block that existed before the recording, and splits the free memory around it. The blocks of a segment
    /// must follow the segment.
    pub fn add_existing(&mut self, e: &Event) -> BlockId {
        let size = if e.flags.contains(Flags::SLACK_KNOWN) { e.block_size() } else { round(e.size) };
        let contains = |id: &BlockId| {
            let block = &self.blocks[id.index()];
            let offset = e.addr.wrapping_sub(block.addr);
            block.state == BlockState::Inactive && !block.segment.implied && e.addr >= block.addr && offset < block.size
        };
        let found = self.lookup_hint.take().filter(contains).or_else(|| self.find(e.addr).filter(contains));
        let earlier = || self.earlier_free.range(..=e.addr).next_back().map(|(_, id)| *id).filter(contains);
        let Some(id) = found.or_else(earlier) else {
            return self.alloc(e);
        };
        // The part before it stays free, as a block of its own.
        let free = self.blocks[id.index()];
        let before = e.addr - free.addr;
        if before > 0 {
            let front = self.split_off_front(id, before);
            let rest = &mut self.blocks[id.index()];
            (rest.segment_stack, rest.segment_context) = (StackId::NONE, ContextId::NONE);
            self.earlier_free.insert(free.addr, front);
        } else {
            self.earlier_free.remove(&free.addr);
        }
        let room = free.size - before;
        let taken = self.alloc(&Event {
            flags: e.flags.with(Flags::SLACK_KNOWN),
            slack: u32::try_from(size.min(room).saturating_sub(e.size)).unwrap_or(u32::MAX),
            ..*e
        });
        // The next block is in the remaining free part.
        let next = self.blocks[taken.index()].neighbors.next;
        self.lookup_hint = (next != BlockId::NONE).then_some(next);
        if let Some(next) = self.lookup_hint {
            self.earlier_free.insert(self.blocks[next.index()].addr, next);
        }
        taken
    }

    /// Makes the first `size` bytes of a block a block of its own, in the same state, and returns it.
    fn split_off_front(&mut self, id: BlockId, size: u64) -> BlockId {
        let whole = self.blocks[id.index()];
        let neighbors = Neighbors { next: id, ..whole.neighbors };
        let front = self.insert(Block { size, neighbors, ..whole });
        if whole.neighbors.prev != BlockId::NONE {
            self.blocks[whole.neighbors.prev.index()].neighbors.next = front;
        }
        let rest = &mut self.blocks[id.index()];
        (rest.neighbors.prev, rest.addr, rest.size) = (front, whole.addr + size, whole.size - size);
        self.by_address.insert(whole.addr, front);
        self.by_address.insert(whole.addr + size, id);
        front
    }

    /// Restores the state that earlier blocks have left in the bookkeeping of a block
    /// ([`memtrace_trace::event::Action::BlockState`]).
    pub fn restore_block(&mut self, e: &Event) {
        let Some(id) = self.find(e.addr) else { return };
        let block = &mut self.blocks[id.index()];
        if !block.is_active() {
            block.requested = e.size;
        }
        (block.segment_stack, block.segment_context, block.segment.small) = (e.stack, e.context, e.slack != 0);
    }

    /// All blocks, with free ones and unmapped address space, in no particular order.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        self.blocks.iter().enumerate().filter(|(_, b)| b.size > 0).map(|(i, b)| (BlockId(i as u32), b))
    }

    /// Applies a `free_requested` event. `None` if nothing is allocated there.
    pub fn free_requested(&mut self, addr: u64) -> Option<BlockId> {
        let id = self.find(addr).filter(|id| self.blocks[id.index()].state == BlockState::Allocated);
        let Some(id) = id else {
            self.anomalies.unmatched_frees += 1;
            return None;
        };
        let block = &mut self.blocks[id.index()];
        block.state = BlockState::PendingFree;
        self.usage.allocated = self.usage.allocated.saturating_sub(block.size);
        self.lookup_hint = Some(id);
        Some(id)
    }

    /// Applies a `free_completed` event. Returns the block as it was before; `None` if nothing is allocated there.
    pub fn free_completed(&mut self, addr: u64) -> Option<(BlockId, Block)> {
        let starts_here = |id: &BlockId| {
            let block = &self.blocks[id.index()];
            block.addr == addr && block.is_active()
        };
        let Some(id) = self.lookup_hint.take().filter(starts_here).or_else(|| self.find(addr).filter(starts_here))
        else {
            self.anomalies.unmatched_frees += 1;
            return None;
        };
        let block = self.blocks[id.index()];
        self.free_block(id);
        Some((id, block))
    }

    /// Sets the bytes that stream-ordered pools reserve beyond their blocks.
    pub fn set_unused_pool_bytes(&mut self, bytes: u64) {
        self.usage.reserved = self.usage.reserved.saturating_sub(self.unused_pool_bytes).saturating_add(bytes);
        self.unused_pool_bytes = bytes;
        self.peak.raise_to(&self.usage);
    }

    /// Compares the allocator's own totals with the replay. Sizes are in bytes.
    pub fn check_totals(&mut self, allocated: u64, reserved: u64) {
        self.anomalies.totals_checked += 1;
        if (allocated, reserved) != (self.usage.allocated, self.usage.reserved) {
            self.anomalies.totals_mismatched += 1;
        }
    }

    /// The current segments by address, each with the blocks that tile it.
    pub fn segments(&self) -> Vec<Segment> {
        let is_head = |b: &Block| {
            b.size > 0
                && b.state != BlockState::Unmapped
                && (b.neighbors.prev == BlockId::NONE
                    || self.blocks[b.neighbors.prev.index()].state == BlockState::Unmapped)
        };
        let mut segments: Vec<Segment> = self
            .blocks
            .iter()
            .filter(|b| is_head(b))
            .map(|head| {
                let mut blocks = vec![*head];
                let mut at = head.neighbors.next;
                while at != BlockId::NONE && self.blocks[at.index()].state != BlockState::Unmapped {
                    blocks.push(self.blocks[at.index()]);
                    at = self.blocks[at.index()].neighbors.next;
                }
                Segment {
                    addr: head.addr,
                    size: blocks.iter().map(|b| b.size).sum(),
                    stream: head.stream,
                    stack: head.segment_stack,
                    context: head.segment_context,
                    pool: head.segment.pool,
                    small: head.segment.small,
                    expandable: head.segment.expandable,
                    blocks,
                }
            })
            .collect();
        segments.sort_by_key(|s| s.addr);
        segments
    }

    /// Allocates the front of a free block and splits it where PyTorch would.
    fn split_free_block(&mut self, id: BlockId, e: &Event) -> BlockId {
        let free = self.blocks[id.index()];
        let size = self.allocated_size(&free, e);
        if size > free.size {
            self.anomalies.misfits += 1;
        }
        if size >= free.size {
            return id;
        }
        // As in `alloc_found_block()`: the new object takes the front, and the old one keeps the remainder.
        let new = self.insert(Block {
            stream: free.stream,
            segment: free.segment,
            neighbors: Neighbors { next: id, ..free.neighbors },
            ..Block::free(free.addr, size)
        });
        if free.neighbors.prev != BlockId::NONE {
            self.blocks[free.neighbors.prev.index()].neighbors.next = new;
        }
        let rest = &mut self.blocks[id.index()];
        rest.neighbors.prev = new;
        rest.addr += size;
        rest.size -= size;
        self.by_address.insert(free.addr, new);
        self.by_address.insert(free.addr + size, id);
        new
    }

    /// The bytes of a free block that an allocation takes: the recorded size, else the one of PyTorch's policy.
    fn allocated_size(&self, free: &Block, e: &Event) -> u64 {
        if free.segment.implied {
            return free.size;
        }
        if e.flags.contains(Flags::SLACK_KNOWN) {
            return if e.slack == u32::MAX { free.size } else { e.block_size() };
        }
        let rounded = round(e.size);
        if rounded > free.size {
            return rounded;
        }
        let rest = free.size - rounded;
        let small = rounded <= SMALL_SIZE;
        let split = if small || free.segment.expandable { rest >= MIN_BLOCK_SIZE } else { rest > SMALL_SIZE };
        if split { rounded } else { free.size }
    }

    /// Makes a segment that no event announced, for one block.
    fn add_unannounced_segment(&mut self, e: &Event) -> BlockId {
        self.anomalies.outside_segments += 1;
        self.add_implied_segment(e, if e.flags.contains(Flags::SLACK_KNOWN) { e.block_size() } else { e.size.max(1) })
    }

    fn add_implied_segment(&mut self, e: &Event, size: u64) -> BlockId {
        let id = self.insert(Block {
            stream: e.stream,
            segment_stack: e.stack,
            segment_context: e.context,
            segment: BlockSegment { pool: e.pool, small: size <= SMALL_SIZE, expandable: false, implied: true },
            ..Block::free(e.addr, size)
        });
        self.by_address.insert(e.addr, id);
        self.usage.reserved += size;
        id
    }

    /// Applies an allocation that is its own segment. That is `cudaMalloc` without a caching allocator, a CPU tensor,
    /// or an event of the fallback source, which does not report segments.
    pub fn alloc_own_segment(&mut self, e: &Event) -> BlockId {
        self.drop_block_at(e.addr);
        self.add_implied_segment(e, e.size.max(1));
        self.alloc(e)
    }

    /// Frees a block and merges it with its free neighbors.
    fn free_block(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        self.live_blocks = self.live_blocks.saturating_sub(1);
        if block.state == BlockState::Allocated {
            self.usage.allocated = self.usage.allocated.saturating_sub(block.size);
        }
        self.usage.active = self.usage.active.saturating_sub(block.size);
        self.usage.requested = self.usage.requested.saturating_sub(block.requested);
        block.state = BlockState::Inactive;
        block.stack = StackId::NONE;
        block.context = ContextId::NONE;
        if block.segment.implied {
            self.usage.reserved = self.usage.reserved.saturating_sub(block.size);
            self.discard(id);
            return;
        }
        self.merge(id);
    }

    /// Merges a block with both neighbors if they have the same state, as `try_merge_blocks` does. `id` stays valid.
    fn merge(&mut self, id: BlockId) {
        let Block { neighbors: Neighbors { prev, next }, state, .. } = self.blocks[id.index()];
        if prev != BlockId::NONE && self.blocks[prev.index()].state == state {
            let src = self.blocks[prev.index()];
            self.by_address.remove(&self.blocks[id.index()].addr);
            let dst = &mut self.blocks[id.index()];
            dst.addr = src.addr;
            dst.size += src.size;
            dst.neighbors.prev = src.neighbors.prev;
            (dst.segment_stack, dst.segment_context) = (src.segment_stack, src.segment_context);
            if src.neighbors.prev != BlockId::NONE {
                self.blocks[src.neighbors.prev.index()].neighbors.next = id;
            }
            self.by_address.insert(src.addr, id);
            self.recycle(prev);
        }
        if next != BlockId::NONE && self.blocks[next.index()].state == state {
            let src = self.blocks[next.index()];
            let dst = &mut self.blocks[id.index()];
            dst.size = dst.size.saturating_add(src.size);
            dst.neighbors.next = src.neighbors.next;
            if src.neighbors.next != BlockId::NONE {
                self.blocks[src.neighbors.next.index()].neighbors.prev = id;
            }
            self.by_address.remove(&src.addr);
            self.recycle(next);
        }
    }

    /// Makes the unmapped address space in which a new expandable segment begins.
    fn new_expandable(&mut self, e: &Event) -> BlockId {
        let end = self
            .reservations
            .range(..=e.addr)
            .next_back()
            .map(|(start, size)| start.saturating_add(*size))
            .filter(|end| *end >= e.addr + e.size);
        // A segment begins with its reservation. If it is older than the recording, its beginning can be unmapped.
        let begins = self.reservation_start(e.addr).filter(|start| end.is_some() && self.find(*start).is_none());
        let start = begins.filter(|_| e.flags.contains(Flags::PREEXISTING)).unwrap_or(e.addr);
        let size = end.map_or(UNKNOWN_RESERVATION, |end| end - start);
        let id = self.insert(Block {
            stream: e.stream,
            segment: BlockSegment { pool: e.pool, small: e.size <= SMALL_SEGMENT, expandable: true, implied: false },
            state: BlockState::Unmapped,
            ..Block::free(start, size)
        });
        self.by_address.insert(start, id);
        if start < e.addr {
            self.split_off_front(id, e.addr - start);
        }
        id
    }

    /// For a mapping that existed before the recording: the unmapped address space around it, from its address on.
    /// Searches all blocks.
    fn unmapped_block_containing(&mut self, e: &Event) -> Option<BlockId> {
        let contains = |b: &Block| {
            b.state == BlockState::Unmapped && b.segment.expandable && b.addr < e.addr && e.addr - b.addr < b.size
        };
        if !e.flags.contains(Flags::PREEXISTING) || self.find(e.addr).is_some() {
            return None;
        }
        let id = BlockId(self.blocks.iter().position(contains)? as u32);
        self.split_off_front(id, e.addr - self.blocks[id.index()].addr);
        Some(id)
    }

    /// The free block that contains the range. Searches all blocks, because unmapping is rare.
    fn free_block_containing(&self, addr: u64, size: u64) -> Option<BlockId> {
        let contains = |b: &Block| {
            b.state == BlockState::Inactive && b.segment.expandable && b.addr <= addr && addr - b.addr + size <= b.size
        };
        if let Some(id) = self.find(addr).filter(|id| contains(&self.blocks[id.index()])) {
            return Some(id);
        }
        self.blocks.iter().position(contains).map(|i| BlockId(i as u32))
    }

    /// Corrects the pool of a segment: its first allocation shows which pool it serves. Its size was only a guess.
    fn correct_pool(&mut self, id: BlockId, small: bool) {
        self.blocks[id.index()].segment.small = small;
        for forward in [true, false] {
            let mut at = id;
            loop {
                let block = &self.blocks[at.index()];
                at = if forward { block.neighbors.next } else { block.neighbors.prev };
                if at == BlockId::NONE || self.blocks[at.index()].segment.small == small {
                    break;
                }
                self.blocks[at.index()].segment.small = small;
            }
        }
    }

    /// Removes any block that starts at this address, because a new one is known to start there.
    fn drop_block_at(&mut self, addr: u64) {
        if let Some(id) = self.find(addr) {
            self.anomalies.missing_frees += u64::from(self.blocks[id.index()].state != BlockState::Unmapped);
            self.drop_linked_blocks(id);
        }
    }

    /// Removes a block and all blocks linked to it.
    fn drop_linked_blocks(&mut self, id: BlockId) {
        let mut head = id;
        while self.blocks[head.index()].neighbors.prev != BlockId::NONE {
            head = self.blocks[head.index()].neighbors.prev;
        }
        while head != BlockId::NONE {
            let block = self.blocks[head.index()];
            if block.is_active() {
                self.live_blocks = self.live_blocks.saturating_sub(1);
                if block.state == BlockState::Allocated {
                    self.usage.allocated = self.usage.allocated.saturating_sub(block.size);
                }
                self.usage.active = self.usage.active.saturating_sub(block.size);
                self.usage.requested = self.usage.requested.saturating_sub(block.requested);
            }
            if block.state != BlockState::Unmapped {
                self.usage.reserved = self.usage.reserved.saturating_sub(block.size);
            }
            self.discard(head);
            head = block.neighbors.next;
        }
    }

    fn insert(&mut self, block: Block) -> BlockId {
        match self.free_ids.pop() {
            Some(id) => {
                self.blocks[id.index()] = block;
                id
            }
            None => {
                self.blocks.push(block);
                BlockId((self.blocks.len() - 1) as u32)
            }
        }
    }

    fn discard(&mut self, id: BlockId) {
        self.by_address.remove(&self.blocks[id.index()].addr);
        self.recycle(id);
    }

    fn recycle(&mut self, id: BlockId) {
        self.blocks[id.index()] = Block { state: BlockState::Unmapped, ..Block::free(0, 0) };
        self.free_ids.push(id);
    }
}

impl Block {
    const fn free(addr: u64, size: u64) -> Block {
        Block {
            addr,
            size,
            requested: 0,
            stream: 0,
            stack: StackId::NONE,
            context: ContextId::NONE,
            segment_stack: StackId::NONE,
            segment_context: ContextId::NONE,
            seq: 0,
            state: BlockState::Inactive,
            segment: BlockSegment { pool: 0, small: false, expandable: false, implied: false },
            neighbors: Neighbors::NONE,
        }
    }
}

/// Rounds as `round_size` does without `roundup_power2_divisions`.
const fn round(size: u64) -> u64 {
    if size < MIN_BLOCK_SIZE { MIN_BLOCK_SIZE } else { size.div_ceil(MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE }
}
