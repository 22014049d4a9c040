//! Which memory the autograd graph of a tensor holds, without running an autograd node or making Python objects of it.
//!
//! The layouts are private to PyTorch, so each is checked at run time. A node or tensor that fails a check is left out:
//! - *`AutogradMeta`* holds `grad_`, whose address `TensorImpl::grad()` returns, and after it `grad_fn_`.
//! - *`Node`* inherits `std::enable_shared_from_this` until PyTorch 2.12, so its second word is its own address. Later
//!   it inherits `c10::intrusive_ptr_target`, and the C++ type info of its class must lead to `Node`. All its edges
//!   must lead to such nodes.
//! - *The size of `Node`* is where `AccumulateGrad`, whose only member is a tensor, holds a tensor that Python knows.
//!   All nodes of that type must agree.
//! - *`SavedVariable`* begins with a tensor whose implementation has exactly the vtable that libc10 exports. Null
//!   pointers and flags follow it. Only members of the node's own class are read, which its constructor has
//!   initialized.
//!
//! Nodes written in Python, lists of saved tensors and saved tensors with hooks are skipped.

use std::cell::RefCell;
use std::ffi::{CStr, c_void};

use memtrace_stackwalk::CheckedMemory;

use super::maps::{Map, Set};
use crate::observers::tensors::{TensorLayout, TorchSymbols};

/// At most this many nodes are visited in one search.
const MAX_NODES: usize = 1 << 16;
/// The nodes of one search take at most this many bytes.
const MAX_BYTES: usize = 1 << 26;
/// A node with more bytes or more edges is skipped.
const MAX_NODE_BYTES: usize = 1 << 14;
const MAX_EDGES: usize = 1 << 12;
const WORD: usize = size_of::<usize>();
/// Words of a `Node` that inherits `std::enable_shared_from_this`: its own address and its control block.
const OWN_ADDRESS: usize = 1;
const CONTROL_BLOCK: usize = 2;
/// The words of a vector: its begin, its end and the end of its allocation.
const VECTOR: usize = 3;
/// The bytes of a control block that is allocated together with its node.
const CONTROL_BYTES: usize = 16;
/// Words of a `SavedVariable` after its tensor: `fw_grad_`.
const FORWARD_GRADIENT: [usize; 2] = [1, 2];
/// The flags of a `SavedVariable` are this many bytes. The first one is set if nothing is saved.
const FLAG_BYTES: usize = 5;
/// The end of an allocation may be larger than the node: this many words there are no tensors.
const END_WORDS: usize = 4;
/// `torch::autograd::AccumulateGrad` and `torch::autograd::Node` in their C++ type infos.
const ACCUMULATE_GRAD: &[u8; 34] = b"N5torch8autograd14AccumulateGradE\0";
const NODE: &[u8; 23] = b"N5torch8autograd4NodeE\0";
/// `c10::VariableVersion::VersionCounter` in its C++ type info.
const VERSION_COUNTER: &[u8; 40] = b"N3c1015VariableVersion14VersionCounterE\0";
/// Words of a C++ type info: the class's name, and the type info of its only base.
const CLASS_NAME: usize = 1;
const BASE_CLASS: usize = 2;
/// Nodes have fewer base classes.
const MAX_BASES: usize = 8;

/// Where nodes and what they save have their members, which depends on the kind of pointers that own nodes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// Whether `std::shared_ptr` owns nodes.
    is_shared: bool,
    /// The first word of a node's edges.
    edges: usize,
    /// The bytes of an edge: a pointer and the number of the input.
    edge_bytes: usize,
    /// The word of a `SavedVariable` with its flags, where it has no version counter.
    flags: usize,
}

const SHARED: Layout = Layout { is_shared: true, edges: 12, edge_bytes: 24, flags: 6 };
const INTRUSIVE: Layout = Layout { is_shared: false, edges: 11, edge_bytes: 16, flags: 5 };

impl Layout {
    const fn after_edges(self) -> usize {
        self.edges + VECTOR
    }
}

/// A tensor with a graph: a number that the caller gives it, and its node.
struct Start {
    tensor: u32,
    node: usize,
}

/// One autograd node.
struct GraphNode {
    tensor: u32,
    layout: Layout,
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
    /// Whether the class with this vtable is a node's.
    classes: RefCell<Map<usize, bool>>,
}

impl<'a> Graphs<'a> {
    /// `None` if memory cannot be read with checks.
    pub(super) fn new(torch: &'a TorchSymbols, layout: TensorLayout) -> Option<Graphs<'a>> {
        let memory = CheckedMemory::open().ok()?;
        let (implementations, classes) = Default::default();
        Some(Graphs { torch, layout, memory, starts: Vec::new(), implementations, classes })
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
            && self.layout_of(node).is_some()
        {
            self.starts.push(Start { tensor, node });
        }
    }

    /// The layout of the node at this address. `None` if there is no node.
    fn layout_of(&self, node: usize) -> Option<Layout> {
        if node == 0 || !node.is_multiple_of(WORD) {
            return None;
        }
        if self.memory.size(node, OWN_ADDRESS * WORD)? == node {
            return Some(SHARED);
        }
        let vtable = self.memory.size(node, 0)?;
        let is_node = *self.classes.borrow_mut().entry(vtable).or_insert_with(|| self.is_class_of_nodes(vtable));
        is_node.then_some(INTRUSIVE)
    }

    /// Whether the class with this vtable is `Node` or has it as its only base, directly or not.
    fn is_class_of_nodes(&self, vtable: usize) -> bool {
        let base = |class: &usize| self.memory.size(*class, BASE_CLASS * WORD);
        let classes = std::iter::successors(self.class_of(vtable), base);
        classes.take(MAX_BASES).any(|class| self.has_name(class, NODE))
    }

    /// The type info of the class with this vtable.
    fn class_of(&self, vtable: usize) -> Option<usize> {
        self.memory.size(vtable, 0_usize.wrapping_sub(WORD))
    }

    fn has_name<const N: usize>(&self, class: usize, name: &[u8; N]) -> bool {
        let mut text = [0; N];
        let at = self.memory.size(class, CLASS_NAME * WORD);
        at.is_some_and(|at| self.memory.read(at, &mut text)) && text == *name
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
                let Some(layout) = self.layout_of(node) else { continue };
                let Some(words) = self.words(node, layout) else { continue };
                left -= words.len() * WORD;
                let Some(edges) = self.edges(&words, layout) else { continue };
                waiting.extend(edges);
                nodes.push(GraphNode { tensor: start.tensor, layout, words });
            }
        }
        (nodes, false)
    }

    /// The words of a node.
    fn words(&self, node: usize, layout: Layout) -> Option<Vec<usize>> {
        let control = self.memory.size(node, CONTROL_BLOCK * WORD)?;
        let has_control = layout.is_shared && control == node.wrapping_sub(CONTROL_BYTES);
        let begin = if has_control { control } else { node };
        // The allocator keeps the size before the memory.
        self.memory.size(begin, 0_usize.wrapping_sub(WORD))?;
        // SAFETY: a node is allocated alone, or right after its control block. Its self-reference or its class has
        // confirmed that it is one.
        let allocated = unsafe { libc::malloc_usable_size(std::ptr::with_exposed_provenance_mut(begin)) };
        let sizes = layout.after_edges() * WORD..MAX_NODE_BYTES;
        let size = allocated.checked_sub(node - begin).filter(|size| sizes.contains(size))?;
        let mut bytes = vec![0; size / WORD * WORD];
        self.memory.read(node, &mut bytes).then(|| words_in(&bytes))
    }

    /// The nodes to which a node's edges lead. `None` if they are not as expected.
    fn edges(&self, words: &[usize], layout: Layout) -> Option<Vec<usize>> {
        let [begin, end, limit] = *words.get(layout.edges..layout.after_edges())? else { return None };
        let size = end.checked_sub(begin).filter(|size| size.is_multiple_of(layout.edge_bytes) && end <= limit)?;
        if size / layout.edge_bytes > MAX_EDGES {
            return None;
        }
        let mut bytes = vec![0; size];
        if size > 0 && !self.memory.read(begin, &mut bytes) {
            return None;
        }
        let nodes: Vec<usize> =
            words_in(&bytes).into_iter().step_by(layout.edge_bytes / WORD).filter(|node| *node != 0).collect();
        nodes.iter().all(|node| self.layout_of(*node) == Some(layout)).then_some(nodes)
    }

    /// The size of the base class in words, if this node is of the type that shows it.
    fn size_of_base(&self, node: &GraphNode) -> Option<usize> {
        if !self.has_name(self.class_of(*node.words.first()?)?, ACCUMULATE_GRAD) {
            return None;
        }
        let is_tensor = |word: &usize| self.implementations.contains(word);
        let after = node.layout.after_edges();
        node.words.iter().skip(after).position(is_tensor).map(|at| at + after)
    }

    /// Where the storage of the tensor begins that a `SavedVariable` at this word saves.
    fn saved_at(&self, node: &GraphNode, at: usize, cpu: bool) -> Option<u64> {
        let word = |offset: usize| node.words.get(at + offset).copied();
        if FORWARD_GRADIENT.iter().any(|offset| word(*offset) != Some(0)) {
            return None;
        }
        let address = self.torch.memory_at(&self.layout, word(0)?, &self.memory, cpu)?;
        let has_counter = self.is_version_counter(word(node.layout.flags - 1)?);
        let flags = word(node.layout.flags + usize::from(has_counter))?.to_le_bytes();
        let [is_unused, others @ ..] = flags.first_chunk::<FLAG_BYTES>()?;
        (*is_unused == 0 && others.iter().all(|flag| *flag <= 1)).then_some(address)
    }

    /// Whether a version counter is at this address, which may be any. Before PyTorch 2.5, a `SavedVariable` has a
    /// pointer to it.
    fn is_version_counter(&self, address: usize) -> bool {
        let class = || self.class_of(self.memory.size(address, 0)?);
        address.is_multiple_of(WORD) && class().is_some_and(|class| self.has_name(class, VERSION_COUNTER))
    }
}

fn words_in(bytes: &[u8]) -> Vec<usize> {
    bytes.as_chunks::<WORD>().0.iter().map(|word| usize::from_le_bytes(*word)).collect()
}

const _: () = assert!(CStr::from_bytes_with_nul(ACCUMULATE_GRAD).is_ok() && CStr::from_bytes_with_nul(NODE).is_ok());
