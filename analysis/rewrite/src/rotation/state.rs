//! Events that recreate the state of all allocators.

use std::collections::BTreeMap;

use memtrace_input::{EventSource, TraceIndex};
use memtrace_replay::{Allocator, Block, BlockState, Change, DeviceReplay, Replay};
use memtrace_trace::event::{Action, Event, Flags, Source};

/// The allocations and the requested frees of the blocks of one device, by the id of the block.
#[derive(Default)]
struct BlockEvents {
    allocated: Vec<Event>,
    freed: Vec<Event>,
}

/// The events of the blocks in use. Memory use grows with these blocks.
#[derive(Default)]
pub(super) struct Blocks(Vec<BlockEvents>);

impl Blocks {
    /// Observes the change of a device's memory.
    #[inline]
    pub(super) fn observe(&mut self, slot: usize, e: &Event, change: &Change) {
        if slot >= self.0.len() {
            self.0.resize_with(slot + 1, BlockEvents::default);
        }
        let events = &mut self.0[slot];
        let (list, id) = match change {
            Change::Alloc(id) => (&mut events.allocated, id),
            Change::FreeRequested(id) => (&mut events.freed, id),
            _ => return,
        };
        if id.index() >= list.len() {
            list.resize(id.index() + 1, Event::EMPTY);
        }
        list[id.index()] = *e;
    }

    /// Events that recreate the segments and the blocks of all devices that PyTorch describes. `at` is the last event.
    pub(super) fn events(&self, replay: &Replay, at: &Event) -> Vec<Event> {
        let mut events = Vec::new();
        for (slot, device) in replay.devices().iter().enumerate() {
            // The calls themselves recreate the blocks of the others.
            if device.source != EventSource::CudaCalls {
                self.add_device(slot, device, at, &mut events);
            }
        }
        events
    }

    fn add_device(&self, slot: usize, device: &DeviceReplay, at: &Event, events: &mut Vec<Event>) {
        let allocator = &device.allocator;
        // By address of a block in use: its events.
        let mut of_blocks = BTreeMap::new();
        for (id, block) in allocator.allocated() {
            let of = |list: fn(&BlockEvents) -> &Vec<Event>| self.0.get(slot).and_then(|of| list(of).get(id.index()));
            let Some(allocated) = of(|of| &of.allocated).filter(|e| e.seq == block.seq && e.addr == block.addr) else {
                continue;
            };
            let mut of_block = vec![with_size(allocated, block, device.source)];
            if block.state == BlockState::PendingFree {
                of_block.extend(of(|of| &of.freed).filter(|e| e.addr == block.addr));
            }
            of_blocks.insert(block.addr, of_block);
        }
        if device.source == EventSource::Torch {
            for segment in
                allocator.segments().iter().filter(|segment| !segment.blocks.iter().any(|b| b.segment.implied))
            {
                let first = segment.blocks.iter().filter(|b| b.is_active()).map(|b| b.seq).min();
                let first = first.and_then(|first| {
                    let inside =
                        of_blocks.range(segment.addr..).take_while(|(addr, _)| **addr - segment.addr < segment.size);
                    inside.flat_map(|(_, of)| of).find(|e| e.seq == first)
                });
                // No later than the first block in it.
                let Event { seq, ticks, .. } = *first.unwrap_or(at);
                events.push(Event {
                    seq,
                    ticks,
                    addr: segment.addr,
                    size: segment.size,
                    stream: segment.stream,
                    stack: segment.stack,
                    context: segment.context,
                    action: if segment.expandable { Action::SegmentMap } else { Action::SegmentAlloc },
                    device: device.device,
                    pool: segment.pool,
                    ..Event::EMPTY
                });
            }
        }
        events.extend(of_blocks.into_values().flatten());
    }
}

/// The allocation of a block, with the size that the allocator gave it.
fn with_size(e: &Event, block: &Block, source: EventSource) -> Event {
    let slack = block.size.checked_sub(e.size).and_then(|slack| u32::try_from(slack).ok());
    match slack.filter(|_| source == EventSource::Torch && !block.segment.implied) {
        Some(slack) => Event { slack, flags: e.flags.with(Flags::SLACK_KNOWN), ..*e },
        None => *e,
    }
}

/// Events after `events`, which recreate `replay` but for what PyTorch's allocators remember of blocks that are not in
/// use any more, and for the totals with which every reader verifies the result. `at` is the last event.
pub(super) fn corrections(replay: &Replay, trace_index: &TraceIndex, events: &[Event], at: &Event) -> Vec<Event> {
    let mut recreated = Replay::new(trace_index, None);
    events.iter().for_each(|e| recreated.apply(e, |_, _, _, _| {}));
    let mut corrections = Vec::new();
    for (device, recreated) in replay.devices().iter().zip(recreated.devices()) {
        let event = Event { device: device.device, flags: Flags::PREEXISTING, ..*at };
        let source = match device.source {
            EventSource::CudaCalls => continue,
            EventSource::Torch => Source::Torch,
            EventSource::TorchReporter => Source::TorchReporter,
            EventSource::TorchCpu => Source::TorchCpu,
        };
        let event = Event { source, ..event };
        if device.source == EventSource::Torch {
            corrections.extend(block_states(&device.allocator, &recreated.allocator, &event));
        }
        let usage = device.allocator.usage();
        corrections.push(Event { action: Action::Totals, addr: usage.allocated, size: usage.reserved, ..event });
    }
    corrections
}

/// The states of blocks that `expected` has and `recreated` lacks.
fn block_states<'a>(
    expected: &'a Allocator,
    recreated: &'a Allocator,
    event: &'a Event,
) -> impl Iterator<Item = Event> + 'a {
    let remembers = |block: &Block| {
        let requested = if block.is_active() { 0 } else { block.requested };
        (requested, block.segment_stack, block.segment_context, block.segment.small)
    };
    expected.blocks().filter_map(move |(_, block)| {
        let (size, stack, context, small) = remembers(block);
        let other = recreated.block(recreated.find(block.addr)?);
        (remembers(other) != remembers(block)).then_some(Event {
            action: Action::BlockState,
            addr: block.addr,
            size,
            stack,
            context,
            slack: small.into(),
            flags: event.flags.with(Flags::SLACK_KNOWN),
            ..*event
        })
    })
}
