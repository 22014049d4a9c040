//! Callbacks from the recording to features that it does not know.
//!
//! `lib.rs` has the one table of them. The recording reads it through a hidden symbol, which the loader resolves before
//! any code runs. So a hook that another library's constructor calls finds it too.

use memtrace_stackwalk::FrameText;
use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::event::Event;
use memtrace_trace::ids::FrameId;
use memtrace_trace::options::Options;

use super::watch::{Cause, Watch};

/// The functions of one feature. They are called inside a hook, on any thread. A guard may exist, so they write nothing
/// to the ring except through what they are given.
pub(crate) struct Observer {
    /// Makes the feature's state for a recording that is starting. A forked child finds its parent's in its slot.
    pub(crate) start: Option<fn(&Options, &mut Watch)>,
    /// Receives a new Python frame, after its definition.
    pub(crate) new_frame: Option<fn(FrameId, &FrameText<'_>)>,
    /// Reports that a call of an `nn.Module` was seen for the first time.
    pub(crate) new_module_call: Option<fn(&Watch)>,
    /// Reports what [`Watch`] was asked to report.
    pub(crate) watched: Option<fn(&Watch, Cause)>,
    /// Reports that an optimizer step begins or ends. `site` is a hash of the optimizer's label and stack at the
    /// beginning, `None` at the end.
    pub(crate) optimizer_step: Option<fn(&Watch, site: Option<u64>)>,
    /// Reports that no thread runs an autograd node any more, as requested.
    pub(crate) no_node_runs: Option<fn(&Watch)>,
    /// Reports that Python's garbage collector frees tensors, and once that this can be known. The feature may write a
    /// notice.
    pub(crate) collector_frees: Option<fn(&mut WriteNotice<'_>)>,
}

/// Writes a notice with this topic, status and text.
pub(crate) type WriteNotice<'a> = dyn FnMut(&str, NoticeStatus, &str) + 'a;

impl Observer {
    /// A feature without functions.
    pub(crate) const NONE: Observer = Observer {
        start: None,
        new_frame: None,
        new_module_call: None,
        watched: None,
        optimizer_step: None,
        no_node_runs: None,
        collector_frees: None,
    };

    /// A feature that only has state.
    pub(crate) const fn with_state(start: fn(&Options, &mut Watch)) -> Observer {
        Observer { start: Some(start), ..Observer::NONE }
    }
}

/// All features.
pub(crate) struct ObserverTable(pub(crate) &'static [Observer]);

// SAFETY: `lib.rs` defines this symbol as a pointer to a static of this type, and it never changes.
#[allow(improper_ctypes, reason = "both sides are this crate")]
unsafe extern "C" {
    /// The table of `lib.rs`.
    safe static memtrace_observers: &'static ObserverTable;
}

/// The functions of one kind that features have, in the order of the table.
fn functions<F: Copy + 'static>(of: impl Fn(&Observer) -> Option<F>) -> impl Iterator<Item = F> {
    memtrace_observers.0.iter().filter_map(of)
}

/// Makes the state of all features.
pub(crate) fn start(options: &Options) -> Watch {
    let mut watch = Watch::new();
    functions(|observer| observer.start).for_each(|start| start(options, &mut watch));
    watch
}

/// Reports a new Python frame.
pub(crate) fn new_frame(frame: FrameId, text: &FrameText<'_>) {
    functions(|observer| observer.new_frame).for_each(|take| take(frame, text));
}

/// Reports a new call of an `nn.Module`.
pub(crate) fn new_module_call(watch: &Watch) {
    functions(|observer| observer.new_module_call).for_each(|take| take(watch));
}

/// Reports what `watch` was asked to report of this event.
#[cold]
#[inline(never)]
pub(crate) fn watched(watch: &Watch, event: &Event, at_threshold: bool) {
    for cause in watch.causes(event, at_threshold) {
        functions(|observer| observer.watched).for_each(|take| take(watch, cause));
    }
}

/// Reports the begin or the end of an optimizer step.
pub(crate) fn optimizer_step(watch: &Watch, site: Option<u64>) {
    functions(|observer| observer.optimizer_step).for_each(|take| take(watch, site));
}

/// Reports that no thread runs an autograd node any more.
pub(crate) fn no_node_runs(watch: &Watch) {
    functions(|observer| observer.no_node_runs).for_each(|take| take(watch));
}

/// Reports that Python's garbage collector frees tensors.
pub(crate) fn collector_frees(notice: &mut WriteNotice<'_>) {
    functions(|observer| observer.collector_frees).for_each(|take| take(notice));
}
