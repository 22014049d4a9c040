//! The names of attributes that an object stores without a dictionary, from CPython 3.11 on. A dictionary object would
//! exist only once the program asks for it, and making it would be noticed.
//!
//! A class keeps these names in a table of keys that its instances share (`ht_cached_keys`, `PyDictKeysObject` in
//! Include/internal/pycore_dict.h). Its place in the class differs by release, so it is searched for, with checked
//! reads. A name counts only if reading that attribute gives the object in question, which the caller checks.

use memtrace_stackwalk::CheckedMemory;

use super::api::PyObjectPtr;
use super::gil::{GilToken, type_of};

/// `tp_basicsize` of a type object, in bytes.
const TP_BASICSIZE: usize = 32;
/// `sizeof(PyTypeObject)` is at least this many bytes, and `sizeof(PyHeapTypeObject)` at most.
const FIRST_FIELD: usize = 400;
const LARGEST_CLASS: usize = 4096;
/// Fields of `PyDictKeysObject`: the logarithms of its sizes, its kind, the number of entries, the indices.
const LOG2_SIZE: usize = 8;
const ENTRY_COUNT: usize = 24;
const INDICES: usize = 32;
/// `DICT_KEYS_SPLIT`.
const SPLIT: u8 = 2;
/// `SHARED_KEYS_MAX_SIZE`, and the logarithm of the largest table.
const MAX_ENTRIES: usize = 64;
const MAX_LOG2_SIZE: u8 = 7;
/// `PyDictUnicodeEntry`: key and value.
const ENTRY: usize = 16;

impl GilToken<'_> {
    /// The names of the attributes that the instances of this object's class share, as borrowed references. Empty if
    /// they cannot be found.
    pub(crate) fn shared_attribute_names(self, object: PyObjectPtr, memory: &CheckedMemory) -> Vec<PyObjectPtr> {
        if !self.is_of_heap_type(object) {
            return Vec::new();
        }
        // SAFETY: callers pass a live object. Its class is alive too, and so is the class of that.
        let (class, metaclass) = unsafe { (type_of(object), type_of(type_of(object))) };
        let (class, metaclass) = (class.expose_provenance(), metaclass.expose_provenance());
        let size = memory.size(metaclass, TP_BASICSIZE).unwrap_or(0).min(LARGEST_CLASS);
        let keys = |offset: usize| self.names_in(memory.size(class, offset)?, memory);
        (FIRST_FIELD..size).step_by(size_of::<usize>()).find_map(keys).unwrap_or_default()
    }

    /// The names in a table of shared keys. `None` if this is none.
    fn names_in(self, table: usize, memory: &CheckedMemory) -> Option<Vec<PyObjectPtr>> {
        if table == 0 || !table.is_multiple_of(size_of::<usize>()) {
            return None;
        }
        let mut kind = [0; 3];
        let is_split = memory.read(table.wrapping_add(LOG2_SIZE), &mut kind)
            && matches!(kind, [size, indices, SPLIT] if size == indices && size <= MAX_LOG2_SIZE);
        let count = memory.size(table, ENTRY_COUNT).filter(|count| is_split && (1..=MAX_ENTRIES).contains(count))?;
        let [log2_size, ..] = kind;
        let entries = table + INDICES + (1 << log2_size);
        let name = |index: usize| {
            let entry = entries + index * ENTRY;
            let (key, value) = (memory.size(entry, 0)?, memory.size(entry, size_of::<usize>())?);
            let is_name = value == 0 && memory.size(key, size_of::<usize>())? == self.api.str_type.addr();
            is_name.then(|| std::ptr::with_exposed_provenance_mut(key))
        };
        (0..count).map(name).collect()
    }
}
