//! Names of tensors and modules. Names of memory become names of allocations; calls of modules become paths.
//!
//! A name carries the address at which it was read, and the number of events so far. It belongs to the block that was
//! there then. [`NameMatcher`] finds it while the recording is replayed up to the last name. Memory use grows with the
//! names.

use std::collections::{HashMap, HashSet};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::{Definitions, NnCall, NnName, TensorName};
use memtrace_trace::ids::{ContextId, StackId};

use super::allocator::Block;
use super::locate::Locator;
use super::replay::Replay;
use memtrace_input::AddressMap;
use memtrace_input::{Process, Recording, TraceIndex};

/// The names of the memory of one allocation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AllocationNames {
    /// The kind of tensor. If several tensors share the memory, the first kind in this order: parameter, buffer,
    /// gradient, optimizer state.
    pub kind: TensorKind,
    /// All distinct names, sorted; at least one.
    pub names: Vec<Box<str>>,
    /// Data type and shape of one of the tensors of that kind, for example `float32[64, 3, 7, 7]`; empty if unknown.
    pub shape: Box<str>,
}

impl AllocationNames {
    fn of(name: &TensorName) -> AllocationNames {
        AllocationNames { kind: name.kind, names: vec![name.name.clone()], shape: name.shape.clone() }
    }

    /// Adds a name. [`Self::sort`] follows when all are known.
    fn add(&mut self, name: &TensorName) {
        if self.names.last() != Some(&name.name) {
            self.names.push(name.name.clone());
        }
        if precedence(name.kind) < precedence(self.kind) {
            (self.kind, self.shape) = (name.kind, name.shape.clone());
        }
    }

    fn sort(&mut self) {
        self.names.sort_unstable();
        self.names.dedup();
    }

    /// All names in one line.
    pub fn text(&self) -> String {
        self.names.join(", ")
    }
}

/// The precedence of a kind; the lowest value wins.
fn precedence(kind: TensorKind) -> u8 {
    match kind {
        TensorKind::Other => u8::MAX,
        kind => kind as u8,
    }
}

/// The names of a recording.
#[derive(Clone, Debug, Default)]
pub struct Names {
    by_allocation: AddressMap<AllocationNames>,
    /// By stack and autograd node: the allocations that have names, in the order in which the names were read. Some
    /// occur twice.
    by_site: HashMap<(StackId, ContextId), Vec<u64>>,
    calls: HashMap<ContextId, NnCall>,
    /// By autograd node: the module call that made it, if known.
    creators: HashMap<ContextId, ContextId>,
    /// By object and class, in order of `seq`; for equal `seq`, the best name first.
    paths: HashMap<u64, HashMap<Box<str>, Vec<NnName>>>,
    unmatched: u64,
    /// The parameters for which an optimizer keeps state.
    with_state: HashSet<Box<str>>,
}

impl Names {
    /// The names of a recording. Streams it if it has names of tensors.
    pub fn of(recording: &dyn Recording) -> Names {
        let matcher = NameMatcher::new(recording.definitions());
        if matcher.is_done() { matcher.names } else { matcher.match_all(recording, &TraceIndex::of(recording)) }
    }

    /// [`Self::of`] the recording of a process, whose index is known.
    pub fn of_process(process: &Process) -> Names {
        NameMatcher::new(process.definitions()).match_all(process.recording(), process.trace_index())
    }

    /// The names of the memory that the event with this `seq` allocated; `None` if it has none.
    pub fn of_allocation(&self, seq: u64) -> Option<&AllocationNames> {
        self.by_allocation.get(&seq)
    }

    /// The named allocations of one stack and autograd node up to and including `until`, in order, without duplicates.
    pub fn of_allocation_site(&self, stack: StackId, context: ContextId, until: u64) -> Vec<(u64, &AllocationNames)> {
        let mut seqs = self.by_site.get(&(stack, context)).cloned().unwrap_or_default();
        seqs.retain(|seq| *seq <= until);
        seqs.sort_unstable();
        seqs.dedup();
        seqs.into_iter().filter_map(|seq| Some((seq, self.by_allocation.get(&seq)?))).collect()
    }

    /// Whether an allocation is the gradient of a parameter for which no optimizer keeps state, while optimizers keep
    /// some for others.
    pub fn is_gradient_without_state(&self, seq: u64) -> bool {
        let has_state = |name: &str| name.strip_suffix(".grad").is_none_or(|of| self.with_state.contains(of));
        let named = self.of_allocation(seq).filter(|named| named.kind == TensorKind::Gradient);
        !self.with_state.is_empty() && named.is_some_and(|named| !named.names.iter().any(|name| has_state(name)))
    }

    /// The number of allocations with names.
    pub fn named_allocations(&self) -> usize {
        self.by_allocation.len()
    }

    /// The number of names at addresses where the recording has no block.
    pub fn unmatched(&self) -> u64 {
        self.unmatched
    }

    /// The path of the `nn.Module` that was being called in this context, or whose call made this autograd node. Paths
    /// are those of `named_modules()` at about `at_seq`.
    ///
    /// The model itself has its class as its path: `GPT`. A module without a name has its class after the nearest named
    /// caller: `layers.0/Linear`, `GPT/Block/Linear`. `None` if the context refers to no module.
    pub fn module_path(&self, context: ContextId, at_seq: u64) -> Option<String> {
        let mut at = self.creators.get(&context).copied().unwrap_or(context);
        let mut parts = Vec::new();
        // The trace reader requires that a caller's id is smaller than the id of its call. So the loop ends.
        while let Some(call) = self.calls.get(&at) {
            match self.path(call, at_seq) {
                Some("") | None => parts.push(&*call.class),
                Some(path) => {
                    parts.push(path);
                    break;
                }
            }
            if self.path(call, at_seq).is_some() {
                break;
            }
            at = call.caller;
        }
        parts.reverse();
        (!parts.is_empty()).then(|| parts.join("/"))
    }

    /// The path of the called module itself, at about `at_seq`: empty for a model. `None` without a name.
    pub fn own_path(&self, call: ContextId, at_seq: u64) -> Option<&str> {
        self.path(self.calls.get(&call)?, at_seq)
    }

    /// The path of a called module, by the name that was read nearest to `at_seq`.
    fn path(&self, call: &NnCall, at_seq: u64) -> Option<&str> {
        self.of_module(call.object, &call.class, at_seq).map(|name| &*name.name)
    }

    /// The name of a module that was read nearest to `at_seq`.
    pub fn of_module(&self, object: u64, class: &str, at_seq: u64) -> Option<&NnName> {
        let names = self.paths.get(&object)?.get(class)?;
        let later = names.partition_point(|name| name.seq < at_seq);
        let next = names.get(later);
        // The first name of the latest `seq` before, which is the best one.
        let before = later.checked_sub(1).and_then(|last| names.get(last));
        let before = before.and_then(|last| names.get(names.partition_point(|name| name.seq < last.seq)));
        before.into_iter().chain(next).min_by_key(|name| name.seq.abs_diff(at_seq))
    }

    fn of_modules(definitions: &Definitions) -> Names {
        let creators = definitions.contexts.iter().enumerate().filter(|(_, c)| !c.module.is_none());
        let mut names = Names {
            calls: definitions.nn_calls.iter().map(|(id, call)| (*id, call.clone())).collect(),
            creators: creators.map(|(id, context)| (ContextId(id as u32), context.module)).collect(),
            ..Names::default()
        };
        for name in &definitions.nn_names {
            let of_object = names.paths.entry(name.object).or_default();
            of_object.entry(name.class.clone()).or_default().push(name.clone());
        }
        for paths in names.paths.values_mut().flat_map(HashMap::values_mut) {
            // If several models contain the module, the name nearest to its root is the best.
            let depth = |name: &NnName| name.name.split('.').count();
            paths.sort_by(|a, b| {
                (a.seq, depth(a), a.name.len(), &a.name).cmp(&(b.seq, depth(b), b.name.len(), &b.name))
            });
            paths.dedup();
        }
        names
    }

    /// Adds a name to the block that was found at its address.
    fn add(&mut self, name: &TensorName, found: Option<(i16, Block)>) {
        let Some((_, block)) = found else {
            self.unmatched += 1;
            return;
        };
        let named = self.by_site.entry((block.stack, block.context)).or_default();
        if named.last() != Some(&block.seq) {
            named.push(block.seq);
        }
        self.by_allocation
            .entry(block.seq)
            .and_modify(|named| named.add(name))
            .or_insert_with(|| AllocationNames::of(name));
    }
}

/// Matches the names of a recording with its blocks while it is replayed.
#[derive(Clone, Debug)]
pub struct NameMatcher<'a> {
    names: Names,
    locator: Locator<'a, TensorName>,
}

impl<'a> NameMatcher<'a> {
    /// For a recording with these definitions.
    pub fn new(definitions: &'a Definitions) -> NameMatcher<'a> {
        let locator = Locator::new(definitions.tensor_names.iter(), |name| (name.seq, name.address));
        NameMatcher { names: Names::of_modules(definitions), locator }
    }

    /// Whether all names are matched, so that no further event is needed.
    pub fn is_done(&self) -> bool {
        self.locator.is_done()
    }

    /// Observes the state before the event `seq`.
    #[inline]
    pub fn before(&mut self, seq: u64, replay: &Replay) {
        let names = &mut self.names;
        self.locator.before(seq, replay, |name, found| names.add(name, found));
    }

    /// Observes the state after the last event.
    pub fn finish(mut self, replay: &Replay) -> Names {
        self.locator.finish(replay, |name, found| self.names.add(name, found));
        let Names { by_allocation, with_state, .. } = &mut self.names;
        by_allocation.values_mut().for_each(AllocationNames::sort);
        let states = by_allocation.values().filter(|named| named.kind == TensorKind::OptimizerState);
        with_state.extend(
            states.flat_map(|named| &named.names).filter_map(|name| Some(name.split_once(" of ")?.1.to_owned().into())),
        );
        self.names
    }

    /// Streams a recording if it has names of tensors.
    fn match_all(mut self, recording: &dyn Recording, trace_index: &TraceIndex) -> Names {
        let mut replay = Replay::new(trace_index, None);
        if !self.is_done() {
            recording.stream(&mut |events| {
                for e in events {
                    self.before(e.seq, &replay);
                    if self.is_done() {
                        break;
                    }
                    replay.apply(e, |_, _, _, _| {});
                }
            });
        }
        self.finish(&replay)
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::api::Api;
    use memtrace_trace::event::{Action, Event, Source};
    use memtrace_trace::file::Context;

    use super::*;
    use memtrace_input::MemoryRecording;

    fn event(seq: u64, action: Action, addr: u64, size: u64) -> Event {
        Event { seq, ticks: seq, addr, size, action, device: 0, ..Event::EMPTY }
    }

    fn name(address: u64, seq: u64, kind: TensorKind, name: &str) -> TensorName {
        TensorName { address, seq, kind, name: name.into(), shape: format!("float32[{seq}]").into() }
    }

    fn recording(events: Vec<Event>, tensor_names: Vec<TensorName>) -> MemoryRecording {
        let definitions = Definitions { tensor_names, ..Definitions::default() };
        MemoryRecording { definitions, events, ..MemoryRecording::default() }
    }

    fn found(names: &Names) -> Vec<(u64, TensorKind, String)> {
        let mut all: Vec<_> = names.by_allocation.iter().map(|(seq, named)| (*seq, named.kind, named.text())).collect();
        all.sort();
        all
    }

    #[test]
    fn a_name_belongs_to_the_block_at_its_address_and_time() {
        use TensorKind::{Gradient, Other, Parameter};
        let events = vec![
            event(1, Action::SegmentAlloc, 0x10000, 2 << 20),
            event(2, Action::Alloc, 0x10000, 1024),
            event(3, Action::Alloc, 0x10400, 512),
            event(4, Action::FreeRequested, 0x10000, 1024),
            event(5, Action::FreeCompleted, 0x10000, 1024),
            event(6, Action::Alloc, 0x10000, 1000),
            event(7, Action::FreeRequested, 0x10400, 512),
            event(8, Action::FreeCompleted, 0x10400, 512),
        ];
        let names = Names::of(&recording(
            events,
            vec![
                // A name read late but listed first; a duplicate; inside a block; at a block's end; where nothing is
                // left.
                name(0x10000, 8, Gradient, "w.grad"),
                name(0x10000, 3, Parameter, "w"),
                name(0x10000, 4, Parameter, "w"),
                name(0x10000, 3, Other, "flat"),
                name(0x103ff, 3, Other, "a view"),
                name(0x10400, 6, Other, "beside"),
                name(0x10400, 8, Other, "gone"),
                name(0x10000, 5, Other, "gone"),
                name(0xfff, 8, Other, "nowhere"),
            ],
        ));
        let text = |text: &str| text.to_owned();
        assert_eq!(
            found(&names),
            [(2, Parameter, text("a view, flat, w")), (3, Other, text("beside")), (6, Gradient, text("w.grad"))]
        );
        assert_eq!((names.unmatched(), names.named_allocations()), (3, 3));
        assert_eq!(&*names.of_allocation(2).unwrap().shape, "float32[3]");
        assert_eq!(names.of_allocation(1), None);
    }

    #[test]
    fn a_name_belongs_to_a_block_and_not_to_its_segment() {
        let call = Event { source: Source::Runtime, api: Api::cudaMalloc, ..event(1, Action::Alloc, 0x10000, 2 << 20) };
        let events = vec![
            call,
            event(2, Action::SegmentAlloc, 0x10000, 2 << 20),
            event(3, Action::Alloc, 0x10000, 1024),
            Event { source: Source::TorchCpu, device: -1, ..event(4, Action::Alloc, 0x7000, 64) },
        ];
        let tensor_names =
            vec![name(0x10000, 4, TensorKind::Buffer, "mean"), name(0x7000, 4, TensorKind::Parameter, "on the CPU")];
        let names = Names::of(&recording(events, tensor_names));
        assert_eq!(found(&names), [(3, TensorKind::Buffer, "mean".to_owned())]);
        assert_eq!(names.unmatched(), 1, "a program that uses a device: its CPU tensors are not looked at");
    }

    #[test]
    fn modules_have_the_path_that_was_read_nearest_in_time() {
        let mut definitions = Definitions::default();
        let mut call = |id, caller, object, class: &str| {
            let call = NnCall { caller: ContextId(caller), object, class: class.into() };
            definitions.nn_calls.insert(ContextId(id), call);
        };
        call(1, 0, 0xa0, "GPT");
        call(2, 1, 0xb0, "Block");
        call(3, 2, 0xc0, "Linear");
        call(4, 3, 0xd0, "Weird");
        call(5, 4, 0xe0, "Linear");
        call(7, 0, 0xf0, "Loss");
        definitions.contexts = vec![Context::default(); 6]
            .into_iter()
            .chain([Context { module: ContextId(2), ..Context::default() }])
            .collect();
        let name =
            |object, seq, class: &str, name: &str| NnName { object, seq, class: class.into(), name: name.into() };
        let unknown = Names::of(&MemoryRecording { definitions: definitions.clone(), ..MemoryRecording::default() });
        assert_eq!(unknown.module_path(ContextId(3), 5).as_deref(), Some("GPT/Block/Linear"));
        definitions.nn_names = vec![
            name(0xa0, 10, "GPT", ""),
            name(0xb0, 10, "Block", "all.them.0"),
            name(0xb0, 10, "Block", "blocks.0"),
            name(0xb0, 90, "Block", "module.blocks.0"),
            name(0xc0, 10, "Linear", "blocks.0.proj"),
            // Another module reuses the object's address.
            name(0xf0, 10, "Linear", "blocks.7"),
        ];
        let names = Names::of(&MemoryRecording { definitions, ..MemoryRecording::default() });
        let path = |context, at| names.module_path(ContextId(context), at);
        assert_eq!(path(1, 5).as_deref(), Some("GPT"));
        assert_eq!(path(2, 5).as_deref(), Some("blocks.0"));
        assert_eq!(path(2, 80).as_deref(), Some("module.blocks.0"));
        assert_eq!(path(3, 80).as_deref(), Some("blocks.0.proj"));
        assert_eq!(path(5, 5).as_deref(), Some("blocks.0.proj/Weird/Linear"));
        assert_eq!(path(6, 5).as_deref(), Some("blocks.0"), "the creator of an autograd node");
        assert_eq!(path(7, 5).as_deref(), Some("Loss"));
        assert_eq!(path(0, 5), None);
        assert_eq!(path(9, 5), None);
    }
}
