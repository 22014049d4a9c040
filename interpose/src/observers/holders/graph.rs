//! Which memory the autograd graph of a tensor holds, without running an autograd node or making Python objects of it.
//!
//! The layouts are private to PyTorch, so each is checked at run time. What does not pass is not reported:
//! - *`AutogradMeta`* holds `grad_`, whose address `TensorImpl::grad()` returns, and after it `grad_fn_`.
//! - *`Node`* inherits `std::enable_shared_from_this` (until PyTorch 2.14), so its second word is its own address. All
//!   its edges must lead to such nodes.
//! - *The size of `Node`* is where `AccumulateGrad`, whose only member is a tensor, holds a tensor that Python knows.
//!   All nodes of that type must agree.
//! - *`SavedVariable`* begins with a tensor whose implementation has exactly the vtable that libc10 exports. Null
//!   pointers and flags follow it. Only members of the node's own class are read, which its constructor has
//!   initialized.
//!
//! Nodes written in Python, lists of saved tensors and saved tensors with hooks are skipped.

use std::ffi::{CStr, c_void};

use memtrace_stackwalk::CheckedMemory;

use super::maps::Set;
use crate::observers::tensors::{TensorLayout, TorchSymbols};

/// At most this many nodes are visited in one search.
const MAX_NODES: usize = 1 << 16;
/// The nodes of one search take at most this many bytes.
const MAX_BYTES: usize = 1 << 26;
/// A node with more bytes or more edges is skipped.
const MAX_NODE_BYTES: usize = 1 << 14;
const MAX_EDGES: usize = 1 << 12;
const WORD: usize = size_of::<usize>();
/// Words of a `Node`: its own address, its control block, the first of the three words of its edges, and the first word
/// after those.
const OWN_ADDRESS: usize = 1;
const CONTROL_BLOCK: usize = 2;
const EDGES: usize = 12;
const AFTER_EDGES: usize = 15;
/// The bytes of an edge: a shared pointer and the number of the input.
const EDGE_BYTES: usize = 24;
/// The bytes of a control block that is allocated together with its node.
const CONTROL_BYTES: usize = 16;
/// Words of a `SavedVariable` after its tensor: `fw_grad_` and the flags.
const FORWARD_GRADIENT: [usize; 2] = [1, 2];
const FLAGS: usize = 6;
/// The flags are this many bytes. The first one is set if nothing is saved.
const FLAG_BYTES: usize = 5;
/// The end of an allocation may be larger than the node: this many words there are no tensors.
const END_WORDS: usize = 4;
/// `torch::autograd::AccumulateGrad` in its C++ type info.
const ACCUMULATE_GRAD: &[u8; 34] = b"N5torch8autograd14AccumulateGradE\0";

/// A tensor with a graph: a number that the caller gives it, and its node.
struct Start {
    tensor: u32,
    node: usize,
}

/// One autograd node.
struct GraphNode {
    tensor: u32,
    words: Vec<usize>,
}

/// The memory that graphs hold.
#[derive(Default)]
pub(super) struct SavedStorages {
    /// Where a storage begins, and the number of the first tensor whose graph holds it.
    pub(super) found: Vec<(u64, u32)>,
    /// Whether nodes were left out.
    pub(super) is_partial: bool,
}

/// The graphs of the tensors that a search has found.
pub(super) struct Graphs<'a> {
    torch: &'a TorchSymbols,
    layout: TensorLayout,
    memory: CheckedMemory,
    starts: Vec<Start>,
    /// The implementations of the tensors.
    implementations: Set<usize>,
}

impl<'a> Graphs<'a> {
    /// `None` if memory cannot be read with checks.
    pub(super) fn new(torch: &'a TorchSymbols, layout: TensorLayout) -> Option<Graphs<'a>> {
        let memory = CheckedMemory::open().ok()?;
        Some(Graphs { torch, layout, memory, starts: Vec::new(), implementations: Set::default() })
    }

    /// Adds a tensor.
    ///
    /// # Safety
    ///
    /// `implementation` is the plain implementation of a live tensor.
    pub(super) unsafe fn add(&mut self, tensor: u32, implementation: *mut c_void) {
        self.implementations.insert(implementation.expose_provenance());
        // SAFETY: the caller guarantees a live, plain implementation.
        if let Some(node) = unsafe { self.torch.gradient_function(implementation) }
            && self.is_node(node)
        {
            self.starts.push(Start { tensor, node });
        }
    }

    fn is_node(&self, node: usize) -> bool {
        node != 0 && node.is_multiple_of(WORD) && self.memory.size(node, OWN_ADDRESS * WORD) == Some(node)
    }

    /// The memory that the graphs hold.
    pub(super) fn saved_storages(&self, cpu: bool) -> SavedStorages {
        let (nodes, is_partial) = self.nodes();
        let mut sizes = nodes.iter().filter_map(|node| self.size_of_base(node));
        let (mut found, mut seen) = (Vec::new(), Set::default());
        let Some(base) = sizes.next().filter(|base| sizes.all(|size| size == *base)) else {
            return SavedStorages { found, is_partial };
        };
        for node in &nodes {
            for at in base..node.words.len().saturating_sub(END_WORDS) {
                if let Some(address) = self.saved_at(node, at, cpu)
                    && seen.insert(address)
                {
                    found.push((address, node.tensor));
                }
            }
        }
        SavedStorages { found, is_partial }
    }

    /// All nodes, each with the first tensor whose graph it belongs to, and whether some were left out because there
    /// are too many.
    fn nodes(&self) -> (Vec<GraphNode>, bool) {
        let (mut nodes, mut seen, mut left) = (Vec::new(), Set::default(), MAX_BYTES);
        for start in &self.starts {
            let mut waiting = vec![start.node];
            while let Some(node) = waiting.pop() {
                if seen.len() >= MAX_NODES || left < MAX_NODE_BYTES {
                    return (nodes, true);
                }
                if !seen.insert(node) {
                    continue;
                }
                let Some(words) = self.words(node) else { continue };
                left -= words.len() * WORD;
                let Some(edges) = self.edges(&words) else { continue };
                waiting.extend(edges);
                nodes.push(GraphNode { tensor: start.tensor, words });
            }
        }
        (nodes, false)
    }

    /// The words of a node.
    fn words(&self, node: usize) -> Option<Vec<usize>> {
        let control = self.memory.size(node, CONTROL_BLOCK * WORD)?;
        let begin = if control == node.wrapping_sub(CONTROL_BYTES) { control } else { node };
        // The allocator keeps the size before the memory.
        self.memory.size(begin, 0_usize.wrapping_sub(WORD))?;
        // SAFETY: a node is allocated alone, or right after its control block. Its self-reference has confirmed that it
        // is one.
        let allocated = unsafe { libc::malloc_usable_size(std::ptr::with_exposed_provenance_mut(begin)) };
        let size =
            allocated.checked_sub(node - begin).filter(|size| (AFTER_EDGES * WORD..MAX_NODE_BYTES).contains(size))?;
        let mut bytes = vec![0; size / WORD * WORD];
        self.memory.read(node, &mut bytes).then(|| words_in(&bytes))
    }

    /// The nodes to which a node's edges lead. `None` if they are not as expected.
    fn edges(&self, words: &[usize]) -> Option<Vec<usize>> {
        let [begin, end, limit] = *words.get(EDGES..EDGES + 3)? else { return None };
        let size = end.checked_sub(begin).filter(|size| size.is_multiple_of(EDGE_BYTES) && end <= limit)?;
        if size / EDGE_BYTES > MAX_EDGES {
            return None;
        }
        let mut bytes = vec![0; size];
        if size > 0 && !self.memory.read(begin, &mut bytes) {
            return None;
        }
        let nodes: Vec<usize> =
            words_in(&bytes).into_iter().step_by(EDGE_BYTES / WORD).filter(|node| *node != 0).collect();
        nodes.iter().all(|node| self.is_node(*node)).then_some(nodes)
    }

    /// The size of the base class in words, if this node is of the type that shows it.
    fn size_of_base(&self, node: &GraphNode) -> Option<usize> {
        let class = self.memory.size(*node.words.first()?, 0_usize.wrapping_sub(WORD))?;
        let name = self.memory.size(class, WORD)?;
        let mut text = [0; ACCUMULATE_GRAD.len()];
        if !self.memory.read(name, &mut text) || text != *ACCUMULATE_GRAD {
            return None;
        }
        let is_tensor = |word: &usize| self.implementations.contains(word);
        node.words.iter().skip(AFTER_EDGES).position(is_tensor).map(|at| at + AFTER_EDGES)
    }

    /// Where the storage of the tensor begins that a `SavedVariable` at this word saves.
    fn saved_at(&self, node: &GraphNode, at: usize, cpu: bool) -> Option<u64> {
        let word = |offset: usize| node.words.get(at + offset).copied();
        let flags = word(FLAGS)?.to_le_bytes();
        let [is_unused, others @ ..] = flags.first_chunk::<FLAG_BYTES>()?;
        let is_saved = *is_unused == 0 && others.iter().all(|flag| *flag <= 1);
        if !is_saved || FORWARD_GRADIENT.iter().any(|offset| word(*offset) != Some(0)) {
            return None;
        }
        self.torch.memory_at(&self.layout, word(0)?, &self.memory, cpu)
    }
}

fn words_in(bytes: &[u8]) -> Vec<usize> {
    bytes.as_chunks::<WORD>().0.iter().map(|word| usize::from_le_bytes(*word)).collect()
}

const _: () = assert!(CStr::from_bytes_with_nul(ACCUMULATE_GRAD).is_ok());
