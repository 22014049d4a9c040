//! The algorithms that the heuristics of cuDNN offer for a convolution.

/// The algorithm of an engine configuration.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// The one that the heuristics of a real cuDNN name first.
    #[default]
    Chosen,
    /// One without a workspace, for programs for whose memory the first one's is too large.
    Frugal,
    /// The one with the largest workspace of those that a program tries which looks for the fastest.
    Tried,
}

/// In the order of the heuristics: a program that does not try all takes the first for which it has the memory.
pub(super) const ALGORITHMS: [Algorithm; 3] = [Algorithm::Chosen, Algorithm::Frugal, Algorithm::Tried];

impl Algorithm {
    /// The launches of one run. The clock of the simulation counts calls, so that the chosen one is the fastest.
    pub(super) fn launches(self) -> usize {
        if self == Algorithm::Chosen { 1 } else { 16 }
    }
}
