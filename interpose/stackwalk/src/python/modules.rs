//! Determines which frames call an `nn.Module`, and verifies that the called object is one.
//!
//! Every call of a module runs `Module.__call__` in `torch/nn/modules/module.py`. That function is named
//! `_wrapped_call_impl` (2.1 and later), `_call_impl` (1.7 to 2.0) or `__call__` (before). Its first parameter is the
//! module, and its frame's first local variable refers to it as long as the frame runs. The function neither rebinds it
//! nor shares it with an inner function, which would make it a cell. Today's `_call_impl` does share it. There the
//! object is a cell, which is no module, and the caller's frame has the module.
//!
//! *Only live objects are read.* A frame of this thread's chain owns its local variables. The only exception is a frame
//! that releases them before it leaves the chain (3.11, at its return). At that instruction it does not count as a
//! call.
//!
//! *Verified.* Reads go through [`CheckedMemory`] until one object has proved to be a module, and for every new class.
//! The object's class must have a method resolution order that starts with itself, ends with `object` and contains a
//! class named `Module`.

use std::ffi::{CStr, c_char};
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use super::super::arch;
use super::super::definition::DefinitionSink;
use super::layout::ObjectLayout;
use super::memory::CheckedMemory;

/// The end of the path of the file that implements every call of a module.
const FILE: &str = "torch/nn/modules/module.py";
/// Module calls are switched off after this many objects that are no modules, if there was never one that is.
const MAX_ATTEMPTS: u32 = 64;
/// The longest method resolution order that is read.
const MAX_ORDER: usize = 256;
/// The longest class name in bytes. Longer ones are cut.
const MAX_NAME_BYTES: usize = 256;
/// How many classes are cached.
const CACHED_CLASSES: usize = 256;

/// How a function calls a module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallKind {
    /// The function is `Module.__call__`.
    Outer,
    /// The function is `Module.__call__`, or the part of it that does the work.
    Inner,
}

/// Whether and how the function `name` in this file calls a module.
pub(super) fn call_kind(filename: &str, name: &str) -> Option<CallKind> {
    let kind = match name {
        "_wrapped_call_impl" | "__call__" => CallKind::Outer,
        "_call_impl" => CallKind::Inner,
        _ => return None,
    };
    let rest = filename.strip_suffix(FILE)?;
    (rest.is_empty() || rest.ends_with('/')).then_some(kind)
}

/// The facts about modules in this process.
pub(super) struct ModuleClasses {
    /// 0 before an object has proved to be a module.
    verified: AtomicU32,
    misses: AtomicU32,
    /// Cached classes: address and name, mixed. The lowest bit is set for a module's class.
    classes: [AtomicU64; CACHED_CLASSES],
}

impl ModuleClasses {
    pub(super) const fn new() -> ModuleClasses {
        ModuleClasses {
            verified: AtomicU32::new(0),
            misses: AtomicU32::new(0),
            classes: [const { AtomicU64::new(0) }; CACHED_CLASSES],
        }
    }

    /// Whether an object has proved to be a module, so that first local variables are where the layout expects them.
    pub(super) fn is_verified(&self) -> bool {
        self.verified.load(Relaxed) != 0
    }

    /// Whether the layout has proved wrong.
    fn is_off(&self) -> bool {
        self.verified.load(Relaxed) == 0 && self.misses.load(Relaxed) >= MAX_ATTEMPTS
    }

    /// The class of the object in a call frame's first local variable. `None` if it cannot be read, or must not be.
    ///
    /// # Safety
    ///
    /// If first local variables are where the layout expects them, `object` is a live object.
    #[inline]
    pub(super) unsafe fn class(&self, layout: ObjectLayout, object: usize) -> Option<usize> {
        if self.verified.load(Acquire) == 0 {
            return self.class_checked(layout, object);
        }
        // SAFETY: the layout is verified, so the caller guarantees a live object.
        Some(unsafe { load(object + layout.class()) })
    }

    #[cold]
    fn class_checked(&self, layout: ObjectLayout, object: usize) -> Option<usize> {
        if self.is_off() || !is_plausible(object) {
            return None;
        }
        CheckedMemory::open().ok()?.size(object, layout.class()).filter(|class| is_plausible(*class))
    }

    /// Whether objects of a class are modules.
    #[cold]
    pub(super) fn is_module(&self, layout: ObjectLayout, class: usize, sink: &mut dyn DefinitionSink) -> bool {
        let Ok(memory) = CheckedMemory::open() else { return false };
        let Some(name) = memory.size(class, layout.class_name()) else { return false };
        // Another class may later have the same address, but hardly with its name at the same address too.
        let mixed = (class as u64 ^ (name as u64).rotate_left(20)) & !1;
        let slot = self.classes.get((mixed >> 4) as usize % CACHED_CLASSES);
        let known = slot.map_or(0, |slot| slot.load(Relaxed));
        if known & !1 == mixed {
            return known & 1 != 0;
        }
        let is_module = descends_from_module(&memory, layout, class);
        if let Some(slot) = slot {
            slot.store(mixed | u64::from(is_module), Relaxed);
        }
        if self.verified.load(Relaxed) == 0 {
            if is_module {
                if self.verified.swap(1, Release) == 0 {
                    sink.module_layout_checked(true);
                }
            } else if self.misses.fetch_add(1, Relaxed) + 1 == MAX_ATTEMPTS {
                sink.module_layout_checked(false);
            }
        }
        is_module
    }
}

fn is_plausible(address: usize) -> bool {
    address.is_multiple_of(8) && arch::USER_ADDRESSES.contains(&address)
}

/// Whether the class has a valid method resolution order that contains `Module`.
fn descends_from_module(memory: &CheckedMemory, layout: ObjectLayout, class: usize) -> bool {
    let Some(order) = memory.size(class, layout.method_order()).filter(|order| is_plausible(*order)) else {
        return false;
    };
    let Some(count) = memory.size(order, layout.size()).filter(|count| (2..=MAX_ORDER).contains(count)) else {
        return false;
    };
    let Some(first) = layout.tuple_items().into_iter().find(|items| memory.size(order, *items) == Some(class)) else {
        return false;
    };
    let is_named = |at: usize, name: &[u8]| {
        memory
            .size(order, first + at * 8)
            .and_then(|class| memory.size(class, layout.class_name()))
            .is_some_and(|text| has_bytes_at(memory, text, name))
    };
    is_named(count - 1, b"object\0") && (0..count - 1).any(|at| is_named(at, b"Module\0"))
}

/// Whether these bytes, at most eight, are at an address.
fn has_bytes_at(memory: &CheckedMemory, address: usize, bytes: &[u8]) -> bool {
    let mut found = [0; 8];
    let found = found.get_mut(..bytes.len()).unwrap_or_default();
    memory.read(address, found) && found == bytes
}

/// The name of a class, without the module prefix that classes of C code have.
///
/// # Safety
///
/// `class` is a live class, and stays alive for `'a`.
pub(super) unsafe fn name<'a>(layout: ObjectLayout, class: usize) -> &'a str {
    // SAFETY: the caller guarantees a live class. Every class has a name, a C string that lives as long as the class.
    let text =
        unsafe { CStr::from_ptr(with_exposed_provenance::<c_char>(load(class + layout.class_name()))) }.to_bytes();
    let text = text.get(..MAX_NAME_BYTES).unwrap_or(text);
    let name = match str::from_utf8(text) {
        Ok(name) => name,
        Err(e) => text.get(..e.valid_up_to()).and_then(|valid| str::from_utf8(valid).ok()).unwrap_or_default(),
    };
    name.rsplit('.').next().unwrap_or_default()
}

/// # Safety
///
/// A readable, aligned word is at `address`.
#[inline]
unsafe fn load(address: usize) -> usize {
    // SAFETY: the caller guarantees a readable, aligned word.
    unsafe { with_exposed_provenance::<usize>(address).read() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::ids::{FrameId, StackId};

    const LAYOUT: ObjectLayout = ObjectLayout::WITH_GIL;

    #[derive(Default)]
    struct Reports(Vec<bool>);

    impl DefinitionSink for Reports {
        fn frame(&mut self, _id: FrameId, _text: &crate::FrameText<'_>) {}
        fn stack(&mut self, _id: StackId, _parent: StackId, _frame: FrameId) {}
        fn module_layout_checked(&mut self, works: bool) {
            self.0.push(works);
        }
    }

    #[test]
    fn only_functions_of_that_file_call_modules() {
        let file = "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py";
        assert_eq!(call_kind(file, "_wrapped_call_impl"), Some(CallKind::Outer));
        assert_eq!(call_kind(file, "__call__"), Some(CallKind::Outer));
        assert_eq!(call_kind(file, "_call_impl"), Some(CallKind::Inner));
        assert_eq!(call_kind("torch/nn/modules/module.py", "_call_impl"), Some(CallKind::Inner));
        for (file, name) in [
            (file, "forward"),
            ("/work/mytorch/nn/modules/module.py", "_call_impl"),
            ("/work/train.py", "_call_impl"),
            ("/venv/torch/nn/modules/module.py.bak", "_call_impl"),
        ] {
            assert_eq!(call_kind(file, name), None, "{file} {name}");
        }
    }

    /// Synthetic classes with this method resolution order. The first is the class itself.
    struct Classes {
        words: Vec<Box<[usize]>>,
        order: Box<[usize]>,
    }

    fn classes(names: &[&'static CStr], items: usize) -> Classes {
        let mut words: Vec<Box<[usize]>> = names
            .iter()
            .map(|name| {
                let mut class = vec![0; 64].into_boxed_slice();
                class[LAYOUT.class_name() / 8] = name.as_ptr().expose_provenance();
                class
            })
            .collect();
        let mut order = vec![0; items / 8];
        order[LAYOUT.size() / 8] = names.len();
        order.extend(words.iter().map(|class| class.as_ptr().expose_provenance()));
        let order = order.into_boxed_slice();
        words[0][LAYOUT.method_order() / 8] = order.as_ptr().expose_provenance();
        Classes { words, order }
    }

    impl Classes {
        fn first(&self) -> usize {
            assert!(!self.order.is_empty());
            self.words[0].as_ptr().expose_provenance()
        }
    }

    #[test]
    fn a_module_has_module_among_its_base_classes() {
        let memory = CheckedMemory::open().unwrap();
        for items in LAYOUT.tuple_items() {
            let is = |names: &[&'static CStr]| descends_from_module(&memory, LAYOUT, classes(names, items).first());
            assert!(is(&[c"Module", c"object"]));
            assert!(is(&[c"Linear", c"Module", c"object"]));
            assert!(is(&[c"Mine", c"Mixin", c"Module", c"object"]));
            assert!(!is(&[c"cell", c"object"]));
            assert!(!is(&[c"ModuleList", c"object"]));
            assert!(!is(&[c"Mine", c"Module", c"Protocol"]));
            assert!(!is(&[c"object"]));
        }
        assert!(!descends_from_module(&memory, LAYOUT, 64));
        assert!(!descends_from_module(&memory, LAYOUT, [0usize; 64].as_ptr().expose_provenance()));
    }

    #[test]
    fn the_layout_is_reported_once_and_classes_are_cached() {
        let (modules, mut reports) = (ModuleClasses::new(), Reports::default());
        let (linear, cell) = (classes(&[c"Linear", c"Module", c"object"], 24), classes(&[c"cell", c"object"], 24));
        let object = [1, linear.first()];
        for _ in 0..3 {
            assert!(!modules.is_module(LAYOUT, cell.first(), &mut reports));
            assert!(modules.is_module(LAYOUT, linear.first(), &mut reports));
            // SAFETY: `object` and its class are alive and have this layout.
            assert_eq!(unsafe { modules.class(LAYOUT, object.as_ptr().expose_provenance()) }, Some(linear.first()));
        }
        assert_eq!(reports.0, [true]);
        // SAFETY: `linear` is alive and has the layout of a class.
        assert_eq!(unsafe { name(LAYOUT, linear.first()) }, "Linear");
        let long = classes(&[c"torch._C.\xc3\xbcber", c"object"], 24);
        // SAFETY: `long` is alive and has the layout of a class.
        assert_eq!(unsafe { name(LAYOUT, long.first()) }, "über");
    }

    #[test]
    fn module_calls_are_switched_off_without_any_module() {
        let (modules, mut reports) = (ModuleClasses::new(), Reports::default());
        let all: Vec<Classes> = (0..MAX_ATTEMPTS).map(|_| classes(&[c"cell", c"object"], 24)).collect();
        // SAFETY: no layout is verified yet, so the addresses are read with checks.
        assert_eq!(unsafe { (modules.class(LAYOUT, 64), modules.class(LAYOUT, 12345)) }, (None, None));
        for class in &all {
            modules.is_module(LAYOUT, class.first(), &mut reports);
        }
        // Some classes may share a cache slot and are then examined again. None is mistaken for another.
        while reports.0.is_empty() {
            for class in &all {
                modules.is_module(LAYOUT, class.first(), &mut reports);
            }
        }
        assert_eq!(reports.0, [false]);
        let object = [1, all[0].first()];
        // SAFETY: `object` and its class are alive and have this layout.
        assert_eq!(unsafe { modules.class(LAYOUT, object.as_ptr().expose_provenance()) }, None);
    }
}
