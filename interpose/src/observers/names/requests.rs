//! Requests scans, and runs them between two Python instructions.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::NoticeStatus;

use super::reported::TOPIC;
use super::scan::{ScanRequest, ScanState};
use super::schedule::{Scan, cause};
use super::step_sites::StepSites;
use crate::cpython::api;
use crate::cpython::gil::GilToken;
use crate::cuda::usage;
use crate::recording::errno::RestoreErrno;
use crate::recording::guard::Guard;
use crate::recording::observer::Observer;
use crate::recording::process::Process;
use crate::recording::slot::Slot;
use crate::recording::thread_local::with_thread_local;
use crate::recording::watch::{Cause, Watch};
use crate::torch::running_nodes;

/// A program without a backward pass is first scanned after `FIRST_FREES` freed blocks. Each later threshold is
/// `FREES_GROW` times larger.
const FIRST_FREES: u32 = 16;
const FREES_GROW: u32 = 8;
/// In a program that does not train, the first call of an unknown module schedules a scan after this many freed blocks.
/// By then the program has called all modules of the model, or a backward pass has run.
const FREES_AFTER_CALL: u32 = 128;

/// The part of tensor names in a recording.
pub(crate) const OBSERVER: Observer = Observer {
    start: Some(|options, watch| {
        if options.names {
            watch.watch_frees();
            watch.report_at_frees(FIRST_FREES);
            watch.report_backward(true);
        }
        NAMES.set(Names::new(options.names));
    }),
    new_module_call: Some(|watch| with_names(|names| names.module_first_called(watch))),
    watched: Some(|watch, cause| {
        with_names(|names| match cause {
            Cause::Backward => names.request(watch, cause::BACKWARD),
            Cause::Frees => names.request(watch, cause::FREES),
            Cause::Counters => {}
            Cause::OutOfMemory => {
                names.has_failed.store(true, Ordering::Relaxed);
                names.request(watch, cause::OOM);
            }
        })
    }),
    optimizer_step: Some(|watch, site| {
        with_names(|names| {
            site.inspect(|site| names.step_sites.add(*site));
            names.request(watch, cause::OPTIMIZER);
        })
    }),
    // Requests the scan that waited for the end of a backward pass.
    no_node_runs: Some(|watch| with_names(|names| names.request(watch, 0))),
    ..Observer::NONE
};

static NAMES: Slot<Names> = Slot::new();

fn with_names(visit: impl FnOnce(&Names)) {
    if let Some(names) = NAMES.get() {
        visit(names);
    }
}

/// The state of tensor names in one recording.
struct Names {
    /// Whether the options request tensor names and they can be read.
    is_on: AtomicBool,
    /// Set while a pending call is queued in the interpreter.
    is_call_pending: AtomicBool,
    /// The reasons for the requested scan, a set of bits ([`cause`]).
    causes: AtomicU8,
    /// Set once the program has run a backward pass or an optimizer step.
    is_training: AtomicBool,
    /// Set once an allocation has failed.
    has_failed: AtomicBool,
    step_sites: StepSites,
    is_scanning: AtomicBool,
    state: UnsafeCell<ScanState>,
}

// SAFETY: only the thread that has set `is_scanning` uses `state`, and all other fields are atomic. The addresses of
// Python objects are plain numbers. `scan` dereferences them only with the GIL, after it has checked that the objects
// are alive.
unsafe impl Sync for Names {}
// SAFETY: only the thread that has set `is_scanning` uses `state`. The addresses of Python objects in it are plain
// numbers and belong to no thread.
unsafe impl Send for Names {}

impl Names {
    fn new(is_on: bool) -> Names {
        Names {
            is_on: AtomicBool::new(is_on),
            is_call_pending: AtomicBool::new(false),
            causes: AtomicU8::new(0),
            is_training: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            step_sites: StepSites::new(),
            is_scanning: AtomicBool::new(false),
            state: UnsafeCell::new(ScanState::default()),
        }
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn switch_off(&self, watch: &Watch) {
        self.is_on.store(false, Ordering::Relaxed);
        watch.report_at_frees(0);
        watch.report_backward(false);
    }

    /// Notes the first call of a module. Only a program that does not train needs the earlier scan that this schedules.
    fn module_first_called(&self, watch: &Watch) {
        if self.is_on() && !self.is_training.load(Ordering::Relaxed) {
            let earlier = watch.frees().saturating_add(FREES_AFTER_CALL);
            if earlier < watch.next_report() {
                watch.report_at_frees(earlier);
            }
        }
    }

    /// Queues a pending call, in which the interpreter calls [`scan`].
    #[cold]
    fn request(&self, watch: &Watch, causes: u8) {
        if causes & cause::TRAINING != 0 {
            self.is_training.store(true, Ordering::Relaxed);
        }
        if !self.is_on() {
            return;
        }
        self.causes.fetch_or(causes, Ordering::AcqRel);
        if self.is_call_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        watch.report_backward(false);
        let Some(api) = api::find().filter(|api| api.is_running()) else { return self.switch_off(watch) };
        if !api.queue_call(scan) {
            // The interpreter's queue of pending calls is full.
            self.is_call_pending.store(false, Ordering::Release);
            request_at_next_free(watch);
        }
    }

    /// Runs the requested scan. Only the thread that has set `is_scanning` may call this, with the GIL.
    fn run(&self, process: &'static Process, state: &mut ScanState) {
        let watch = &process.watch;
        let start = clock::monotonic_ns();
        if running_nodes::is_any() || with_thread_local(|t| t.backward_depth.get()) > 0 {
            // A running backward pass is about to change gradients. The causes stay set for the scan that is requested
            // once no node runs.
            return;
        }
        let causes = self.causes.swap(0, Ordering::AcqRel);
        let Some(api) = api::found() else { return };
        // SAFETY: the interpreter makes pending calls with the GIL, and this function does not release it.
        let Some(gil) = (unsafe { GilToken::new(api) }) else {
            self.causes.fetch_or(causes, Ordering::AcqRel);
            return request_at_next_free(watch);
        };
        let request = ScanRequest {
            causes,
            is_training: self.is_training.load(Ordering::Relaxed),
            has_failed: self.has_failed.load(Ordering::Relaxed),
            step_sites: &self.step_sites,
        };
        let result = state.scan(process, gil, request);
        process.count(Counter::NamesMicroseconds, clock::monotonic_ns().saturating_sub(start) / 1000);
        match result {
            // Nothing to scan yet: a model under construction has no names, and PyTorch may not be imported.
            Ok(Scan::Nothing) if causes & cause::FREES != 0 => {
                watch.report_at_frees(watch.frees().saturating_add(FIRST_FREES));
            }
            Ok(Scan::Nothing) => {}
            Ok(_) => {
                watch.report_at_frees(watch.frees().saturating_mul(FREES_GROW).max(FIRST_FREES));
                usage::scanned();
            }
            Err(reason) => {
                if let Some(mut guard) = Guard::enter() {
                    guard.notice(TOPIC, NoticeStatus::Off, &format!("no names of tensors and modules: {reason}"));
                }
                self.switch_off(watch);
            }
        }
    }
}

/// Schedules a new request at the next free, because the scan is not possible now.
fn request_at_next_free(watch: &Watch) {
    watch.report_backward(true);
    watch.report_at_frees(watch.frees().wrapping_add(1).max(1));
}

/// The interpreter calls this function on its main thread, with the GIL. A result other than 0 would raise an
/// exception.
unsafe extern "C" fn scan(_: *mut c_void) -> c_int {
    let _errno = RestoreErrno::new();
    // `None` in a forked child that has recorded nothing yet: the request belongs to its parent.
    if let Some(process) = Process::if_started()
        && let Some(names) = NAMES.get()
        && !names.is_scanning.swap(true, Ordering::Acquire)
    {
        if names.is_call_pending.swap(false, Ordering::AcqRel) && names.is_on() {
            process.watch.report_backward(true);
            // SAFETY: this thread has set `is_scanning`, so no other thread accesses `state` until it clears it.
            names.run(process, unsafe { &mut *names.state.get() });
        }
        names.is_scanning.store(false, Ordering::Release);
    }
    0
}
