//! The tables of all definitions in a trace.

use std::collections::{BTreeMap, HashSet};

use super::budget::{Budget, Exceeded};
use crate::definition::Definition;
use crate::definition::owned::{
    CacheUse, Context, Cycle, Device, EngineAttribute, Holder, HolderScan, Label, Module, NativeFrame, NnCall, NnName,
    Notice, StackNode, TensorName, Thread,
};
use crate::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
use crate::rotation::Rotation;
use crate::shm::validation::MAX_ID;

/// One line of one function.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Frame {
    /// The name as in a traceback. For native code, the demangled name.
    pub name: Box<str>,
    /// The qualified name if it is known, otherwise the name. For native code, the name without arguments.
    pub qualname: Box<str>,
    /// The file name in the code object. For native code, the source file or, if unknown, the object.
    pub filename: Box<str>,
    /// The line, 0 if unknown.
    pub line: u32,
    /// The first line of the function, 0 if unknown.
    pub first_line: u32,
    /// Whether this is native code, named by [`Definitions::name_native_frames`].
    pub native: bool,
    /// The frame that follows this one in every stack. It is the one it was inlined into, or the first origin of a line
    /// in a generated file.
    pub inlined_into: FrameId,
}

impl Frame {
    /// Whether this is only an empty entry of the table.
    fn is_undefined(&self) -> bool {
        self.filename.is_empty() && self.name.is_empty()
    }
}

/// All definitions of a trace. Entry 0 of each table means "none".
#[derive(Clone, Debug, Default)]
pub struct Definitions {
    /// By [`FrameId`].
    pub frames: Vec<Frame>,
    /// By [`StackId`].
    pub stacks: Vec<StackNode>,
    /// By [`ContextId`].
    pub contexts: Vec<Context>,
    /// The frames of native code. Before [`Self::name_native_frames`], `frames` has empty entries at their ids.
    pub native_frames: BTreeMap<FrameId, NativeFrame>,
    /// The origins of lines in generated files, by frame and position. The reader adds them to
    /// `frames`.
    pub frame_origins: BTreeMap<(FrameId, u32), Frame>,
    /// Calls of `nn.Module`s: the contexts of events outside backward. `contexts` has empty entries at their ids.
    pub nn_calls: BTreeMap<ContextId, NnCall>,
    /// In order of arrival.
    pub nn_names: Vec<NnName>,
    /// In order of arrival.
    pub tensor_names: Vec<TensorName>,
    /// In order of arrival.
    pub cycles: Vec<Cycle>,
    /// In order of arrival.
    pub holders: Vec<Holder>,
    /// In order of arrival.
    pub holder_scans: Vec<HolderScan>,
    /// By the id in events.
    pub labels: BTreeMap<u32, Label>,
    /// By [`ModuleId`].
    pub modules: Vec<Module>,
    /// By [`ThreadId`].
    pub threads: Vec<Thread>,
    /// PyTorch's `MempoolId_t` by pool id.
    pub pools: BTreeMap<u16, (u64, u64)>,
    /// By ordinal.
    pub devices: BTreeMap<u32, Device>,
    /// The rank and the number of ranks: the first pair that the process gave to PyTorch.
    pub rank: Option<(u32, u32)>,
    /// In order of arrival, without duplicates.
    pub notices: Vec<Notice>,
    /// In order of arrival, without duplicates.
    pub engine_attributes: Vec<EngineAttribute>,
    /// In order of arrival.
    pub cache_uses: Vec<CacheUse>,
    /// The last rotation; `None` if the trace has all events.
    pub rotation: Option<Rotation>,
    /// The state in a rotated trace of version 1.5.
    pub packed_state: Option<PackedState>,
}

/// The state that the analysis keeps of the dropped events, in a rotated trace of version 1.5. The bytes are the
/// analysis's.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PackedState {
    /// The position in the program.
    pub progress: Box<[u8]>,
    /// The blocks that are older than the kept events.
    pub blocks: Vec<Box<[u8]>>,
}

/// The maximum number of distinct attributes of engines. A recording has a few dozen.
const MAX_ENGINE_ATTRIBUTES: usize = 1024;
/// The maximum number of distinct notices of a trace. A recording has a few dozen.
const MAX_NOTICES: usize = 4096;
/// The maximum length of the texts of all notices, in bytes. Reports show them, and a redacted copy searches them for
/// names.
const MAX_NOTICE_BYTES: usize = 1 << 20;
/// Ids are dense except for definitions that were lost. An id must be below twice the number received plus this. A
/// larger one is damage and must not cause an allocation.
const MAX_GAP: usize = 1 << 20;
/// The largest number of frames in a stack, with inlined functions and the origins of generated lines. The recorder
/// walks up to 100,000 Python and 8,192 native frames.
const MAX_STACK_FRAMES: u32 = 1 << 17;
/// The largest number of origins of one generated line. A fused kernel has some dozens.
const MAX_ORIGINS: u32 = 256;
/// The largest nesting depth of `nn.Module` calls. The recorder names modules up to a depth of 100.
const MAX_CALL_DEPTH: u16 = 1024;
/// The allocator's overhead for a text, in bytes.
const TEXT_OVERHEAD: usize = 16;

/// Why a definition is left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// Its id, or an id in it, is invalid.
    Invalid,
    /// A file of this size may not take that much memory or work.
    Exceeded(Exceeded),
}

impl From<Exceeded> for Refusal {
    fn from(exceeded: Exceeded) -> Refusal {
        Refusal::Exceeded(exceeded)
    }
}

/// The memory that the analysis needs for what it decodes from one packed definition, in bytes.
const MAX_UNPACKED: usize = 256;

/// Bounds the memory of a trace's definitions: a file of a few kilobytes can decompress to gigabytes.
#[derive(Debug)]
pub(super) struct Bounds<'a> {
    budget: &'a Budget,
    frames: usize,
    stacks: usize,
    contexts: usize,
    modules: usize,
    threads: usize,
    notices: HashSet<Notice>,
    notice_bytes: usize,
}

impl<'a> Bounds<'a> {
    pub(super) fn new(budget: &'a Budget) -> Bounds<'a> {
        let notices = HashSet::new();
        Bounds { budget, frames: 0, stacks: 0, contexts: 0, modules: 0, threads: 0, notices, notice_bytes: 0 }
    }

    /// Charges an entry of `T` outside the tables, with its texts. A growing vector has up to twice its length, and so
    /// has a tree.
    fn hold<T>(&self, texts: &[&str]) -> Result<(), Exceeded> {
        self.budget.hold((2 * size_of::<T>() + bytes_of(texts)) as u64)
    }

    /// Charges bytes of the analysis. It decodes them into larger values.
    fn hold_bytes(&self, bytes: &[u8]) -> Result<(), Exceeded> {
        self.budget.hold((MAX_UNPACKED + bytes.len() + TEXT_OVERHEAD) as u64)
    }
}

/// The memory of these texts, in bytes.
fn bytes_of(texts: &[&str]) -> usize {
    texts.iter().filter(|text| !text.is_empty()).map(|text| text.len() + TEXT_OVERHEAD).sum()
}

/// Puts a value into a table, and charges the growth of the table.
fn set<T: Default + Clone>(
    table: &mut Vec<T>,
    received: &mut usize,
    index: usize,
    budget: &Budget,
    texts: &[&str],
    value: impl FnOnce() -> T,
) -> Result<(), Refusal> {
    if index >= 2 * *received + MAX_GAP || index > MAX_ID as usize {
        return Err(Refusal::Invalid);
    }
    let growth = (index + 1).saturating_sub(table.len());
    budget.hold((2 * size_of::<T>() * growth + bytes_of(texts)) as u64)?;
    *received += 1;
    if growth > 0 {
        table.resize(index + 1, T::default());
    }
    table[index] = value();
    Ok(())
}

impl Definitions {
    /// Adds one definition. The error says why it is left out.
    pub(super) fn add(&mut self, definition: &Definition<'_>, bounds: &mut Bounds<'_>) -> Result<(), Refusal> {
        let budget = bounds.budget;
        match *definition {
            Definition::Frame { id, name, qualname, filename, line, first_line } => {
                let texts = [name, qualname, filename];
                let frame = || Frame {
                    name: name.into(),
                    qualname: qualname.into(),
                    filename: filename.into(),
                    line,
                    first_line,
                    ..Frame::default()
                };
                set(&mut self.frames, &mut bounds.frames, id.index(), budget, &texts, frame)
            }
            // A parent has a smaller id than its child, so a walk to the root ends.
            Definition::Stack { id, parent, frame } if parent < id => {
                let node = || StackNode { parent, frame };
                set(&mut self.stacks, &mut bounds.stacks, id.index(), budget, &[], node)
            }
            Definition::Stack { .. } => Err(Refusal::Invalid),
            Definition::Context { id, node, forward, module } => {
                let context = || Context { node: node.into(), forward, module };
                set(&mut self.contexts, &mut bounds.contexts, id.index(), budget, &[node], context)
            }
            // A caller has a smaller id than its callee, so a walk to the outermost call ends.
            Definition::NnCall { id, caller, object, class } => {
                if caller >= id {
                    return Err(Refusal::Invalid);
                }
                bounds.hold::<(ContextId, NnCall)>(&[class])?;
                if id.index() >= self.contexts.len() {
                    set(&mut self.contexts, &mut bounds.contexts, id.index(), budget, &[], Context::default)?;
                }
                self.nn_calls.insert(id, NnCall { caller, object, class: class.into() });
                Ok(())
            }
            Definition::NnName { object, seq, class, name } => {
                bounds.hold::<NnName>(&[class, name])?;
                self.nn_names.push(NnName { object, seq, class: class.into(), name: name.into() });
                Ok(())
            }
            Definition::TensorName { address, seq, kind, name, shape } => {
                bounds.hold::<TensorName>(&[name, shape])?;
                self.tensor_names.push(TensorName { address, seq, kind, name: name.into(), shape: shape.into() });
                Ok(())
            }
            Definition::Cycle { address, seq, file, text } => {
                bounds.hold::<Cycle>(&[file, text])?;
                self.cycles.push(Cycle { address, seq, file: file.into(), text: text.into() });
                Ok(())
            }
            Definition::Holder { address, seq, path, shape } => {
                bounds.hold::<Holder>(&[path, shape])?;
                self.holders.push(Holder { address, seq, path: path.into(), shape: shape.into() });
                Ok(())
            }
            Definition::HolderScan { seq, occasion, objects, is_partial } => {
                bounds.hold::<HolderScan>(&[])?;
                self.holder_scans.push(HolderScan { seq, occasion, objects, is_partial });
                Ok(())
            }
            Definition::Label { id, origin, text } => {
                bounds.hold::<(u32, Label)>(&[text])?;
                self.labels.insert(id, Label { origin, text: text.into() });
                Ok(())
            }
            Definition::Module { id, path, build_id } => {
                let module = || Module { path: path.into(), build_id: build_id.into() };
                set(&mut self.modules, &mut bounds.modules, id.index(), budget, &[path, build_id], module)
            }
            Definition::NativeFrame { id, module, address } => {
                bounds.hold::<(FrameId, NativeFrame)>(&[])?;
                // Its names come later, if at all. Its entry among the frames is bounded like theirs.
                if id.index() >= self.frames.len() {
                    set(&mut self.frames, &mut bounds.frames, id.index(), budget, &[], Frame::default)?;
                }
                self.native_frames.insert(id, NativeFrame { module, address });
                Ok(())
            }
            Definition::FrameOrigin { frame, position, name, filename, line } => {
                // Once here and once among the frames.
                bounds.hold::<((FrameId, u32), [Frame; 2])>(&[name, name, name, name, filename, filename])?;
                let (name, filename): (Box<str>, _) = (name.into(), filename.into());
                let origin = Frame { qualname: name.clone(), name, filename, line, ..Frame::default() };
                self.frame_origins.insert((frame, position), origin);
                Ok(())
            }
            Definition::Thread { id, tid, name } => {
                let thread = || Thread { tid, name: name.into() };
                set(&mut self.threads, &mut bounds.threads, id.index(), budget, &[name], thread)
            }
            Definition::Pool { id, pool } => {
                self.pools.insert(id, pool);
                Ok(())
            }
            Definition::Device { ordinal, name, total, used_before, pci } => {
                bounds.hold::<(u32, Device)>(&[name, pci])?;
                let device = Device { name: name.into(), total, used_before, pci: pci.into() };
                self.devices.insert(ordinal, device);
                Ok(())
            }
            Definition::Rank { rank, size } => {
                self.rank.get_or_insert((rank, size));
                Ok(())
            }
            Definition::Rotation { rotation } => {
                (self.rotation, self.packed_state) = (Some(rotation), None);
                Ok(())
            }
            Definition::PackedRotation { rotation, progress } => {
                bounds.hold_bytes(progress)?;
                self.rotation = Some(rotation);
                self.packed_state.get_or_insert_default().progress = progress.into();
                Ok(())
            }
            Definition::PackedBlock { block } => {
                bounds.hold_bytes(block)?;
                self.packed_state.get_or_insert_default().blocks.push(block.into());
                Ok(())
            }
            Definition::EngineAttribute { path, value } => {
                let attribute = EngineAttribute { path: path.into(), value: value.into() };
                if !self.engine_attributes.contains(&attribute) {
                    if self.engine_attributes.len() >= MAX_ENGINE_ATTRIBUTES {
                        return Err(Refusal::Invalid);
                    }
                    bounds.hold::<EngineAttribute>(&[path, value])?;
                    self.engine_attributes.push(attribute);
                }
                Ok(())
            }
            Definition::CacheUse { ticks, used, size, requests, readings, sum, full, preempted, ended } => {
                let cache_use = CacheUse { ticks, used, size, requests, readings, sum, full, preempted, ended };
                if self.cache_uses.last() != Some(&cache_use) {
                    bounds.hold::<CacheUse>(&[])?;
                    self.cache_uses.push(cache_use);
                }
                Ok(())
            }
            Definition::Notice { topic, text, status } => {
                let notice = Notice { topic: topic.into(), text: text.into(), status };
                if !bounds.notices.contains(&notice) {
                    let bytes = bounds.notice_bytes + topic.len() + text.len();
                    if bounds.notices.len() >= MAX_NOTICES || bytes > MAX_NOTICE_BYTES {
                        return Err(Refusal::Invalid);
                    }
                    bounds.notice_bytes = bytes;
                    bounds.hold::<[Notice; 2]>(&[topic, topic, text, text])?;
                    bounds.notices.insert(notice.clone());
                    self.notices.push(notice);
                }
                Ok(())
            }
        }
    }

    /// Completes the tables once all definitions are read: makes origins follow their lines in every stack, and bounds
    /// the length of walks. Returns how many definitions are left out or cut.
    pub(super) fn complete(&mut self, budget: &Budget) -> u64 {
        self.insert_frame_origins(budget) + self.cut_deep_calls() + self.cut_deep_stacks(budget)
    }

    /// Makes the origins of lines in generated files follow those lines in every stack. Returns how many are left out.
    fn insert_frame_origins(&mut self, budget: &Budget) -> u64 {
        if self.frame_origins.is_empty() {
            return 0;
        }
        if !self.reserve_used_ids(budget) {
            return self.frame_origins.len() as u64;
        }
        let defined = self.frames.len();
        let (mut of, mut last, mut count) = (FrameId::NONE, FrameId::NONE, 0);
        let mut left_out = 0;
        for ((frame, _), origin) in &self.frame_origins {
            let is_defined =
                self.frames.get(..defined).and_then(|f| f.get(frame.index())).is_some_and(|f| !f.is_undefined());
            if frame.is_none() || !is_defined {
                continue;
            }
            if of != *frame {
                (of, last, count) = (*frame, *frame, 0);
            }
            if count == MAX_ORIGINS {
                left_out += 1;
                continue;
            }
            count += 1;
            let next = FrameId(self.frames.len() as u32);
            self.frames.push(origin.clone());
            self.frames[last.index()].inlined_into = next;
            last = next;
        }
        left_out
    }

    /// Extends the table, so that new frames get ids that no stack uses, even an undefined one. Returns `false` if the
    /// budget does not allow that.
    fn reserve_used_ids(&mut self, budget: &Budget) -> bool {
        let used = self.stacks.iter().map(|node| node.frame.index()).max().unwrap_or(0);
        let used = used.max(self.native_frames.last_key_value().map_or(0, |(id, _)| id.index()));
        if used >= self.frames.len() && used < self.frames.len() + MAX_GAP {
            let growth = used + 1 - self.frames.len();
            if budget.hold((2 * growth * size_of::<Frame>()) as u64).is_err() {
                return false;
            }
            self.frames.resize(used + 1, Frame::default());
        }
        true
    }

    /// Cuts chains of `nn.Module` calls that are too deep. Returns how many calls lost their caller.
    fn cut_deep_calls(&mut self) -> u64 {
        let mut cut = 0;
        let mut depths: BTreeMap<ContextId, u16> = BTreeMap::new();
        // Without a chain as long as the limit there is nothing to cut.
        if self.nn_calls.len() <= MAX_CALL_DEPTH.into() {
            return 0;
        }
        for (id, call) in &mut self.nn_calls {
            let depth = depths.get(&call.caller).map_or(1, |depth| depth + 1);
            let is_too_deep = depth > MAX_CALL_DEPTH;
            if is_too_deep {
                call.caller = ContextId::NONE;
                cut += 1;
            }
            depths.insert(*id, if is_too_deep { 1 } else { depth });
        }
        cut
    }

    /// Cuts stacks that are too deep, and those that together take too long to walk. Returns how many stacks lost their
    /// callers.
    ///
    /// Each stack without a callee counts with all its frames, because it is in the trace only for its events.
    fn cut_deep_stacks(&mut self, budget: &Budget) -> u64 {
        // A frame that is inlined, or an origin, has a higher id than the frame before it.
        let mut frames_of =
            vec![1u32; if self.frames.iter().any(|f| !f.inlined_into.is_none()) { self.frames.len() } else { 0 }];
        for id in (0..frames_of.len()).rev() {
            let into = self.frames[id].inlined_into.index();
            if into > id && into < frames_of.len() {
                frames_of[id] = frames_of[into].saturating_add(1);
            }
        }
        let mut depths = vec![0u32; self.stacks.len()];
        let mut has_callee = vec![false; self.stacks.len()];
        for node in &self.stacks {
            if let Some(has_callee) = has_callee.get_mut(node.parent.index()) {
                *has_callee = true;
            }
        }
        let mut cut = 0;
        for (id, node) in self.stacks.iter_mut().enumerate().filter(|(_, node)| !node.frame.is_none()) {
            let own = frames_of.get(node.frame.index()).copied().unwrap_or(1);
            let depth = if node.parent.index() < id { depths[node.parent.index()].saturating_add(own) } else { own };
            depths[id] = depth;
            let is_too_deep = depth > MAX_STACK_FRAMES || !has_callee[id] && budget.work(depth.into()).is_err();
            if is_too_deep && !node.parent.is_none() {
                node.parent = StackId::NONE;
                depths[id] = own;
                cut += 1;
            }
        }
        cut
    }

    /// The frames of a stack, innermost first. Inlined functions and origins are frames of their own. A stack or frame
    /// without a definition (it was lost) ends the walk with a `None`.
    pub fn walk(&self, stack: StackId) -> impl Iterator<Item = (StackId, Option<&Frame>)> {
        self.walk_ids(stack).map(|(stack, frame)| (stack, self.frame(frame)))
    }

    /// The call of a module with this id and the calls around it, innermost first. A caller's id is smaller than the id
    /// of the call.
    pub fn nn_call_chain(&self, innermost: ContextId) -> impl Iterator<Item = (ContextId, &NnCall)> {
        let call = |id: ContextId| Some((id, self.nn_calls.get(&id)?));
        std::iter::successors(call(innermost), move |(id, one)| call(one.caller).filter(|(caller, _)| caller < id))
    }

    /// [`Self::walk`] with frame ids. `NONE` for a frame without a definition.
    pub fn walk_ids(&self, stack: StackId) -> impl Iterator<Item = (StackId, FrameId)> {
        let mut at = stack;
        let mut inlined = (StackId::NONE, FrameId::NONE);
        std::iter::from_fn(move || {
            let next = if !inlined.1.is_none() {
                inlined
            } else if at.is_none() {
                return None;
            } else if let Some(node) = self.stacks.get(at.index()).filter(|n| !n.frame.is_none()) {
                (std::mem::replace(&mut at, node.parent), node.frame)
            } else {
                (std::mem::replace(&mut at, StackId::NONE), FrameId::NONE)
            };
            let into = self.frames.get(next.1.index()).map_or(FrameId::NONE, |f| f.inlined_into);
            inlined = (next.0, into);
            Some(next)
        })
    }

    /// Names every native frame. `names` returns the frames for a position, innermost first, each inlined into the
    /// next. A position without names stays undefined. Returns how many stacks were cut, because their inlined
    /// functions would make them too deep.
    pub fn name_native_frames(&mut self, budget: &Budget, mut names: impl FnMut(&NativeFrame) -> Vec<Frame>) -> u64 {
        // Inlined functions get new ids. Without free ids, only the innermost function of each position is named.
        let has_free_ids = self.reserve_used_ids(budget);
        for (id, place) in &self.native_frames {
            let mut last = *id;
            for (i, frame) in names(place).into_iter().enumerate() {
                let frame = Frame { native: true, inlined_into: FrameId::NONE, ..frame };
                if i == 0 {
                    let Some(place) = self.frames.get_mut(id.index()) else { break };
                    *place = frame;
                } else if has_free_ids {
                    let next = FrameId(self.frames.len() as u32);
                    self.frames.push(frame);
                    self.frames[last.index()].inlined_into = next;
                    last = next;
                }
            }
        }
        self.cut_deep_stacks(budget)
    }

    /// A frame by its id. `None` if it has no definition.
    pub fn frame(&self, id: FrameId) -> Option<&Frame> {
        if id.is_none() { None } else { self.frames.get(id.index()).filter(|f| !f.is_undefined()) }
    }

    /// A context by its id. `None` if it has no definition.
    pub fn context(&self, id: ContextId) -> Option<&Context> {
        if id.is_none() { None } else { self.contexts.get(id.index()).filter(|c| !c.node.is_empty()) }
    }

    /// A module's path by its id. `None` if it has no definition.
    pub fn module(&self, id: ModuleId) -> Option<&str> {
        if id.is_none() { None } else { self.modules.get(id.index()).map(|m| &*m.path).filter(|p| !p.is_empty()) }
    }

    /// A thread by its id. `None` if it has no definition.
    pub fn thread(&self, id: ThreadId) -> Option<&Thread> {
        if id.is_none() { None } else { self.threads.get(id.index()).filter(|t| t.tid != 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::{LabelOrigin, ScanOccasion, TensorKind};

    #[test]
    fn origins_follow_the_generated_line() {
        let (mut all, budget) = (Definitions::default(), Budget::default());
        let mut bounds = Bounds::new(&budget);
        let origin = |frame, position, line| {
            let frame = FrameId(frame);
            Definition::FrameOrigin { frame, position, name: "forward", filename: "train.py", line }
        };
        let frame = |id, name| Definition::Frame {
            id: FrameId(id),
            name,
            qualname: name,
            filename: "a.py",
            line: 1,
            first_line: 1,
        };
        let stack = |id, frame| Definition::Stack { id: StackId(id), parent: StackId(id - 1), frame: FrameId(frame) };
        // Origins before their frame, out of order, twice, of a frame that is never defined, and of none.
        let given = [origin(2, 1, 11), origin(2, 0, 10), frame(1, "main"), frame(2, "call"), origin(2, 0, 10)];
        let more = [origin(7, 0, 5), origin(0, 0, 5), stack(1, 1), stack(2, 2), stack(3, 7), stack(4, 2)];
        for definition in given.iter().chain(&more) {
            assert_eq!(all.add(definition, &mut bounds), Ok(()));
        }
        assert_eq!(all.complete(&budget), 0);
        let frames: Vec<_> =
            all.walk(StackId(4)).map(|(id, f)| (id.0, f.map_or(("?", 0), |f| (&*f.name, f.line)))).collect();
        let call = |stack| [(stack, ("call", 1)), (stack, ("forward", 10)), (stack, ("forward", 11))];
        assert_eq!(frames, [&call(4)[..], &[(3, ("?", 0))], &call(2), &[(1, ("main", 1))]].concat());
    }

    fn native(name: &str) -> Frame {
        Frame { name: name.into(), filename: "x.cpp".into(), ..Frame::default() }
    }

    #[test]
    fn inlined_functions_have_their_own_frames() {
        let (mut all, budget) = (Definitions::default(), Budget::default());
        let mut bounds = Bounds::new(&budget);
        let mut add = |all: &mut Definitions, d: &Definition<'_>| all.add(d, &mut bounds).is_ok();
        let frame =
            Definition::Frame { id: FrameId(1), name: "f", qualname: "f", filename: "a.py", line: 1, first_line: 1 };
        assert!(add(&mut all, &frame));
        assert!(add(&mut all, &Definition::NativeFrame { id: FrameId(2), module: ModuleId(1), address: 9 }));
        assert!(!add(&mut all, &Definition::NativeFrame { id: FrameId(u32::MAX), module: ModuleId(1), address: 9 }));
        assert!(add(&mut all, &Definition::Stack { id: StackId(1), parent: StackId(0), frame: FrameId(1) }));
        assert!(add(&mut all, &Definition::Stack { id: StackId(2), parent: StackId(1), frame: FrameId(2) }));
        assert!(add(&mut all, &Definition::Stack { id: StackId(3), parent: StackId(2), frame: FrameId(1) }));
        let names = |all: &Definitions, stack| -> Vec<(u32, String)> {
            all.walk(stack).map(|(id, f)| (id.0, f.map_or("?".to_owned(), |f| f.name.to_string()))).collect()
        };
        assert_eq!(names(&all, StackId(3)), [(3, "f".into()), (2, "?".into()), (1, "f".into())]);
        let cut = all.name_native_frames(&budget, |place| {
            assert_eq!(*place, NativeFrame { module: ModuleId(1), address: 9 });
            vec![native("inner"), native("middle"), native("outer")]
        });
        assert_eq!(cut, 0);
        let middle = [(2, "inner".to_owned()), (2, "middle".to_owned()), (2, "outer".to_owned())];
        assert_eq!(names(&all, StackId(2)), [&middle[..], &[(1, "f".into())]].concat());
        assert_eq!(names(&all, StackId(3))[0], (3, "f".into()));
        assert_eq!(names(&all, StackId(7)), [(7, "?".into())]);
        assert_eq!(all.frames.iter().filter(|f| f.native).count(), 3);
    }
    #[test]
    fn gaps_texts_and_repetitions_are_charged() {
        let long = "x".repeat(1 << 20);
        let many = |definition: &dyn Fn(u32) -> Definition<'static>| {
            let (mut all, budget) = (Definitions::default(), Budget::default());
            let mut bounds = Bounds::new(&budget);
            let added = (1..4_000_000).take_while(|id| all.add(&definition(*id), &mut bounds).is_ok()).count();
            (added, budget.held())
        };
        let long: &'static str = Box::leak(long.into_boxed_str());
        let at = |id| FrameId(id);
        let cases: [&dyn Fn(u32) -> Definition<'static>; 11] = [
            &|id| Definition::Frame { id: at(id), name: long, qualname: "", filename: "", line: 0, first_line: 0 },
            &|id| Definition::NnName { object: 1, seq: id.into(), class: "", name: "" },
            &|_| Definition::TensorName { address: 1, seq: 1, kind: TensorKind::Other, name: long, shape: "" },
            &|_| Definition::Cycle { address: 1, seq: 1, file: "", text: "" },
            &|_| Definition::Holder { address: 1, seq: 1, path: "", shape: "" },
            &|_| Definition::HolderScan { seq: 1, occasion: ScanOccasion::End, objects: 1, is_partial: false },
            &|id| Definition::Label { id, origin: LabelOrigin::Nvtx, text: "" },
            &|id| Definition::FrameOrigin { frame: at(1), position: id, name: "", filename: "", line: 1 },
            &|id| Definition::Device { ordinal: id, name: "", total: 0, used_before: 0, pci: "" },
            &|id| Definition::NativeFrame { id: at(id), module: ModuleId(1), address: 1 },
            &|_| Definition::PackedBlock { block: &[] },
        ];
        for (case, definition) in cases.iter().enumerate() {
            let (added, held) = many(definition);
            assert!(added < 3_999_999 && held <= crate::file::budget::MEMORY_FLOOR, "case {case}: {added} {held}");
        }
        // A table with one entry, after a gap.
        let (mut all, budget) = (Definitions::default(), Budget::default());
        let frame = Definition::NativeFrame { id: FrameId(500_000), module: ModuleId(1), address: 1 };
        assert_eq!(all.add(&frame, &mut Bounds::new(&budget)), Ok(()));
        assert!(budget.held() >= 500_000 * size_of::<Frame>() as u64);
    }

    #[test]
    fn walks_are_bounded() {
        let (mut all, budget) = (Definitions::default(), Budget::default());
        let mut bounds = Bounds::new(&budget);
        let frame =
            Definition::Frame { id: FrameId(1), name: "f", qualname: "f", filename: "a.py", line: 1, first_line: 1 };
        assert_eq!(all.add(&frame, &mut bounds), Ok(()));
        for position in 0..1000 {
            let origin = Definition::FrameOrigin { frame: FrameId(1), position, name: "g", filename: "b.py", line: 1 };
            assert_eq!(all.add(&origin, &mut bounds), Ok(()));
        }
        // One recursion, and then stacks that end in every depth of it.
        const DEPTH: u32 = 2000;
        const STACKS: u32 = 200_000;
        for id in 1..=STACKS {
            let parent = StackId(if id <= DEPTH { id - 1 } else { id % DEPTH });
            assert_eq!(all.add(&Definition::Stack { id: StackId(id), parent, frame: FrameId(1) }, &mut bounds), Ok(()));
        }
        assert!(all.complete(&budget) > 1000 - u64::from(MAX_ORIGINS));
        let frames: usize = (DEPTH + 1..=STACKS).map(|id| all.walk(StackId(id)).count()).sum();
        let limit = crate::file::budget::WORK_FLOOR as usize + (STACKS * (MAX_ORIGINS + 1)) as usize;
        assert!(frames <= limit, "{frames} frames");
        assert!(all.walk(StackId(DEPTH - 1)).count() <= MAX_STACK_FRAMES as usize);

        let (mut all, budget) = (Definitions::default(), Budget::default());
        let mut bounds = Bounds::new(&budget);
        for id in 1..10_000 {
            let call = Definition::NnCall { id: ContextId(id), caller: ContextId(id - 1), object: 1, class: "Block" };
            assert_eq!(all.add(&call, &mut bounds), Ok(()));
        }
        assert_eq!(all.complete(&budget), 9);
        let mut at = ContextId(5000);
        let depth = std::iter::from_fn(|| all.nn_calls.get(&at).map(|call| at = call.caller)).count();
        assert!(depth <= MAX_CALL_DEPTH.into(), "{depth}");
    }
}
