//! Finds the functions of code addresses in symbol tables, for objects without DWARF.
//!
//! One pass over the table serves all addresses. The table is not copied.

use object::elf::{STB_LOCAL, STT_FUNC, STT_GNU_IFUNC, STT_NOTYPE};
use object::read::elf::Sym;

use super::elf::Elf;

/// A step takes as long as a search for the end of a name over this many bytes.
const BYTES_PER_STEP: u64 = 16;
/// The maximum length of a name in bytes. No compiler exceeds it.
const MAX_NAME: usize = 64 << 10;

/// The position of a symbol and its quality. The best one compares greatest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Candidate {
    /// Of the symbols that contain an address, the one with the highest start is best.
    start: u64,
    /// A function is better than a label.
    is_function: bool,
    /// A global or weak name is better than a local one.
    is_global: bool,
    /// Of several names at one place, the one with the smaller size is best, then the first.
    size: std::cmp::Reverse<u64>,
    order: std::cmp::Reverse<usize>,
}

/// The names of the functions that contain `addresses` (ascending, of instructions); `None` where there is none. The
/// error says what could not be read; names found are returned nevertheless.
pub(super) fn look_up(elf: &Elf<'_>, dynamic: bool, addresses: &[u64]) -> (Vec<Option<String>>, Result<(), String>) {
    let mut names = vec![None; addresses.len()];
    let table = match elf.symbols(dynamic) {
        Ok(table) => table,
        Err(e) => return (names, Err(e)),
    };
    let endian = elf.endianness();
    let mut containing: Vec<Option<Candidate>> = vec![None; addresses.len()];
    // For each address: the last symbol that starts at or before it and after the previous address.
    let mut preceding: Vec<Option<Candidate>> = vec![None; addresses.len()];
    let budget = elf.budget();
    for (index, symbol) in table.enumerate() {
        // A table can lie in a hole of the file.
        if budget.work(1).is_err() {
            return (names, Err(budget.out_of_work().to_string()));
        }
        let kind = symbol.st_type();
        if symbol.is_undefined(endian) || !matches!(kind, STT_FUNC | STT_GNU_IFUNC | STT_NOTYPE) {
            continue;
        }
        let (start, size): (u64, u64) = (symbol.st_value(endian), symbol.st_size(endian));
        let candidate = Candidate {
            start,
            is_function: kind != STT_NOTYPE,
            is_global: symbol.st_bind() != STB_LOCAL,
            size: std::cmp::Reverse(size),
            order: std::cmp::Reverse(index.0),
        };
        let first = addresses.partition_point(|address| *address < start);
        if let Some(best) = preceding.get_mut(first) {
            *best = (*best).max(Some(candidate));
        }
        let Some(end) = start.checked_add(size) else { continue };
        let mut matches = 0;
        for (address, best) in addresses[first..].iter().zip(&mut containing[first..]).take_while(|(at, _)| **at < end)
        {
            debug_assert!(*address >= start);
            *best = (*best).max(Some(candidate));
            matches += 1;
        }
        // Real symbols hardly overlap.
        if budget.work(matches).is_err() {
            return (names, Err(format!("too many of its symbols overlap: {}", budget.out_of_work())));
        }
    }
    let mut latest: Option<Candidate> = None;
    for (i, name) in names.iter_mut().enumerate() {
        latest = latest.max(preceding[i]);
        let candidate = containing[i].or_else(|| {
            // Assembly code often has symbols without sizes. Such a symbol covers its section up to the next symbol.
            let unsized_candidate = latest.filter(|candidate| candidate.size.0 == 0)?;
            let symbol = table.symbol(object::SymbolIndex(unsized_candidate.order.0)).ok()?;
            let (start, end) = elf.section_range(symbol.st_shndx(endian))?;
            (start..end).contains(&addresses[i]).then_some(unsized_candidate)
        });
        *name = candidate.and_then(|candidate| {
            let symbol = table.symbol(object::SymbolIndex(candidate.order.0)).ok()?;
            let bytes = table.symbol_name(endian, symbol).ok().filter(|name| !name.is_empty())?;
            // The search for the end of the name is not limited, and the names of many symbols can have the same end.
            let steps = 1 + bytes.len() as u64 / BYTES_PER_STEP;
            budget.work(steps).and_then(|()| budget.hold(bytes.len().min(MAX_NAME) as u64)).ok()?;
            Some(String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_NAME)]).into_owned())
        });
    }
    (names, Ok(()))
}
