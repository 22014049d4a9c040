//! The functions of PyTorch that this library replaces, by name.
//!
//! The loader binds them by itself if the library is preloaded. In a process that runs already, they are put into the
//! slots of PyTorch's libraries.

use super::{autograd, rank, reporter};

/// The function that replaces the one of this name. `None` if it is not replaced.
pub(crate) fn replacement(name: &[u8]) -> Option<usize> {
    let all = autograd::replacements().into_iter().chain(reporter::replacements()).chain([rank::replacement()]);
    all.filter(|(of, _)| of.to_bytes() == name).map(|(_, function)| function.addr()).next()
}
