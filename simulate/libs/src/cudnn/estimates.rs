//! How many workspaces were estimated, and how far off they can be.
//!
//! `SIMCUDA_ESTIMATES` names a file, in which `%p` stands for the process id. It has one JSON object about this process,
//! which is written anew with every convolution that the process did not use before.

use simcuda::cudnn::convolution::{Convolution, Workspace};
use std::sync::Mutex;

/// The convolutions of this process, and what is known of their workspaces.
struct Estimates {
    /// Each different one.
    convolutions: Vec<Convolution>,
    /// How many of them were not measured.
    estimated: usize,
    /// By how many bytes one workspace can be larger than it is estimated.
    above: u64,
    /// By how many bytes one workspace can be smaller than it is estimated.
    below: u64,
}

static ESTIMATES: Mutex<Estimates> =
    Mutex::new(Estimates { convolutions: Vec::new(), estimated: 0, above: 0, below: 0 });

/// Adds a convolution of this process.
pub(super) fn note(convolution: &Convolution, workspace: &Workspace) {
    let Ok(path) = std::env::var("SIMCUDA_ESTIMATES") else { return };
    let Ok(mut estimates) = ESTIMATES.lock() else { return };
    if estimates.convolutions.contains(convolution) {
        return;
    }
    estimates.convolutions.push(convolution.clone());
    let [low, high] = workspace.range;
    estimates.estimated += usize::from(!workspace.measured);
    estimates.above = estimates.above.max(high.saturating_sub(workspace.bytes));
    estimates.below = estimates.below.max(workspace.bytes.saturating_sub(low));
    let Estimates { convolutions, estimated, above, below } = &*estimates;
    let text = format!(
        "{{\"convolutions\":{},\"estimated\":{estimated},\"above_bytes\":{above},\"below_bytes\":{below}}}\n",
        convolutions.len()
    );
    // Whoever named a file that cannot be written reads nothing.
    std::fs::write(path.replace("%p", &std::process::id().to_string()), text).ok();
}
