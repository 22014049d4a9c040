//! The memory of each module at one point in time.

use super::category::Category;
use super::composition::{Amount, ModulePart};
use super::module_table::ModuleTable;

/// An amount for each category.
pub(super) type Amounts = [Amount; Category::ALL.len()];

/// The memory of one module at one point in time.
#[derive(Clone, Default)]
pub(super) struct NodeMemory {
    /// The class; empty if the module was never called and holds no memory of its own.
    pub(super) class: String,
    /// The memory of the module alone, by category.
    pub(super) own: Amounts,
    /// The memory of the module and of all modules inside it, by category.
    pub(super) whole: Amounts,
    /// The last activation that the module itself allocated: `seq` and bytes.
    last: (u64, u64),
    /// `seq` of the last activation of the module and of all modules inside it.
    last_inside: u64,
    /// Bytes that the module itself allocated after all modules inside it; 0 if one of those allocated last.
    pub(super) output: u64,
    /// Whether the module or one inside it ran under activation checkpointing.
    pub(super) is_checkpointed: bool,
    /// Whether the point in time is in this module or in a module inside it.
    pub(super) is_running: bool,
}

impl NodeMemory {
    /// Adds a part that belongs to the module itself.
    pub(super) fn add(&mut self, category: Category, amount: &Amount) {
        add(&mut self.own, category, amount);
    }

    /// Adds the activations of the module's own call.
    pub(super) fn add_activations(&mut self, part: &ModulePart) {
        self.last = self.last.max(part.last);
        self.is_checkpointed |= part.checkpointed;
    }

    /// The bytes of the module and of all modules inside it.
    pub(super) fn bytes(&self) -> u64 {
        self.whole.iter().map(|amount| amount.bytes).sum()
    }

    /// The activations of the module and of all modules inside it, in bytes.
    pub(super) fn activations(&self) -> u64 {
        self.whole[Category::Activation as usize].bytes
    }
}

fn add(to: &mut Amounts, category: Category, amount: &Amount) {
    let to = &mut to[category as usize];
    to.bytes += amount.bytes;
    to.blocks += amount.blocks;
}

/// Adds up the memory of the modules inside each module.
pub(super) fn add_up(table: &ModuleTable, memory: &mut [NodeMemory]) {
    for (node, known) in memory.iter_mut().zip(table.modules()) {
        node.whole = node.own;
        let is_container = !known.is_called && node.bytes() == 0 && known.parent.is_some();
        if known.is_wrapper || node.class.is_empty() && !is_container {
            node.class = known.class.to_string();
        }
    }
    // A parent has a smaller index than its children.
    for (at, known) in table.modules().iter().enumerate().rev() {
        let node = &mut memory[at];
        if node.last.0 > node.last_inside {
            (node.last_inside, node.output) = node.last;
        }
        let Some(parent) = known.parent else { continue };
        let (parents, inside) = memory.split_at_mut(at);
        let (parent, node) = (&mut parents[parent], &inside[0]);
        for (category, amount) in Category::ALL.iter().zip(&node.whole) {
            add(&mut parent.whole, *category, amount);
        }
        parent.last_inside = parent.last_inside.max(node.last_inside);
        parent.is_checkpointed |= node.is_checkpointed;
        parent.is_running |= node.is_running;
    }
}
