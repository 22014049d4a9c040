//! Reads unwinding information (`.eh_frame`) in place and converts it into a [`UnwindRule`] for one code address.
//!
//! `gimli` does the parsing. framehop, which also uses gimli, was considered first. It supports no expression that
//! reads memory and silently falls back to the frame pointer there. GCC describes every function that realigns its
//! stack with such an expression: 5,119 of 348,883 in PyTorch 2.11's libtorch_cpu (`DW_OP_breg6 -40; DW_OP_deref`). So
//! does the C library for signal frames. For the caller of such a function, a frame pointer gives a wrong stack
//! pointer.
//!
//! # No panic
//!
//! gimli returns an error for invalid bytes. The parts used here were reviewed for 0.33. Readers check every length
//! (`EndianSlice`). Rows and their stack have fixed sizes and refuse what does not fit (`TooManyRegisterRules`,
//! `StackFull`). Arithmetic on addresses wraps or is checked.
//!
//! There are two exceptions. `EhHdrTable::pointer_to_offset` subtracts unchecked and is not called.
//! `EhHdrTable::lookup` multiplies the table's count and is built without overflow checks (`Cargo.toml`); the table's
//! bounds refuse a wrapped result. The fuzzer's target `unwind` tests all of this with arbitrary bytes.

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, Encoding, EndianSlice, Expression, Format, LittleEndian, Operation,
    RegisterRule, UnwindContext, UnwindContextStorage, UnwindSection, UnwindTableRow,
};

use super::super::arch;
use super::elf_objects::ElfObject;
use super::rule::{Base, BaseOffset, FrameRule, UnwindRule};

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// Storage for one row on the stack. x86-64 has 17 registers that programs save, and 16 vector registers that code for
/// other systems' calling conventions saves. AArch64 has 12 and 8, or 16 for vector functions, and the state of
/// signatures.
struct OnStack;

impl UnwindContextStorage<usize> for OnStack {
    type Rules = [(gimli::Register, RegisterRule<usize>); 36];
    type Stack = [UnwindTableRow<usize, OnStack>; 4];
}

const ENCODING: Encoding = Encoding { address_size: 8, format: Format::Dwarf32, version: 4 };

/// The rule for an address in the code of `object`. `lookup` is inside the frame's current instruction, `ip` is where
/// the frame continues.
#[cold]
#[inline(never)]
pub(super) fn rule(object: &ElfObject<'_>, lookup: usize, ip: usize) -> UnwindRule {
    let follows_call = object.code(lookup).is_some_and(|code| {
        let start = code.as_ptr().addr();
        arch::ends_with_call(code.get(..ip.wrapping_sub(start)).unwrap_or_default())
    });
    if let Some(rule) = signal_rule(object, ip) {
        return rule;
    }
    let mut context = UnwindContext::<usize, OnStack>::new_in();
    with_row(object, lookup, &mut context, |section, row, signal| translate(section, row, signal, follows_call, ip))
        .unwrap_or(UnwindRule::Guess { is_in_object: true, follows_call })
}

/// The rule for the frame that the kernel created for a signal handler, if the frame continues in the code that returns
/// from one, and the architecture has a layout for that.
fn signal_rule(object: &ElfObject<'_>, ip: usize) -> Option<UnwindRule> {
    let saved = arch::SAVED_BY_SIGNAL?;
    let code = object.code(ip)?;
    if !arch::is_signal_return(code.get(ip.checked_sub(code.as_ptr().addr())?..)?) {
        return None;
    }
    let at = |offset| BaseOffset { base: Base::Sp, offset };
    Some(UnwindRule::Frame(FrameRule {
        cfa: at(saved.sp),
        indirect: true,
        return_address: at(saved.ip),
        bp: Some(at(saved.bp)),
        signal: true,
        follows_call: false,
    }))
}

/// A function, or one part of a split function.
pub(super) struct CodeRange {
    /// The address of its first byte.
    pub(super) start: usize,
    /// The address after its last byte.
    pub(super) end: usize,
    /// Whether it starts like a function, with at most the return address on the stack.
    pub(super) is_function_start: bool,
}

/// The extent of the function or part that contains `lookup`. `None` without unwinding information.
pub(super) fn code_range(object: &ElfObject<'_>, lookup: usize) -> Option<CodeRange> {
    let mut context = UnwindContext::<usize, OnStack>::new_in();
    let (section, bases, fde) = entry(object, lookup)?;
    let (start, end) = (fde.initial_address(), fde.end_address());
    let row = fde.unwind_info_for_address(&section, &bases, &mut context, start).ok()?;
    let at_function_start = CfaRule::RegisterAndOffset { register: arch::SP, offset: arch::CFA_AT_START };
    Some(CodeRange { start: start as usize, end: end as usize, is_function_start: *row.cfa() == at_function_start })
}

type Entry<'a> = (EhFrame<Bytes<'a>>, BaseAddresses, gimli::FrameDescriptionEntry<Bytes<'a>>);

/// The entry that covers `lookup`. All addresses are those of the running process.
fn entry<'a>(object: &ElfObject<'a>, lookup: usize) -> Option<Entry<'a>> {
    let (hdr_at, hdr) = object.eh_frame_hdr()?;
    let mut bases = BaseAddresses::default().set_eh_frame_hdr(hdr_at as u64);
    let hdr = EhFrameHdr::new(hdr, LittleEndian).parse(&bases, 8).ok()?;
    let section_at = hdr.eh_frame_ptr().direct().ok()?;
    bases = bases.set_eh_frame(section_at);
    // The header does not state the section's end, but the section's contents do.
    let mut section = EhFrame::new(object.from(section_at as usize)?, LittleEndian);
    section.set_address_size(8);
    section.set_vendor(arch::VENDOR);
    let at = hdr.table()?.lookup(lookup as u64, &bases).ok()?.direct().ok()?;
    let offset = usize::try_from(at.checked_sub(section_at)?).ok()?;
    let fde = section.fde_from_offset(&bases, offset.into(), EhFrame::cie_from_offset).ok()?;
    // The table contains where entries start, not where they end.
    fde.contains(lookup as u64).then_some((section, bases, fde))
}

fn with_row<T>(
    object: &ElfObject<'_>,
    lookup: usize,
    context: &mut UnwindContext<usize, OnStack>,
    visit: impl FnOnce(&EhFrame<Bytes<'_>>, &UnwindTableRow<usize, OnStack>, bool) -> T,
) -> Option<T> {
    let (section, bases, fde) = entry(object, lookup)?;
    let row = fde.unwind_info_for_address(&section, &bases, context, lookup as u64).ok()?;
    Some(visit(&section, row, fde.is_signal_trampoline()))
}

fn translate(
    section: &EhFrame<Bytes<'_>>,
    row: &UnwindTableRow<usize, OnStack>,
    signal: bool,
    follows_call: bool,
    ip: usize,
) -> UnwindRule {
    let frame = || {
        let (cfa, indirect) = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => {
                (BaseOffset { base: base_of(*register)?, offset: i32::try_from(*offset).ok()? }, false)
            }
            CfaRule::Expression(expression) => match evaluate(expression.get(section).ok()?, ip)? {
                Value::Address(address) => (address, false),
                Value::Word(address) => (address, true),
                Value::Number(_) => return None,
            },
        };
        let stored = |rule: RegisterRule<usize>| match rule {
            RegisterRule::Offset(offset) => Some(BaseOffset { base: Base::Cfa, offset: i32::try_from(offset).ok()? }),
            RegisterRule::Expression(expression) => match evaluate(expression.get(section).ok()?, ip)? {
                Value::Address(address) => Some(address),
                Value::Word(_) | Value::Number(_) => None,
            },
            _ => None,
        };
        let return_address = match row.register(arch::RA) {
            None | Some(RegisterRule::SameValue) if arch::HAS_LINK_REGISTER => {
                BaseOffset { base: Base::Link, offset: 0 }
            }
            rule => stored(rule?)?,
        };
        let bp = match row.register(arch::BP) {
            None | Some(RegisterRule::Undefined | RegisterRule::SameValue) => None,
            Some(rule) => Some(stored(rule)?),
        };
        Some(FrameRule { cfa, indirect, return_address, bp, signal, follows_call })
    };
    match row.register(arch::RA) {
        Some(RegisterRule::Undefined) => UnwindRule::Outermost,
        // Without a rule, the return address is where a call has put it.
        None if !arch::HAS_LINK_REGISTER => UnwindRule::Outermost,
        _ => frame().map_or(UnwindRule::Unsupported, UnwindRule::Frame),
    }
}

fn base_of(register: gimli::Register) -> Option<Base> {
    match register {
        arch::SP => Some(Base::Sp),
        arch::BP => Some(Base::Bp),
        _ => None,
    }
}

/// The value of an expression, computed without reading memory.
#[derive(Clone, Copy)]
enum Value {
    Number(i64),
    /// A register plus an offset.
    Address(BaseOffset),
    /// The word that is stored at this address.
    Word(BaseOffset),
}

/// Evaluates an expression as far as the instruction's address allows. `None` if that is not enough.
///
/// It supports the expressions of compilers, linkers and the C library. These are a register plus an offset, a word
/// stored there, and the procedure linkage table's condition on the instruction's address.
fn evaluate(expression: Expression<Bytes<'_>>, ip: usize) -> Option<Value> {
    const DEPTH: usize = 8;
    let mut stack = [Value::Number(0); DEPTH];
    let mut depth = 0;
    let mut operations = expression.operations(ENCODING);
    while let Some(operation) = operations.next().ok()? {
        let mut pop = || {
            depth = usize::checked_sub(depth, 1)?;
            stack.get(depth).copied()
        };
        let value = match operation {
            Operation::RegisterOffset { register, offset, .. } if arch::is_instruction_pointer(register) => {
                Value::Number((ip as i64).wrapping_add(offset))
            }
            Operation::RegisterOffset { register, offset, .. } => {
                Value::Address(BaseOffset { base: base_of(register)?, offset: i32::try_from(offset).ok()? })
            }
            Operation::UnsignedConstant { value } => Value::Number(value as i64),
            Operation::SignedConstant { value } => Value::Number(value),
            Operation::PlusConstant { value } => add(pop()?, Value::Number(value as i64))?,
            Operation::Deref { size: 8, space: false, .. } => match pop()? {
                Value::Address(address) => Value::Word(address),
                Value::Number(_) | Value::Word(_) => return None,
            },
            Operation::Plus => add(pop()?, pop()?)?,
            Operation::And => number(pop()?, pop()?, |a, b| a & b)?,
            Operation::Shl => number(pop()?, pop()?, |a, b| a.wrapping_shl(b as u32))?,
            Operation::Ge => number(pop()?, pop()?, |a, b| i64::from(a >= b))?,
            _ => return None,
        };
        *stack.get_mut(depth)? = value;
        depth += 1;
    }
    stack.get(depth.checked_sub(1)?).copied()
}

fn add(a: Value, b: Value) -> Option<Value> {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => Some(Value::Number(a.wrapping_add(b))),
        (Value::Address(address), Value::Number(n)) | (Value::Number(n), Value::Address(address)) => {
            let offset = address.offset.checked_add(i32::try_from(n).ok()?)?;
            Some(Value::Address(BaseOffset { offset, ..address }))
        }
        _ => None,
    }
}

/// `top` was pushed last, so it is the right-hand operand.
fn number(top: Value, below: Value, operation: impl Fn(i64, i64) -> i64) -> Option<Value> {
    match (below, top) {
        (Value::Number(a), Value::Number(b)) => Some(Value::Number(operation(a, b))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluated(bytes: &[u8], ip: usize) -> Option<(BaseOffset, bool)> {
        match evaluate(Expression(EndianSlice::new(bytes, LittleEndian)), ip)? {
            Value::Address(address) => Some((address, false)),
            Value::Word(address) => Some((address, true)),
            Value::Number(_) => None,
        }
    }

    #[test]
    fn expressions_of_compilers_are_evaluated() {
        let address = |base, offset| BaseOffset { base, offset };
        // DW_OP_bregN of the frame pointer and the stack pointer.
        let [bp, sp] = [arch::BP, arch::SP].map(|register| 0x70 + register.0 as u8);
        // bp -40; DW_OP_deref: a realigned stack.
        assert_eq!(evaluated(&[bp, 0x58, 0x06], 0), Some((address(Base::Bp, -40), true)));
        // sp 160; DW_OP_deref: a signal frame.
        assert_eq!(evaluated(&[sp, 0xa0, 0x01, 0x06], 0), Some((address(Base::Sp, 160), true)));
        // sp 8; DW_OP_breg16 0; lit15; and; lit11; ge; lit3; shl; plus: the procedure linkage table of x86-64.
        let plt = [sp, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22];
        let at = |offset| arch::is_instruction_pointer(gimli::Register(16)).then(|| (address(Base::Sp, offset), false));
        assert_eq!((evaluated(&plt, 0x1000), evaluated(&plt, 0x100b)), (at(8), at(16)));
        // sp 16; DW_OP_bregx 46 0; plus: a frame with vectors of a size that only the processor knows (SVE).
        assert_eq!(evaluated(&[sp, 16, 0x92, 46, 0, 0x22], 0), None);
        for invalid in [&[][..], &[0x06], &[0x22], &[bp], &[0x70, 0], &[0x12], &[0x31; 20], &[0xff, 0xff]] {
            assert_eq!(evaluated(invalid, 0), None, "{invalid:02x?}");
        }
    }
}
