//! Symbols of the code of one object.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use memtrace_trace::file::Budget;

use super::demangle::is_mangled;
use super::dwarf::{self, DwarfFrame};
use super::elf::{Elf, mini_debug_data};
use super::search::Search;
use super::symbol_table;

/// An object as a process had it loaded.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ElfObjectId {
    /// The path, as the loader had it.
    pub path: Box<str>,
    /// The GNU build id in lower-case hexadecimal digits; empty if the object has none.
    pub build_id: Box<str>,
}

/// One function at one code address. With inlining, an address has several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SymbolFrame {
    /// The index of the name in the object's strings.
    pub(super) name: u32,
    /// The index of the source file; refers to an empty text if unknown.
    pub(super) file: u32,
    /// The line; 0 if unknown.
    pub(super) line: u32,
}

/// The known symbols of one object: the frames of every address that was looked up.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ObjectSymbols {
    /// The file that the names come from: the object's own or its debug file; empty if there was none.
    pub(super) file: String,
    /// Why symbols are missing; empty if none are.
    pub(super) notes: Vec<String>,
    pub(super) strings: Vec<Box<str>>,
    /// By return address: the frames, innermost first; all but the last are inlined into the next. Empty if the
    /// object's file was read and has no function there.
    pub(super) frames_by_address: BTreeMap<u64, Box<[SymbolFrame]>>,
}

impl ObjectSymbols {
    /// The text with this index. Empty if the index is invalid, which a damaged file can cause.
    pub(super) fn text(&self, index: u32) -> &str {
        self.strings.get(index as usize).map_or("", |text| text)
    }

    /// Adds the result of another lookup for the same object.
    pub(super) fn merge(&mut self, other: ObjectSymbols) {
        if self.frames_by_address.is_empty() {
            *self = other;
            return;
        }
        let mut texts = Interner::default();
        let mut frames_by_address = BTreeMap::new();
        for from in [&*self, &other] {
            for (address, frames) in &from.frames_by_address {
                let frames = frames.iter().map(|frame| SymbolFrame {
                    name: texts.intern(from.text(frame.name)),
                    file: texts.intern(from.text(frame.file)),
                    line: frame.line,
                });
                frames_by_address.insert(*address, frames.collect());
            }
        }
        (self.frames_by_address, self.strings) = (frames_by_address, texts.strings);
        if self.file.is_empty() {
            self.file = other.file;
        }
        self.notes.extend(other.notes);
        self.notes.dedup();
    }
}

/// Stores each text once.
#[derive(Default)]
struct Interner {
    strings: Vec<Box<str>>,
    indices: HashMap<Box<str>, u32>,
}

impl Interner {
    fn intern(&mut self, text: &str) -> u32 {
        if let Some(index) = self.indices.get(text) {
            return *index;
        }
        let index = self.strings.len() as u32;
        self.strings.push(text.into());
        self.indices.insert(text.into(), index);
        index
    }
}

/// Looks up return addresses (ascending) of an object in its files. Without a file no symbol is known, and the notes
/// say why.
pub(super) fn symbolize(id: &ElfObjectId, addresses: &[u64], search: &Search, budget: &Budget) -> ObjectSymbols {
    let mut symbols = ObjectSymbols::default();
    let object = search.object_file(&id.path, &id.build_id, budget);
    let own = object.as_ref().ok().and_then(|(path, bytes)| Some((path.as_path(), Elf::parse(bytes, budget).ok()?)));
    let debug = if own.as_ref().is_some_and(|(_, elf)| elf.has_section(".debug_info")) {
        None
    } else {
        search.debug_file(&id.build_id, own.as_ref().map(|(path, elf)| (*path, elf)), budget, &mut symbols.notes)
    };
    if let Err(why) = &object {
        // The debug file has the same information.
        if debug.is_none() {
            symbols.notes.insert(0, format!("{} {why}", id.path));
            return symbols;
        }
    }
    let separate = debug.as_ref().and_then(|(path, bytes)| Some((path.as_path(), Elf::parse(bytes, budget).ok()?)));
    let files: Vec<_> = separate.iter().chain(&own).collect();
    symbols.file = files.first().map(|(path, _)| path.display().to_string()).unwrap_or_default();
    for (path, _) in files.iter().filter(|(_, elf)| !elf.has_section_table()) {
        symbols.notes.push(format!("{} is truncated", path.display()));
    }

    // A call is the instruction before its return address.
    let calls: Vec<u64> = addresses.iter().map(|address| address.saturating_sub(1)).collect();
    let mut found: BTreeMap<u64, Vec<DwarfFrame>> = BTreeMap::new();
    if let Some((path, elf)) = files.iter().find(|(_, elf)| elf.has_section(".debug_info")) {
        let supplementary = search.supplementary_file(path, elf).transpose().unwrap_or_else(|why| {
            symbols.notes.push(why);
            None
        });
        let supplementary = supplementary.as_ref().and_then(|bytes| Elf::parse(bytes, budget).ok());
        let mut keep = |address: u64, frames| {
            found.insert(address, frames);
        };
        if let Err(why) = dwarf::look_up(elf, supplementary.as_ref(), &calls, &mut keep) {
            symbols.notes.push(format!("{}: {why}", path.display()));
        }
    }
    add_symbol_table_names(&files, &calls, &mut found, &mut symbols.notes);

    let mut texts = Interner::default();
    for (address, call) in addresses.iter().zip(&calls) {
        let frames = found.get(call).map(Vec::as_slice).unwrap_or_default();
        let frames = frames.iter().map(|frame| SymbolFrame {
            name: texts.intern(&frame.name),
            file: texts.intern(&frame.file),
            line: frame.line,
        });
        symbols.frames_by_address.insert(*address, frames.collect());
    }
    symbols.strings = texts.strings;
    symbols
}

/// Adds names from the symbol tables, the most complete table first. It names functions that DWARF does not know, and
/// completes names that lack their namespace.
fn add_symbol_table_names(
    files: &[&(&Path, Elf<'_>)],
    calls: &[u64],
    found: &mut BTreeMap<u64, Vec<DwarfFrame>>,
    notes: &mut Vec<String>,
) {
    for (path, elf) in files {
        let what = || path.display().to_string();
        add_names_of_table(elf, false, &what, calls, found, notes);
    }
    for (path, elf) in files {
        let decompressed = mini_debug_data(elf).unwrap_or_else(|why| {
            notes.push(format!("{}: {why}", path.display()));
            None
        });
        if let Some(inner) = decompressed.as_ref().and_then(|bytes| Elf::parse(bytes, elf.budget()).ok()) {
            let what = || format!("{}, .gnu_debugdata", path.display());
            add_names_of_table(&inner, false, &what, calls, found, notes);
        }
    }
    for (path, elf) in files {
        let what = || path.display().to_string();
        add_names_of_table(elf, true, &what, calls, found, notes);
    }
}

fn add_names_of_table(
    elf: &Elf<'_>,
    dynamic: bool,
    what: &dyn Fn() -> String,
    calls: &[u64],
    found: &mut BTreeMap<u64, Vec<DwarfFrame>>,
    notes: &mut Vec<String>,
) {
    // DWARF has no linkage name for functions in an anonymous namespace.
    let has_all = |call: &u64| found.get(call).and_then(|f| f.last()).is_some_and(|f| is_mangled(&f.name));
    let mut unresolved: Vec<u64> = calls.iter().copied().filter(|call| !has_all(call)).collect();
    unresolved.dedup();
    if unresolved.is_empty() {
        return;
    }
    let (names, result) = symbol_table::look_up(elf, dynamic, &unresolved);
    if let Err(why) = result {
        notes.push(format!("{}: {why}", what()));
    }
    for (call, name) in unresolved.iter().zip(names) {
        let Some(name) = name else { continue };
        let frames = found.entry(*call).or_default();
        match frames.last_mut() {
            Some(outermost) if outermost.name.is_empty() || is_mangled(&name) => outermost.name = name,
            Some(_) => {}
            None => frames.push(DwarfFrame { name, ..DwarfFrame::default() }),
        }
    }
}
