//! How many workspaces were estimated, and how far off they can be.
//!
//! `SIMCUDA_ESTIMATES` names a file, in which `%p` stands for the process id. It has one JSON object about this
//! process, which is written anew with every convolution that the process did not use before.

use super::algorithm::Algorithm;
use simcuda::cudnn::convolution::{Convolution, Workspace};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;

/// A convolution whose workspace was requested.
struct Requested {
    convolution: Convolution,
    /// With which algorithms.
    algorithms: Vec<Algorithm>,
    /// Whether a workspace was not measured.
    is_estimated: bool,
}

/// The convolutions of this process, and what is known of their workspaces.
struct Estimates {
    /// Each different one.
    convolutions: Vec<Requested>,
    /// By how many bytes one workspace can be larger than it is estimated.
    above: u64,
    /// By how many bytes one workspace can be smaller than it is estimated.
    below: u64,
}

static ESTIMATES: Mutex<Estimates> = Mutex::new(Estimates { convolutions: Vec::new(), above: 0, below: 0 });

/// Adds a convolution of this process.
pub(super) fn note(convolution: &Convolution, algorithm: Algorithm, workspace: &Workspace) {
    let Ok(path) = std::env::var("SIMCUDA_ESTIMATES") else { return };
    let Ok(mut estimates) = ESTIMATES.lock() else { return };
    let convolutions = &mut estimates.convolutions;
    let index = convolutions.iter().position(|one| one.convolution == *convolution).unwrap_or_else(|| {
        let convolution = convolution.clone();
        convolutions.push(Requested { convolution, algorithms: Vec::new(), is_estimated: false });
        convolutions.len() - 1
    });
    let one = &mut convolutions[index];
    if one.algorithms.contains(&algorithm) {
        return;
    }
    one.algorithms.push(algorithm);
    one.is_estimated |= !workspace.measured;
    let [low, high] = workspace.range;
    estimates.above = estimates.above.max(high.saturating_sub(workspace.bytes));
    estimates.below = estimates.below.max(workspace.bytes.saturating_sub(low));
    let Estimates { convolutions, above, below } = &*estimates;
    let estimated = convolutions.iter().filter(|one| one.is_estimated).count();
    let text = format!(
        "{{\"convolutions\":{},\"estimated\":{estimated},\"above_bytes\":{above},\"below_bytes\":{below}}}\n",
        convolutions.len()
    );
    // Whoever named a file that cannot be written reads nothing.
    let path = path.replace("%p", &std::process::id().to_string());
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).ok();
}
