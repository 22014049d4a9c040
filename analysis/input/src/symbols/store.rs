//! `symbols.json` in a run folder: the symbols found where the program ran, for machines without its libraries.
//!
//! `trace/FORMAT.md` describes the format. Names are stored as objects have them, and demangled when they are read.

use memtrace_trace::file::foreign;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::object_symbols::{MAX_INLINED, MAX_TEXT, ObjectId, ObjectSymbols, PlaceFrame};
use super::table::Symbols;
use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::printable;

/// The file's name in the run folder.
pub const SYMBOLS_FILE: &str = "symbols.json";

/// The version of the format. It increases when a field changes its meaning.
const VERSION: u32 = 1;
/// The maximum size of the file, in bytes.
const MAX_FILE: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    objects: Vec<Object>,
}

#[derive(Serialize, Deserialize)]
struct Object {
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
        let fail = |e| Error::io(format!("cannot read {}", folder.path().join(SYMBOLS_FILE).display()))(e);
        let text = match folder.read(SYMBOLS_FILE).and_then(|file| foreign::read(&file, MAX_FILE)) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail(e)),
        };
        let file: File = serde_json::from_slice(&text).map_err(|e| fail(e.into()))?;
        if file.version != VERSION {
            let why = format!("it has version {}, this memtrace knows {VERSION}", file.version);
            return Err(fail(std::io::Error::other(why)));
        }
        let mut symbols = Symbols::default();
        for object in file.objects {
            let id = ObjectId { path: object.path.clone(), build_id: object.build_id.clone() };
            symbols.objects.entry(id).or_default().absorb(object.into());
        }
        Ok(Some(symbols))
    }

    /// The content of the file.
    pub fn to_json(&self) -> String {
        let objects = self.objects.iter().map(|(id, symbols)| Object {
            path: id.path.clone(),
            build_id: id.build_id.clone(),
            symbols_from: symbols.file.clone(),
            notes: symbols.notes.clone(),
            strings: symbols.strings.clone(),
            places: symbols
                .places
                .iter()
                .map(|(address, frames)| {
                    (format!("{address:x}"), frames.iter().map(|f| (f.name, f.file, f.line)).collect())
                })
                .collect(),
        });
        let file = File { version: VERSION, objects: objects.collect() };
        // Serializing these plain structures cannot fail.
        let mut text = serde_json::to_string(&file).unwrap_or_default();
        text.push('\n');
        printable::json(text)
    }
}

impl From<Object> for ObjectSymbols {
    fn from(object: Object) -> ObjectSymbols {
        let frame = |(name, file, line)| PlaceFrame { name, file, line };
        let places = object.places.into_iter().filter_map(|(address, frames)| {
            let address = u64::from_str_radix(&address, 16).ok()?;
            Some((address, frames.into_iter().take(MAX_INLINED).map(frame).collect()))
        });
        ObjectSymbols {
            places: places.collect(),
            file: object.symbols_from,
            notes: object.notes,
            strings: object.strings.into_iter().map(|text| cut(&text).into()).collect(),
        }
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}
