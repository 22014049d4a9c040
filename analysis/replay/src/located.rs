//! Finds the block at an address at one point in time. Some trace records name memory only by its address, and are not
//! events.

use memtrace_trace::event::Event;

use super::allocator::Block;
use super::replay::Replay;
use memtrace_input::Recording;
use memtrace_input::Survey;

/// Replays a recording up to the last of these points in time, and calls `found` for each, in order of time. `at` gives
/// the point in time as a number of events, and the address. `found` receives the device and the block in use that
/// contained the address, or `None`.
pub(super) fn locate<'a, T: 'a>(
    recording: &dyn Recording,
    sought: impl Iterator<Item = &'a T>,
    at: impl Fn(&T) -> (u64, u64),
    mut found: impl FnMut(&'a T, Option<(i16, Block)>),
) {
    let mut waiting: Vec<&T> = sought.collect();
    if waiting.is_empty() {
        return;
    }
    waiting.sort_by_key(|sought| at(sought).0);
    let mut waiting = waiting.into_iter().peekable();
    let survey = Survey::of(recording);
    let mut replay = Replay::new(&survey, None);
    recording.stream(&mut |events: &[Event]| {
        let mut rest = events;
        while let Some(until) = waiting.peek().map(|sought| at(sought).0) {
            let before = rest.partition_point(|e| e.seq <= until);
            let (now, later) = rest.split_at(before);
            now.iter().for_each(|e| replay.apply(e, |_, _, _, _| {}));
            rest = later;
            if rest.is_empty() {
                break;
            }
            let mut inside = Inside::default();
            while let Some(sought) = waiting.next_if(|sought| at(sought).0 == until) {
                found(sought, inside.find(&replay, at(sought).1));
            }
        }
    });
    let mut inside = Inside::default();
    waiting.for_each(|sought| found(sought, inside.find(&replay, at(sought).1)));
}

/// The blocks of one point in time, for addresses at which no block begins.
#[derive(Default)]
struct Inside {
    /// Device and block, by address.
    blocks: Option<Vec<(i16, Block)>>,
}

impl Inside {
    /// The block in use that contains this address.
    fn find(&mut self, replay: &Replay, address: u64) -> Option<(i16, Block)> {
        let begins = |device: &super::DeviceReplay| {
            let block = device.allocator.block(device.allocator.find(address)?);
            block.is_active().then_some((device.device, *block))
        };
        if let Some(found) = replay.devices().iter().find_map(begins) {
            return Some(found);
        }
        let blocks = self.blocks.get_or_insert_with(|| {
            let live = |device: &super::DeviceReplay| {
                let number = device.device;
                device.allocator.allocated().map(move |(_, block)| (number, *block)).collect::<Vec<_>>()
            };
            let mut blocks: Vec<_> = replay.devices().iter().flat_map(live).collect();
            blocks.sort_unstable_by_key(|(_, block)| (block.addr, block.size, block.seq));
            blocks
        });
        let found = *blocks.get(blocks.partition_point(|(_, block)| block.addr <= address).checked_sub(1)?)?;
        (address - found.1.addr < found.1.size).then_some(found)
    }
}
