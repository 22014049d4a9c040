//! The list of loaded objects (`struct link_map` of link.h), in the loader's order.
//!
//! The objects that were loaded before the program started come first. Their order is the order in which the loader
//! searches them for symbols: the executable, preloaded libraries, then all dependencies, breadth first. Objects that
//! `dlopen` loads are appended.
//!
//! Constraint: only the public head of the record is read, which glibc and musl share and never change.

use std::ffi::CStr;

use super::r_debug::{DynamicEntry, r_debug};
use super::reading::Reading;
use super::visibility::make_visible;

/// A loaded object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadedObject {
    /// The address of the loader's record.
    pub(super) link_map: usize,
    /// The load bias, to which the object's own addresses are relative.
    pub bias: usize,
    /// The address of the path, a C string.
    pub(super) name: usize,
    /// The address of the dynamic section, 0 if there is none.
    pub(super) dynamic: usize,
    /// Whether it is the executable.
    pub(super) is_executable: bool,
}

/// More objects than any process has. A list that is longer is not a list.
const MAX_OBJECTS: usize = 1 << 16;

impl Reading {
    /// All loaded objects of the main namespace, in the loader's order.
    pub fn objects(&self) -> impl Iterator<Item = LoadedObject> {
        let mut next = r_debug().map_or(0, |loader| loader.first());
        let mut index = 0;
        std::iter::from_fn(move || {
            if next == 0 {
                return None;
            }
            make_visible(index);
            index += 1;
            let object;
            (object, next) = self.object_and_next(next)?;
            Some(object)
        })
        .take(MAX_OBJECTS)
    }

    /// The object with the loader's record at this address, which `_dl_find_object` has found. The C library publishes
    /// its results to all threads.
    pub(super) fn object_of_link_map(&self, link_map: usize) -> Option<LoadedObject> {
        self.object_and_next(link_map).map(|(object, _)| object)
    }

    /// Whether the object with the loader's record at this address is the last one. `None` if it is not readable.
    pub(super) fn is_last(&self, link_map: usize) -> Option<bool> {
        self.object_and_next(link_map).map(|(_, next)| next == 0)
    }

    /// The object with the loader's record at this address, and the address of the next record.
    fn object_and_next(&self, link_map: usize) -> Option<(LoadedObject, usize)> {
        let [bias, name, dynamic, next, _previous] = self.read::<[usize; 5]>(link_map)?;
        let is_executable = r_debug().is_some_and(|loader| loader.first() == link_map);
        Some((LoadedObject { link_map, bias, name, dynamic, is_executable }, next))
    }

    /// The loaded object with this file name, for example `libc10.so`. The first one if there are several.
    pub fn object_of_file(&self, file_name: &[u8]) -> Option<LoadedObject> {
        self.objects().find(|object| object.with_file_name(self, |name| name == file_name))
    }
}

impl LoadedObject {
    /// Calls `visit` with the path as the loader has it. It is empty for the executable.
    pub fn with_path<T>(&self, reading: &Reading, visit: impl FnOnce(&CStr) -> T) -> T {
        reading.with_c_string(self.name, visit)
    }

    /// Calls `visit` with the file name, without the folders.
    pub fn with_file_name<T>(&self, reading: &Reading, visit: impl FnOnce(&[u8]) -> T) -> T {
        self.with_path(reading, |path| {
            let path = path.to_bytes();
            visit(path.rsplit(|byte| *byte == b'/').next().unwrap_or(path))
        })
    }

    /// The address of the dynamic section, which identifies a loaded object. 0 if there is none.
    pub fn dynamic_section(&self) -> usize {
        self.dynamic
    }

    /// Calls `visit` with (tag, value, value as an address) for each entry of the dynamic section.
    pub fn for_each_dynamic(&self, reading: &Reading, mut visit: impl FnMut(i64, usize, usize)) {
        const DT_NULL: usize = 0;
        /// More entries than any linker writes.
        const MAX_ENTRIES: usize = 1024;
        if self.dynamic == 0 {
            return;
        }
        for index in 0..MAX_ENTRIES {
            let entry = reading.read::<DynamicEntry>(self.dynamic + index * size_of::<DynamicEntry>());
            let Some([tag, value]) = entry.filter(|[tag, _]| *tag != DT_NULL) else { break };
            // glibc relocates these pointers in place, except in objects whose dynamic section is read-only (the vDSO).
            // musl does not.
            visit(tag as i64, value, if value < self.bias { self.bias + value } else { value });
        }
    }
}

/// A state of the list of objects. Two states of the same process are equal if no object was loaded or unloaded between
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectListMark {
    count: usize,
    hash: usize,
}

impl ObjectListMark {
    /// The present state.
    pub fn now() -> ObjectListMark {
        const PRIME: usize = 0x517c_c1b7_2722_0a95;
        let reading = Reading::begin();
        reading.objects().fold(ObjectListMark { count: 0, hash: 0 }, |mark, object| {
            let mix = |hash: usize, word: usize| (hash.rotate_left(5) ^ word).wrapping_mul(PRIME);
            ObjectListMark { count: mark.count + 1, hash: mix(mix(mark.hash, object.link_map), object.dynamic) }
        })
    }
}
