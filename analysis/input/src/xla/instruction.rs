//! The names of instructions in XLA's files.

/// The name of the instruction in `wrapped_add.4{0}`, without the index into a tuple.
pub(super) fn instruction_name(text: &str) -> &str {
    text.split('{').next().unwrap_or(text).trim().trim_start_matches('%')
}
