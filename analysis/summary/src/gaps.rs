//! The gaps of a recording, as every report lists them.

use std::collections::BTreeSet;

use memtrace_input::load::SNAPSHOT_TOPIC;
use memtrace_insight::units::count_text;
use memtrace_trace::definition::FREE_THREADED_TOPIC;

use crate::conclusions::RecordingGap;
use crate::summary::{NativeObjectSummary, Summary};

/// The maximum number of libraries without symbols that are listed.
const LISTED_OBJECTS: usize = 2;

/// The gaps of a summary, the losses first.
pub(crate) fn recording_gaps(summary: &Summary) -> Vec<RecordingGap> {
    let gap =
        |label: &str, text: &str, is_loss| RecordingGap { label: label.to_owned(), text: text.to_owned(), is_loss };
    let notices = || summary.processes.iter().flat_map(|process| &process.notices);
    // Otherwise nothing explains why the allocations have native stacks only.
    let without_python = notices().filter(|notice| notice.topic == "python" && notice.status == "off");
    let without_python: BTreeSet<&str> = without_python.map(|notice| notice.text.as_str()).collect();
    let mut gaps = Vec::new();
    gaps.extend(losses_text(summary).map(|text| gap("Losses", &text, true)));
    gaps.extend(missing_symbols(&summary.native_objects).iter().map(|text| gap("Missing symbols", text, false)));
    gaps.extend(summary.problems.iter().map(|text| gap("Warning", text, true)));
    gaps.extend(summary.not_recorded.iter().map(|one| gap("Not recorded", &one.text, one.is_loss)));
    gaps.extend(without_python.into_iter().map(|text| gap("Warning", text, false)));
    let free_threaded = notices().find(|notice| notice.topic == FREE_THREADED_TOPIC);
    gaps.extend(free_threaded.map(|notice| gap("Not recorded", &notice.text, false)));
    let dropped = summary.processes.iter().filter_map(|process| process.dropped.as_ref());
    gaps.extend(dropped.map(|dropped| gap("Rotation", &dropped.text, false)));
    let of_snapshots = notices().filter(|notice| notice.topic == SNAPSHOT_TOPIC);
    // Snapshots of several ranks have the same limits.
    let mut seen = BTreeSet::new();
    let of_snapshots = of_snapshots.filter(|notice| seen.insert(&notice.text));
    gaps.extend(of_snapshots.map(|notice| gap("Limits of a snapshot", &notice.text, false)));
    gaps
}

/// The counts of what was lost. `None` if nothing was.
fn losses_text(summary: &Summary) -> Option<String> {
    let losses = summary.losses.iter().filter(|(_, count)| **count > 0);
    let texts: Vec<String> =
        losses.map(|(name, count)| format!("{} {}", name.replace('_', " "), count_text(*count))).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// The native code whose symbols are missing for a reason that the user can fix, most addresses first.
fn missing_symbols(objects: &[NativeObjectSummary]) -> Vec<String> {
    let missing = |object: &NativeObjectSummary| object.addresses.saturating_sub(object.addresses_with_function);
    let mut objects: Vec<_> = objects.iter().filter(|o| missing(o) > 0 && !o.notes.is_empty()).collect();
    objects.sort_by_key(|object| std::cmp::Reverse(missing(object)));
    let text = |object: &&NativeObjectSummary| {
        let file = object.path.rsplit('/').next().unwrap_or(&object.path);
        let (without, addresses) = (count_text(missing(object)), count_text(object.addresses));
        let reason = object.notes.first().map(String::as_str).unwrap_or_default();
        format!("{without} of {addresses} addresses in {file}: {reason}")
    };
    objects.iter().take(LISTED_OBJECTS).map(text).collect()
}
