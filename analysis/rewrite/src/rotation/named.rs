//! Which definitions a rotated trace keeps: all that events refer to by id, and the names, holders and reference cycles
//! of blocks in use.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_replay::Replay;
use memtrace_trace::definition::{Definition, TensorKind};
use memtrace_trace::file::Definitions;

/// Decides about the definitions before a cut.
pub(super) struct KeptDefinitions {
    first_seq: u64,
    /// By address: the size and the `seq` of the blocks in use.
    blocks: BTreeMap<u64, (u64, u64)>,
    /// By object and class: the latest number of events at which names of a module were read.
    modules: HashMap<(u64, Box<str>), u64>,
    /// The names of blocks that are kept: `seq` of the block, kind and name.
    names: HashSet<(u64, TensorKind, Box<str>)>,
    /// The scans that found a holder that is kept.
    scans: HashSet<u64>,
}

impl KeptDefinitions {
    /// `replay` is the state at the first kept event.
    pub(super) fn new(definitions: &Definitions, replay: &Replay, first_seq: u64) -> KeptDefinitions {
        let devices = replay.devices().iter();
        let blocks = devices.flat_map(|device| device.allocator.allocated()).map(|(_, b)| (b.addr, (b.size, b.seq)));
        let mut modules = HashMap::new();
        for name in definitions.nn_names.iter().filter(|name| name.seq < first_seq) {
            let latest: &mut u64 = modules.entry((name.object, name.class.clone())).or_default();
            *latest = (*latest).max(name.seq);
        }
        let mut kept = KeptDefinitions {
            first_seq,
            blocks: blocks.collect(),
            modules,
            names: HashSet::new(),
            scans: HashSet::new(),
        };
        let held = definitions.holders.iter().filter(|holder| kept.block_at(holder.address, holder.seq).is_some());
        kept.scans = held.map(|holder| holder.seq).collect();
        kept
    }

    /// The `seq` of the block in use that was at an address after `seq` events.
    fn block_at(&self, address: u64, seq: u64) -> Option<u64> {
        let (start, (size, block)) = self.blocks.range(..=address).next_back()?;
        (address - start < (*size).max(1) && *block <= seq).then_some(*block)
    }

    /// Whether to keep a definition.
    pub(super) fn keeps(&mut self, definition: &Definition<'_>) -> bool {
        let is_new = |seq: u64| seq >= self.first_seq;
        match *definition {
            Definition::Rotation { .. } | Definition::PackedRotation { .. } | Definition::PackedBlock { .. } => false,
            Definition::NnName { object, seq, class, .. } => {
                is_new(seq) || self.modules.get(&(object, class.into())) == Some(&seq)
            }
            Definition::TensorName { address, seq, kind, name, .. } if !is_new(seq) => {
                let Some(block) = self.block_at(address, seq) else { return false };
                self.names.insert((block, kind, name.into()))
            }
            Definition::Cycle { address, seq, .. } | Definition::Holder { address, seq, .. } => {
                is_new(seq) || self.block_at(address, seq).is_some()
            }
            Definition::HolderScan { seq, .. } => is_new(seq) || self.scans.contains(&seq),
            _ => true,
        }
    }
}
