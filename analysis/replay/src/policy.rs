//! The policy of PyTorch's CUDA caching allocator: which block a request gets, and when memory is obtained and
//! released.
//!
//! [`super::Allocator`] follows what the allocator did. This module decides what it *would* do. The facts come from the
//! public source (c10/cuda/CUDACachingAllocator.cpp, 2.4 to 2.15); the code is our own:
//!
//! - Requests are rounded up to 512 bytes, or by `roundup_power2_divisions`. Requests up to 1 MiB use segments of 2
//!   MiB, requests below 10 MiB use segments of 20 MiB. Larger requests use segments of their own size, rounded up to 2
//!   MiB.
//! - The smallest free block of the same stream and pool is taken; among equals the one with the lowest address. The
//!   remainder becomes a block of its own: in small and expandable segments from 512 bytes on. Elsewhere it must exceed
//!   1 MiB, and the request must be below `max_split_size`.
//! - If there is no such block, old unused segments are released first (only with `garbage_collection_threshold`). Then
//!   memory is requested from CUDA. If that fails, oversize blocks are released, then everything unused, and memory is
//!   requested again after each.
//! - Expandable segments are an address range per stream and pool, in which pages of 2 MiB (small) or 20 MiB are
//!   mapped.
//!
//! A [`PolicyDevice`] gives CUDA's answers. One device repeats a recording, to check whether the policy reproduces it.
//! The other has a given amount of memory.

use std::collections::BTreeSet;

use memtrace_input::AddressMap;

/// Requests are rounded up to multiples of this many bytes.
const MIN_BLOCK_SIZE: u64 = 512;
/// The largest rounded request for the pool of small blocks. Also the largest remainder of a large block that is not
/// split off.
const SMALL_SIZE: u64 = 1 << 20;
/// The size of segments and pages in the pool of small blocks.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Requests of at least this size get a segment of their own size.
const MIN_LARGE_ALLOC: u64 = 10 << 20;
/// A segment of its own size is rounded up to a multiple of this.
const ROUND_LARGE: u64 = 2 << 20;
const MIB: u64 = 1 << 20;

/// The settings of `PYTORCH_CUDA_ALLOC_CONF` that affect the policy.
#[derive(Clone, PartialEq, Debug)]
pub struct AllocatorSettings {
    /// `expandable_segments`.
    pub expandable: bool,
    /// `max_split_size_mb`, in bytes; `u64::MAX` if it is not set.
    pub max_split_size: u64,
    /// `max_non_split_rounding_mb`, in bytes.
    pub max_non_split_rounding: u64,
    /// `large_segment_size_mb`, in bytes.
    pub large_segment: u64,
    /// `garbage_collection_threshold`; 0 if it is not set.
    pub garbage_collection_threshold: f64,
    /// `roundup_power2_divisions`, for requests from 1 MiB (index 0) to 32 GiB and more (index 15).
    pub roundup_power2_divisions: [u64; 16],
    /// Whether PyTorch's own caching allocator is the backend, not CUDA's.
    pub native: bool,
}

impl Default for AllocatorSettings {
    fn default() -> AllocatorSettings {
        AllocatorSettings {
            expandable: false,
            max_split_size: u64::MAX,
            max_non_split_rounding: 20 * MIB,
            large_segment: 20 * MIB,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; 16],
            native: true,
        }
    }
}

impl AllocatorSettings {
    /// Parses the value of the environment variable. Unknown settings are ignored.
    pub fn parse(text: &str) -> AllocatorSettings {
        AllocatorSettings::default().with(text)
    }

    /// These settings, with settings in the same syntax added.
    pub fn with(&self, text: &str) -> AllocatorSettings {
        let mut settings = self.clone();
        let mut rest = text;
        while let Some((key, value, after)) = next_setting(rest) {
            rest = after;
            let megabytes = |default: u64| value.parse().map_or(default, |mb: u64| mb.saturating_mul(MIB));
            match key {
                "expandable_segments" => settings.expandable = value == "True",
                "max_split_size_mb" => settings.max_split_size = megabytes(u64::MAX),
                "max_non_split_rounding_mb" => settings.max_non_split_rounding = megabytes(20 * MIB),
                "large_segment_size_mb" => settings.large_segment = megabytes(20 * MIB),
                "garbage_collection_threshold" => {
                    settings.garbage_collection_threshold = value.parse().unwrap_or(0.0);
                }
                "roundup_power2_divisions" => settings.roundup_power2_divisions = divisions(value),
                "backend" => settings.native = value == "native",
                _ => {}
            }
        }
        settings
    }

    /// The rounded size of a request, in bytes. The block can be larger.
    pub fn round(&self, size: u64) -> u64 {
        if size < MIN_BLOCK_SIZE {
            return MIN_BLOCK_SIZE;
        }
        let index = size.ilog2().saturating_sub(20).min(15) as usize;
        let divisions = self.roundup_power2_divisions.get(index).copied().unwrap_or(0);
        if divisions <= 1 || size <= MIN_BLOCK_SIZE * divisions || size.is_power_of_two() {
            return size.div_ceil(MIN_BLOCK_SIZE).saturating_mul(MIN_BLOCK_SIZE);
        }
        let floor = 1u64 << size.ilog2();
        match floor >> divisions.ilog2() {
            0 => floor << 1,
            step => size.div_ceil(step).saturating_mul(step),
        }
    }

    /// The bytes that PyTorch requests from CUDA for a block of this rounded size, if no segment has room for it. Its
    /// out-of-memory error names them (`get_allocation_size` in `CUDACachingAllocator.cpp`).
    pub fn segment_size(&self, rounded: u64) -> u64 {
        if rounded <= SMALL_SIZE {
            SMALL_SEGMENT
        } else if rounded < MIN_LARGE_ALLOC {
            self.large_segment
        } else {
            rounded.div_ceil(ROUND_LARGE).saturating_mul(ROUND_LARGE)
        }
    }

    fn page_size(&self, small: bool) -> u64 {
        if small { SMALL_SEGMENT } else { self.large_segment }
    }
}

/// Splits the first `key:value` off a comma-separated list. A value can be a list in brackets.
fn next_setting(text: &str) -> Option<(&str, &str, &str)> {
    let text = text.trim_start_matches([',', ' ']);
    let (key, value) = text.split_once(':')?;
    let end = if value.starts_with('[') {
        value.find(']').map_or(value.len(), |at| at + 1)
    } else {
        value.find(',').unwrap_or(value.len())
    };
    Some((key.trim(), value[..end].trim(), &value[end..]))
}

/// Parses `4` or `[256:1,512:2,1024:4,>:8]`.
fn divisions(value: &str) -> [u64; 16] {
    let mut table = [0; 16];
    let Some(list) = value.strip_prefix('[') else {
        return [value.parse().unwrap_or(0); 16];
    };
    let (mut first, mut last) = (true, 0);
    for (from, to) in list.trim_end_matches(']').split(',').filter_map(|entry| entry.split_once(':')) {
        let to: u64 = to.trim().parse().unwrap_or(0);
        if from.trim() == ">" {
            table.iter_mut().skip(last + 1).for_each(|place| *place = to);
            continue;
        }
        let index = from.trim().parse::<u64>().ok().and_then(u64::checked_ilog2).unwrap_or(0).min(15) as usize;
        let begin = if first { 0 } else { index };
        table[begin..=index].fill(to);
        (first, last) = (false, index);
    }
    table
}

/// Stands in for CUDA. Sizes are in bytes.
pub trait PolicyDevice {
    /// `cudaMalloc`: the address of a new segment; `None` without memory.
    fn obtain(&mut self, size: u64) -> Option<u64>;
    /// `cudaFree` of a segment.
    fn release(&mut self, addr: u64, size: u64);
    /// `cuMemAddressReserve`: the address of a new expandable segment.
    fn reserve(&mut self, size: u64) -> u64;
    /// Maps memory into an expandable segment. Returns whether there was memory.
    fn map(&mut self, addr: u64, size: u64) -> bool;
    /// Unmaps memory of an expandable segment.
    fn unmap(&mut self, addr: u64, size: u64);
}

/// A device with a fixed amount of memory for the allocator. Its addresses go up or down.
#[derive(Clone, Debug)]
pub struct LimitedDevice {
    /// The maximum bytes of segments.
    pub limit: u64,
    used_bytes: u64,
    next: u64,
    downwards: bool,
}

impl LimitedDevice {
    /// A device for segments of `limit` bytes in total. The order of the segments' addresses decides which of two equal
    /// blocks is taken. A result that is the same for both orders does not depend on it.
    pub fn new(limit: u64, downwards: bool) -> LimitedDevice {
        LimitedDevice { limit, used_bytes: 0, next: 1 << 60, downwards }
    }

    /// The bytes of segments now.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    fn next_address(&mut self, size: u64) -> u64 {
        if self.downwards {
            self.next = self.next.saturating_sub(size);
            self.next
        } else {
            let at = self.next;
            self.next = self.next.saturating_add(size);
            at
        }
    }

    fn take(&mut self, size: u64) -> bool {
        let fits = self.used_bytes.checked_add(size).filter(|sum| *sum <= self.limit);
        self.used_bytes = fits.unwrap_or(self.used_bytes);
        fits.is_some()
    }
}

impl PolicyDevice for LimitedDevice {
    fn obtain(&mut self, size: u64) -> Option<u64> {
        self.take(size).then(|| self.next_address(size))
    }

    fn release(&mut self, _: u64, size: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(size);
    }

    fn reserve(&mut self, size: u64) -> u64 {
        self.next_address(size)
    }

    fn map(&mut self, _: u64, size: u64) -> bool {
        self.take(size)
    }

    fn unmap(&mut self, _: u64, size: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(size);
    }
}

type Id = u32;
const NONE: Id = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    addr: u64,
    size: u64,
    stream: u64,
    pool: u32,
    is_used: bool,
    mapped: bool,
    /// The expandable segment that it is part of: start address and length; length 0 for other segments.
    range: (u64, u64),
    /// The number of searches that its pool had seen when it became free.
    searches: u64,
    prev: Id,
    next: Id,
}

impl Block {
    fn expandable(&self) -> bool {
        self.range.1 > 0
    }

    fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }
}

#[derive(Clone, Debug)]
struct Pool {
    private: u16,
    small: bool,
    /// By stream, size, address.
    free: BTreeSet<(u64, u64, u64, Id)>,
    /// Address ranges of expandable segments without memory, by stream and address.
    unmapped: BTreeSet<(u64, u64, Id)>,
    searches: u64,
}

/// A block that was allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AllocatedBlock {
    /// The start address.
    pub addr: u64,
    /// The size in bytes, rounded as the allocator rounds.
    pub size: u64,
}

/// The policy of the allocator of one device.
#[derive(Clone, Debug)]
pub struct Policy<D> {
    /// The allocator settings.
    pub settings: AllocatorSettings,
    /// The device that answers for CUDA.
    pub device: D,
    /// The limit of `set_per_process_memory_fraction`, in bytes.
    pub allowed_memory_maximum: Option<u64>,
    blocks: Vec<Block>,
    free_ids: Vec<Id>,
    pools: Vec<Pool>,
    live: AddressMap<Id>,
    reserved: u64,
    peak_reserved: u64,
    /// The length of a new expandable segment's address range, in bytes.
    address_space: u64,
}

impl<D: PolicyDevice> Policy<D> {
    /// An allocator without any segments.
    pub fn new(settings: AllocatorSettings, device: D) -> Policy<D> {
        Policy {
            settings,
            device,
            allowed_memory_maximum: None,
            blocks: Vec::new(),
            free_ids: Vec::new(),
            pools: Vec::new(),
            live: AddressMap::default(),
            reserved: 0,
            peak_reserved: 0,
            address_space: 1 << 42,
        }
    }

    /// Bytes of segments now.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// The highest number of bytes of segments.
    pub fn peak_reserved(&self) -> u64 {
        self.peak_reserved
    }

    /// Serves a request of `requested` bytes. `None` if there is no memory for it.
    pub fn alloc(&mut self, requested: u64, stream: u64, private: u16) -> Option<AllocatedBlock> {
        let size = self.settings.round(requested);
        let pool = self.pool(private, size <= SMALL_SIZE);
        let collects_garbage =
            self.allowed_memory_maximum.is_some() && self.settings.garbage_collection_threshold > 0.0;
        if collects_garbage {
            self.pools[pool as usize].searches += 1;
        }
        let found = self.best_fit(pool, stream, size);
        let id = match found {
            Some(id) => {
                self.remove_free(id);
                id
            }
            None => {
                if collects_garbage {
                    self.collect_garbage();
                }
                self.obtain_from_device(pool, stream, size)?
            }
        };
        Some(self.split_and_allocate(id, size))
    }

    /// Whether a request would be served without asking CUDA.
    pub fn serves_from_cache(&mut self, requested: u64, stream: u64, private: u16) -> bool {
        let size = self.settings.round(requested);
        let pool = self.pool(private, size <= SMALL_SIZE);
        self.best_fit(pool, stream, size).is_some()
    }

    /// Frees the block at this address. Returns whether a block was allocated there.
    pub fn free(&mut self, addr: u64) -> bool {
        let Some(id) = self.live.remove(&addr) else { return false };
        self.blocks[id as usize].is_used = false;
        self.merge(id);
        self.insert_free(id);
        true
    }

    /// Releases unused memory, as `torch.cuda.empty_cache()` does. The allocator also does this before it asks CUDA
    /// again.
    pub fn release_cached(&mut self) {
        for small in [false, true] {
            let pool = self.pool(0, small);
            self.release_pool(pool);
        }
    }

    /// The releases that [`Self::release_cached`] would make, in its order: address, bytes, and whether by unmapping.
    pub fn releasable_now(&mut self) -> Vec<(u64, u64, bool)> {
        let mut all = Vec::new();
        for small in [false, true] {
            let pool = self.pool(0, small);
            let (whole, parts) = self.releasable(pool);
            all.extend(whole.into_iter().map(|id| (self.block(id).addr, self.block(id).size, false)));
            let pages = parts.into_iter().filter_map(|id| self.whole_pages(self.block(id)));
            all.extend(pages.map(|(addr, size)| (addr, size, true)));
        }
        all
    }

    /// Releases a segment of a private pool if it is unused. Emptying the cache also empties pools whose graphs are
    /// gone. Returns whether it did.
    pub fn release_private(&mut self, addr: u64, size: u64) -> bool {
        let found = self.pools.iter().filter(|p| p.private != 0).find_map(|p| {
            p.free.iter().find(|key| key.1 == size && key.2 == addr && !self.block(key.3).is_split()).map(|key| key.3)
        });
        found.inspect(|&id| self.release(id)).is_some()
    }

    fn block(&self, id: Id) -> &Block {
        &self.blocks[id as usize]
    }

    fn pool(&mut self, private: u16, small: bool) -> u32 {
        let found = self.pools.iter().position(|p| p.private == private && p.small == small);
        found.unwrap_or_else(|| {
            let (free, unmapped) = Default::default();
            self.pools.push(Pool { private, small, free, unmapped, searches: 0 });
            self.pools.len() - 1
        }) as u32
    }

    /// The best free block for a request.
    fn best_fit(&self, pool: u32, stream: u64, size: u64) -> Option<Id> {
        let settings = &self.settings;
        let free = &self.pools[pool as usize].free;
        let mut candidates =
            free.range((stream, size, 0, 0)..).take_while(|key| key.0 == stream).map(|key| key.3).peekable();
        let mut id = candidates.next()?;
        if self.block(id).expandable() {
            if settings.expandable {
                // A block at the end of the mapped range counts with the size to which it can grow.
                let reach = |id: Id| {
                    let block = self.block(id);
                    let beyond = (block.next != NONE).then(|| self.block(block.next)).filter(|next| !next.mapped);
                    block.size.saturating_add(beyond.map_or(0, |next| next.size))
                };
                while self.block(id).expandable()
                    && let Some(next) = candidates.next_if(|next| reach(*next) < reach(id))
                {
                    id = next;
                }
            } else {
                id = candidates.find(|id| !self.block(*id).expandable())?;
            }
        }
        let found = self.block(id).size;
        let oversize = settings.max_split_size;
        let is_refused = if size < oversize {
            found >= oversize
        } else {
            found >= size.saturating_add(settings.max_non_split_rounding)
        };
        (!is_refused).then_some(id)
    }

    fn obtain_from_device(&mut self, pool: u32, stream: u64, size: u64) -> Option<Id> {
        if let Some(id) = self.request_from_device(pool, stream, size) {
            return Some(id);
        }
        if self.release_oversize(pool, stream, size)
            && let Some(id) = self.request_from_device(pool, stream, size)
        {
            return Some(id);
        }
        self.release_cached();
        self.request_from_device(pool, stream, size)
    }

    /// Asks CUDA for a segment or for pages.
    fn request_from_device(&mut self, pool: u32, stream: u64, size: u64) -> Option<Id> {
        let bytes = self.settings.segment_size(size);
        if self.allowed_memory_maximum.is_some_and(|maximum| self.reserved.saturating_add(bytes) > maximum) {
            return None;
        }
        if self.settings.expandable {
            return self.expand_segment(pool, stream, size);
        }
        let addr = self.device.obtain(bytes)?;
        self.add_reserved(bytes);
        Some(self.insert(Block::new(addr, bytes, stream, pool)))
    }

    fn add_reserved(&mut self, bytes: u64) {
        self.reserved += bytes;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
    }

    /// Maps memory at the lowest address of an expandable segment where the request fits.
    fn expand_segment(&mut self, pool: u32, stream: u64, size: u64) -> Option<Id> {
        let mut id = self.find_address_range(pool, stream, size);
        if !self.block(id).mapped && !self.map(id, size.min(self.block(id).size)) {
            return None;
        }
        while self.block(id).size < size {
            let block = *self.block(id);
            if block.next == NONE {
                return None;
            }
            if !self.map(block.next, (size - block.size).min(self.block(block.next).size)) {
                return None;
            }
            // The newly mapped block has absorbed the free block before it.
            id = block.next;
        }
        self.remove_free(id);
        Some(id)
    }

    fn find_address_range(&mut self, pool: u32, stream: u64, size: u64) -> Id {
        let starts = self.pools[pool as usize].unmapped.range((stream, 0, 0)..).take_while(|key| key.0 == stream);
        let found = starts.map(|key| key.2).find_map(|unmapped| {
            let before = self.block(unmapped).prev;
            let start = if before != NONE && !self.block(before).is_used { before } else { unmapped };
            let (mut bytes, mut at) = (0u64, start);
            while bytes < size && at != NONE && !self.block(at).is_used {
                bytes = bytes.saturating_add(self.block(at).size);
                at = self.block(at).next;
            }
            (bytes >= size).then_some(start)
        });
        found.unwrap_or_else(|| {
            let page = self.settings.page_size(self.pools[pool as usize].small);
            let length = self.address_space.max(size).div_ceil(page).saturating_mul(page);
            let addr = self.device.reserve(length);
            let block = Block::new(addr, length, stream, pool);
            let id = self.insert(Block { mapped: false, range: (addr, length), ..block });
            self.pools[pool as usize].unmapped.insert((stream, addr, id));
            id
        })
    }

    /// Maps the front of a block without memory, in whole pages.
    fn map(&mut self, id: Id, size: u64) -> bool {
        let block = *self.block(id);
        let page = self.settings.page_size(self.pools[block.pool as usize].small);
        let end = (block.addr - block.range.0).saturating_add(size).div_ceil(page).saturating_mul(page);
        let bytes = (block.range.0.saturating_add(end) - block.addr).min(block.size);
        if !self.device.map(block.addr, bytes) {
            return false;
        }
        self.pools[block.pool as usize].unmapped.remove(&(block.stream, block.addr, id));
        self.blocks[id as usize].mapped = true;
        if bytes < block.size {
            let rest = Block { addr: block.addr + bytes, size: block.size - bytes, prev: id, is_used: false, ..block };
            let rest_id = self.insert(rest);
            if block.next != NONE {
                self.blocks[block.next as usize].prev = rest_id;
            }
            self.pools[block.pool as usize].unmapped.insert((block.stream, rest.addr, rest_id));
            let front = &mut self.blocks[id as usize];
            front.next = rest_id;
            front.size = bytes;
        }
        self.merge(id);
        self.insert_free(id);
        self.add_reserved(bytes);
        true
    }

    /// Allocates the front of a block. The block must not be in a free list.
    fn split_and_allocate(&mut self, id: Id, size: u64) -> AllocatedBlock {
        let block = *self.block(id);
        let rest = block.size.saturating_sub(size);
        let split = if self.pools[block.pool as usize].small || self.settings.expandable {
            rest >= MIN_BLOCK_SIZE
        } else {
            size < self.settings.max_split_size && rest > SMALL_SIZE
        };
        let block_id = if split {
            let front = self.insert(Block { size, next: id, ..block });
            if block.prev != NONE {
                self.blocks[block.prev as usize].next = front;
            }
            let remaining = &mut self.blocks[id as usize];
            remaining.prev = front;
            remaining.addr += size;
            remaining.size -= size;
            self.insert_free(id);
            front
        } else {
            id
        };
        let block = &mut self.blocks[block_id as usize];
        block.is_used = true;
        let allocated = AllocatedBlock { addr: block.addr, size: block.size };
        self.live.insert(allocated.addr, block_id);
        allocated
    }

    /// Merges a block with its free neighbors, which are in the free list. The block itself must not be in a free list.
    fn merge(&mut self, id: Id) {
        for before in [true, false] {
            let block = *self.block(id);
            let other = if before { block.prev } else { block.next };
            if other == NONE || self.block(other).is_used || self.block(other).mapped != block.mapped {
                continue;
            }
            let neighbor = *self.block(other);
            self.remove_free(other);
            let merged = &mut self.blocks[id as usize];
            merged.size = merged.size.saturating_add(neighbor.size);
            if before {
                merged.addr = neighbor.addr;
                merged.prev = neighbor.prev;
                if neighbor.prev != NONE {
                    self.blocks[neighbor.prev as usize].next = id;
                }
            } else {
                merged.next = neighbor.next;
                if neighbor.next != NONE {
                    self.blocks[neighbor.next as usize].prev = id;
                }
            }
            self.free_ids.push(other);
        }
    }

    fn insert_free(&mut self, id: Id) {
        let block = *self.block(id);
        let pool = &mut self.pools[block.pool as usize];
        self.blocks[id as usize].searches = pool.searches;
        if block.mapped {
            pool.free.insert((block.stream, block.size, block.addr, id));
        } else {
            pool.unmapped.insert((block.stream, block.addr, id));
        }
    }

    fn remove_free(&mut self, id: Id) {
        let block = *self.block(id);
        let pool = &mut self.pools[block.pool as usize];
        if block.mapped {
            pool.free.remove(&(block.stream, block.size, block.addr, id));
        } else {
            pool.unmapped.remove(&(block.stream, block.addr, id));
        }
    }

    /// Releases an unused segment.
    fn release(&mut self, id: Id) {
        let block = *self.block(id);
        self.remove_free(id);
        self.device.release(block.addr, block.size);
        self.reserved = self.reserved.saturating_sub(block.size);
        self.free_ids.push(id);
    }

    /// Releases blocks above `max_split_size` until the request fits. Returns whether that was enough.
    fn release_oversize(&mut self, pool: u32, stream: u64, size: u64) -> bool {
        let oversize = self.settings.max_split_size;
        if oversize == u64::MAX {
            return false;
        }
        let min_size = size.max(oversize);
        let of_stream = |key: &&(u64, u64, u64, Id)| key.0 == stream;
        let free = &self.pools[pool as usize].free;
        if let Some(key) = free.range((stream, min_size, 0, 0)..).next().filter(of_stream) {
            let id = key.3;
            if !self.block(id).is_split() {
                self.release(id);
            }
            return true;
        }
        let largest_first = free.range(..(stream, min_size, 0, 0)).rev().take_while(of_stream);
        let mut enough = 0u64;
        let mut chosen = Vec::new();
        for key in largest_first.take_while(|key| key.1 >= oversize) {
            if enough >= min_size {
                break;
            }
            enough = enough.saturating_add(key.1);
            chosen.push(key.3);
        }
        chosen.into_iter().for_each(|id| self.release(id));
        enough >= min_size
    }

    /// The free blocks of a pool that can be released: whole segments, and parts of expandable ones.
    fn releasable(&self, pool: u32) -> (Vec<Id>, Vec<Id>) {
        let free = self.pools[pool as usize].free.iter().map(|key| key.3);
        let (parts, whole): (Vec<Id>, Vec<Id>) = free.partition(|id| self.block(*id).expandable());
        (whole.into_iter().filter(|id| !self.block(*id).is_split()).collect(), parts)
    }

    fn release_pool(&mut self, pool: u32) {
        let (whole, parts) = self.releasable(pool);
        whole.into_iter().for_each(|id| self.release(id));
        parts.into_iter().for_each(|id| self.unmap(id));
    }

    /// The whole pages in a free block of an expandable segment: address and bytes.
    fn whole_pages(&self, block: &Block) -> Option<(u64, u64)> {
        let page = self.settings.page_size(self.pools[block.pool as usize].small);
        let (base, _) = block.range;
        let first = (block.addr - base).div_ceil(page).saturating_mul(page);
        let last = (block.addr - base).saturating_add(block.size) / page * page;
        (first < last).then(|| (base + first, last - first))
    }

    fn unmap(&mut self, id: Id) {
        let block = *self.block(id);
        let Some((addr, size)) = self.whole_pages(&block) else { return };
        self.device.unmap(addr, size);
        self.remove_free(id);
        let before = addr - block.addr;
        if before > 0 {
            let new = self.insert(Block { size: before, next: id, ..block });
            if block.prev != NONE {
                self.blocks[block.prev as usize].next = new;
            }
            self.blocks[id as usize].prev = new;
            self.insert_free(new);
        }
        let after = block.size - before - size;
        if after > 0 {
            let new = self.insert(Block { addr: addr + size, size: after, prev: id, ..block });
            if block.next != NONE {
                self.blocks[block.next as usize].prev = new;
            }
            self.blocks[id as usize].next = new;
            self.insert_free(new);
        }
        let range = &mut self.blocks[id as usize];
        (range.addr, range.size, range.mapped) = (addr, size, false);
        self.merge(id);
        self.reserved = self.reserved.saturating_sub(size);
        if self.block(id).is_split() {
            self.insert_free(id);
        } else {
            // Only addresses are left of the segment, and they are released as well.
            self.free_ids.push(id);
        }
    }

    /// Releases unused segments, longest unused first, until reserved memory is at the threshold.
    fn collect_garbage(&mut self) {
        let threshold =
            (self.settings.garbage_collection_threshold * self.allowed_memory_maximum.unwrap_or(0) as f64) as u64;
        let Some(target) = self.reserved.checked_sub(threshold).filter(|target| *target > 0) else { return };
        let pool = self.pool(0, false);
        let searches = self.pools[pool as usize].searches;
        let mut left: Vec<(Id, u64)> = self.pools[pool as usize]
            .free
            .iter()
            .filter(|key| !self.block(key.3).is_split() && !self.block(key.3).expandable())
            .map(|key| (key.3, searches.saturating_sub(self.block(key.3).searches)))
            .collect();
        let mut total: u64 = left.iter().map(|(_, age)| age).sum();
        let (mut reclaimed, mut freed) = (0u64, true);
        while reclaimed < target && freed && !left.is_empty() {
            let threshold = total as f64 / left.len() as f64;
            freed = false;
            let mut young = Vec::new();
            for (id, age) in left {
                if age as f64 >= threshold {
                    freed = true;
                    reclaimed += self.block(id).size;
                    total -= age;
                    self.release(id);
                } else {
                    young.push((id, age));
                }
            }
            left = young;
        }
    }

    fn insert(&mut self, block: Block) -> Id {
        match self.free_ids.pop() {
            Some(id) => {
                self.blocks[id as usize] = block;
                id
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as Id
            }
        }
    }
}

impl Block {
    const fn new(addr: u64, size: u64, stream: u64, pool: u32) -> Block {
        Block {
            addr,
            size,
            stream,
            pool,
            is_used: false,
            mapped: true,
            range: (0, 0),
            searches: 0,
            prev: NONE,
            next: NONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(settings: &str, limit: u64) -> Policy<LimitedDevice> {
        Policy::new(AllocatorSettings::parse(settings), LimitedDevice::new(limit, false))
    }

    fn alloc(policy: &mut Policy<LimitedDevice>, size: u64) -> AllocatedBlock {
        policy.alloc(size, 0, 0).unwrap_or_else(|| panic!("no memory for {size}"))
    }

    /// The examples come from PyTorch's own tests of its settings.
    #[test]
    fn settings_are_parsed_as_pytorch_parses_them() {
        let s = AllocatorSettings::parse(
            "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,\
             roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,\
             pinned_num_register_threads:2",
        );
        assert_eq!((s.max_split_size, s.max_non_split_rounding, s.expandable), (40 * MIB, 30 * MIB, true));
        assert_eq!(s.garbage_collection_threshold, 0.5);
        assert_eq!(s.roundup_power2_divisions, [8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1]);
        let s = AllocatorSettings::parse("roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]");
        assert_eq!(s.roundup_power2_divisions, [8, 8, 8, 8, 8, 8, 8, 8, 16, 1, 0, 8, 2, 2, 2, 2]);
        assert_eq!(AllocatorSettings::parse("roundup_power2_divisions:4").roundup_power2_divisions, [4; 16]);
        let s = AllocatorSettings::parse("large_segment_size_mb:15, max_split_size_mb:20");
        assert_eq!((s.large_segment, s.max_split_size), (15 * MIB, 20 * MIB));
        assert!(!AllocatorSettings::parse("backend:cudaMallocAsync").native);
        for nothing in
            ["", ",", "max_split_size_mb", "max_split_size_mb:", "no:such,:", "roundup_power2_divisions:[64:8"]
        {
            assert_eq!(AllocatorSettings::parse(nothing).max_split_size, u64::MAX, "{nothing}");
        }
    }

    #[test]
    fn requests_are_rounded() {
        let plain = AllocatorSettings::default();
        assert_eq!([0, 1, 512, 513, 1 << 20].map(|size| plain.round(size)), [512, 512, 512, 1024, 1 << 20]);
        let four = AllocatorSettings::parse("roundup_power2_divisions:4");
        assert_eq!(four.round(1200 * MIB), 1280 * MIB);
        assert_eq!(four.round(1280 * MIB), 1280 * MIB);
        assert_eq!(four.round(1024 * MIB), 1024 * MIB);
        // Requests of up to 512 bytes times the divisions are rounded to 512 bytes.
        assert_eq!([1000, 2048, 2600].map(|size| four.round(size)), [1024, 2048, 3072]);
    }

    #[test]
    fn the_best_fitting_block_is_split() {
        let mut p = policy("", u64::MAX);
        let (a, b, c) = (alloc(&mut p, 30 * MIB), alloc(&mut p, 12 * MIB), alloc(&mut p, 20 * MIB));
        assert_eq!(p.reserved(), 62 * MIB);
        [a, b, c].iter().for_each(|one| assert!(p.free(one.addr)));
        assert!(!p.free(a.addr), "twice");
        assert_eq!(alloc(&mut p, 11 * MIB).addr, b.addr);
        // 1 MiB is left over and stays with its block.
        assert_eq!(alloc(&mut p, 19 * MIB), AllocatedBlock { addr: c.addr, size: 20 * MIB });
        assert_eq!(alloc(&mut p, 5 * MIB), AllocatedBlock { addr: a.addr, size: 5 * MIB });
        assert_eq!(alloc(&mut p, 5 * MIB).addr, a.addr + 5 * MIB);
        assert_eq!(p.reserved(), 62 * MIB);
        // Another stream cannot use these segments.
        assert!(p.alloc(MIB, 7, 0).is_some());
        assert_eq!(p.reserved(), 64 * MIB);
    }

    #[test]
    fn oversize_blocks_are_not_split() {
        let mut p = policy("max_split_size_mb:64", 200 * MIB);
        let large = alloc(&mut p, 100 * MIB);
        p.free(large.addr);
        alloc(&mut p, 30 * MIB);
        assert_eq!(p.reserved(), 130 * MIB, "the large block is not split");
        assert_eq!(alloc(&mut p, 90 * MIB), large, "a block that is 10 MiB larger is accepted");
        p.free(large.addr);
        // The oversize block is released for a request that is 20 MiB smaller and does not fit beside it.
        alloc(&mut p, 80 * MIB);
        assert_eq!(p.reserved(), 110 * MIB);
    }

    #[test]
    fn unused_segments_are_released_before_a_request_fails() {
        let mut p = policy("", 100 * MIB);
        let (a, b) = (alloc(&mut p, 40 * MIB), alloc(&mut p, 40 * MIB));
        p.free(a.addr);
        alloc(&mut p, 60 * MIB);
        assert_eq!((p.reserved(), p.peak_reserved()), (100 * MIB, 100 * MIB));
        p.free(b.addr);
        assert!(alloc(&mut p, 10 * MIB).addr == b.addr);
        // A block in use keeps the segment from being released.
        assert_eq!(p.alloc(31 * MIB, 0, 0), None);
        assert_eq!(p.reserved(), 100 * MIB);
    }

    #[test]
    fn expandable_segments_grow_and_shrink_by_pages() {
        let mut p = policy("expandable_segments:True", 100 * MIB);
        let a = alloc(&mut p, 25 * MIB);
        assert_eq!(p.reserved(), 40 * MIB);
        let b = alloc(&mut p, 25 * MIB);
        assert_eq!((b.addr, p.reserved()), (a.addr + 25 * MIB, 60 * MIB));
        p.free(a.addr);
        p.release_cached();
        assert_eq!(p.reserved(), 40 * MIB, "one of two pages holds a part of the other block");
        // The hole is too small, so the segment grows at its end.
        let c = alloc(&mut p, 45 * MIB);
        assert_eq!((c.addr, p.reserved()), (a.addr + 50 * MIB, 80 * MIB));
        // The hole is filled again, together with the page that was kept.
        let d = alloc(&mut p, 22 * MIB);
        assert_eq!((d.addr, p.reserved()), (a.addr, 100 * MIB));
        assert_eq!(p.alloc(6 * MIB, 0, 0), None);
        assert_eq!(alloc(&mut p, 3 * MIB).addr, a.addr + 22 * MIB);
        [b.addr, c.addr, d.addr, a.addr + 22 * MIB].iter().for_each(|addr| assert!(p.free(*addr)));
        p.release_cached();
        assert_eq!(p.reserved(), 0);
    }
}
