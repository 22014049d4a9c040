//! Finds the block at an address at one point in time. Some trace records name memory only by its address, and are not
//! events.

use std::collections::VecDeque;

use super::allocator::Block;
use super::replay::{DeviceReplay, Replay};

/// Finds blocks while a recording is replayed.
#[derive(Clone, Debug)]
pub(super) struct Locator<'a, T> {
    /// In order of time.
    targets: VecDeque<&'a T>,
    /// The point in time of a target as a number of events, and its address.
    at: fn(&T) -> (u64, u64),
    /// The point in time of the next target. `u64::MAX` if there is none.
    next: u64,
    /// The number of blocks that indexes may still have.
    allowance: u64,
}

impl<'a, T> Locator<'a, T> {
    pub(super) fn new(targets: impl Iterator<Item = &'a T>, at: fn(&T) -> (u64, u64)) -> Locator<'a, T> {
        let mut targets: Vec<&T> = targets.collect();
        targets.sort_by_key(|target| at(target).0);
        // In a real recording, few names lie inside of blocks, and they are read together.
        let allowance = INDEXED_BLOCKS + INDEXED_BLOCKS_PER_TARGET * targets.len() as u64;
        let mut locator = Locator { targets: targets.into(), at, next: 0, allowance };
        locator.update_next();
        locator
    }

    /// Whether all targets were found or not found.
    pub(super) fn is_done(&self) -> bool {
        self.targets.is_empty()
    }

    /// The number of events at the next target. `u64::MAX` if there is none.
    pub(super) fn next_point(&self) -> u64 {
        self.next
    }

    /// Calls `found` for each target before the event `seq`, in order of time. `replay` is the state before that event.
    /// `found` receives the device and the block in use that contains the address, or `None`.
    #[inline]
    pub(super) fn before(&mut self, seq: u64, replay: &Replay, found: impl FnMut(&'a T, Option<(i16, Block)>)) {
        if self.next < seq {
            self.find(replay, |at| at < seq, found);
        }
    }

    /// Calls `found` for the other targets. `replay` is the state after the last event.
    pub(super) fn finish(&mut self, replay: &Replay, found: impl FnMut(&'a T, Option<(i16, Block)>)) {
        self.find(replay, |_| true, found);
    }

    fn find(
        &mut self,
        replay: &Replay,
        is_now: impl Fn(u64) -> bool,
        mut found: impl FnMut(&'a T, Option<(i16, Block)>),
    ) {
        let mut block_index = BlockIndex::default();
        while let Some(target) = self.targets.pop_front_if(|target| is_now((self.at)(target).0)) {
            found(target, block_index.find(replay, (self.at)(target).1, &mut self.allowance));
        }
        self.update_next();
    }

    fn update_next(&mut self) {
        self.next = self.targets.front().map_or(u64::MAX, |target| (self.at)(target).0);
    }
}

/// The number of blocks in all indexes of one recording: at least, and for each target. Every point in time with a
/// target inside of a block needs an index of all blocks. When the allowance is used up, such targets are not found.
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
