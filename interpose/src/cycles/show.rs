//! Describes reference cycles in text and in pictures.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::fs::File;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io::Write as _;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use memtrace_trace::counters::Counter;

use super::graph::{Cycle, Graph};
use super::python::{Held, Method, ONE, Object, Session, type_name, type_of};
use super::{INSTALLED, INTERFACE};
use crate::process::Process;

/// At most this many pictures for one process.
const MOST_FILES: usize = 10;
/// File names of pictures end at this number. The processes of a run share the folder.
const MOST_NUMBERS: usize = 1000;
/// At most this many kinds of cycles are distinguished.
const MOST_KINDS: usize = 1000;
/// At most this many cycles of one collection are examined.
const MOST_CYCLES: usize = 1000;
/// How many objects a picture shows at most, and how many in a second attempt if the first file was too large.
const OBJECTS: [usize; 2] = [400, 60];
/// The largest size of a picture in bytes.
const LARGEST: usize = 2 << 20;
/// How many objects the text names.
const MOST_WORDS: usize = 12;
/// The largest number of characters of a key in the text.
const LONGEST_KEY: usize = 40;

/// The objects of PyTorch that are used. Their references are never released.
pub(super) struct Torch {
    /// `torch.Tensor`.
    pub(super) tensor: Object,
    parameter: Object,
    pictures: Option<Pictures>,
}

struct Pictures {
    create_graph: Object,
    to_html: Object,
    is_tensor: Object,
    describe: Object,
}

static IS_TENSOR: Method =
    Method { name: c"is_tensor".as_ptr(), body: is_tensor, flags: ONE, doc: c"Whether it is a tensor.".as_ptr() };
static DESCRIBE: Method =
    Method { name: c"describe".as_ptr(), body: describe, flags: ONE, doc: c"What a tensor is.".as_ptr() };

/// `create_graph` calls this with the GIL: whether an object is a tensor.
unsafe extern "C" fn is_tensor(_: Object, object: Object) -> Object {
    answer(|session, torch| Some(session.truth(session.is_instance(object, torch.tensor))))
}

/// `create_graph` calls this with the GIL: data type, shape and address of a tensor. `None` for other objects.
unsafe extern "C" fn describe(_: Object, object: Object) -> Object {
    answer(|session, torch| {
        let tensor = torch.look(session, object)?;
        let mut text = tensor.text;
        if tensor.address != 0 {
            let _ = write!(text, "\n{} bytes at {:#x}", tensor.bytes, tensor.address);
        }
        session.text(&text).map(Held::keep)
    })
}

fn answer(of: impl FnOnce(Session<'_>, &Torch) -> Option<Object>) -> Object {
    let Some(Some(interface)) = INTERFACE.get() else { return std::ptr::null_mut() };
    // SAFETY: the pointer is null or comes from a box that is never freed.
    let installed = unsafe { INSTALLED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the interpreter calls its functions with the GIL.
    let session = unsafe { interface.session() };
    let answer = installed.zip(session).and_then(|(installed, session)| of(session, &installed.torch));
    // SAFETY: the interpreter calls its functions with the GIL.
    answer.unwrap_or_else(|| unsafe { interface.nothing() })
}

/// The description of a tensor.
struct Tensor {
    /// For example `Tensor float32[1024, 1024]`.
    text: String,
    /// Where its storage begins, 0 if unknown.
    address: u64,
    /// The size of its storage in bytes, 0 if unknown.
    bytes: u64,
}

impl Torch {
    /// Finds PyTorch's objects. The second result is the reason why there are no pictures, if there are none.
    pub(super) fn new(session: Session<'_>, torch: &Held<'_>) -> Result<(Torch, Option<String>), String> {
        let unknown = "torch has no tensors";
        let tensor = session.attribute(torch.object, c"Tensor").ok_or(unknown)?;
        let nn = session.import(c"torch.nn")?;
        let parameter = session.attribute(nn.object, c"Parameter").ok_or(unknown)?;
        let (pictures, words_only) = match Pictures::new(session) {
            Ok(pictures) => (Some(pictures), None),
            Err(why) => (None, Some(why)),
        };
        Ok((Torch { tensor: tensor.keep(), parameter: parameter.keep(), pictures }, words_only))
    }

    /// Describes a tensor. `None` for any other object.
    fn look(&self, session: Session<'_>, object: Object) -> Option<Tensor> {
        if !session.is_instance(object, self.tensor) {
            return None;
        }
        // SAFETY: callers pass a live object.
        let class = unsafe { type_of(object) };
        // SAFETY: `class` is the type of a live object, so it is alive too.
        let mut tensor = Tensor { text: unsafe { type_name(class) }.to_owned(), address: 0, bytes: 0 };
        if class != self.tensor && class != self.parameter {
            // A subclass may compute these attributes with the program's own code.
            return Some(tensor);
        }
        if let (Some(dtype), Some(shape)) = (session.attribute(object, c"dtype"), session.attribute(object, c"shape")) {
            let dtype = session.text_of(dtype.object).unwrap_or_default();
            let sizes = session.tuple(shape.object).map(|size| session.as_number(size).to_string());
            let sizes: Vec<String> = sizes.collect();
            let _ = write!(tensor.text, " {}[{}]", dtype.trim_start_matches("torch."), sizes.join(", "));
        }
        let storage = session.attribute(object, c"untyped_storage").and_then(|get| session.call(get.object, &[], &[]));
        if let Some(storage) = storage {
            let number = |name: &CStr| {
                let get = session.attribute(storage.object, name)?;
                session.call(get.object, &[], &[]).map(|number| session.as_address(number.object))
            };
            (tensor.address, tensor.bytes) =
                (number(c"data_ptr").unwrap_or_default(), number(c"nbytes").unwrap_or_default());
        }
        Some(tensor)
    }
}

impl Pictures {
    fn new(session: Session<'_>) -> Result<Pictures, String> {
        let cycles = session.import(c"torch.utils.viz._cycles")?;
        let get = |name: &CStr| session.attribute(cycles.object, name).ok_or("it is another than is known");
        let function = |method| session.function(method).ok_or("the interpreter has no memory");
        let (create_graph, to_html) = (get(c"create_graph")?, get(c"to_html")?);
        let (is_tensor, describe) = (function(&IS_TENSOR)?, function(&DESCRIBE)?);
        let [create_graph, to_html, is_tensor, describe] = [create_graph, to_html, is_tensor, describe].map(Held::keep);
        Ok(Pictures { create_graph, to_html, is_tensor, describe })
    }

    /// The HTML page that shows these objects. `None` if PyTorch's code fails or the page is too large.
    fn html<'a>(&self, session: Session<'a>, objects: impl Iterator<Item = Object>) -> Option<Held<'a>> {
        let list = session.new_list()?;
        let objects: Vec<Object> = objects.filter(|object| !session.is_proxy(*object)).collect();
        let mut seen: HashSet<usize> = objects.iter().map(|object| object.addr()).collect();
        for object in objects {
            session.list_append(list.object, object);
            // `create_graph` reads an object's dictionary, which may create it. From then on the dictionary holds the
            // attributes, so the picture needs it as an object of its own.
            let attributes = session.is_plain(object).then(|| session.dict_of(object)).flatten();
            if let Some(dict) =
                attributes.filter(|dict| session.has_entries(dict.object) && seen.insert(dict.object.addr()))
            {
                session.list_append(list.object, dict.object);
            }
        }
        let named = [(c"context", self.describe), (c"filter", self.is_tensor)];
        let nodes = session.call(self.create_graph, &[list.object], &named)?;
        let html = session.call(self.to_html, &[nodes.object], &[])?;
        session.utf8(html.object).filter(|text| text.len() <= LARGEST)?;
        Some(html)
    }
}

/// The cycles that this process has shown.
#[derive(Default)]
pub(super) struct Known {
    kinds: HashSet<u64>,
    files: usize,
}

/// A cycle to report.
pub(super) struct Shown {
    /// The name of the picture in the run's folder. Empty if there is none.
    pub(super) file: String,
    pub(super) text: String,
    /// The addresses of the tensors' memory that the cycle held. A single 0 if no address is known.
    pub(super) addresses: Vec<u64>,
}

/// Describes the cycles whose kind has not been shown before.
pub(super) fn cycles(
    session: Session<'_>,
    torch: &Torch,
    process: &Process,
    known: &mut Known,
    graph: &Graph,
    objects: &[Object],
) -> Vec<Shown> {
    let object = |number: &u32| objects.get(*number as usize).copied();
    let is_tensor = |number: u32| object(&number).is_some_and(|object| session.is_instance(object, torch.tensor));
    let mut all = Vec::new();
    for cycle in graph.cycles(is_tensor, MOST_CYCLES) {
        let words = Words { session, torch, objects };
        let kind = words.kind(&cycle);
        if known.kinds.contains(&kind) {
            continue;
        }
        if known.kinds.len() == MOST_KINDS {
            process.count(Counter::CyclesNotShown, 1);
            continue;
        }
        known.kinds.insert(kind);
        let described = graph.descriptions(&cycle, is_tensor).into_iter().map(|cycle| (words.text(&cycle), cycle));
        let (text, cycle) = described.min_by(|a, b| a.0.cmp(&b.0)).unwrap_or_else(|| (words.text(&cycle), cycle));
        let mut addresses: Vec<u64> = cycle
            .held
            .iter()
            .filter_map(|number| Some(torch.look(session, object(number)?)?.address))
            .filter(|address| *address != 0)
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        if addresses.is_empty() {
            addresses.push(0);
        }
        let file = known.picture(session, torch, process, |most| {
            graph.around(&cycle, most).iter().filter_map(object).collect::<Vec<_>>()
        });
        all.push(Shown { file, text, addresses });
    }
    all
}

impl Known {
    /// Writes the page that shows a cycle and returns its file name. Empty if there is none, which is counted.
    fn picture(
        &mut self,
        session: Session<'_>,
        torch: &Torch,
        process: &Process,
        around: impl Fn(usize) -> Vec<Object>,
    ) -> String {
        let (Some(pictures), Some(folder)) = (&torch.pictures, &process.options.cycles) else { return String::new() };
        let written = (self.files < MOST_FILES)
            .then(|| OBJECTS.into_iter().find_map(|most| pictures.html(session, around(most).into_iter())))
            .flatten()
            .and_then(|html| write(folder, session.utf8(html.object)?.as_bytes()));
        self.files += usize::from(written.is_some());
        process.count(Counter::CyclesNotShown, u64::from(written.is_none()));
        written.unwrap_or_default()
    }
}

/// Writes a new file that only its owner can read and returns its name. `None` if that fails.
fn write(folder: &Path, bytes: &[u8]) -> Option<String> {
    const FLAGS: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    for number in 0..MOST_NUMBERS {
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
            unsafe { libc::unlink(path.as_ptr()) };
            return None;
        }
        return Some(name);
    }
    None
}

/// Describes objects and the references between them.
struct Words<'a> {
    session: Session<'a>,
    torch: &'a Torch,
    objects: &'a [Object],
}

impl Words<'_> {
    fn class(&self, number: u32) -> &str {
        // SAFETY: the collector's list holds the objects, so they and their types are alive.
        self.objects.get(number as usize).map_or("?", |object| unsafe { type_name(type_of(*object)) })
    }

    /// A hash of the classes in a cycle and on its path to a tensor. Cycles with the same classes are of one kind.
    ///
    /// The collector lists the objects of a cycle in no fixed order, so the kind depends neither on where the path
    /// around the cycle starts nor on its direction.
    fn kind(&self, cycle: &Cycle) -> u64 {
        let object = |number: u32| self.objects.get(number as usize).copied();
        // CPython creates an object's dictionary on demand, so it may be an object of its own or not. The kind must not
        // depend on that.
        let is_own_dict = |from: u32, to: u32| {
            let both = object(from).zip(object(to));
            both.is_some_and(|(from, to)| self.session.is_plain(from) && self.session.is_dict(to))
        };
        // Both paths begin at the same object, which the last object of the cycle refers to.
        let mut classes = std::collections::BTreeSet::new();
        for path in [&cycle.way, &cycle.to_tensor] {
            let before = cycle.way.last().into_iter().chain(path);
            let others = before.zip(path).filter(|(from, to)| !is_own_dict(**from, **to));
            classes.extend(others.map(|(_, number)| self.class(*number)));
        }
        BuildHasherDefault::<DefaultHasher>::default().hash_one(classes)
    }

    /// For example `Node.children -> list[0] -> Node.parent -> Node; Node.value -> Tensor float32[1024, 1024]`.
    fn text(&self, cycle: &Cycle) -> String {
        let mut around = cycle.way.clone();
        around.extend(cycle.way.first());
        let mut text = self.way(&around);
        if let [_, _, ..] = cycle.to_tensor[..] {
            let _ = write!(text, "; {}", self.way(&cycle.to_tensor));
        }
        let others = cycle.held.len().saturating_sub(1);
        if others > 0 {
            let _ = write!(text, " and {others} more tensor{}", if others == 1 { "" } else { "s" });
        }
        text
    }

    /// The text for a path of references.
    fn way(&self, numbers: &[u32]) -> String {
        let mut text = String::new();
        let mut skip = false;
        for (at, number) in numbers.iter().enumerate() {
            if std::mem::take(&mut skip) {
                continue;
            }
            if at > 0 {
                text += " -> ";
            }
            if at + 2 >= MOST_WORDS && at + 1 < numbers.len() {
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
        if let Some(tensor) = self.torch.look(self.session, object) {
            return tensor.text;
        }
        // Reads attributes of CPython's own types, which run no code of the program.
        let text = |of: Object, name: &CStr| {
            let value = self.session.attribute(of, name)?;
            self.session.utf8(value.object).map(str::to_owned)
        };
        let name = if self.session.is_function(object) {
            text(object, c"__qualname__")
        } else if self.session.is_frame(object) {
            self.session.attribute(object, c"f_code").and_then(|code| text(code.object, c"co_name"))
        } else {
            None
        };
        name.map_or(class.clone(), |name| format!("{class} {name}"))
    }

    fn reference(&self, from: u32, to: u32) -> Reference {
        let object = |number: u32| self.objects.get(number as usize).copied();
        let (Some(from), Some(to)) = (object(from), object(to)) else { return Reference::Unknown };
        let session = self.session;
        if session.is_dict(from) {
            return self.key(from, to).map_or(Reference::Unknown, Reference::Item);
        }
        if session.is_sequence(from) {
            let place = if session.is_tuple(from) {
                session.tuple(from).position(|item| item == to)
            } else {
                (0..session.list_len(from)).find(|at| session.list_item(from, *at) == Some(to))
            };
            return place.map_or(Reference::Unknown, |place| Reference::Item(place.to_string()));
        }
        let Some(dict) = session.dict_of(from) else { return Reference::Unknown };
        if dict.object == to {
            return Reference::Dictionary(|words, dict, value| {
                let object = |number: u32| words.objects.get(number as usize).copied();
                words.name(object(dict)?, object(value)?)
            });
        }
        self.name(dict.object, to).map_or(Reference::Unknown, Reference::Attribute)
    }

    /// The key of a value, as `repr` of a dictionary shows it. `None` for keys that are neither strings nor integers.
    fn key(&self, dict: Object, value: Object) -> Option<String> {
        let key = self.session.key_of(dict, value)?;
        if let Some(text) = self.session.utf8(key) {
            return Some(format!("'{}'", text.chars().take(LONGEST_KEY).collect::<String>()));
        }
        // SAFETY: the dictionary holds the key, so the key and its type are alive.
        let is_number = unsafe { type_name(type_of(key)) } == "int";
        is_number.then(|| self.session.text_of(key)).flatten()
    }

    /// The name of the attribute that has this value.
    fn name(&self, dict: Object, value: Object) -> Option<String> {
        let key = self.session.key_of(dict, value)?;
        self.session.utf8(key).map(|text| text.chars().take(LONGEST_KEY).collect())
    }
}

/// How one object references another.
enum Reference {
    Unknown,
    Attribute(String),
    Item(String),
    /// Through its attribute dictionary. The function returns the name of the attribute, given the numbers of the
    /// dictionary and the value.
    Dictionary(fn(&Words<'_>, u32, u32) -> Option<String>),
}
