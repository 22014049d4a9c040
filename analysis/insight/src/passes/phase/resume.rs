//! Taking over where the dropped events of a rotated trace have left the program, and stating it for the next rotation.

use memtrace_trace::event::Event;
use memtrace_trace::rotation::{Circumstances, Rotation};

use super::PhaseTracker;
use super::dropped::{Earlier, bit};
use super::event::START;
use super::step_machine::StepEvidence;
use crate::passes::model_calls::OpenCall;

impl PhaseTracker {
    /// Continues where the dropped events have left the program.
    #[cold]
    pub(super) fn resume(&mut self) {
        self.dropped.resumes_at = u64::MAX;
        let Some(Earlier { position, circumstances, .. }) = self.dropped.earlier.as_ref() else { return };
        let has = |bit: u32| circumstances.bits & bit != 0;
        self.now = *position;
        self.main_thread = circumstances.main_thread;
        self.model_ran = has(bit::MODEL_RAN);
        self.steps.is_over = has(bit::STEP_OVER);
        self.optimizer.has_stepped = has(bit::AFTER_OPTIMIZER);
        self.optimizer.awaits_loader = has(bit::LOADER_AWAITED);
        self.optimizer.is_running = has(bit::OPTIMIZER_RUNNING);
        self.steps.backward_passes = circumstances.backward_passes_in_step;
        self.steps.backward_passes_of_first = circumstances.backward_passes_of_first_step;
        self.steps.optimizer_steps = circumstances.optimizer_steps_seen;
        (self.last, self.evaluations.open_call) = (START, OpenCall::default());
    }

    /// The statement of a trace about the program whose events before `first_seq` are dropped. All of these events have
    /// been observed.
    pub fn rotation(&mut self, first_seq: u64) -> Rotation<&'static str> {
        if first_seq >= self.dropped.resumes_at {
            self.resume();
        }
        if first_seq > self.steps.next_end.1 {
            self.steps.advance_past_ends(first_seq, &mut self.now.step);
        }
        let bits = [
            (bit::MODEL_RAN, self.model_ran),
            (bit::STEP_OVER, self.steps.is_over),
            (bit::AFTER_OPTIMIZER, self.optimizer.has_stepped),
            (bit::LOADER_AWAITED, self.optimizer.awaits_loader),
            (bit::OPTIMIZER_RUNNING, self.optimizer.is_running),
            (bit::PROFILER_RANGES, self.steps.evidence == StepEvidence::ProfilerRange),
        ];
        let ended = u32::try_from(self.steps.next_end.0).unwrap_or(u32::MAX);
        Rotation {
            first_seq,
            progress: self.now.progress(),
            ended_steps: ended.saturating_add(self.dropped.ended_steps()),
            circumstances: Circumstances {
                main_thread: self.main_thread,
                bits: bits.into_iter().filter(|(_, is_set)| *is_set).map(|(bit, _)| bit).sum(),
                backward_passes_in_step: self.steps.backward_passes,
                backward_passes_of_first_step: self.steps.backward_passes_of_first,
                optimizer_steps_seen: self.steps.optimizer_steps,
            },
            ..Rotation::default()
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
