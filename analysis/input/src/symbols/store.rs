//! `symbols.json` in a run folder: the symbols found where the program ran, for machines without its libraries.
//!
//! `trace/FORMAT.md` describes the format. Names are stored as objects have them, and demangled when they are read.

use memtrace_trace::file::Budget;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::dwarf::{MAX_INLINED, MAX_TEXT};
use super::object_symbols::{ElfObjectId, ObjectSymbols, SymbolFrame};
use super::run_symbols::Symbols;
use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::json_file;
use memtrace_trace::printable;

/// The file's name in the run folder.
pub const SYMBOLS_FILE: &str = "symbols.json";

/// The version of the format. It increases when a field changes its meaning.
const VERSION: u32 = 1;
/// The maximum size of the file, in bytes.
const MAX_FILE_SIZE: u64 = 256 << 20;

/// The note about an object that the file has more than once.
const REPEATED: &str = "symbols.json has more than one entry for this object; the first is used";

#[derive(Serialize, Deserialize)]
struct SymbolsFile {
    version: u32,
    objects: Vec<StoredObject>,
}

#[derive(Serialize, Deserialize)]
struct StoredObject {
    path: Box<str>,
    #[serde(default, skip_serializing_if = "str::is_empty")]
    build_id: Box<str>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    symbols_from: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    #[serde(default)]
    strings: Vec<Box<str>>,
    /// By return address in hexadecimal digits: [name, file, line] of each frame.
    #[serde(default)]
    places: BTreeMap<String, Vec<(u32, u32, u32)>>,
}

impl Symbols {
    /// Reads the symbols of a run folder; `Ok(None)` if there is no such file.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or has another version.
    pub fn read(folder: &RunFolder) -> Result<Option<Symbols>> {
        Symbols::read_within(folder, &Budget::default())
    }

    /// [`Self::read`] within the budget of a run.
    pub(crate) fn read_within(folder: &RunFolder, budget: &Budget) -> Result<Option<Symbols>> {
        let fail = |e| Error::io(format!("cannot read {}", folder.path().join(SYMBOLS_FILE).display()))(e);
        let opened = folder.open_file(SYMBOLS_FILE);
        let file: SymbolsFile = match opened.and_then(|file| json_file::read(&file, MAX_FILE_SIZE, budget)) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail(e)),
        };
        if file.version != VERSION {
            let reason =
                format!("format version {} is not supported; this memtrace reads version {VERSION}", file.version);
            return Err(fail(std::io::Error::other(reason)));
        }
        let mut symbols = Symbols::default();
        for object in file.objects {
            let id = ElfObjectId { path: object.path.clone(), build_id: object.build_id.clone() };
            // memtrace writes each object once. Merging is not linear, so another entry is not merged.
            match symbols.objects.entry(id) {
                Entry::Vacant(entry) => {
                    entry.insert(object.into());
                }
                Entry::Occupied(entry) => {
                    let notes = &mut entry.into_mut().notes;
                    if notes.last().is_none_or(|note| note != REPEATED) {
                        notes.push(REPEATED.to_owned());
                    }
                }
            }
        }
        Ok(Some(symbols))
    }

    /// The content of the file.
    pub fn to_json(&self) -> String {
        let objects = self.objects.iter().map(|(id, symbols)| StoredObject {
            path: id.path.clone(),
            build_id: id.build_id.clone(),
            symbols_from: symbols.file.clone(),
            notes: symbols.notes.clone(),
            strings: symbols.strings.clone(),
            places: symbols
                .frames_by_address
                .iter()
                .map(|(address, frames)| {
                    (format!("{address:x}"), frames.iter().map(|f| (f.name, f.file, f.line)).collect())
                })
                .collect(),
        });
        let file = SymbolsFile { version: VERSION, objects: objects.collect() };
        // Serializing these plain structures cannot fail.
        let mut text = serde_json::to_string(&file).unwrap_or_default();
        text.push('\n');
        printable::json(text)
    }
}

impl From<StoredObject> for ObjectSymbols {
    fn from(object: StoredObject) -> ObjectSymbols {
        let frame = |(name, file, line)| SymbolFrame { name, file, line };
        let frames_by_address = object.places.into_iter().filter_map(|(address, frames)| {
            let address = u64::from_str_radix(&address, 16).ok()?;
            Some((address, frames.into_iter().take(MAX_INLINED).map(frame).collect()))
        });
        ObjectSymbols {
            frames_by_address: frames_by_address.collect(),
            file: object.symbols_from,
            notes: object.notes,
            strings: object.strings.into_iter().map(|text| truncated(&text).into()).collect(),
        }
    }
}

fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}
