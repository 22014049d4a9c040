//! The objects that one collection has found, and the references between them.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};

use super::graph::ReferenceGraph;
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, PyOwned, reference_count};

/// The findings of one collection, held by our list.
pub(super) struct Garbage<'a> {
    pub(super) gil: GilToken<'a>,
    pub(super) list: PyOwned<'a>,
}

/// Collects references while objects are traversed.
struct Traversal<'a> {
    gil: GilToken<'a>,
    numbers: &'a HashMap<usize, u32>,
    graph: ReferenceGraph,
    /// Attribute dictionaries that CPython created for objects during the traversal.
    new_dicts: Vec<PyObjectPtr>,
}

unsafe extern "C" fn visit(object: PyObjectPtr, traversal: *mut c_void) -> c_int {
    // SAFETY: `Garbage::graph` passes a pointer to its own `Traversal`, which nothing else uses during the call.
    let traversal = unsafe { &mut *traversal.cast::<Traversal<'_>>() };
    if let Some(number) = traversal.numbers.get(&object.addr()) {
        traversal.graph.add_reference(*number);
    // SAFETY: the traversed object holds `object`, so it is alive.
    } else if traversal.gil.is_dict(object) && unsafe { reference_count(object) } == 1 {
        traversal.new_dicts.push(object);
    }
    0
}

impl Garbage<'_> {
    pub(super) fn objects(&self) -> Vec<PyObjectPtr> {
        let count = self.gil.list_len(self.list.object);
        (0..count).map_while(|at| self.gil.list_item(self.list.object, at)).collect()
    }

    /// The references between these objects. A dictionary of attributes that is not among them counts as part of its
    /// object.
    pub(super) fn graph(&self, objects: &[PyObjectPtr]) -> ReferenceGraph {
        let numbers: HashMap<usize, u32> = (0..).zip(objects).map(|(number, object)| (object.addr(), number)).collect();
        let mut traversal =
            Traversal { gil: self.gil, numbers: &numbers, graph: ReferenceGraph::default(), new_dicts: Vec::new() };
        for object in objects {
            traversal.graph.add_object();
            let with = (&raw mut traversal).cast();
            self.gil.traverse(*object, visit, with);
            while let Some(dict) = traversal.new_dicts.pop() {
                let with = (&raw mut traversal).cast();
                self.gil.traverse(dict, visit, with);
            }
        }
        traversal.graph
    }

    /// Whether nothing outside these objects holds any of them.
    fn is_garbage(&self, objects: &[PyObjectPtr]) -> bool {
        let graph = self.graph(objects);
        let mut expected = vec![1_usize; objects.len()];
        for number in 0..objects.len() as u32 {
            for other in graph.references_of(number) {
                if let Some(count) = expected.get_mut(*other as usize) {
                    *count += 1;
                }
            }
        }
        // SAFETY: the list holds a reference to each object, so all are alive.
        objects.iter().zip(expected).all(|(object, expected)| unsafe { reference_count(*object) } == expected)
    }

    /// Frees the objects in order, as the collector does: clears each one that others still hold. Returns `false` if
    /// something else holds one, so that a later collection frees them.
    pub(super) fn free(self, garbage: PyObjectPtr) -> bool {
        let objects = self.objects();
        if !self.is_garbage(&objects) {
            return false;
        }
        let (gil, list) = (self.gil, &self.list);
        for (at, object) in objects.into_iter().enumerate() {
            if gil.has_tp_del(object) {
                gil.list_append(garbage, object);
                continue;
            }
            // SAFETY: the object is garbage, and the list holds a reference to it until `list_clear_item` below.
            unsafe {
                if reference_count(object) > 1 {
                    gil.clear(object);
                }
            }
            gil.list_clear_item(list.object, at);
        }
        true
    }
}
