//! The `user_metadata` of a block in a snapshot, which viewers show beside its stack.
//!
//! It has the names of the block's tensors with data type and shape: `layer1.0.conv1.weight float32[64, 64, 3, 3]`. A
//! block without names has the module that was being called: `in layer1.0.conv1`. Each text is written once and
//! referred to afterwards.

use std::collections::HashMap;
use std::io::Write;

use memtrace_trace::event::Event;
use memtrace_trace::ids::ContextId;

use super::pickle::{Memo, PickleWriter};
use memtrace_input::{AddressBuildHasher, Recording};
use memtrace_replay::Names;

/// The texts of a recording's blocks.
pub(super) struct BlockMetadata {
    names: Names,
    written: HashMap<Box<str>, Memo>,
    modules: HashMap<ContextId, Option<Box<str>>, AddressBuildHasher>,
}

impl BlockMetadata {
    pub(super) fn of(recording: &dyn Recording) -> BlockMetadata {
        BlockMetadata { names: Names::of(recording), written: HashMap::new(), modules: HashMap::default() }
    }

    /// Writes the text of the block that this event allocated. Returns false if there is none; then nothing is written.
    #[inline]
    pub(super) fn put<W: Write>(
        &mut self,
        out: &mut PickleWriter<W>,
        e: &Event,
        begin: impl FnOnce(&mut PickleWriter<W>),
    ) -> bool {
        let named;
        let text = match self.names.of_allocation(e.seq) {
            Some(block) if block.shape.is_empty() => {
                named = block.text();
                &*named
            }
            Some(block) => {
                named = format!("{} {}", block.text(), block.shape);
                &*named
            }
            None if e.context.is_none() => return false,
            None => {
                let names = &self.names;
                let path = || names.module_path(e.context, e.seq).map(|path| format!("in {path}").into());
                match self.modules.entry(e.context).or_insert_with(path) {
                    Some(text) => &**text,
                    None => return false,
                }
            }
        };
        begin(out);
        match self.written.get(text) {
            Some(memo) => out.get(*memo),
            None => {
                let memo = out.shared_str(text);
                self.written.insert(text.into(), memo);
            }
        }
        true
    }
}
