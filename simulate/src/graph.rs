//! Stream capture and graphs. Only the number of nodes of a graph is stored.

use crate::error::{Error, Result};
use crate::handle::{Handles, Kind};
use std::collections::HashMap;

/// The number of nodes of a running or ended capture, or of an instantiated graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// The number of launches, copies and sets in it.
    pub nodes: u64,
}

/// An instantiated graph.
#[derive(Clone, Copy, Debug)]
pub struct Instance {
    /// Its graph.
    pub graph: Graph,
    /// The ordinal of its device.
    pub ordinal: usize,
    /// The device memory that it takes, in bytes.
    pub bytes: u64,
}

/// A running capture.
#[derive(Clone, Copy, Debug)]
pub struct Capture {
    /// The number that `cuStreamGetCaptureInfo` returns.
    pub id: u64,
    /// The handle of the graph that is being captured.
    pub graph: u64,
    /// The stream that began the capture.
    pub origin: u64,
}

/// The captures, graphs and instantiated graphs of the process.
#[derive(Debug, Default)]
pub struct Graphs {
    captures: HashMap<u64, Capture>,
    graphs: HashMap<u64, Graph>,
    instances: HashMap<u64, Instance>,
}

impl Graphs {
    /// Begins a capture and returns its number.
    pub fn begin(&mut self, origin: u64, handles: &mut Handles) -> u64 {
        let id = handles.unique();
        let graph = handles.deal(Kind::Graph);
        self.graphs.insert(graph, Graph::default());
        self.captures.insert(id, Capture { id, graph, origin });
        id
    }

    /// The capture with this number, if it is still running.
    pub fn capture(&self, id: u64) -> Option<Capture> {
        self.captures.get(&id).copied()
    }

    /// Adds one unit of work to a running capture.
    pub fn add_node(&mut self, id: u64) {
        if let Some(graph) = self.captures.get(&id).and_then(|c| self.graphs.get_mut(&c.graph)) {
            graph.nodes += 1;
        }
    }

    /// Ends a capture and returns the graph's handle.
    pub fn end(&mut self, id: u64) -> Result<u64> {
        self.captures.remove(&id).map(|c| c.graph).ok_or(Error::IllegalState)
    }

    /// Creates an empty graph and returns its handle.
    pub fn create(&mut self, handles: &mut Handles) -> u64 {
        let graph = handles.deal(Kind::Graph);
        self.graphs.insert(graph, Graph::default());
        graph
    }

    /// The graph with this handle.
    pub fn graph(&self, handle: u64) -> Result<Graph> {
        self.graphs.get(&handle).copied().ok_or(Error::InvalidValue)
    }

    /// Adds an instantiated graph and returns the handle of the instance.
    pub fn add_instance(&mut self, instance: Instance, handles: &mut Handles) -> u64 {
        let handle = handles.deal(Kind::GraphExec);
        self.instances.insert(handle, instance);
        handle
    }

    /// The instance with this handle.
    pub fn instance(&self, handle: u64) -> Result<Instance> {
        self.instances.get(&handle).copied().ok_or(Error::InvalidValue)
    }

    /// Destroys a graph.
    pub fn destroy(&mut self, handle: u64) -> Result<()> {
        self.graphs.remove(&handle).map(drop).ok_or(Error::InvalidValue)
    }

    /// Removes an instance and returns it.
    pub fn remove_instance(&mut self, handle: u64) -> Result<Instance> {
        self.instances.remove(&handle).ok_or(Error::InvalidValue)
    }
}
