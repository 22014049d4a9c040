//! Finds functions (including inlined ones) and lines of code addresses in DWARF.

use std::borrow::Cow;
use std::cell::Cell;

use addr2line::gimli::{DwarfSections, RunTimeEndian, SectionId};
use addr2line::{Context, FrameIter, gimli};
use object::Endianness;

use super::elf::Elf;
use super::metered::Metered;

/// The maximum inlining depth. No compiler exceeds it.
pub(super) const MAX_INLINED: usize = 256;
/// The maximum length of names and paths in bytes. No real program exceeds it.
pub(super) const MAX_TEXT: usize = 64 << 10;

/// One function at one address, according to DWARF.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct DwarfFrame {
    /// The linkage name, else the plain name; empty if unknown.
    pub(super) name: String,
    /// The source file; empty if unknown.
    pub(super) file: String,
    /// The line; 0 if unknown.
    pub(super) line: u32,
}

/// The number of reads allowed per byte of DWARF. Reading everything once takes less than one read per byte.
const READS_PER_BYTE: u64 = 4;
/// The minimum number of reads allowed, for small files.
const MIN_READS: u64 = 1 << 20;

/// Looks up every address of an instruction. Passes each one that DWARF knows to `sink`, with its frames, innermost
/// first.
///
/// # Errors
///
/// The part that could not be read, as text. Addresses found before the error have been passed to `sink`.
pub(super) fn look_up(
    elf: &Elf<'_>,
    supplementary: Option<&Elf<'_>>,
    addresses: &[u64],
    sink: &mut dyn FnMut(u64, Vec<DwarfFrame>),
) -> Result<(), String> {
    let mut bytes = 0;
    let sections = load(elf, &mut bytes)?;
    let supplementary = supplementary.map(|elf| load(elf, &mut bytes)).transpose()?;
    let endian = match elf.endianness() {
        Endianness::Little => RunTimeEndian::Little,
        Endianness::Big => RunTimeEndian::Big,
    };
    // The smaller of the sections' bound and the rest of the run's budget.
    let reads = (MIN_READS + bytes.saturating_mul(READS_PER_BYTE)).min(elf.budget().work_left());
    let read_budget = Cell::new(reads);
    let result = look_up_within(elf, &sections, supplementary.as_ref(), endian, &read_budget, addresses, sink);
    // Whether that exceeds the budget shows in the next charge.
    let _ = elf.budget().work(reads - read_budget.get());
    result
}

fn look_up_within(
    elf: &Elf<'_>,
    sections: &DwarfSections<Cow<'_, [u8]>>,
    supplementary: Option<&DwarfSections<Cow<'_, [u8]>>>,
    endian: RunTimeEndian,
    read_budget: &Cell<u64>,
    addresses: &[u64],
    sink: &mut dyn FnMut(u64, Vec<DwarfFrame>),
) -> Result<(), String> {
    let mut dwarf = sections.borrow_with_sup(supplementary, |section| Metered::new(section, endian, read_budget));
    dwarf.populate_abbreviations_cache(gimli::AbbreviationsCacheStrategy::Duplicates);
    let context = Context::from_dwarf(dwarf)
        .map_err(|e| limit_error(read_budget).unwrap_or(format!("its DWARF data is damaged: {e}")))?;
    let mut failed = 0_u64;
    let mut first_error = None;
    for address in addresses {
        // Split DWARF is in files of its own, which are not loaded. The parts in this file are used.
        let found = context.find_frames(*address).skip_all_loads().and_then(frames);
        match found {
            Ok(frames) if frames.is_empty() => {}
            Ok(frames) => {
                let texts: usize = frames.iter().map(|frame| frame.name.len() + frame.file.len()).sum();
                let memory = texts + 2 * frames.len() * size_of::<DwarfFrame>();
                elf.budget().hold(memory as u64).map_err(|exceeded| exceeded.to_string())?;
                sink(*address, frames);
            }
            Err(e) => {
                if let Some(why) = limit_error(read_budget) {
                    return Err(why);
                }
                failed += 1;
                first_error.get_or_insert(e);
            }
        }
    }
    first_error
        .map_or(Ok(()), |e| Err(format!("its DWARF data is damaged at {failed} of {} addresses: {e}", addresses.len())))
}

fn limit_error(read_budget: &Cell<u64>) -> Option<String> {
    (read_budget.get() == 0).then(|| "its DWARF data needs more reads than the limit for its size".to_owned())
}

fn frames(mut found: FrameIter<'_, Metered<'_>>) -> gimli::Result<Vec<DwarfFrame>> {
    let mut frames = Vec::new();
    while let Some(frame) = found.next()? {
        if frames.len() == MAX_INLINED {
            break;
        }
        let name = frame.function.as_ref().map(|f| f.raw_name()).transpose()?.unwrap_or_default();
        let (file, line) = frame.location.map_or((None, None), |at| (at.file, at.line));
        frames.push(DwarfFrame {
            name: truncated(&name).to_owned(),
            file: truncated(file.unwrap_or_default()).to_owned(),
            line: line.unwrap_or(0),
        });
    }
    Ok(frames)
}

fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}

/// Loads the sections for functions and lines. A damaged section is an error, because the others alone would mislead.
fn load<'a>(elf: &Elf<'a>, bytes: &mut u64) -> Result<DwarfSections<Cow<'a, [u8]>>, String> {
    DwarfSections::load(|id| match id {
        SectionId::DebugAbbrev
        | SectionId::DebugAddr
        | SectionId::DebugAranges
        | SectionId::DebugInfo
        | SectionId::DebugLine
        | SectionId::DebugLineStr
        | SectionId::DebugRanges
        | SectionId::DebugRngLists
        | SectionId::DebugStr
        | SectionId::DebugStrOffsets => {
            let section = elf.section(id.name())?;
            *bytes += section.len() as u64;
            Ok(section)
        }
        _ => Ok(Cow::Borrowed(&[])),
    })
}
