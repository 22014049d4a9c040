//! Where a process first used each GPU. A first use comes with a CUDA context, which takes memory of the device.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::api::MemoryKind;
use memtrace_trace::event::{Action, Event, UsageOccasion};
use memtrace_trace::ids::{ContextId, ModuleId, StackId};

/// The first use of a device by a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceUse {
    /// The number of the event.
    pub seq: u64,
    /// The stack of the call.
    pub stack: StackId,
    /// The autograd node or module call in which it was made.
    pub context: ContextId,
}

/// The first use of each device, and the devices on which the process opened memory of others.
#[derive(Clone, Debug, Default)]
pub struct DeviceUses {
    /// The first allocations.
    first: BTreeMap<i16, DeviceUse>,
    /// The creations of contexts.
    contexts: BTreeMap<i16, DeviceUse>,
    /// The objects that opened memory of other processes on a device.
    imports: BTreeSet<(i16, ModuleId)>,
    /// The devices of `first` below 64, one bit each: most events are on a device that is known.
    known: u64,
}

impl DeviceUses {
    /// Observes one event.
    #[inline]
    pub fn observe(&mut self, e: &Event) {
        let bit = 1u64.checked_shl(u32::from(e.device.unsigned_abs())).unwrap_or(0);
        if e.device >= 0 && (self.known & bit == 0 || e.api.memory_kind() == Some(MemoryKind::Imported)) {
            self.observe_first(e, bit);
        }
    }

    #[cold]
    fn observe_first(&mut self, e: &Event, bit: u64) {
        let one = DeviceUse { seq: e.seq, stack: e.stack, context: e.context };
        if e.action == Action::DeviceUsage && e.occasion() == UsageOccasion::ContextCreated {
            self.contexts.entry(e.device).or_insert(one);
        }
        // `cuMemMap` maps memory that `cuMemCreate` allocated or that was imported. It needs no context on the device.
        let takes_memory =
            matches!(e.action, Action::Alloc | Action::SegmentAlloc | Action::SegmentMap | Action::Totals);
        if !takes_memory || !e.source.is_torch() && e.result != 0 {
            return;
        }
        if !e.source.is_torch() && e.api.memory_kind() == Some(MemoryKind::Imported) {
            self.imports.insert((e.device, e.module));
            // The memory is another process's, and mapping it needs no context on its device.
            if e.api.retains() {
                return;
            }
        }
        self.known |= bit;
        self.first.entry(e.device).or_insert(one);
    }

    /// The first use of each device, by ordinal: the first allocation, or the creation of a context if there is none.
    pub fn first(&self) -> BTreeMap<i16, DeviceUse> {
        let mut uses = self.contexts.clone();
        uses.extend(&self.first);
        uses
    }

    /// The devices on which the process opened memory of another process (CUDA IPC).
    pub fn imports(&self) -> impl Iterator<Item = i16> {
        self.imports.iter().map(|(device, _)| *device)
    }

    /// The objects that opened memory of another process on this device.
    pub fn importers(&self, device: i16) -> impl Iterator<Item = ModuleId> {
        self.imports.range((device, ModuleId(0))..=(device, ModuleId(u32::MAX))).map(|(_, module)| *module)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::api::Api;
    use memtrace_trace::event::Source;

    #[test]
    fn the_first_successful_use_of_each_device_counts() {
        let driver = Event { source: Source::Driver, api: Api::cuMemAlloc_v2, ..Event::EMPTY };
        let mut uses = DeviceUses::default();
        let events = [
            Event { device: 1, result: 2, ..driver },
            Event { device: -1, api: Api::cuMemHostAlloc, ..driver },
            Event { device: 1, stack: StackId(7), ..driver },
            Event { device: 1, stack: StackId(8), ..driver },
            Event { device: 70, stack: StackId(9), ..driver },
            Event { device: 1, api: Api::cuIpcOpenMemHandle_v2, ..driver },
        ];
        for (seq, e) in (1..).zip(events) {
            uses.observe(&Event { seq, ..e });
        }
        let found: Vec<_> = uses.first().iter().map(|(device, first)| (*device, first.seq, first.stack.0)).collect();
        assert_eq!(found, [(1, 3, 7), (70, 5, 9)]);
        assert_eq!((uses.importers(1).count(), uses.importers(70).count()), (1, 0));
    }

    #[test]
    fn memory_of_another_process_is_mapped_without_a_context() {
        let driver = Event { source: Source::Driver, device: 1, module: ModuleId(4), ..Event::EMPTY };
        let mut uses = DeviceUses::default();
        uses.observe(&Event { api: Api::cuMemImportFromShareableHandle, action: Action::Alloc, ..driver });
        uses.observe(&Event { api: Api::cuMemMap, action: Action::Map, ..driver });
        assert!(uses.first().is_empty());
        assert_eq!(uses.importers(1).collect::<Vec<_>>(), [ModuleId(4)]);
    }

    #[test]
    fn a_context_without_an_allocation_is_a_use() {
        let created = |device, stack| Event {
            device,
            stack: StackId(stack),
            source: Source::Driver,
            action: Action::DeviceUsage,
            stream: UsageOccasion::ContextCreated as u64,
            ..Event::EMPTY
        };
        let mut uses = DeviceUses::default();
        uses.observe(&created(0, 5));
        uses.observe(&created(1, 6));
        let allocation = Event { source: Source::Driver, api: Api::cuMemAlloc_v2, device: 1, ..Event::EMPTY };
        uses.observe(&Event { stack: StackId(7), ..allocation });
        uses.observe(&Event { stream: UsageOccasion::Allocated as u64, ..created(2, 8) });
        let found: Vec<_> = uses.first().into_iter().map(|(device, first)| (device, first.stack.0)).collect();
        assert_eq!(found, [(0, 5), (1, 7)], "an allocation has the line of the program");
    }
}
