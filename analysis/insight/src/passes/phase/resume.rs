//! Taking over where the dropped events of a rotated trace have left the program, and the same for the next rotation.

use memtrace_input::KeptProgress;
use memtrace_trace::event::Event;
use memtrace_trace::ids::ThreadId;

use super::PhaseTracker;
use super::dropped::Earlier;
use super::event::{MAX_COUNT, START};
use super::step_machine::StepEvidence;
use crate::passes::model_calls::OpenCall;

impl PhaseTracker {
    /// Continues where the dropped events have left the program.
    #[cold]
    pub(super) fn resume(&mut self) {
        self.dropped.resumes_at = u64::MAX;
        let Some(Earlier { position, progress, .. }) = self.dropped.earlier.as_ref() else { return };
        self.now = *position;
        self.main_thread = ThreadId(progress.main_thread);
        self.model_ran = progress.model_ran;
        self.steps.is_over = progress.step_is_over;
        self.optimizer.has_stepped = progress.optimizer_has_stepped;
        self.optimizer.awaits_loader = progress.awaits_loader;
        self.optimizer.is_running = progress.optimizer_is_running;
        self.steps.backward_passes = progress.backward_passes_in_step.min(MAX_COUNT);
        self.steps.backward_passes_of_first =
            progress.backward_passes_of_first_step.map(|passes| passes.min(MAX_COUNT));
        self.steps.optimizer_steps = progress.optimizer_steps.min(MAX_COUNT);
        (self.last, self.evaluations.open_call) = (START, OpenCall::default());
    }

    /// The state to keep of the program when the events before `first_seq` are dropped. All of them have been observed.
    pub fn to_kept(&mut self, first_seq: u64) -> KeptProgress {
        if first_seq >= self.dropped.resumes_at {
            self.resume();
        }
        if first_seq > self.steps.next_end.1 {
            self.steps.advance_past_ends(first_seq, &mut self.now.step);
        }
        let ended = u32::try_from(self.steps.next_end.0).unwrap_or(u32::MAX);
        KeptProgress {
            position: self.now.to_kept(),
            ended_steps: ended.saturating_add(self.dropped.ended_steps()),
            main_thread: self.main_thread.0,
            model_ran: self.model_ran,
            step_is_over: self.steps.is_over,
            optimizer_has_stepped: self.optimizer.has_stepped,
            awaits_loader: self.optimizer.awaits_loader,
            optimizer_is_running: self.optimizer.is_running,
            has_profiler_ranges: self.steps.evidence == StepEvidence::ProfilerRange,
            backward_passes_in_step: self.steps.backward_passes,
            backward_passes_of_first_step: self.steps.backward_passes_of_first,
            optimizer_steps: self.steps.optimizer_steps,
        }
    }

    /// The number of steps before the step in which the kept events of a rotated trace begin.
    pub fn dropped_steps(&self) -> u32 {
        self.dropped.earlier.as_ref().and_then(|earlier| earlier.position.step).unwrap_or(0)
    }

    /// Whether an event is older than the kept events of a rotated trace.
    #[inline]
    pub fn is_earlier(&self, e: &Event) -> bool {
        self.dropped.resumes_at != u64::MAX && e.seq < self.dropped.resumes_at
    }
}
