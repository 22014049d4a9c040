//! A table of all blocks, one line per block, in the order in which their lifetimes end. It has their times, size,
//! source and category, and the rule that decided the category. Names are escaped ([`printable::csv`]), so that a
//! spreadsheet evaluates none of them.

use std::io::{BufWriter, Write};

use memtrace_trace::clock::Calibration;
use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::FrameId;

use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_input::{CompileContexts, printable};
use memtrace_insight::passes::{
    Analysis, BlockAllocation, BlockClassification, BlockObserver, CustomCategorizer, FirstPass,
};
use memtrace_insight::rules::{CustomRules, stands_in_for_kernel};
use memtrace_replay::Names;

/// The columns. Times are nanoseconds since 1970, sizes are bytes. `free_ns` and `free_seq` are empty for blocks that
/// are still allocated at the end.
const COLUMNS: &str = "device,address,size,requested,alloc_ns,free_ns,alloc_seq,free_seq,step,phase,category,\
    rule,evidence,name,module,node,frame,custom_category,compile_context,shape\n";

/// Writes the blocks of one process in a window as CSV (RFC 4180). `custom_rules` give the blocks their custom
/// categories. `progress` receives the number of events read so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn blocks_csv(
    process: &Process,
    window: &Window,
    custom_rules: Option<&CustomRules>,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let recording = process.recording();
    let first_pass = FirstPass::of_process(process);
    let names = &first_pass.names;
    let mut writer = CsvWriter {
        out: BufWriter::new(out),
        definitions: process.definitions(),
        names,
        custom: custom_rules.map(|rules| CustomCategorizer::new(rules, process.definitions(), names)),
        compile_contexts: recording.compile_contexts(),
        calibration: recording.calibration(),
        window,
        error: None,
    };
    writer.put(|out| out.write_all(COLUMNS.as_bytes()));
    Analysis::with_observer(recording, process.trace_index(), &first_pass, &mut writer, progress);
    writer.put(|out| out.flush());
    writer.error.map_or(Ok(()), |e| Err(Error::io("cannot write the table")(e)))
}

struct CsvWriter<'a, W: Write> {
    out: BufWriter<W>,
    definitions: &'a Definitions,
    names: &'a Names,
    custom: Option<CustomCategorizer<'a>>,
    compile_contexts: &'a CompileContexts,
    calibration: Calibration,
    window: &'a Window,
    error: Option<std::io::Error>,
}

impl<W: Write> CsvWriter<'_, W> {
    fn put(&mut self, write: impl FnOnce(&mut BufWriter<W>) -> std::io::Result<()>) {
        if self.error.is_none() {
            self.error = write(&mut self.out).err();
        }
    }

    /// Formats a frame: `train.py:61 step`.
    fn frame(&self, frame: FrameId) -> String {
        match self.definitions.frame(frame) {
            Some(frame) if frame.line > 0 => format!("{}:{} {}", frame.filename, frame.line, frame.name),
            Some(frame) => format!("{} {}", frame.filename, frame.name),
            None => String::new(),
        }
    }
}

impl<W: Write> BlockObserver for CsvWriter<'_, W> {
    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        evidence: FrameId,
        free: Option<&Event>,
    ) {
        let Some(free) = self.window.shows_block(device, block, free) else { return };
        let context = self.definitions.contexts.get(block.site.context.index());
        let node = context.map_or("", |context| &*context.node);
        // A block of a backward node gets the frame of the forward call.
        let stack = match context {
            Some(context) if !context.forward.is_none() => context.forward,
            _ => block.site.stack,
        };
        let mut frames = self.definitions.walk_ids(stack).map(|(_, frame)| frame);
        let is_shown = |id: &FrameId| !self.definitions.frame(*id).is_some_and(stands_in_for_kernel);
        let frame = frames.find(is_shown).unwrap_or(FrameId::NONE);
        let named = self.names.of_allocation(block.seq);
        let name = named.map(|named| named.text()).unwrap_or_default();
        let text = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
        let line = format!(
            "{device},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n",
            block.memory.addr,
            block.memory.size,
            block.memory.requested,
            self.calibration.epoch_ns(block.ticks),
            text(free.map(|e| self.calibration.epoch_ns(e.ticks))),
            block.seq,
            text(free.map(|e| e.seq)),
            text(block.position.step.map(u64::from)),
            block.phase.name(),
            classification.category.name(),
            printable::csv(classification.rule.as_str()),
            printable::csv(&self.frame(evidence)),
            printable::csv(&name),
            printable::csv(&self.names.module_path(block.site.event_context, block.seq).unwrap_or_default()),
            printable::csv(node),
            printable::csv(&self.frame(frame)),
            printable::csv(self.custom.as_ref().and_then(|custom| custom.name_of(block)).unwrap_or_default()),
            printable::csv(self.compile_contexts.text(self.compile_contexts.of(block.seq)).unwrap_or_default()),
            printable::csv(named.map_or("", |named| &*named.shape)),
        );
        self.put(|out| out.write_all(line.as_bytes()));
    }
}
