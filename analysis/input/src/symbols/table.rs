//! The symbols of a run, and how they become frames.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::catch_unwind;

use memtrace_trace::file::{Definitions, Frame, NativeFrame};

use super::names::FunctionName;
use super::object_symbols::{self, ObjectId, ObjectSymbols};
use super::search::Search;
use crate::printable;

/// The file name of code that belongs to no object.
const GENERATED: &str = "<generated code>";
/// The names of all native frames of a process are not longer together, in bytes. Real ones take a few hundred each; files can tell of
/// names that take a thousand times their own size.
const MAX_NAMES: usize = 256 << 20;
/// What the kernel maps into every process is an object without a file.
const KERNEL_OBJECTS: [&str; 2] = ["linux-vdso.so.1", "linux-gate.so.1"];

/// What is known of the native code of a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Symbols {
    pub(super) objects: BTreeMap<ObjectId, ObjectSymbols>,
}

/// How much is known of the code of one object.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObjectReport {
    /// Which.
    pub id: ObjectId,
    /// The file the names are from; empty when there was none.
    pub file: String,
    /// Places in its code that stacks name.
    pub places: u64,
    /// Those whose function is known.
    pub named: u64,
    /// Those whose line is known.
    pub with_line: u64,
    /// Why something is missing.
    pub notes: Vec<String>,
}

impl Symbols {
    /// Looks up every native frame of `all` that is not known yet. Whether there was anything to look up.
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
                // The readers of other people's formats promise not to panic; a promise broken costs one object's names.
                false => catch_unwind(|| object_symbols::resolve(id, &addresses, search)).unwrap_or_else(|_| {
                    let notes = vec![format!("{} has what no reader of symbols expects", id.path)];
                    ObjectSymbols { notes, ..ObjectSymbols::default() }
                }),
            };
            self.objects.entry(id.clone()).or_default().absorb(found);
        }
        !wanted.is_empty()
    }

    /// Gives the native frames of a trace their names; where nothing is known `libfoo.so+0x1234`.
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

    /// How much is known of the native frames of `all`.
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

    /// Whether nothing is known.
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
