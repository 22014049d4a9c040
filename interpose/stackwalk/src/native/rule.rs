//! How to unwind one frame: where the caller's registers are, for one code address.
//!
//! Three registers are tracked: the instruction pointer, the stack pointer and the frame pointer (`bp`: `rbp`, `x29`).
//! Compilers describe frames by the stack pointer or the frame pointer wherever a call is possible. A link register
//! matters only where a signal has interrupted a function that has not saved it. If unwinding information needs
//! anything else, there is no rule. The walk then ends there, which is counted.

use super::super::arch;
use super::memory::StackMemory;

/// The tracked registers of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameRegisters {
    /// Where the frame continues: a return address, or the interrupted instruction itself ([`Self::exact`]).
    pub(super) ip: usize,
    pub(super) sp: usize,
    pub(super) bp: usize,
    /// Whether `ip` is no return address: in the leaf, and in a frame that a signal interrupted.
    pub(super) exact: bool,
}

impl FrameRegisters {
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
    /// The word in which a signal frame has saved the link register of the frame.
    Link,
}

/// An address: a register plus an offset in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BaseOffset {
    pub(super) base: Base,
    pub(super) offset: i32,
}

/// How to unwind a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UnwindRule {
    /// With unwinding information.
    Frame(FrameRule),
    /// There is no information about this address, so only a frame pointer is possible.
    Guess {
        /// Whether the address is in the code of a loaded object.
        is_in_object: bool,
        /// Whether the instruction before the address is a call.
        follows_call: bool,
    },
    /// The outermost frame.
    Outermost,
    /// The unwinding information is not supported.
    Unsupported,
}

/// A frame that unwinding information describes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameRule {
    /// The canonical frame address, or the address where it is stored if `indirect` is set. Its base is never `Cfa`.
    pub(super) cfa: BaseOffset,
    pub(super) indirect: bool,
    pub(super) return_address: BaseOffset,
    /// Where the caller's frame pointer is saved. `None` if it is unchanged.
    pub(super) bp: Option<BaseOffset>,
    /// Whether the kernel created the frame for a signal handler.
    pub(super) signal: bool,
    /// Whether the instruction before the address is a call.
    pub(super) follows_call: bool,
}

/// The words that a step has read. Their values are in the caller's state.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct ReadAddresses {
    /// The addresses of the words, 0 if not read.
    pub(super) ip: usize,
    pub(super) bp: usize,
    pub(super) sp: usize,
    /// Whether an address was computed from the frame pointer.
    pub(super) uses_bp: bool,
}

/// The result of unwinding a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UnwindStep {
    /// The caller's state, and what was read to determine it.
    Caller(FrameRegisters, ReadAddresses),
    /// There is no caller.
    End,
    /// There may be a caller, but it cannot be found.
    Lost,
}

/// Whether no code can have this address.
fn is_impossible(ip: usize) -> bool {
    !arch::USER_ADDRESSES.contains(&ip)
}

impl FrameRule {
    /// Whether the return address is still in the link register.
    #[inline]
    fn is_in_link_register(&self) -> bool {
        arch::HAS_LINK_REGISTER && self.return_address.base == Base::Link
    }

    /// Unwinds one frame and returns the caller's state. `link` is the address of the word in which a signal frame has
    /// saved the frame's link register, 0 if there is none.
    #[inline]
    pub(super) fn unwind(&self, state: FrameRegisters, link: usize, memory: &mut StackMemory) -> UnwindStep {
        let uses_bp =
            [Some(self.cfa), Some(self.return_address), self.bp].into_iter().flatten().any(|p| p.base == Base::Bp);
        let mut reads = ReadAddresses { uses_bp, ..ReadAddresses::default() };
        let at = |address: BaseOffset, cfa: usize| {
            let base = match address.base {
                Base::Cfa => cfa,
                Base::Sp => state.sp,
                Base::Bp => state.bp,
                Base::Link => link,
            };
            base.wrapping_add_signed(address.offset as isize)
        };
        let mut cfa = at(self.cfa, 0);
        if self.indirect {
            reads.sp = cfa;
            let Some(value) = memory.read(cfa) else { return UnwindStep::Lost };
            cfa = value;
        }
        // A stack grows downwards, so callers have higher addresses. A signal may have switched stacks.
        let is_above = cfa > state.sp || (self.is_in_link_register() && link != 0 && cfa == state.sp);
        if !cfa.is_multiple_of(8) || !(is_above || self.signal) {
            return UnwindStep::Lost;
        }
        if self.is_in_link_register() && link == 0 {
            return UnwindStep::Lost;
        }
        reads.ip = at(self.return_address, cfa);
        let Some(ip) = memory.read(reads.ip).map(arch::without_signature) else { return UnwindStep::Lost };
        if ip == 0 {
            return UnwindStep::End;
        }
        let mut bp = state.bp;
        if let Some(address) = self.bp {
            reads.bp = at(address, cfa);
            let Some(value) = memory.read(reads.bp) else { return UnwindStep::Lost };
            bp = value;
        }
        if is_impossible(ip) {
            return UnwindStep::Lost;
        }
        UnwindStep::Caller(FrameRegisters { ip, sp: cfa, bp, exact: self.signal }, reads)
    }
}

/// Unwinds a frame by its frame pointer, if `bp` can be one. The caller must verify the result. Its stack pointer is
/// only a lower bound where the frame pointer does not give it ([`arch::FRAME_POINTER_GIVES_SP`]).
pub(super) fn unwind_by_frame_pointer(state: FrameRegisters, memory: &mut StackMemory) -> UnwindStep {
    let frame = FrameRule {
        cfa: BaseOffset { base: Base::Bp, offset: 16 },
        indirect: false,
        return_address: BaseOffset { base: Base::Cfa, offset: -8 },
        bp: Some(BaseOffset { base: Base::Cfa, offset: -16 }),
        signal: false,
        follows_call: false,
    };
    let is_possible = state.bp.is_multiple_of(8) && state.bp >= state.sp && memory.is_own(state.bp);
    if is_possible { frame.unwind(state, 0, memory) } else { UnwindStep::Lost }
}

const KIND_FRAME: u64 = 1;
const KIND_GUESS: u64 = 2;
const KIND_OUTERMOST: u64 = 3;
const KIND_UNSUPPORTED: u64 = 4;

fn pack_offset(address: BaseOffset) -> u64 {
    u64::from(address.offset.cast_unsigned()) << 2
        | match address.base {
            Base::Cfa => 0,
            Base::Sp => 1,
            Base::Bp => 2,
            Base::Link => 3,
        }
}

fn unpack_offset(word: u64) -> BaseOffset {
    let base = match word & 3 {
        0 => Base::Cfa,
        1 => Base::Sp,
        3 if arch::HAS_LINK_REGISTER => Base::Link,
        _ => Base::Bp,
    };
    BaseOffset { base, offset: ((word >> 2) as u32).cast_signed() }
}

impl UnwindRule {
    /// Three words for the cache of rules. Never all zero.
    pub(super) fn pack(&self) -> [u64; 3] {
        match self {
            UnwindRule::Frame(frame) => {
                let flags = u64::from(frame.indirect)
                    | u64::from(frame.signal) << 1
                    | u64::from(frame.follows_call) << 2
                    | u64::from(frame.bp.is_some()) << 3;
                [
                    pack_offset(frame.cfa) << 8 | KIND_FRAME,
                    pack_offset(frame.return_address) << 8 | flags,
                    frame.bp.map_or(0, pack_offset),
                ]
            }
            UnwindRule::Guess { is_in_object, follows_call } => {
                [KIND_GUESS, u64::from(*is_in_object) | u64::from(*follows_call) << 1, 0]
            }
            UnwindRule::Outermost => [KIND_OUTERMOST, 0, 0],
            UnwindRule::Unsupported => [KIND_UNSUPPORTED, 0, 0],
        }
    }

    /// The rule of three words from [`Self::pack`]. `None` for other words.
    #[inline]
    pub(super) fn unpack([first, second, third]: [u64; 3]) -> Option<UnwindRule> {
        match first & 0xff {
            KIND_FRAME => Some(UnwindRule::Frame(FrameRule {
                cfa: unpack_offset(first >> 8),
                indirect: second & 1 != 0,
                return_address: unpack_offset(second >> 8),
                bp: (second & 8 != 0).then(|| unpack_offset(third)),
                signal: second & 2 != 0,
                follows_call: second & 4 != 0,
            })),
            KIND_GUESS => Some(UnwindRule::Guess { is_in_object: second & 1 != 0, follows_call: second & 2 != 0 }),
            KIND_OUTERMOST => Some(UnwindRule::Outermost),
            KIND_UNSUPPORTED => Some(UnwindRule::Unsupported),
            _ => None,
        }
    }

    /// Whether a frame may continue at this address after a call. For results of frame pointers only.
    pub(super) fn is_plausible_caller(&self) -> bool {
        match self {
            // The frame's stack pointer may be unknown.
            UnwindRule::Frame(frame) => {
                frame.follows_call && (arch::FRAME_POINTER_GIVES_SP || frame.cfa.base == Base::Bp)
            }
            UnwindRule::Guess { is_in_object, follows_call } => *follows_call || !*is_in_object,
            UnwindRule::Outermost => true,
            UnwindRule::Unsupported => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(cfa: BaseOffset, bp: Option<BaseOffset>) -> FrameRule {
        let return_address = BaseOffset { base: Base::Cfa, offset: -8 };
        FrameRule { cfa, indirect: false, return_address, bp, signal: false, follows_call: true }
    }

    #[test]
    fn rules_survive_packing() {
        let address = |base, offset| BaseOffset { base, offset };
        let rules = [
            UnwindRule::Frame(frame(address(Base::Sp, 8), None)),
            UnwindRule::Frame(frame(address(Base::Sp, i32::MAX), Some(address(Base::Cfa, i32::MIN)))),
            UnwindRule::Frame(FrameRule {
                indirect: true,
                ..frame(address(Base::Bp, -40), Some(address(Base::Bp, 0)))
            }),
            UnwindRule::Frame(FrameRule {
                signal: true,
                follows_call: false,
                return_address: address(Base::Sp, 168),
                ..frame(address(Base::Sp, 160), Some(address(Base::Sp, 120)))
            }),
            UnwindRule::Guess { is_in_object: true, follows_call: false },
            UnwindRule::Guess { is_in_object: false, follows_call: true },
            UnwindRule::Outermost,
            UnwindRule::Unsupported,
        ];
        for rule in rules {
            assert_eq!(UnwindRule::unpack(rule.pack()), Some(rule));
        }
        assert_eq!(UnwindRule::unpack([0; 3]), None);
    }

    #[test]
    fn frames_are_unwound_as_their_rules_say() {
        // [0] saved rbp, [1] return address, [2] the address after [3].
        let mut words = [0x7777_usize, 0x40_1000, 0, 0x40_2000, 0];
        let base = (&raw const words).expose_provenance();
        words[2] = base + 32;
        // SAFETY: the range is the array, which outlives `memory`.
        let mut memory = unsafe { StackMemory::of(base, base + size_of_val(&words)) };
        let state = FrameRegisters { ip: 0x40_0000, sp: base, bp: base, exact: false };
        let address = |base, offset| BaseOffset { base, offset };
        let saved = frame(address(Base::Sp, 16), Some(address(Base::Cfa, -16)));
        let reads = ReadAddresses { ip: base + 8, bp: base, sp: 0, uses_bp: false };
        let caller = FrameRegisters { ip: 0x40_1000, sp: base + 16, bp: 0x7777, exact: false };
        assert_eq!(saved.unwind(state, 0, &mut memory), UnwindStep::Caller(caller, reads));
        let realigned = FrameRule { indirect: true, ..frame(address(Base::Bp, 16), None) };
        let caller = FrameRegisters { ip: 0x40_2000, sp: base + 32, bp: base, exact: false };
        assert_eq!(
            realigned.unwind(state, 0, &mut memory),
            UnwindStep::Caller(caller, ReadAddresses { ip: base + 24, bp: 0, sp: base + 16, uses_bp: true })
        );
        // A return address of 0 ends the stack. A frame must not be below its callee or misaligned.
        assert_eq!(frame(address(Base::Sp, 40), None).unwind(state, 0, &mut memory), UnwindStep::End);
        assert_eq!(frame(address(Base::Sp, 0), None).unwind(state, 0, &mut memory), UnwindStep::Lost);
        assert_eq!(frame(address(Base::Sp, 12), None).unwind(state, 0, &mut memory), UnwindStep::Lost);
        assert_eq!(unwind_by_frame_pointer(FrameRegisters { bp: base - 8, ..state }, &mut memory), UnwindStep::Lost);
        assert_eq!(unwind_by_frame_pointer(FrameRegisters { bp: 3, ..state }, &mut memory), UnwindStep::Lost);
    }
}
