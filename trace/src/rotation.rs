//! What a trace states about the events that its rotation has dropped (`memtrace run --keep`): their number, where the
//! program was when the kept events begin, and what was known about the blocks that are older. Since 1.5.

use crate::error::Result;
use crate::ids::ThreadId;
use crate::wire::{Cursor, put_str, put_varint};

/// A place in the program. `T` is the type of its texts.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Progress<T> {
    /// The step, counted from 0; `None` before the first one.
    pub step: Option<u32>,
    /// The phase, as in `summary.json`.
    pub phase: T,
    /// How often the phase has changed.
    pub phase_changes: u32,
    /// How many backward passes have begun.
    pub backward_passes: u32,
    /// How many optimizer steps have begun.
    pub optimizer_steps: u32,
}

/// The start of the kept events. `T` is the type of its texts. Only the last definition of a trace counts.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Rotation<T> {
    /// The [`seq`](crate::event::Event::seq) of the first kept event. What comes before it is older: it recreates the state.
    pub first_seq: u64,
    /// The number of events that all rotations of the trace have dropped.
    pub dropped: u64,
    /// The number of events before the first kept one that recreate the state.
    pub recreating: u64,
    /// The time of the first event of the recording, and of the last one that was dropped, in the unit of [`crate::clock`].
    pub dropped_ticks: (u64, u64),
    /// Where the program was.
    pub progress: Progress<T>,
    /// How many steps had ended.
    pub ended_steps: u32,
    /// What else decides where steps and phases begin.
    pub circumstances: Circumstances,
}

/// What decides where steps and phases begin, beside the events. The meaning of each number is that of the analysis.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Circumstances {
    /// The thread that calls the model.
    pub main_thread: ThreadId,
    /// Bit 0: a model has run. Bit 1: the step is over. Bit 2: an optimizer has stepped since the last backward pass.
    /// Bit 3: the data loader has not been called since. Bit 4: the optimizer is stepping. Bit 5: ranges of PyTorch show the
    /// ends of steps.
    pub bits: u32,
    /// The backward passes of the current step.
    pub backward_passes_in_step: u32,
    /// The backward passes of the first step. `None` before its end.
    pub backward_passes_of_first_step: Option<u32>,
    /// The number of optimizer steps with evidence of their own.
    pub optimizer_steps_seen: u32,
}

/// What was known about a block that is older than the kept events. `T` is the type of its texts.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct EarlierBlock<T> {
    /// The [`seq`](crate::event::Event::seq) of its allocation.
    pub seq: u64,
    /// Where the program was when it was allocated.
    pub progress: Progress<T>,
    /// The phase of the allocation itself. On other threads it can differ from the program's.
    pub phase: T,
    /// The category of the block, as in `summary.json`, and the id of the rule that decided it. Empty if the events that
    /// follow decide.
    pub category: T,
    /// See [`Self::category`].
    pub rule: T,
}

fn put_option(out: &mut Vec<u8>, value: Option<u32>) {
    put_varint(out, value.map_or(0, |value| u64::from(value) + 1));
}

fn option(c: &mut Cursor<'_>) -> Result<Option<u32>> {
    Ok(c.varint()?.checked_sub(1).map(|value| u32::try_from(value).unwrap_or(u32::MAX)))
}

impl<T: AsRef<str>> Progress<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        put_option(out, self.step);
        put_str(out, self.phase.as_ref());
        for number in [self.phase_changes, self.backward_passes, self.optimizer_steps] {
            put_varint(out, number.into());
        }
    }
}

impl<'a> Progress<&'a str> {
    fn decode(c: &mut Cursor<'a>) -> Result<Progress<&'a str>> {
        Ok(Progress {
            step: option(c)?,
            phase: c.str()?,
            phase_changes: c.varint32()?,
            backward_passes: c.varint32()?,
            optimizer_steps: c.varint32()?,
        })
    }

    fn owned(&self) -> Progress<Box<str>> {
        let Progress { step, phase, phase_changes, backward_passes, optimizer_steps } = *self;
        Progress { step, phase: phase.into(), phase_changes, backward_passes, optimizer_steps }
    }
}

impl<T: AsRef<str>> Rotation<T> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let (first, last) = self.dropped_ticks;
        for number in [self.first_seq, self.dropped, self.recreating, first, last] {
            put_varint(out, number);
        }
        self.progress.encode(out);
        put_varint(out, self.ended_steps.into());
        let more = &self.circumstances;
        put_varint(out, more.main_thread.0.into());
        put_varint(out, more.bits.into());
        put_varint(out, more.backward_passes_in_step.into());
        put_option(out, more.backward_passes_of_first_step);
        put_varint(out, more.optimizer_steps_seen.into());
    }
}

impl<'a> Rotation<&'a str> {
    pub(crate) fn decode(c: &mut Cursor<'a>) -> Result<Rotation<&'a str>> {
        Ok(Rotation {
            first_seq: c.varint()?,
            dropped: c.varint()?,
            recreating: c.varint()?,
            dropped_ticks: (c.varint()?, c.varint()?),
            progress: Progress::decode(c)?,
            ended_steps: c.varint32()?,
            circumstances: Circumstances {
                main_thread: ThreadId(c.varint32()?),
                bits: c.varint32()?,
                backward_passes_in_step: c.varint32()?,
                backward_passes_of_first_step: option(c)?,
                optimizer_steps_seen: c.varint32()?,
            },
        })
    }

    /// The same with texts of its own.
    pub fn owned(&self) -> Rotation<Box<str>> {
        let Rotation { first_seq, dropped, recreating, dropped_ticks, ended_steps, circumstances, .. } = *self;
        let progress = self.progress.owned();
        Rotation { first_seq, dropped, recreating, dropped_ticks, progress, ended_steps, circumstances }
    }
}

impl<T: AsRef<str>> EarlierBlock<T> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.seq);
        self.progress.encode(out);
        for text in [&self.phase, &self.category, &self.rule] {
            put_str(out, text.as_ref());
        }
    }
}

impl<'a> EarlierBlock<&'a str> {
    pub(crate) fn decode(c: &mut Cursor<'a>) -> Result<EarlierBlock<&'a str>> {
        Ok(EarlierBlock {
            seq: c.varint()?,
            progress: Progress::decode(c)?,
            phase: c.str()?,
            category: c.str()?,
            rule: c.str()?,
        })
    }

    /// The same with texts of its own.
    pub fn owned(&self) -> EarlierBlock<Box<str>> {
        let EarlierBlock { seq, phase, category, rule, .. } = *self;
        EarlierBlock {
            seq,
            progress: self.progress.owned(),
            phase: phase.into(),
            category: category.into(),
            rule: rule.into(),
        }
    }
}
