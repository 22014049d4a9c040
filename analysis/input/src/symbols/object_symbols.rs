//! What is known of the code of one object.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::dwarf::{self, DwarfFrame};
use super::elf::{Elf, mini_debug_data};
use super::names::is_mangled;
use super::search::Search;
use super::symbol_table;

/// Inlining deeper than this is no compiler's.
pub(super) const MAX_INLINED: usize = 256;
/// Names and paths longer than this are no program's.
pub(super) const MAX_TEXT: usize = 64 << 10;

/// An object as a process had it loaded.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ObjectId {
    /// Its path, as the loader had it.
    pub path: Box<str>,
    /// Its GNU build id in lower-case hexadecimal digits; empty where it has none.
    pub build_id: Box<str>,
}

/// One function at one place of the code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PlaceFrame {
    /// Index of the name, as the object has it.
    pub(super) name: u32,
    /// Index of the source file; of an empty text where unknown.
    pub(super) file: u32,
    /// The line, 0 when unknown.
    pub(super) line: u32,
}

/// What is known of the code of one object: the frames of every place that was looked up.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ObjectSymbols {
    /// The file the names are from: the object's own or its debug file; empty when there was none.
    pub(super) file: String,
    /// Why something is missing; empty when nothing is.
    pub(super) notes: Vec<String>,
    pub(super) strings: Vec<Box<str>>,
    /// By return address: frames, innermost first, all but the last inlined into the next; none where the object's file was
    /// read and knows no function.
    pub(super) places: BTreeMap<u64, Box<[PlaceFrame]>>,
}

impl ObjectSymbols {
    /// A text by index; empty where a file tells of one that it does not have.
    pub(super) fn text(&self, index: u32) -> &str {
        self.strings.get(index as usize).map_or("", |text| text)
    }

    /// Takes over what another look-up of the same object found.
    pub(super) fn absorb(&mut self, other: ObjectSymbols) {
        if self.places.is_empty() {
            *self = other;
            return;
        }
        let mut texts = Interner::default();
        let mut places = BTreeMap::new();
        for from in [&*self, &other] {
            for (address, frames) in &from.places {
                let frames = frames.iter().map(|frame| PlaceFrame {
                    name: texts.intern(from.text(frame.name)),
                    file: texts.intern(from.text(frame.file)),
                    line: frame.line,
                });
                places.insert(*address, frames.collect());
            }
        }
        (self.places, self.strings) = (places, texts.strings);
        if self.file.is_empty() {
            self.file = other.file;
        }
        self.notes.extend(other.notes);
        self.notes.dedup();
    }
}

/// Texts, each once.
#[derive(Default)]
struct Interner {
    strings: Vec<Box<str>>,
    known: HashMap<Box<str>, u32>,
}

impl Interner {
    fn intern(&mut self, text: &str) -> u32 {
        if let Some(index) = self.known.get(text) {
            return *index;
        }
        let index = self.strings.len() as u32;
        self.strings.push(text.into());
        self.known.insert(text.into(), index);
        index
    }
}

/// Looks up return addresses (ascending) of an object in its files. Without a file nothing is known of any place; the notes
/// say why.
pub(super) fn resolve(id: &ObjectId, addresses: &[u64], search: &Search) -> ObjectSymbols {
    let mut symbols = ObjectSymbols::default();
    let object = search.object(&id.path, &id.build_id);
    let own = object.as_ref().ok().and_then(|(path, bytes)| Some((path.as_path(), Elf::parse(bytes).ok()?)));
    let debug = if own.as_ref().is_some_and(|(_, elf)| elf.has(".debug_info")) {
        None
    } else {
        search.debug_file(&id.build_id, own.as_ref().map(|(path, elf)| (*path, elf)), &mut symbols.notes)
    };
    if let Err(why) = &object {
        // The debug file tells as much.
        if debug.is_none() {
            symbols.notes.insert(0, format!("{} {why}", id.path));
            return symbols;
        }
    }
    let separate = debug.as_ref().and_then(|(path, bytes)| Some((path.as_path(), Elf::parse(bytes).ok()?)));
    let files: Vec<_> = separate.iter().chain(&own).collect();
    symbols.file = files.first().map(|(path, _)| path.display().to_string()).unwrap_or_default();
    for (path, _) in files.iter().filter(|(_, elf)| !elf.is_whole()) {
        symbols.notes.push(format!("{} is cut off", path.display()));
    }

    // A call is the instruction before its return address.
    let calls: Vec<u64> = addresses.iter().map(|address| address.saturating_sub(1)).collect();
    let mut found: BTreeMap<u64, Vec<DwarfFrame>> = BTreeMap::new();
    if let Some((path, elf)) = files.iter().find(|(_, elf)| elf.has(".debug_info")) {
        let alternative = search.alternative(path, elf).transpose().unwrap_or_else(|why| {
            symbols.notes.push(why);
            None
        });
        let alternative = alternative.as_ref().and_then(|bytes| Elf::parse(bytes).ok());
        let mut keep = |address: u64, frames| {
            found.insert(address, frames);
        };
        if let Err(why) = dwarf::look_up(elf, alternative.as_ref(), &calls, &mut keep) {
            symbols.notes.push(format!("{}: {why}", path.display()));
        }
    }
    name_by_tables(&files, &calls, &mut found, &mut symbols.notes);

    let mut texts = Interner::default();
    for (address, call) in addresses.iter().zip(&calls) {
        let frames = found.get(call).map(Vec::as_slice).unwrap_or_default();
        let frames = frames.iter().map(|frame| PlaceFrame {
            name: texts.intern(&frame.name),
            file: texts.intern(&frame.file),
            line: frame.line,
        });
        symbols.places.insert(*address, frames.collect());
    }
    symbols.strings = texts.strings;
    symbols
}

/// Names what DWARF left without a function, and completes what it names without its namespace, from the symbol tables there
/// are, the fullest first.
fn name_by_tables(
    files: &[&(&Path, Elf<'_>)],
    calls: &[u64],
    found: &mut BTreeMap<u64, Vec<DwarfFrame>>,
    notes: &mut Vec<String>,
) {
    for (path, elf) in files {
        let what = || path.display().to_string();
        name_by_table(elf, false, &what, calls, found, notes);
    }
    for (path, elf) in files {
        let unpacked = mini_debug_data(elf).unwrap_or_else(|why| {
            notes.push(format!("{}: {why}", path.display()));
            None
        });
        if let Some(inner) = unpacked.as_ref().and_then(|bytes| Elf::parse(bytes).ok()) {
            let what = || format!("{}, .gnu_debugdata", path.display());
            name_by_table(&inner, false, &what, calls, found, notes);
        }
    }
    for (path, elf) in files {
        let what = || path.display().to_string();
        name_by_table(elf, true, &what, calls, found, notes);
    }
}

fn name_by_table(
    elf: &Elf<'_>,
    dynamic: bool,
    what: &dyn Fn() -> String,
    calls: &[u64],
    found: &mut BTreeMap<u64, Vec<DwarfFrame>>,
    notes: &mut Vec<String>,
) {
    // DWARF has no linkage name of functions in a namespace without a name.
    let has_all = |call: &u64| found.get(call).and_then(|f| f.last()).is_some_and(|f| is_mangled(&f.name));
    let mut wanted: Vec<u64> = calls.iter().copied().filter(|call| !has_all(call)).collect();
    wanted.dedup();
    if wanted.is_empty() {
        return;
    }
    let (names, result) = symbol_table::look_up(elf, dynamic, &wanted);
    if let Err(why) = result {
        notes.push(format!("{}: {why}", what()));
    }
    for (call, name) in wanted.iter().zip(names) {
        let Some(name) = name else { continue };
        let frames = found.entry(*call).or_default();
        match frames.last_mut() {
            Some(outermost) if outermost.name.is_empty() || is_mangled(&name) => outermost.name = name,
            Some(_) => {}
            None => frames.push(DwarfFrame { name, ..DwarfFrame::default() }),
        }
    }
}
