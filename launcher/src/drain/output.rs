//! The output of one process on its way to the writer: its events, and the definitions that are checked and bounded.

use std::sync::Arc;

use memtrace_analysis::load::{ManifestNotice, Workload};
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::definition::Definition;
use memtrace_trace::event::Event;
use memtrace_trace::shm::validation;

use super::limits::Limits;
use super::writer::{BATCH_EVENTS, Batch, FileKey, Queue};
use crate::metrics::{Figures, ProcessFigures};

/// The definition budget of one process, in bytes.
///
/// The budget covers the encoded definitions and the table entries that a reader allocates for skipped ids. Definitions
/// beyond it are refused and counted.
const DEFINITION_BUDGET: u64 = 256 << 20;
/// Bytes that a reader's table needs for one skipped id.
const TABLE_ENTRY: u64 = 64;
/// Encoded definition bytes after which a batch is sent to the writer.
const BATCH_DEFINITIONS: usize = 64 * 1024;
/// The maximum number of notices kept for the manifest. The trace file contains every notice.
const MAX_NOTICES: usize = 256;
/// The output of one process on its way to the writer.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) key: FileKey,
    pub(super) batch: Batch,
    /// Whether data was sent to the writer since the last flush.
    pub(super) unflushed: bool,
    pub(super) events: u64,
    definition_bytes: u64,
    pub(super) definitions_refused: u64,
    /// The highest id so far in each reader table. [`table`] gives the index.
    highest_ids: [u32; 4],
    pub(super) limits: Limits,
    pub(super) notices: Vec<ManifestNotice>,
    /// The rank and the world size that the process gave to PyTorch.
    pub(super) rank: Option<(u32, u32)>,
    scratch: Vec<u8>,
    figures: Option<LiveFigures>,
}

/// The current figures of a process. They end with this value.
#[derive(Debug)]
pub(super) struct LiveFigures {
    process: Arc<ProcessFigures>,
    all: Figures,
}

impl Drop for LiveFigures {
    fn drop(&mut self) {
        self.all.end(&self.process);
    }
}

impl LiveFigures {
    /// Starts the figures of the process with this trace file.
    pub(super) fn start(figures: &Figures, pid: u32, file: String, workload: &Workload) -> LiveFigures {
        LiveFigures { process: figures.start(pid, file, workload), all: figures.clone() }
    }
}

impl Output {
    /// The output into the trace file `key`, which begins with a clock point.
    pub(super) fn new(key: FileKey, limits: Limits, figures: Option<LiveFigures>) -> Output {
        Output {
            key,
            batch: Batch { clock: Some(ClockPoint::read()), ..Batch::default() },
            unflushed: false,
            events: 0,
            definition_bytes: 0,
            definitions_refused: 0,
            highest_ids: [0; 4],
            limits,
            notices: Vec::new(),
            rank: None,
            scratch: Vec::new(),
            figures,
        }
    }

    pub(super) fn event(&mut self, event: Event, queue: &Queue) {
        self.batch.events.push(event);
        self.events += 1;
        if self.batch.events.len() >= BATCH_EVENTS {
            self.send(queue);
        }
    }

    pub(super) fn send(&mut self, queue: &Queue) {
        self.unflushed |= !self.batch.is_empty();
        self.follow();
        queue.write(self.key, &mut self.batch);
    }

    /// Adds the events of the batch to the current figures.
    pub(super) fn follow(&self) {
        if let Some(figures) = &self.figures {
            figures.process.apply(&self.batch.events);
        }
    }

    /// Checks a definition that came out of a ring and sends it on. Malformed and over-budget definitions are counted.
    pub(super) fn untrusted_definition(&mut self, bytes: &[u8], queue: &Queue) {
        let Some(definition) = validation::decode_definition(bytes) else {
            self.definitions_refused += 1;
            return;
        };
        if let Definition::Rank { rank, size } = definition {
            self.rank.get_or_insert((rank, size));
        }
        if !self.has_table_space(&definition) {
            self.definitions_refused += 1;
            return;
        }
        if let Some(figures) = &self.figures {
            figures.process.define(&definition);
        }
        if let Definition::Notice { topic, text, status } = definition
            && self.notices.len() < MAX_NOTICES
            && self.limits.kept_text.take((topic.len() + text.len()) as u64)
        {
            self.notices.push(ManifestNotice {
                topic: topic.to_owned(),
                text: text.to_owned(),
                status: status.name().to_owned(),
            });
        }
        self.encoded_definition(bytes, queue);
    }

    /// Charges the budget for the ids that this definition skips. Returns false when they do not fit.
    fn has_table_space(&mut self, definition: &Definition<'_>) -> bool {
        let Some((table, id)) = table(definition) else { return true };
        let Some(highest) = self.highest_ids.get_mut(table) else { return false };
        let skipped = TABLE_ENTRY * u64::from(id.saturating_sub(*highest).saturating_sub(1));
        let fits = self.definition_bytes + skipped <= DEFINITION_BUDGET;
        if fits {
            self.definition_bytes += skipped;
            *highest = id.max(*highest);
        }
        fits
    }

    /// Encodes and sends a definition that the launcher itself makes.
    pub(super) fn launcher_definition(&mut self, definition: &Definition<'_>, queue: &Queue) {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        definition.encode(&mut scratch);
        self.encoded_definition(&scratch, queue);
        self.scratch = scratch;
    }

    fn encoded_definition(&mut self, bytes: &[u8], queue: &Queue) {
        if self.definition_bytes + bytes.len() as u64 > DEFINITION_BUDGET {
            self.definitions_refused += 1;
            return;
        }
        self.definition_bytes += bytes.len() as u64;
        self.batch.definitions.extend_from_slice(bytes);
        if self.batch.definitions.len() >= BATCH_DEFINITIONS {
            self.send(queue);
        }
    }
}

/// The index of the reader table that stores this definition, and its id there. `None` for definitions without an id.
fn table(definition: &Definition<'_>) -> Option<(usize, u32)> {
    match *definition {
        Definition::Frame { id, .. } | Definition::NativeFrame { id, .. } => Some((0, id.0)),
        Definition::Stack { id, .. } => Some((1, id.0)),
        Definition::Context { id, .. } | Definition::NnCall { id, .. } => Some((2, id.0)),
        Definition::Module { id, .. } => Some((3, id.0)),
        Definition::FrameOrigin { .. }
        | Definition::Thread { .. }
        | Definition::Pool { .. }
        | Definition::Device { .. }
        | Definition::Rank { .. }
        | Definition::NnName { .. }
        | Definition::TensorName { .. }
        | Definition::Cycle { .. }
        | Definition::EngineAttribute { .. }
        | Definition::CacheUse { .. }
        | Definition::Holder { .. }
        | Definition::HolderScan { .. }
        | Definition::Label { .. }
        | Definition::Rotation { .. }
        | Definition::PackedRotation { .. }
        | Definition::PackedBlock { .. }
        | Definition::Notice { .. } => None,
    }
}
