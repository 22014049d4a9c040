//! The paths of the tensors' memory.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::rc::Rc;

use memtrace_trace::definition::GRAPH_HOLDER;

use super::graph::Graphs;
use super::labels::{Labels, Role};
use super::maps::{Map, Set};
use super::search::{Node, Parent, Root, Search};
use crate::cpython::api::PyObjectPtr;
use crate::observers::tensors::{TensorLayout, TensorMemory, TensorStorage, TorchSymbols};

/// At most this many storages get a path in one search.
const MAX_STORAGES: usize = 1 << 16;
/// After this many tensors that do not confirm the layout, the search gives up.
const MAX_MISSES: u32 = 256;
/// Paths are cut to this many characters.
const MAX_PATH_CHARS: usize = 400;

/// The memory of a tensor that a path leads to.
struct HeldStorage {
    address: u64,
    node: u32,
    suffix: &'static str,
    /// The tensor at the path; null if it is not the one with this memory.
    implementation: *mut c_void,
}

/// A tensor that a path leads to.
pub(super) struct HeldTensor {
    /// Where its storage begins.
    pub(super) address: u64,
    pub(super) path: String,
    /// Data type and shape; empty if unknown.
    pub(super) shape: String,
}

/// The paths that one search has found.
pub(super) struct Paths {
    pub(super) of_storages: Vec<HeldTensor>,
    /// How many storages were left out.
    pub(super) dropped: u64,
}

/// Reads where the tensors' memory is.
pub(super) struct TensorReader<'a> {
    pub(super) torch: &'a TorchSymbols,
    pub(super) layout: &'a mut Option<TensorLayout>,
    /// Whether CPU tensors are recorded too.
    pub(super) cpu: bool,
    /// Whether gradients and autograd graphs can be read: no autograd node runs.
    pub(super) reads_graphs: bool,
}

impl TensorReader<'_> {
    /// The layout of tensors, verified with the first suitable one. The error is the reason why it is unknown.
    fn layout(&mut self, found: &Search) -> Result<Option<TensorLayout>, &'static str> {
        let tensors = found.tensors.iter().filter_map(|node| found.nodes.get(*node as usize));
        for Node { object, .. } in tensors.take(MAX_MISSES as usize) {
            if self.layout.is_some() {
                break;
            }
            // SAFETY: the search has reached this live tensor, and this thread holds the GIL.
            *self.layout = unsafe { self.torch.verify_layout(*object) }?;
        }
        Ok(*self.layout)
    }

    /// The storages of all tensors, each with the first node that holds it. Gradients and what autograd graphs save
    /// come last, because C++ holds them.
    fn storages(&mut self, found: &Search, dropped: &mut u64) -> Result<Vec<HeldStorage>, &'static str> {
        let Some(layout) = self.layout(found)? else { return Ok(Vec::new()) };
        let mut graphs = if self.reads_graphs { Graphs::new(self.torch, layout) } else { None };
        let (mut seen, mut held, mut gradients) = (Set::default(), Vec::new(), Vec::new());
        for node in &found.tensors {
            let Some(Node { object, .. }) = found.nodes.get(*node as usize) else { continue };
            // SAFETY: the search has reached this live tensor, and this thread holds the GIL.
            let TensorStorage::Memory(memory) = (unsafe { self.torch.storage_of(&layout, *object, self.cpu) }) else {
                continue;
            };
            let TensorMemory { address, implementation } = memory;
            held.push(HeldStorage { address, node: *node, suffix: "", implementation });
            if let Some(graphs) = &mut graphs {
                // SAFETY: this is the plain implementation of a live tensor.
                unsafe { graphs.add(*node, memory.implementation) };
            }
            if !self.reads_graphs {
                continue;
            }
            // SAFETY: this is the plain implementation of a live tensor, and no autograd node runs.
            let gradient = unsafe { self.torch.gradient(&layout, memory.implementation, self.cpu) };
            if let Some((TensorStorage::Memory(memory), _)) = gradient {
                gradients.push(HeldStorage {
                    address: memory.address,
                    node: *node,
                    suffix: ".grad",
                    implementation: memory.implementation,
                });
            }
        }
        held.extend(gradients);
        let of_graphs = graphs.map(|graphs| graphs.saved_storages(self.cpu)).unwrap_or_default();
        *dropped += u64::from(of_graphs.is_partial);
        held.extend(of_graphs.found.into_iter().map(|(address, node)| HeldStorage {
            address,
            node,
            suffix: GRAPH_HOLDER,
            implementation: null_mut(),
        }));
        held.retain(|held| seen.insert(held.address));
        *dropped += held.len().saturating_sub(MAX_STORAGES) as u64;
        held.truncate(MAX_STORAGES);
        Ok(held)
    }

    /// The paths of all storages.
    pub(super) fn paths(&mut self, found: &Search, labels: &mut Labels<'_>) -> Result<Paths, &'static str> {
        let mut dropped = 0;
        let held = self.storages(found, &mut dropped)?;
        let texts = path_texts(found, held.iter().map(|held| held.node), labels);
        let (torch, layout) = (self.torch, *self.layout);
        let shape = |implementation: *mut c_void| match layout {
            // SAFETY: this is the plain implementation of a tensor that the search has reached and that is still alive,
            // because this thread has held the GIL since.
            Some(layout) if !implementation.is_null() => unsafe { torch.shape(&layout, implementation) },
            _ => String::new(),
        };
        let of_storages = held
            .into_iter()
            .filter_map(|held| {
                let path = shortened(texts.get(&held.node)?) + held.suffix;
                Some(HeldTensor { address: held.address, path, shape: shape(held.implementation) })
            })
            .collect();
        Ok(Paths { of_storages, dropped })
    }
}

fn shortened(path: &str) -> String {
    let start: String = path.chars().take(MAX_PATH_CHARS).collect();
    if start.len() < path.len() { start + "..." } else { start }
}

/// The texts of the paths to these nodes.
fn path_texts(found: &Search, nodes: impl Iterator<Item = u32>, labels: &mut Labels<'_>) -> Map<u32, Rc<str>> {
    let node = |at: u32| found.nodes.get(at as usize).copied();
    // The nodes on all paths, by the node that refers to them. Nodes precede those that they refer to.
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let (mut needed, mut roles) = (Set::default(), Map::default());
    let mut texts: Map<u32, Rc<str>> = Map::default();
    for mut at in nodes {
        while needed.insert(at) {
            match node(at).map(|node| node.parent) {
                Some(Parent::Node(parent)) => {
                    children.entry(parent).or_default().push(at);
                    at = parent;
                }
                Some(Parent::Root(root)) => {
                    let (text, role) = root_text(root, labels);
                    texts.insert(at, text.into());
                    roles.insert(at, role);
                }
                None => {}
            }
        }
    }
    for (parent, children) in children {
        let Some(Node { object, .. }) = node(parent) else { continue };
        let role = roles.get(&parent).copied().unwrap_or(Role::Plain);
        let start = texts.get(&parent).cloned().unwrap_or_else(|| "".into());
        if start.chars().nth(MAX_PATH_CHARS).is_some() {
            // The rest of a path that will be cut takes no time and no memory: a linked list may have a million
            // elements.
            texts.extend(children.iter().map(|at| (*at, Rc::clone(&start))));
            continue;
        }
        let objects: Vec<PyObjectPtr> = children.iter().filter_map(|at| Some(node(*at)?.object)).collect();
        for (at, label) in children.iter().zip(labels.of(object, role, &objects)) {
            texts.insert(*at, joined(&start, &label.text).into());
            if label.role != Role::Plain {
                roles.insert(*at, label.role);
            }
        }
    }
    texts
}

fn root_text(root: Root, labels: &Labels<'_>) -> (String, Role) {
    match root {
        Root::Module(name) => (labels.name(name), Role::Attributes),
        Root::Local { code, name } => (format!("frame {}: {}", labels.code_name(code), labels.name(name)), Role::Plain),
        Root::Traceback => (String::new(), Role::Plain),
    }
}

/// Joins a path and a label. A path that begins with a frame has no object before it.
fn joined(start: &str, label: &str) -> String {
    let inner = label.strip_prefix(" (frame ").and_then(|rest| rest.split_once("): "));
    match inner {
        Some((function, variable)) if start.is_empty() => format!("frame {function}: {variable}"),
        _ => format!("{start}{label}"),
    }
}
