//! The summary of a run.

use serde::Serialize;

use super::finish::Progress;
use super::text::TextOptions;
use crate::error::Result;
use crate::load::Run;

/// Everything a run's report says, ready for text and JSON.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Summary {}

impl Summary {
    /// The closing page, for people.
    pub fn to_text(&self, options: &TextOptions) -> String {
        let _ = options;
        String::new()
    }

    /// `summary.json`: see `analysis/schema/summary.schema.json`.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// Reads every process of a run once and draws the conclusions.
pub fn summarize(run: &Run, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Summary> {
    let _ = (run, progress);
    Ok(Summary::default())
}
