//! Finds the code of the interpreter's evaluation function. A native frame in it stands for Python frames.
//!
//! The function is exported, so its first address is known. Its unwinding information states its extent, with or
//! without symbols. Compilers move rarely executed code into a separate part (`.cold`). That part has its own entry in
//! the unwinding information and does not start like a function. The function jumps into it.

use super::super::arch;
use super::cfi;
use super::elf_objects::{ElfObject, with_code_at};

/// Upper bound on the number of parts.
const MAX_PARTS: usize = 8;
/// Upper bound on the function's size in bytes.
const MAX_FUNCTION_BYTES: usize = 1 << 20;

/// The address ranges of the evaluation function's parts.
pub(crate) struct Evaluator {
    parts: [(usize, usize); MAX_PARTS],
    count: usize,
}

impl Evaluator {
    /// The parts of the function at this address. Empty if it is unknown.
    pub(crate) fn find(function: usize) -> Evaluator {
        with_code_at(function, |object| Evaluator::find_in(object, function)).unwrap_or_else(Evaluator::none)
    }

    fn none() -> Evaluator {
        Evaluator { parts: [(0, 0); MAX_PARTS], count: 0 }
    }

    /// The parts of a function in this object.
    pub(super) fn find_in(object: &ElfObject<'_>, function: usize) -> Evaluator {
        let mut found = Evaluator::none();
        found.search(object, function);
        found
    }

    /// Whether this address is in one of the parts.
    #[inline]
    pub(super) fn contains(&self, address: usize) -> bool {
        self.parts.iter().take(self.count).any(|(start, end)| (*start..*end).contains(&address))
    }

    fn search(&mut self, object: &ElfObject<'_>, function: usize) {
        let Some(whole) = cfi::code_range(object, function) else { return };
        self.add(whole.start, whole.end);
        let Some(code) = object.code(function) else { return };
        let Some(first) = whole.start.checked_sub(code.as_ptr().addr()) else { return };
        let Some(body) = code.get(first..first + (whole.end - whole.start).min(MAX_FUNCTION_BYTES)) else { return };
        arch::for_each_jump(body, whole.start, |target| {
            // Bytes that only look like a jump: the unwinding information of the destination must confirm that it is a
            // part.
            if self.contains(target) || object.code(target).is_none() {
                return;
            }
            if let Some(part) = cfi::code_range(object, target).filter(|part| !part.is_function_start) {
                self.add(part.start, part.end);
            }
        });
    }

    fn add(&mut self, start: usize, end: usize) {
        if let Some(slot) = self.parts.get_mut(self.count) {
            *slot = (start, end);
            self.count += 1;
        }
    }
}
