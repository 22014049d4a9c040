//! Stream capture and graphs: a graph is known by how many nodes it has, nothing more.

use crate::error::{Error, Result};
use crate::handle::{Handles, Kind};
use std::collections::HashMap;

/// An ended or running capture, or an instantiated graph: a number of nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// Launches, copies and sets in it.
    pub nodes: u64,
}

/// A capture that is going on.
#[derive(Clone, Copy, Debug)]
pub struct Capture {
    /// The number `cuStreamGetCaptureInfo` tells.
    pub id: u64,
    /// The graph being made.
    pub graph: u64,
    /// The stream that began it.
    pub origin: u64,
}

/// Captures, graphs and instantiated graphs of the process.
#[derive(Debug, Default)]
pub struct Graphs {
    captures: HashMap<u64, Capture>,
    graphs: HashMap<u64, Graph>,
    instances: HashMap<u64, Graph>,
}

impl Graphs {
    /// Begins a capture; gives its number.
    pub fn begin(&mut self, origin: u64, handles: &mut Handles) -> u64 {
        let id = handles.unique();
        let graph = handles.deal(Kind::Graph);
        self.graphs.insert(graph, Graph::default());
        self.captures.insert(id, Capture { id, graph, origin });
        id
    }

    /// The capture of that number, if it is still going on.
    pub fn capture(&self, id: u64) -> Option<Capture> {
        self.captures.get(&id).copied()
    }

    /// Adds one unit of work to a running capture.
    pub fn add_node(&mut self, id: u64) {
        if let Some(graph) = self.captures.get(&id).and_then(|c| self.graphs.get_mut(&c.graph)) {
            graph.nodes += 1;
        }
    }

    /// Ends a capture; gives the graph's handle.
    pub fn end(&mut self, id: u64) -> Result<u64> {
        self.captures.remove(&id).map(|c| c.graph).ok_or(Error::IllegalState)
    }

    /// A graph made by hand, empty.
    pub fn create(&mut self, handles: &mut Handles) -> u64 {
        let graph = handles.deal(Kind::Graph);
        self.graphs.insert(graph, Graph::default());
        graph
    }

    /// A graph by its handle.
    pub fn graph(&self, handle: u64) -> Result<Graph> {
        self.graphs.get(&handle).copied().ok_or(Error::InvalidValue)
    }

    /// Makes a launchable instance.
    pub fn instantiate(&mut self, graph: u64, handles: &mut Handles) -> Result<u64> {
        let graph = self.graph(graph)?;
        let instance = handles.deal(Kind::GraphExec);
        self.instances.insert(instance, graph);
        Ok(instance)
    }

    /// An instance by its handle.
    pub fn instance(&self, handle: u64) -> Result<Graph> {
        self.instances.get(&handle).copied().ok_or(Error::InvalidValue)
    }

    /// Ends a graph.
    pub fn destroy(&mut self, handle: u64) -> Result<()> {
        self.graphs.remove(&handle).map(drop).ok_or(Error::InvalidValue)
    }

    /// Ends an instance.
    pub fn destroy_instance(&mut self, handle: u64) -> Result<()> {
        self.instances.remove(&handle).map(drop).ok_or(Error::InvalidValue)
    }
}
