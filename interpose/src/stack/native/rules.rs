//! The rules of code addresses that were met before: one cache a process, without a lock.
//!
//! A cache of bounded size in front of the slow way ([`super::cfi`]): two ways a set, old rules are written over. Each slot
//! holds its key combined (exclusive or) with its value, so that a slot that is being written, or was written by
//! two threads at once, is the rule of no address. A rule is found under the number of unloads that it was made under, so it is
//! forgotten when an object is unloaded: another one may come to lie at the same address.

use std::sync::atomic::{
    AtomicPtr, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use super::super::digest::fold;
use super::super::pages;
use super::memory::has_room;
use super::rule::{Rule, State};
use super::{cfi, objects};

const SETS: usize = 1 << 12;

#[repr(C, align(64))]
struct Set([Slot; 2]);

/// The key combined with the words of the rule, then these. All zero: empty.
#[repr(C)]
struct Slot {
    key: AtomicU64,
    words: [AtomicU64; 3],
}

static CACHE: AtomicPtr<Set> = AtomicPtr::new(std::ptr::null_mut());

/// Addresses have 47 bits; the rest of the word holds the number of unloads, as far as it fits.
fn key(state: &State, unloads: u32) -> u64 {
    state.ip as u64 ^ u64::from(state.exact) << 47 ^ u64::from(unloads) << 48
}

fn set(state: &State) -> Option<&'static Set> {
    let sets = CACHE.load(Acquire);
    let index = fold(state.ip as u64, 0x9E37_79B9_7F4A_7C15) as usize % SETS;
    // SAFETY: null, or an array of `SETS` zeroed sets that is never unmapped.
    (!sets.is_null()).then(|| unsafe { &*sets.add(index) })
}

/// The rule of a frame. `unloads`: how many objects were unloaded, `None` while one is being unloaded.
#[inline]
pub(super) fn rule(state: &State, unloads: Option<u32>) -> Rule {
    if let Some(unloads) = unloads
        && let Some(Set(ways)) = set(state)
    {
        let key = key(state, unloads);
        for slot in ways {
            let [a, b, c] = &slot.words;
            let words = [a.load(Relaxed), b.load(Relaxed), c.load(Relaxed)];
            let [a, b, c] = words;
            if slot.key.load(Relaxed) ^ a ^ b.rotate_left(1) ^ c.rotate_left(2) == key
                && let Some(rule) = Rule::unpack(words)
            {
                return rule;
            }
        }
    }
    learn(state, unloads)
}

#[cold]
#[inline(never)]
fn learn(state: &State, unloads: Option<u32>) -> Rule {
    if !has_room() {
        return Rule::Unsupported;
    }
    let lookup = state.lookup();
    let rule = objects::with_code_at(lookup, |object| cfi::rule(object, lookup, state.ip))
        .unwrap_or(Rule::Guess { known: false, called: false });
    // Code that no object has may give way to an object without anybody noticing.
    let lasting = !matches!(rule, Rule::Guess { known: false, .. });
    if let Some(unloads) = unloads.filter(|_| lasting) {
        insert(state, unloads, &rule);
    }
    rule
}

fn insert(state: &State, unloads: u32, rule: &Rule) {
    if CACHE.load(Relaxed).is_null() {
        let Some(memory) = pages::reserve(SETS * size_of::<Set>()) else { return };
        // Another thread may have been faster: its array is used, and ours, which is untouched, given back.
        if CACHE.compare_exchange(std::ptr::null_mut(), memory.as_ptr().cast(), Release, Relaxed).is_err() {
            // SAFETY: reserved above, known to nobody.
            unsafe { pages::release(memory, SETS * size_of::<Set>()) };
        }
    }
    let Some(Set(ways)) = set(state) else { return };
    let free = ways.iter().find(|slot| slot.words.iter().all(|word| word.load(Relaxed) == 0));
    // Any bit will do to choose whom to write over.
    let Some(slot) = free.or_else(|| ways.get(state.ip >> 3 & 1)) else { return };
    let words = rule.pack();
    let [a, b, c] = words;
    slot.key.store(key(state, unloads) ^ a ^ b.rotate_left(1) ^ c.rotate_left(2), Relaxed);
    for (place, word) in slot.words.iter().zip(words) {
        place.store(word, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::{Base, Frame, Place};
    use super::*;

    fn known(state: &State, unloads: u32) -> Option<Rule> {
        let rule = rule(state, Some(unloads));
        (rule != Rule::Guess { known: false, called: false }).then_some(rule)
    }

    #[test]
    fn rules_are_remembered_until_something_is_unloaded() {
        // Addresses that no object has: what is not in the cache is a guess.
        let state = |n: usize| State { ip: 0x1000_0000 + n * 5, sp: n, bp: n, exact: false };
        let rule = |n: i32| {
            Rule::Frame(Frame {
                cfa: Place { base: Base::Sp, offset: n },
                indirect: false,
                return_address: Place { base: Base::Cfa, offset: -8 },
                bp: None,
                signal: false,
                called: true,
            })
        };
        for n in 0..20_000 {
            insert(&state(n), 7, &rule(n as i32));
        }
        let found = (0..20_000).filter(|n| known(&state(*n), 7).inspect(|r| assert_eq!(*r, rule(*n as i32))).is_some());
        assert!(found.count() > SETS * 2 * 8 / 10);
        assert!((0..20_000).all(|n| known(&state(n), 8).is_none()));
        let exact = |n| State { exact: true, ..state(n) };
        assert!((0..20_000).all(|n| known(&exact(n), 7).is_none()));
    }
}
