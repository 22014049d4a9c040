//! Names nodes of Python's `torch.autograd.Function`. All of them have one C++ class, `PyNode`, so the Python class
//! names them, as in `PyNode::name()`. That function takes the GIL, so it is not called.
//!
//! A `PyNode` and its Python object (`THPFunction`) point to each other. The offsets of both pointers differ by
//! version, so they are searched for once, with reads that cannot fault. A match is a word of the node that points to
//! an object which points back. The object's class must have a name that ends with `Backward`, as PyTorch's all do.
//! Without a match the nodes keep the name `PyNode`.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use memtrace_stackwalk::arch::USER_ADDRESSES;
use memtrace_stackwalk::{CheckedMemory, ObjectLayout};
use memtrace_trace::definition::NoticeStatus;

use crate::recording::guard::Guard;

/// The first word of a node that may be the pointer. Sequence number and thread are before it.
const FIRST_WORD: usize = 7;
/// How many words of a node and of its Python object are searched.
const NODE_WORDS: usize = 400;
const OBJECT_WORDS: usize = 96;
/// The search is switched off after this many nodes without a match.
const MAX_ATTEMPTS: u32 = 8;
const IS_OFF: u32 = u32::MAX;

/// Offsets of `PyObject.ob_type` and `PyTypeObject.tp_name` with the GIL, in bytes.
const OB_TYPE: usize = ObjectLayout::WITH_GIL.class();
const TP_NAME: usize = ObjectLayout::WITH_GIL.class_name();
/// By how many bytes both are moved: with the GIL, and in a free-threaded build.
const MOVED: [usize; 2] = [0, ObjectLayout::FREE_THREADED.class() - OB_TYPE];

/// The facts about `PyNode` in this process.
pub(super) struct PythonNodes {
    /// The address of `PyNode`'s vtable, 0 before the first such node.
    vtable: AtomicU64,
    /// The index of the word in a node that points to its Python object, 0 before it is found.
    word: AtomicU32,
    /// One of [`MOVED`]. Stored before the word.
    moved: AtomicUsize,
    attempts: AtomicU32,
}

impl PythonNodes {
    pub(super) const fn new() -> PythonNodes {
        PythonNodes {
            vtable: AtomicU64::new(0),
            word: AtomicU32::new(0),
            moved: AtomicUsize::new(0),
            attempts: AtomicU32::new(0),
        }
    }

    /// Notes the name of each C++ class when it is first seen.
    pub(super) fn class_seen(&self, vtable: u64, name: &str) {
        if name == "PyNode" {
            self.vtable.store(vtable, Ordering::Relaxed);
        }
    }

    /// The address of a node's Python class. `None` for nodes of C++ classes.
    ///
    /// # Safety
    ///
    /// `node` points to a live node, and `vtable` is its first word.
    #[inline]
    pub(super) unsafe fn class(&self, node: *const u64, vtable: u64) -> Option<u64> {
        if self.vtable.load(Ordering::Relaxed) != vtable {
            return None;
        }
        let word = match self.word.load(Ordering::Acquire) {
            IS_OFF => return None,
            0 => self.search(node)?,
            word => word,
        };
        // SAFETY: the caller guarantees a live node. It is a `PyNode`, in which this word was found. The node owns the
        // object, and the object owns a reference to its class.
        unsafe {
            let object = node.add(word as usize).read() as *const u64;
            if object.is_null() {
                None
            } else {
                Some(object.byte_add(OB_TYPE + self.moved.load(Ordering::Relaxed)).read())
            }
        }
    }

    /// The name of a class that [`Self::class`] returned.
    pub(super) fn name(&self, class: u64) -> String {
        // SAFETY: `class` was just read from a node that is still alive, and every class of CPython has a name.
        unsafe {
            let name =
                (class as *const *const std::ffi::c_char).byte_add(TP_NAME + self.moved.load(Ordering::Relaxed)).read();
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }

    #[cold]
    fn search(&self, node: *const u64) -> Option<u32> {
        // The guard restores `errno` and keeps allocations in this function out of the recording.
        let mut guard = Guard::enter()?;
        let found = CheckedMemory::open().ok().and_then(|memory| find(&memory, node as usize));
        if let Some((word, moved)) = found {
            self.moved.store(moved, Ordering::Relaxed);
            self.word.store(word, Ordering::Release);
        } else if self.attempts.fetch_add(1, Ordering::Relaxed) + 1 == MAX_ATTEMPTS {
            self.word.store(IS_OFF, Ordering::Relaxed);
            guard.notice(
                "torch.python_node",
                NoticeStatus::Off,
                "PyNode layout not recognized: nodes of Python functions are not named by their class",
            );
        }
        found.map(|(word, _)| word)
    }
}

/// The index of the word that points to the node's Python object, and by how many bytes that object's fields are moved.
fn find(memory: &CheckedMemory, node: usize) -> Option<(u32, usize)> {
    (FIRST_WORD..NODE_WORDS).find_map(|word| {
        let object = memory.size(node, word * 8)?;
        Some((word as u32, moved_of_python_object(memory, object, node)?))
    })
}

/// One of [`MOVED`] if this is the Python object of the node. `None` for anything else.
fn moved_of_python_object(memory: &CheckedMemory, object: usize, node: usize) -> Option<usize> {
    let is_plausible = |address: usize| address.is_multiple_of(8) && USER_ADDRESSES.contains(&address);
    let points_back = || (2..OBJECT_WORDS).map_while(|word| memory.size(object, word * 8)).any(|word| word == node);
    if !is_plausible(object) || !points_back() {
        return None;
    }
    MOVED.into_iter().find(|moved| {
        memory.size(object, OB_TYPE + moved).filter(|class| is_plausible(*class)).is_some_and(|class| {
            let name = memory.size(class, TP_NAME + moved);
            name.is_some_and(|name| text(memory, name).is_some_and(|t| t.ends_with(b"Backward")))
        })
    })
}

/// The C string at an address. `None` if it is not readable or longer than 256 bytes.
fn text(memory: &CheckedMemory, address: usize) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    for at in (0..256).step_by(8) {
        let word = memory.size(address, at)?.to_le_bytes();
        text.extend(word.iter().take_while(|byte| **byte != 0));
        if word.contains(&0) {
            return Some(text);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A class, an object that points to the node at its word 40, and a node that points to the object at its word 90.
    /// The fields of Python's objects are moved by this many bytes.
    fn graph(name: &CStr, moved: usize) -> [Box<[usize]>; 3] {
        let address = |words: &[usize]| words.as_ptr() as usize;
        let (mut class, mut object, mut node) =
            (vec![0; 8].into_boxed_slice(), vec![1; 100].into_boxed_slice(), vec![0; 170].into_boxed_slice());
        class[(TP_NAME + moved) / 8] = name.as_ptr() as usize;
        object[(OB_TYPE + moved) / 8] = address(&class);
        object[40] = address(&node);
        // Words that are no addresses, or that point to something that does not point back.
        (node[8], node[9], node[10]) = (8, usize::MAX, address(&class));
        node[90] = address(&object);
        [class, object, node]
    }

    #[test]
    fn the_python_object_is_found_by_its_pointer_back() {
        let memory = CheckedMemory::open().unwrap();
        for moved in MOVED {
            let [_class, mut object, node] = graph(c"CubeBackward", moved);
            assert_eq!(find(&memory, node.as_ptr() as usize), Some((90, moved)));
            object[40] = 0;
            assert_eq!(find(&memory, node.as_ptr() as usize), None);
        }
        let [_class, _object, node] = graph(c"str", 0);
        assert_eq!(find(&memory, node.as_ptr() as usize), None);
    }

    #[test]
    fn a_text_ends_at_its_nul() {
        let memory = CheckedMemory::open().unwrap();
        assert_eq!(
            text(&memory, c"a name longer than a word".as_ptr() as usize).unwrap(),
            b"a name longer than a word"
        );
        assert_eq!(text(&memory, 64), None);
    }
}
