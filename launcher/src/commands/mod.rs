//! One thin file a subcommand.

pub(crate) mod run;
