//! How many threads are running an autograd node, and a request for a report when none does.
//!
//! Both belong to the loaded library and are shared by all its recordings.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::recording::observer;
use crate::recording::process::Process;

static RUNNING_NODES: AtomicU32 = AtomicU32::new(0);
/// Set while features have requested a report of the time when no thread runs a node.
static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Reports that a node begins to run on the calling thread.
#[inline]
pub(super) fn node_starts() {
    RUNNING_NODES.fetch_add(1, Ordering::Relaxed);
}

/// Reports that a node has ended on the calling thread.
#[inline]
pub(super) fn node_ends() {
    // These two accesses and the two in `is_any` are in one total order (`SeqCst`). So one of the two threads sees the
    // other's write.
    if RUNNING_NODES.fetch_sub(1, Ordering::SeqCst) == 1 && IS_REQUESTED.load(Ordering::SeqCst) {
        report_none_runs();
    }
}

#[cold]
fn report_none_runs() {
    if IS_REQUESTED.swap(false, Ordering::SeqCst)
        && let Some(process) = Process::if_started()
    {
        observer::no_node_runs(&process.watch);
    }
}

/// Whether any thread runs a node. If so, the last of them reports it to the features when it ends.
pub(crate) fn is_any() -> bool {
    IS_REQUESTED.store(true, Ordering::SeqCst);
    let is_any = RUNNING_NODES.load(Ordering::SeqCst) > 0;
    // If the last node has ended in between, its thread may have reported it once more. That costs time and
    // changes no result.
    if !is_any {
        IS_REQUESTED.store(false, Ordering::SeqCst);
    }
    is_any
}
