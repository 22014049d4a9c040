//! The names that were reported. A name is reported again only for other memory.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, NoticeStatus, TensorKind};

use super::address_hash::{AddressHasher, BuildAddressHasher};
use super::walk::NameSink;
use crate::cpython::api::PyObjectPtr;
use crate::recording::emit::truncate;
use crate::recording::guard::Guard;
use crate::recording::process::Process;
use crate::recording::watch::Watch;

/// The topic of notices.
pub(super) const TOPIC: &str = "torch.names";
/// Bytes that a pending name occupies beside its text.
const UPDATE_BYTES: usize = 32;
/// Upper bound on the bytes of pending names.
const MAX_PENDING_BYTES: usize = 64 << 20;
/// At most this many reported names are remembered.
const MAX_REPORTED: usize = 1 << 19;

/// The names that were reported and those that are pending.
#[derive(Default)]
pub(super) struct Reported {
    /// Maps a hash of kind, name and address to the number that the address had ([`Watch::free_count_at`]).
    free_counts: HashMap<u64, u16, BuildAddressHasher>,
    /// The watched addresses of the current recording.
    watch: Option<&'static Watch>,
    pending: Vec<PendingUpdate>,
    bytes: usize,
    dropped: u64,
    /// Whether the verification of the layout was reported.
    is_verified: bool,
}

enum PendingUpdate {
    Module { object: u64, class: Box<str>, path: Box<str> },
    Tensor { address: u64, kind: TensorKind, name: Box<str>, shape: Box<str> },
}

impl Reported {
    /// Begins a scan of a process with these watched addresses.
    pub(super) fn begin(&mut self, watch: &'static Watch) {
        self.watch = Some(watch);
        if self.free_counts.len() > MAX_REPORTED {
            self.free_counts.clear();
        }
    }

    /// Writes the pending names to the ring, as of the event `seq`. `is_verified` says that the layout of tensors is
    /// verified, which is reported once.
    pub(super) fn write(&mut self, process: &Process, seq: u64, is_verified: bool) {
        let pending = std::mem::take(&mut self.pending);
        let dropped = std::mem::take(&mut self.dropped);
        process.count(Counter::NamesDropped, dropped);
        if pending.is_empty() && (self.is_verified || !is_verified) {
            return;
        }
        let Some(mut guard) = Guard::enter() else { return self.free_counts.clear() };
        if is_verified && !std::mem::replace(&mut self.is_verified, true) {
            let text = "TensorImpl and StorageImpl verified: PyTorch reports the same memory";
            guard.notice(TOPIC, NoticeStatus::Works, text);
        }
        for update in &pending {
            match update {
                PendingUpdate::Module { object, class, path } => {
                    let (class, name) = (truncate(process, class), truncate(process, path));
                    guard.define(&Definition::NnName { object: *object, seq, class, name });
                }
                PendingUpdate::Tensor { address, kind, name, shape } => {
                    let (name, shape) = (truncate(process, name), truncate(process, shape));
                    guard.define(&Definition::TensorName { address: *address, seq, kind: *kind, name, shape });
                }
            }
        }
    }

    /// Whether this name is new and fits into [`MAX_PENDING_BYTES`].
    fn is_new(&mut self, key: impl Hash, number: u16, bytes: usize) -> bool {
        let mut hash = AddressHasher::default();
        key.hash(&mut hash);
        if self.free_counts.insert(hash.finish(), number) == Some(number) {
            return false;
        }
        let has_room = self.bytes + bytes <= MAX_PENDING_BYTES;
        if has_room {
            self.bytes += bytes;
        } else {
            self.dropped += 1;
        }
        has_room
    }
}

impl NameSink for Reported {
    fn module(&mut self, object: PyObjectPtr, class: &str, path: &str) {
        let object = object.addr() as u64;
        if self.is_new((object, class, path), 0, UPDATE_BYTES + class.len() + path.len()) {
            self.pending.push(PendingUpdate::Module { object, class: class.into(), path: path.into() });
        }
    }

    fn tensor(&mut self, kind: TensorKind, name: &str, address: u64, shape: &dyn Fn() -> String) {
        let number = self.watch.map_or(0, |watch| watch.free_count_at(address));
        if self.is_new((kind, name, address), number, UPDATE_BYTES + name.len()) {
            self.pending.push(PendingUpdate::Tensor { address, kind, name: name.into(), shape: shape().into() });
        }
    }
}
