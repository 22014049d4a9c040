//! The contract between the traced process (`interpose`), the launcher that drains it and the
//! analysis that reads the trace file. It imports nothing of ours.

pub mod ids;
