//! The `user_metadata` of a block in a snapshot, which viewers show beside its stack.
//!
//! It has the names of the block's tensors with data type and shape: `layer1.0.conv1.weight float32[64, 64, 3, 3]`. A
//! block without names has the module that was being called: `in layer1.0.conv1`. A custom category stands on a line of
//! its own: `custom category: attention`. Each text is written once and referred to afterwards.

use std::collections::HashMap;
use std::io::Write;

use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ContextId;

use super::pickle::{Memo, PickleWriter};
use memtrace_input::AddressBuildHasher;
use memtrace_insight::passes::CustomCategorizer;
use memtrace_insight::rules::CustomRules;
use memtrace_replay::Names;

/// The beginning of the line with the custom category. `memtrace-input` reads such lines.
const CUSTOM_CATEGORY: &str = "custom category: ";

/// The texts of a recording's blocks.
pub(super) struct BlockMetadata<'a> {
    names: &'a Names,
    custom: Option<CustomCategorizer<'a>>,
    written: HashMap<Box<str>, Memo>,
    modules: HashMap<ContextId, Option<Box<str>>, AddressBuildHasher>,
}

impl<'a> BlockMetadata<'a> {
    pub(super) fn new(
        definitions: &'a Definitions,
        names: &'a Names,
        custom_rules: Option<&'a CustomRules>,
    ) -> BlockMetadata<'a> {
        let custom = custom_rules.map(|rules| CustomCategorizer::new(rules, definitions, names));
        BlockMetadata { names, custom, written: HashMap::new(), modules: HashMap::default() }
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
        let own = match self.names.of_allocation(e.seq) {
            Some(block) if block.shape.is_empty() => {
                named = block.text();
                Some(&*named)
            }
            Some(block) => {
                named = format!("{} {}", block.text(), block.shape);
                Some(&*named)
            }
            None if e.context.is_none() => None,
            None => {
                let names = self.names;
                let path = || names.module_path(e.context, e.seq).map(|path| format!("in {path}").into());
                self.modules.entry(e.context).or_insert_with(path).as_deref()
            }
        };
        let category = self.custom.as_ref().and_then(|custom| {
            let rule = custom.rule_of_allocation(e.stack, e.context, e.seq);
            custom.rules().name(custom.category(rule))
        });
        let both;
        let text = match (own, category) {
            (None, None) => return false,
            (Some(own), None) => own,
            (own, Some(category)) => {
                let before = own.map(|own| format!("{own}\n")).unwrap_or_default();
                both = format!("{before}{CUSTOM_CATEGORY}{category}");
                &*both
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
