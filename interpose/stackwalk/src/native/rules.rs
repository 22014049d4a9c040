//! A lock-free, process-wide cache of the rules for code addresses.
//!
//! It has a bounded size and avoids parsing unwinding information ([`super::cfi`]). There are two ways a set, and old
//! rules are overwritten. Each slot stores its key XORed with its value. So a slot that is being written, or that two
//! threads have written at once, matches no address.
//!
//! The key includes the number of unloads. So an unload invalidates all rules, because another object may get the same
//! address.

use std::sync::atomic::{
    AtomicPtr, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use super::super::arch;
use super::super::digest::fold;
use super::super::pages;
use super::memory::has_room;
use super::rule::{FrameRegisters, UnwindRule};
use super::{cfi, elf_objects};

const SETS: usize = 1 << 12;

#[repr(C, align(64))]
struct Set([Slot; 2]);

/// The key XORed with the words of the rule, then those words. All zeros mean an empty slot.
#[repr(C)]
struct Slot {
    key: AtomicU64,
    words: [AtomicU64; 3],
}

static CACHE: AtomicPtr<Set> = AtomicPtr::new(std::ptr::null_mut());

/// How many bits the address of an instruction has, without those that are 0.
const CODE_BITS: u32 = arch::USER_ADDRESS_BITS - arch::CODE_ALIGNMENT_BITS;

/// The other bits than those of the address hold the number of unloads, truncated.
fn key(state: &FrameRegisters, unloads: u32) -> u64 {
    state.ip as u64 >> arch::CODE_ALIGNMENT_BITS
        ^ u64::from(state.exact) << CODE_BITS
        ^ u64::from(unloads) << (CODE_BITS + 1)
}

fn set(state: &FrameRegisters) -> Option<&'static Set> {
    let sets = CACHE.load(Acquire);
    let index = fold(state.ip as u64, 0x9E37_79B9_7F4A_7C15) as usize % SETS;
    // SAFETY: the pointer is null or an array of `SETS` zeroed sets, which is never unmapped. The index is below
    // `SETS`.
    (!sets.is_null()).then(|| unsafe { &*sets.add(index) })
}

/// The rule of a frame. `unloads` is how many objects were unloaded, `None` while one is being unloaded.
#[inline]
pub(super) fn rule(state: &FrameRegisters, unloads: Option<u32>) -> UnwindRule {
    if let Some(unloads) = unloads
        && let Some(Set(ways)) = set(state)
    {
        let key = key(state, unloads);
        for slot in ways {
            let [a, b, c] = &slot.words;
            let words = [a.load(Relaxed), b.load(Relaxed), c.load(Relaxed)];
            let [a, b, c] = words;
            if slot.key.load(Relaxed) ^ a ^ b.rotate_left(1) ^ c.rotate_left(2) == key
                && let Some(rule) = UnwindRule::unpack(words)
            {
                return rule;
            }
        }
    }
    parse_rule(state, unloads)
}

#[cold]
#[inline(never)]
fn parse_rule(state: &FrameRegisters, unloads: Option<u32>) -> UnwindRule {
    if !has_room() {
        return UnwindRule::Unsupported;
    }
    let lookup = state.lookup();
    let rule = elf_objects::with_code_at(lookup, |object| cfi::rule(object, lookup, state.ip))
        .unwrap_or(UnwindRule::Guess { is_in_object: false, follows_call: false });
    // Code outside all objects may be replaced by an object without notice.
    let is_cacheable = !matches!(rule, UnwindRule::Guess { is_in_object: false, .. });
    if let Some(unloads) = unloads.filter(|_| is_cacheable) {
        insert(state, unloads, &rule);
    }
    rule
}

fn insert(state: &FrameRegisters, unloads: u32, rule: &UnwindRule) {
    if CACHE.load(Relaxed).is_null() {
        let Some(memory) = pages::reserve(SETS * size_of::<Set>()) else { return };
        // Another thread may have mapped the array first. Then that one is used and ours is unmapped.
        if CACHE.compare_exchange(std::ptr::null_mut(), memory.as_ptr().cast(), Release, Relaxed).is_err() {
            // SAFETY: the memory was just reserved, and no other thread has its address.
            unsafe { pages::release(memory, SETS * size_of::<Set>()) };
        }
    }
    let Some(Set(ways)) = set(state) else { return };
    let free = ways.iter().find(|slot| slot.words.iter().all(|word| word.load(Relaxed) == 0));
    // Any bit of the address can choose the slot to overwrite.
    let Some(slot) = free.or_else(|| ways.get(state.ip >> 3 & 1)) else { return };
    let words = rule.pack();
    let [a, b, c] = words;
    slot.key.store(key(state, unloads) ^ a ^ b.rotate_left(1) ^ c.rotate_left(2), Relaxed);
    for (slot_word, word) in slot.words.iter().zip(words) {
        slot_word.store(word, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::{Base, BaseOffset, FrameRule};
    use super::*;

    fn cached_rule(state: &FrameRegisters, unloads: u32) -> Option<UnwindRule> {
        let rule = rule(state, Some(unloads));
        (rule != UnwindRule::Guess { is_in_object: false, follows_call: false }).then_some(rule)
    }

    #[test]
    fn rules_are_cached_until_an_object_is_unloaded() {
        // No object contains these addresses, so an uncached rule is a guess.
        let state = |n: usize| FrameRegisters { ip: 0x1000_0000 + n * 4, sp: n, bp: n, exact: false };
        let rule = |n: i32| {
            UnwindRule::Frame(FrameRule {
                cfa: BaseOffset { base: Base::Sp, offset: n },
                indirect: false,
                return_address: BaseOffset { base: Base::Cfa, offset: -8 },
                bp: None,
                signal: false,
                follows_call: true,
            })
        };
        for n in 0..20_000 {
            insert(&state(n), 7, &rule(n as i32));
        }
        let found =
            (0..20_000).filter(|n| cached_rule(&state(*n), 7).inspect(|r| assert_eq!(*r, rule(*n as i32))).is_some());
        assert!(found.count() > SETS * 2 * 8 / 10);
        assert!((0..20_000).all(|n| cached_rule(&state(n), 8).is_none()));
        let exact = |n| FrameRegisters { exact: true, ..state(n) };
        assert!((0..20_000).all(|n| cached_rule(&exact(n), 7).is_none()));
    }
}
