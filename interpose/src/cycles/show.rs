//! Reference cycles in words and in pictures.

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

/// Pictures of one process, at most; and of a run, whose processes share the folder.
const MOST_FILES: usize = 10;
const MOST_NUMBERS: usize = 1000;
/// Kinds of cycles that are told apart.
const MOST_KINDS: usize = 1000;
/// Cycles of one collection that are looked at.
const MOST_CYCLES: usize = 1000;
/// Objects in a picture, and in another try where that was too large.
const OBJECTS: [usize; 2] = [400, 60];
/// Bytes of a picture, at most.
const LARGEST: usize = 2 << 20;
/// Objects named in words.
const MOST_WORDS: usize = 12;
/// Characters of a key.
const LONGEST_KEY: usize = 40;

/// What of PyTorch is used; references that are never given back.
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

/// Called by `create_graph`, with the GIL.
unsafe extern "C" fn is_tensor(_: Object, object: Object) -> Object {
    answer(|session, torch| Some(session.truth(session.is_instance(object, torch.tensor))))
}

/// As above: data type, shape, and where its memory is; `None` of other objects.
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
    // SAFETY: null, or made once and never freed.
    let installed = unsafe { INSTALLED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the interpreter calls with the GIL.
    let session = unsafe { interface.session() };
    let answer = installed.zip(session).and_then(|(installed, session)| of(session, &installed.torch));
    // SAFETY: with the GIL.
    answer.unwrap_or_else(|| unsafe { interface.nothing() })
}

/// What is known of a tensor.
struct Tensor {
    /// e.g. `Tensor float32[1024, 1024]`
    text: String,
    /// Where its storage begins, and how large that is; 0 where it is not known.
    address: u64,
    bytes: u64,
}

impl Torch {
    /// Beside it: why there are no pictures.
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

    /// `None` for what is no tensor.
    fn look(&self, session: Session<'_>, object: Object) -> Option<Tensor> {
        if !session.is_instance(object, self.tensor) {
            return None;
        }
        // SAFETY: an object.
        let class = unsafe { type_of(object) };
        // SAFETY: a type, alive as long as its object.
        let mut tensor = Tensor { text: unsafe { type_name(class) }.to_owned(), address: 0, bytes: 0 };
        if class != self.tensor && class != self.parameter {
            // What a subclass answers may be the program's own code.
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

    /// The page that shows these objects; `None` where it fails or is too large.
    fn html<'a>(&self, session: Session<'a>, objects: impl Iterator<Item = Object>) -> Option<Held<'a>> {
        let list = session.new_list()?;
        let objects: Vec<Object> = objects.filter(|object| !session.is_proxy(*object)).collect();
        let mut seen: HashSet<usize> = objects.iter().map(|object| object.addr()).collect();
        for object in objects {
            session.list_append(list.object, object);
            // It may have had none until it was asked for, as `create_graph` asks: what is in it is found there from then on.
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

/// What has been shown of this process.
#[derive(Default)]
pub(super) struct Known {
    kinds: HashSet<u64>,
    files: usize,
}

/// A cycle that is told of.
pub(super) struct Shown {
    /// In the run's folder; empty where there is none.
    pub(super) file: String,
    pub(super) text: String,
    /// Where the tensors' memory is that it held; one 0 where nobody knows.
    pub(super) addresses: Vec<u64>,
}

/// The cycles of a kind that was not there before.
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
        let text = words.text(&cycle);
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
    /// Writes the page that shows a cycle, and gives its name; an empty one where there is none.
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

/// Writes a new file, which the folder's owner alone can read, and gives its name.
fn write(folder: &Path, bytes: &[u8]) -> Option<String> {
    const FLAGS: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    for number in 0..MOST_NUMBERS {
        let name = format!("cycle-{number}.html");
        let path = CString::new(folder.join(&name).as_os_str().as_bytes()).ok()?;
        // SAFETY: a C string. It makes a file, or fails: what is there already is not opened.
        let file = unsafe { libc::open(path.as_ptr(), FLAGS, 0o600) };
        if file < 0 {
            if std::io::Error::last_os_error().raw_os_error() == Some(libc::EEXIST) {
                continue;
            }
            return None;
        }
        // SAFETY: just opened, and ours. The program's umask may have taken our own rights.
        let mut file = unsafe {
            libc::fchmod(file, 0o600);
            File::from_raw_fd(file)
        };
        if file.write_all(bytes).is_err() {
            // A full disk.
            // SAFETY: a C string; the file that we made.
            unsafe { libc::unlink(path.as_ptr()) };
            return None;
        }
        return Some(name);
    }
    None
}

/// Names objects and what leads from one to the next.
struct Words<'a> {
    session: Session<'a>,
    torch: &'a Torch,
    objects: &'a [Object],
}

impl Words<'_> {
    fn class(&self, number: u32) -> &str {
        // SAFETY: live objects, whose types are alive as long.
        self.objects.get(number as usize).map_or("?", |object| unsafe { type_name(type_of(*object)) })
    }

    /// A number for all cycles of the same classes.
    fn kind(&self, cycle: &Cycle) -> u64 {
        // An object's dictionary may be an object of its own or not: it is made when it is asked for.
        let is_own = |from: u32, to: u32| {
            let object = |number: u32| self.objects.get(number as usize).copied();
            object(from)
                .zip(object(to))
                .is_some_and(|(from, to)| self.session.is_plain(from) && self.session.is_dict(to))
        };
        let classes = |numbers: &[u32]| {
            let before = std::iter::once(None).chain(numbers.iter().map(Some));
            let others = numbers.iter().zip(before).filter(|(to, from)| !from.is_some_and(|from| is_own(*from, **to)));
            others.map(|(number, _)| self.class(*number).to_owned()).collect::<Vec<_>>()
        };
        BuildHasherDefault::<DefaultHasher>::default().hash_one((classes(&cycle.way), classes(&cycle.to_tensor)))
    }

    /// `Node.children -> list[0] -> Node.parent -> Node; Node.value -> Tensor float32[1024, 1024]`
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

    /// Objects that lead from one to the next.
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
                // An object's dictionary is the object, for whoever reads.
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
        // Attributes of types of CPython's own.
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

    /// The key of a value, as a dictionary's display shows it; of keys that are texts or numbers.
    fn key(&self, dict: Object, value: Object) -> Option<String> {
        let key = self.session.key_of(dict, value)?;
        if let Some(text) = self.session.utf8(key) {
            return Some(format!("'{}'", text.chars().take(LONGEST_KEY).collect::<String>()));
        }
        // SAFETY: an object, whose type is alive.
        let is_number = unsafe { type_name(type_of(key)) } == "int";
        is_number.then(|| self.session.text_of(key)).flatten()
    }

    /// The name of an attribute.
    fn name(&self, dict: Object, value: Object) -> Option<String> {
        let key = self.session.key_of(dict, value)?;
        self.session.utf8(key).map(|text| text.chars().take(LONGEST_KEY).collect())
    }
}

/// What leads from one object to the next.
enum Reference {
    Unknown,
    Attribute(String),
    Item(String),
    /// Its dictionary: the name under which that has the one behind it.
    Dictionary(fn(&Words<'_>, u32, u32) -> Option<String>),
}
