//! `--categories FILE`: reads the rules of the user's own categories.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use memtrace_analysis::rules::CustomRules;
use memtrace_trace::file::untrusted;

use crate::message::WithHelp;

/// The maximum size of a file of rules, in bytes.
const MAX_FILE_SIZE: u64 = 1 << 20;
const HELP: &str = "pass a JSON file such as {\"categories\": [{\"name\": \"attention\", \"module\": \"attn\"}]}; \
                    docs/how-to/custom-categories.md describes it";

/// Reads a file of rules. `None` without a file.
pub(crate) fn read(path: Option<&Path>) -> anyhow::Result<Option<Arc<CustomRules>>> {
    let Some(path) = path else { return Ok(None) };
    let cannot = || WithHelp::new(format!("cannot read {}", path.display()), HELP);
    let file = untrusted::open(path).with_context(cannot)?;
    let bytes = untrusted::read(&file, MAX_FILE_SIZE).with_context(cannot)?;
    let unusable = |reason: String| anyhow!(WithHelp::new(format!("cannot use {}: {reason}", path.display()), HELP));
    let text = String::from_utf8(bytes).map_err(|e| {
        let line = 1 + e.as_bytes()[..e.utf8_error().valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
        unusable(format!("line {line}: it is not UTF-8"))
    })?;
    CustomRules::parse(&text).map(|rules| Some(Arc::new(rules))).map_err(|e| unusable(e.to_string()))
}
