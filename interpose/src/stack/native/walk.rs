//! What a thread remembers of its last native walk, so that only what changed is unwound.
//!
//! # The argument
//!
//! Unwinding is a function: a frame's [`State`] (instruction pointer, stack pointer, `rbp`), the rule for its instruction
//! pointer and the words that the rule reads decide the caller's state, and nothing else does. The thread keeps the states
//! of its last walk, index 0 = outermost, and with each the addresses of the words that were read to leave it. What these words
//! held is in the caller's remembered state.
//!
//! A capture unwinds from the present registers. As soon as a frame's state *equals* a remembered one, its callers need not be
//! unwound: it is checked that the remembered words still hold what they held. Where all of them do, all states down to
//! the outermost are what unwinding would give, by induction: same state, same rule, same words read, hence the same
//! caller's state. At the first word that differs, the state of that frame is still right; unwinding goes on from there, and
//! may meet remembered states again further out.
//!
//! - *Same rule*: rules are functions of the address as long as the object that holds it is loaded; when one has been
//!   unloaded ([`unloads`]), everything is forgotten. What ends a walk (the outermost frame, a guess that led nowhere) is not
//!   remembered but found again each time.
//! - *`rbp` counts where it is used*: most code keeps something of its own in it, another value every time. A frame's `rbp` matters
//!   if its rule makes an address from it, or if it leaves it to a caller where it matters. Where it does not, it is
//!   neither compared nor does it decide anything; but it is kept true, since another caller may make it matter.
//! - *Words are read where unwinding would read them*: between the present stack pointer and the end of the thread's own stack.
//!   The addresses were inside these bounds when they were remembered, are at or above the stack pointer of their frame,
//!   which the present walk has just reached, and the bounds' end is compared. Frames on other stacks (a signal's, a
//!   coroutine's) are not remembered.
//! - *Which remembered state to compare with* is found by stack pointers, which grow towards the outermost frame. A wrong
//!   choice costs time: nothing is concluded from less than equality.
//!
//! # Constraints
//!
//! A known stack: no allocation, no lock, no system call. Plain data, without a destructor, kept beside the thread's ring and
//! handed on with it.

use memtrace_trace::ids::StackId;

use super::super::key_cache::Meaning;
use super::array::{Array, Zeroed};
use super::memory::StackMemory;
use super::rule::{Reads, Rule, State, Step, leave_by_frame_pointer};
use super::{rules, unloads};

/// The deepest walk; deeper stacks lose their outermost frames, and that is counted.
pub(crate) const MAX_DEPTH: usize = 8192;
/// So many frames of generated code in a row are believed to be a chain of frame pointers.
const MOST_GUESSES: u32 = 32;

/// A frame, as it was walked.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Entry {
    pub(super) state: State,
    /// What the frame is, for whoever walks: unknown for a frame that is new.
    pub(super) meaning: Meaning,
    /// The stack up to here, for whoever walks.
    pub(super) stack: StackId,
    /// What was read to leave it. Not for the outermost.
    reads: Remembered,
    /// Whether its `rbp` decides anything.
    bp_matters: bool,
}

// SAFETY: numbers, and `bool`s that are false when zeroed.
unsafe impl Zeroed for Entry {}

const _: () = assert!(size_of::<Entry>() == 64, "an entry is one cache line");

/// [`Reads`] by distance from the frame's stack pointer in bytes, with the lowest bit set; 0: not read.
#[derive(Clone, Copy, Default)]
struct Remembered {
    ip: u32,
    bp: u32,
    sp: u32,
    by_bp: bool,
    /// All of it lies in the thread's own stack, so that it may be read again without asking.
    own: bool,
}

impl Remembered {
    #[inline]
    fn new(reads: Reads, sp: usize, memory: &StackMemory) -> Remembered {
        let mut own = true;
        let mut distance = |at: usize| {
            if at == 0 {
                return 0;
            }
            let found = at.checked_sub(sp).filter(|_| memory.is_own(at)).and_then(|d| u32::try_from(d).ok());
            own &= found.is_some_and(|d| d & 1 == 0);
            found.unwrap_or(0) | 1
        };
        let (ip, bp, sp) = (distance(reads.ip), distance(reads.bp), distance(reads.sp));
        Remembered { ip, bp, sp, by_bp: reads.by_bp, own }
    }

    /// # Safety
    /// [`Self::own`] held when this was made of a frame with this stack pointer, which is at or above the present one, on a stack
    /// with the same end; `distance` is one of these, not 0.
    #[inline]
    unsafe fn word(sp: usize, distance: u32) -> usize {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::with_exposed_provenance::<usize>(sp + (distance & !1) as usize).read_unaligned() }
    }
}

impl Entry {
    /// Whether a frame in this state is this frame, as far as anything depends on it.
    #[inline]
    fn is_in(&self, state: &State) -> bool {
        self.state.ip == state.ip
            && self.state.sp == state.sp
            && self.state.exact == state.exact
            && (!self.bp_matters || self.state.bp == state.bp)
    }
}

/// How a walk ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    /// At the outermost frame.
    Whole,
    /// Before it: unwinding information is missing or wrong.
    Lost,
    /// At [`MAX_DEPTH`].
    TooDeep,
    /// The kernel gave no memory: there are no frames.
    NoMemory,
}

/// What came of a walk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walked {
    /// How many frames there are.
    pub(super) depth: usize,
    /// Entries from here on are new: they may mean something else than they did.
    pub(super) changed: usize,
    pub(super) ending: Ending,
}

/// A thread's memory of its last walk. See the module for why it is right.
pub(super) struct Walk {
    /// Index 0 = outermost.
    entries: Array<Entry>,
    /// New frames, innermost first, while a walk is under way.
    fresh: Array<Entry>,
    /// Entries `0..known` hold.
    known: usize,
    /// The entries' stack ends here.
    end: usize,
    unloads: u32,
    ending: Ending,
}

impl Walk {
    pub(super) const fn new() -> Walk {
        Walk { entries: Array::new(), fresh: Array::new(), known: 0, end: 0, unloads: 0, ending: Ending::Whole }
    }

    /// Gives the memory back.
    pub(super) fn release(&mut self) {
        self.entries.release();
        self.fresh.release();
        *self = Walk::new();
    }

    /// An entry of the last walk.
    #[inline]
    pub(super) fn entry_mut(&mut self, index: usize) -> &mut Entry {
        self.entries.get_mut(index)
    }

    #[inline]
    pub(super) fn entry(&self, index: usize) -> &Entry {
        self.entries.get(index)
    }

    /// Forgets everything.
    pub(super) fn forget(&mut self) {
        self.known = 0;
    }

    /// Walks the stack from `start`, the registers of a frame of the calling thread that does not return before this does.
    #[inline]
    pub(super) fn walk(&mut self, start: State, memory: &mut StackMemory) -> Walked {
        let unloads = unloads::count();
        if unloads != Some(self.unloads) || self.end != memory.end() {
            self.known = 0;
            self.unloads = unloads.unwrap_or(0);
            self.end = memory.end();
        }
        let mut fresh = 0;
        // Entries `0..below` may still be met.
        let mut below = self.known;
        let mut state = start;
        let mut guesses = 0;
        let ending = loop {
            while below > 0 && self.entries.get(below - 1).state.sp < state.sp {
                below -= 1;
            }
            if below > 0 && self.entries.get(below - 1).is_in(&state) {
                self.entries.get_mut(below - 1).state.bp = state.bp;
                match self.first_difference(below - 1, memory, unloads) {
                    None => break self.ending,
                    Some(differs) => {
                        // What lies between is as it was, only its place may be another; what differs is left below.
                        if !self.fresh.reserve(fresh + below - differs) {
                            return self.without_memory();
                        }
                        for index in (differs..below).rev() {
                            *self.fresh.get_mut(fresh) = *self.entries.get(index);
                            fresh += 1;
                        }
                        below = differs;
                        state = self.entries.get(differs).state;
                    }
                }
            } else {
                if !self.fresh.reserve(fresh + 1) {
                    return self.without_memory();
                }
                *self.fresh.get_mut(fresh) = Entry {
                    state,
                    meaning: Meaning::UNKNOWN,
                    stack: StackId::NONE,
                    reads: Remembered::default(),
                    bp_matters: false,
                };
                fresh += 1;
            }
            if fresh >= MAX_DEPTH {
                below = 0;
                break Ending::TooDeep;
            }
            let rule = rules::rule(&state, unloads);
            match leave(&rule, state, memory, unloads, &mut guesses) {
                Step::Caller(caller, reads) => {
                    self.fresh.get_mut(fresh - 1).reads = Remembered::new(reads, state.sp, memory);
                    state = caller;
                }
                end => {
                    below = 0;
                    break if end == Step::End { Ending::Whole } else { Ending::Lost };
                }
            }
        };
        self.keep(below, fresh, unloads, ending)
    }

    /// Makes the entries `0..below` and the new frames the last walk.
    #[inline]
    fn keep(&mut self, below: usize, mut fresh: usize, unloads: Option<u32>, ending: Ending) -> Walked {
        if ending == Ending::Lost {
            // What a guess led to and nothing came of is no frame. (The leaf is ours.)
            while fresh > 1 && is_unknown(&rules::rule(&self.fresh.get(fresh - 1).state, unloads)) {
                fresh -= 1;
            }
        }
        let depth = below + fresh;
        if !self.entries.reserve(depth) {
            return self.without_memory();
        }
        for index in 0..fresh {
            *self.entries.get_mut(depth - 1 - index) = *self.fresh.get(index);
        }
        // The outermost frame is left anew each time, so its `rbp` matters.
        let mut matters = below.checked_sub(1).is_none_or(|index| self.entries.get(index).bp_matters);
        for index in below..depth {
            let entry = self.entries.get_mut(index);
            matters = index == 0 || entry.reads.by_bp || (entry.reads.bp == 0 && matters);
            entry.bp_matters = matters;
        }
        self.known = if unloads.is_none() || depth == 0 {
            0
        } else {
            (below.max(1)..depth).find(|index| !self.entries.get(*index).reads.own).unwrap_or(depth)
        };
        self.ending = ending;
        Walked { depth, changed: below, ending }
    }

    /// The highest index up to `from` whose frame is left for another caller than before; `None`: all are as they were. `rbp` is
    /// made true in all that were reached.
    #[inline]
    fn first_difference(&mut self, from: usize, memory: &mut StackMemory, unloads: Option<u32>) -> Option<usize> {
        let Entry { state: State { mut sp, mut bp, .. }, mut reads, .. } = *self.entries.get(from);
        for index in (0..from).rev() {
            let caller = self.entries.get_mut(index);
            // SAFETY: see the module: the words are inside the thread's own stack, above the present stack pointer.
            let (ip_now, sp_now) = unsafe {
                let sp_now = if reads.sp == 0 { caller.state.sp } else { Remembered::word(sp, reads.sp) };
                (Remembered::word(sp, reads.ip), sp_now)
            };
            if reads.bp != 0 {
                // SAFETY: as above.
                bp = unsafe { Remembered::word(sp, reads.bp) };
            }
            if ip_now != caller.state.ip || sp_now != caller.state.sp || (caller.bp_matters && bp != caller.state.bp) {
                return Some(index + 1);
            }
            caller.state.bp = bp;
            (sp, reads) = (sp_now, caller.reads);
        }
        let outermost = self.entries.get(0).state;
        let rule = rules::rule(&outermost, unloads);
        match leave(&rule, outermost, memory, unloads, &mut 0) {
            Step::End if self.ending == Ending::Whole => None,
            Step::Lost if self.ending == Ending::Lost => None,
            _ => Some(0),
        }
    }

    #[cold]
    fn without_memory(&mut self) -> Walked {
        self.known = 0;
        Walked { depth: 0, changed: 0, ending: Ending::NoMemory }
    }
}

/// Whether no object has the address that the rule is for.
fn is_unknown(rule: &Rule) -> bool {
    matches!(rule, Rule::Guess { known: false, .. })
}

#[inline]
fn leave(rule: &Rule, state: State, memory: &mut StackMemory, unloads: Option<u32>, guesses: &mut u32) -> Step {
    match rule {
        Rule::Frame(frame) => frame.leave(state, memory),
        Rule::Outermost => Step::End,
        Rule::Unsupported => Step::Lost,
        Rule::Guess { .. } => guess(state, memory, unloads, guesses),
    }
}

/// Leaves a frame that nothing is known of by its frame pointer, if what that leads to can be its caller.
#[cold]
fn guess(state: State, memory: &mut StackMemory, unloads: Option<u32>, guesses: &mut u32) -> Step {
    *guesses += 1;
    if *guesses > MOST_GUESSES {
        return Step::Lost;
    }
    let step = leave_by_frame_pointer(state, memory);
    match step {
        Step::Caller(caller, _) if !rules::rule(&caller, unloads).plausible_caller() => Step::Lost,
        step => step,
    }
}
