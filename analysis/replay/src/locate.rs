//! Finds the block at an address at one point in time. Some trace records name memory only by its address, and are not
//! events.

use memtrace_trace::event::Event;

use super::allocator::Block;
use super::replay::{DeviceReplay, Replay};
use memtrace_input::Recording;
use memtrace_input::TraceIndex;

/// Replays a recording up to the last of these points in time, and calls `found` for each, in order of time. `at` gives
/// the point in time as a number of events, and the address. `found` receives the device and the block in use that
/// contained the address, or `None`.
pub(super) fn locate<'a, T: 'a>(
    recording: &dyn Recording,
    trace_index: &TraceIndex,
    targets: impl Iterator<Item = &'a T>,
    at: impl Fn(&T) -> (u64, u64),
    mut found: impl FnMut(&'a T, Option<(i16, Block)>),
) {
    let mut waiting: Vec<&T> = targets.collect();
    if waiting.is_empty() {
        return;
    }
    waiting.sort_by_key(|target| at(target).0);
    // In a real recording, few names lie inside of blocks, and they are read together.
    let mut allowance = INDEXED_BLOCKS + INDEXED_BLOCKS_PER_TARGET * waiting.len() as u64;
    let mut waiting = waiting.into_iter().peekable();
    let mut replay = Replay::new(trace_index, None);
    recording.stream(&mut |events: &[Event]| {
        let mut rest = events;
        while let Some(until) = waiting.peek().map(|target| at(target).0) {
            let before = rest.partition_point(|e| e.seq <= until);
            let (now, later) = rest.split_at(before);
            now.iter().for_each(|e| replay.apply(e, |_, _, _, _| {}));
            rest = later;
            if rest.is_empty() {
                break;
            }
            let mut block_index = BlockIndex::default();
            while let Some(target) = waiting.next_if(|target| at(target).0 == until) {
                found(target, block_index.find(&replay, at(target).1, &mut allowance));
            }
        }
    });
    let mut block_index = BlockIndex::default();
    waiting.for_each(|target| found(target, block_index.find(&replay, at(target).1, &mut allowance)));
}

/// The number of blocks in all indexes of one recording: at least, and for each target. Every point in time with a target
/// inside of a block needs an index of all blocks. When the allowance is used up, such targets are not found.
const INDEXED_BLOCKS: u64 = 64 << 20;
const INDEXED_BLOCKS_PER_TARGET: u64 = 256;

/// The blocks of one point in time, for addresses at which no block begins.
#[derive(Default)]
struct BlockIndex {
    /// Device and block, by address.
    blocks: Option<Vec<(i16, Block)>>,
}

impl BlockIndex {
    /// The block in use that contains this address. An index takes its size from `allowance`.
    fn find(&mut self, replay: &Replay, address: u64, allowance: &mut u64) -> Option<(i16, Block)> {
        let block_at = |device: &DeviceReplay| {
            let block = device.allocator.block(device.allocator.find(address)?);
            block.is_active().then_some((device.device, *block))
        };
        if let Some(found) = replay.devices().iter().find_map(block_at) {
            return Some(found);
        }
        if self.blocks.is_none() && *allowance == 0 {
            return None;
        }
        let blocks = self.blocks.get_or_insert_with(|| {
            let blocks_of = |device: &DeviceReplay| {
                let number = device.device;
                device.allocator.allocated().map(move |(_, block)| (number, *block)).collect::<Vec<_>>()
            };
            let mut blocks: Vec<_> = replay.devices().iter().flat_map(blocks_of).collect();
            blocks.sort_unstable_by_key(|(_, block)| (block.addr, block.size, block.seq));
            *allowance = allowance.saturating_sub(blocks.len() as u64);
            blocks
        });
        let found = *blocks.get(blocks.partition_point(|(_, block)| block.addr <= address).checked_sub(1)?)?;
        (address - found.1.addr < found.1.size).then_some(found)
    }
}
