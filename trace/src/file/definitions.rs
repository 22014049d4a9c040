//! The tables of all definitions in a trace.

use std::collections::{BTreeMap, HashSet};

use crate::definition::{Definition, LabelOrigin, NoticeStatus, TensorKind};
use crate::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
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

/// A position in native code. Its names are determined afterwards from the object's file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct NativeFrame {
    /// The object. `NONE` for code generated at run time.
    pub module: ModuleId,
    /// The return address as an ELF virtual address of the object.
    pub address: u64,
}

/// A loaded object.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Module {
    /// The path as the loader has it.
    pub path: Box<str>,
    /// The GNU build id in lowercase hexadecimal digits. Empty if it has none.
    pub build_id: Box<str>,
}

/// A node of the stack tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StackNode {
    /// The caller's stack.
    pub parent: StackId,
    /// The innermost frame.
    pub frame: FrameId,
}

/// An autograd node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Context {
    /// The node's type.
    pub node: Box<str>,
    /// The stack of the forward call that created it.
    pub forward: StackId,
    /// The `nn.Module` whose call created it, one of [`Definitions::nn_calls`]. `NONE` if unknown.
    pub module: ContextId,
}

/// A call of an `nn.Module`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NnCall {
    /// The call that contains this one. `NONE` for an outermost call. Always smaller than its own id.
    pub caller: ContextId,
    /// The address of the module's Python object.
    pub object: u64,
    /// The name of its class.
    pub class: Box<str>,
}

/// The name of an `nn.Module`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NnName {
    /// The address of the module's Python object.
    pub object: u64,
    /// The number of events when it was read.
    pub seq: u64,
    /// The name of its class.
    pub class: Box<str>,
    /// The path as in `named_modules()`. Empty for the model itself.
    pub name: Box<str>,
}

/// A name of a tensor's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorName {
    /// The address at which the storage begins.
    pub address: u64,
    /// The number of events when it was read. It names the block that was at the address then.
    pub seq: u64,
    /// The tensor's role.
    pub kind: TensorKind,
    /// The name.
    pub name: Box<str>,
    /// Data type and shape. Empty if unknown.
    pub shape: Box<str>,
}

/// A reference cycle that held a tensor's memory until the cyclic garbage collector ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cycle {
    /// The address at which the tensor's storage begins, 0 if unknown.
    pub address: u64,
    /// The number of events when it was read. It held the block that was at the address then.
    pub seq: u64,
    /// The file in the run's folder that shows the objects. Empty if there is none.
    pub file: Box<str>,
    /// The cycle in one line.
    pub text: Box<str>,
}

/// A name that the program gave to a range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// The API that the program used.
    pub origin: LabelOrigin,
    /// The name.
    pub text: Box<str>,
}

/// A thread.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Thread {
    /// The kernel's id.
    pub tid: u32,
    /// The kernel's name.
    pub name: Box<str>,
}

/// A GPU, as the process saw it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Device {
    /// Marketing name.
    pub name: Box<str>,
    /// Its total memory in bytes.
    pub total: u64,
    /// The bytes in use when the process first allocated on it.
    pub used_before: u64,
    /// PCI bus id.
    pub pci: Box<str>,
}

/// What a part of memtrace reported.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Notice {
    /// The part, for example `torch.tracker`.
    pub topic: Box<str>,
    /// A sentence about it.
    pub text: Box<str>,
    /// Whether the part works.
    pub status: NoticeStatus,
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
}

/// Ids are dense except for definitions that were lost. An id must be below twice the number received plus this. A
/// larger one is damage and must not cause an allocation.
const MAX_GAP: usize = 1 << 20;
/// No valid trace has more bytes of definitions: the launcher accepts 256 MiB from one process.
const MAX_BYTES: usize = 512 << 20;

/// Bounds the memory of a trace's definitions: a file of a few kilobytes can decompress to gigabytes.
#[derive(Default, Debug)]
pub(super) struct Bounds {
    bytes: usize,
    frames: usize,
    stacks: usize,
    contexts: usize,
    modules: usize,
    threads: usize,
    notices: HashSet<Notice>,
}

fn set<T: Default + Clone>(table: &mut Vec<T>, received: &mut usize, index: usize, value: T) -> bool {
    if index >= 2 * *received + MAX_GAP || index > MAX_ID as usize {
        return false;
    }
    *received += 1;
    if index >= table.len() {
        table.resize(index + 1, T::default());
    }
    table[index] = value;
    true
}

impl Definitions {
    /// Adds one definition, which was encoded in `bytes` bytes. Returns `false` if its id is invalid or the limit is
    /// reached.
    pub(super) fn add(&mut self, definition: &Definition<'_>, bytes: usize, bounds: &mut Bounds) -> bool {
        bounds.bytes += bytes;
        if bounds.bytes > MAX_BYTES {
            return false;
        }
        match *definition {
            Definition::Frame { id, name, qualname, filename, line, first_line } => {
                let frame = Frame {
                    name: name.into(),
                    qualname: qualname.into(),
                    filename: filename.into(),
                    line,
                    first_line,
                    ..Frame::default()
                };
                set(&mut self.frames, &mut bounds.frames, id.index(), frame)
            }
            // A parent has a smaller id than its child, so a walk to the root ends.
            Definition::Stack { id, parent, frame } => {
                parent < id && set(&mut self.stacks, &mut bounds.stacks, id.index(), StackNode { parent, frame })
            }
            Definition::Context { id, node, forward, module } => {
                let context = Context { node: node.into(), forward, module };
                set(&mut self.contexts, &mut bounds.contexts, id.index(), context)
            }
            // A caller has a smaller id than its callee, so a walk to the outermost call ends.
            Definition::NnCall { id, caller, object, class } => {
                let is_valid = caller < id
                    && (id.index() < self.contexts.len()
                        || set(&mut self.contexts, &mut bounds.contexts, id.index(), Context::default()));
                if is_valid {
                    self.nn_calls.insert(id, NnCall { caller, object, class: class.into() });
                }
                is_valid
            }
            Definition::NnName { object, seq, class, name } => {
                self.nn_names.push(NnName { object, seq, class: class.into(), name: name.into() });
                true
            }
            Definition::TensorName { address, seq, kind, name, shape } => {
                self.tensor_names.push(TensorName { address, seq, kind, name: name.into(), shape: shape.into() });
                true
            }
            Definition::Cycle { address, seq, file, text } => {
                self.cycles.push(Cycle { address, seq, file: file.into(), text: text.into() });
                true
            }
            Definition::Label { id, origin, text } => {
                self.labels.insert(id, Label { origin, text: text.into() });
                true
            }
            Definition::Module { id, path, build_id } => {
                let module = Module { path: path.into(), build_id: build_id.into() };
                set(&mut self.modules, &mut bounds.modules, id.index(), module)
            }
            Definition::NativeFrame { id, module, address } => {
                // Its names come later, if at all. Its entry among the frames is bounded like theirs.
                let is_valid = id.index() < self.frames.len()
                    || set(&mut self.frames, &mut bounds.frames, id.index(), Frame::default());
                if is_valid {
                    self.native_frames.insert(id, NativeFrame { module, address });
                }
                is_valid
            }
            Definition::FrameOrigin { frame, position, name, filename, line } => {
                let (name, filename): (Box<str>, _) = (name.into(), filename.into());
                let origin = Frame { qualname: name.clone(), name, filename, line, ..Frame::default() };
                self.frame_origins.insert((frame, position), origin);
                true
            }
            Definition::Thread { id, tid, name } => {
                set(&mut self.threads, &mut bounds.threads, id.index(), Thread { tid, name: name.into() })
            }
            Definition::Pool { id, pool } => {
                self.pools.insert(id, pool);
                true
            }
            Definition::Device { ordinal, name, total, used_before, pci } => {
                let device = Device { name: name.into(), total, used_before, pci: pci.into() };
                self.devices.insert(ordinal, device);
                true
            }
            Definition::Rank { rank, size } => {
                self.rank.get_or_insert((rank, size));
                true
            }
            Definition::Notice { topic, text, status } => {
                let notice = Notice { topic: topic.into(), text: text.into(), status };
                if bounds.notices.insert(notice.clone()) {
                    self.notices.push(notice);
                }
                true
            }
        }
    }

    /// Makes the origins of lines in generated files follow those lines in every stack. Call it once, after all
    /// definitions are read.
    pub(super) fn insert_frame_origins(&mut self) {
        if self.frame_origins.is_empty() {
            return;
        }
        self.reserve_used_ids();
        let defined = self.frames.len();
        let (mut of, mut last) = (FrameId::NONE, FrameId::NONE);
        for ((frame, _), origin) in &self.frame_origins {
            let is_defined =
                self.frames.get(..defined).and_then(|f| f.get(frame.index())).is_some_and(|f| !f.is_undefined());
            if frame.is_none() || !is_defined {
                continue;
            }
            if of != *frame {
                (of, last) = (*frame, *frame);
            }
            let next = FrameId(self.frames.len() as u32);
            self.frames.push(origin.clone());
            self.frames[last.index()].inlined_into = next;
            last = next;
        }
    }

    /// Extends the table, so that new frames get ids that no stack uses, even an undefined one.
    fn reserve_used_ids(&mut self) {
        let used = self.stacks.iter().map(|node| node.frame.index()).max().unwrap_or(0);
        let used = used.max(self.native_frames.last_key_value().map_or(0, |(id, _)| id.index()));
        if used < self.frames.len() + MAX_GAP {
            self.frames.resize(self.frames.len().max(used + 1), Frame::default());
        }
    }

    /// The frames of a stack, innermost first. Inlined functions and origins are frames of their own. A stack or frame
    /// without a definition (it was lost) ends the walk with a `None`.
    pub fn walk(&self, stack: StackId) -> impl Iterator<Item = (StackId, Option<&Frame>)> {
        self.walk_ids(stack).map(|(stack, frame)| (stack, self.frame(frame)))
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
    /// next. A position without names stays undefined.
    pub fn name_native_frames(&mut self, mut names: impl FnMut(&NativeFrame) -> Vec<Frame>) {
        // Inlined functions get new ids.
        self.reserve_used_ids();
        for (id, place) in &self.native_frames {
            let mut last = *id;
            for (i, frame) in names(place).into_iter().enumerate() {
                let frame = Frame { native: true, inlined_into: FrameId::NONE, ..frame };
                if i == 0 {
                    let Some(place) = self.frames.get_mut(id.index()) else { break };
                    *place = frame;
                } else {
                    let next = FrameId(self.frames.len() as u32);
                    self.frames.push(frame);
                    self.frames[last.index()].inlined_into = next;
                    last = next;
                }
            }
        }
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

    #[test]
    fn origins_follow_the_generated_line() {
        let (mut all, mut bounds) = (Definitions::default(), Bounds::default());
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
            assert!(all.add(definition, 10, &mut bounds));
        }
        all.insert_frame_origins();
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
        let (mut all, mut bounds) = (Definitions::default(), Bounds::default());
        let mut add = |all: &mut Definitions, d: &Definition<'_>| all.add(d, 10, &mut bounds);
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
        all.name_native_frames(|place| {
            assert_eq!(*place, NativeFrame { module: ModuleId(1), address: 9 });
            vec![native("inner"), native("middle"), native("outer")]
        });
        let middle = [(2, "inner".to_owned()), (2, "middle".to_owned()), (2, "outer".to_owned())];
        assert_eq!(names(&all, StackId(2)), [&middle[..], &[(1, "f".into())]].concat());
        assert_eq!(names(&all, StackId(3))[0], (3, "f".into()));
        assert_eq!(names(&all, StackId(7)), [(7, "?".into())]);
        assert_eq!(all.frames.iter().filter(|f| f.native).count(), 3);
    }
}
