//! How to unwind one frame: where the caller's registers are, for one code address.
//!
//! Three registers are tracked: the instruction pointer, the stack pointer and `rbp`. Compilers describe frames by the
//! stack pointer or `rbp` wherever a call is possible. If unwinding information needs anything else, there is no rule.
//! The walk then ends there, which is counted.

use super::memory::StackMemory;

/// The tracked registers of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State {
    /// Where the frame continues: a return address, or the interrupted instruction itself ([`Self::exact`]).
    pub(super) ip: usize,
    pub(super) sp: usize,
    pub(super) bp: usize,
    /// Whether `ip` is no return address: in the leaf, and in a frame that a signal interrupted.
    pub(super) exact: bool,
}

impl State {
    /// An address inside the frame's current instruction. A return address itself may be in the next function.
    pub(super) fn lookup(&self) -> usize {
        if self.exact { self.ip } else { self.ip.wrapping_sub(1) }
    }

    /// The address in the form of a return address: one past a byte of the frame's current instruction.
    pub(super) fn return_address(&self) -> usize {
        if self.exact { self.ip.wrapping_add(1) } else { self.ip }
    }
}

/// The register to which an offset in a rule is relative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Base {
    Cfa,
    Sp,
    Bp,
}

/// An address: a register plus an offset in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) base: Base,
    pub(super) offset: i32,
}

/// How to unwind a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rule {
    /// With unwinding information.
    Frame(Frame),
    /// There is no information about this address, so only a frame pointer is possible.
    Guess {
        /// Whether the address is in the code of a loaded object.
        known: bool,
        /// Whether the instruction before the address is a call.
        called: bool,
    },
    /// The outermost frame.
    Outermost,
    /// The unwinding information is not supported.
    Unsupported,
}

/// A frame that unwinding information describes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Frame {
    /// The canonical frame address, or the address where it is stored if `indirect` is set. Its base is never `Cfa`.
    pub(super) cfa: Place,
    pub(super) indirect: bool,
    pub(super) return_address: Place,
    /// Where the caller's `rbp` is saved. `None` if `rbp` is unchanged.
    pub(super) bp: Option<Place>,
    /// Whether the kernel created the frame for a signal handler.
    pub(super) signal: bool,
    /// Whether the instruction before the address is a call.
    pub(super) called: bool,
}

/// The words that a step has read. Their values are in the caller's state.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Reads {
    /// The addresses of the words, 0 if not read.
    pub(super) ip: usize,
    pub(super) bp: usize,
    pub(super) sp: usize,
    /// Whether an address was computed from `rbp`.
    pub(super) by_bp: bool,
}

/// The result of unwinding a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The caller's state, and what was read to determine it.
    Caller(State, Reads),
    /// There is no caller.
    End,
    /// There may be a caller, but it cannot be found.
    Lost,
}

/// Whether no code can have this address.
fn impossible(ip: usize) -> bool {
    !(4096..1 << 47).contains(&ip)
}

impl Frame {
    /// Unwinds one frame and returns the caller's state.
    #[inline]
    pub(super) fn leave(&self, state: State, memory: &mut StackMemory) -> Step {
        let by_bp =
            [Some(self.cfa), Some(self.return_address), self.bp].into_iter().flatten().any(|p| p.base == Base::Bp);
        let mut reads = Reads { by_bp, ..Reads::default() };
        let at = |place: Place, cfa: usize| {
            let base = match place.base {
                Base::Cfa => cfa,
                Base::Sp => state.sp,
                Base::Bp => state.bp,
            };
            base.wrapping_add_signed(place.offset as isize)
        };
        let mut cfa = at(self.cfa, 0);
        if self.indirect {
            reads.sp = cfa;
            let Some(value) = memory.read(cfa) else { return Step::Lost };
            cfa = value;
        }
        // A stack grows downwards, so callers have higher addresses. A signal may have switched stacks.
        if !cfa.is_multiple_of(8) || (cfa <= state.sp && !self.signal) {
            return Step::Lost;
        }
        reads.ip = at(self.return_address, cfa);
        let Some(ip) = memory.read(reads.ip) else { return Step::Lost };
        if ip == 0 {
            return Step::End;
        }
        let mut bp = state.bp;
        if let Some(place) = self.bp {
            reads.bp = at(place, cfa);
            let Some(value) = memory.read(reads.bp) else { return Step::Lost };
            bp = value;
        }
        if impossible(ip) {
            return Step::Lost;
        }
        Step::Caller(State { ip, sp: cfa, bp, exact: self.signal }, reads)
    }
}

/// Unwinds a frame by its frame pointer, if `rbp` can be one. The caller must verify the result.
pub(super) fn leave_by_frame_pointer(state: State, memory: &mut StackMemory) -> Step {
    let frame = Frame {
        cfa: Place { base: Base::Bp, offset: 16 },
        indirect: false,
        return_address: Place { base: Base::Cfa, offset: -8 },
        bp: Some(Place { base: Base::Cfa, offset: -16 }),
        signal: false,
        called: false,
    };
    let aligned = state.bp.is_multiple_of(8) && state.bp >= state.sp && memory.is_own(state.bp);
    if aligned { frame.leave(state, memory) } else { Step::Lost }
}

const KIND_FRAME: u64 = 1;
const KIND_GUESS: u64 = 2;
const KIND_OUTERMOST: u64 = 3;
const KIND_UNSUPPORTED: u64 = 4;

fn pack_place(place: Place) -> u64 {
    u64::from(place.offset.cast_unsigned()) << 2
        | match place.base {
            Base::Cfa => 0,
            Base::Sp => 1,
            Base::Bp => 2,
        }
}

fn unpack_place(word: u64) -> Place {
    let base = match word & 3 {
        0 => Base::Cfa,
        1 => Base::Sp,
        _ => Base::Bp,
    };
    Place { base, offset: ((word >> 2) as u32).cast_signed() }
}

impl Rule {
    /// Three words for the cache of rules. Never all zero.
    pub(super) fn pack(&self) -> [u64; 3] {
        match self {
            Rule::Frame(frame) => {
                let flags = u64::from(frame.indirect)
                    | u64::from(frame.signal) << 1
                    | u64::from(frame.called) << 2
                    | u64::from(frame.bp.is_some()) << 3;
                [
                    pack_place(frame.cfa) << 8 | KIND_FRAME,
                    pack_place(frame.return_address) << 8 | flags,
                    frame.bp.map_or(0, pack_place),
                ]
            }
            Rule::Guess { known, called } => [KIND_GUESS, u64::from(*known) | u64::from(*called) << 1, 0],
            Rule::Outermost => [KIND_OUTERMOST, 0, 0],
            Rule::Unsupported => [KIND_UNSUPPORTED, 0, 0],
        }
    }

    /// The rule of three words from [`Self::pack`]. `None` for other words.
    #[inline]
    pub(super) fn unpack([first, second, third]: [u64; 3]) -> Option<Rule> {
        match first & 0xff {
            KIND_FRAME => Some(Rule::Frame(Frame {
                cfa: unpack_place(first >> 8),
                indirect: second & 1 != 0,
                return_address: unpack_place(second >> 8),
                bp: (second & 8 != 0).then(|| unpack_place(third)),
                signal: second & 2 != 0,
                called: second & 4 != 0,
            })),
            KIND_GUESS => Some(Rule::Guess { known: second & 1 != 0, called: second & 2 != 0 }),
            KIND_OUTERMOST => Some(Rule::Outermost),
            KIND_UNSUPPORTED => Some(Rule::Unsupported),
            _ => None,
        }
    }

    /// Whether a frame may continue at this address after a call. For results of frame pointers only.
    pub(super) fn plausible_caller(&self) -> bool {
        match self {
            Rule::Frame(frame) => frame.called,
            Rule::Guess { known, called } => *called || !*known,
            Rule::Outermost => true,
            Rule::Unsupported => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(cfa: Place, bp: Option<Place>) -> Frame {
        let return_address = Place { base: Base::Cfa, offset: -8 };
        Frame { cfa, indirect: false, return_address, bp, signal: false, called: true }
    }

    #[test]
    fn rules_survive_packing() {
        let place = |base, offset| Place { base, offset };
        let rules = [
            Rule::Frame(frame(place(Base::Sp, 8), None)),
            Rule::Frame(frame(place(Base::Sp, i32::MAX), Some(place(Base::Cfa, i32::MIN)))),
            Rule::Frame(Frame { indirect: true, ..frame(place(Base::Bp, -40), Some(place(Base::Bp, 0))) }),
            Rule::Frame(Frame {
                signal: true,
                called: false,
                return_address: place(Base::Sp, 168),
                ..frame(place(Base::Sp, 160), Some(place(Base::Sp, 120)))
            }),
            Rule::Guess { known: true, called: false },
            Rule::Guess { known: false, called: true },
            Rule::Outermost,
            Rule::Unsupported,
        ];
        for rule in rules {
            assert_eq!(Rule::unpack(rule.pack()), Some(rule));
        }
        assert_eq!(Rule::unpack([0; 3]), None);
    }

    #[test]
    fn frames_are_left_as_their_rules_say() {
        // [0] saved rbp, [1] return address, [2] the address after [3].
        let mut words = [0x7777_usize, 0x40_1000, 0, 0x40_2000, 0];
        let base = (&raw const words).expose_provenance();
        words[2] = base + 32;
        // SAFETY: the range is the array, which outlives `memory`.
        let mut memory = unsafe { StackMemory::of(base, base + size_of_val(&words)) };
        let state = State { ip: 0x40_0000, sp: base, bp: base, exact: false };
        let place = |base, offset| Place { base, offset };
        let saved = frame(place(Base::Sp, 16), Some(place(Base::Cfa, -16)));
        let reads = Reads { ip: base + 8, bp: base, sp: 0, by_bp: false };
        let caller = State { ip: 0x40_1000, sp: base + 16, bp: 0x7777, exact: false };
        assert_eq!(saved.leave(state, &mut memory), Step::Caller(caller, reads));
        let realigned = Frame { indirect: true, ..frame(place(Base::Bp, 16), None) };
        let caller = State { ip: 0x40_2000, sp: base + 32, bp: base, exact: false };
        assert_eq!(
            realigned.leave(state, &mut memory),
            Step::Caller(caller, Reads { ip: base + 24, bp: 0, sp: base + 16, by_bp: true })
        );
        // A return address of 0 ends the stack. A frame must not be below its callee or misaligned.
        assert_eq!(frame(place(Base::Sp, 40), None).leave(state, &mut memory), Step::End);
        assert_eq!(frame(place(Base::Sp, 0), None).leave(state, &mut memory), Step::Lost);
        assert_eq!(frame(place(Base::Sp, 12), None).leave(state, &mut memory), Step::Lost);
        assert_eq!(leave_by_frame_pointer(State { bp: base - 8, ..state }, &mut memory), Step::Lost);
        assert_eq!(leave_by_frame_pointer(State { bp: 3, ..state }, &mut memory), Step::Lost);
    }
}
