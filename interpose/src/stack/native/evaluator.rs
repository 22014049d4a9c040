//! Where the code of the interpreter's evaluation function is: a native frame in it stands for Python frames.
//!
//! The function is exported, so its first address is known; its extent is in its unwinding information, whether or not
//! there are symbols. Compilers put code that is rarely run into a part of its own, elsewhere (`.cold`). That part has an entry of its
//! own in the unwinding information, which does not begin as a function does, and the function jumps into it: so it is found.

use super::cfi;
use super::objects::{Object, with_code_at};

/// More parts than any compiler makes.
const MOST: usize = 8;
/// No evaluation function is as long.
const LONGEST: usize = 1 << 20;

/// See the module.
pub(crate) struct Evaluator {
    parts: [(usize, usize); MOST],
    count: usize,
}

impl Evaluator {
    /// The parts of the function at this address; none when it is not known.
    pub(crate) fn find(function: usize) -> Evaluator {
        with_code_at(function, |object| Evaluator::find_in(object, function)).unwrap_or_else(Evaluator::none)
    }

    fn none() -> Evaluator {
        Evaluator { parts: [(0, 0); MOST], count: 0 }
    }

    /// The same, of a function of this object.
    pub(super) fn find_in(object: &Object<'_>, function: usize) -> Evaluator {
        let mut found = Evaluator::none();
        found.search(object, function);
        found
    }

    /// Whether this address is in one of the parts.
    #[inline]
    pub(super) fn contains(&self, address: usize) -> bool {
        self.parts.iter().take(self.count).any(|(start, end)| (*start..*end).contains(&address))
    }

    fn search(&mut self, object: &Object<'_>, function: usize) {
        let Some(whole) = cfi::extent(object, function) else { return };
        self.add(whole.start, whole.end);
        let Some(code) = object.code(function) else { return };
        let Some(first) = whole.start.checked_sub(code.as_ptr().addr()) else { return };
        let Some(body) = code.get(first..first + (whole.end - whole.start).min(LONGEST)) else { return };
        for (at, bytes) in body.windows(6).enumerate() {
            // jcc rel32, jmp rel32. Bytes in the midst of other instructions may look the same: what they lead to is
            // looked at before it is believed.
            let (rel, length) = match bytes {
                [0x0f, 0x80..=0x8f, a, b, c, d] => ([*a, *b, *c, *d], 6),
                [0xe9, a, b, c, d, _] => ([*a, *b, *c, *d], 5),
                _ => continue,
            };
            let target = (whole.start + at + length).wrapping_add_signed(i32::from_le_bytes(rel) as isize);
            if self.contains(target) || object.code(target).is_none() {
                continue;
            }
            if let Some(part) = cfi::extent(object, target).filter(|part| !part.whole) {
                self.add(part.start, part.end);
            }
        }
    }

    fn add(&mut self, start: usize, end: usize) {
        if let Some(place) = self.parts.get_mut(self.count) {
            *place = (start, end);
            self.count += 1;
        }
    }
}
