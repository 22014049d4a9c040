//! `memtrace check`: compares a run with limits or with a baseline.

use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::anyhow;
use memtrace_analysis::passes::Category;
use memtrace_analysis::report::SummaryError;
use memtrace_analysis::rules::CustomRules;
use memtrace_analysis::{
    CheckOptions, DiffOptions, DiffReport, Run, Summary, SummaryOptions, check as check_limits, diff, summarize_with,
};
use memtrace_trace::file::untrusted;

use super::selection::Selected;
use crate::cli::Check;
use crate::message::WithHelp;
use crate::output::{Printed, Stream};
use crate::terminal::ProgressLine;

/// The maximum size of a summary file in bytes. A larger file is not a summary.
const MAX_SUMMARY_SIZE: u64 = 256 << 20;
/// The number of bytes from a file's start that are read first.
const START_SIZE: usize = 32;

/// Prints the result. Returns false when the run exceeds a limit.
pub(crate) fn check(options: &Check) -> anyhow::Result<bool> {
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let rules = super::categories::read(options.categories.as_deref())?;
    let max_categories = category_limits(options, rules.as_deref())?;
    let run = match &options.runs[..] {
        [] => super::open_or_newest(None)?,
        [run] => super::open_or_newest(Some(run))?,
        runs => super::open_all(runs)?,
    };
    // Limits on nothing would always hold.
    Selected { rank: options.rank, device: options.device, ..Selected::default() }.ensure_in(&run)?;
    let mut summary_of = |run: &Run| -> anyhow::Result<Summary> {
        let summary_options = SummaryOptions {
            custom_rules: rules.as_deref(),
            released_after: options.released_after.as_ref(),
            ..SummaryOptions::default()
        };
        let summary = summarize_with(run, &summary_options, &mut |progress| line.show(&progress));
        line.clear();
        Ok(summary?)
    };
    let summary = summary_of(&run)?;
    let (mut baseline, mut comparison): (Option<Summary>, Option<DiffReport>) = (None, None);
    if let Some(path) = &options.baseline {
        let unusable = |e: SummaryError| match e {
            SummaryError::Json(_) => anyhow!("cannot use {} as the baseline: {e}", path.display()),
            SummaryError::Version(_) => {
                anyhow!("cannot use {} as the baseline: {e}: record the baseline again", path.display())
            }
        };
        match summary_json(path) {
            Some(json) => baseline = Some(Summary::from_json(&json).map_err(unusable)?),
            None => {
                let before = super::open(path)?;
                baseline = Some(summary_of(&before)?);
                let diff_options = DiffOptions { rank: options.rank, device: options.device, ..DiffOptions::default() };
                comparison = Some(diff(&before, &run, &diff_options, &mut |_| {}));
            }
        }
    }
    let limits = CheckOptions {
        max_peak: options.max_peak,
        max_reserved: options.max_reserved,
        max_leak: options.max_leak,
        max_categories,
        released_after: options.released_after.clone().zip(options.max),
        no_oom: options.no_oom,
        no_issues: options.no_issue.clone(),
        tolerance: options.tolerance,
        rank: options.rank,
        device: options.device,
        allow_incomplete: options.allow_incomplete,
    };
    let report = check_limits(&summary, baseline.as_ref(), comparison.as_ref(), &limits);
    if options.json {
        super::write_output(Printed::Json(&report.to_json()), None)?;
    } else {
        super::write_output(Printed::Text(&memtrace_analysis::check_text(&report)), None)?;
    }
    if options.github {
        let here = std::env::current_dir().unwrap_or_default();
        let root = std::env::var_os("GITHUB_WORKSPACE").filter(|root| !root.is_empty()).map_or(here, Into::into);
        let annotations = memtrace_analysis::github_annotations(&report, &root.to_string_lossy());
        super::write_output(Printed::Annotations(&annotations), None)?;
    }
    Ok(report.passed)
}

/// The limits of `--max-category`, with the names that the categories have in JSON. Fails when one names no category.
fn category_limits(options: &Check, rules: Option<&CustomRules>) -> anyhow::Result<Vec<(String, u64)>> {
    let custom: Vec<&str> = rules.into_iter().flat_map(CustomRules::categories).map(|(_, name)| name).collect();
    let named = |(name, limit): &(String, u64)| match category_named(name, &custom) {
        Some(category) => Ok((category.to_owned(), *limit)),
        None => {
            let names: Vec<&str> = Category::ALL.iter().map(|category| category.name()).chain(custom.clone()).collect();
            Err(WithHelp::new(
                format!("--max-category: no category is named {name}"),
                format!("use one of {}", names.join(", ")),
            )
            .into())
        }
    };
    options.max_category.iter().map(named).collect()
}

/// The category with this name in JSON, or with the name that reports print: in any letter case, singular or plural,
/// with spaces, hyphens or underscores. `None` if there is none, or if several custom categories are named so.
fn category_named<'a>(name: &str, custom: &[&'a str]) -> Option<&'a str> {
    let plain = |name: &str| {
        let letters: String = name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
        letters.trim_end_matches('s').to_owned()
    };
    let built_in = Category::ALL
        .into_iter()
        .flat_map(|category| [category.name(), category.plural()].map(|spelling| (spelling, category.name())));
    let spellings: Vec<(&str, &str)> = custom.iter().map(|name| (*name, *name)).chain(built_in).collect();
    if let Some((_, exact)) = spellings.iter().find(|(spelling, _)| *spelling == name) {
        return Some(exact);
    }
    let mut similar = spellings.iter().filter(|(spelling, _)| plain(spelling) == plain(name)).map(|(_, name)| *name);
    let first = similar.next().filter(|_| !plain(name).is_empty())?;
    similar.all(|other| other == first).then_some(first)
}

/// The content of a file that starts like a summary of memtrace, else `None`. A PyTorch snapshot may be JSON too.
fn summary_json(path: &Path) -> Option<Vec<u8>> {
    // A path that is no regular file is refused when it is opened as a run. Opening a pipe here would wait for its
    // writer.
    let file = untrusted::open(path).ok()?;
    let mut start = [0; START_SIZE];
    let read = file.read_at(&mut start, 0).ok()?;
    let start = start[..read].iter().filter(|byte| !byte.is_ascii_whitespace()).copied();
    if !start.take(11).eq(*b"{\"version\":") {
        return None;
    }
    untrusted::read(&file, MAX_SUMMARY_SIZE).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn categories_are_named_as_json_and_reports_do() {
        for category in Category::ALL {
            let (name, plural) = (category.name(), category.plural());
            for spelling in [name, plural, &plural.replace(' ', "-"), &name.to_uppercase(), &name.replace('_', " ")] {
                assert_eq!(category_named(spelling, &[]), Some(name), "{spelling}");
            }
        }
        for (spelling, name) in
            [("Gradients", "gradient"), ("Optimizer-States", "optimizer_state"), ("KVCache", "kv_cache")]
        {
            assert_eq!(category_named(spelling, &[]), Some(name), "{spelling}");
        }
        let custom = ["flash attention", "Flash-Attention", "Activations", "s"];
        let named = |name| category_named(name, &custom);
        assert_eq!([named("flash attention"), named("flash_attention")], [Some("flash attention"), None]);
        assert_eq!(
            [named("Activations"), named("activation"), named("ACTIVATION")],
            [Some("Activations"), Some("activation"), None]
        );
        assert_eq!([named("headache"), named("-")], [None, None]);
    }
}
