//! The frames of a snapshot. Each is written once and referred to afterwards.
//!
//! A block of the backward pass has no Python stack of its own, or only the one that called `backward()`. It is shown
//! as
//!
//! ```text
//! [autograd] runs the backward of the call below : 0 : ConvolutionBackward0
//! model.py : 6 : forward
//! train.py : 11 : <module>
//! [autograd] was called from : 0 : backward          only where the thread had Python frames
//! train.py : 12 : <module>
//! ```
//!
//! Frames whose file name begins with [`SYNTHETIC`] are synthetic. The frames between the two are the forward call. The
//! frames after the second are what PyTorch itself would have recorded. Without synthetic frames, all frames are.

use std::collections::HashMap;
use std::io::Write;

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::pickle::{List, Memo, PickleWriter, Word, Words};
use super::sources::SourceFiles;
use memtrace_input::AddressBuildHasher;
use memtrace_replay::Contexts;

/// The prefix of the file names of synthetic frames.
pub const SYNTHETIC: &str = "[autograd]";

const NODE_FILE: &str = "[autograd] runs the backward of the call below";
const NODE_ALONE_FILE: &str = "[autograd] runs";
const CALLER_FILE: &str = "[autograd] was called from";

/// The writer of frames.
pub(super) struct FrameWriter<'a> {
    definitions: &'a Definitions,
    contexts: Contexts,
    sources: SourceFiles,
    strings: HashMap<Box<str>, Memo>,
    frames: Vec<Option<Memo>>,
    stacks: Vec<Option<Memo>>,
    in_context: HashMap<(StackId, ContextId), Memo, AddressBuildHasher>,
    nodes: HashMap<(&'a str, &'static str), Memo>,
    forward: HashMap<StackId, Memo, AddressBuildHasher>,
}

impl<'a> FrameWriter<'a> {
    pub(super) fn new(definitions: &'a Definitions, sources: SourceFiles) -> FrameWriter<'a> {
        FrameWriter {
            definitions,
            contexts: Contexts::of(definitions),
            sources,
            strings: HashMap::new(),
            frames: vec![None; definitions.frames.len()],
            stacks: vec![None; definitions.stacks.len().max(1)],
            in_context: HashMap::default(),
            nodes: HashMap::new(),
            forward: HashMap::default(),
        }
    }

    /// Writes the key `frames`. If the forward call of an autograd node is known, also writes `forward_frames`.
    #[inline]
    pub(super) fn put_keys<W: Write>(
        &mut self,
        out: &mut PickleWriter<W>,
        words: &mut Words,
        stack: StackId,
        context: ContextId,
    ) {
        words.put(out, Word::Frames);
        self.put(out, words, stack, context);
        let forward = self.definitions.context(context).map_or(StackId::NONE, |c| c.forward);
        if !forward.is_none() {
            words.put(out, Word::ForwardFrames);
            self.put_forward(out, forward);
        }
    }

    #[inline]
    fn put<W: Write>(&mut self, out: &mut PickleWriter<W>, words: &mut Words, stack: StackId, context: ContextId) {
        // The call of a module adds no frame, because its stack already contains it.
        if !self.contexts.is_node(context) {
            // A stack that was never defined uses the index of the empty stack.
            let index = if stack.index() < self.stacks.len() { stack.index() } else { 0 };
            match self.stacks[index] {
                Some(memo) => out.get(memo),
                None => {
                    let (mut list, memo) = out.begin_shared_list();
                    self.stacks[index] = Some(memo);
                    self.put_stack(out, words, &mut list, StackId(index as u32));
                    out.end_list(list);
                }
            }
        } else if let Some(memo) = self.in_context.get(&(stack, context)) {
            out.get(*memo);
        } else {
            let (list, memo) = out.begin_shared_list();
            self.in_context.insert((stack, context), memo);
            self.put_in_context(out, words, list, stack, context);
        }
    }

    /// Writes a node's forward call as PyTorch's anomaly mode does: strings in the format of a traceback, outermost
    /// call first.
    fn put_forward<W: Write>(&mut self, out: &mut PickleWriter<W>, stack: StackId) {
        if let Some(memo) = self.forward.get(&stack) {
            out.get(*memo);
            return;
        }
        let (mut list, memo) = out.begin_shared_list();
        self.forward.insert(stack, memo);
        // The frames of anomaly mode are a Python traceback.
        let python = self.definitions.walk(stack).filter_map(|(_, frame)| frame).filter(|frame| !frame.native);
        let mut frames: Vec<_> = python.collect();
        frames.reverse();
        for frame in frames {
            let mut text = format!("  File \"{}\", line {}, in {}\n", frame.filename, frame.line, frame.name);
            if let Some(line) = self.sources.line(&frame.filename, frame.line) {
                text.push_str("    ");
                text.push_str(line);
                text.push('\n');
            }
            out.begin_item(&mut list);
            self.put_string(out, &text);
        }
        out.end_list(list);
    }

    fn put_in_context<W: Write>(
        &mut self,
        out: &mut PickleWriter<W>,
        words: &mut Words,
        mut list: List,
        stack: StackId,
        context: ContextId,
    ) {
        let definitions = self.definitions;
        let (node, forward) =
            definitions.context(context).map_or(("unknown node", StackId::NONE), |c| (&*c.node, c.forward));
        let file = if forward.is_none() { NODE_ALONE_FILE } else { NODE_FILE };
        out.begin_item(&mut list);
        self.put_synthetic(out, words, node, file);
        self.put_stack(out, words, &mut list, forward);
        if !stack.is_none() {
            out.begin_item(&mut list);
            self.put_synthetic(out, words, "backward", CALLER_FILE);
            self.put_stack(out, words, &mut list, stack);
        }
        out.end_list(list);
    }

    fn put_stack<W: Write>(&mut self, out: &mut PickleWriter<W>, words: &mut Words, list: &mut List, stack: StackId) {
        let definitions = self.definitions;
        for (_, frame) in definitions.walk_ids(stack).filter(|(_, id)| definitions.frame(*id).is_some()) {
            out.begin_item(list);
            self.put_frame(out, words, frame);
        }
    }

    fn put_frame<W: Write>(&mut self, out: &mut PickleWriter<W>, words: &mut Words, id: FrameId) {
        if let Some(memo) = self.frames[id.index()] {
            out.get(memo);
            return;
        }
        let frame = &self.definitions.frames[id.index()];
        self.frames[id.index()] = Some(out.begin_shared_dict());
        words.put(out, Word::Name);
        self.put_string(out, &frame.name);
        words.put(out, Word::Filename);
        self.put_string(out, &frame.filename);
        words.put(out, Word::Line);
        out.uint(frame.line.into());
        out.end_dict();
    }

    fn put_synthetic<W: Write>(
        &mut self,
        out: &mut PickleWriter<W>,
        words: &mut Words,
        name: &'a str,
        file: &'static str,
    ) {
        if let Some(memo) = self.nodes.get(&(name, file)) {
            out.get(*memo);
            return;
        }
        self.nodes.insert((name, file), out.begin_shared_dict());
        words.put(out, Word::Name);
        self.put_string(out, name);
        words.put(out, Word::Filename);
        self.put_string(out, file);
        words.put(out, Word::Line);
        out.uint(0);
        out.end_dict();
    }

    fn put_string<W: Write>(&mut self, out: &mut PickleWriter<W>, text: &str) {
        match self.strings.get(text) {
            Some(memo) => out.get(*memo),
            None => {
                let memo = out.shared_str(text);
                self.strings.insert(text.into(), memo);
            }
        }
    }
}
