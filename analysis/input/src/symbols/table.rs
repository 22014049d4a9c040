//! The symbols of a run, and their conversion to frames.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::catch_unwind;

use memtrace_trace::file::{Definitions, Frame, NativeFrame};

use super::names::FunctionName;
use super::object_symbols::{self, ObjectId, ObjectSymbols};
use super::search::Search;
use crate::printable;

/// The file name of code that belongs to no object.
const GENERATED: &str = "<generated code>";
/// The maximum total length of the names of all native frames of a process, in bytes. Real names have a few hundred
/// bytes each. A malicious file can contain names that expand to a thousand times its own size.
const MAX_NAMES: usize = 256 << 20;
/// Objects without a file that the kernel maps into every process.
const KERNEL_OBJECTS: [&str; 2] = ["linux-vdso.so.1", "linux-gate.so.1"];

/// The symbols of a run's native code.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Symbols {
    pub(super) objects: BTreeMap<ObjectId, ObjectSymbols>,
}

/// How much is known about the code of one object.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObjectReport {
    /// The object.
    pub id: ObjectId,
    /// The file that the names come from; empty if there was none.
    pub file: String,
    /// The number of its code addresses in stacks.
    pub places: u64,
    /// The number of these addresses whose function is known.
    pub named: u64,
    /// The number of these addresses whose line is known.
    pub with_line: u64,
    /// Why symbols are missing.
    pub notes: Vec<String>,
}

impl Symbols {
    /// Looks up every native frame of `all` that is not known yet. Returns whether there was any to look up.
    pub fn complete<'a>(&mut self, all: impl IntoIterator<Item = &'a Definitions>, search: &Search) -> bool {
        let mut wanted: BTreeMap<ObjectId, BTreeSet<u64>> = BTreeMap::new();
        for definitions in all {
            let ids: Vec<Option<ObjectId>> = definitions.modules.iter().map(object_id).collect();
            for frame in definitions.native_frames.values() {
                let Some(Some(id)) = ids.get(frame.module.index()) else { continue };
                let known = self.objects.get(id).is_some_and(|o| o.places.contains_key(&frame.address));
                if !known {
                    wanted.entry(id.clone()).or_default().insert(frame.address);
                }
            }
        }
        for (id, addresses) in &wanted {
            let addresses: Vec<u64> = addresses.iter().copied().collect();
            let found = match KERNEL_OBJECTS.contains(&&*id.path) {
                true => ObjectSymbols::default(),
                // The parsers for foreign formats are documented not to panic. If one panics nevertheless, only one
                // object's names are lost.
                false => catch_unwind(|| object_symbols::resolve(id, &addresses, search)).unwrap_or_else(|_| {
                    let notes = vec![format!("{} has what no reader of symbols expects", id.path)];
                    ObjectSymbols { notes, ..ObjectSymbols::default() }
                }),
            };
            self.objects.entry(id.clone()).or_default().absorb(found);
        }
        !wanted.is_empty()
    }

    /// Names the native frames of a trace. Unknown code is named like `libfoo.so+0x1234`.
    pub fn name_frames(&self, definitions: &mut Definitions) {
        if definitions.native_frames.is_empty() {
            return;
        }
        let objects: Vec<Option<(String, Option<&ObjectSymbols>)>> = definitions
            .modules
            .iter()
            .map(|module| object_id(module).map(|id| (printable::line(&id.path).into_owned(), self.objects.get(&id))))
            .collect();
        let mut names: HashMap<&str, FunctionName> = HashMap::new();
        let mut room = MAX_NAMES;
        definitions.name_native(|place| {
            let found = match objects.get(place.module.index()) {
                Some(Some((path, symbols))) => frames(place, path, *symbols, &mut names),
                _ => {
                    let name: Box<str> = format!("{:#x}", place.address).into();
                    vec![Frame { name: name.clone(), qualname: name, filename: GENERATED.into(), ..Frame::default() }]
                }
            };
            let taken: usize = found.iter().map(|f| f.name.len() + f.qualname.len() + f.filename.len()).sum();
            match room.checked_sub(taken) {
                Some(left) => {
                    room = left;
                    found
                }
                None => Vec::new(),
            }
        });
    }

    /// How much is known about the native frames of `all`, by object.
    pub fn report<'a>(&self, all: impl IntoIterator<Item = &'a Definitions>) -> Vec<ObjectReport> {
        let mut seen: BTreeMap<ObjectId, BTreeSet<u64>> = BTreeMap::new();
        for definitions in all {
            let ids: Vec<Option<ObjectId>> = definitions.modules.iter().map(object_id).collect();
            for frame in definitions.native_frames.values() {
                if let Some(Some(id)) = ids.get(frame.module.index()) {
                    seen.entry(id.clone()).or_default().insert(frame.address);
                }
            }
        }
        let none = ObjectSymbols::default();
        let report = |(id, addresses): (ObjectId, BTreeSet<u64>)| {
            let symbols = self.objects.get(&id).unwrap_or(&none);
            let outermost = |address: &u64| symbols.places.get(address).and_then(|frames| frames.last());
            let count = |what: &dyn Fn(&object_symbols::PlaceFrame) -> bool| {
                addresses.iter().filter_map(outermost).filter(|frame| what(frame)).count() as u64
            };
            ObjectReport {
                file: symbols.file.clone(),
                places: addresses.len() as u64,
                named: count(&|frame| !symbols.text(frame.name).is_empty()),
                with_line: count(&|frame| frame.line > 0),
                notes: symbols.notes.clone(),
                id,
            }
        };
        seen.into_iter().map(report).collect()
    }

    /// Whether no symbols are known.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }
}

fn object_id(module: &memtrace_trace::file::Module) -> Option<ObjectId> {
    (!module.path.is_empty()).then(|| ObjectId { path: module.path.clone(), build_id: module.build_id.clone() })
}

fn frames<'a>(
    place: &NativeFrame,
    path: &str,
    symbols: Option<&'a ObjectSymbols>,
    names: &mut HashMap<&'a str, FunctionName>,
) -> Vec<Frame> {
    let unnamed = || {
        let file = path.rsplit('/').next().unwrap_or(path);
        let name = format!("{file}+{:#x}", place.address);
        FunctionName { full: name.clone(), short: name }
    };
    let known = symbols.and_then(|symbols| Some((symbols, symbols.places.get(&place.address)?)));
    let Some((symbols, known)) = known.filter(|(_, frames)| !frames.is_empty()) else {
        let name = unnamed();
        return vec![Frame {
            name: name.full.into(),
            qualname: name.short.into(),
            filename: path.into(),
            ..Frame::default()
        }];
    };
    let frame = |frame: &object_symbols::PlaceFrame| {
        let raw = symbols.text(frame.name);
        let name = match raw {
            "" => unnamed(),
            _ => names.entry(raw).or_insert_with(|| FunctionName::of(raw)).clone(),
        };
        let file = match symbols.text(frame.file) {
            "" => path.to_owned(),
            file => printable::line(file).into_owned(),
        };
        Frame {
            name: printable::line(&name.full).into(),
            qualname: printable::line(&name.short).into(),
            filename: file.into(),
            line: frame.line,
            ..Frame::default()
        }
    };
    known.iter().map(frame).collect()
}
