//! The end of a recording: how often the rings of an image that writes no more are still read.

use memtrace_trace::shm::layout::{RING_COUNT, RING_SLOTS};

use super::pass_result::{Activity, PassResult};

/// The maximum number of final passes over the rings. Passes that stop early or give up a gap do not count.
///
/// Final passes start when the image has ended, or when its recording ends while it still runs. Its threads may still
/// be in the middle of an event.
const MAX_FINAL_PASSES: u32 = 16;
/// The maximum number of gaps that the final passes may give up.
///
/// Full rings of all threads hold 128 reorder windows of events, with one such gap each.
const MAX_FINAL_GAPS: u32 = 4096;

/// The state of a recording whose image writes no more.
#[derive(Debug)]
pub(super) struct FinalPasses {
    pub(super) reason: &'static str,
    pub(super) wait_status: Option<i32>,
    /// The number of slots that may still be taken.
    allowance: u64,
    /// How many more times the gap before the events that were found may be given up.
    gaps: u32,
    /// The number of passes since the end that count toward [`MAX_FINAL_PASSES`].
    count: u32,
}

impl FinalPasses {
    /// Begins them, because of `reason`. `wait_status` is the way in which the process ended, if it has.
    pub(super) fn begin(reason: &'static str, wait_status: Option<i32>) -> FinalPasses {
        let allowance = (RING_COUNT * RING_SLOTS) as u64;
        FinalPasses { reason, wait_status, allowance, gaps: MAX_FINAL_GAPS, count: 0 }
    }

    /// Counts a pass. Returns the number below which a gap is given up now, if one is.
    pub(super) fn passed(&mut self, result: &PassResult) -> Option<u64> {
        self.allowance = self.allowance.saturating_sub(result.activity.slots);
        match *result {
            PassResult { stopped_early: true, .. } => {}
            PassResult { out_of_place: None, .. } => self.count += 1,
            // The image writes no more events. A smaller number that no ring holds will never arrive.
            PassResult { out_of_place: Some(seq), activity: Activity { slots: 0, .. }, .. } if self.gaps > 0 => {
                self.gaps -= 1;
                return Some(seq);
            }
            PassResult { out_of_place: Some(_), activity, .. } => self.count += u32::from(activity.slots == 0),
        }
        None
    }

    /// Whether they are complete after a pass with this result.
    ///
    /// The number of passes is bounded: another process may still write to the rings, or a thread may have died in the
    /// middle of an event.
    pub(super) fn are_complete(&self, last: &PassResult) -> bool {
        let PassResult { activity, stopped_early, out_of_place } = *last;
        let empty = self.count > 0 && !stopped_early && out_of_place.is_none() && activity.slots == 0;
        empty || self.count >= MAX_FINAL_PASSES || self.allowance == 0
    }
}
