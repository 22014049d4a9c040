//! The values that events share, each stored once: texts, frames, stacks, autograd nodes, streams and pools.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use memtrace_trace::file::{Context, Definitions, Frame, NativeFrame, StackNode};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use crate::address_map::AddressBuildHasher;

/// The number of a text of the file.
pub(super) type TextId = u32;

macro_rules! texts {
    ($($name:ident $text:literal),* $(,)?) => {
        /// The numbers of the texts that the format defines.
        pub(super) mod text {
            #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
            #[repr(u32)]
            enum Index { $($name,)* }
            $(pub(in super::super) const $name: u32 = Index::$name as u32;)*
        }
        const FORMAT_TEXTS: &[&str] = &[$($text),*];
    };
}

texts! {
    ALLOC "alloc", FREE_REQUESTED "free_requested", FREE_COMPLETED "free_completed", SEGMENT_ALLOC "segment_alloc",
    SEGMENT_FREE "segment_free", SEGMENT_MAP "segment_map", SEGMENT_UNMAP "segment_unmap", SNAPSHOT "snapshot",
    OOM "oom", ANNOTATE "annotate",
    ACTION "action", ADDR "addr", DEVICE_FREE "device_free", SIZE "size", STREAM "stream", TIME_US "time_us",
    FRAMES "frames", FORWARD_FRAMES "forward_frames", USER_METADATA "user_metadata",
    COMPILE_CONTEXT "compile_context", POOL_ID "pool_id", NAME "name", FILENAME "filename", LINE "line",
    ADDRESS "address", TOTAL_SIZE "total_size", BLOCKS "blocks", DEVICE "device",
    SEGMENT_POOL_ID "segment_pool_id", IS_EXPANDABLE "is_expandable", REQUESTED_SIZE "requested_size", STATE "state",
    HISTORY "history", REAL_SIZE "real_size",
    STAGE "stage", START "START", END "END",
    SEGMENTS "segments", DEVICE_TRACES "device_traces", ALLOCATOR_SETTINGS "allocator_settings",
    HOST_SEGMENTS "host_segments", HOST_TRACES "host_traces",
    EMPTY "", NOT_AVAILABLE "N/A", ACTIVE_ALLOCATED "active_allocated", ACTIVE_PENDING_FREE "active_pending_free",
    ACTIVE_AWAITING_FREE "active_awaiting_free", INACTIVE "inactive",
    CONF "PYTORCH_CUDA_ALLOC_CONF", NEW_CONF "PYTORCH_ALLOC_CONF",
}

/// The memory of an entry in bytes, without its text: in its table, which has up to twice its length, in the hash map
/// that finds it, which is up to four fifths empty while it grows, and in the definitions.
const TEXT_BYTES: usize = 112;
const FRAME_BYTES: usize = 24 + 2 * size_of::<FrameRole>() + 64 + size_of::<Frame>() + 48;
const STACK_NODE_BYTES: usize = 16 + 32;
const STACK_BYTES: usize = 48;
const CONTEXT_BYTES: usize = 16 + 32 + size_of::<Context>() + 16;

/// The highest number of entries in a table, so that ids never overflow.
const MAX_ENTRIES: usize = 1 << 30;

/// The file name of the first frame in our own snapshots that carries an autograd node. `memtrace-output` writes such
/// frames.
pub(super) const NODE_FILE: &str = "[autograd] runs the backward of the call below";
/// The file name of such a frame for a node without a forward call.
pub(super) const NODE_ALONE_FILE: &str = "[autograd] runs";
/// The file name of the frame before the stack that called backward.
pub(super) const CALLER_FILE: &str = "[autograd] was called from";
/// The namespace of PyTorch's autograd nodes, and that of its operators' nodes, which PyTorch's names omit.
const AUTOGRAD: &str = "torch::autograd::";
const OPERATOR_NODES: &str = "torch::autograd::generated::";
/// The start of the names of PyTorch's recorder. Its frames are on top of every stack that it records with C++ frames.
const RECORDER: [&str; 2] = ["torch::unwind::", "torch::CapturedTraceback::"];
/// The part of the names of the functions by which the allocators call the recorder.
const RECORDER_CALLBACK: &str = "::gather_with_cpp";
/// The name of a node of which only the forward call is known.
const UNKNOWN_NODE: &str = "unknown node";

/// The role of a C++ frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameRole {
    /// Nothing in particular.
    Plain,
    /// PyTorch's recorder runs.
    Recorder,
    /// The autograd engine runs the node with this name.
    Node(TextId),
}

impl FrameRole {
    fn of(name: TextId, filename: TextId, texts: &mut Texts) -> FrameRole {
        let (function, filename) = (texts.str(name), texts.str(filename));
        if !function.contains("::") || !is_native(function, filename) {
            return FrameRole::Plain;
        }
        if RECORDER.iter().any(|start| function.starts_with(start)) || function.contains(RECORDER_CALLBACK) {
            return FrameRole::Recorder;
        }
        let Some(node) = node_of(function).map(str::to_owned) else { return FrameRole::Plain };
        FrameRole::Node(texts.id(node.as_bytes()))
    }
}

/// The texts of a file, each once.
struct Texts {
    /// By number.
    all: Vec<Box<str>>,
    /// By hash. Texts of the same hash have the following ones.
    ids: HashMap<u64, TextId, AddressBuildHasher>,
    keys: RandomState,
    /// The approximate memory in use, in bytes.
    bytes: usize,
}

impl Texts {
    /// The number of a text given as bytes. Invalid UTF-8 is replaced.
    fn id(&mut self, bytes: &[u8]) -> TextId {
        let mut hash = self.keys.hash_one(bytes);
        let lossy;
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(_) => {
                lossy = String::from_utf8_lossy(bytes).into_owned();
                hash = self.keys.hash_one(lossy.as_bytes());
                &lossy
            }
        };
        loop {
            match self.ids.get(&hash) {
                Some(id) if *self.all[*id as usize] == *text => return *id,
                Some(_) => hash = hash.wrapping_add(1),
                None => break,
            }
        }
        let id = self.all.len().min(MAX_ENTRIES) as TextId;
        self.ids.insert(hash, id);
        self.all.push(text.into());
        self.bytes += text.len() + TEXT_BYTES;
        id
    }

    /// The text with this number; empty if there is none.
    fn str(&self, id: TextId) -> &str {
        self.all.get(id as usize).map_or("", |t| t)
    }
}

/// The frames of a file: function, file and line.
struct Frames {
    /// By number.
    all: Vec<(TextId, TextId, u32)>,
    ids: HashMap<(TextId, TextId, u32), u32>,
    /// By frame.
    roles: Vec<FrameRole>,
    /// The approximate memory in use, in bytes.
    bytes: usize,
}

impl Frames {
    fn id(&mut self, name: TextId, filename: TextId, line: u32, texts: &mut Texts) -> u32 {
        let next = self.all.len() as u32;
        let id = *self.ids.entry((name, filename, line)).or_insert(next);
        if id == next {
            self.all.push((name, filename, line));
            self.roles.push(FrameRole::of(name, filename, texts));
            // The definition of the frame has its texts: the file can name one long text in every frame.
            self.bytes += FRAME_BYTES + 2 * texts.str(name).len() + texts.str(filename).len();
        }
        id
    }
}

/// The stacks of a file, as a tree.
struct Stacks {
    /// By [`StackId`].
    nodes: Vec<StackNode>,
    /// By parent and frame.
    children: HashMap<(u32, u32), u32, SeededBuildHasher>,
    /// By the hash of all frames. Stacks of the same hash have the following ones.
    by_frames: HashMap<u64, u32, AddressBuildHasher>,
    seed: u64,
    /// The approximate memory in use, in bytes.
    bytes: usize,
}

impl Stacks {
    /// The stack of these frames, innermost first.
    fn id(&mut self, frames: &[u32]) -> StackId {
        if frames.is_empty() {
            return StackId::NONE;
        }
        // Nearly every list of frames has occurred before, so the whole list is looked up first.
        let mut hash = frames.iter().fold(self.seed, |hash, frame| mix(hash, u64::from(*frame)));
        let slot = loop {
            match self.by_frames.get(&hash) {
                Some(stack) if self.has_frames(*stack, frames) => return StackId(*stack),
                Some(_) => hash = hash.wrapping_add(1),
                None => break hash,
            }
        };
        let mut at = 0;
        for frame in frames.iter().rev() {
            let next = self.nodes.len() as u32;
            let id = *self.children.entry((at, *frame)).or_insert(next);
            if id == next {
                self.nodes.push(StackNode { parent: StackId(at), frame: FrameId(*frame) });
                self.bytes += STACK_NODE_BYTES;
            }
            at = id;
        }
        self.by_frames.insert(slot, at);
        self.bytes += STACK_BYTES;
        StackId(at)
    }

    fn has_frames(&self, stack: u32, frames: &[u32]) -> bool {
        let mut at = stack;
        for frame in frames {
            let node = self.nodes[at as usize];
            if at == 0 || node.frame.0 != *frame {
                return false;
            }
            at = node.parent.0;
        }
        at == 0
    }
}

/// The autograd nodes of a file, each with the forward call that made it.
struct Contexts {
    /// By [`ContextId`].
    all: Vec<(TextId, StackId)>,
    ids: HashMap<(TextId, u32), u32>,
    /// The approximate memory in use, in bytes.
    bytes: usize,
}

impl Contexts {
    fn id(&mut self, node: TextId, forward: StackId, texts: &Texts) -> ContextId {
        let next = self.all.len() as u32;
        let id = *self.ids.entry((node, forward.0)).or_insert(next);
        if id == next {
            self.all.push((node, forward));
            // The definition of the context has its text.
            self.bytes += CONTEXT_BYTES + texts.str(node).len();
        }
        ContextId(id)
    }
}

/// The tracebacks of forward calls, which are texts. Each is parsed once.
#[derive(Default)]
struct Tracebacks {
    /// By list of lines: the stack they describe.
    stacks: HashMap<Box<[TextId]>, u32>,
    /// By line: the frame it describes, if it is valid.
    frames: HashMap<TextId, Option<u32>>,
    scratch: Vec<u32>,
    /// The approximate memory in use, in bytes.
    bytes: usize,
}

impl Tracebacks {
    /// The stack that these lines describe. They are outermost first.
    fn stack(&mut self, lines: &[TextId], texts: &mut Texts, frames: &mut Frames, stacks: &mut Stacks) -> StackId {
        if let Some(stack) = self.stacks.get(lines) {
            return StackId(*stack);
        }
        let mut numbers = std::mem::take(&mut self.scratch);
        numbers.clear();
        numbers.extend(lines.iter().rev().filter_map(|line| self.frame(*line, texts, frames)));
        let stack = stacks.id(&numbers);
        self.scratch = numbers;
        self.stacks.insert(lines.into(), stack.0);
        self.bytes += 4 * lines.len() + 96;
        stack
    }

    /// The frame that a line describes.
    fn frame(&mut self, line: TextId, texts: &mut Texts, frames: &mut Frames) -> Option<u32> {
        if let Some(known) = self.frames.get(&line) {
            return *known;
        }
        let parsed = traceback_line(texts.str(line));
        let parsed = parsed.map(|(file, number, name)| (file.to_owned(), number, name.to_owned()));
        let frame = parsed.map(|(file, number, name)| {
            let (file, name) = (texts.id(file.as_bytes()), texts.id(name.as_bytes()));
            frames.id(name, file, number, texts)
        });
        self.frames.insert(line, frame);
        self.bytes += 32;
        frame
    }
}

/// The streams of a file.
struct Streams {
    /// By their number in rows.
    all: Vec<u64>,
    numbers: HashMap<u64, u32>,
    /// The approximate memory in use, in bytes.
    bytes: usize,
}

/// The tables of one snapshot.
pub(super) struct Tables {
    texts: Texts,
    frames: Frames,
    stacks: Stacks,
    contexts: Contexts,
    tracebacks: Tracebacks,
    streams: Streams,
    pool_ids: HashMap<(u64, u64), u16>,
    synthetic_files: [TextId; 3],
}

/// Hashes pairs of small numbers. The file controls them, so the hash has a random seed.
#[derive(Clone, Copy)]
struct SeededBuildHasher(u64);

struct SeededHasher(u64);

impl BuildHasher for SeededBuildHasher {
    type Hasher = SeededHasher;
    fn build_hasher(&self) -> SeededHasher {
        SeededHasher(self.0)
    }
}

#[inline(always)]
fn mix(state: u64, value: u64) -> u64 {
    let wide = u128::from(state ^ value) * u128::from(0x9e37_79b9_7f4a_7c15_u64 ^ state.rotate_left(32) | 1);
    (wide as u64) ^ (wide >> 64) as u64
}

impl Hasher for SeededHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = mix(self.0, u64::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = mix(self.0, u64::from(value));
    }
}

impl Tables {
    pub(super) fn new() -> Tables {
        let keys = RandomState::new();
        let seed = keys.hash_one(7u8) | 1;
        let mut tables = Tables {
            texts: Texts { all: Vec::new(), ids: HashMap::default(), keys, bytes: 0 },
            frames: Frames {
                all: vec![(text::EMPTY, text::EMPTY, 0)],
                ids: HashMap::new(),
                roles: vec![FrameRole::Plain],
                bytes: 0,
            },
            stacks: Stacks {
                nodes: vec![StackNode::default()],
                children: HashMap::with_hasher(SeededBuildHasher(seed)),
                by_frames: HashMap::default(),
                seed,
                bytes: 0,
            },
            contexts: Contexts { all: vec![(text::EMPTY, StackId::NONE)], ids: HashMap::new(), bytes: 0 },
            tracebacks: Tracebacks::default(),
            streams: Streams { all: vec![0], numbers: HashMap::from([(0, 0)]), bytes: 0 },
            pool_ids: HashMap::new(),
            synthetic_files: [0; 3],
        };
        for (i, text) in FORMAT_TEXTS.iter().enumerate() {
            let id = tables.text(text.as_bytes());
            debug_assert_eq!(id as usize, i, "{text}");
        }
        tables.synthetic_files = [NODE_FILE, NODE_ALONE_FILE, CALLER_FILE].map(|file| tables.text(file.as_bytes()));
        tables
    }

    /// The approximate memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.texts.bytes
            + self.frames.bytes
            + self.stacks.bytes
            + self.contexts.bytes
            + self.tracebacks.bytes
            + self.streams.bytes
    }

    /// The number of a text given as bytes. Invalid UTF-8 is replaced.
    pub(super) fn text(&mut self, bytes: &[u8]) -> TextId {
        self.texts.id(bytes)
    }

    /// The text with this number; empty if there is none.
    pub(super) fn str(&self, id: TextId) -> &str {
        self.texts.str(id)
    }

    /// The number of a frame.
    pub(super) fn frame(&mut self, name: TextId, filename: TextId, line: u32) -> u32 {
        self.frames.id(name, filename, line, &mut self.texts)
    }

    /// The stack of these frames, innermost first, and the autograd node that runs. Frames of our own snapshots carry
    /// the node, and so do PyTorch's C++ frames. The frames of PyTorch's recorder are omitted.
    pub(super) fn stack(&mut self, frames: &[u32]) -> (StackId, ContextId) {
        let Frames { all, roles, .. } = &self.frames;
        let file = |at: usize| frames.get(at).map(|f| all[*f as usize].1);
        let [node_file, node_alone_file, caller_file] = self.synthetic_files;
        if file(0) != Some(node_file) && file(0) != Some(node_alone_file) {
            let role = |frame: &u32| roles[*frame as usize];
            let recorder = frames.iter().take_while(|frame| role(frame) == FrameRole::Recorder).count();
            let node =
                frames.iter().find_map(|frame| if let FrameRole::Node(node) = role(frame) { Some(node) } else { None });
            let context = node.map_or(ContextId::NONE, |node| self.contexts.id(node, StackId::NONE, &self.texts));
            return (self.stacks.id(&frames[recorder..]), context);
        }
        let called = (1..frames.len()).find(|at| file(*at) == Some(caller_file));
        let node = all[frames[0] as usize].0;
        let forward = self.stacks.id(&frames[1..called.unwrap_or(frames.len())]);
        let stack = called.map_or(StackId::NONE, |at| self.stacks.id(&frames[at + 1..]));
        (stack, self.contexts.id(node, forward, &self.texts))
    }

    /// The context of a node of which only the forward call is known. The lines of its traceback are outermost first.
    pub(super) fn forward_context(&mut self, lines: &[TextId]) -> ContextId {
        let stack = self.tracebacks.stack(lines, &mut self.texts, &mut self.frames, &mut self.stacks);
        if stack.is_none() {
            return ContextId::NONE;
        }
        let node = self.texts.id(UNKNOWN_NODE.as_bytes());
        self.contexts.id(node, stack, &self.texts)
    }

    /// The streams, by their number in rows.
    pub(super) fn streams(&self) -> &[u64] {
        &self.streams.all
    }

    /// The number of a stream in rows.
    #[inline]
    pub(super) fn stream(&mut self, stream: u64) -> u32 {
        if stream == 0 {
            return 0;
        }
        let Streams { all, numbers, bytes } = &mut self.streams;
        let next = all.len() as u32;
        let number = *numbers.entry(stream).or_insert(next);
        if number == next {
            all.push(stream);
            *bytes += 56;
        }
        number
    }

    /// The id of a pool in events; `None` if there are more pools than ids.
    #[inline]
    pub(super) fn pool(&mut self, pool: (u64, u64)) -> Option<u16> {
        if pool == (0, 0) {
            return Some(0);
        }
        let next = u16::try_from(self.pool_ids.len() + 1).ok();
        match self.pool_ids.get(&pool) {
            Some(id) => Some(*id),
            None => {
                self.pool_ids.insert(pool, next?);
                next
            }
        }
    }

    /// The tables as definitions, and the streams. `default_pool` is true if events carry their pools.
    pub(super) fn into_definitions(self, default_pool: bool) -> (Definitions, Vec<u64>) {
        let mut definitions = Definitions::default();
        for (id, (name, filename, line)) in self.frames.all.iter().enumerate() {
            let (name, filename): (&str, &str) = (self.str(*name), self.str(*filename));
            let native = id > 0 && is_native(name, filename);
            if native {
                definitions.native_frames.insert(FrameId(id as u32), NativeFrame::default());
            }
            definitions.frames.push(Frame {
                name: name.into(),
                qualname: if native { function_name(name).into() } else { name.into() },
                // A frame needs a file name to be recognized as a frame.
                filename: if filename.is_empty() && id > 0 { "??".into() } else { filename.into() },
                line: *line,
                native,
                ..Frame::default()
            });
        }
        definitions.contexts = self
            .contexts
            .all
            .iter()
            .map(|(node, forward)| Context { node: self.str(*node).into(), forward: *forward, ..Context::default() })
            .collect();
        if let Some(none) = definitions.contexts.first_mut() {
            *none = Context::default();
        }
        definitions.stacks = self.stacks.nodes;
        definitions.pools = self.pool_ids.iter().map(|(pool, id)| (*id, *pool)).collect();
        if default_pool {
            definitions.pools.insert(0, (0, 0));
        }
        (definitions, self.streams.all)
    }
}

/// Whether a frame is C++ rather than Python, by its file. PyTorch takes a C++ file from debug information (`x.cpp`) or
/// from the loader (`libtorch.so`, and `bin/python3.14` for an interpreter without debug information), or does not know
/// it (`??`, or empty). Other files without an ending are scripts, `bin/torchrun` for example.
fn is_native(name: &str, filename: &str) -> bool {
    const NATIVE_ENDINGS: [&str; 11] = [".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cuh", ".cu", ".S", ".rs", ".inc"];
    if filename.ends_with(".py") || filename.starts_with('<') {
        return false;
    }
    let is_interpreter = || {
        let version = filename.rsplit('/').next().and_then(|file| file.strip_prefix("python"));
        version.is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | 't' | 'd')))
    };
    filename == "??"
        || filename.is_empty()
        || is_interpreter()
        || NATIVE_ENDINGS.iter().any(|end| filename.ends_with(end))
        || filename.ends_with(".so")
        || filename.contains(".so.")
        || name.contains("::")
        || name == "_start"
        || name == "??"
}

/// The qualified name of a C++ function without its return type, template arguments and parameters:
/// `at::native::gpu_reduce_kernel` for `void at::native::gpu_reduce_kernel<float, 4>(at::TensorIterator&)`.
fn function_name(signature: &str) -> String {
    const ANONYMOUS: &str = "(anonymous namespace)::";
    let (mut name, mut rest, mut depth) = (String::new(), signature, 0u32);
    while let Some(next) = rest.chars().next() {
        let is_operator = name.ends_with("operator");
        let taken = match next {
            '(' if depth == 0 && rest.starts_with(ANONYMOUS) => {
                rest = &rest[ANONYMOUS.len()..];
                continue;
            }
            '(' if depth == 0 && is_operator && rest.starts_with("()") => "()",
            '(' if depth == 0 => break,
            '<' | '>' | '-' if depth == 0 && is_operator => {
                let end = rest.find(|c| !matches!(c, '<' | '>' | '-' | '=')).unwrap_or(rest.len());
                &rest[..end]
            }
            '-' if rest.starts_with("->") => "->",
            _ => &rest[..next.len_utf8()],
        };
        if taken == "<" && !is_operator {
            depth += 1;
        } else if taken == ">" && !is_operator {
            depth = depth.saturating_sub(1);
        } else if depth == 0 {
            name.push_str(taken);
        }
        rest = &rest[taken.len()..];
    }
    name.truncate(name.trim_end().len());
    // A conversion is an operator with a type. What other names have before a space is their return type.
    let end = name.find("operator ").unwrap_or(name.len());
    let from = name[..end].rfind(' ').map_or(0, |at| at + 1);
    let short = name[from..].trim();
    if short.is_empty() { signature.to_owned() } else { short.to_owned() }
}

/// The node that a function of an autograd node belongs to, as `Node::name()` spells it: `AddmmBackward0` for
/// `torch::autograd::generated::AddmmBackward0::apply(...)`. `None` for every other function.
fn node_of(function: &str) -> Option<&str> {
    let class = match function.find("::apply(") {
        Some(end) => &function[..end],
        None => function.strip_suffix("::apply")?,
    };
    let class = class.strip_prefix(OPERATOR_NODES).or(Some(class).filter(|class| class.starts_with(AUTOGRAD)))?;
    (!class.is_empty()).then_some(class)
}

/// Parses a line of a traceback as Python formats it: file, line number and function name.
fn traceback_line(text: &str) -> Option<(&str, u32, &str)> {
    let rest = text.trim_start().strip_prefix("File \"")?;
    let (first, _) = rest.split_once('\n').unwrap_or((rest, ""));
    let (file, rest) = first.rsplit_once("\", line ")?;
    let (number, name) = rest.split_once(", in ").unwrap_or((rest, "<module>"));
    Some((file, number.trim().parse().ok()?, name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traceback_lines_are_parsed() {
        let line = "  File \"/a b/train.py\", line 12, in <module>\n    loss = f(x)\n";
        assert_eq!(traceback_line(line), Some(("/a b/train.py", 12, "<module>")));
        assert_eq!(traceback_line("nonsense"), None);
    }

    #[test]
    fn names_of_functions_have_no_types() {
        for (signature, name) in [
            (
                "void at::native::gpu_reduce_kernel<float, F<bool (float)> >(at::I&, long) [clone .isra.0]",
                "at::native::gpu_reduce_kernel",
            ),
            ("at::(anonymous namespace)::create_out(c10::ArrayRef<long>)", "at::create_out"),
            ("torch::autograd::Node::operator()(std::vector<at::Tensor>&&)", "torch::autograd::Node::operator()"),
            ("std::ostream& operator<< <char>(std::ostream&, char)", "operator<<"),
            ("at::native::sum<&f::operator->>(int)", "at::native::sum"),
            ("c10::Scalar::operator bool() const", "c10::Scalar::operator bool"),
            ("operator new(unsigned long)", "operator new"),
            ("cudaMalloc", "cudaMalloc"),
            ("(", "("),
        ] {
            assert_eq!(function_name(signature), name, "{signature}");
        }
    }

    #[test]
    fn stacks_share_their_callers() {
        let mut tables = Tables::new();
        let name = tables.text(b"f");
        let frames: Vec<u32> = (0..4).map(|line| tables.frame(name, name, line)).collect();
        let (a, _) = tables.stack(&frames);
        let (b, _) = tables.stack(&frames[1..]);
        assert_eq!(tables.stacks.nodes.len(), 5);
        assert_eq!(tables.stacks.nodes[a.index()].parent, b);
        assert_eq!(tables.stack(&frames).0, a);
    }

    #[test]
    fn functions_of_nodes_have_the_name_of_the_node() {
        let apply = |class: &str| format!("{class}::apply(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)");
        let cases = [
            (apply("torch::autograd::generated::AddmmBackward0"), Some("AddmmBackward0")),
            ("torch::autograd::generated::MulBackward0::apply".into(), Some("MulBackward0")),
            (apply("torch::autograd::AccumulateGrad"), Some("torch::autograd::AccumulateGrad")),
            (
                apply("torch::autograd::CppNode<my::(anonymous namespace)::F>"),
                Some("torch::autograd::CppNode<my::(anonymous namespace)::F>"),
            ),
            (apply("mine::Layer"), None),
            ("torch::autograd::generated::MeanBackward0_apply_functional(std::vector<at::Tensor>&&)".into(), None),
            ("torch::autograd::generated::PowBackward0::release_variables()".into(), None),
            ("torch::autograd::Engine::evaluate_function(torch::autograd::Node*)".into(), None),
        ];
        for (function, node) in cases {
            assert_eq!(node_of(&function), node, "{function}");
        }
    }

    #[test]
    fn frames_of_the_recorder_are_omitted_and_the_innermost_node_runs() {
        let mut tables = Tables::new();
        let mut frame = |name: &str, file: &str| {
            let (name, file) = (tables.text(name.as_bytes()), tables.text(file.as_bytes()));
            tables.frame(name, file, 0)
        };
        let recorder = [
            frame("torch::unwind::unwind()", "??"),
            frame("torch::CapturedTraceback::gather(bool, bool, bool)", "??"),
            frame("torch::cuda::(anonymous namespace)::gather_with_cpp()", "memory_snapshot.cpp"),
        ];
        let inner = frame("torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)", "??");
        let outer = frame("torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)", "??");
        let python = frame("train", "train.py");
        let all: Vec<u32> = recorder.into_iter().chain([inner, outer, python]).collect();
        let (stack, context) = tables.stack(&all);
        assert_eq!(tables.stack(&[inner, outer, python]), (stack, context));
        assert_eq!(tables.str(tables.contexts.all[context.index()].0), "MulBackward0");
        assert_eq!(tables.stack(&[recorder[0], python]), tables.stack(&[python]));
        assert_eq!(tables.stack(&recorder), (StackId::NONE, ContextId::NONE));
        let (stack, _) = tables.stack(&[python, recorder[0], inner]);
        assert!(
            tables.stacks.has_frames(stack.0, &[python, recorder[0], inner]),
            "only frames on top are the recorder's"
        );
    }

    #[test]
    fn native_frames_are_recognized_by_their_files() {
        for (name, file) in [
            ("f", "libtorch_cpu.so"),
            ("at::empty", ""),
            ("??", "/lib/libc.so.6"),
            ("g", "VariableType_2.cpp"),
            ("PyEval_EvalCode", "/usr/bin/python3.14t"),
        ] {
            assert!(is_native(name, file), "{name} {file}");
        }
        for (name, file) in [
            ("f", "train.py"),
            ("<module>", "<stdin>"),
            ("cell", "/tmp/ipykernel_7/1"),
            ("backward", CALLER_FILE),
            ("<module>", "/opt/bin/torchrun"),
            ("main", "python_tools"),
        ] {
            assert!(!is_native(name, file), "{name} {file}");
        }
    }
}
