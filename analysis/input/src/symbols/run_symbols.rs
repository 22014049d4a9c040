//! The symbols of a run, and their conversion to frames.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};

use memtrace_trace::file::{Budget, Definitions, Frame, NativeFrame, StackNode};

use super::demangle::FunctionName;
use super::object_symbols::{self, ElfObjectId, ObjectSymbols};
use super::search::Search;
use memtrace_trace::printable;

/// The file name of code that belongs to no object.
const GENERATED_CODE: &str = "<generated code>";
/// The function by which PyTorch's allocators report their events to recorders, memtrace among them.
const RECORDER_CALLBACK: &str = "CachingAllocator::record_trace";
/// Objects without a file that the kernel maps into every process.
const KERNEL_OBJECTS: [&str; 2] = ["linux-vdso.so.1", "linux-gate.so.1"];

/// The symbols of a run's native code.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Symbols {
    pub(super) objects: BTreeMap<ElfObjectId, ObjectSymbols>,
}

/// How much is known about the code of one object.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObjectReport {
    /// The object.
    pub id: ElfObjectId,
    /// The file that the names come from; empty if there was none.
    pub symbol_file: String,
    /// The number of its code addresses in stacks.
    pub addresses: u64,
    /// The number of these addresses whose function is known.
    pub addresses_with_function: u64,
    /// The number of these addresses whose line is known.
    pub addresses_with_line: u64,
    /// Why symbols are missing.
    pub notes: Vec<String>,
}

impl Symbols {
    /// Looks up every native frame of `all` that has no symbols yet. Returns whether there was any. The objects' files
    /// are read within `budget`.
    pub fn resolve_missing<'a>(
        &mut self,
        all: impl IntoIterator<Item = &'a Definitions>,
        search: &Search,
        budget: &Budget,
    ) -> bool {
        let mut unresolved: BTreeMap<ElfObjectId, BTreeSet<u64>> = BTreeMap::new();
        for definitions in all {
            let ids: Vec<Option<ElfObjectId>> = definitions.modules.iter().map(object_id).collect();
            for frame in definitions.native_frames.values() {
                let Some(Some(id)) = ids.get(frame.module.index()) else { continue };
                let is_resolved =
                    self.objects.get(id).is_some_and(|o| o.frames_by_address.contains_key(&frame.address));
                if !is_resolved {
                    unresolved.entry(id.clone()).or_default().insert(frame.address);
                }
            }
        }
        for (id, addresses) in &unresolved {
            let addresses: Vec<u64> = addresses.iter().copied().collect();
            let found = match KERNEL_OBJECTS.contains(&&*id.path) {
                true => ObjectSymbols::default(),
                // The parsers for foreign formats are documented not to panic. If one panics nevertheless, only one
                // object's names are lost.
                false => catch_unwind(AssertUnwindSafe(|| object_symbols::symbolize(id, &addresses, search, budget)))
                    .unwrap_or_else(|_| {
                        let notes = vec![format!("{}: the symbol reader failed unexpectedly", id.path)];
                        ObjectSymbols { notes, ..ObjectSymbols::default() }
                    }),
            };
            self.objects.entry(id.clone()).or_default().merge(found);
        }
        !unresolved.is_empty()
    }

    /// Replaces the native frames of a trace by functions, files and lines. Unknown code is named like
    /// `libfoo.so+0x1234`. Names can expand to a thousand times the size of the file that they come from. Those beyond
    /// the budget are left out.
    pub fn symbolize(&self, definitions: &mut Definitions, budget: &Budget) {
        if definitions.native_frames.is_empty() {
            return;
        }
        let objects: Vec<Option<(String, Option<&ObjectSymbols>)>> = definitions
            .modules
            .iter()
            .map(|module| object_id(module).map(|id| (printable::line(&id.path).into_owned(), self.objects.get(&id))))
            .collect();
        let mut names: HashMap<&str, FunctionName> = HashMap::new();
        definitions.name_native_frames(budget, |native_frame| {
            let found = match objects.get(native_frame.module.index()) {
                Some(Some((path, symbols))) => frames_at(native_frame, path, *symbols, &mut names, budget),
                _ => {
                    let name: Box<str> = format!("{:#x}", native_frame.address).into();
                    vec![Frame {
                        name: name.clone(),
                        qualname: name,
                        filename: GENERATED_CODE.into(),
                        ..Frame::default()
                    }]
                }
            };
            let texts: usize = found.iter().map(|f| f.name.len() + f.qualname.len() + f.filename.len()).sum();
            let memory = texts + found.len() * 2 * size_of::<Frame>();
            if budget.hold(memory as u64).is_ok() { found } else { Vec::new() }
        });
        hide_recorder(definitions);
    }

    /// How much is known about the native frames of `all`, by object.
    pub fn report<'a>(&self, all: impl IntoIterator<Item = &'a Definitions>) -> Vec<ObjectReport> {
        let mut used: BTreeMap<ElfObjectId, BTreeSet<u64>> = BTreeMap::new();
        for definitions in all {
            let ids: Vec<Option<ElfObjectId>> = definitions.modules.iter().map(object_id).collect();
            for frame in definitions.native_frames.values() {
                if let Some(Some(id)) = ids.get(frame.module.index()) {
                    used.entry(id.clone()).or_default().insert(frame.address);
                }
            }
        }
        let none = ObjectSymbols::default();
        let report = |(id, addresses): (ElfObjectId, BTreeSet<u64>)| {
            let symbols = self.objects.get(&id).unwrap_or(&none);
            let outermost = |address: &u64| symbols.frames_by_address.get(address).and_then(|frames| frames.last());
            let count = |what: &dyn Fn(&object_symbols::SymbolFrame) -> bool| {
                addresses.iter().filter_map(outermost).filter(|frame| what(frame)).count() as u64
            };
            ObjectReport {
                symbol_file: symbols.file.clone(),
                addresses: addresses.len() as u64,
                addresses_with_function: count(&|frame| !symbols.text(frame.name).is_empty()),
                addresses_with_line: count(&|frame| frame.line > 0),
                notes: symbols.notes.clone(),
                id,
            }
        };
        used.into_iter().map(report).collect()
    }

    /// Whether no symbols are known.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }
}

/// Removes the frame by which PyTorch's allocator reports an event to recorders. It is on top of nearly every stack.
fn hide_recorder(definitions: &mut Definitions) {
    let is_recorder =
        |frame: &Frame| frame.native && frame.inlined_into.is_none() && frame.qualname.ends_with(RECORDER_CALLBACK);
    let hidden: Vec<bool> = definitions.frames.iter().map(is_recorder).collect();
    if !hidden.contains(&true) {
        return;
    }
    // A caller has a smaller number than its callee, so it is already without such a frame.
    for at in 1..definitions.stacks.len() {
        let StackNode { parent, frame } = definitions.stacks[at];
        let is_hidden = hidden.get(frame.index()).copied().unwrap_or(false);
        let caller = definitions.stacks.get(parent.index()).copied().filter(|caller| !caller.frame.is_none());
        if let Some(caller) = caller.filter(|_| is_hidden) {
            definitions.stacks[at] = caller;
        }
    }
}

fn object_id(module: &memtrace_trace::file::Module) -> Option<ElfObjectId> {
    (!module.path.is_empty()).then(|| ElfObjectId { path: module.path.clone(), build_id: module.build_id.clone() })
}

fn frames_at<'a>(
    native_frame: &NativeFrame,
    path: &str,
    symbols: Option<&'a ObjectSymbols>,
    names: &mut HashMap<&'a str, FunctionName>,
    budget: &Budget,
) -> Vec<Frame> {
    let unnamed = || {
        let file = path.rsplit('/').next().unwrap_or(path);
        let name = format!("{file}+{:#x}", native_frame.address);
        FunctionName { full: name.clone(), short: name }
    };
    let known = symbols.and_then(|symbols| Some((symbols, symbols.frames_by_address.get(&native_frame.address)?)));
    let Some((symbols, known)) = known.filter(|(_, frames)| !frames.is_empty()) else {
        let name = unnamed();
        return vec![Frame {
            name: name.full.into(),
            qualname: name.short.into(),
            filename: path.into(),
            ..Frame::default()
        }];
    };
    let frame = |frame: &object_symbols::SymbolFrame| {
        let raw = symbols.text(frame.name);
        let name = match raw {
            "" => unnamed(),
            _ => match names.get(raw) {
                Some(name) => name.clone(),
                None => {
                    let name = FunctionName::of(raw);
                    let memory = (name.full.len() + name.short.len() + 2 * size_of::<(&str, FunctionName)>()) as u64;
                    // A name takes more work than memory: it is parsed, written and shortened.
                    let steps = 4 * (raw.len() as u64 + memory);
                    match budget.hold(memory).and_then(|()| budget.work(steps)) {
                        Ok(()) => names.entry(raw).or_insert(name).clone(),
                        Err(_) => unnamed(),
                    }
                }
            },
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

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::ids::{FrameId, StackId};

    #[test]
    fn the_call_of_recorders_is_in_no_stack() {
        let mut definitions = Definitions::default();
        let names = ["", "train", "c10::cuda::Native::DeviceCachingAllocator::malloc", "", "mine"];
        definitions.frames = names.iter().map(|name| Frame { qualname: (*name).into(), ..Frame::default() }).collect();
        definitions.frames[3].qualname = "c10::cuda::Native::DeviceCachingAllocator::record_trace".into();
        definitions.frames[3].native = true;
        // train > malloc > record_trace, and record_trace alone
        let nodes = [(0, 0), (0, 1), (1, 2), (2, 3), (0, 3)];
        let node = |(parent, frame)| StackNode { parent: StackId(parent), frame: FrameId(frame) };
        definitions.stacks = nodes.map(node).to_vec();
        hide_recorder(&mut definitions);
        assert_eq!(definitions.stacks, [(0, 0), (0, 1), (1, 2), (1, 2), (0, 3)].map(node));
    }
}
