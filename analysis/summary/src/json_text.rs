//! Results as JSON text.

use memtrace_input::printable;
use serde::Serialize;

/// A result as indented JSON, without a line break at the end. Texts of the recorded program are printable in it.
pub(crate) fn json_text<T: Serialize>(result: &T) -> String {
    // Serializing plain structures cannot fail.
    printable::json(serde_json::to_string_pretty(result).unwrap_or_default())
}
