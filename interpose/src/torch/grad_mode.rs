//! Reads whether autograd records on this thread. Every event needs this, so it is read in place.
//!
//! `c10::GradMode::is_enabled()` costs several calls: itself, the initialization of the thread-local and
//! `__tls_get_addr`. It reads one bit of a thread-local `c10::AutogradState`. `AutogradState::get_tls_state()` returns
//! that object's address, which is constant for a thread.
//!
//! The bit's position differs by version, so it is determined at run time. The mode is toggled twice on the calling
//! thread, where no other thread sees it. Exactly one bit must follow the mode. If not, or if a symbol is missing, the
//! function is called at every event.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_stackwalk::CheckedMemory;
use memtrace_trace::definition::NoticeStatus;

use super::libraries::libc10;
use crate::linker::original::OriginalFunction;
use crate::recording::guard::Guard;
use crate::recording::thread_local::with_thread_local;

/// How many bytes of the state are examined.
const STATE_BYTES: usize = 32;

/// [`UNKNOWN`], [`NOT_FOUND`], or one more than the bit's index from the start of the state.
static BIT: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
const NOT_FOUND: u32 = u32::MAX;

/// Whether autograd records on this thread. `None` if PyTorch's function is not available.
#[inline(always)]
pub(super) fn is_enabled() -> Option<bool> {
    let state = with_thread_local(|t| t.autograd_state.get());
    if state.is_null() {
        return call_is_enabled();
    }
    let bit = BIT.load(Ordering::Relaxed).wrapping_sub(1);
    // SAFETY: `state` is this thread's own state, and `find_bit` has found this bit inside it.
    let byte = unsafe { state.add(bit as usize / 8).read_volatile() };
    Some(byte >> (bit % 8) & 1 != 0)
}

/// Reports once how the mode is read. It calls PyTorch on the calling thread, so it is for rare moments.
pub(super) fn report(guard: &mut Guard) {
    static IS_REPORTED: AtomicU32 = AtomicU32::new(0);
    if is_enabled().is_none() || IS_REPORTED.swap(1, Ordering::Relaxed) != 0 {
        return;
    }
    let text = if BIT.load(Ordering::Relaxed) == NOT_FOUND {
        "read with a call of PyTorch at each event: its bit was not found"
    } else {
        "AutogradState verified: exactly one bit follows the mode"
    };
    guard.notice("torch.grad_mode", NoticeStatus::Works, text);
}

/// Calls `bool c10::GradMode::is_enabled()`. Remembers the address of this thread's state once the bit is known.
#[cold]
fn call_is_enabled() -> Option<bool> {
    static IS_ENABLED: OriginalFunction = OriginalFunction::new();
    let function = libc10(&IS_ENABLED, c"_ZN3c108GradMode10is_enabledEv");
    if function.is_null() {
        return None;
    }
    // SAFETY: `static bool c10::GradMode::is_enabled()` has this signature and reads a thread-local.
    let is_enabled = || unsafe {
        let function: unsafe extern "C" fn() -> bool = std::mem::transmute(function);
        function()
    };
    if BIT.load(Ordering::Relaxed) == NOT_FOUND {
        return Some(is_enabled());
    }
    let state = autograd_state();
    if BIT.load(Ordering::Relaxed) == UNKNOWN {
        BIT.store(find_bit(state, is_enabled()).map_or(NOT_FOUND, |bit| bit + 1), Ordering::Relaxed);
    }
    if BIT.load(Ordering::Relaxed) != NOT_FOUND {
        with_thread_local(|t| t.autograd_state.set(state));
    }
    Some(is_enabled())
}

/// Calls `static AutogradState& c10::AutogradState::get_tls_state()`. Null if there is no such function.
fn autograd_state() -> *const u8 {
    static GET: OriginalFunction = OriginalFunction::new();
    let function = libc10(&GET, c"_ZN3c1013AutogradState13get_tls_stateEv");
    if function.is_null() {
        return std::ptr::null();
    }
    // SAFETY: the function has this signature: it returns a reference as an address (Itanium C++ ABI).
    unsafe {
        let function: unsafe extern "C" fn() -> *const u8 = std::mem::transmute(function);
        function()
    }
}

/// The index of the bit in `state` that follows the grad mode. `None` if it cannot be determined.
fn find_bit(state: *const u8, enabled: bool) -> Option<u32> {
    static SET: OriginalFunction = OriginalFunction::new();
    let function: *mut c_void = libc10(&SET, c"_ZN3c108GradMode11set_enabledEb");
    if function.is_null() || state.is_null() {
        return None;
    }
    // SAFETY: `static void c10::GradMode::set_enabled(bool)` has this signature and writes a thread-local.
    let set = |enabled: bool| unsafe {
        let function: unsafe extern "C" fn(bool) = std::mem::transmute(function);
        function(enabled);
    };
    let memory = CheckedMemory::open().ok()?;
    let read = |length: usize| {
        let mut bytes = [0; STATE_BYTES];
        memory.read(state.addr(), bytes.get_mut(..length)?).then_some(bytes)
    };
    // The size of the state is unknown, and memory after it may not be mapped.
    let length = [STATE_BYTES, 8, 1].into_iter().find(|length| read(*length).is_some())?;
    let read_state = || read(length);
    let before = read_state()?;
    set(!enabled);
    let toggled = read_state();
    set(enabled);
    let after = read_state()?;
    changed_bit(&before, &toggled?, &after, enabled)
}

/// The index of the one bit that was `enabled` before and after, and not in between. `None` unless it is the only
/// difference.
fn changed_bit(before: &[u8], toggled: &[u8], after: &[u8], enabled: bool) -> Option<u32> {
    let differences = || before.iter().zip(toggled).map(|(a, b)| a ^ b).enumerate().filter(|(_, bits)| *bits != 0);
    let (index, bits) = differences().next()?;
    let bit = index as u32 * 8 + bits.trailing_zeros();
    let was = before.get(bit as usize / 8)? >> (bit % 8) & 1 != 0;
    let is_only_difference = differences().count() == 1 && bits.count_ones() == 1;
    (is_only_difference && before == after && was == enabled).then_some(bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_bit_that_follows_the_mode_is_accepted() {
        let (on, off) = ([0u8, 0b0000_1101, 7], [0u8, 0b0000_1001, 7]);
        assert_eq!(changed_bit(&on, &off, &on, true), Some(10));
        assert_eq!(changed_bit(&off, &on, &off, false), Some(10));
        assert_eq!(changed_bit(&on, &off, &on, false), None, "the opposite mode");
        assert_eq!(changed_bit(&on, &on, &on, true), None, "nothing changed");
        assert_eq!(changed_bit(&on, &[1, 0b1001, 7], &on, true), None, "two bits changed");
        assert_eq!(changed_bit(&on, &off, &off, true), None, "the bit was not restored");
    }
}
