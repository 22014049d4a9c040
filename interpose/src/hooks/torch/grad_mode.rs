//! Whether autograd is recording on this thread: asked for at every event, so it is read in place.
//!
//! `c10::GradMode::is_enabled()` costs several calls (its own, the thread-local's initialisation, `__tls_get_addr`). What it
//! reads is one bit of a thread-local `c10::AutogradState`, whose address `AutogradState::get_tls_state()` gives, and which stays
//! where it is as long as its thread runs. Which bit differs by version, so it is found out: the mode is turned over and back on
//! the calling thread, where nobody else can see it, and exactly one bit must have changed with it. Otherwise the function is
//! called, as it is where one of the symbols is missing.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_trace::definition::Verdict;

use super::libc10;
use crate::guard::Guard;
use crate::real::Original;
use crate::stack::CheckedMemory;
use crate::thread::thread;

/// How much of the state is looked at.
const STATE_BYTES: usize = 32;

/// Where the bit is: [`UNKNOWN`], [`REFUSED`], or one more than its number from the start of the state.
static PLACE: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
const REFUSED: u32 = u32::MAX;

/// `None`: PyTorch cannot be asked.
#[inline(always)]
pub(super) fn is_enabled() -> Option<bool> {
    let state = thread(|t| t.autograd_state.get());
    if state.is_null() {
        return ask();
    }
    let bit = PLACE.load(Ordering::Relaxed).wrapping_sub(1);
    // SAFETY: the thread's own state, of which the bit was found to be a part.
    let byte = unsafe { state.add(bit as usize / 8).read_volatile() };
    Some(byte >> (bit % 8) & 1 != 0)
}

/// Says once how the mode is read. For rare moments: it is the calling thread's PyTorch that is asked.
pub(super) fn tell(guard: &mut Guard) {
    static TOLD: AtomicU32 = AtomicU32::new(0);
    if is_enabled().is_none() || TOLD.swap(1, Ordering::Relaxed) != 0 {
        return;
    }
    let text = if PLACE.load(Ordering::Relaxed) == REFUSED {
        "asked of PyTorch at each event: its bit was not found"
    } else {
        "AutogradState verified: exactly one bit follows the mode"
    };
    guard.notice("torch.grad_mode", Verdict::Works, text);
}

/// `bool c10::GradMode::is_enabled()`; remembers where this thread's state is, once it is known what to look for there.
#[cold]
fn ask() -> Option<bool> {
    static IS_ENABLED: Original = Original::new();
    let function = libc10(&IS_ENABLED, c"_ZN3c108GradMode10is_enabledEv");
    if function.is_null() {
        return None;
    }
    // SAFETY: `static bool c10::GradMode::is_enabled()`, which reads a thread-local.
    let is_enabled = || unsafe {
        let function: unsafe extern "C" fn() -> bool = std::mem::transmute(function);
        function()
    };
    if PLACE.load(Ordering::Relaxed) == REFUSED {
        return Some(is_enabled());
    }
    let state = autograd_state();
    if PLACE.load(Ordering::Relaxed) == UNKNOWN {
        PLACE.store(find_bit(state, is_enabled()).map_or(REFUSED, |bit| bit + 1), Ordering::Relaxed);
    }
    if PLACE.load(Ordering::Relaxed) != REFUSED {
        thread(|t| t.autograd_state.set(state));
    }
    Some(is_enabled())
}

/// `static AutogradState& c10::AutogradState::get_tls_state()`; null where there is no such function.
fn autograd_state() -> *const u8 {
    static GET: Original = Original::new();
    let function = libc10(&GET, c"_ZN3c1013AutogradState13get_tls_stateEv");
    if function.is_null() {
        return std::ptr::null();
    }
    // SAFETY: a reference is returned as an address (Itanium C++ ABI).
    unsafe {
        let function: unsafe extern "C" fn() -> *const u8 = std::mem::transmute(function);
        function()
    }
}

/// The number of the bit in `state` that follows the grad mode.
fn find_bit(state: *const u8, enabled: bool) -> Option<u32> {
    static SET: Original = Original::new();
    let function: *mut c_void = libc10(&SET, c"_ZN3c108GradMode11set_enabledEb");
    if function.is_null() || state.is_null() {
        return None;
    }
    // SAFETY: `static void c10::GradMode::set_enabled(bool)`, which writes the thread-local.
    let set = |enabled: bool| unsafe {
        let function: unsafe extern "C" fn(bool) = std::mem::transmute(function);
        function(enabled);
    };
    let memory = CheckedMemory::open().ok()?;
    let read = |length: usize| {
        let mut bytes = [0; STATE_BYTES];
        memory.read(state.addr(), bytes.get_mut(..length)?).then_some(bytes)
    };
    // How far the state goes is not known: what lies behind it may not be there.
    let length = [STATE_BYTES, 8, 1].into_iter().find(|length| read(*length).is_some())?;
    let look = || read(length);
    let before = look()?;
    set(!enabled);
    let turned = look();
    set(enabled);
    let after = look()?;
    changed_bit(&before, &turned?, &after, enabled)
}

/// The one bit that was `enabled` before and after, and not in between; `None` when it is not the only difference.
fn changed_bit(before: &[u8], turned: &[u8], after: &[u8], enabled: bool) -> Option<u32> {
    let differences = || before.iter().zip(turned).map(|(a, b)| a ^ b).enumerate().filter(|(_, bits)| *bits != 0);
    let (index, bits) = differences().next()?;
    let bit = index as u32 * 8 + bits.trailing_zeros();
    let was = before.get(bit as usize / 8)? >> (bit % 8) & 1 != 0;
    let alone = differences().count() == 1 && bits.count_ones() == 1;
    (alone && before == after && was == enabled).then_some(bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_that_follows_the_mode_is_taken_and_nothing_else() {
        let (on, off) = ([0u8, 0b0000_1101, 7], [0u8, 0b0000_1001, 7]);
        assert_eq!(changed_bit(&on, &off, &on, true), Some(10));
        assert_eq!(changed_bit(&off, &on, &off, false), Some(10));
        assert_eq!(changed_bit(&on, &off, &on, false), None, "the other way round");
        assert_eq!(changed_bit(&on, &on, &on, true), None, "nothing changed");
        assert_eq!(changed_bit(&on, &[1, 0b1001, 7], &on, true), None, "two bits changed");
        assert_eq!(changed_bit(&on, &off, &off, true), None, "it did not come back");
    }
}
