//! The setting of PyTorch's allocator that would have helped.

use memtrace_insight::units::size_text;

use crate::conclusions::AllocatorAdvice;
use crate::summary::{DeviceSummary, OomSummary, WhatIfSummary};

/// A setting that saves less than this share of the reserved bytes is not suggested, in percent.
const SMALL_SAVING: u64 = 5;

/// The best of the replayed allocator settings, if it is worth a remark.
pub(crate) fn allocator_advice(device: &DeviceSummary) -> Option<AllocatorAdvice> {
    let what_if = device.what_if.as_ref().filter(|what_if| what_if.mismatch.is_none())?;
    // The allocator of an engine's sleep mode does not work with other settings.
    if device.server_only().is_some_and(|server| server.may_sleep) {
        return None;
    }
    if let Some(oom) = device.explained_oom() {
        return advice_after_error(oom, what_if, rest_words(device));
    }
    let best = what_if.settings.iter().min_by_key(|setting| setting.reserved_peak_bytes)?;
    let whole = what_if.reserved_peak_bytes;
    let saves = whole.checked_sub(best.reserved_peak_bytes)?;
    (saves > 0 && saves >= whole / 100 * SMALL_SAVING).then(|| AllocatorAdvice {
        is_fix: true,
        text: format!(
            "PYTORCH_CUDA_ALLOC_CONF={}: saves {} of reserved memory, {} instead of {} at its peak",
            best.setting,
            size_text(saves),
            size_text(best.reserved_peak_bytes),
            size_text(whole)
        ),
    })
}

/// Words for what the program does after a refused request.
pub(crate) fn rest_words(device: &DeviceSummary) -> &'static str {
    if device.server_only().is_some() { "what follows" } else { "the rest of the step" }
}

/// The setting under which the interrupted step fits, else one under which at least the failed request fits. Of
/// several, the one with the fewest side effects, or with which the device lacks least.
fn advice_after_error(oom: &OomSummary, what_if: &WhatIfSummary, rest: &str) -> Option<AllocatorAdvice> {
    let limit = size_text(what_if.limit_bytes.unwrap_or_default());
    if let Some(fits) = what_if.settings.iter().find(|setting| setting.step_fits == Some(true)) {
        let text = format!(
            "PYTORCH_CUDA_ALLOC_CONF={}: the request and {rest} fit, with {} of at most {limit} reserved",
            fits.setting,
            size_text(fits.step_reserved_peak_bytes.unwrap_or(fits.reserved_peak_bytes)),
        );
        return Some(AllocatorAdvice { is_fix: true, text });
    }
    let delays = what_if.settings.iter().filter(|setting| setting.fits == Some(true));
    // Settings without a known rest come after those whose lack is known.
    let delays = delays.min_by_key(|setting| setting.step_short_bytes.unwrap_or(u64::MAX));
    let is_bound = oom.step_estimate.as_ref().is_some_and(|estimate| estimate.at_least);
    let bound = if is_bound { "at least " } else { "" };
    let text = match delays.map(|setting| (setting, setting.step_short_bytes)) {
        Some((setting, Some(short))) => format!(
            "PYTORCH_CUDA_ALLOC_CONF={} is not enough: the request fits, {rest} does not: {bound}{} short at its peak",
            setting.setting,
            size_text(short)
        ),
        Some((setting, None)) => format!(
            "PYTORCH_CUDA_ALLOC_CONF={}: the request fits, with {} of at most {limit} reserved; whether what follows \
             fits is unknown",
            setting.setting,
            size_text(setting.reserved_peak_bytes)
        ),
        None if !what_if.settings.is_empty() && what_if.settings.iter().all(|one| one.fits == Some(false)) => {
            let names: Vec<&str> = what_if.settings.iter().map(|setting| setting.setting.as_str()).collect();
            format!("no allocator setting makes the request fit: {}", names.join(", "))
        }
        None => return None,
    };
    Some(AllocatorAdvice { is_fix: false, text })
}
