//! Describes reference cycles in text and on pages.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::fs::File;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io::Write as _;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memtrace_trace::counters::Counter;

use super::graph::{ReferenceGraph, TensorCycle};
use super::page::{ShownObject, page};
use super::torch_classes::TorchClasses;
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, class_name};
use crate::recording::process::Process;

/// At most this many pages for one process.
const MAX_FILES: usize = 10;
/// File names of pages end at this number. The processes of a run share the folder.
const MAX_FILE_NUMBER: usize = 1000;
/// At most this many kinds of cycles are distinguished.
const MAX_KINDS: usize = 1000;
/// At most this many cycles of one collection are examined.
const MAX_CYCLES: usize = 1000;
/// How many objects a page shows at most, and how many in a second attempt if the first page was too large.
const PAGE_OBJECTS: [usize; 2] = [400, 60];
/// The largest size of a page in bytes.
const MAX_PAGE_BYTES: usize = 2 << 20;
/// At most this many entries of a container are examined for how it refers to other objects.
const MAX_ENTRIES: usize = 10_000;
/// How many objects the text names.
const MAX_NAMED_OBJECTS: usize = 12;
/// The largest number of characters of a key in the text.
const MAX_KEY_CHARS: usize = 40;

/// The cycles that this process has shown.
#[derive(Default)]
pub(super) struct ShownCycles {
    kinds: HashSet<u64>,
    files: usize,
}

/// A cycle to report.
pub(super) struct CycleReport {
    /// The name of the page in the run's folder. Empty if there is none.
    pub(super) file: String,
    pub(super) text: String,
    /// The addresses of the tensors' memory that the cycle held. A single 0 if no address is known.
    pub(super) addresses: Vec<u64>,
}

/// Describes the cycles whose kind has not been shown before.
pub(super) fn cycles(
    gil: GilToken<'_>,
    torch: &TorchClasses,
    process: &Process,
    shown: &mut ShownCycles,
    graph: &ReferenceGraph,
    objects: &[PyObjectPtr],
) -> Vec<CycleReport> {
    let object = |number: &u32| objects.get(*number as usize).copied();
    let is_tensor = |number: u32| object(&number).is_some_and(|object| gil.is_instance(object, torch.tensor));
    let mut all = Vec::new();
    for cycle in graph.cycles(is_tensor, MAX_CYCLES) {
        let describer = Describer { gil, torch, objects };
        let kind = describer.kind(&cycle);
        if shown.kinds.contains(&kind) {
            continue;
        }
        if shown.kinds.len() == MAX_KINDS {
            process.count(Counter::CyclesNotShown, 1);
            continue;
        }
        shown.kinds.insert(kind);
        let described = graph.descriptions(&cycle, is_tensor).into_iter().map(|cycle| (describer.text(&cycle), cycle));
        let (text, cycle) = described.min_by(|a, b| a.0.cmp(&b.0)).unwrap_or_else(|| (describer.text(&cycle), cycle));
        let mut addresses: Vec<u64> = cycle
            .tensors
            .iter()
            .filter_map(|number| Some(torch.describe_tensor(gil, object(number)?)?.address))
            .filter(|address| *address != 0)
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        if addresses.is_empty() {
            addresses.push(0);
        }
        let file = shown.page(process, |limit| describer.page(graph, &cycle, &text, limit));
        all.push(CycleReport { file, text, addresses });
    }
    all
}

impl ShownCycles {
    /// Writes the page that shows a cycle and returns its file name. Empty if there is none, which is counted. `page`
    /// renders the page with at most that many objects.
    fn page(&mut self, process: &Process, page: impl Fn(usize) -> String) -> String {
        let Some(folder) = &process.options.folder else { return String::new() };
        let written = (self.files < MAX_FILES)
            .then(|| PAGE_OBJECTS.into_iter().map(page).find(|html| html.len() <= MAX_PAGE_BYTES))
            .flatten()
            .and_then(|html| write_file(folder, html.as_bytes()));
        self.files += usize::from(written.is_some());
        process.count(Counter::CyclesNotShown, u64::from(written.is_none()));
        written.unwrap_or_default()
    }
}

/// Writes a new file that only its owner can read and returns its name. `None` if that fails.
fn write_file(folder: &Path, bytes: &[u8]) -> Option<String> {
    const FLAGS: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    for number in 0..MAX_FILE_NUMBER {
        let name = format!("cycle-{number}.html");
        let path = CString::new(folder.join(&name).as_os_str().as_bytes()).ok()?;
        // SAFETY: `path` is a C string. `O_EXCL` creates a new file or fails, so no existing file is opened.
        let file = unsafe { libc::open(path.as_ptr(), FLAGS, 0o600) };
        if file < 0 {
            if std::io::Error::last_os_error().raw_os_error() == Some(libc::EEXIST) {
                continue;
            }
            return None;
        }
        // SAFETY: the descriptor was just opened and belongs to this function. `fchmod` restores permissions that the
        // program's umask removed.
        let mut file = unsafe {
            libc::fchmod(file, 0o600);
            File::from_raw_fd(file)
        };
        if file.write_all(bytes).is_err() {
            // Removes an incomplete file, for example on a full disk.
            // SAFETY: `path` is a C string and names the file that this function has created.
            unsafe { libc::unlinkat(libc::AT_FDCWD, path.as_ptr(), 0) };
            return None;
        }
        return Some(name);
    }
    None
}

/// Describes objects and the references between them.
struct Describer<'a> {
    gil: GilToken<'a>,
    torch: &'a TorchClasses,
    objects: &'a [PyObjectPtr],
}

impl Describer<'_> {
    fn class(&self, number: u32) -> &str {
        // SAFETY: the collector's list holds the objects, so they and their types are alive.
        self.objects.get(number as usize).map_or("?", |object| unsafe { class_name(*object) })
    }

    /// A hash of the classes in a cycle and on its path to a tensor. Cycles with the same classes are of one kind.
    ///
    /// The collector lists the objects of a cycle in no fixed order, so the kind depends neither on where the path
    /// around the cycle starts nor on its direction.
    fn kind(&self, cycle: &TensorCycle) -> u64 {
        let object = |number: u32| self.objects.get(number as usize).copied();
        // CPython creates an object's dictionary on demand, so it may be an object of its own or not. The kind must not
        // depend on that.
        let is_attribute_dict = |from: u32, to: u32| {
            let both = object(from).zip(object(to));
            both.is_some_and(|(from, to)| self.gil.is_plain_instance(from) && self.gil.is_dict(to))
        };
        // Both paths begin at the same object, which the last object of the cycle refers to.
        let mut classes = std::collections::BTreeSet::new();
        for path in [&cycle.path, &cycle.to_tensor] {
            let before = cycle.path.last().into_iter().chain(path);
            let others = before.zip(path).filter(|(from, to)| !is_attribute_dict(**from, **to));
            classes.extend(others.map(|(_, number)| self.class(*number)));
        }
        BuildHasherDefault::<DefaultHasher>::default().hash_one(classes)
    }

    /// For example `Node.children -> list[0] -> Node.parent -> Node; Node.value -> Tensor float32[1024,
    /// 1024]`.
    fn text(&self, cycle: &TensorCycle) -> String {
        let (mut path, mut to_tensor) = (cycle.path.clone(), cycle.to_tensor.clone());
        // Before CPython 3.11 every object has a dictionary of its own. The text begins with the object.
        if let [first, .., last] = path[..]
            && matches!(self.reference(last, first), Reference::Dictionary(_))
        {
            path.rotate_right(1);
            to_tensor.insert(0, last);
        }
        let begin = path.first().copied();
        path.extend(begin);
        let mut text = self.path_text(&path);
        if let [_, _, ..] = to_tensor[..] {
            let _ = write!(text, "; {}", self.path_text(&to_tensor));
        }
        let others = cycle.tensors.len().saturating_sub(1);
        if others > 0 {
            let _ = write!(text, " and {others} more tensor{}", if others == 1 { "" } else { "s" });
        }
        text
    }

    /// The text for a path of references.
    fn path_text(&self, numbers: &[u32]) -> String {
        let mut text = String::new();
        let mut skip = false;
        for (at, number) in numbers.iter().enumerate() {
            if std::mem::take(&mut skip) {
                continue;
            }
            if at > 0 {
                text += " -> ";
            }
            if at + 2 >= MAX_NAMED_OBJECTS && at + 1 < numbers.len() {
                let last = numbers.last().map_or(String::new(), |last| self.object(*last));
                let _ = write!(text, "({} more) -> {last}", numbers.len() - 1 - at);
                return text;
            }
            text += &self.object(*number);
            let Some(next) = numbers.get(at + 1) else { continue };
            match (self.reference(*number, *next), numbers.get(at + 2)) {
                // The text shows an object and its dictionary as one.
                (Reference::Dictionary(key_of), Some(value)) => {
                    if let Some(key) = key_of(self, *next, *value) {
                        let _ = write!(text, ".{key}");
                        skip = true;
                    }
                }
                (Reference::Attribute(name), _) => {
                    let _ = write!(text, ".{name}");
                }
                (Reference::Item(key), _) => {
                    let _ = write!(text, "[{key}]");
                }
                _ => {}
            }
        }
        text
    }

    fn object(&self, number: u32) -> String {
        let class = self.class(number).to_owned();
        let Some(object) = self.objects.get(number as usize).copied() else { return class };
        if let Some(tensor) = self.torch.describe_tensor(self.gil, object) {
            return tensor.text;
        }
        // Reads attributes of CPython's own types, which run no code of the program.
        let text = |of: PyObjectPtr, name: &CStr| {
            let value = self.gil.attribute(of, name)?;
            self.gil.str(value.object).map(str::to_owned)
        };
        let name = if self.gil.is_function(object) {
            text(object, c"__qualname__")
        } else if self.gil.is_frame(object) {
            self.gil.attribute(object, c"f_code").and_then(|code| text(code.object, c"co_name"))
        } else {
            None
        };
        name.map_or(class.clone(), |name| format!("{class} {name}"))
    }

    /// The page that shows a cycle and the objects nearest to it, at most `limit`. `text` describes the cycle.
    fn page(&self, graph: &ReferenceGraph, cycle: &TensorCycle, text: &str, limit: usize) -> String {
        let mut nearest = graph.nearest_objects(cycle, limit);
        let object = |number: &u32| self.objects.get(*number as usize).copied();
        // The page shows an object and its attribute dictionary as one. CPython creates that dictionary on demand, so
        // it may be an object of its own or not.
        let numbers: HashMap<usize, u32> =
            nearest.iter().filter_map(|number| Some((object(number)?.addr(), *number))).collect();
        let attribute_dict = |number: &u32| {
            let object = object(number).filter(|object| self.gil.is_plain_instance(*object))?;
            numbers.get(&self.gil.attribute_dict(object)?.object.addr()).copied()
        };
        let dicts: HashMap<u32, u32> =
            nearest.iter().filter_map(|number| Some((*number, attribute_dict(number)?))).collect();
        let hidden: HashSet<u32> = dicts.values().copied().collect();
        nearest.retain(|number| !hidden.contains(number));
        let places: HashMap<u32, usize> = nearest.iter().copied().zip(0..).collect();
        let by_address: HashMap<usize, usize> =
            nearest.iter().zip(0..).filter_map(|(number, place)| Some((object(number)?.addr(), place))).collect();
        let members: HashSet<u32> = cycle.members.iter().copied().collect();
        let shown = |number: &u32| {
            let mut shown = self.shown_object(*number);
            shown.is_in_cycle = members.contains(number);
            let labels = object(number).map(|object| self.labels(object, &by_address)).unwrap_or_default();
            let of_dict = dicts.get(number).map_or(&[][..], |dict| graph.references_of(*dict));
            let mut seen = HashSet::new();
            for place in graph.references_of(*number).iter().chain(of_dict).filter_map(|other| places.get(other)) {
                if seen.insert(*place) {
                    shown.references.push((labels.get(place).cloned().unwrap_or_default(), *place));
                }
            }
            shown
        };
        let objects: Vec<ShownObject> = nearest.iter().map(shown).collect();
        let on_page =
            |path: &[u32]| -> Vec<usize> { path.iter().filter_map(|number| places.get(number).copied()).collect() };
        page(text, &on_page(&cycle.path), &on_page(&cycle.to_tensor), &objects)
    }

    /// The title and the details of an object.
    fn shown_object(&self, number: u32) -> ShownObject {
        let Some(object) = self.objects.get(number as usize).copied() else { return ShownObject::default() };
        if let Some(tensor) = self.torch.describe_tensor(self.gil, object) {
            let is_known = tensor.address != 0;
            let details =
                if is_known { format!("{} bytes at {:#x}", tensor.bytes, tensor.address) } else { String::new() };
            return ShownObject { title: tensor.text, details, is_tensor: true, ..ShownObject::default() };
        }
        let details = self.place_of_code(object).unwrap_or_default();
        ShownObject { title: self.object(number), details, ..ShownObject::default() }
    }

    /// The file and line of a frame or a function.
    fn place_of_code(&self, object: PyObjectPtr) -> Option<String> {
        // Reads attributes of CPython's own types, which run no code of the program.
        let (code, line) = if self.gil.is_frame(object) {
            (self.gil.attribute(object, c"f_code")?, self.gil.attribute(object, c"f_lineno")?)
        } else if self.gil.is_function(object) {
            let code = self.gil.attribute(object, c"__code__")?;
            let line = self.gil.attribute(code.object, c"co_firstlineno")?;
            (code, line)
        } else {
            return None;
        };
        let file = self.gil.attribute(code.object, c"co_filename")?;
        Some(format!("{}:{}", self.gil.str(file.object)?, self.gil.as_int(line.object)))
    }

    /// How an object refers to those on the page, by place. `places` has the place of each object by its address.
    fn labels(&self, from: PyObjectPtr, places: &HashMap<usize, usize>) -> HashMap<usize, String> {
        let gil = self.gil;
        let mut labels = HashMap::new();
        let mut add = |to: PyObjectPtr, label: &dyn Fn() -> Option<String>| {
            if let Some(place) = places.get(&to.addr())
                && let Some(label) = label()
            {
                labels.entry(*place).or_insert(label);
            }
        };
        let entries = |dict: PyObjectPtr| gil.entries(dict).take(MAX_ENTRIES);
        let name = |key: PyObjectPtr| gil.str(key).map(|text| text.chars().take(MAX_KEY_CHARS).collect::<String>());
        if gil.is_dict(from) {
            entries(from).for_each(|(key, value)| add(value, &|| Some(format!("[{}]", self.key_text(key)?))));
        } else if gil.is_sequence(from) {
            let elements = gil.elements(from).take(MAX_ENTRIES).enumerate();
            elements.for_each(|(index, item)| add(item, &|| Some(format!("[{index}]"))));
        } else if gil.is_frame(from) {
            if let Some(locals) = self.gil.frame_locals(from) {
                entries(locals.object).for_each(|(key, value)| add(value, &|| Some(format!("local {}", name(key)?))));
            }
        } else if gil.is_plain_instance(from)
            && let Some(dict) = gil.attribute_dict(from)
        {
            entries(dict.object).for_each(|(key, value)| add(value, &|| Some(format!(".{}", name(key)?))));
        }
        labels
    }

    fn reference(&self, from: u32, to: u32) -> Reference {
        let object = |number: u32| self.objects.get(number as usize).copied();
        let (Some(from), Some(to)) = (object(from), object(to)) else { return Reference::Unknown };
        let gil = self.gil;
        if gil.is_dict(from) {
            return self.item_key(from, to).map_or(Reference::Unknown, Reference::Item);
        }
        if gil.is_sequence(from) {
            let index = if gil.is_tuple(from) {
                gil.elements(from).position(|item| item == to)
            } else {
                (0..gil.list_len(from)).find(|at| gil.list_item(from, *at) == Some(to))
            };
            return index.map_or(Reference::Unknown, |index| Reference::Item(index.to_string()));
        }
        let Some(dict) = gil.attribute_dict(from) else { return Reference::Unknown };
        if dict.object == to {
            return Reference::Dictionary(|describer, dict, value| {
                let object = |number: u32| describer.objects.get(number as usize).copied();
                describer.attribute_name(object(dict)?, object(value)?)
            });
        }
        self.attribute_name(dict.object, to).map_or(Reference::Unknown, Reference::Attribute)
    }

    /// The key of a value, as `repr` of a dictionary shows it. `None` for keys that are neither strings nor integers.
    fn item_key(&self, dict: PyObjectPtr, value: PyObjectPtr) -> Option<String> {
        self.key_text(self.gil.key_of(dict, value)?)
    }

    fn key_text(&self, key: PyObjectPtr) -> Option<String> {
        if let Some(text) = self.gil.str(key) {
            return Some(format!("'{}'", text.chars().take(MAX_KEY_CHARS).collect::<String>()));
        }
        self.gil.is_builtin(key, "int").then(|| self.gil.text_of(key)).flatten()
    }

    /// The name of the attribute that has this value.
    fn attribute_name(&self, dict: PyObjectPtr, value: PyObjectPtr) -> Option<String> {
        let key = self.gil.key_of(dict, value)?;
        self.gil.str(key).map(|text| text.chars().take(MAX_KEY_CHARS).collect())
    }
}

/// How one object references another.
enum Reference {
    Unknown,
    Attribute(String),
    Item(String),
    /// Through its attribute dictionary. The function returns the name of the attribute, given the numbers of the
    /// dictionary and the value.
    Dictionary(fn(&Describer<'_>, u32, u32) -> Option<String>),
}
