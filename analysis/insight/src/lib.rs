//! Conclusions from a replayed recording: the [`passes`] draw them, each by a named rule of [`rules`].

pub mod passes;
pub mod rules;
